"""`config` of a model: any further field of Triton's ModelConfig, checked against the message, as data. Pure.

What the spec has a field for is written there, where its rules are checked: `config` holds the rest. The walk over the
message's descriptors names the place of a mistake, which protobuf's own JSON parser doesn't.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.descriptor import FieldDescriptor
from tritonclient.grpc import model_config_pb2

from conch.api.fields import Problem
from conch.api.optimization import LIBRARIES_PARAMETER
from conch.api.text import RELATIVE_PATH
from conch.triton.backends import BACKENDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from conch.api.model import Model

MAX_BYTES: Final = 16 * 1024
"""Of `config` as JSON: every model's configuration travels in one annotation."""
MAX_ENTRIES: Final = 64
"""Of a list or map inside it."""
MAX_TEXT: Final = 1024
"""Characters of a text inside it."""
_MAX_PROBLEMS: Final = 20

OWNED: Final[dict[str, str]] = {
    "name": "name",
    "platform": "format",
    "version_policy": "versions",
    "max_batch_size": "maxBatchSize",
    "input": "inputs",
    "output": "outputs",
    "dynamic_batching": "batching and queue",
    "sequence_batching": "sequence",
    "ensemble_scheduling.step": "steps",
    "instance_group": "instances",
    "default_model_filename": "file",
    "parameters": "parameters",
    "model_warmup": "warmup",
    "model_transaction_policy": "decoupled",
    "response_cache": "responseCache",
    "optimization.graph": "optimization.graphLevel",
    "optimization.priority": "optimization.priority",
    "optimization.cuda": "optimization.cudaGraphs",
    "optimization.input_pinned_memory": "optimization.pinnedMemory.input",
    "optimization.output_pinned_memory": "optimization.pinnedMemory.output",
    "optimization.gather_kernel_buffer_threshold": "optimization.gatherKernelBufferThreshold",
    "optimization.eager_batching": "optimization.eagerBatching",
}
"""Field of the message → the model's field in the spec that says it."""

_INTEGERS: Final = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
}
_LONG: Final = {FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64}
# The API server reads larger bounds of a schema as whole numbers of 64 bits, and overflows.
_MAX_FLOAT: Final = 2**53 - 1
_PLAIN: Final = re.compile(r"[^\x00-\x1f\x7f-\x9f]*")
_AGENT: Final = "checksum"


class _Refused(ValueError):
    """One value isn't what its field takes; the text is a message without the field's name."""


def check_config(model: Model) -> Iterator[Problem]:
    """Every finding about a model's `config`, at most 20."""
    try:
        size = len(json.dumps(model.config))
    except (TypeError, ValueError, RecursionError):
        yield Problem(
            ("config",), "must hold texts, numbers, true, false, lists and maps; remove what is none of these"
        )
        return
    if size > MAX_BYTES:
        yield Problem(("config",), f"must be at most {MAX_BYTES} bytes as JSON, not {size}; shorten it")
        return
    walk = _Walk()
    message = model_config_pb2.ModelConfig()
    walk.message(message, model.config, ("config",))
    yield from walk.problems[:_MAX_PROBLEMS]
    if not walk.problems:
        yield from _owned(model)
        yield from _meaning(message, model)


def further_fields(config: Mapping[str, Any]) -> Any:
    """The message with the fields that `config` sets; of a config that `check_config` finds nothing in.

    Raises:
        ValueError: `config` was not checked, and is wrong.
    """
    walk, message = _Walk(), model_config_pb2.ModelConfig()
    walk.message(message, config, ("config",))
    if walk.problems:
        raise ValueError(walk.problems[0].words)
    return message


def schema() -> dict[str, Any]:
    """What the CRD says of `config`: every field of the message that has no place in the spec, with its type.

    Typed to the last field, because an object of any depth would stop every reader that limits its recursion, the
    operator's own watch first.
    """
    return _object(model_config_pb2.ModelConfig.DESCRIPTOR, "")


def _object(descriptor: Any, prefix: str) -> dict[str, Any]:
    fields = {field.name: f"{prefix}{field.name}" for field in descriptor.fields}
    return {
        "type": "object",
        "properties": {
            field.name: {**_property(field, fields[field.name]), "description": f"Triton's {fields[field.name]}."}
            for field in descriptor.fields
            if fields[field.name] not in OWNED
        },
    }


def _property(field: Any, path: str) -> dict[str, Any]:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        value = _single(inner.fields_by_name["value"], path)
        return {"type": "object", "maxProperties": MAX_ENTRIES, "additionalProperties": value}
    if field.is_repeated:
        return {"type": "array", "maxItems": MAX_ENTRIES, "items": _single(field, path)}
    return _single(field, path)


def _single(field: Any, path: str) -> dict[str, Any]:
    kind = field.type
    if field.message_type is not None:
        return _object(field.message_type, f"{path}.")
    if kind == FieldDescriptor.TYPE_STRING:
        return {"type": "string", "maxLength": MAX_TEXT}
    if kind == FieldDescriptor.TYPE_BOOL:
        return {"type": "boolean"}
    if kind == FieldDescriptor.TYPE_ENUM:
        return {"type": "string", "enum": _options(field)}
    if kind in _INTEGERS:
        low, high = _INTEGERS[kind]
        return {"type": "integer", "minimum": max(low, 1 - 2**53), "maximum": min(high, 2**53 - 1)}
    return {"type": "number", "minimum": -_MAX_FLOAT, "maximum": _MAX_FLOAT}


def _options(field: Any) -> list[str]:
    return [option.name for option in field.enum_type.values if option.name != "TYPE_INVALID"]


class _Walk:
    """Fills a message from data; what doesn't fit is collected."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def message(self, message: Any, data: Any, place: tuple[str | int, ...]) -> None:
        """Set the message's fields from a map of their names."""
        descriptor = message.DESCRIPTOR
        if not isinstance(data, dict):
            self._add(place, f"must be a map of the fields of {descriptor.name}", data)
            return
        chosen: dict[str, str] = {}
        for key, value in data.items():
            where = (*place, str(key))
            field = descriptor.fields_by_name.get(str(key))
            if field is None:
                self._add(where, _unknown(descriptor, str(key)), None)
                continue
            oneof = field.containing_oneof
            if oneof is not None:
                other = chosen.setdefault(oneof.name, field.name)
                if other != field.name:
                    self._add(where, f"excludes {other}; keep one of them", None)
                    continue
            self._field(message, field, value, where)

    def _field(self, message: Any, field: Any, value: Any, where: tuple[str | int, ...]) -> None:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            self._map(getattr(message, field.name), field.message_type, value, where)
        elif field.is_repeated:
            if not isinstance(value, list):
                self._add(where, "must be a list; begin each entry with '- '", value)
                return
            if len(value) > MAX_ENTRIES:
                self._add(where, f"must have at most {MAX_ENTRIES} entries; remove some", None)
                return
            for index, entry in enumerate(value):
                if field.message_type is not None:
                    self.message(getattr(message, field.name).add(), entry, (*where, index))
                else:
                    with _Into(self, (*where, index), entry):
                        getattr(message, field.name).append(_scalar(field, entry))
        elif field.message_type is not None:
            part = getattr(message, field.name)
            part.SetInParent()  # {} says that the field is there, which many of these messages mean
            self.message(part, value, where)
        else:
            with _Into(self, where, value):
                setattr(message, field.name, _scalar(field, value))

    def _map(self, entries: Any, entry: Any, value: Any, where: tuple[str | int, ...]) -> None:
        if not isinstance(value, dict):
            self._add(where, "must be a map of keys and values", value)
            return
        if len(value) > MAX_ENTRIES:
            self._add(where, f"must have at most {MAX_ENTRIES} entries; remove some", None)
            return
        keys, values = entry.fields_by_name["key"], entry.fields_by_name["value"]
        for key, part in value.items():
            place = (*where, str(key))
            with _Into(self, place, key):
                name = _scalar(keys, str(key))
                if values.message_type is not None:
                    self.message(entries[name], part, place)
                else:
                    with _Into(self, place, part):
                        entries[name] = _scalar(values, part)

    def _add(self, place: tuple[str | int, ...], words: str, value: Any) -> None:
        self.problems.append(Problem(place, words, value))


class _Into:
    """Turns a refused value into a finding at its place."""

    def __init__(self, walk: _Walk, place: tuple[str | int, ...], value: Any) -> None:
        self._walk, self._place, self._value = walk, place, value

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, _Refused):
            return False
        self._walk.problems.append(Problem(self._place, str(error), self._value))
        return True


def _scalar(field: Any, value: Any) -> Any:
    kind = field.type
    if kind in _INTEGERS:
        return _integer(kind, value)
    if kind == FieldDescriptor.TYPE_STRING:
        return _text(value)
    if kind == FieldDescriptor.TYPE_ENUM:
        return _option(field, value)
    if kind == FieldDescriptor.TYPE_BOOL:
        if not isinstance(value, bool):
            raise _Refused("must be true or false; write it without quotes")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Refused("must be a number; write it without quotes")
    if not math.isfinite(value) or abs(value) > _MAX_FLOAT:
        raise _Refused(f"must be a number from -{_MAX_FLOAT} to {_MAX_FLOAT}")
    return float(value)


def _option(field: Any, value: Any) -> int:
    names = _options(field)
    if value not in names:
        near = difflib.get_close_matches(str(value)[:80], names, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise _Refused(f"must be one of {', '.join(names)}{hint}")
    return int(field.enum_type.values_by_name[value].number)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Refused("must be text; put it in quotes")
    if len(value) > MAX_TEXT:
        raise _Refused(f"must be at most {MAX_TEXT} characters; shorten it")
    if not _PLAIN.fullmatch(value):
        raise _Refused("must be a single line without control characters; remove tabs and line breaks")
    if not _encodable(value):
        raise _Refused("must be valid Unicode text; remove the broken characters")
    return value


def _integer(kind: int, value: Any) -> int:
    low, high = _INTEGERS[kind]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    elif kind in _LONG and isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,20}", value, re.ASCII):
        value = int(value)  # JSON's way to write what a float can't hold
    if isinstance(value, bool) or not isinstance(value, int):
        raise _Refused("must be an integer")
    if not low <= value <= high:
        raise _Refused(f"must be from {low} to {high}")
    return value


def _encodable(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unknown(descriptor: Any, key: str) -> str:
    names = list(descriptor.fields_by_name)
    near = difflib.get_close_matches(key[:80], names, n=1, cutoff=0.5)
    return f"is not a field of {descriptor.name}; {f'did you mean {near[0]}?' if near else 'remove it'}"


def _owned(model: Model) -> Iterator[Problem]:
    """What the spec says elsewhere."""
    for path, field in OWNED.items():
        here: Any = model.config
        parts = path.split(".")
        for part in parts:
            here = here.get(part, _ABSENT) if isinstance(here, dict) else _ABSENT
        if here is not _ABSENT:
            says = "say" if " and " in field else "says"
            words = f"is what the model's {field} {says} in the spec, where it is checked; set {field} instead"
            yield Problem(("config", *parts), words)


_ABSENT: Final = object()


def _meaning(message: Any, model: Model) -> Iterator[Problem]:
    """What Triton checks itself (`ValidateBatchIO`, `ValidateModelMetrics`), and what could load a stranger's code."""
    yield from _custom_backend(message, model)
    yield from _files(message)
    yield from _agents(message)
    yield from _batch_tensors(message, model)
    for index, control in enumerate(message.model_metrics.metric_control):
        place = ("config", "model_metrics", "metric_control", index)
        if not control.metric_identifier.family:
            yield Problem((*place, "metric_identifier", "family"), "is required; add the metric's name")
        if not control.histogram_options.buckets:
            yield Problem((*place, "histogram_options", "buckets"), "are required; add the buckets' upper bounds")
    if message.HasField("ensemble_scheduling") and model.format != "Ensemble":
        yield Problem(("config", "ensemble_scheduling"), "is for format Ensemble; remove it")
    accelerators = message.optimization.execution_accelerators
    said = model.optimization
    if said is not None and accelerators.gpu_execution_accelerator and said.tensor_rt is not None:
        words = "is what optimization.tensorRT says already; keep one of them"
        yield Problem(("config", "optimization", "execution_accelerators", "gpu_execution_accelerator"), words)
    if said is not None and accelerators.cpu_execution_accelerator and said.open_vino is not None:
        words = "is what optimization.openVINO says already; keep one of them"
        yield Problem(("config", "optimization", "execution_accelerators", "cpu_execution_accelerator"), words)


def _custom_backend(message: Any, model: Model) -> Iterator[Problem]:
    """A backend that no format stands for, such as fil or one of an image of one's own."""
    if not message.backend:
        return
    place = ("config", "backend")
    format_ = next((name for name, row in BACKENDS.items() if row.backend == message.backend), None)
    if format_ is not None:
        yield Problem(place, f"is what format {format_} says; set format: {format_} and remove it", message.backend)
    elif model.format != "Auto":
        words = f"is for format Auto, as {model.format} has a backend; set format: Auto or remove it"
        yield Problem(place, words, message.backend)
    elif not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", message.backend):
        words = "must be a backend's name such as fil: letters, digits, '_' and '-'; correct it"
        yield Problem(place, words, message.backend)


def _files(message: Any) -> Iterator[Problem]:
    inside = "must be a path in the model's folder, of letters, digits and . _ + = @ ~ , -, without '..'; correct it"
    for index, name in enumerate(message.model_operations.op_library_filename):
        if not re.fullmatch(RELATIVE_PATH, name):
            yield Problem(("config", "model_operations", "op_library_filename", index), inside, name)
    for capability, name in sorted(message.cc_model_filenames.items()):
        if not re.fullmatch(r"[0-9]{1,2}[.][0-9]", capability):
            words = "must have compute capabilities such as 8.0 as keys; correct the key"
            yield Problem(("config", "cc_model_filenames", capability), words)
        if not re.fullmatch(RELATIVE_PATH, name):
            yield Problem(("config", "cc_model_filenames", capability), inside, name)
    if message.runtime and not re.fullmatch(r"(lib)?[A-Za-z0-9_][A-Za-z0-9_-]*[.](so|py)", message.runtime):
        words = "must be the name of a backend's library, such as libtriton_onnxruntime.so, without a path"
        yield Problem(("config", "runtime"), words, message.runtime)
    for index, accelerator in enumerate(message.optimization.execution_accelerators.gpu_execution_accelerator):
        if LIBRARIES_PARAMETER in accelerator.parameters:
            place = ("config", "optimization", "execution_accelerators", "gpu_execution_accelerator", index)
            words = "loads code of any path; remove it, and put the plug-ins into runtime.image"
            yield Problem((*place, "parameters", LIBRARIES_PARAMETER), words)


def _agents(message: Any) -> Iterator[Problem]:
    for index, agent in enumerate(message.model_repository_agents.agents):
        if agent.name != _AGENT:
            words = f"must be {_AGENT}: another agent may change the model after its digest was verified; remove it"
            yield Problem(("config", "model_repository_agents", "agents", index, "name"), words, agent.name)


def _batch_tensors(message: Any, model: Model) -> Iterator[Problem]:
    inputs, outputs = {tensor.name for tensor in model.inputs}, {tensor.name for tensor in model.outputs}
    numbers = {model_config_pb2.DataType.Value("TYPE_INT32"), model_config_pb2.DataType.Value("TYPE_FP32")}
    for kind, entries in (("batch_input", message.batch_input), ("batch_output", message.batch_output)):
        for index, entry in enumerate(entries):
            place = ("config", kind, index)
            if len(entry.source_input) != 1:
                yield Problem((*place, "source_input"), "must name one input; correct it", list(entry.source_input))
            elif inputs and entry.source_input[0] not in inputs:  # else Triton finds out what there is
                words = "must be one of the model's inputs; add it to inputs, or correct it"
                yield Problem((*place, "source_input", 0), words, entry.source_input[0])
            if kind == "batch_input" and entry.data_type not in numbers:
                yield Problem((*place, "data_type"), "must be TYPE_INT32 or TYPE_FP32; correct it")
            if not entry.target_name:
                yield Problem((*place, "target_name"), "is required; add the tensor's name")
            for number, name in enumerate(entry.target_name):
                if kind == "batch_output" and outputs and name not in outputs:
                    words = "must be one of the model's outputs; add it to outputs, or correct it"
                    yield Problem((*place, "target_name", number), words, name)
