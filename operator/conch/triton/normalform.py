"""The normal form of a ModelConfig: two that Triton treats alike become equal. Pure.

What it evens out, and nothing else:
- the name is the folder's; `platform` is written as the backend that it stands for (except tensorflow_graphdef, which
  names another file); a backend that Triton would find by the file's name is written out;
- a default that is written out becomes unset: the format's file name, version policy latest 1, pinned memory on,
  decoupled false, response cache off, warm-up and rate limiter priority 1, INT32 0 and 1 of a sequence's control,
  a sequence's idle time-out of 1 s, strategy direct, the group name that Triton itself gives;
- an instance group that is absent or of KIND_AUTO becomes one of the kind that Triton would choose, and a count of 0
  Triton's own default: 2 for ONNX and TensorFlow on CPUs, else 1;
- an empty message that says nothing (`optimization {}`) is unset, other than those whose presence says something
  (`dynamic_batching {}`);
- ONNX Runtime's TensorRT accelerator computes in FP32 where nothing is said, and says true as "true";
- vLLM reports its own metrics, by which it is scaled;
- an ensemble has no instance groups, and is decoupled or not by its members; a step without a version means the latest
  one, -1;
- a warm-up's random texts are empty ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.descriptor import FieldDescriptor
from tritonclient.grpc import model_config_pb2 as pb

from conch.api.shown import shown
from conch.triton.backends import BACKENDS
from conch.triton.fragments import DEFAULT_IDLE_US, PLATFORMS, is_ensemble, plain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conch.triton.backends import Format

# An empty one of these is not the same as none.
_PRESENCE_SAYS: Final = frozenset(
    {
        "dynamic_batching",
        "sequence_batching",
        "ensemble_scheduling",
        "reshape",
        "all",
        "specific",
        "direct",
        "oldest",
        "graph_lower_bound",
        "histogram_options",
    }
)


def normal_form(config: Any, name: str, model_format: Format, *, gpu: bool) -> Any:
    """A copy of the message in normal form.

    Args:
        config: a ModelConfig.
        name: the model's folder.
        model_format: what the model is, where the configuration leaves it to the files.
        gpu: whether the pod has accelerators.
    """
    result = pb.ModelConfig()
    result.CopyFrom(config)
    result.name = name
    _backend(result, model_format)
    _instances(result, name, model_format, gpu=gpu)
    _scheduling(result)
    _defaults(result, model_format)
    _warmup(result)
    _prune(result)
    return result


@dataclass(frozen=True)
class Changed:
    """One value that differs between two messages."""

    path: str
    """Such as instance_group[0].host_policy."""
    before: Any
    after: Any
    """As plain data; None: unset."""


def changes(before: Any, after: Any, path: str = "") -> Iterator[Changed]:
    """Where two messages of one type differ, at the deepest fields that do."""
    for field in before.DESCRIPTOR.fields:
        yield from _changed(field, before, after, f"{path}.{field.name}".lstrip("."))


def _changed(field: Any, before: Any, after: Any, path: str) -> Iterator[Changed]:
    one, other = getattr(before, field.name), getattr(after, field.name)
    nested = field.type == FieldDescriptor.TYPE_MESSAGE
    if nested and field.message_type.GetOptions().map_entry:
        inner = field.message_type.fields_by_name["value"]
        for key in sorted({*one, *other}):
            yield from _entry(inner, one.get(key), other.get(key), f"{path}[{shown(key)}]")
    elif field.is_repeated and nested and _by_name(field, one, other):
        first, second = ({item.name: item for item in items} for items in (one, other))
        for name in [*first, *(name for name in second if name not in first)]:
            yield from _entry(field, first.get(name), second.get(name), f"{path}[{shown(name)}]")
    elif field.is_repeated and nested:
        for index in range(max(len(one), len(other))):
            entries = [items[index] if index < len(items) else None for items in (one, other)]
            yield from _entry(field, entries[0], entries[1], f"{path}[{index}]")
    elif nested:
        present = [message.HasField(field.name) for message in (before, after)]
        if any(present):
            yield from _entry(field, one if present[0] else None, other if present[1] else None, path)
    elif _has(before, field) != _has(after, field) or _differ(field, one, other):
        yield Changed(path, plain(field, one), plain(field, other))


def _by_name(field: Any, one: Any, other: Any) -> bool:
    """Whether two lists are best compared by their entries' names: one lacks some, and the order is the same."""
    if "name" not in field.message_type.fields_by_name or len(one) == len(other):
        return False
    names = [[item.name for item in items] for items in (one, other)]
    common = [[name for name in own if name in names[0] and name in names[1]] for own in names]
    return all(len(set(own)) == len(own) for own in names) and common[0] == common[1]


def _entry(field: Any, one: Any, other: Any, path: str) -> Iterator[Changed]:
    """Two values of one place, either of which may be None."""
    if one is None or other is None:
        if one is not other:
            yield Changed(path, *(None if value is None else plain(field, value) for value in (one, other)))
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        yield from changes(one, other, path)
    elif _differ(field, one, other):
        yield Changed(path, plain(field, one), plain(field, other))


def _has(message: Any, field: Any) -> bool:
    """Presence, for the members of a choice, which tell an empty value from none."""
    return bool(field.containing_oneof is not None and message.HasField(field.name))


def _differ(field: Any, one: Any, other: Any) -> bool:
    pairs = zip(one, other, strict=False) if field.is_repeated else [(one, other)]
    lengths = field.is_repeated and len(one) != len(other)
    return lengths or any(a != b and not (a != a and b != b) for a, b in pairs)  # noqa: PLR0124 - NaN is NaN here


def _backend(config: Any, model_format: Format) -> None:
    if is_ensemble(config):
        config.platform, config.backend = "ensemble", ""
        return
    if config.platform == "tensorflow_graphdef":
        return
    known = PLATFORMS.get(config.platform)
    config.backend = config.backend or known or BACKENDS[model_format].backend
    if known == config.backend:
        config.platform = ""


def _instances(config: Any, name: str, model_format: Format, *, gpu: bool) -> None:
    if is_ensemble(config):
        config.ClearField("instance_group")
        return
    if not config.instance_group:
        config.instance_group.add()
    groups = list(config.instance_group)
    for index, group in enumerate(groups):
        if group.kind == pb.ModelInstanceGroup.KIND_AUTO:
            chosen = BACKENDS[model_format].instance_kind or ("GPU" if gpu or group.gpus else "CPU")
            group.kind = pb.ModelInstanceGroup.Kind.Value(f"KIND_{chosen.upper()}")
        # core, SetDefaultInstanceCount
        doubled = group.kind == pb.ModelInstanceGroup.KIND_CPU and model_format in {"ONNX", "TensorFlow"}
        group.count = group.count or (2 if doubled else 1)
        if len(groups) == 1 and group.name in {name, f"{name}_0"}:
            group.name = ""
        elif len(groups) > 1 and not group.name:
            group.name = f"{name}_{index}"
        if group.rate_limiter.priority == 1:
            group.rate_limiter.priority = 0


def _scheduling(config: Any) -> None:
    if config.HasField("sequence_batching"):
        sequence = config.sequence_batching
        sequence.max_sequence_idle_microseconds = sequence.max_sequence_idle_microseconds or DEFAULT_IDLE_US
        if sequence.WhichOneof("strategy_choice") is None:
            sequence.direct.SetInParent()
        for item in sequence.control_input:
            for control in item.control:
                _control(control)
    if is_ensemble(config):
        config.ClearField("model_transaction_policy")  # Triton sets it itself (core, ValidateEnsembleConfig)
    for step in config.ensemble_scheduling.step:
        step.model_version = step.model_version or -1


def _control(control: Any) -> None:
    if control.kind == pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_CORRID:
        control.data_type = control.data_type or pb.TYPE_UINT64
        return
    control.data_type = pb.TYPE_INVALID  # Triton takes it from the pair of values
    if not (control.int32_false_true or control.fp32_false_true or control.bool_false_true):
        control.int32_false_true.extend([0, 1])


def _defaults(config: Any, model_format: Format) -> None:
    if config.default_model_filename == BACKENDS[model_format].file:
        config.default_model_filename = ""
    policy = config.version_policy
    choice = policy.WhichOneof("policy_choice")
    if choice is None or (choice == "latest" and policy.latest.num_versions in {0, 1}):
        config.ClearField("version_policy")
    for side in ("input_pinned_memory", "output_pinned_memory"):
        if config.optimization.HasField(side) and getattr(config.optimization, side).enable:
            config.optimization.ClearField(side)
    for accelerator in config.optimization.execution_accelerators.gpu_execution_accelerator:
        if accelerator.name == "tensorrt" and model_format == "ONNX":
            accelerator.parameters["precision_mode"] = accelerator.parameters.get("precision_mode") or "FP32"
            if accelerator.parameters.get("trt_engine_cache_enable") in {"1", "True"}:
                accelerator.parameters["trt_engine_cache_enable"] = "true"
    if model_format == "vLLM" and "REPORT_CUSTOM_METRICS" not in config.parameters:
        config.parameters["REPORT_CUSTOM_METRICS"].string_value = "true"


def _warmup(config: Any) -> None:
    for warmup in config.model_warmup:
        warmup.count = warmup.count or 1
        for key in warmup.inputs:
            if warmup.inputs[key].data_type == pb.TYPE_STRING and warmup.inputs[key].random_data:
                warmup.inputs[key].zero_data = True


def _prune(message: Any) -> None:
    """Unset what is empty and whose presence says nothing, from the leaves up."""
    for field, value in message.ListFields():
        if field.type != FieldDescriptor.TYPE_MESSAGE:
            continue
        if field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].type == FieldDescriptor.TYPE_MESSAGE:
                for key in value:
                    _prune(value[key])
        elif field.is_repeated:
            for item in value:
                _prune(item)
        else:
            _prune(value)
            # Pinned memory switched off is an empty message, too.
            off = field.name.endswith("_pinned_memory")
            if not value.ListFields() and field.name not in _PRESENCE_SAYS and not off:
                message.ClearField(field.name)
