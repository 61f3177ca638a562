"""A model's source → what the pod mounts for it, what the plan says of it, and what it may reach. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from conch.storage.plan import PlannedEngine

if TYPE_CHECKING:
    from collections.abc import Iterable

    from conch.api.model import Model
    from conch.api.source import ModelSource

HTTPS_PORT: Final = 443
HTTP_PORT: Final = 80

SECRETS_FOLDER: Final = "/etc/conch/secrets"
AUTHORITIES_FOLDER: Final = "/etc/conch/authorities"
_AUTHORITY_FILE: Final = "ca.crt"
# The owner of the files is root; fsGroup gives the group to the pod's user.
_SECRET_MODE: Final = 0o440


@dataclass(frozen=True)
class Source:
    """One model's source: a volume with a path in it, a download from a port, or none at all (an ensemble)."""

    model: str
    uri: str | None
    volume: dict[str, Any] | None = None
    """The volume's source, such as {"image": {…}}; None for a download."""
    path: str = ""
    """The path inside the volume; empty for a download."""
    ports: tuple[int, ...] = ()
    """The TCP ports that the download needs; none for a volume."""
    cloud_identity: bool = False
    """Whether it asks the cloud for the ServiceAccount's identity."""
    secret: str | None = None
    """The Secret with its credentials."""
    authority: tuple[str, str] | None = None
    """The ConfigMap and the key in it that holds further authorities."""


def source_of(model: Model) -> Source:
    """Split a validated URI; the API's validation has refused every other form."""
    source = model.source
    if source is None:
        return Source(model.name, None)
    scheme, _, rest = source.uri.partition("://")
    if scheme == "pvc":
        claim, _, path = rest.partition("/")
        volume: dict[str, Any] = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        return Source(model.name, source.uri, volume, f"/{path}")
    if scheme == "image":
        reference, _, path = rest.partition("#")
        volume = {"image": {"reference": reference, "pullPolicy": "IfNotPresent"}}
        return Source(model.name, source.uri, volume, path or "/")
    return Source(
        model.name,
        source.uri,
        ports=_ports(source),
        cloud_identity=source.identity == "ServiceAccount",
        secret=None if source.secret_ref is None else source.secret_ref.name,
        authority=None if source.ca_ref is None else (source.ca_ref.name, source.ca_ref.key),
    )


def planned_source(model: Model, index: int) -> dict[str, Any]:
    """The fields of `PlannedModel` that say where the model comes from; `index` is the model's place in the spec."""
    source, mounted = model.source, source_of(model)
    if source is None:
        return {"uri": None}
    engine = source.engine
    return {
        "uri": source.uri,
        "digest": source.digest,
        "mount": None if mounted.volume is None else f"/sources/{index}",
        "path": mounted.path or None,
        "endpoint": source.endpoint,
        "region": source.region,
        "identity": source.identity,
        "secret": None if mounted.secret is None else f"{SECRETS_FOLDER}/{index}",
        "ca": None if mounted.authority is None else f"{AUTHORITIES_FOLDER}/{index}/{_AUTHORITY_FILE}",
        "proxy": source.proxy,
        "engine": None
        if engine is None
        else PlannedEngine(
            tensor_rt=engine.tensor_rt,
            compute_capability=engine.compute_capability,
            platform=engine.platform,
            version_compatible=engine.version_compatible,
            hardware_compatibility=engine.hardware_compatibility,
        ),
    }


def source_volumes(sources: Iterable[Source]) -> list[dict[str, Any]]:
    """The pod's volumes for its sources: the volumes themselves, credentials and authorities."""
    volumes: list[dict[str, Any]] = []
    for index, source in enumerate(sources):
        if source.volume is not None:
            volumes.append({"name": f"source-{index}", **source.volume})
        if source.secret is not None:
            secret = {"secretName": source.secret, "defaultMode": _SECRET_MODE}
            volumes.append({"name": f"secret-{index}", "secret": secret})
        if source.authority is not None:
            name, key = source.authority
            volumes.append(
                {
                    "name": f"authority-{index}",
                    "configMap": {"name": name, "items": [{"key": key, "path": _AUTHORITY_FILE}]},
                }
            )
    return volumes


def fetch_mounts(sources: Iterable[Source]) -> list[dict[str, Any]]:
    """What the init container mounts of `source_volumes`: all of it. Triton mounts the volumes only, no credentials."""
    folders = {"source": "/sources", "secret": SECRETS_FOLDER, "authority": AUTHORITIES_FOLDER}
    found = []
    for volume in source_volumes(sources):
        kind, _, index = volume["name"].partition("-")
        found.append({"name": volume["name"], "mountPath": f"{folders[kind]}/{index}", "readOnly": True})
    return found


def _ports(source: ModelSource) -> tuple[int, ...]:
    if source.proxy is not None:
        return (_port(source.proxy),)
    if source.endpoint is not None:
        # A signed request to a store of one's own needs nothing else; a cloud identity is had elsewhere, over https.
        token = source.identity == "ServiceAccount" or (
            source.uri.startswith("gs://") and source.secret_ref is not None
        )
        elsewhere = (HTTPS_PORT,) if token else ()
        return tuple(sorted({_port(source.endpoint), *elsewhere}))
    if source.uri.startswith("oci://"):
        # Registries send clients to a token service and to an object store, both usually on the usual port.
        return tuple(sorted({_port(source.uri.partition("@")[0]), HTTPS_PORT}))
    return (_port(source.uri) if source.uri.startswith("https://") else HTTPS_PORT,)


def _port(url: str) -> int:
    parts = urlsplit(url)
    return parts.port or (HTTP_PORT if parts.scheme == "http" else HTTPS_PORT)
