"""The cache of downloaded models → what the init container mounts for it, and what the plan says of it. Pure.

Only `conch fetch` mounts it. Triton gets a copy (`storage.cache` says why), so a model's own code sees no other model,
and a cache that is lost takes nothing from a pod that serves.

A claim passes the `restricted` Pod Security Standard. A hostPath passes only `privileged`: in a namespace with a
stricter level the API server refuses the pods, which the service's status then quotes. The kubelet makes a missing
folder, but for root, and fsGroup doesn't apply to a hostPath; docs/models.md has a DaemonSet that makes it writable for
group 1000. Until then models are downloaded without the cache, which an Event says. No init container of ours does it
as root: it would give group 1000 any folder of the node that an InferenceService names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from conch import names
from conch.api.fields import parse_quantity
from conch.storage.plan import REMOTE_SCHEMES, PlannedCache

if TYPE_CHECKING:
    from conch.api.inferenceservice import InferenceServiceSpec

VOLUME: Final = "model-cache"
FOLDER: Final = "/var/cache/conch/models"


def planned_cache(spec: InferenceServiceSpec) -> PlannedCache | None:
    """Where `conch fetch` finds the cache and how large it may grow; None without one, or if nothing is downloaded."""
    cache = spec.runtime.model_cache
    if cache is None or not _downloads(spec):
        return None
    return PlannedCache(path=FOLDER, size_bytes=int(parse_quantity(cache.size)))


def cache_volumes(spec: InferenceServiceSpec) -> list[dict[str, Any]]:
    """The pod's volume for the cache, or nothing."""
    cache = spec.runtime.model_cache
    if cache is None or not _downloads(spec):
        return []
    if cache.claim_name is not None:
        return [{"name": VOLUME, "persistentVolumeClaim": {"claimName": cache.claim_name}}]
    # A folder that has to exist would keep every pod of a fresh node from starting.
    return [{"name": VOLUME, "hostPath": {"path": cache.host_path, "type": "DirectoryOrCreate"}}]


def cache_mounts(spec: InferenceServiceSpec) -> list[dict[str, Any]]:
    """The init container's mount of it."""
    return [{"name": volume["name"], "mountPath": FOLDER} for volume in cache_volumes(spec)]


def cache_environment(spec: InferenceServiceSpec) -> list[dict[str, Any]]:
    """On a node's folder each namespace has a part of its own.

    A digest is no secret: with one folder for all, whoever knows the digest of another team's model could name any
    source at all, and get that model out of the cache without its credentials.
    """
    return [
        {"name": names.CACHE_TENANT_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}
        for volume in cache_volumes(spec)
        if "hostPath" in volume
    ]


def _downloads(spec: InferenceServiceSpec) -> bool:
    sources = [model.source.uri for model in spec.models if model.source is not None]
    return any(uri.partition("://")[0] in REMOTE_SCHEMES for uri in sources)
