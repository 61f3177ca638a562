"""An existing Triton model repository → an InferenceService that renders back to equivalent configurations. Pure.

Each field of a config.pbtxt becomes fields of the spec, or data in the model's `config` where no field says it. What
the operator's own validation then refuses is taken out, as little as will do; what is rendered back is compared with
the original in normal form (`normalform`), and each value that differs is named. No rule stands here a second time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from conch import names
from conch.api.inferenceservice import InvalidSpec, parse_service
from conch.api.places import Step, field_path
from conch.api.scaling import QueueDepth
from conch.api.shown import shown
from conch.triton.backends import BACKENDS
from conch.triton.fragments import FRAGMENTS, Origin, format_of, is_ensemble, model_of, suffix_format
from conch.triton.modelconfig import from_pbtxt, model_config, to_pbtxt
from conch.triton.normalform import changes, normal_form

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from conch.triton.backends import Format

Service = dict[str, Any]

MAX_MODELS: Final = 16
_MAX_ROUNDS: Final = 400


class UnreadableConfigError(ValueError):
    """A config.pbtxt can't be parsed; the message names line, column and what is wrong."""

    def __init__(self, line: int, column: int, words: str) -> None:
        super().__init__(words)
        self.line = line
        self.column = column


class NotImportableError(ValueError):
    """The repository as a whole can't become a service; the message names the reason and the fix."""


@dataclass(frozen=True)
class Folder:
    """One model's folder, as it lies in the repository."""

    name: str
    config: str | None
    """The text of its config.pbtxt; None where Triton is to find everything in the model."""
    versions: Mapping[int, tuple[str, ...]]
    """The names in each numbered folder."""
    files: frozenset[str] = frozenset()
    """Files beside the versions, relative to the folder: labels, warm-up data."""


@dataclass(frozen=True)
class Difference:
    """Something of the original that the service doesn't have."""

    model: str
    field: str
    """Of ModelConfig, or of the spec."""
    words: str

    def __str__(self) -> str:
        """One line."""
        return f"{self.model}: {self.field}: {self.words}"


@dataclass
class Imported:
    """The service, and what to know about it."""

    service: Service
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is equivalent, yet decided here: kinds of instances, guessed formats."""


def parse_config(text: str) -> Any:
    """The message of a config.pbtxt as people write it. Raises UnreadableConfigError."""
    try:
        return from_pbtxt(text)
    except text_format.ParseError as error:
        line, column = error.GetLine() or 1, error.GetColumn() or 1
        # Without the position, which is told apart, and the line itself.
        words = re.sub(r"^\d+:\d+ : ('.*': )?", "", str(error), flags=re.DOTALL).removesuffix(".")
        named = re.search(r"no value named (\w+)$", words)
        if named and f"TYPE_{named[1]}" in pb.DataType.keys():  # noqa: SIM118 - protobuf's enumerations aren't maps
            words = f"{words}; write TYPE_{named[1]}"
        lines = text.splitlines()
        if line <= len(lines) and "${" in lines[line - 1]:
            words = "holds a placeholder ${…} of a template; fill the template first (TensorRT-LLM's fill_template.py)"
        raise UnreadableConfigError(line, column, words) from None


def related(folders: Sequence[Folder]) -> list[list[Folder]]:
    """The models in groups that must be served together: an ensemble with all its members."""
    index = {folder.name: number for number, folder in enumerate(folders)}
    group = list(range(len(folders)))

    def root(number: int) -> int:
        while group[number] != number:
            number = group[number]
        return number

    for folder in folders:
        config = parse_config(folder.config or "")
        for step in config.ensemble_scheduling.step:
            if step.model_name in index:
                one, other = root(index[folder.name]), root(index[step.model_name])
                group[max(one, other)] = min(one, other)
    found: dict[int, list[Folder]] = {}
    for number, folder in enumerate(folders):
        found.setdefault(root(number), []).append(folder)
    return list(found.values())


def import_service(
    folders: Sequence[Folder],
    *,
    name: str,
    sources: Mapping[str, Mapping[str, Any]],
    accelerators: int | None = None,
) -> Imported:
    """One service of these models.

    Args:
        folders: the models.
        name: metadata.name of the service.
        sources: the `source` of each model by name; an ensemble needs none.
        accelerators: accelerator.count; None: from the instance groups.

    Raises:
        UnreadableConfigError: a config.pbtxt is wrong.
        NotImportableError: the service as a whole is refused, for a reason that no model is at fault for.
    """
    if not 1 <= len(folders) <= MAX_MODELS:
        raise NotImportableError(
            f"the repository holds {len(folders)} models and a service holds 1 to {MAX_MODELS}; add --each, which "
            "makes a service of each model (an ensemble together with its members)"
        )
    drafts = [_Draft(folder, sources.get(folder.name)) for folder in folders]
    return _Import(drafts, name, accelerators).run()


class _Draft:
    """One model on its way: its spec, and what had to be taken out of it."""

    def __init__(self, folder: Folder, source: Mapping[str, Any] | None) -> None:
        self.folder = folder
        self.config = parse_config(folder.config or "")
        newest = max(folder.versions, default=None)
        files = folder.versions[newest] if newest is not None else ()
        self.format: Format = format_of(self.config, files)
        self.model = model_of(self.config, Origin(folder.name, self.format))
        if self.format != "Ensemble" and source is not None:
            self.model = {**_first(self.model, "name", "format"), "source": dict(source), **self.model}
        if (file := self._odd_file(files)) is not None:
            self.model["file"] = file
        self.removed: dict[tuple[Step, ...], str] = {}
        """Path below the model → why it was taken out."""

    def _odd_file(self, files: Sequence[str]) -> str | None:
        """The model's file where it has a name of its own and nothing says so: Triton wants it said."""
        if self.config.default_model_filename or self.format in {"Ensemble", "Auto"}:
            return None
        if BACKENDS[self.format].file in files:
            return None
        if self.format == "PyTorch" and "model.py" in files:
            return "model.py"  # where PyTorch's Python runtime looks, too (pytorch_backend, src/model.py)
        if self.config.backend or self.config.platform:
            return None
        return next((name for name in files if suffix_format(name) == self.format), None)

    def normal(self, config: Any, *, gpu: bool) -> Any:
        """A configuration of this model in normal form."""
        return normal_form(config, self.folder.name, self.format, gpu=gpu)

    def say_counts(self, *, gpu: bool) -> None:
        """Write out how many copies Triton starts where the configuration says no number, if it isn't one."""
        said = self.config.instance_group
        for index, group in enumerate(self.normal(self.config, gpu=gpu).instance_group):
            if group.count > 1 and not (said and said[index].count):
                several = self.model.get("instanceGroups")
                (several[index] if several else self.model.setdefault("instances", {}))["count"] = group.count

    def reason(self, path: str) -> str | None:
        """Why a field of the message isn't as it was."""
        top = re.split(r"[.\[]", path, maxsplit=1)[0]
        keys = FRAGMENTS[top].keys if top in FRAGMENTS else ("config",)
        return next((words for way, words in self.removed.items() if way[0] in keys), None)


class _Import:
    """The search for a service that is valid: what is refused is taken out, as little of it as will do."""

    def __init__(self, drafts: Sequence[_Draft], name: str, accelerators: int | None) -> None:
        self._drafts = list(drafts)
        self._name = name
        self._left_out: list[Difference] = []
        self._notes: list[str] = []
        self._count = self._accelerators() if accelerators is None else accelerators
        for draft in self._drafts:
            draft.say_counts(gpu=self._count > 0)

    def run(self) -> Imported:
        """Until the operator has nothing to say against it; then compare."""
        for _ in range(_MAX_ROUNDS):
            problems = _problems(self._service())
            if not problems:
                break
            # One at a time: the others may follow from the first.
            self._give_way(problems[0])
            if not self._drafts:
                reasons = "; ".join(str(difference) for difference in self._left_out)
                raise NotImportableError(f"no model can be carried ({reasons})")
        else:
            raise NotImportableError(f"too much of it is refused, first {_problems(self._service())[0]}")
        service = self._service()
        configs = _configs(service)
        return Imported(service, [*self._left_out, *self._differences(configs)], [*self._notes, *self._told()])

    def _service(self) -> Service:
        models = [draft.model for draft in self._drafts]
        spec: dict[str, Any] = {"models": models}
        runtime: dict[str, Any] = {}
        if any(model.get("responseCache") for model in models):
            runtime["responseCache"] = {"local": {"size": "64Mi"}}
        if runtime:
            spec["runtime"] = runtime
        spec["accelerator"] = {"count": self._count}
        queues = [queue for model in models for queue in _queues(model)]
        smallest = min((queue["maxSize"] for queue in queues if "maxSize" in queue), default=None)
        if smallest is not None and smallest <= _DEFAULT_TARGET:
            # As many as the default could never wait in it.
            spec["scaling"] = {"queueDepth": {"target": smallest / 2}}
        return {
            "apiVersion": names.API_VERSION,
            "kind": names.SERVICE_KIND,
            "metadata": {"name": self._name},
            "spec": spec,
        }

    def _accelerators(self) -> int:
        """As many as the instance groups name, one where any may use one, none where all are on the CPU."""
        needed, either = 0, []
        for draft in self._drafts:
            if draft.format == "Ensemble":
                continue
            groups = list(draft.config.instance_group)
            kinds = {group.Kind.Name(group.kind) for group in groups} or {"KIND_AUTO"}
            numbers = [number for group in groups for number in group.gpus]
            row = BACKENDS[draft.format]
            automatic = "KIND_AUTO" in kinds and row.instance_kind is None and not numbers
            if numbers:
                needed = max(needed, max(numbers) + 1)
            elif automatic or kinds & {"KIND_GPU", "KIND_MODEL"} or not row.cpu:
                needed = max(needed, 1)
            if automatic and row.cpu:
                either.append(draft.folder.name)
        if either:
            self._notes.append(
                f"{', '.join(either)}: instance_group says no kind; Triton would take a GPU where there is one, and so "
                "it is written: add --accelerators=0 for a service on CPUs"
            )
        return needed

    def _give_way(self, problem: str) -> None:
        """Take out what a problem is about."""
        way = field_path(problem)
        words = f"the spec says: {problem}"
        if len(way) < _BELOW_MODEL or way[:2] != ("spec", "models") or not isinstance(way[2], int):
            self._search(problem, words, range(len(self._drafts)))
            return
        index, key = way[2], str(way[3])
        draft, path = self._drafts[index], way[3:]
        if key == "source":
            raise NotImportableError(f"{problem}; correct --source-prefix")
        if key in {"name", "steps", "format"}:
            self._leave_out(index, words)
            return
        # What is required and isn't there: its parent can't stay without it.
        path = _ways_down(draft.model, path)
        if path:
            self._take_out(draft, path, problem, words)
        else:
            self._search(problem, words, [index])

    def _take_out(self, draft: _Draft, path: tuple[Step, ...], problem: str, words: str) -> None:
        """Of a list or map only the entries at fault, where the others are fine without them."""
        parent, last = _parent(draft.model, path), path[-1]
        value = parent[last]
        draft.removed.setdefault(path, words)
        if isinstance(value, list | dict) and 1 < len(value) <= _MAX_THINNED:
            subject, keys = _subject(problem), list(value) if isinstance(value, dict) else list(range(len(value)))
            kept: list[Any] = []
            for key in keys:
                parent[last] = _only(value, [*kept, key])
                if subject not in self._subjects():
                    kept.append(key)
            parent[last] = _only(value, kept)
            if 0 < len(kept) < len(keys):
                return
        del parent[last]
        # An empty list says no more than none, nor does any part of the raw data that held only this.
        while len(path) > 1 and not parent and (isinstance(path[-1], int) or path[0] == "config"):
            path = path[:-1]
            parent = _parent(draft.model, path)
            del parent[path[-1]]

    def _search(self, problem: str, words: str, indices: Iterable[int]) -> None:
        """Find the part without which a problem is gone, where its own path names one that isn't there."""
        subject = _subject(problem)
        for index in indices:
            draft = self._drafts[index]
            for key in reversed([key for key in draft.model if key not in _ALWAYS]):
                kept = draft.model
                draft.model = {name: value for name, value in kept.items() if name != key}
                if subject not in self._subjects():
                    draft.removed.setdefault((key,), words)
                    return
                draft.model = kept
        raise NotImportableError(problem)

    def _subjects(self) -> set[str]:
        return {_subject(problem) for problem in _problems(self._service())}

    def _leave_out(self, index: int, words: str) -> None:
        draft = self._drafts.pop(index)
        self._left_out.append(Difference(draft.folder.name, "the whole model", words))

    def _differences(self, configs: Mapping[str, Any]) -> Iterator[Difference]:
        for draft in self._drafts:
            model, gpu = draft.folder.name, self._count > 0
            named = str(draft.config.name)
            if named not in {"", model}:
                yield Difference(model, "name", f"is {shown(named)}, but the folder and so the model is called {model}")
            before, after = draft.normal(draft.config, gpu=gpu), draft.normal(configs[model], gpu=gpu)
            for change in changes(before, after):
                if change.path == "default_model_filename" and not change.before and "file" in draft.model:
                    continue  # it says what Triton would have to guess
                why = draft.reason(change.path)
                yield Difference(
                    model,
                    change.path,
                    f"is {_said(change.before)}, becomes {_said(change.after)}{f' ({why})' if why else ''}",
                )

    def _told(self) -> Iterator[str]:
        """What is worth a look although nothing is lost."""
        for draft in self._drafts:
            folder, config = draft.folder, draft.config
            if not (config.backend or config.platform or is_ensemble(config)):
                yield f"{folder.name}: no backend is named; by its files it is of format {draft.format}"
            if not folder.versions and draft.format != "Ensemble":
                yield f"{folder.name}: has no numbered version folder; its files become version 1"
            for file in _files_of(config):
                if file not in folder.files:
                    yield f"{folder.name}: config.pbtxt names the file {shown(file)}, which isn't in the folder"
            for key, value in draft.model.get("parameters", {}).items():
                if value.startswith("/") and not value.startswith("/models/"):
                    yield (
                        f"{folder.name}: the parameter {key} names {shown(value)}, which no pod has unless the image "
                        f"does: put it into the model's folder, which is /models/{folder.name} in the pod"
                    )
            if "config" in draft.model:
                fields = ", ".join(sorted(draft.model["config"]))
                yield f"{folder.name}: no field of the spec says {fields}, so config holds it as data"
            if draft.model.get("responseCache"):
                yield f"{folder.name}: uses the response cache, so one of 64Mi is added: see runtime.responseCache"


def _problems(service: Service) -> list[str]:
    """Everything that the operator would refuse."""
    try:
        parse_service(service)
    except InvalidSpec as error:
        return error.problems
    return []


def _configs(service: Service) -> dict[str, Any]:
    """The configuration of each model as Triton will read it: printed, and parsed again."""
    spec = parse_service(service)
    gpu = spec.accelerator.count > 0
    return {model.name: from_pbtxt(to_pbtxt(model_config(model, gpu=gpu))) for model in spec.models}


def _queues(model: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    queue = model.get("queue", {})
    return [queue, *queue.get("levels", [])]


_DEFAULT_TARGET: Final = QueueDepth().target
_BELOW_MODEL: Final = 4
"""Steps of spec.models[0].x."""
_MAX_THINNED: Final = 256
_ALWAYS: Final = frozenset({"name", "format", "source"})


def _ways_down(data: Any, path: Sequence[Step]) -> tuple[Step, ...]:
    """The part of a path that is there."""
    found: list[Step] = []
    for step in path:
        there = step < len(data) if isinstance(data, list) and isinstance(step, int) else None
        if not (there if there is not None else isinstance(data, dict) and step in data):
            break
        found.append(step)
        data = data[step]
    return tuple(found)


def _parent(model: dict[str, Any], path: Sequence[Step]) -> Any:
    here: Any = model
    for step in path[:-1]:
        here = here[step]
    return here


def _only(value: Any, keys: Sequence[Any]) -> Any:
    return {key: value[key] for key in keys} if isinstance(value, dict) else [value[key] for key in keys]


def _first(fields: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: fields[key] for key in keys}


def _said(value: Any) -> str:
    if isinstance(value, dict) and not value:
        return "there and empty"
    return "unset" if value in (None, "", []) else shown(value)


def _subject(problem: str) -> str:
    """A problem without the value that it quotes, which changes as parts are taken out."""
    return problem.partition(" (got ")[0]


def _files_of(config: Any) -> Iterator[str]:
    """Files beside the versions that a configuration names."""
    for output in config.output:
        if output.label_filename:
            yield output.label_filename
    for warmup in config.model_warmup:
        for key in sorted(warmup.inputs):
            if warmup.inputs[key].input_data_file:
                yield f"warmup/{warmup.inputs[key].input_data_file}"
    for state in config.sequence_batching.state:
        for initial in state.initial_state:
            if initial.data_file:
                yield f"initial_state/{initial.data_file}"
