"""What a server says it has loaded, against what its config.pbtxt asked for. Pure.

Only fields that the configuration sets are compared: what Triton completes by itself is no difference. The answers of
Triton are those of its model configuration extension, `docs/protocol/extension_model_configuration.md` of
triton-inference-server/server.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from google.protobuf import json_format, text_format
from google.protobuf.descriptor import FieldDescriptor
from tritonclient.grpc import model_config_pb2

from conch.api.shown import shown
from conch.triton.modelconfig import from_pbtxt

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from conch.api.model import Model

MAX_TOLD: Final = 4
"""Differences that one message tells of."""
_VERSION: Final = re.compile(r"[0-9]{1,19}")
_NOT_READ: Final = "the answer can't be read"
_UNSET: Final = "not set"
# Messages that hold one switch: without them it is off.
_SWITCHES: Final = frozenset({"model_transaction_policy", "response_cache"})
# The server puts a path in the place of its variables.
_VARIABLE: Final = "$$TRITON"

# Triton's path → the field of the model in the spec; the longest that fits is used.
_FIELDS: Final[dict[str, str]] = {
    "max_batch_size": "maxBatchSize",
    "backend": "format",
    "platform": "format",
    "default_model_filename": "file",
    "input": "inputs",
    "output": "outputs",
    "data_type": "dataType",
    "instance_group": "instances",
    "dynamic_batching": "batching",
    "dynamic_batching.preferred_batch_size": "batching.preferredSizes",
    "dynamic_batching.max_queue_delay_microseconds": "batching.maxQueueDelay",
    "dynamic_batching.preserve_ordering": "batching.preserveOrdering",
    "dynamic_batching.priority_levels": "batching.priorityLevels",
    "dynamic_batching.default_priority_level": "batching.defaultPriority",
    "dynamic_batching.default_queue_policy": "queue",
    "dynamic_batching.default_queue_policy.max_queue_size": "queue.maxSize",
    "dynamic_batching.default_queue_policy.default_timeout_microseconds": "queue.timeout",
    "dynamic_batching.default_queue_policy.timeout_action": "queue.timeoutAction",
    "dynamic_batching.default_queue_policy.allow_timeout_override": "queue.allowTimeoutOverride",
    "sequence_batching": "sequence",
    "sequence_batching.max_sequence_idle_microseconds": "sequence.idleTimeout",
    "model_transaction_policy.decoupled": "decoupled",
    "response_cache.enable": "responseCache",
    "version_policy": "versions",
    "ensemble_scheduling": "steps",
    "model_warmup": "warmup",
}


class UnreadableAnswer(ValueError):
    """A server's answer that is none of Triton's."""


@dataclass(frozen=True)
class Loaded:
    """One model as its server has loaded it."""

    config: Any
    """The `inference.ModelConfig` message with everything that Triton completed."""
    versions: tuple[str, ...]
    """The versions that are served, as text."""


@dataclass(frozen=True)
class Difference:
    """One value that the server has otherwise than the spec asks for."""

    field: str
    """Where it stands in the spec, such as `spec.models[0].maxBatchSize`."""
    wanted: str
    loaded: str
    fix: str


def parse_loaded(config: bytes, metadata: bytes) -> Loaded:
    """The answers to `/v2/models/M/config` and `/v2/models/M`. Raises UnreadableAnswer."""
    try:
        said = json.loads(config)
        if not isinstance(said, dict):
            raise UnreadableAnswer(_NOT_READ)
        # A newer server has fields that this client's message lacks.
        message = json_format.ParseDict(said, model_config_pb2.ModelConfig(), ignore_unknown_fields=True)
        versions = json.loads(metadata).get("versions") or []
        if not all(isinstance(version, str) and _VERSION.fullmatch(version) for version in versions):
            raise UnreadableAnswer(_NOT_READ)
        return Loaded(message, tuple(versions))
    except (ValueError, TypeError, AttributeError, RecursionError, json_format.ParseError) as error:
        raise UnreadableAnswer(_NOT_READ) from error


def planned_configs(plan: str) -> dict[str, Any]:
    """Model → the message of the config.pbtxt that a plan gives it; nothing of a plan that can't be read.

    The plan is what the pod runs with, which an older operator may have rendered otherwise than this one would (R7).
    """
    try:
        models = json.loads(plan)["models"]
        return {str(model["name"]): from_pbtxt(model["config"]) for model in models}
    except (ValueError, TypeError, KeyError, text_format.ParseError):
        return {}


def differences(model: Model, index: int, wanted: Any, loaded: Loaded) -> list[Difference]:
    """What the server has otherwise than `wanted`, the message of the model's config.pbtxt, sets."""
    root = f"spec.models[{index}]"
    found = [
        *_batch_size(model, root, wanted, loaded.config),
        *_tensors("input", root, wanted, loaded.config),
        *_tensors("output", root, wanted, loaded.config),
        *_versions(root, wanted, loaded),
    ]
    for field, value in wanted.ListFields():
        if field.name not in {"name", "max_batch_size", "input", "output"}:
            found += _field(field, value, loaded.config, _Place(root, field.name))
    return found


def sentence(found: Sequence[tuple[str, Sequence[Difference]]]) -> str:
    """Model by model what differs and what to write; the same for the same differences (R11)."""
    parts = []
    left = MAX_TOLD
    for model, ones in found:
        told = [
            f"{one.field} is {one.wanted} in the spec and {one.loaded} in the server: {one.fix}." for one in ones[:left]
        ]
        left -= len(told)
        if told:
            parts.append(f'Model "{model}": {" ".join(told)}')
    if sum(len(ones) for _, ones in found) > MAX_TOLD:
        parts.append("More differs.")
    return " ".join(parts)


def _batch_size(model: Model, root: str, wanted: Any, loaded: Any) -> Iterator[Difference]:
    asked, got = wanted.max_batch_size, loaded.max_batch_size
    field = f"{root}.maxBatchSize"
    if asked and asked != got:
        yield Difference(field, str(asked), str(got), f"set it to {got}, or build the model for batches of {asked}")
    elif model.max_batch_size == 0 and got:
        # Protobuf can't tell 0 from unset, so Triton completed it.
        fix = f"set it to {got}, or export the model with a first dimension that doesn't vary"
        yield Difference(field, "0", str(got), fix)
    elif not asked and got <= 1 and (loaded.HasField("dynamic_batching") or wanted.HasField("dynamic_batching")):
        fix = "set it to what the model takes: without it nothing is batched"
        yield Difference(field, "not set", str(got), fix)


def _tensors(kind: str, root: str, wanted: Any, loaded: Any) -> Iterator[Difference]:
    there = {tensor.name: tensor for tensor in getattr(loaded, kind)}
    asked = getattr(wanted, kind)
    for tensor in asked:
        field = f"{root}.{kind}s[{tensor.name}]"
        if tensor.name not in there:
            names = ", ".join(sorted(there)) or "none"
            yield Difference(field, "named", "absent", f"correct the name; the server has {names}")
            continue
        yield from _set_fields(tensor, there[tensor.name], _Place(field, ""))
    missing = [
        name for name, tensor in there.items() if name not in {one.name for one in asked} and not _optional(tensor)
    ]
    if asked and missing:
        # A client that was written from the spec would leave them out and be refused.
        yield Difference(
            f"{root}.{kind}s", "without " + ", ".join(sorted(missing)), "with them", f"add them to {kind}s"
        )


def _optional(tensor: Any) -> bool:
    return bool(getattr(tensor, "optional", False))


def _versions(root: str, wanted: Any, loaded: Loaded) -> Iterator[Difference]:
    missing = [str(number) for number in wanted.version_policy.specific.versions if str(number) not in loaded.versions]
    if missing:
        yield Difference(
            f"{root}.versions.numbers",
            ", ".join(str(number) for number in wanted.version_policy.specific.versions),
            ", ".join(loaded.versions) or "none",
            f"add version {' and '.join(missing)} to the source, or remove it here",
        )


@dataclass(frozen=True)
class _Place:
    """Where a value stands: the model in the spec, and Triton's path inside it."""

    root: str
    path: str

    def of(self, name: str) -> _Place:
        return _Place(self.root, f"{self.path}.{name}" if self.path else name)

    def at(self, key: Any) -> _Place:
        return _Place(self.root, f"{self.path}[{key}]")

    def __str__(self) -> str:
        """The field of the spec as far as it has one, the rest in Triton's own names."""
        parts = self.path.split(".")
        for length in range(len(parts), 0, -1):
            plain = ".".join(part.partition("[")[0] for part in parts[:length])
            if plain in _FIELDS:
                key = "".join(parts[length - 1].partition("[")[1:])
                return ".".join([self.root, _FIELDS[plain] + key, *parts[length:]])
        return f"{self.root}.{self.path}"

    def differs(self, wanted: str, loaded: str) -> Difference:
        fix = "write there what the server has, or correct the model"
        if loaded == _UNSET:
            fix = "the server dropped it; remove it, or correct what needs it"
        return Difference(str(self), wanted, loaded, fix)


def _set_fields(asked: Any, got: Any, place: _Place) -> Iterator[Difference]:
    """Compare every field that `asked` sets, and what is set inside it."""
    for field, value in asked.ListFields():
        yield from _field(field, value, got, place.of(field.name))


def _field(descriptor: Any, asked: Any, parent: Any, place: _Place) -> Iterator[Difference]:
    got = getattr(parent, descriptor.name)
    if descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry:
        yield from _map(descriptor.message_type.fields_by_name["value"], asked, got, place)
    elif _repeated(asked):
        yield from _list(descriptor, asked, got, place)
    elif descriptor.message_type is None:
        if not _same(asked, got):
            yield place.differs(_word(descriptor, asked), _word(descriptor, got))
    elif parent.HasField(descriptor.name) or descriptor.name in _SWITCHES:
        yield from _set_fields(asked, got, place)
    else:
        yield place.differs("set", _UNSET)


def _map(value: Any, asked: Any, got: Any, place: _Place) -> Iterator[Difference]:
    for key in sorted(asked):
        here = place.at(key)
        if key not in got:
            yield here.differs("set", _UNSET)
        elif value.message_type is not None:
            if _VARIABLE not in str(asked[key]):
                yield from _set_fields(asked[key], got[key], here)
        elif not _same(asked[key], got[key]):
            yield here.differs(_word(value, asked[key]), _word(value, got[key]))


def _list(descriptor: Any, asked: Any, got: Any, place: _Place) -> Iterator[Difference]:
    if descriptor.message_type is None:
        if len(asked) != len(got) or not all(_same(one, other) for one, other in zip(asked, got, strict=True)):
            yield place.differs(_words(descriptor, asked), _words(descriptor, got))
    elif len(asked) != len(got):
        yield place.differs(f"{len(asked)} of them", f"{len(got)} of them")
    else:
        for index, (one, other) in enumerate(zip(asked, got, strict=True)):
            yield from _set_fields(one, other, place.at(index) if len(asked) > 1 else place)


def _repeated(value: Any) -> bool:
    return not isinstance(value, str | bytes) and hasattr(value, "__len__") and hasattr(value, "__getitem__")


def _same(asked: Any, got: Any) -> bool:
    if isinstance(asked, float):
        return math.isclose(asked, got, rel_tol=1e-6)
    return bool(asked == got)


def _words(descriptor: Any, values: Sequence[Any]) -> str:
    return f"[{', '.join(_word(descriptor, value) for value in values)}]"


def _word(descriptor: Any, value: Any) -> str:
    if descriptor.type == FieldDescriptor.TYPE_ENUM:
        known = descriptor.enum_type.values_by_number.get(value)
        if known is None:
            return str(value)  # of a newer release
        name: str = known.name
        return name.removeprefix("TYPE_").removeprefix("KIND_")
    if descriptor.name.endswith("_microseconds"):
        return f"{value / 1000:g}ms"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else shown(value) if isinstance(value, str) else str(value)


def revision(template: Mapping[str, Any], plan_annotation: str, container: str) -> tuple[str, str]:
    """What decides what a pod's server loads: the plan and the server's image; of a template or of a pod."""
    annotations = template["metadata"].get("annotations") or {}
    containers = (template.get("spec") or {}).get("containers") or ()
    image = next((one.get("image", "") for one in containers if one.get("name") == container), "")
    return annotations.get(plan_annotation, ""), image
