"""The command `conch import`: an existing Triton model repository → InferenceServices. Reads folders."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from enum import StrEnum
from pathlib import Path  # noqa: TC003 - typer reads it at run time
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from conch.triton.importing import Folder, Imported

DIFFERENT: Final = 1
UNREADABLE: Final = 2
MAX_CONFIG_BYTES: Final = 4 * 2**20
MAX_FILES: Final = 10_000

_VERSION: Final = re.compile(r"[1-9][0-9]*", re.ASCII)
_FOLDER_SCHEMES: Final = ("s3://", "gs://", "pvc://", "image://")
_FLOW_WIDTH: Final = 100


class Form(StrEnum):
    """How the services are written."""

    YAML = "yaml"
    JSON = "json"


def import_repository(
    repository: Annotated[
        Path, typer.Argument(help="A model repository: a folder of models, each with versions and config.pbtxt.")
    ],
    *,
    source_prefix: Annotated[
        str,
        typer.Option(
            help="Where the repository lies for the cluster: s3://BUCKET/PATH, gs://BUCKET/PATH, pvc://CLAIM/PATH or "
            "image://REFERENCE#/PATH; each model's folder name is added."
        ),
    ] = "pvc://models",
    name: Annotated[str | None, typer.Option(help="metadata.name. Default: from the folder's name.")] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="metadata.namespace. Default: none.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Only this model, and what it needs; may be given several times.")
    ] = None,
    each: Annotated[
        bool, typer.Option("--each", help="A service of each model, an ensemble together with its members.")
    ] = False,
    accelerators: Annotated[
        int | None, typer.Option(min=0, help="accelerator.count. Default: from the instance groups.")
    ] = None,
    config_name: Annotated[
        str | None,
        typer.Option(help="Read configs/NAME.pbtxt where a model has it, as Triton's --model-config-name does."),
    ] = None,
    digests: Annotated[
        bool, typer.Option("--digests", help="Compute each source's digest, which the operator then verifies.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="End with 1 when anything differs.")] = False,
    output: Annotated[Form, typer.Option(help="yaml or json.")] = Form.YAML,
) -> None:
    """Turn a Triton model repository into InferenceServices that render back to the same config.pbtxt files.

    The result is checked with the operator's rules and rendered; every value that comes out different is named, on
    standard error and in comments. Nothing in the repository is changed. See what comes out: conch import DIR | conch
    render --what config -

    Exit codes: 0 done; 1 differences, with --strict; 2 a file or an argument can't be read or used.
    """
    from conch.cli.documents import UnreadableError
    from conch.triton.importing import NotImportableError

    if not source_prefix.startswith(_FOLDER_SCHEMES):
        words = "https and oci name one model, so set the uris by hand"
        _fail(f"--source-prefix {source_prefix}: must begin with {', '.join(_FOLDER_SCHEMES)}; {words}")
    found: list[Imported] = []
    failed: list[str] = []
    try:
        groups = _chosen(list(read_repository(repository, config_name)), model or [], each=each, name=name)
        for group in groups:
            wanted = name or _unique(_heading(group) if each else repository.resolve().name, found)
            sources = _sources(repository, group, source_prefix, digests=digests)
            with _noted(group, failed):
                found.append(_import(group, wanted, sources, accelerators))
    except (UnreadableError, NotImportableError) as error:
        _fail(str(error))
    for words in failed:
        sys.stderr.write(f"difference: {words}\n")
    if not found:
        raise typer.Exit(UNREADABLE)
    for one in found:
        if namespace is not None:
            one.service["metadata"]["namespace"] = namespace
    _write(found, output)
    if strict and (failed or any(one.differences for one in found)):
        raise typer.Exit(DIFFERENT)


def read_repository(repository: Path, config_name: str | None = None) -> Iterator[Folder]:
    """Every model of a repository, in the order of names; folders that hold none are left out, and told.

    Raises UnreadableError.
    """
    from conch.cli.documents import UnreadableError

    try:
        children = sorted(repository.iterdir())
    except OSError as error:
        fix = "name a folder that holds a folder for each model"
        raise UnreadableError(f"{repository}: can't be read ({error.strerror}); {fix}") from None
    models = [child for child in children if child.is_dir() and not child.name.startswith(".")]
    if (repository / "config.pbtxt").exists() or (models and all(_VERSION.fullmatch(child.name) for child in models)):
        raise UnreadableError(f"{repository}: is a single model's folder; name the folder above it, and --model")
    folders = [_folder(child, config_name) for child in models]
    for folder in folders:
        if folder.config is not None or folder.versions:
            yield folder
        else:
            sys.stderr.write(
                f"note: {folder.name}: holds neither config.pbtxt nor a numbered folder, so it is no model\n"
            )
    if all(folder.config is None and not folder.versions for folder in folders):
        raise UnreadableError(f"{repository}: holds no model; name a folder that holds a folder for each model")


def _folder(path: Path, config_name: str | None) -> Folder:
    from conch.cli.documents import UnreadableError
    from conch.triton.importing import Folder, UnreadableConfigError, parse_config

    try:
        versions = {
            int(child.name): tuple(sorted(entry.name for entry in child.iterdir()))
            for child in path.iterdir()
            if child.is_dir() and _VERSION.fullmatch(child.name)
        }
        other = path / "configs" / f"{config_name}.pbtxt"
        config_path = other if config_name is not None and other.is_file() else path / "config.pbtxt"
        config = _config(config_path)
        files = _files_beside(path)
    except OSError as error:
        raise UnreadableError(f"{error.filename}: can't be read ({error.strerror}); make it readable") from None
    if config is not None:
        try:
            parse_config(config)
        except UnreadableConfigError as error:
            place = f"{config_path}:{error.line}:{error.column}"
            raise UnreadableError(f"{place}: {error}; correct it, as Triton would refuse it too") from None
    return Folder(path.name, config, versions, files)


def _config(path: Path) -> str | None:
    from conch.cli.documents import UnreadableError

    if not path.exists():
        return None
    with path.open("rb") as file:
        content = file.read(MAX_CONFIG_BYTES + 1)
    if len(content) > MAX_CONFIG_BYTES:
        raise UnreadableError(f"{path}: is larger than {MAX_CONFIG_BYTES // 2**20} MiB; it is no config.pbtxt")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UnreadableError(f"{path}:{line}: is not UTF-8 text; save it as UTF-8") from None


def _files_beside(path: Path) -> frozenset[str]:
    """Files of the model's folder that are in no version, as far as a configuration may name them."""
    found: set[str] = set()
    for child in path.iterdir():
        if child.is_file():
            found.add(child.name)
        elif child.is_dir() and not _VERSION.fullmatch(child.name):
            for entry in child.rglob("*"):
                if len(found) < MAX_FILES and entry.is_file():
                    found.add(entry.relative_to(path).as_posix())
    return frozenset(found)


@contextlib.contextmanager
def _noted(group: Sequence[Folder], failed: list[str]) -> Iterator[None]:
    """One group that can't be imported doesn't keep the others from it."""
    from conch.triton.importing import NotImportableError

    try:
        yield
    except NotImportableError as error:
        failed.append(f"{', '.join(folder.name for folder in group)}: {error}")


def _chosen(folders: Sequence[Folder], models: Sequence[str], *, each: bool, name: str | None) -> list[list[Folder]]:
    """The models in groups, each of which becomes one service."""
    from conch.triton.importing import NotImportableError, related

    known = {folder.name for folder in folders}
    unknown = [name for name in models if name not in known]
    if unknown:
        raise NotImportableError(f"--model {unknown[0]}: is not there; use one of {', '.join(sorted(known)[:20])}")
    groups = related(folders)
    if models:
        groups = [group for group in groups if any(folder.name in models for folder in group)]
    if each and name is not None and len(groups) > 1:
        raise NotImportableError(f"--name {name}: is for one service, and these are {len(groups)}; remove it")
    return groups if each else [[folder for group in groups for folder in group]]


def _sources(repository: Path, group: Sequence[Folder], prefix: str, *, digests: bool) -> dict[str, dict[str, Any]]:
    """Where each model lies for the cluster; an ensemble lies nowhere."""
    from conch.triton.fragments import is_ensemble
    from conch.triton.importing import parse_config

    separator = "" if prefix.endswith(("/", "#")) else "/"
    if prefix.startswith("image://") and "#" not in prefix:
        separator = "#/"
    return {
        folder.name: {
            "uri": f"{prefix}{separator}{folder.name}",
            **(_measured(repository / folder.name) if digests else {}),
        }
        for folder in group
        if not is_ensemble(parse_config(folder.config or ""))
    }


def _measured(path: Path) -> dict[str, Any]:
    """The digest of a model's folder, as `conch digest` prints it, and what its engine was built with."""
    from conch.cli.digest import measure
    from conch.cli.documents import UnreadableError
    from conch.storage.errors import FetchError

    try:
        result = measure(path, None)
    except FetchError as error:
        raise UnreadableError(f"{path}: {error}") from None
    except OSError as error:
        raise UnreadableError(f"{error.filename or path}: can't be read ({error.strerror})") from None
    return {"digest": result.digest, **({"engine": result.engine} if result.engine else {})}


def _import(
    group: Sequence[Folder], name: str, sources: Mapping[str, Mapping[str, Any]], accelerators: int | None
) -> Imported:
    from conch.api.inferenceservice import InvalidSpec, parse_service
    from conch.cli.settings import surroundings
    from conch.triton.importing import NotImportableError, import_service
    from conch.workload import offline

    found = import_service(group, name=name, sources=sources, accelerators=accelerators)
    around = surroundings()
    _choose_image(found, around.images.triton)
    spec = parse_service(found.service)
    found.notes += [f"before it is applied: {words}" for words in offline.refusals_of(spec, around)]
    if not any(offline.refusals_of(spec, around)):
        try:
            offline.render(found.service, around)
        except InvalidSpec as error:
            # Nothing that one model is at fault for: together they are too much for a pod.
            raise NotImportableError(f"{error.problems[0]}; add --each, or name models with --model") from None
    return found


def _choose_image(found: Imported, default: str) -> None:
    """The variant of the default image that holds the models' backend, where NVIDIA has one of its own for it."""
    wanted = {_VARIANTS[model["format"]] for model in found.service["spec"]["models"] if model["format"] in _VARIANTS}
    if len(wanted) == 1 and (match := re.fullmatch(r"(.*:\d\d\.\d\d)-py3", default)):
        image = f"{match[1]}-{wanted.pop()}"
        found.service["spec"].setdefault("runtime", {})["image"] = image
        found.notes.append(f"the usual image lacks the models' backend, so runtime.image is {image}")


_VARIANTS: Final = {"vLLM": "vllm-python-py3", "TensorRTLLM": "trtllm-python-py3"}


def _heading(group: Sequence[Folder]) -> str:
    """The model that a group is called after: the ensemble that joins it."""
    from conch.triton.fragments import is_ensemble
    from conch.triton.importing import parse_config

    return next((each.name for each in group if is_ensemble(parse_config(each.config or ""))), group[0].name)


def _unique(text: str, found: Sequence[Imported]) -> str:
    """A service's name that no earlier one has: two folders may differ in what such a name can't hold."""
    taken = {one.service["metadata"]["name"] for one in found}
    name = service_name(text)
    numbered = (f"{name[:_ROOM_FOR_NUMBER]}-{number}" for number in range(2, len(taken) + 3))
    return name if name not in taken else next(each for each in numbered if each not in taken)


_ROOM_FOR_NUMBER: Final = 38


def service_name(text: str) -> str:
    """A name for metadata.name out of a folder's."""
    from conch import names

    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    word = words if words[:1].isalpha() else f"m-{words}".rstrip("-")
    return word[: names.MAX_SERVICE_NAME].rstrip("-")


def _write(found: Sequence[Imported], output: Form) -> None:
    from conch.cli.validate import counted

    for one in found:
        for difference in one.differences:
            sys.stderr.write(f"difference: {difference}\n")
        for note in one.notes:
            sys.stderr.write(f"note: {note}\n")
    count = sum(len(one.differences) for one in found)
    models = sum(len(one.service["spec"]["models"]) for one in found)
    services = counted(len(found), "InferenceService")
    sys.stderr.write(f"{counted(models, 'model')} in {services}, {counted(count, 'difference')}\n")
    if output is Form.JSON:
        content = [
            {
                "service": one.service,
                "differences": [vars(difference) for difference in one.differences],
                "notes": one.notes,
            }
            for one in found
        ]
        print(json.dumps(content, indent=2))
        return
    for index, one in enumerate(found):
        print("---" if index else "# Made by conch import; see spec.models[].source before it is applied.")
        for words in [*map(str, one.differences), *one.notes]:
            print(f"# {words}")
        print(readable(one.service), end="")


def readable(data: Any) -> str:
    """YAML as a person would write it: short lists and objects on one line."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Blocks, but for what fits on a line."""

        def ignore_aliases(self, _data: Any) -> bool:
            return True

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, indentless and False)

    def sequence(dumper: yaml.SafeDumper, value: list[Any]) -> yaml.Node:
        scalars = all(not isinstance(item, list | dict) for item in value)
        return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=scalars)

    def mapping(dumper: yaml.SafeDumper, value: dict[str, Any]) -> yaml.Node:
        return dumper.represent_mapping("tag:yaml.org,2002:map", value.items(), flow_style=_fits(value))

    Dumper.add_representer(list, sequence)
    Dumper.add_representer(dict, mapping)
    return yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=False, width=1000)


def _fits(value: Mapping[str, Any]) -> bool:
    """Whether an object is short and of no depth to speak of."""
    deep = any(
        isinstance(item, dict) or (isinstance(item, list) and any(isinstance(entry, list | dict) for entry in item))
        for item in value.values()
    )
    return not deep and "format" not in value and len(json.dumps(value).replace('"', "")) <= _FLOW_WIDTH


def _fail(words: str) -> NoReturn:
    sys.stderr.write(f"{words}\n")
    raise typer.Exit(UNREADABLE)
