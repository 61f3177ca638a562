"""The plan that the operator writes and the init container `conch fetch` carries out. Pure."""

import re
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

SCHEMES = ("https", "image", "pvc")
STALL_TIMEOUT_MAX_S = 3600.0

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SHOWN_CHARACTERS = 80


class PlanError(ValueError):
    """The text is no plan; the message names the field, the value and the fix."""


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError("must be one path segment of letters, digits, '.', '_' and '-' that doesn't start with '.'")
    return value


def _digest(value: str) -> str:
    if not _DIGEST.fullmatch(value):
        raise ValueError("must be sha256: and 64 lower-case hexadecimal digits")
    return value


def _absolute(value: str) -> str:
    if not value.startswith("/") or not value.isprintable():
        raise ValueError("must be an absolute path of printable characters")
    if ".." in value.split("/"):
        raise ValueError("must not contain '..'; name the folder inside the volume directly")
    return value


Segment = Annotated[str, AfterValidator(_name)]
Digest = Annotated[str, AfterValidator(_digest)]
AbsolutePath = Annotated[str, AfterValidator(_absolute)]


class _Wire(BaseModel):
    """JSON in camelCase, attributes in snake_case. Unknown fields are refused: ignoring one could skip a check."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)


class PlannedModel(_Wire):
    """One model of the repository.

    `digest` is of the file's bytes (https, or a `path` that is a file) or of the tree (`storage.digest.tree_digest`).
    `mount` is where the volume of a pvc or image source is mounted, read-only and at the same place in Triton's
    container; `path` is the model's place inside it. `config` is the text of config.pbtxt.
    """

    name: Segment
    uri: str
    digest: Digest | None = None
    file_name: Segment
    mount: AbsolutePath | None = None
    path: AbsolutePath | None = None
    config: str

    @property
    def scheme(self) -> str:
        """The source's kind, one of SCHEMES."""
        return urlsplit(self.uri).scheme

    @model_validator(mode="after")
    def _source(self) -> Self:
        if self.scheme not in SCHEMES:
            raise ValueError(f"uri: {_shown(self.uri)} has no supported scheme; use {', '.join(SCHEMES)}")
        if self.scheme != "https":
            if self.mount is None:
                raise ValueError(f"mount: missing for {_shown(self.uri)}; set the folder where its volume is mounted")
            return self
        parts = urlsplit(self.uri)
        _ = parts.port  # raises ValueError for what is no port number
        if not parts.hostname or not self.uri.isascii() or not self.uri.isprintable() or " " in self.uri:
            raise ValueError(f"uri: {_shown(self.uri)} is no https URL; give host and path, percent-encoded")
        if parts.username is not None or parts.password is not None:
            raise ValueError("uri: credentials in a URL end up in logs; remove the part before '@'")
        if self.digest is None:
            raise ValueError("digest: missing; https sources need one, set source.digest")
        if self.mount is not None:
            raise ValueError(f"mount: {self.mount!r} is set for an https source; remove it")
        return self


class Plan(_Wire):
    """The whole repository of one pod. A transfer without a byte for `stall_timeout_seconds` is broken off."""

    models: Annotated[tuple[PlannedModel, ...], Field(min_length=1)]
    stall_timeout_seconds: Annotated[float, Field(gt=0, le=STALL_TIMEOUT_MAX_S)] = 60

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [model.name for model in self.models]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"models: two are named {name!r}; rename one")
        return self

    def to_json(self) -> str:
        """The plan on one line, always the same for the same plan: in a pod template a change would roll the pods."""
        return self.model_dump_json(by_alias=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what `to_json` wrote. Raises PlanError with every fault that was found."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            faults = [_fault(detail) for detail in error.errors(include_url=False, include_context=False)]
            raise PlanError("; ".join(faults)) from None


def _fault(detail: Any) -> str:
    where = "plan" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in detail["loc"])
    what = str(detail["msg"]).removeprefix("Value error, ")
    value = detail.get("input")
    given = f" {_shown(value)}" if isinstance(value, str | int | float) and where != "plan" else ""
    return f"{where}:{given} {what}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"
