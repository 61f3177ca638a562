"""Field types and rules shared by the custom resources: each check is said once, for pydantic and for the CRD. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_camel, to_snake
from pydantic_core import InitErrorDetails, PydanticCustomError, core_schema

if TYPE_CHECKING:
    from pydantic.json_schema import JsonSchemaValue

VALIDATIONS: Final = "x-kubernetes-validations"
# Pydantic's own escaping would read braces in a message as a template.
RULE_ERROR: Final = "conch_rule"

DURATION_PATTERN: Final = r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$"
QUANTITY_PATTERN: Final = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
WIRE: Final = "wire"
"""Key of the validation context that says: this is what a user wrote, not a value in code."""
MAX_TEXT: Final = 20
"""Characters of a duration or quantity."""

_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:ms|s|m|h))+")
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)")
_DURATION_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_QUANTITY_FACTOR: Final = {
    "m": Decimal("0.001"), "": Decimal(1), "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9),
    "T": Decimal(10**12), "P": Decimal(10**15), "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30),
    "Ti": Decimal(2**40), "Pi": Decimal(2**50),
}  # fmt: skip


def parse_duration(text: object) -> float:
    """Seconds of a duration such as `500ms`, `2m` or `1h30m`; ValueError names the fix."""
    if isinstance(text, float):
        return text  # a default or a value in code, already in seconds
    if not isinstance(text, str) or len(text) > MAX_TEXT or not _DURATION.fullmatch(text):
        raise ValueError("is not a duration; write a number and a unit, such as 500ms, 30s, 2m or 1h")
    return sum(float(number) * _DURATION_SECONDS[unit] for number, unit in _DURATION_PART.findall(text))


def format_duration(seconds: float) -> str:
    """The shortest duration string that parses back to the same microseconds, which is what Triton counts in."""
    microseconds = round(seconds * 1_000_000)
    if microseconds % 1000:
        return f"{microseconds // 1000}.{microseconds % 1000:03}".rstrip("0") + "ms"
    milliseconds = microseconds // 1000
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if milliseconds and milliseconds % size == 0:
            return f"{milliseconds // size}{unit}"
    return f"{milliseconds}ms"


def parse_quantity(text: object) -> Decimal:
    """The number that a Kubernetes quantity stands for (bytes, cores); ValueError names the fix."""
    known = isinstance(text, str) or (isinstance(text, int) and not isinstance(text, bool))
    match = _QUANTITY.fullmatch(str(text)) if known and len(str(text)) <= MAX_TEXT else None
    if match is None:
        raise ValueError("is not a quantity; write a number with an optional suffix, such as 500m, 2, 512Mi or 1Gi")
    return Decimal(match[1]) * _QUANTITY_FACTOR[match[2] or ""]


def canonical_quantity(text: str) -> str:
    """The form in which the API server stores a quantity: another one would show as a difference for ever."""
    match = _QUANTITY.fullmatch(text)
    thousandths = int((parse_quantity(text) * 1000).to_integral_value(ROUND_CEILING))
    if thousandths % 1000:
        return f"{thousandths}m"
    number, step, suffixes = thousandths // 1000, 1000, ("", "k", "M", "G", "T", "P", "E")
    if match and (match[2] or "").endswith("i") and number >= 1024:  # noqa: PLR2004 - below, the server writes no suffix
        step, suffixes = 1024, ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
    power = 0
    while number and number % step == 0 and power + 1 < len(suffixes):
        number, power = number // step, power + 1
    return f"{number}{suffixes[power]}"


def _check_duration(value: object, info: ValidationInfo) -> float:
    # A CR holds strings only; a number without a unit is refused there, as by the API server.
    if info.context and info.context.get(WIRE) and isinstance(value, float):
        value = None
    return parse_duration(value)


def _check_quantity(text: object) -> str:
    parse_quantity(text)
    return str(text)


Duration = Annotated[
    float,
    BeforeValidator(_check_duration),
    PlainSerializer(format_duration),
    WithJsonSchema({"type": "string", "pattern": DURATION_PATTERN, "maxLength": MAX_TEXT}),
]
"""Seconds, written as a string such as `500ms`."""

Quantity = Annotated[
    str,
    BeforeValidator(_check_quantity),
    WithJsonSchema({"x-kubernetes-int-or-string": True, "pattern": QUANTITY_PATTERN, "maxLength": MAX_TEXT}),
]
"""A Kubernetes quantity, kept as written."""


def cel(text: str) -> str:
    """A CEL string literal."""
    return json.dumps(text)


class Check:
    """One check of a value, as a CEL rule on its schema and as a validator with the same words.

    Subclasses say the CEL rule, the message and whether a validated value holds.
    """

    def rule(self) -> str:
        """The CEL expression over `self`."""
        raise NotImplementedError

    def words(self) -> str:
        """What is wrong and the fix, to be read after the field's name."""
        raise NotImplementedError

    def holds(self, value: Any) -> bool:
        """Whether a value that already has the right type is accepted."""
        raise NotImplementedError

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Validate after the type's own validation."""

        def check(value: Any) -> Any:
            if not self.holds(value):
                raise PydanticCustomError(RULE_ERROR, "{words}", {"words": self.words()})
            return value

        return core_schema.no_info_after_validator_function(check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Add the CEL rule to the type's schema."""
        result = handler(schema)
        rules = [*result.get(VALIDATIONS, []), {"rule": self.rule(), "message": self.words()}]
        return {**result, VALIDATIONS: rules}


@dataclass(frozen=True)
class Matches(Check):
    """A string matches a pattern (RE2 syntax that Python reads alike, without anchors)."""

    pattern: str
    message: str

    def rule(self) -> str:
        """The CEL expression."""
        return f"self.matches({cel(f'^(?:{self.pattern})$')})"

    def words(self) -> str:
        """What is wrong and the fix."""
        return self.message

    def holds(self, value: Any) -> bool:
        """Whether the value keeps the rule."""
        return re.fullmatch(self.pattern, value) is not None


@dataclass(frozen=True)
class KeysMatch(Check):
    """Every key of a map matches a pattern."""

    pattern: str
    message: str

    def rule(self) -> str:
        """The CEL expression."""
        return f"self.all(key, key.matches({cel(f'^(?:{self.pattern})$')}))"

    def words(self) -> str:
        """What is wrong and the fix."""
        return self.message

    def holds(self, value: Any) -> bool:
        """Whether the value keeps the rule."""
        return all(re.fullmatch(self.pattern, key) for key in value)


@dataclass(frozen=True)
class Between(Check):
    """A duration lies within bounds, which are durations themselves and allowed."""

    low: str
    high: str

    def rule(self) -> str:
        """The CEL expression."""
        return f"duration(self) >= duration('{self.low}') && duration(self) <= duration('{self.high}')"

    def words(self) -> str:
        """What is wrong and the fix."""
        return f"must be from {self.low} to {self.high}"

    def holds(self, value: Any) -> bool:
        """Whether the value keeps the rule."""
        return bool(parse_duration(self.low) <= value <= parse_duration(self.high))


@dataclass(frozen=True)
class Amount(Check):
    """A quantity lies within bounds, which are quantities themselves and allowed."""

    low: str
    high: str
    hint: str = ""

    def rule(self) -> str:
        """The CEL expression."""
        quantity = "quantity(string(self))"
        return f"!{quantity}.isLessThan(quantity('{self.low}')) && !{quantity}.isGreaterThan(quantity('{self.high}'))"

    def words(self) -> str:
        """What is wrong and the fix."""
        return f"must be from {self.low} to {self.high}{self.hint}"

    def holds(self, value: Any) -> bool:
        """Whether the value keeps the rule."""
        return parse_quantity(self.low) <= parse_quantity(value) <= parse_quantity(self.high)


@dataclass(frozen=True)
class ByName:
    """A list whose entries are told apart by their name, or by another field: a list-map in the CRD."""

    key: str = "name"
    """The field that tells them apart, in camelCase."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Refuse a name that an earlier entry has."""

        def check(value: list[Any]) -> list[Any]:
            seen: set[Any] = set()
            repeated = []
            for index, entry in enumerate(value):
                name = getattr(entry, to_snake(self.key))
                if name in seen:
                    words = f"is used twice; give each entry a {self.key} of its own"
                    error = PydanticCustomError(RULE_ERROR, "{words}", {"words": words})
                    repeated.append(InitErrorDetails(type=error, loc=(index, self.key), input=name))
                seen.add(name)
            if repeated:
                raise ValidationError.from_exception_data("list", repeated)
            return value

        return core_schema.no_info_after_validator_function(check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Mark the list as a list-map, whose duplicates the API server refuses."""
        return {**handler(schema), "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [self.key]}


@dataclass(frozen=True)
class Distinct:
    """A list of numbers or texts without repetition: a set in the CRD."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Refuse what an earlier entry holds."""

        def check(value: list[Any]) -> list[Any]:
            repeated = []
            for index, entry in enumerate(value):
                if entry in value[:index]:
                    error = PydanticCustomError(RULE_ERROR, "is listed twice; remove one")
                    repeated.append(InitErrorDetails(type=error, loc=(index,), input=entry))
            if repeated:
                raise ValidationError.from_exception_data("list", repeated)
            return value

        return core_schema.no_info_after_validator_function(check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Mark the list as a set, whose duplicates the API server refuses."""
        return {**handler(schema), "x-kubernetes-list-type": "set"}


@dataclass(frozen=True)
class Pattern:
    """A string matches a pattern, by the schema's own `pattern`: where a CEL rule would cost too much."""

    pattern: str
    message: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Validate after the type's own validation."""

        def check(value: Any) -> Any:
            if not re.fullmatch(self.pattern, value):
                raise PydanticCustomError(RULE_ERROR, "{words}", {"words": self.message})
            return value

        return core_schema.no_info_after_validator_function(check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Say the pattern in the schema."""
        return {**handler(schema), "pattern": f"^(?:{self.pattern})$"}


@dataclass(frozen=True)
class Problem:
    """A finding of a check that only the offline validation makes: a graph, sizes, a message's fields."""

    place: tuple[str | int, ...]
    """Where it is below the checked object: fields in camelCase, indices of lists, keys of maps."""
    words: str
    """What is wrong and the fix, to be read after the field's name."""
    value: Any = None
    """The value at fault; None: the words say it all."""

    def error(self) -> InitErrorDetails:
        """The finding as pydantic's."""
        error = PydanticCustomError(RULE_ERROR, "{words}", {"words": self.words})
        return InitErrorDetails(type=error, loc=self.place, input=self.value)


@dataclass(frozen=True)
class Rule:
    """A rule over several fields of one object: a CEL rule of the CRD, and the same check in pydantic."""

    field: str
    """The field at fault, in camelCase, dotted below the object that holds the rule."""
    cel: str
    message: str
    """What is wrong and the fix, to be read after the field's name."""
    holds: Callable[[Any], bool]
    """Whether a validated object keeps the rule."""
    words: Callable[[Any], str] | None = None
    """The message with the object's values in it, where the API server's own `Invalid value` isn't clear enough."""

    def to_dict(self) -> dict[str, str]:
        """The entry of x-kubernetes-validations."""
        return {"rule": self.cel, "message": self.message, "fieldPath": f".{self.field}"}

    def error(self, resource: Any) -> InitErrorDetails:
        """The finding, at the field at fault."""
        path, value = self.field.split("."), resource
        for part in path:
            value = getattr(value, to_snake(part))
        words = self.message if self.words is None else self.words(resource)
        error = PydanticCustomError(RULE_ERROR, "{words}", {"words": words})
        return InitErrorDetails(type=error, loc=tuple(path), input=value)


class Resource(BaseModel):
    """Base of every part of a custom resource: camelCase outside, frozen, unknown fields and other types refused."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()
    checks: ClassVar[tuple[Callable[[Any], Iterable[Problem]], ...]] = ()
    """What CEL can't say or would pay too much for; runs on an object that keeps its rules."""

    @model_validator(mode="after")
    def _keep_rules(self) -> Self:
        broken = [rule.error(self) for rule in self.rules if not rule.holds(self)]
        if not broken:
            broken = [problem.error() for check in self.checks for problem in check(self)]
        if broken:
            raise ValidationError.from_exception_data(type(self).__name__, broken)
        return self

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Add the rules to the object's schema."""
        result = handler.resolve_ref_schema(handler(schema))
        if cls.rules:
            result[VALIDATIONS] = [rule.to_dict() for rule in cls.rules]
        return result
