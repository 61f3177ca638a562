"""The graph of an ensemble, checked as Triton would at load, before anything is loaded. Pure; linear in its size.

Triton's own checks are `ValidateEnsembleSchedulingConfig` and `ValidateEnsembleConfig` (triton-inference-server/core,
`model_config_utils.cc` and `ensemble_utils.cc`): every tensor has one maker, none is unused, types and shapes agree,
batches fit, and no step joins the answers of two decoupled models. What a member's spec leaves to Triton is unknown
here and not judged.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from conch.api.fields import Problem
from conch.api.shown import shown
from conch.api.tensor import VARIES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from conch.api.ensemble import Step
    from conch.api.inferenceservice import InferenceServiceSpec
    from conch.api.model import Model
    from conch.api.tensor import Tensor

_MAX_NAMES: Final = 8
Place = tuple[str | int, ...]


@dataclass(frozen=True)
class _End:
    """One end of a tensor: who makes or reads it, and what is known of it there."""

    what: str
    """In words, such as `steps[1] (resnet)`."""
    data_type: str | None = None
    dims: tuple[int, ...] | None = None
    """Without the batch dimension."""
    batched: bool | None = None
    """Whether a batch dimension comes before dims; None: Triton will find out."""


def check_ensembles(spec: InferenceServiceSpec) -> Iterator[Problem]:
    """Every finding about the service's ensembles, at the step and tensor at fault."""
    models = {model.name: model for model in spec.models}
    for index, model in enumerate(spec.models):
        if model.format == "Ensemble":
            for problem in _Graph(model, models).problems():
                yield Problem(("models", index, *problem.place), problem.words, problem.value)
    yield from _nesting(spec, models)


class _Graph:
    def __init__(self, ensemble: Model, models: Mapping[str, Model]) -> None:
        self._ensemble, self._models = ensemble, models
        self._makers: dict[str, _End] = {}
        self._made_by: dict[str, int] = {}
        self._read: set[str] = set()

    def problems(self) -> Iterator[Problem]:
        ensemble = self._ensemble
        for kind in ("inputs", "outputs"):
            if not getattr(ensemble, kind):
                yield Problem((kind,), "are required for an Ensemble, whose tensors Triton can't find out; add them")
        for tensor in ensemble.inputs:
            self._makers[tensor.name] = self._own(tensor, "the ensemble's inputs")
        members = [self._models.get(step.model) for step in ensemble.steps]
        for index, (step, member) in enumerate(zip(ensemble.steps, members, strict=True)):
            yield from self._member(index, step, member)
            yield from self._outputs(index, step, member)
        for index, (step, member) in enumerate(zip(ensemble.steps, members, strict=True)):
            yield from self._inputs(index, step, member)
        yield from self._ends()
        yield from self._order(members)

    def _own(self, tensor: Tensor, what: str) -> _End:
        # Behind a reshape the ensemble's members see the shape that the ensemble itself has.
        dims = tensor.dims if tensor.reshape is None else tensor.reshape
        return _End(what, tensor.data_type, tuple(dims), bool(self._ensemble.max_batch_size))

    def _member(self, index: int, step: Step, member: Model | None) -> Iterator[Problem]:
        place = ("steps", index)
        if member is None:
            names = ", ".join(sorted(name for name in self._models if name != self._ensemble.name)[:_MAX_NAMES])
            words = f"is no model of this service, which has {names or 'no other'}; add the model or correct the name"
            yield Problem((*place, "model"), words, step.model)
            return
        if member is self._ensemble:
            yield Problem((*place, "model"), "is the ensemble itself; name the model that the step runs", step.model)
            return
        numbers = member.versions.numbers
        if step.version is not None and numbers and step.version not in numbers:
            words = f"is none of the versions of {step.model}, {numbers}; add it there, or correct it"
            yield Problem((*place, "version"), words, step.version)
        largest, wanted = member.max_batch_size, self._ensemble.max_batch_size or 0
        if largest and largest < wanted:
            words = (
                f"must be at most {largest}, the maxBatchSize of {step.model} (steps[{index}]); lower it, or raise "
                "that model's"
            )
            yield Problem(("maxBatchSize",), words, wanted)
        if self._ensemble.response_cache and member.decoupled:
            words = f"doesn't work with {step.model} (steps[{index}]), which is decoupled; remove it"
            yield Problem(("responseCache",), words, True)
        if self._ensemble.response_cache and member.sequence is not None:
            words = f"doesn't work with {step.model} (steps[{index}]), which has sequence; remove it"
            yield Problem(("responseCache",), words, True)

    def _outputs(self, index: int, step: Step, member: Model | None) -> Iterator[Problem]:
        declared = {} if member is None else {tensor.name: tensor for tensor in member.outputs}
        for key, tensor in step.outputs.items():
            place = ("steps", index, "outputs", key)
            if declared and key not in declared:
                yield Problem(place, f"is no output of {step.model}, which has {_names(declared)}; correct the name")
            if tensor in self._makers:
                words = f"tensor {shown(tensor)} is made by {self._makers[tensor].what} too; give each its own name"
                yield Problem(place, words)
                continue
            self._makers[tensor] = _member_end(_named(index, step), declared.get(key), member)
            self._made_by[tensor] = index

    def _inputs(self, index: int, step: Step, member: Model | None) -> Iterator[Problem]:
        declared = {} if member is None else {tensor.name: tensor for tensor in member.inputs}
        for key, tensor in step.inputs.items():
            place = ("steps", index, "inputs", key)
            self._read.add(tensor)
            if declared and key not in declared:
                yield Problem(place, f"is no input of {step.model}, which has {_names(declared)}; correct the name")
            maker = self._makers.get(tensor)
            if maker is None:
                near = difflib.get_close_matches(tensor, self._makers, n=1)
                hint = f"did you mean {near[0]}?" if near else "correct the name, or add an output that makes it"
                words = f"tensor {shown(tensor)} is produced by no step and is no input of the ensemble; {hint}"
                yield Problem(place, words)
                continue
            reader = _member_end(_named(index, step), declared.get(key), member)
            yield from _agree(place, tensor, maker, reader)
        missing = [name for name, tensor in declared.items() if name not in step.inputs and not tensor.optional]
        # A control or a state is no input that a step could map.
        if missing:
            words = f"lack {missing[0]}, an input of {step.model} that isn't optional; add {missing[0]}: TENSOR"
            yield Problem(("steps", index, "inputs"), words)

    def _ends(self) -> Iterator[Problem]:
        ensemble = self._ensemble
        wanted = set()
        for index, tensor in enumerate(ensemble.outputs):
            wanted.add(tensor.name)
            place = ("outputs", index, "name")
            if tensor.name not in self._made_by:
                near = difflib.get_close_matches(tensor.name, self._made_by, n=1)
                hint = f"did you mean {near[0]}?" if near else "add it to a step's outputs, or remove it"
                yield Problem(place, f"is produced by no step; {hint}", tensor.name)
                continue
            reader = self._own(tensor, "the ensemble's outputs")
            yield from _agree(("outputs", index), tensor.name, self._makers[tensor.name], reader)
        for index, own in enumerate(ensemble.inputs):
            if own.name not in self._read:
                yield Problem(("inputs", index, "name"), "is read by no step; read it, or remove it", own.name)
        for index, step in enumerate(ensemble.steps):
            for key, name in step.outputs.items():
                if name not in self._read and name not in wanted and self._made_by.get(name) == index:
                    words = (
                        f"tensor {shown(name)} is read by no step and is no output of the ensemble, which Triton "
                        "refuses; remove the line"
                    )
                    yield Problem(("steps", index, "outputs", key), words)

    def _order(self, members: Sequence[Model | None]) -> Iterator[Problem]:
        """Kahn's order over the steps: what is left waits for itself. Carries which decoupled model answers are of."""
        steps = self._ensemble.steps
        needs = [{self._made_by[name] for name in step.inputs.values() if name in self._made_by} for step in steps]
        readers: list[list[int]] = [[] for _ in steps]
        for index, makers in enumerate(needs):
            for maker in makers:
                readers[maker].append(index)
        waiting = [len(makers) for makers in needs]
        ready = [index for index, count in enumerate(waiting) if count == 0]
        origin: list[int | None] = [None] * len(steps)
        done = 0
        while done < len(ready):
            index = ready[done]
            done += 1
            # An input of the ensemble itself counts as the request's own.
            origins = {origin[maker] for maker in needs[index]}
            if any(name not in self._made_by for name in steps[index].inputs.values()):
                origins.add(None)
            if len(origins) > 1:
                words = (
                    f"reads tensors of different numbers of answers, because {_sources(origins, steps)} differ; let it "
                    "read from one of them only"
                )
                yield Problem(("steps", index, "inputs"), words)
            member = members[index]
            origin[index] = index if member is not None and member.decoupled else next(iter(origins), None)
            for reader in readers[index]:
                waiting[reader] -= 1
                if waiting[reader] == 0:
                    ready.append(reader)
        ends = {origin[self._made_by[end.name]] for end in self._ensemble.outputs if end.name in self._made_by}
        if len(ready) == len(steps) and len(ends) > 1:
            words = f"come from different numbers of answers: {_sources(ends, steps)} differ; let one of them make all"
            yield Problem(("outputs",), words)
        if len(ready) < len(steps):
            left = {index for index in range(len(steps)) if waiting[index] > 0}
            circle = _circle(left, needs)
            path = " <- ".join(_named(index, steps[index]) for index in [*circle, circle[0]])
            yield Problem(("steps", circle[0]), f"waits for its own output: {path}; break the circle")


def _named(index: int, step: Step) -> str:
    return f"steps[{index}] ({step.name or step.model})"


def _sources(origins: set[int | None], steps: Sequence[Step]) -> str:
    return " and ".join(
        "the request" if step is None else f"the decoupled {_named(step, steps[step])}"
        for step in sorted(origins, key=str)
    )


def _circle(left: set[int], needs: Sequence[set[int]]) -> list[int]:
    """Steps of which each waits for the next, and the last for the first; every step of `left` waits for another."""
    seen: dict[int, int] = {}
    way: list[int] = []
    here = min(left)
    while here not in seen:
        seen[here] = len(way)
        way.append(here)
        here = min(needs[here] & left)
    return way[seen[here] :]


def _nesting(spec: InferenceServiceSpec, models: Mapping[str, Model]) -> Iterator[Problem]:
    """Ensembles that contain each other: Triton's dependency check, here with the way in the message."""
    finished: set[str] = set()
    for index, model in enumerate(spec.models):
        way: list[tuple[str, Iterator[str]]] = []
        pending = model.name if model.format == "Ensemble" and model.name not in finished else None
        while pending is not None or way:
            if pending is not None:
                way.append((pending, iter(sorted({step.model for step in models[pending].steps}))))
                pending = None
            name, members = way[-1]
            for member in members:
                above = [entry[0] for entry in way]
                # Directly in itself: said at the step already.
                if member in above and member != name:
                    circle = " <- ".join([*above[above.index(member) :], member])
                    yield Problem(("models", index, "steps"), f"contain each other: {circle}; break the circle")
                elif member not in finished and member not in above and _is_ensemble(models.get(member)):
                    pending = member
                    break
            else:
                finished.add(name)
                way.pop()


def _is_ensemble(model: Model | None) -> bool:
    return model is not None and model.format == "Ensemble"


def _member_end(what: str, tensor: Tensor | None, member: Model | None) -> _End:
    if tensor is None or member is None:
        return _End(what)
    # An ensemble's own batch size is never completed by Triton.
    known = member.max_batch_size is not None or member.format == "Ensemble"
    return _End(what, tensor.data_type, tuple(tensor.dims), bool(member.max_batch_size) if known else None)


def _agree(place: Place, tensor: str, maker: _End, reader: _End) -> Iterator[Problem]:
    if maker.data_type is None or reader.data_type is None or maker.dims is None or reader.dims is None:
        return
    if maker.data_type != reader.data_type:
        words = (
            f"tensor {shown(tensor)} is {maker.data_type} in {maker.what} and {reader.data_type} in {reader.what}; "
            "make them the same"
        )
        yield Problem(place, words)
    elif not _same_shape(maker, reader):
        words = (
            f"tensor {shown(tensor)} has dims {list(maker.dims)}{_batch(maker)} in {maker.what} and "
            f"{list(reader.dims)}{_batch(reader)} in {reader.what}; make them the same"
        )
        yield Problem(place, words)


def _batch(end: _End) -> str:
    return " after the batch" if end.batched else ""


def _same_shape(one: _End, other: _End) -> bool:
    """Equal without the batch dimension or with it, as Triton compares; a size of -1 is equal to any."""
    assert one.dims is not None  # noqa: S101 - the only caller looked
    assert other.dims is not None  # noqa: S101
    if _equal(one.dims, other.dims):
        return True
    return any(
        _equal(((VARIES,) * first) + one.dims, ((VARIES,) * second) + other.dims)
        for first in _ways(one.batched)
        for second in _ways(other.batched)
    )


def _ways(batched: bool | None) -> tuple[int, ...]:  # noqa: FBT001 - three values, one of them unknown
    return (0, 1) if batched is None else (int(batched),)


def _equal(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) == len(other) and all(
        first == second or VARIES in {first, second} for first, second in zip(one, other, strict=True)
    )


def _names(declared: Mapping[str, object]) -> str:
    return ", ".join(sorted(declared)[:_MAX_NAMES])
