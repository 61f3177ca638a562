"""InferenceService: what a user writes, and how it is read. Pure; the source of its CRD."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import BaseModel, Field, ValidationError
from pydantic.alias_generators import to_snake

from conch import names
from conch.api.accelerator import Accelerator
from conch.api.combinations import check_service
from conch.api.demands import check_engines, check_memory
from conch.api.fields import RULE_ERROR, WIRE, ByName, Problem, Resource, Rule, parse_quantity
from conch.api.model import Model
from conch.api.placement import Placement, Resources
from conch.api.runtime import Runtime
from conch.api.scaling import Scaling
from conch.api.shown import shown
from conch.api.text import full_match
from conch.triton.ensemble import check_ensembles

_DEVICES: Final = "(has(self.accelerator.claim) ? self.accelerator.claim.count : self.accelerator.count)"


class InferenceServiceSpec(Resource):
    """What a user wants."""

    rules = (
        Rule(
            "accelerator.count",
            "self.accelerator.count >= 1 || self.models.all(model, (!has(model.instances) || "
            "!has(model.instances.kind) || model.instances.kind != 'GPU') && (!has(model.instanceGroups) || "
            "model.instanceGroups.all(group, !has(group.kind) || group.kind != 'GPU')))",
            "must be 1 or more when a model has instances.kind GPU; raise it or use kind CPU",
            lambda spec: (
                spec.accelerator.count >= 1
                or all(
                    group.kind != "GPU" for model in spec.models for group in (model.instances, *model.instance_groups)
                )
            ),
        ),
        Rule(
            "runtime.responseCache",
            "has(self.runtime.responseCache) || self.models.all(model, !model.responseCache)",
            "is required when a model has responseCache; add responseCache: {local: {size: 64Mi}}, or remove it there",
            lambda spec: (
                spec.runtime.response_cache is not None or not any(model.response_cache for model in spec.models)
            ),
        ),
        Rule(
            "runtime.sharedMemory",
            "quantity(string(self.runtime.sharedMemory)).isLessThan(quantity(string(self.resources.memory)))",
            "must be less than resources.memory, which it counts towards; lower it or raise the memory",
            lambda spec: _less(spec.runtime.shared_memory, spec.resources.memory),
        ),
        Rule(
            "runtime.responseCache.local.size",
            "!has(self.runtime.responseCache) || !has(self.runtime.responseCache.local) || "
            "quantity(string(self.runtime.responseCache.local.size)).add(quantity(string(self.runtime.sharedMemory)))"
            ".isLessThan(quantity(string(self.resources.memory)))",
            "must be less than resources.memory, together with runtime.sharedMemory; lower it or raise the memory",
            lambda spec: (
                spec.runtime.response_cache is None
                or spec.runtime.response_cache.local is None
                or parse_quantity(spec.runtime.response_cache.local.size) + parse_quantity(spec.runtime.shared_memory)
                < parse_quantity(spec.resources.memory)
            ),
        ),
        Rule(
            "runtime.memoryPools.pinned",
            "!has(self.runtime.memoryPools) || !has(self.runtime.memoryPools.pinned) || "
            "quantity(string(self.runtime.memoryPools.pinned))"
            ".add(quantity(string(self.runtime.sharedMemory))).isLessThan(quantity(string(self.resources.memory)))",
            "must be less than resources.memory, together with runtime.sharedMemory; lower it or raise the memory",
            lambda spec: (
                spec.runtime.memory_pools.pinned is None
                or parse_quantity(spec.runtime.memory_pools.pinned) + parse_quantity(spec.runtime.shared_memory)
                < parse_quantity(spec.resources.memory)
            ),
        ),
        Rule(
            "runtime.memoryPools.cudaPerGPU",
            f"!has(self.runtime.memoryPools) || !has(self.runtime.memoryPools.cudaPerGPU) || {_DEVICES} >= 1",
            "needs an accelerator; remove it, or raise accelerator.count",
            lambda spec: spec.runtime.memory_pools.cuda_per_gpu is None or spec.accelerator.devices >= 1,
        ),
        Rule(
            "runtime.memoryPools.statePerGPU",
            f"!has(self.runtime.memoryPools) || !has(self.runtime.memoryPools.statePerGPU) || {_DEVICES} >= 1",
            "needs an accelerator; remove it, or raise accelerator.count",
            lambda spec: spec.runtime.memory_pools.state_per_gpu is None or spec.accelerator.devices >= 1,
        ),
        Rule(
            "runtime.rateLimiter.resources",
            "!has(self.runtime.rateLimiter) || !has(self.runtime.rateLimiter.resources) || "
            f"self.runtime.rateLimiter.resources.all(resource, !has(resource.gpu) || resource.gpu < {_DEVICES})",
            "must each have a gpu below the number of the pod's accelerators, counted from 0; lower it, or raise "
            "accelerator.count",
            lambda spec: (
                spec.runtime.rate_limiter is None
                or all(
                    (entry.gpu or 0) < spec.accelerator.devices
                    for entry in spec.runtime.rate_limiter.resources
                    if entry.gpu is not None
                )
            ),
        ),
        Rule(
            "runtime.metrics.counters",
            "self.runtime.metrics.counters || self.scaling.mode == 'External'",
            "must be true unless scaling.mode is External, since the autoscaler reads them; remove it or set the mode",
            lambda spec: spec.runtime.metrics.counters or spec.scaling.mode == "External",
        ),
        Rule(
            "scaling.queueDepth.target",
            "self.models.all(model, !has(model.queue) || !has(model.queue.maxSize) || "
            "self.scaling.queueDepth.target < double(model.queue.maxSize))",
            "must be below every model's queue.maxSize, or waiting requests can never reach it; lower the target or "
            "raise maxSize",
            lambda spec: all(
                model.queue is None
                or model.queue.max_size is None
                or spec.scaling.queue_depth.target < model.queue.max_size
                for model in spec.models
            ),
        ),
    )

    checks: ClassVar[tuple[Callable[[Any], Iterable[Problem]], ...]] = (
        check_memory,
        check_engines,
        check_service,
        check_ensembles,
    )

    models: Annotated[list[Model], ByName()] = Field(
        min_length=1, max_length=16, description="The models that the service answers for, all in every pod."
    )
    runtime: Runtime = Field(Runtime(), description="The Triton server.")
    accelerator: Accelerator = Field(Accelerator(), description="The accelerators of one pod.")
    resources: Resources = Field(Resources(), description="CPU and memory of the Triton container.")
    placement: Placement = Field(Placement(), description="Where the pods may run.")
    scaling: Scaling = Field(Scaling(), description="How many replicas there are.")
    paused: bool = Field(
        False, description="True: Conch changes nothing of this service; what runs keeps running. Default: false."
    )


def _less(one: str, other: str) -> bool:
    return parse_quantity(one) < parse_quantity(other)


NAME_PATTERN: Final = r"[a-z]([a-z0-9-]*[a-z0-9])?"
NAME_CEL: Final = (
    f"self.metadata.name.size() <= {names.MAX_SERVICE_NAME} && "
    f"self.metadata.name.matches({json.dumps(f'^(?:{NAME_PATTERN})$')})"
)
NAME_MESSAGE: Final = (
    f"metadata.name must be at most {names.MAX_SERVICE_NAME} lower-case letters, digits and '-', begin with a letter "
    "and end with a letter or digit; rename the service"
)
"""The root's rule names its field itself: a fieldPath may not lead into metadata."""

_MAX_SHOWN: Final = 80
_MAX_PROBLEMS: Final = 50
_MAX_PLACES: Final = 3


class InvalidSpec(ValueError):
    """The resource can't be what the user wants; `problems` has one line for each finding, field and fix named."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


def parse_service(obj: Mapping[str, Any]) -> InferenceServiceSpec:
    """The spec of an InferenceService as a user or the API server has it; the same checks as the API server's.

    Raises:
        InvalidSpec: listing every problem as `spec.models[1].source.uri: … (got "…")`.
    """
    problems = _head_problems(obj)
    try:
        spec = InferenceServiceSpec.model_validate(
            _without_nulls(obj.get("spec", {})), by_alias=True, by_name=False, context={WIRE: True}
        )
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=True)
        problems += list(dict.fromkeys(_problem(finding) for finding in found[:_MAX_PROBLEMS]))
        more = error.error_count() - _MAX_PROBLEMS
        raise InvalidSpec(problems if more <= 0 else [*problems, f"and {more} more"]) from None
    if problems:
        raise InvalidSpec(problems)
    return spec


def _head_problems(obj: Mapping[str, Any]) -> list[str]:
    problems = []
    for field, wanted in (("apiVersion", names.API_VERSION), ("kind", names.SERVICE_KIND)):
        # Entries of a LIST may come without both.
        if obj.get(field, wanted) != wanted:
            problems.append(f"{field}: must be {wanted} (got {shown(obj[field])})")
    metadata = obj.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if not isinstance(name, str) or len(name) > names.MAX_SERVICE_NAME or not full_match(NAME_PATTERN, name):
        problems.append(f"metadata.name: {NAME_MESSAGE.removeprefix('metadata.name ')} (got {shown(name)})")
    return problems


def _without_nulls(value: Any) -> Any:
    """Drop null fields, as the API server does on create and update (server-side apply refuses some of them)."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    return value


def _problem(finding: Mapping[str, Any]) -> str:
    place = ["spec", *finding["loc"]]
    words = _words(finding, place)
    value = _plain(finding["input"])
    hidden = value in (None, [], {}) or finding["type"] in {"missing", "extra_forbidden"}
    return f"{_path(place)}: {words}{'' if hidden else f' (got {shown(value)})'}"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)  # a whole number as its user wrote it
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return value.model_dump(mode="json", by_alias=True, exclude_unset=True) if isinstance(value, BaseModel) else value


def _path(place: list[Any]) -> str:
    text = ""
    for part in place:
        if part == "[key]":
            continue
        if isinstance(part, int):
            text += f"[{part}]"
        elif full_match(r"[A-Za-z][A-Za-z0-9_]{0,62}", part):
            text += f".{part}"
        else:
            text += f"[{shown(part)}]"
    return text.removeprefix(".")


_LIMITS: Final = {
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "string_too_long": "must be at most {max_length} characters; shorten it",
    "string_too_short": "must not be empty; fill it in",
    "too_long": "must have at most {max_length} entries; remove some",
    "too_short": "must have at least {min_length} entry; add one",
    "int_type": "must be a whole number; write it without quotes",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "must be a smaller number",
    "float_type": "must be a number; write it without quotes",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false; write it without quotes",
    "string_type": "must be text; put it in quotes",
    "string_unicode": "must be valid Unicode text; remove the broken characters",
    "list_type": "must be a list; begin each entry with '- '",
    "dict_type": "must be a map of keys and values",
    "model_type": "must be an object with fields",
    "missing": "is required; add it",
}


@functools.cache
def _fields() -> dict[tuple[str, ...], tuple[str, ...]]:
    """The field names of each object of the spec, by the way to it without indices, for a hint at a wrong one."""
    schema = InferenceServiceSpec.model_json_schema(by_alias=True)
    found: dict[tuple[str, ...], tuple[str, ...]] = {}
    waiting: list[tuple[tuple[str, ...], Any]] = [((), schema)]
    while waiting:
        way, part = waiting.pop()
        if "$ref" in part:
            part = schema["$defs"][part["$ref"].rpartition("/")[2]]
        waiting += [(way, inner) for inner in (*part.get("anyOf", ()), *part.get("allOf", ()))]
        if "items" in part:
            waiting.append((way, part["items"]))
        if "properties" in part:
            found[way] = tuple(part["properties"])
            waiting += [((*way, name), inner) for name, inner in part["properties"].items()]
    return found


def _not_a_field(place: list[Any]) -> str:
    """The words for an unknown field: one that is spelled alike there, Triton's own name, or one that has its place."""
    from conch.triton.passthrough import OWNED

    name, here = str(place[-1])[:_MAX_SHOWN], tuple(step for step in place[1:-1] if isinstance(step, str))
    if here == ("models",) and (owned := {**OWNED, "backend": "format"}.get(to_snake(name))):
        return f"is not a field; did you mean {owned}?"
    if near := difflib.get_close_matches(name, _fields().get(here, ()), n=1):
        return f"is not a field; did you mean {near[0]}?"
    places = [way for way, names_there in _fields().items() if name in names_there and "config" not in way]
    if places:
        # A line that is indented too far or too little: the nearest objects that have such a field.
        distances = {way: _distance(way, here) for way in places}
        nearest = sorted(way for way in places if distances[way] == min(distances.values()))[:_MAX_PLACES]
        meant = " or ".join(".".join(("spec", *way, name)) for way in nearest)
        return f"is not a field here; did you mean {meant}? Indent it so, or remove it"
    return "is not a field; remove it"


def _distance(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """Steps up and down from one object of the spec to another."""
    shared = next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    common = min(len(one), len(other)) if shared is None else shared
    return len(one) + len(other) - 2 * common


def _words(finding: Mapping[str, Any], place: list[Any]) -> str:
    kind, context = finding["type"], finding.get("ctx", {})
    if kind == RULE_ERROR:
        return str(finding["msg"])
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        options = str(context["expected"]).replace("'', ", "").replace("'", "")
        return f"is not supported; use {options}{_near_option(finding['input'], options)}"
    if kind == "extra_forbidden":
        return _not_a_field(place)
    return _LIMITS[kind].format(**context) if kind in _LIMITS else str(finding["msg"])


def _near_option(value: Any, options: str) -> str:
    by_lower = {option.lower(): option for option in options.replace(" or ", ", ").split(", ")}
    text = value[:_MAX_SHOWN].lower() if isinstance(value, str) else ""
    near = difflib.get_close_matches(text, by_lower, n=1, cutoff=0.5)
    return f"; did you mean {by_lower[near[0]]}?" if near else ""
