"""The manifest of a TensorRT engine, `conch-engine.json` beside the model. Reads that file.

    {"tensorRT": "10.4.0", "computeCapability": "8.9", "platform": "linux/amd64",
     "versionCompatible": false, "hardwareCompatibility": "None"}

Every field may be left out: what isn't known refuses nothing. `conch digest` prints it as `source.engine`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from conch.storage.errors import SourceRefusedError, WrongLayoutError
from conch.storage.plan import PlannedModel
from conch.triton.engines import Engine, version_problem

MANIFEST: Final = "conch-engine.json"
_SIZE_MAX_BYTES: Final = 16 << 10


class EngineManifest(BaseModel):
    """What an engine was built with, as whoever built it wrote it down; the fields of `source.engine`."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)

    tensor_rt: Annotated[str | None, Field(alias="tensorRT", pattern=r"^[0-9]{1,3}(\.[0-9]{1,5}){1,3}$")] = None
    compute_capability: Annotated[str | None, Field(pattern=r"^[0-9]{1,3}\.[0-9]$")] = None
    platform: Literal["linux/amd64", "linux/arm64"] | None = None
    version_compatible: bool = False
    hardware_compatibility: Literal["None", "AmperePlus", "SameComputeCapability"] = "None"

    def engine(self) -> Engine:
        """The same as the policy's own type."""
        return Engine(
            self.tensor_rt,
            self.compute_capability,
            self.platform,
            version_compatible=self.version_compatible,
            hardware=self.hardware_compatibility,
        )


def read_manifest(folders: Iterable[Path]) -> EngineManifest | None:
    """The manifest in the first of the folders that holds one. Raises SourceRefusedError and WrongLayoutError."""
    path = next((folder / MANIFEST for folder in folders if (folder / MANIFEST).is_file()), None)
    if path is None:
        return None
    shown = f"{path.parent.name}/{MANIFEST}"
    try:
        with path.open("rb") as file:
            raw = file.read(_SIZE_MAX_BYTES + 1)
    except OSError as error:
        raise SourceRefusedError(
            f"{shown} can't be read ({error.strerror})", "make it readable for the pod's user or group (fsGroup)"
        ) from error
    if len(raw) > _SIZE_MAX_BYTES:
        raise WrongLayoutError(f"{shown} is longer than {_SIZE_MAX_BYTES} bytes", "keep only the engine's versions")
    try:
        return EngineManifest.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(step) for step in first["loc"]) or "the file"
        raise WrongLayoutError(
            f"{shown} is no engine manifest: {where}: {first['msg']}",
            'write it as {"tensorRT": "10.4.0", "computeCapability": "8.9"}, or remove it',
        ) from error


def check_engine(model: PlannedModel, folders: Iterable[Path], image: str | None) -> None:
    """Refuse an engine that the image's TensorRT can't load, or that isn't what the spec says of it.

    Args:
        model: whose engine it is.
        folders: where a manifest may lie, the version's first.
        image: the image's TensorRT version; None: not known, and then nothing is refused for it.

    Raises SourceRefusedError and WrongLayoutError.
    """
    manifest = read_manifest(folders)
    if manifest is None:
        return
    # Only what was said: a default is no word about the engine.
    said = {} if model.engine is None else model.engine.model_dump(by_alias=True, exclude_defaults=True)
    written = manifest.model_dump(by_alias=True, exclude_unset=True, exclude_none=True)
    for name, wanted in said.items():
        if written.get(name, wanted) != wanted:
            field = model.at(f"source.engine.{name}")
            raise WrongLayoutError(
                f"{field} is {wanted!r}, and {MANIFEST} beside the engine says {written[name]!r}",
                f"correct {field}, or the manifest if the engine was built anew",
            )
    engine = EngineManifest.model_validate(said | written).engine()
    # Whether the backend is set to load version-compatible engines isn't in the plan; Triton tells that itself.
    problem = version_problem(engine, image, backend_allows=True)
    if problem is not None:
        cause, _, fix = problem.partition(": ")
        raise WrongLayoutError(f"{cause} ({MANIFEST})", fix)
