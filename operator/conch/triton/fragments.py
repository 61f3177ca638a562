"""Triton's ModelConfig message → the parts of a model's spec, one function for each field of the message. Pure.

The inverse of `modelconfig`. What a field of the spec can't say isn't guessed at: `importing` compares what is rendered
back with the original, and carries the field as raw data, or names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.descriptor import FieldDescriptor
from tritonclient.grpc import model_config_pb2 as pb

from conch.api.fields import format_duration
from conch.triton.backends import BACKENDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from conch.triton.backends import Format

Fields = dict[str, Any]

PLATFORMS: Final[Mapping[str, str]] = {
    # Platforms of old configurations, which Triton still takes for a backend (core, AutoCompleteBackendFields).
    "tensorrt_plan": "tensorrt",
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_libtorch": "pytorch",
    "tensorflow_savedmodel": "tensorflow",
    "tensorflow_graphdef": "tensorflow",
    "openvino": "openvino",
    "python": "python",
    "dali": "dali",
}
_FORMAT_BY_BACKEND: Final[Mapping[str, Format]] = {
    backend.backend: name for name, backend in BACKENDS.items() if backend.backend
}
_FORMAT_BY_SUFFIX: Final[Mapping[str, Format]] = {
    ".onnx": "ONNX", ".plan": "TensorRT", ".engine": "TensorRT", ".trt": "TensorRT", ".pt": "PyTorch",
    ".savedmodel": "TensorFlow", ".tflite": "TFLite", ".xml": "OpenVINO", ".py": "Python", ".dali": "DALI",
}  # fmt: skip
_KEPT_QUANTITIES: Final = (("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10), ("", 1))
_PRIORITIES: Final = {0: "Default", 1: "Max", 2: "Min"}


@dataclass(frozen=True)
class Origin:
    """What else is known of a model: the name of its folder, and its format."""

    name: str
    format: Format


def backend_of(config: Any) -> str:
    """The backend that a configuration means, by whichever of its two fields; empty when it names none."""
    return str(config.backend or PLATFORMS.get(config.platform, "") or ("" if is_ensemble(config) else config.platform))


def is_ensemble(config: Any) -> bool:
    """Whether it connects other models."""
    return config.platform == "ensemble" or bool(config.HasField("ensemble_scheduling"))


def format_of(config: Any, files: tuple[str, ...] = ()) -> Format:
    """The format of a model by its configuration, or else by its files; Auto where only Triton can tell."""
    if is_ensemble(config):
        return "Ensemble"
    if config.platform == "tensorflow_graphdef":
        return "Auto"  # TensorFlow stands for the other kind of file
    if backend := backend_of(config):
        return _FORMAT_BY_BACKEND.get(backend, "Auto")
    by_default_name = [name for name, row in BACKENDS.items() if row.file and row.file in files]
    named = config.default_model_filename
    candidates = [named] if named else [name for name in files if suffix_format(name) is not None]
    if by_default_name and not named:
        return by_default_name[0]
    return (suffix_format(candidates[0]) if len(candidates) == 1 else None) or "Auto"


def suffix_format(file: str) -> Format | None:
    """The format that a file's name tells."""
    return next((found for suffix, found in _FORMAT_BY_SUFFIX.items() if file.endswith(suffix)), None)


def to_data(message: Any) -> Fields:
    """A message as plain data in Triton's own names: what is unset is left out, enumerations by name, maps as maps."""
    result: Fields = {}
    for field, value in message.ListFields():
        if _is_map(field):
            item = field.message_type.fields_by_name["value"]
            result[field.name] = {_key(key): plain(item, value[key]) for key in sorted(value)}
        elif field.is_repeated:
            result[field.name] = [plain(field, item) for item in value]
        else:
            result[field.name] = plain(field, value)
    return result


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _key(key: Any) -> str:
    return str(key).lower() if isinstance(key, bool) else str(key)


def plain(field: Any, value: Any) -> Any:
    """A field's value, or one of its list, as plain data."""
    if isinstance(value, list | tuple) or (
        field.is_repeated and not isinstance(value, str) and hasattr(value, "append")
    ):
        return [plain(field, item) for item in value]
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return to_data(value)
    if field.type == FieldDescriptor.TYPE_ENUM:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    if field.type == FieldDescriptor.TYPE_FLOAT:
        return _float(value)
    return value


def _duration(microseconds: int) -> str:
    return format_duration(microseconds / 1_000_000)


def quantity(count: int) -> str:
    """The shortest quantity that stands for exactly so many bytes."""
    suffix, size = next((suffix, size) for suffix, size in _KEPT_QUANTITIES if count % size == 0)
    return f"{count // size}{suffix}"


def some(**fields: Any) -> Fields:
    """The fields that say something: neither false, nor 0, nor empty, nor None."""
    return {name: value for name, value in fields.items() if value not in (None, 0, "", [], {}) or value is True}


# --- tensors


def _data_type(number: int) -> str:
    return str(pb.DataType.Name(number)).removeprefix("TYPE_")


def _tensor(tensor: Any) -> Fields:
    found: Fields = {
        "name": tensor.name, "dataType": _data_type(tensor.data_type), "dims": list(tensor.dims),
    }  # fmt: skip
    if tensor.HasField("reshape"):
        found["reshape"] = list(tensor.reshape.shape)
    return {**found, **some(shapeTensor=tensor.is_shape_tensor, nonLinearFormat=tensor.is_non_linear_format_io)}


def _inputs(config: Any, _origin: Origin) -> Fields:
    return {
        "inputs": [
            {
                **_tensor(tensor),
                **some(
                    optional=tensor.optional,
                    raggedBatch=tensor.allow_ragged_batch,
                    tensorFormat=pb.ModelInput.Format.Name(tensor.format).removeprefix("FORMAT_")
                    if tensor.format
                    else None,
                ),
            }
            for tensor in config.input
        ]
    }


def _outputs(config: Any, _origin: Origin) -> Fields:
    return {"outputs": [{**_tensor(tensor), **some(labelFile=tensor.label_filename)} for tensor in config.output]}


# --- scheduling


def _limits(policy: Any) -> Fields:
    action = "Delay" if policy.timeout_action == pb.ModelQueuePolicy.DELAY else None
    timeout = policy.default_timeout_microseconds
    return some(
        maxSize=policy.max_queue_size,
        timeout=_duration(timeout) if timeout else None,
        timeoutAction=action,
        allowTimeoutOverride=policy.allow_timeout_override,
    )


def _dynamic_batching(config: Any, _origin: Origin) -> Fields:
    batching = config.dynamic_batching
    levels, default = batching.priority_levels, batching.default_priority_level
    delay = batching.max_queue_delay_microseconds
    queue = _limits(batching.default_queue_policy)
    policies = batching.priority_queue_policy
    queue |= some(levels=[{"priority": number, **_limits(policies[number])} for number in sorted(policies)])
    found: Fields = {
        "batching": some(
            preferredSizes=list(batching.preferred_batch_size),
            maxQueueDelay=_duration(delay) if delay else None,
            preserveOrdering=batching.preserve_ordering,
            priorityLevels=levels,
            defaultPriority=default if default != levels else None,
        )
    }
    return {**found, **({"queue": queue} if queue else {})}


def _sequence(config: Any, _origin: Origin) -> Fields:
    sequence = config.sequence_batching
    oldest = sequence.WhichOneof("strategy_choice") == "oldest"
    strategy = sequence.oldest if oldest else sequence.direct
    idle, delay = sequence.max_sequence_idle_microseconds, strategy.max_queue_delay_microseconds
    found = some(
        idleTimeout=_duration(idle) if idle and idle != DEFAULT_IDLE_US else None,
        strategy="Oldest" if oldest else None,
        maxQueueDelay=_duration(delay) if delay else None,
        iterative=sequence.iterative_sequence,
    )
    if oldest:
        found |= some(
            maxCandidates=strategy.max_candidate_sequences,
            preferredSizes=list(strategy.preferred_batch_size),
            preserveOrdering=strategy.preserve_ordering,
        )
    else:
        found |= some(minimumSlotUtilization=_float(strategy.minimum_slot_utilization))
    found |= some(
        controls=[_control(item, control) for item in sequence.control_input for control in item.control],
        states=[_state(state) for state in sequence.state],
    )
    return {"sequence": found}


DEFAULT_IDLE_US: Final = 1_000_000
_CONTROLS: Final = {
    "CONTROL_SEQUENCE_START": "Start",
    "CONTROL_SEQUENCE_END": "End",
    "CONTROL_SEQUENCE_READY": "Ready",
    "CONTROL_SEQUENCE_CORRID": "CorrelationID",
}


def _control(item: Any, control: Any) -> Fields:
    kind = _CONTROLS[pb.ModelSequenceBatching.Control.Kind.Name(control.kind)]
    found: Fields = {"tensor": item.name, "kind": kind}
    if kind == "CorrelationID":
        said = control.data_type not in {pb.TYPE_INVALID, pb.TYPE_UINT64}
        return {**found, **some(dataType=_data_type(control.data_type) if said else None)}
    pairs = (
        ("INT32", list(control.int32_false_true)),
        ("FP32", [_float(number) for number in control.fp32_false_true]),
        ("BOOL", [int(value) for value in control.bool_false_true]),
    )
    data_type, pair = next((each for each in pairs if each[1]), (None, []))
    # INT32, and 0 and 1, are what the spec means when it says nothing.
    return {
        **found,
        **some(dataType=data_type if data_type != "INT32" else None, falseTrue=pair if pair != [0, 1] else None),
    }


def _state(state: Any) -> Fields:
    return {
        "inputName": state.input_name,
        "outputName": state.output_name,
        "dataType": _data_type(state.data_type),
        "dims": list(state.dims),
        **some(
            initial=[
                {
                    "name": initial.name,
                    "dataType": _data_type(initial.data_type),
                    "dims": list(initial.dims),
                    **_data(initial, "state_data"),
                }
                for initial in state.initial_state
            ],
            sameBuffer=state.use_same_buffer_for_input_output,
            growableMemory=state.use_growable_memory,
        ),
    }


_DATA: Final = {"random_data": "Random", "data_file": "File", "input_data_file": "File"}


def _data(message: Any, oneof: str) -> Fields:
    chosen = message.WhichOneof(oneof)
    kind = _DATA.get(chosen)
    if kind == "File":
        return {"data": "File", "file": getattr(message, chosen)}
    return {"data": kind} if kind else {}


def _ensemble(config: Any, _origin: Origin) -> Fields:
    return {
        "steps": [
            {
                "model": step.model_name,
                **({"version": step.model_version} if step.model_version not in {0, -1} else {}),
                "inputs": {key: step.input_map[key] for key in sorted(step.input_map)},
                "outputs": {key: step.output_map[key] for key in sorted(step.output_map)},
            }
            for step in config.ensemble_scheduling.step
        ]
    }


# --- instances


def _group(group: Any, origin: Origin) -> Fields:
    kinds = pb.ModelInstanceGroup.Kind
    kind = {kinds.Value("KIND_GPU"): "GPU", kinds.Value("KIND_CPU"): "CPU", kinds.Value("KIND_MODEL"): "Model"}
    limiter = None
    if group.HasField("rate_limiter"):
        limiter = some(
            priority=group.rate_limiter.priority if group.rate_limiter.priority != 1 else None,
            resources=[
                {
                    "name": resource.name,
                    **({"count": resource.count} if resource.count != 1 else {}),
                    **({"global": True} if getattr(resource, "global") else {}),
                }
                for resource in group.rate_limiter.resources
            ],
        )
    found = some(
        count=group.count if group.count != 1 else None,
        kind=kind.get(group.kind) if kind.get(group.kind) != BACKENDS[origin.format].instance_kind else None,
        gpus=list(group.gpus),
        profiles=list(group.profile),
        passive=group.passive,
    )
    return found if limiter is None else {**found, "rateLimiter": limiter}


def _instances(config: Any, origin: Origin) -> Fields:
    groups = list(config.instance_group)
    if len(groups) == 1 and groups[0].name in {"", origin.name, f"{origin.name}_0"}:
        return {"instances": _group(groups[0], origin)}
    return {
        "instanceGroups": [
            {"name": group.name or f"{origin.name}_{index}", **_group(group, origin)}
            for index, group in enumerate(groups)
        ]
    }


# --- the rest


def _optimization(config: Any, origin: Origin) -> Fields:
    optimization = config.optimization
    pinned = {
        side: False
        for side, buffer in (("input", "input_pinned_memory"), ("output", "output_pinned_memory"))
        if optimization.HasField(buffer) and not getattr(optimization, buffer).enable
    }
    found = some(
        graphLevel=optimization.graph.level,
        pinnedMemory=pinned,
        priority=_PRIORITIES.get(optimization.priority) if optimization.priority else None,
        gatherKernelBufferThreshold=optimization.gather_kernel_buffer_threshold,
        eagerBatching=optimization.eager_batching,
    )
    if (tensor_rt := _own_accelerator(config, origin, "gpu", "tensorrt")) is not None:
        found["tensorRT"] = _tensor_rt(tensor_rt)
    if (open_vino := _own_accelerator(config, origin, "cpu", "openvino")) is not None:
        found["openVINO"] = some(parameters=dict(sorted(open_vino.items())))
    if optimization.HasField("cuda"):
        found["cudaGraphs"] = _cuda(optimization.cuda)
    return {"optimization": found} if found else {}


def _own_accelerator(config: Any, origin: Origin, device: str, name: str) -> dict[str, str] | None:
    """The parameters of the one accelerator that the spec has a field for; None when it isn't that one alone."""
    listed = getattr(config.optimization.execution_accelerators, f"{device}_execution_accelerator")
    return dict(listed[0].parameters) if origin.format == "ONNX" and [item.name for item in listed] == [name] else None


_PRECISIONS: Final = ("FP32", "FP16", "INT8", "BF16")


def _tensor_rt(parameters: dict[str, str]) -> Fields:
    found: Fields = {}
    if parameters.get("precision_mode") in _PRECISIONS:
        found["precision"] = parameters.pop("precision_mode")
    workspace = parameters.get("max_workspace_size_bytes", "")
    if workspace.isascii() and workspace.isdigit() and str(int(workspace)) == workspace:
        found["workspace"] = quantity(int(parameters.pop("max_workspace_size_bytes")))
    if parameters.get("trt_engine_cache_enable", "").lower() in {"true", "1"}:
        # Where it lies is the pod's own business: a path of another machine is none here.
        found["engineCache"] = True
        parameters.pop("trt_engine_cache_enable")
        parameters.pop("trt_engine_cache_path", None)
    return {**found, **some(parameters=dict(sorted(parameters.items())))}


def _cuda(cuda: Any) -> Fields:
    return {
        **({} if cuda.graphs else {"enabled": False}),
        **some(
            busyWait=cuda.busy_wait_events,
            outputCopyStream=cuda.output_copy_stream,
            specs=[
                {
                    **_bound(spec),
                    **({"lowerBound": _bound(spec.graph_lower_bound)} if spec.HasField("graph_lower_bound") else {}),
                }
                for spec in cuda.graph_spec
            ],
        ),
    }


def _bound(bound: Any) -> Fields:
    inputs = [{"name": name, "dims": list(bound.input[name].dim)} for name in sorted(bound.input)]
    return {**({"batchSize": bound.batch_size} if bound.batch_size != 1 else {}), **some(inputs=inputs)}


def _versions(config: Any, _origin: Origin) -> Fields:
    policy = config.version_policy
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return {"versions": {"policy": "All"}}
    if choice == "specific":
        return {"versions": {"policy": "Specific", "numbers": list(policy.specific.versions)}}
    return {"versions": some(count=policy.latest.num_versions if policy.latest.num_versions != 1 else None)}


def _warmup(config: Any, _origin: Origin) -> Fields:
    return {
        "warmup": [
            {
                "name": warmup.name,
                **({"batchSize": warmup.batch_size} if warmup.batch_size != 1 else {}),
                **({"count": warmup.count} if warmup.count not in {0, 1} else {}),
                "inputs": [
                    {
                        "name": name,
                        "dataType": _data_type(warmup.inputs[name].data_type),
                        "dims": list(warmup.inputs[name].dims),
                        **_warmup_data(warmup.inputs[name]),
                    }
                    for name in sorted(warmup.inputs)
                ],
            }
            for warmup in config.model_warmup
        ]
    }


def _warmup_data(tensor: Any) -> Fields:
    found = _data(tensor, "input_data_type")
    # For which Triton takes empty ones (core, GenerateWarmupData).
    texts = tensor.data_type == pb.TYPE_STRING and found == {"data": "Random"}
    return {} if texts else found


def _parameters(config: Any, _origin: Origin) -> Fields:
    return {"parameters": {key: config.parameters[key].string_value for key in sorted(config.parameters)}}


def _float(number: float) -> float:
    """The shortest decimal that is the same single-precision number: 0.1, not 0.10000000149."""
    return float(f"{number:.9g}") if number != float(f"{number:.6g}") else float(f"{number:.6g}")


@dataclass(frozen=True)
class Fragment:
    """How one field of the message becomes fields of the spec."""

    make: Callable[[Any, Origin], Fields]
    keys: tuple[str, ...]
    """The fields of the spec that it can make."""


FRAGMENTS: Final[Mapping[str, Fragment]] = {
    "max_batch_size": Fragment(lambda config, _: {"maxBatchSize": config.max_batch_size}, ("maxBatchSize",)),
    "default_model_filename": Fragment(lambda config, _: {"file": config.default_model_filename}, ("file",)),
    "input": Fragment(_inputs, ("inputs",)),
    "output": Fragment(_outputs, ("outputs",)),
    "dynamic_batching": Fragment(_dynamic_batching, ("batching", "queue")),
    "sequence_batching": Fragment(_sequence, ("sequence",)),
    "ensemble_scheduling": Fragment(_ensemble, ("steps",)),
    "instance_group": Fragment(_instances, ("instances", "instanceGroups")),
    "version_policy": Fragment(_versions, ("versions",)),
    "model_transaction_policy": Fragment(
        lambda config, _: some(decoupled=config.model_transaction_policy.decoupled), ("decoupled",)
    ),
    "response_cache": Fragment(lambda config, _: some(responseCache=config.response_cache.enable), ("responseCache",)),
    "optimization": Fragment(_optimization, ("optimization",)),
    "model_warmup": Fragment(_warmup, ("warmup",)),
    "parameters": Fragment(_parameters, ("parameters",)),
}
"""By field of the message, in the order in which a spec reads well; the others have no field of their own."""

_BY_NAME_AND_FORMAT: Final = frozenset({"name", "platform", "backend"})


def model_of(config: Any, origin: Origin) -> Fields:
    """The fields of a model's spec, but for its source; what no field says stands in `config`, in Triton's names."""
    found: Fields = {"name": origin.name, "format": origin.format}
    present = {field.name for field, _ in config.ListFields()}
    for name, fragment in FRAGMENTS.items():
        if name in present and not (origin.format == "Ensemble" and name == "instance_group"):
            found |= fragment.make(config, origin)
    # An empty object says nothing here, but for two that switch something on.
    found = {key: value for key, value in found.items() if value not in ({}, []) or key in {"batching", "sequence"}}
    raw = _raw(config, origin)
    return {**found, **({"config": raw} if raw else {})}


def _raw(config: Any, origin: Origin) -> Fields:
    """What the spec has no field for."""
    data = to_data(config)
    raw = {name: value for name, value in data.items() if name not in FRAGMENTS and name not in _BY_NAME_AND_FORMAT}
    if origin.format == "Auto":
        raw |= {name: data[name] for name in ("backend", "platform") if name in data}
    limit = data.get("ensemble_scheduling", {}).get("max_inflight_requests")
    if limit:
        raw["ensemble_scheduling"] = {"max_inflight_requests": limit}
    accelerators = dict(data.get("optimization", {}).get("execution_accelerators", {}))
    for device, name in (("gpu", "tensorrt"), ("cpu", "openvino")):
        if _own_accelerator(config, origin, device, name) is not None:
            accelerators.pop(f"{device}_execution_accelerator")
    if accelerators:
        raw["optimization"] = {"execution_accelerators": accelerators}
    return raw
