"""The plan that the operator writes and the init container `conch fetch` carries out. Pure."""

import re
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

VOLUME_SCHEMES = ("image", "pvc")
"""The kubelet mounts what these name."""
REMOTE_SCHEMES = ("gs", "https", "oci", "s3")
"""`conch fetch` downloads what these name."""
SCHEMES = (*REMOTE_SCHEMES, *VOLUME_SCHEMES)
STALL_TIMEOUT_MAX_S = 3600.0

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PINNED = re.compile(r"oci://.+@(sha256:[0-9a-f]{64})")
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


def _relative(value: str) -> str:
    if not value.isprintable() or "\\" in value or any(part in ("", ".", "..") for part in value.split("/")):
        raise ValueError("must be a relative path of printable characters without '.', '..' and empty parts")
    return value


def _origin(value: str) -> str:
    try:
        parts = urlsplit(value)
        _ = parts.port
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ValueError("must be http://HOST:PORT or https://HOST:PORT")
    if "@" in parts.netloc:
        raise ValueError("credentials in a URL end up in logs; remove the part before '@'")
    return value


Segment = Annotated[str, AfterValidator(_name)]
Digest = Annotated[str, AfterValidator(_digest)]
AbsolutePath = Annotated[str, AfterValidator(_absolute)]
RelativePath = Annotated[str, AfterValidator(_relative)]
Origin = Annotated[str, AfterValidator(_origin)]
Expects = Literal["File", "Folder", "FileOrFolder", "Nothing", "Anything"]
Identity = Literal["Anonymous", "ServiceAccount"]


class _Wire(BaseModel):
    """JSON in camelCase, attributes in snake_case. Unknown fields are refused: ignoring one could skip a check."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)


class PlannedEngine(_Wire):
    """What a TensorRT plan file was built with, as its user says it; None, and the last two's defaults: not said."""

    tensor_rt: Annotated[str | None, Field(alias="tensorRT")] = None
    compute_capability: str | None = None
    platform: str | None = None
    version_compatible: bool = False
    hardware_compatibility: Literal["None", "AmperePlus", "SameComputeCapability"] = "None"


class PlannedModel(_Wire):
    """One model of the repository.

    What it is:
        `expects` says what stands in a version's folder: a file or a folder called `file_name`, either of them,
        nothing (an ensemble, which has no source: `uri` is None and an empty folder 1 is made), or anything (Triton
        finds out). `versions` are the numbers that must be there, empty: any. `extra_files` must be there too; they
        are relative to the model's folder. `config` is the text of config.pbtxt.
    Where it comes from:
        `digest` is of the file's bytes (https, an object, a `path` that is a file), of the tree
        (`storage.digest.tree_digest`), or of an OCI artifact's manifest. `mount` is where the volume of a pvc or image
        source is mounted, read-only and at the same place in Triton's container; `path` is the model's place inside
        it. `secret` is the folder in which a Secret's keys are mounted as files, `ca` a PEM file of authorities that
        are trusted for this source besides the usual ones. `engine` is what the user says of a TensorRT plan.
    `field` is the model's place in the resource, such as `spec.models[0]`: messages name it.
    """

    name: Segment
    uri: str | None = None
    digest: Digest | None = None
    file_name: Segment | None = None
    expects: Expects = "File"
    field: str = ""
    versions: tuple[Annotated[int, Field(ge=1)], ...] = ()
    extra_files: tuple[RelativePath, ...] = ()
    config: str
    mount: AbsolutePath | None = None
    path: AbsolutePath | None = None
    endpoint: Origin | None = None
    region: str | None = None
    identity: Identity = "Anonymous"
    secret: AbsolutePath | None = None
    ca: AbsolutePath | None = None
    proxy: Origin | None = None
    engine: PlannedEngine | None = None

    @property
    def scheme(self) -> str:
        """The source's kind, one of SCHEMES; empty without a source."""
        return urlsplit(self.uri).scheme if self.uri else ""

    @property
    def remote(self) -> bool:
        """Whether `conch fetch` downloads it."""
        return self.scheme in REMOTE_SCHEMES

    def at(self, field: str) -> str:
        """The full name of one of the model's fields: `spec.models[0].source.uri` of `source.uri`."""
        return f"{self.field}.{field}" if self.field else field

    @model_validator(mode="after")
    def _file(self) -> Self:
        if self.file_name is None and self.expects in ("File", "Folder", "FileOrFolder"):
            raise ValueError(f"fileName: missing although expects is {self.expects}; set it, or expects to Anything")
        return self

    @model_validator(mode="after")
    def _source(self) -> Self:
        if self.uri is None:
            if self.expects != "Nothing":
                raise ValueError(f"uri: missing although expects is {self.expects}; set source.uri")
            return self
        if self.scheme not in SCHEMES:
            raise ValueError(f"uri: {_shown(self.uri)} has no supported scheme; use {', '.join(SCHEMES)}")
        if not self.remote:
            if self.mount is None:
                raise ValueError(f"mount: missing for {_shown(self.uri)}; set the folder where its volume is mounted")
            return self
        if self.mount is not None:
            raise ValueError(f"mount: {self.mount!r} is set for a source that is downloaded; remove it")
        self._address(self.uri)
        return self

    def _address(self, uri: str) -> None:
        parts = urlsplit(uri)
        _ = self.scheme == "oci" or parts.port  # raises ValueError for what is no port number
        if not parts.hostname or not uri.isascii() or not uri.isprintable() or " " in uri:
            raise ValueError(f"uri: {_shown(uri)} is no {self.scheme} URL; give host and path, percent-encoded")
        if self.scheme == "oci":
            pinned = _PINNED.fullmatch(uri)
            if pinned is None and self.digest is None:
                raise ValueError("digest: missing; a tag can be moved, set source.digest or use @sha256:HEX")
            if pinned is not None and self.digest not in (None, pinned[1]):
                raise ValueError("digest: differs from the digest in uri; remove one of them")
            return
        if parts.username is not None or parts.password is not None:
            raise ValueError("uri: credentials in a URL end up in logs; remove the part before '@'")
        if self.scheme == "https" and self.digest is None:
            raise ValueError("digest: missing; https sources need one, set source.digest")


class PlannedCache(_Wire):
    """The node's model cache: the folder where it is mounted, and how many bytes it may hold."""

    path: AbsolutePath
    size_bytes: Annotated[int, Field(gt=0)]


class Plan(_Wire):
    """The whole repository of one pod. A transfer without a byte for `stall_timeout_seconds` is broken off.

    `tensor_rt` is the TensorRT version of the pod's Triton image, such as 10.5; None: not known. Without `allow_code` a
    model may bring no library that Triton would load.
    """

    models: Annotated[tuple[PlannedModel, ...], Field(min_length=1)]
    stall_timeout_seconds: Annotated[float, Field(gt=0, le=STALL_TIMEOUT_MAX_S)] = 60
    cache: PlannedCache | None = None
    tensor_rt: Annotated[str | None, Field(alias="tensorRT")] = None
    allow_code: bool = True

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [model.name for model in self.models]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"models: two are named {name!r}; rename one")
        return self

    def to_json(self) -> str:
        """The plan on one line, always the same for the same plan: in a pod template a change would roll the pods.

        Defaults are left out, so that a field which a later version adds changes no plan that doesn't use it.
        """
        return self.model_dump_json(by_alias=True, exclude_defaults=True)

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
