"""The command `conch render`: what the operator would create, and each model's config.pbtxt. Reads files."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path  # noqa: TC003 - typer reads it at run time
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from conch.cli.validate import Finding
    from conch.workload.offline import Rendered, Surroundings

INVALID: Final = 1
UNREADABLE: Final = 2


class What(StrEnum):
    """The part to show."""

    OBJECTS = "objects"
    CONFIG = "config"
    PLAN = "plan"
    ALL = "all"


class Form(StrEnum):
    """How it is written."""

    YAML = "yaml"
    JSON = "json"


def render(
    paths: Annotated[list[Path], typer.Argument(help="YAML or JSON files, folders, or - for standard input.")],
    *,
    what: Annotated[
        What,
        typer.Option(
            help="objects: what the operator applies; config: Triton's config.pbtxt of each model; plan: what the init "
            "container does; all: the three."
        ),
    ] = What.OBJECTS,
    output: Annotated[Form, typer.Option(help="yaml (config.pbtxt as text) or json.")] = Form.YAML,
    model: Annotated[str | None, typer.Option(help="Only this model's config or plan.")] = None,
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="For resources that name none.")] = "default",
    fetch_image: Annotated[
        str | None, typer.Option(help="Image of the init container. Default: CONCH_FETCH_IMAGE, as the operator's.")
    ] = None,
    triton_image: Annotated[
        str | None, typer.Option(help="Triton's image where the spec names none. Default: CONCH_TRITON_IMAGE.")
    ] = None,
    pod_monitor: Annotated[
        bool, typer.Option("--pod-monitor", help="As in a cluster with the Prometheus operator: with a PodMonitor.")
    ] = False,
) -> None:
    """Show what the operator would create for InferenceServices, without a cluster; the same input, the same text.

    A Deployment is shown without replicas, which the autoscaler writes. Exit codes: 0 done; 1 a resource is invalid (as
    `conch validate` says it); 2 a file or an argument can't be read.
    """
    from conch.cli.settings import surroundings

    around = surroundings(
        fetch_image=fetch_image, triton_image=triton_image, namespace=namespace, with_pod_monitor=pod_monitor
    )
    rendered = _read(paths, around)
    if model is not None and not any(model in one.configs for _, one in rendered):
        known = sorted({name for _, one in rendered for name in one.configs})
        _fail(f"--model {model}: no resource has it; use one of {', '.join(known)}", UNREADABLE)
    if output is Form.JSON:
        shown = [_as_data(name, one, what, model) for name, one in rendered]
        print(json.dumps(shown[0] if len(shown) == 1 else shown, indent=2))
    else:
        for text in _texts(rendered, what, model):
            print(text, end="")


def _read(paths: Sequence[Path], around: Surroundings) -> list[tuple[str, Rendered]]:
    """Every resource with its name; what is wrong ends the command, told as `conch validate` does."""
    from conch.cli import documents, validate
    from conch.workload import offline

    rendered: list[tuple[str, Rendered]] = []
    findings: list[Finding] = []
    try:
        for path in documents.files_of(paths):
            name = "<stdin>" if path == documents.STDIN else str(path)
            found, faults = documents.read_documents(documents.read_text(path), name)
            findings += [validate.Finding(fault.place, fault.message) for fault in faults]
            for document in found:
                if not validate.is_ours(document.data):
                    continue
                problems = list(validate.problems_of(document, around))
                findings += problems
                if not problems:
                    name = str(validate.resource_name(document.data))
                    rendered.append((name, offline.render(document.data, around)))
    except documents.UnreadableError as error:
        _fail(str(error), UNREADABLE)
    if findings:
        _fail("\n".join(f"{finding.place}: {finding.message}" for finding in findings), INVALID)
    if not rendered:
        _fail("no InferenceService of conch.dev/v1alpha1 was found; name a file that holds one", INVALID)
    return rendered


def _as_data(name: str, one: Rendered, what: What, model: str | None) -> dict[str, Any]:
    parts: dict[str, Any] = {
        "objects": one.objects,
        "plan": _plan(one, model),
        "configs": {key: text for key, text in one.configs.items() if model in {None, key}},
    }
    wanted = {What.OBJECTS: ["objects"], What.PLAN: ["plan"], What.CONFIG: ["configs"], What.ALL: list(parts)}[what]
    return {"resource": name, **{key: parts[key] for key in wanted}}


def _plan(one: Rendered, model: str | None) -> Any:
    plan = json.loads(one.plan.to_json())
    plan["models"] = [item for item in plan["models"] if model in {None, item["name"]}]
    return plan


def _texts(rendered: Sequence[tuple[str, Rendered]], what: What, model: str | None) -> Iterator[str]:
    several = len(rendered) > 1
    for name, one in rendered:
        if what in {What.OBJECTS, What.ALL}:
            for item in one.objects:
                yield f"---\n{_yaml(item)}"
        if what in {What.PLAN, What.ALL}:
            yield f"---\n# the plan of {name}\n{_yaml(_plan(one, model))}"
        if what in {What.CONFIG, What.ALL}:
            configs = [(key, text) for key, text in one.configs.items() if model in {None, key}]
            for key, text in configs:
                # One alone is a file's content as it is; several are told apart.
                alone = what is What.CONFIG and len(configs) == 1 and not several
                yield text if alone else f"# {f'{name}: ' if several else ''}{key}/config.pbtxt\n{text}\n"


def _yaml(data: Any) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Without aliases: what two objects share is written out in both."""

        def ignore_aliases(self, _data: Any) -> bool:
            return True

    return yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=False, width=10_000)


def _fail(words: str, code: int) -> NoReturn:
    sys.stderr.write(f"{words}\n")
    raise typer.Exit(code)
