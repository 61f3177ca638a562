"""Builders of valid objects; a test changes only what it is about."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from conch import names
from conch.api.inferenceservice import parse_service
from conch.workload.deployment import Images

if TYPE_CHECKING:
    from collections.abc import Mapping

    from conch.api.inferenceservice import InferenceServiceSpec

SHA256 = "sha256:" + "0123456789abcdef" * 4
IMAGES = Images(fetch="conch.example/conch:1", triton="triton.example/server:1")


def make_model(**overrides: Any) -> dict[str, Any]:
    """A valid ONNX model as a user writes it; an override of None removes the field."""
    model = {"name": "resnet50", "format": "ONNX", "source": {"uri": "pvc://models/resnet50"}}
    return _without_none({**model, **overrides})


def make_service(
    fields: Mapping[str, Any] | None = None, *, name: str = "vision", namespace: str = "default", **overrides: Any
) -> dict[str, Any]:
    """A valid InferenceService as a user writes it, fields of the spec overridden; None removes one.

    `make_service(paused=True)`; a path reaches a field inside:
    `make_service({"scaling.minReplicas": 2, "models[0].format": "Python"})`.
    """
    service: dict[str, Any] = {
        "apiVersion": names.API_VERSION,
        "kind": names.SERVICE_KIND,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"models": [make_model()]},
    }
    for path, value in {**overrides, **(fields or {})}.items():
        set_field(service, f"spec.{path}", value)
    return service


def make_spec(fields: Mapping[str, Any] | None = None, **overrides: Any) -> InferenceServiceSpec:
    """The parsed spec of `make_service(fields, **overrides)`."""
    return parse_service(make_service(fields, **overrides))


def stored(service: dict[str, Any], *, uid: str = "uid-1", generation: int = 1, version: str = "1") -> dict[str, Any]:
    """A service as the API server returns it."""
    metadata = {"uid": uid, "generation": generation, "resourceVersion": version}
    return {**service, "metadata": {**service["metadata"], **metadata}}


def set_field(obj: dict[str, Any], path: str, value: Any) -> None:
    """Set `spec.models[0].name` in place, with the objects on the way there; None removes the field."""
    here: Any = obj
    *way, last = _steps(path)
    for step in way:
        here = here.setdefault(step, {}) if isinstance(here, dict) else here[step]
    if value is None:
        here.pop(last, None)
    elif isinstance(here, list) and last == len(here):
        here.append(copy.deepcopy(value))
    else:
        here[last] = copy.deepcopy(value)


def _steps(path: str) -> list[str | int]:
    steps: list[str | int] = []
    for part in path.split("."):
        name, _, index = part.partition("[")
        steps.append(name)
        if index:
            steps.append(int(index.rstrip("]")))
    return steps


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in fields.items() if value is not None}
