"""Random ModelConfig messages that Triton accepts: made by walking the message's descriptors, so no field is forgotten.

A field that isn't in any table below is filled by its type. What several fields must have in common is put right
afterwards (`_agree`), since a message of independent fields would hardly ever be one that Triton loads.
"""

from __future__ import annotations

import random
import string
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.descriptor import FieldDescriptor
from tritonclient.grpc import model_config_pb2 as pb

from conch.triton.backends import BACKENDS
from conch.triton.passthrough import OWNED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from conch.triton.backends import Format

NAME: Final = "model"

NOT_CARRIED: Final[Mapping[str, str]] = {
    "ModelInstanceGroup.secondary_devices": "accelerators of embedded boards, which no node of a cluster has",
    "ModelInstanceGroup.host_policy": "NUMA policies of a host belong to the node, not to a service",
    "Step.model_namespace": "Conch runs one repository without namespaces",
}
"""Fields by message, which no spec can hold: importing them is a difference that is named."""

TYPES: Final = [value for value in pb.DataType.values() if value != pb.TYPE_INVALID]
_NUMBERS: Final = [value for value in TYPES if value != pb.TYPE_STRING]
_WORDS: Final = string.ascii_letters + string.digits + "_"

Random = random.Random


def word(rng: Random, most: int = 12) -> str:
    """A name of letters, digits and underscores."""
    return "".join(rng.choice(_WORDS) for _ in range(rng.randint(1, most)))


def label(rng: Random) -> str:
    """A name as models have them."""
    return rng.choice(string.ascii_letters) + word(rng)


def text(rng: Random) -> str:
    """Any single line: quotes, braces, backslashes and letters of other scripts too."""
    return "".join(rng.choice(_WORDS + " \"'\\{}$#;:,<>äß漢🐚~") for _ in range(rng.randint(0, 24)))


def file(rng: Random) -> str:
    """A relative path."""
    return "/".join(f"{word(rng)}.{word(rng, 3)}" for _ in range(rng.randint(1, 2)))


def sizes(rng: Random) -> list[int]:
    """Known sizes."""
    return [rng.choice([1, 2, 3, 224, 2**31 - 1]) for _ in range(rng.randint(1, 4))]


def dims(rng: Random) -> list[int]:
    """Sizes that may vary."""
    return [rng.choice([-1, 1, 3, 224, 2**20]) for _ in range(rng.randint(1, 4))]


def microseconds(rng: Random) -> int:
    """Up to a minute, to the microsecond."""
    return rng.choice([0, 1, 999, 1000, 1500, 100_000, 1_000_000, 59_999_999, 60_000_000])


def waiting(rng: Random) -> int:
    """Between a millisecond and a day, or none."""
    return rng.choice([0, 1000, 1001, 123_456, 500_000, 3_600_000_000, 86_400_000_000])


VALUES: Final[dict[str, Any]] = {
    "ModelConfig.name": lambda _: NAME,
    "ModelConfig.platform": lambda _: "",
    "ModelConfig.backend": lambda _: "",
    "ModelConfig.runtime": lambda rng: f"libtriton_{word(rng)}.so",
    "ModelConfig.default_model_filename": lambda rng: f"{word(rng)}.{word(rng, 4)}",
    "ModelConfig.max_batch_size": lambda rng: rng.choice([0, 1, 8, 128, 65536]),
    "ModelConfig.input": lambda rng: rng.randint(0, 3),
    "ModelConfig.output": lambda rng: rng.randint(0, 3),
    "ModelConfig.instance_group": lambda rng: rng.choice([0, 1, 1, 2, 3]),
    "CcModelFilenamesEntry.key": lambda rng: f"{rng.randint(5, 12)}.{rng.randint(0, 9)}",
    "CcModelFilenamesEntry.value": file,
    "ParametersEntry.key": word,
    "ParametersEntry.value": text,
    "ModelParameter.string_value": text,
    "MetricTagsEntry.key": word,
    "ModelInput.dims": dims,
    "ModelOutput.dims": dims,
    "ModelInput.data_type": lambda rng: rng.choice(TYPES),
    "ModelOutput.data_type": lambda rng: rng.choice(TYPES),
    "ModelOutput.label_filename": file,
    "BatchInput.data_type": lambda rng: rng.choice([pb.TYPE_INT32, pb.TYPE_FP32]),
    "Latest.num_versions": lambda rng: rng.randint(0, 64),
    "Specific.versions": lambda rng: rng.sample([1, 2, 3, 20_240_101, 2**53 - 1], rng.randint(1, 5)),
    "Graph.level": lambda rng: rng.choice([-1, 0, 1, 2]),
    "Cuda.graph_spec": lambda rng: rng.randint(0, 2),
    "GraphSpec.batch_size": lambda rng: rng.choice([0, 1, 8]),
    "LowerBound.batch_size": lambda rng: rng.choice([0, 1, 8]),
    "Shape.dim": sizes,
    "Accelerator.name": lambda rng: rng.choice(["tensorrt", "openvino", "auto_mixed_precision", "gpu_io"]),
    "ModelOptimizationPolicy.gather_kernel_buffer_threshold": lambda rng: rng.choice([0, 1, 2**31 - 1]),
    "ModelDynamicBatching.preferred_batch_size": lambda rng: rng.sample([1, 2, 4, 8, 100], rng.randint(0, 4)),
    "ModelDynamicBatching.max_queue_delay_microseconds": microseconds,
    "ModelDynamicBatching.priority_levels": lambda rng: rng.choice([0, 1, 3, 32]),
    "ModelDynamicBatching.default_priority_level": lambda rng: rng.choice([1, 2, 3]),
    "PriorityQueuePolicyEntry.key": lambda rng: rng.choice([1, 2, 3]),
    "ModelQueuePolicy.default_timeout_microseconds": waiting,
    "ModelQueuePolicy.max_queue_size": lambda rng: rng.choice([0, 1, 64, 1_000_000]),
    "StrategyDirect.max_queue_delay_microseconds": microseconds,
    "StrategyDirect.minimum_slot_utilization": lambda rng: rng.choice([0.0, 0.1, 0.5, 1.0, rng.random()]),
    "StrategyOldest.max_candidate_sequences": lambda rng: rng.choice([1, 4, 65536]),
    "StrategyOldest.preferred_batch_size": lambda rng: rng.sample([1, 2, 4], rng.randint(0, 3)),
    "StrategyOldest.max_queue_delay_microseconds": microseconds,
    "ModelSequenceBatching.max_sequence_idle_microseconds": waiting,
    "ModelSequenceBatching.control_input": lambda rng: rng.randint(0, 4),
    "ModelSequenceBatching.state": lambda rng: rng.randint(0, 2),
    "ControlInput.control": lambda _: 1,
    "Control.data_type": lambda rng: rng.choice([pb.TYPE_UINT64, pb.TYPE_INT64, pb.TYPE_STRING, pb.TYPE_INVALID]),
    "Control.int32_false_true": lambda rng: rng.choice([[], [0, 1], [1, 0], [-5, 7]]),
    "Control.fp32_false_true": lambda rng: rng.choice([[], [0.0, 1.0], [0.25, -0.1]]),
    "Control.bool_false_true": lambda rng: rng.choice([[], [False, True], [True, False]]),
    "State.data_type": lambda rng: rng.choice(TYPES),
    "State.dims": dims,
    "State.initial_state": lambda rng: rng.randint(0, 1),
    "InitialState.zero_data": lambda _: True,
    "InitialState.data_file": file,
    "ModelInstanceGroup.name": lambda rng: rng.choice(["", label(rng)]),
    "ModelInstanceGroup.count": lambda rng: rng.choice([0, 1, 2, 64]),
    "ModelInstanceGroup.gpus": lambda rng: rng.sample(range(16), rng.randint(0, 3)),
    "ModelInstanceGroup.profile": lambda rng: [str(number) for number in rng.sample(range(9), rng.randint(0, 3))],
    "ModelRateLimiter.priority": lambda rng: rng.choice([0, 1, 2, 1000]),
    "ModelRateLimiter.resources": lambda rng: rng.randint(0, 2),
    "Resource.count": lambda rng: rng.choice([1, 2, 1_000_000]),
    "ModelWarmup.name": label,
    "ModelWarmup.batch_size": lambda rng: rng.choice([1, 1, 8]),
    "ModelWarmup.count": lambda rng: rng.choice([0, 1, 1000]),
    "ModelConfig.model_warmup": lambda rng: rng.choice([0, 0, 1, 2]),
    "Input.data_type": lambda rng: rng.choice(_NUMBERS),
    "Input.dims": sizes,
    "Input.zero_data": lambda _: True,
    "Input.random_data": lambda _: True,
    "Input.input_data_file": file,
    "ModelOperations.op_library_filename": lambda rng: [file(rng) for _ in range(rng.randint(0, 2))],
    "Agent.name": lambda _: "checksum",
    "MetricIdentifier.family": word,
    "HistogramOptions.buckets": lambda rng: sorted({round(rng.uniform(0.001, 900), 3) for _ in range(3)}),
    "MetricControl.metric_identifier": lambda _: True,
    "MetricControl.histogram_options": lambda _: True,
    "Step.model_name": lambda _: "member",
    "Step.model_version": lambda rng: rng.choice([-1, 0]),
    "ModelEnsembling.step": lambda _: 0,
    "ModelEnsembling.max_inflight_requests": lambda rng: rng.choice([0, 1, 2**32 - 1]),
}
"""By MESSAGE.FIELD: a value, or of a list of messages how many, or of a message whether."""

_INTEGERS: Final = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (1 - 2**53, 2**53 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**53 - 1),
}


def wild_config(seed: int) -> Any:
    """A message of fields that have nothing to do with each other: seldom one that Triton loads."""
    rng = random.Random(seed)
    config = random_config(seed)
    _fill(config, rng, rng.choice([0.02, 0.1]), wild=True)
    config.name = NAME
    return config


def random_ensemble(seed: int) -> dict[str, Any]:
    """An ensemble and its members by name: each step reads what earlier ones made, and nothing is left over."""
    rng = random.Random(seed)
    batch = rng.choice([0, 8])
    ensemble = pb.ModelConfig(name=NAME, platform=rng.choice(["ensemble", ""]), max_batch_size=batch)
    shape = {"data_type": rng.choice(TYPES), "dims": dims(rng)}
    ensemble.input.add(name="tensor_0", **shape)
    found = {NAME: ensemble}
    steps = rng.randint(1, 4)
    for number in range(steps):
        member = pb.ModelConfig(name=f"member_{number}", backend="python", max_batch_size=batch)
        member.instance_group.add(kind=pb.ModelInstanceGroup.KIND_CPU)
        made = {"data_type": rng.choice(TYPES), "dims": dims(rng)}
        member.input.add(name="in", **shape)
        member.output.add(name="out", **made)
        ensemble.ensemble_scheduling.step.add(
            model_name=member.name,
            model_version=rng.choice([-1, 0, 3]),
            input_map={"in": f"tensor_{number}"},
            output_map={"out": f"tensor_{number + 1}"},
        )
        found[member.name], shape = member, made
    ensemble.output.add(name=f"tensor_{steps}", **shape)
    ensemble.ensemble_scheduling.max_inflight_requests = rng.choice([0, 0, 7])
    if rng.random() < 0.5:
        ensemble.parameters["note"].string_value = text(rng)
    return found


def random_config(seed: int, model_format: Format | None = None) -> Any:
    """A message that Triton could load, the same for the same seed; of an ensemble the steps are missing."""
    rng = random.Random(seed)
    formats: list[Format] = [name for name in BACKENDS if name != "Ensemble"]
    chosen: Format = rng.choice(formats) if model_format is None else model_format
    config = pb.ModelConfig()
    _fill(config, rng, rng.choice([0.15, 0.4, 0.8]))
    _agree(config, rng, chosen)
    return config


def _fill(message: Any, rng: Random, density: float, *, wild: bool = False) -> None:
    """Set about so large a share of the message's fields."""
    chosen: dict[str, str] = {}
    for field in message.DESCRIPTOR.fields:
        key = f"{message.DESCRIPTOR.name}.{field.name}"
        known = key in VALUES and not wild
        if (key in NOT_CARRIED and not wild) or (not known and rng.random() > density):
            continue
        if (oneof := field.containing_oneof) is not None:
            name = chosen.setdefault(oneof.name, rng.choice([member.name for member in oneof.fields]))
            if name != field.name:
                continue
        _set(message, field, "" if wild else key, rng, density)


def _set(message: Any, field: Any, key: str, rng: Random, density: float) -> None:
    value, wild = (VALUES[key](rng) if key in VALUES else None), not key
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _fill_map(message, field, rng, density, wild=wild)
    elif field.message_type is not None and field.is_repeated:
        for _ in range(rng.randint(0, 2) if value is None else value):
            _fill(getattr(message, field.name).add(), rng, density, wild=wild)
    elif field.message_type is not None:
        if value is not False:
            getattr(message, field.name).SetInParent()
            _fill(getattr(message, field.name), rng, density, wild=wild)
    elif field.is_repeated:
        entries = [_scalar(field, rng, wild=wild) for _ in range(rng.randint(0, 3))] if value is None else value
        getattr(message, field.name).extend(entries)
    else:
        setattr(message, field.name, _scalar(field, rng, wild=wild) if value is None else value)


def _fill_map(message: Any, field: Any, rng: Random, density: float, *, wild: bool) -> None:
    entry = field.message_type
    inner = entry.fields_by_name["value"]
    for _ in range(rng.randint(0, 3)):
        key_of = VALUES.get(f"{entry.name}.key")
        key = key_of(rng) if key_of is not None else _scalar(entry.fields_by_name["key"], rng, wild=wild)
        if inner.message_type is not None:
            _fill(getattr(message, field.name)[key], rng, density, wild=wild)
        else:
            value_of = VALUES.get(f"{entry.name}.value")
            getattr(message, field.name)[key] = (
                value_of(rng) if value_of is not None else _scalar(inner, rng, wild=wild)
            )


def _scalar(field: Any, rng: Random, *, wild: bool = False) -> Any:
    if field.type in _INTEGERS:
        low, high = _INTEGERS[field.type]
        return rng.choice([low, 0, 1, 7, high])
    if field.type == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type == FieldDescriptor.TYPE_ENUM:
        return rng.choice([option.number for option in field.enum_type.values])
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice([word, text])(rng) if wild else word(rng)
    return rng.choice([0.0, 1.0, 0.1, -2.5])


# --- what the fields must have in common


def _agree(config: Any, rng: Random, model_format: Format) -> None:
    """Make of independent fields a configuration that Triton loads."""
    _of_format(config, rng, model_format)
    if model_format == "PyTorch":
        for tensors in (config.input, config.output):
            if not tensors:
                tensors.add(name="only", data_type="TYPE_FP32", dims=[3])
    _distinct(config.input, "name", rng)
    _distinct(config.output, "name", rng)
    for tensor in (*config.input, *config.output):
        if tensor.HasField("reshape"):
            tensor.reshape.ClearField("shape")
            tensor.reshape.shape.extend([*tensor.dims, 1])
        if model_format not in {"TensorRT", "Auto"}:
            tensor.is_shape_tensor = False
            tensor.is_non_linear_format_io = False
        tensor.is_non_linear_format_io = tensor.is_non_linear_format_io and len(tensor.dims) == 3
    for tensor in config.input:
        if len(tensor.dims) != 3:
            tensor.format = pb.ModelInput.FORMAT_NONE
    _batching(config, rng)
    _sequence(config, rng)
    _groups(config, rng, model_format)
    _optimization(config, model_format)
    _warmup(config, rng)
    _batch_tensors(config, rng)
    if config.response_cache.enable:
        stateful = config.model_transaction_policy.decoupled or config.HasField("sequence_batching")
        config.response_cache.enable = not stateful


def _of_format(config: Any, rng: Random, model_format: Format) -> None:
    row = BACKENDS[model_format]
    config.ClearField("ensemble_scheduling")
    if model_format == "Auto":
        config.backend = rng.choice(["", "fil"])
    elif rng.random() < 0.5 and row.platform:
        config.platform = row.platform
    else:
        config.backend = row.backend
    if not row.file_can_change:
        config.default_model_filename = ""
    if model_format != "Auto" and rng.random() < 0.3:
        config.default_model_filename = row.file


def _distinct(items: Any, field: str, rng: Random) -> None:
    seen: set[str] = set()
    for item in items:
        while getattr(item, field) in {"", *seen}:
            setattr(item, field, label(rng))
        seen.add(getattr(item, field))


def _batching(config: Any, rng: Random) -> None:
    batching = config.dynamic_batching
    if not config.HasField("dynamic_batching"):
        for tensor in config.input:
            tensor.allow_ragged_batch = False
        return
    config.max_batch_size = max(config.max_batch_size, *batching.preferred_batch_size, 1)
    levels = batching.priority_levels
    batching.default_priority_level = rng.randint(1, levels) if levels else 0
    for level in [level for level in batching.priority_queue_policy if level > levels]:
        del batching.priority_queue_policy[level]
    if levels > 1:
        batching.preserve_ordering = False
    for policy in (batching.default_queue_policy, *batching.priority_queue_policy.values()):
        late = policy.default_timeout_microseconds or policy.allow_timeout_override
        if policy.timeout_action == pb.ModelQueuePolicy.DELAY and (batching.preserve_ordering or not late):
            policy.timeout_action = pb.ModelQueuePolicy.REJECT


def _sequence(config: Any, rng: Random) -> None:
    if not config.HasField("sequence_batching"):
        return
    sequence = config.sequence_batching
    if sequence.WhichOneof("strategy_choice") == "oldest":
        config.max_batch_size = max(config.max_batch_size, *sequence.oldest.preferred_batch_size, 1)
    own = {tensor.name for tensor in config.input}
    kinds = list(pb.ModelSequenceBatching.Control.Kind.values())
    rng.shuffle(kinds)
    for item, kind in zip(sequence.control_input, kinds, strict=False):
        item.name = f"control_{kind}"
        (control,) = item.control
        control.kind = kind
        pairs = ("int32_false_true", "fp32_false_true", "bool_false_true")
        kept = rng.choice(pairs) if kind != pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_CORRID else ""
        for pair in pairs:
            if pair != kept:
                control.ClearField(pair)
        if kept:
            control.data_type = pb.TYPE_INVALID
    for index, state in enumerate(sequence.state):
        state.input_name, state.output_name = f"state_in_{index}", f"state_out_{index}"
        assert state.input_name not in own
        state.use_growable_memory = state.use_growable_memory and state.use_same_buffer_for_input_output
        for initial in state.initial_state:
            initial.name = initial.name or "initial"
            initial.data_type = state.data_type
            del initial.dims[:]
            initial.dims.extend(max(size, 1) for size in state.dims)
            if initial.WhichOneof("state_data") is None:
                initial.zero_data = True


def _groups(config: Any, rng: Random, model_format: Format) -> None:
    groups, row = list(config.instance_group), BACKENDS[model_format]
    kinds = pb.ModelInstanceGroup
    for group in groups:
        if row.instance_kind is not None and (row.instance_kind == "CPU" or not row.cpu):
            group.kind = rng.choice([kinds.KIND_AUTO, kinds.Kind.Value(f"KIND_{row.instance_kind.upper()}")])
        elif not row.cpu and group.kind == kinds.KIND_CPU:
            group.kind = kinds.KIND_GPU
        if group.kind not in {kinds.KIND_AUTO, kinds.KIND_GPU} or row.instance_kind:
            del group.gpus[:]
        if group.gpus:
            group.kind = kinds.KIND_GPU
        if model_format not in {"TensorRT", "Auto"}:
            del group.profile[:]
        _distinct(group.rate_limiter.resources, "name", rng)
    _distinct([group for group in groups if group.name], "name", rng)
    if groups:
        groups[0].passive = False


def _optimization(config: Any, model_format: Format) -> None:
    if not config.HasField("optimization"):
        return
    optimization = config.optimization
    if optimization.HasField("cuda") and model_format not in {"TensorRT", "Auto"}:
        optimization.ClearField("cuda")
    if model_format != "ONNX":
        return
    for listed in (
        optimization.execution_accelerators.gpu_execution_accelerator,
        optimization.execution_accelerators.cpu_execution_accelerator,
    ):
        for item in listed:
            for key in [key for key in item.parameters if key.startswith(("trt_", "precision", "max_"))]:
                del item.parameters[key]


def _warmup(config: Any, rng: Random) -> None:
    _distinct(config.model_warmup, "name", rng)
    for warmup in config.model_warmup:
        warmup.batch_size = min(warmup.batch_size, max(config.max_batch_size, 1))
        own = [tensor for tensor in config.input if not tensor.optional]
        if config.input:
            for key in list(warmup.inputs):
                del warmup.inputs[key]
            for tensor in own or list(config.input)[:1]:
                entry = warmup.inputs[tensor.name]
                entry.data_type = tensor.data_type
                entry.dims.extend(max(size, 1) for size in tensor.dims)
                entry.zero_data = True
        elif not warmup.inputs:
            _fill(warmup.inputs["made"], rng, 1.0)
        for entry in warmup.inputs.values():
            if entry.WhichOneof("input_data_type") is None:
                entry.zero_data = True


def _batch_tensors(config: Any, rng: Random) -> None:
    for kind, tensors in (("batch_input", config.input), ("batch_output", config.output)):
        if not config.input or not tensors:
            config.ClearField(kind)
        for entry in getattr(config, kind):
            del entry.source_input[:], entry.target_name[:]
            entry.source_input.append(rng.choice(list(config.input)).name)
            entry.target_name.append("made" if kind == "batch_input" else rng.choice(list(tensors)).name)


# --- what was set


def set_fields(message: Any) -> Iterator[str]:
    """MESSAGE.FIELD of everything that a message holds, at any depth."""
    for field, value in message.ListFields():
        yield f"{message.DESCRIPTOR.name}.{field.name}"
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].message_type is not None:
                for item in value.values():
                    yield from set_fields(item)
        else:
            for item in value if field.is_repeated else [value]:
                yield from set_fields(item)


def every_field() -> set[str]:
    """MESSAGE.FIELD of all that a ModelConfig can hold, at any depth."""
    found: set[str] = set()
    seen: set[str] = set()
    waiting = [pb.ModelConfig.DESCRIPTOR]
    while waiting:
        descriptor = waiting.pop()
        if descriptor.full_name in seen:
            continue
        seen.add(descriptor.full_name)
        for field in descriptor.fields:
            if not descriptor.GetOptions().map_entry:
                found.add(f"{descriptor.name}.{field.name}")
            if field.message_type is not None:
                waiting.append(field.message_type)
    return found


_ALSO: Final = {
    "backend": "`format`; by `config` one that no format stands for, with format Auto",
    "optimization.execution_accelerators": "`config`; of ONNX by `optimization.tensorRT` and `openVINO`",
    "dynamic_batching": "`batching`",
    "dynamic_batching.default_queue_policy": "`queue`",
    "dynamic_batching.priority_queue_policy": "`queue.levels`",
    "instance_group": "`instances` or `instanceGroups`",
    "instance_group.name": "`instanceGroups`",
}


def field_table() -> str:
    """docs/fields.md's table: every field of ModelConfig that holds a value, and where a service says it."""
    rows = [f"| `{path}` | {where} |" for path, where in _places(pb.ModelConfig.DESCRIPTOR, "", "")]
    return "\n".join(["| field of ModelConfig | in an InferenceService |", "|---|---|", *rows]) + "\n"


def _places(descriptor: Any, path: str, inherited: str) -> Iterator[tuple[str, str]]:
    for field in descriptor.fields:
        here = f"{path}.{field.name}".lstrip(".")
        key = here.replace("[]", "")
        if (reason := NOT_CARRIED.get(f"{descriptor.name}.{field.name}")) is not None:
            yield here, f"not: {reason}"
            continue
        where = _ALSO.get(key) or (f"`{OWNED[key]}`" if key in OWNED else inherited)
        inner, shown = field.message_type, here + ("[]" if field.is_repeated else "")
        is_map = inner is not None and inner.GetOptions().map_entry
        value = inner.fields_by_name["value"].message_type if is_map else inner
        if value is None or not value.fields:
            yield shown, where or "`config`"
        else:
            yield from _places(value, shown, where)
