"""The command `conch validate`: what the operator would refuse, told offline with file, line and fix. Reads files."""

from __future__ import annotations

import difflib
import json
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path  # noqa: TC003 - typer reads it at run time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from conch.cli.documents import Document, Place
    from conch.workload.offline import Surroundings

INVALID: Final = 1
UNREADABLE: Final = 2

_MAX_GROUP: Final = 80
_TOP_LEVEL: Final = ("apiVersion", "kind", "metadata", "spec", "status")


class Form(StrEnum):
    """How findings are written."""

    TEXT = "text"
    JSON = "json"
    GITHUB = "github"


def validate(
    paths: Annotated[
        list[Path],
        typer.Argument(help="YAML or JSON files, folders (searched to the bottom), or - for standard input."),
    ],
    output: Annotated[
        Form,
        typer.Option(help="text: FILE:LINE:COLUMN: FIELD: what and fix; json; github: annotations of a check run."),
    ] = Form.TEXT,
) -> None:
    """Check InferenceServices offline: with the operator's own rules and words, and with the line of each mistake.

    Objects of other kinds are skipped and counted. Nothing is sent anywhere, no cluster is needed; what only a cluster
    can tell (a missing claim, Secret or node) shows in the resource's conditions.

    Exit codes: 0 all valid; 1 something is invalid; 2 a file or an argument can't be read.
    """
    from conch.cli.settings import surroundings

    report = check(paths, surroundings())
    _WRITE[output](report)
    if report.unreadable:
        raise typer.Exit(UNREADABLE)
    if report.findings:
        raise typer.Exit(INVALID)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    place: Place
    message: str
    """With the field at its beginning, where there is one."""
    resource: str | None = None
    """NAMESPACE/NAME or NAME of the resource; None when the file itself is wrong."""
    field: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            "file": self.place.file,
            "line": self.place.line,
            "column": self.place.column,
            "resource": self.resource,
            "field": self.field,
            "message": self.message,
        }


@dataclass
class Report:
    """What was looked at and found."""

    findings: list[Finding] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    services: int = 0
    skipped: int = 0
    """Documents of other kinds."""
    files: int = 0


def check(paths: Sequence[Path], around: Surroundings) -> Report:
    """Check every document of every file; one that can't be read doesn't keep the others from being checked."""
    from conch.cli.documents import STDIN, UnreadableError, files_of, read_documents, read_text

    report = Report()
    seen: dict[tuple[str, str], Place] = {}
    try:
        files = list(files_of(paths))
    except UnreadableError as error:
        report.unreadable.append(str(error))
        return report
    for path in files:
        name = "<stdin>" if path == STDIN else str(path)
        try:
            documents, faults = read_documents(read_text(path), name)
        except UnreadableError as error:
            report.unreadable.append(str(error))
            continue
        report.files += 1
        report.findings += [Finding(fault.place, fault.message) for fault in faults]
        for document in documents:
            if not is_ours(document.data):
                report.skipped += 1
                continue
            report.services += 1
            report.findings += problems_of(document, around)
            report.findings += _repeated(document, seen)
    report.findings.sort(key=lambda found: (found.place.file, found.place.line, found.place.column))
    return report


def is_ours(data: Any) -> bool:
    """Whether a document is meant for Conch: its group says so; KServe, for one, has an InferenceService too."""
    from conch import names

    if not isinstance(data, dict):
        return False
    version = data.get("apiVersion")
    if version is None:
        return data.get("kind") == names.SERVICE_KIND
    group = str(version).partition("/")[0]
    # Also a misspelled one of this kind: skipped, it would pass as valid.
    misspelled = data.get("kind") == names.SERVICE_KIND and difflib.get_close_matches(group[:_MAX_GROUP], [names.GROUP])
    return group == names.GROUP or bool(misspelled)


def problems_of(document: Document, around: Surroundings) -> Iterator[Finding]:
    """Everything that the operator, or the API server's strict check of fields, would refuse of one resource."""
    from conch.api.inferenceservice import InvalidSpec
    from conch.api.places import field_path
    from conch.api.shown import shown
    from conch.workload.offline import render

    resource = resource_name(document.data)
    for field_name in document.data:
        if field_name not in _TOP_LEVEL:
            near = difflib.get_close_matches(field_name, _TOP_LEVEL, n=1)
            words = f"is not a field; {f'did you mean {near[0]}?' if near else 'remove it'}"
            place = document.place((field_name,), key=True)
            yield Finding(place, f"{shown(field_name).strip(chr(34))}: {words}", resource, field_name)
    for field_name in ("apiVersion", "kind"):
        if document.data.get(field_name) is None:
            yield Finding(document.place(), f"{field_name}: is required; add it", resource, field_name)
    try:
        render(document.data, around)
    except InvalidSpec as error:
        for problem in error.problems:
            way = field_path(problem)
            at_fault = problem.partition(": ")[0] if way else None
            place = document.place(way, key=": is not a field" in problem or ": must have keys" in problem)
            yield Finding(place, problem, resource, at_fault)


def resource_name(data: Any) -> str | None:
    """NAMESPACE/NAME, or NAME where no namespace is named; None without a name."""
    metadata = data.get("metadata") if isinstance(data, dict) else None
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        return None
    namespace = metadata.get("namespace")
    return f"{namespace}/{metadata['name']}" if isinstance(namespace, str) else str(metadata["name"])


def _repeated(document: Document, seen: dict[tuple[str, str], Place]) -> Iterator[Finding]:
    """A second resource of the same name in one file: applied together, one overwrites the other."""
    name = resource_name(document.data)
    if name is None:
        return
    place = document.place(("metadata", "name"))
    # Across files the same name is usual: the overlays of one service for several clusters.
    earlier = seen.setdefault((document.file, name), place)
    if earlier is not place:
        message = f"metadata.name: line {earlier.line} has an InferenceService of this name already; rename one"
        yield Finding(place, message, name, "metadata.name")


def _write_text(report: Report) -> None:
    for finding in report.findings:
        print(f"{finding.place}: {finding.message}")
    for words in report.unreadable:
        sys.stderr.write(f"{words}\n")
    invalid = len({(found.place.file, found.resource) for found in report.findings if found.resource is not None})
    skipped = f"; {counted(report.skipped, 'object')} of other kinds skipped" if report.skipped else ""
    problems = f", {counted(len(report.findings), 'problem')}" if report.findings else ""
    checked = f"{counted(report.services, 'InferenceService')} in {counted(report.files, 'file')} checked"
    verdict = f"{invalid} invalid" if invalid else "not all valid" if report.findings else "all valid"
    sys.stderr.write(f"{checked}: {verdict if report.services or report.findings else 'none'}{problems}{skipped}\n")


def _write_json(report: Report) -> None:
    content = {
        "valid": not report.findings and not report.unreadable,
        "checked": report.services,
        "skipped": report.skipped,
        "files": report.files,
        "problems": [finding.to_dict() for finding in report.findings],
        "unreadable": report.unreadable,
    }
    print(json.dumps(content, indent=2))


def _write_github(report: Report) -> None:
    for finding in report.findings:
        place = f"file={_property(finding.place.file)},line={finding.place.line},col={finding.place.column}"
        print(f"::error {place}::{_data(finding.message)}")
    for words in report.unreadable:
        print(f"::error ::{_data(words)}")


_WRITE: Final = {Form.TEXT: _write_text, Form.JSON: _write_json, Form.GITHUB: _write_github}


def _data(text: str) -> str:
    """Escaped as workflow commands want it: a line's end would begin another command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 file, 2 files."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
