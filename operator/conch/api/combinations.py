"""What the parts of a model's spec must have in common, and models with their service, beyond what CEL says. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conch.api.fields import Problem
from conch.triton.backends import BACKENDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from conch.api.inferenceservice import InferenceServiceSpec
    from conch.api.instances import InstanceRateLimiter, Instances
    from conch.api.model import Model
    from conch.api.tensor import Tensor
    from conch.api.warmup import Warmup, WarmupInput

Place = tuple[str | int, ...]


def check_model(model: Model) -> Iterator[Problem]:
    """Every finding about one model, at the field at fault."""
    yield from _tensors(model)
    yield from _ordering(model)
    yield from _instances(model)
    yield from _sequence(model)
    yield from _warmup(model)
    if model.config:
        # Late: it needs Triton's message, and most services have no such field.
        from conch.triton.passthrough import check_config

        yield from check_config(model)


def _tensors(model: Model) -> Iterator[Problem]:
    for kind in ("inputs", "outputs"):
        for index, tensor in enumerate(getattr(model, kind)):
            yield from _tensor(model, (kind, index), tensor)
    for index, tensor in enumerate(model.outputs):
        if tensor.label_file is not None and model.format == "Ensemble":
            words = "is not for an Ensemble, which has no folder; set it at the model that makes the tensor"
            yield Problem(("outputs", index, "labelFile"), words, tensor.label_file)


def _tensor(model: Model, place: Place, tensor: Tensor) -> Iterator[Problem]:
    if model.format not in {"TensorRT", "Auto"}:
        for field, used in (("shapeTensor", tensor.shape_tensor), ("nonLinearFormat", tensor.non_linear_format)):
            if used:
                yield Problem((*place, field), "is for format TensorRT; remove it", True)
    if tensor.reshape == [] and model.max_batch_size == 0:
        words = "must not be [] with maxBatchSize 0, which leaves no dimension at all; use [1]"
        yield Problem((*place, "reshape"), words, [])


def _ordering(model: Model) -> Iterator[Problem]:
    if model.batching is None or not model.batching.preserve_ordering or model.queue is None:
        return
    words = "Delay doesn't keep batching.preserveOrdering; use Reject, or set preserveOrdering to false"
    if model.queue.timeout_action == "Delay":
        yield Problem(("queue", "timeoutAction"), words, "Delay")
    for index, level in enumerate(model.queue.levels):
        if level.timeout_action == "Delay":
            yield Problem(("queue", "levels", index, "timeoutAction"), words, "Delay")


def _instances(model: Model) -> Iterator[Problem]:
    backend = BACKENDS[model.format]
    for place, group in _groups(model):
        if group.profiles and model.format not in {"TensorRT", "Auto"}:
            yield Problem((*place, "profiles"), "are for format TensorRT; remove them", group.profiles)
        if group.kind == "CPU" and not backend.cpu and backend.instance_kind != "CPU":
            words = f"must not be CPU, where a {model.format} model can't run; use another kind or remove it"
            yield Problem((*place, "kind"), words, group.kind)
        if group.kind == "GPU" and backend.instance_kind == "CPU" and backend.cpu:
            words = f"must be CPU for format {model.format}, whose backend takes no other; remove it"
            yield Problem((*place, "kind"), words, group.kind)
    if model.instance_groups and all(group.passive for group in model.instance_groups):
        words = "must not all be passive, or nothing answers requests; set passive to false in one"
        yield Problem(("instanceGroups",), words)


def _groups(model: Model) -> Iterator[tuple[Place, Instances]]:
    yield ("instances",), model.instances
    for index, group in enumerate(model.instance_groups):
        yield ("instanceGroups", index), group


def check_service(spec: InferenceServiceSpec) -> Iterator[Problem]:
    """What a model needs of the service: accelerators that are there, resources that are declared."""
    devices = spec.accelerator.devices
    declared: dict[str, int] = {}
    for resource in spec.runtime.rate_limiter.resources if spec.runtime.rate_limiter is not None else ():
        name = resource.name.lower()
        declared[name] = max(declared.get(name, 0), resource.count)
    for index, model in enumerate(spec.models):
        if not devices and not BACKENDS[model.format].cpu:
            words = f"{model.format} needs an accelerator; raise spec.accelerator.count, or use another format"
            yield Problem(("models", index, "format"), words)
        for place, group in _groups(model):
            for number, gpu in enumerate(group.gpus):
                if gpu >= devices:
                    words = f"must be below the pod's number of accelerators, {devices}; lower it, or raise the number"
                    yield Problem(("models", index, *place, "gpus", number), words, gpu)
            # Where none is declared, Triton takes as much as the instance that needs most; else the rest count as 0.
            if declared and group.rate_limiter is not None:
                yield from _resources(("models", index, *place, "rateLimiter"), group.rate_limiter, declared)


def _resources(place: Place, limiter: InstanceRateLimiter, declared: Mapping[str, int]) -> Iterator[Problem]:
    for index, taken in enumerate(limiter.resources):
        have = declared.get(taken.name.lower())
        if have is None:
            words = (
                f"must be one of spec.runtime.rateLimiter.resources, {', '.join(sorted(declared)[:8])}; add it there, "
                "or correct it"
            )
            yield Problem((*place, "resources", index, "name"), words, taken.name)
        elif taken.count > have:
            words = f"must be at most {have}, which is all that spec.runtime.rateLimiter has; lower it"
            yield Problem((*place, "resources", index, "count"), words, taken.count)


def _sequence(model: Model) -> Iterator[Problem]:
    if model.sequence is None:
        return
    inputs = {tensor.name: index for index, tensor in enumerate(model.inputs)}
    outputs = {tensor.name: index for index, tensor in enumerate(model.outputs)}
    for index, control in enumerate(model.sequence.controls):
        if control.tensor in inputs:
            words = (
                f"must not stand under inputs (inputs[{inputs[control.tensor]}]) too, because Triton fills it in; "
                "remove it there"
            )
            yield Problem(("sequence", "controls", index, "tensor"), words, control.tensor)
    for index, state in enumerate(model.sequence.states):
        if state.input_name in inputs:
            words = f"must not stand under inputs (inputs[{inputs[state.input_name]}]) too; remove it there"
            yield Problem(("sequence", "states", index, "inputName"), words, state.input_name)
        if state.output_name in outputs:
            found = model.outputs[outputs[state.output_name]]
            if found.data_type != state.data_type:
                words = f"must be that of the output {state.output_name}, {found.data_type}; correct one of them"
                yield Problem(("sequence", "states", index, "dataType"), words, state.data_type)


def _warmup(model: Model) -> Iterator[Problem]:
    for index, warmup in enumerate(model.warmup):
        place = ("warmup", index)
        if warmup.batch_size > max(model.max_batch_size or 0, 1):
            words = (
                f"must be at most maxBatchSize, {model.max_batch_size}; lower it or raise maxBatchSize"
                if model.max_batch_size
                else "must be 1 without maxBatchSize; lower it or set maxBatchSize"
            )
            yield Problem((*place, "batchSize"), words, warmup.batch_size)
        if not warmup.inputs and not model.inputs:
            words = "are required where the model's own inputs aren't listed; add them, or list the model's inputs"
            yield Problem((*place, "inputs"), words)
        yield from _warmup_inputs(model, place, warmup)


def _warmup_inputs(model: Model, place: Place, warmup: Warmup) -> Iterator[Problem]:
    declared = {tensor.name: tensor for tensor in model.inputs}
    # A warm-up passes the sequence batcher by, so what that fills in for clients must stand in it (core,
    # TritonModelInstance::GenerateWarmupData).
    filled_in = set() if model.sequence is None else model.sequence.filled_in()
    given = {tensor.name for tensor in warmup.inputs}
    missing = [name for name, tensor in declared.items() if name not in given and not tensor.optional]
    if warmup.inputs and missing:
        yield Problem((*place, "inputs"), f"lack the model's input {missing[0]}; add it")
    for index, tensor in enumerate(warmup.inputs):
        where = (*place, "inputs", index)
        if tensor.data == "Random" and tensor.data_type == "STRING":
            yield Problem((*where, "data"), "Random makes no texts; use Zero or File", tensor.data)
        known = declared.get(tensor.name)
        if known is not None:
            yield from _warmup_input(where, tensor, known)
        elif declared and tensor.name not in filled_in:
            words = f"is no input of the model, which has {', '.join(sorted({*declared, *filled_in})[:8])}; correct it"
            yield Problem((*where, "name"), words, tensor.name)


def _warmup_input(place: Place, tensor: WarmupInput, known: Tensor) -> Iterator[Problem]:
    if known.data_type != tensor.data_type:
        yield Problem((*place, "dataType"), f"must be the input's, {known.data_type}", tensor.data_type)
    if len(known.dims) != len(tensor.dims) or any(
        wanted not in {-1, size} for wanted, size in zip(known.dims, tensor.dims, strict=False)
    ):
        yield Problem((*place, "dims"), f"must fit the input's dims {known.dims}; correct them", tensor.dims)
