"""What a spec asks for that the operator's settings or the release of Triton don't allow. Pure.

Both may change without a new spec, so neither makes a spec invalid: what runs keeps running, and the condition says
what to change.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final

from conch import names
from conch.api.shown import shown
from conch.triton.backends import BACKENDS, CONFIG_FIELDS_SINCE
from conch.triton.releases import OLDEST, VARIANT_FORMATS, Feature, month_name, release_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conch.api.inferenceservice import InferenceServiceSpec
    from conch.api.model import Model
    from conch.triton.releases import ServerImage

_RUNS_PYTHON: Final = {
    "vLLM": "runs Python code that weights from elsewhere may bring",
    "Auto": "may turn out to run Python code",
}
_ENVIRONMENT: Final = "EXECUTION_ENV_PATH"
_FORBIDDEN: Final = (
    ", which the operator's setting CONCH_ALLOW_PYTHON_MODELS=false forbids; use a format without code, or ask whoever "
    "runs Conch"
)


@dataclass(frozen=True)
class Allowed:
    """What the operator's settings allow a service."""

    python_models: bool = True
    """Models that bring code (CONCH_ALLOW_PYTHON_MODELS)."""
    cache_host_paths: tuple[str, ...] = (names.CACHE_HOST_PATH,)
    """Folders of the nodes that may hold a model cache (CONCH_MODEL_CACHE_HOST_PATHS)."""


def by_settings(spec: InferenceServiceSpec, allowed: Allowed) -> list[str]:
    """Why the operator's settings refuse the spec, a line a finding; empty when they don't.

    Without `allowed.python_models`, nothing may run that comes with a model: Python code, whatever might be Python, and
    libraries that Triton would load from a model's folder.
    """
    found = _host_paths(spec, allowed.cache_host_paths)
    if allowed.python_models:
        return found
    found += [
        f"spec.models[{index}].{field}: {what}{_FORBIDDEN}"
        for index, model in enumerate(spec.models)
        for field, what in _code(model)
    ]
    found += [
        f"spec.runtime.backends[{index}].settings.{key}: loads a library from a model's folder{_FORBIDDEN}"
        for index, backend in enumerate(spec.runtime.backends)
        for key, value in backend.settings.items()
        if "/models" in value or "/sources" in value
    ]
    return found


def _host_paths(spec: InferenceServiceSpec, allowed: tuple[str, ...]) -> list[str]:
    """Whoever may make a service need not be one who may write to the nodes' file systems."""
    cache = spec.runtime.model_cache
    if cache is None or cache.host_path is None:
        return []
    path = PurePosixPath(cache.host_path)
    if any(path.is_relative_to(folder) for folder in allowed):
        return []
    where = " or ".join(allowed) or "nowhere"
    finding = (
        "spec.runtime.modelCache.hostPath: is in no folder that the operator's setting CONCH_MODEL_CACHE_HOST_PATHS "
        f"allows (got {shown(cache.host_path)}, allowed: {where}); use such a folder, or claimName"
    )
    return [finding]


def by_release(spec: InferenceServiceSpec, image: str) -> list[str]:
    """What the Triton in the image can't do, a line a finding; empty when it can or when that is unknown."""
    server = release_of(image, spec.runtime.release)
    found: list[str] = []
    if spec.runtime.release is not None:
        tagged = release_of(image).name
        if tagged is not None and tagged != spec.runtime.release:
            found.append(
                f"spec.runtime.release: is {spec.runtime.release}, and the image's tag says {tagged} "
                f"(image {shown(image)}); remove release or correct it"
            )
    if server.month is not None and server.month < OLDEST:
        found.append(
            f"spec.runtime.image: has Triton {server.name}, which may not be able to close its APIs over HTTP "
            f"(image {shown(image)}); use {month_name(OLDEST)} or newer"
        )
    found += _missing_features(spec, server, image)
    found += _missing_fields(spec, server, image)
    found += _missing_backends(spec, server, image)
    return found


def _code(model: Model) -> Iterator[tuple[str, str]]:
    if BACKENDS[model.format].python:
        yield "format", f"{model.format} runs Python code that comes with the model"
    elif model.format in _RUNS_PYTHON:
        yield "format", f"{model.format} {_RUNS_PYTHON[model.format]}"
    elif model.file is not None and model.file.endswith(".py"):
        yield "file", "is Python code that comes with the model"
    if _ENVIRONMENT in model.parameters:
        yield f"parameters.{_ENVIRONMENT}", "brings a Python environment with the model"
    # Triton looks for both in the model's folder first.
    for field in ("backend", "runtime"):
        if field in model.config:
            yield f"config.{field}", "may be code that comes with the model"
    if "model_operations" in model.config:
        yield "config.model_operations", "loads a library from the model's folder"


def _missing_features(spec: InferenceServiceSpec, server: ServerImage, image: str) -> Iterator[str]:
    runtime = spec.runtime
    wanted = (
        ("metrics.histograms", runtime.metrics.histograms, Feature.HISTOGRAMS),
        ("threads.grpcInfer", runtime.threads.grpc_infer is not None, Feature.GRPC_INFER_THREADS),
        ("maxRequestSize", runtime.max_request_size is not None, Feature.HTTP_MAX_INPUT_SIZE),
    )
    for field, is_wanted, feature in wanted:
        if is_wanted and server.has(feature) is False:
            yield (
                f"spec.runtime.{field}: needs Triton {month_name(feature.since)} or newer, and the image has "
                f"{server.name} (image {shown(image)}); use a newer image or remove it"
            )


def _missing_fields(spec: InferenceServiceSpec, server: ServerImage, image: str) -> Iterator[str]:
    """Fields of `config` that the release doesn't know: it would then fail to read the whole configuration."""
    for index, model in enumerate(spec.models):
        for path, since in CONFIG_FIELDS_SINCE.items():
            part, _, rest = path.partition(".")
            there = part in model.config and (not rest or rest in model.config[part])
            if there and server.month is not None and server.month < since:
                yield (
                    f"spec.models[{index}].config.{path}: needs Triton {month_name(since)} or newer, and the image has "
                    f"{server.name} (image {shown(image)}); use a newer image or remove it"
                )


def _missing_backends(spec: InferenceServiceSpec, server: ServerImage, image: str) -> Iterator[str]:
    if server.variant == "ClientsOnly":
        yield f"spec.runtime.image: holds clients and no server (image {shown(image)}); use a tag that ends in -py3"
        return
    served = VARIANT_FORMATS[server.variant]
    for index, model in enumerate(spec.models):
        backend, place = BACKENDS[model.format], f"spec.models[{index}].format"
        # An image of one's own may have been given the backend again.
        removed = backend.removed_in if server.variant != "Other" else None
        if removed is not None and server.month is not None and server.month >= removed:
            yield (
                f"{place}: {model.format} is not in Triton's images from {month_name(removed)} on, and this one has "
                f"{server.name} (image {shown(image)}); use an older image in spec.runtime.image, or convert the model"
            )
        elif served is not None and model.format not in served:
            fix = backend.image or "use the image whose tag ends in -py3 in spec.runtime.image"
            yield f"{place}: {model.format} has no backend in this image (image {shown(image)}); {fix}"
