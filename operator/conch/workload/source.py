"""A model's source URI → what the pod mounts and what it may reach. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from conch.api.model import Model

HTTPS_PORT = 443


@dataclass(frozen=True)
class Source:
    """One model's source: a volume with a path in it, or an https download from a port."""

    model: str
    uri: str
    volume: dict[str, Any] | None
    """The volume's source, such as {"image": {…}}; None for a download."""
    path: str
    """The path inside the volume; empty for a download."""
    port: int | None
    """The TCP port that the download needs; None for a volume."""


def source_of(model: Model) -> Source:
    """Split a validated URI; the API's validation has refused every other form."""
    uri = model.source.uri
    scheme, _, rest = uri.partition("://")
    if scheme == "pvc":
        claim, _, path = rest.partition("/")
        volume: dict[str, Any] = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        return Source(model.name, uri, volume, f"/{path}", None)
    if scheme == "image":
        reference, _, path = rest.partition("#")
        volume = {"image": {"reference": reference, "pullPolicy": "IfNotPresent"}}
        return Source(model.name, uri, volume, path or "/", None)
    return Source(model.name, uri, None, "", urlsplit(uri).port or HTTPS_PORT)
