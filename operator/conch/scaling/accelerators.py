"""How many accelerators are free, from the cached nodes and a live LIST of what runs on them (I/O).

Whoever else holds an accelerator counts, and the cache keeps only Conch's own pods. So the pods are listed, but only
when a service wants more or waits, and the answer is shared by all services for some seconds.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog

from conch.kube.cache import slim
from conch.kube.client import PODS, Resource
from conch.kube.errors import ApiError
from conch.workload.gpus import free_gpus

if TYPE_CHECKING:
    from collections.abc import Callable

    from conch.api.inferenceservice import InferenceServiceSpec
    from conch.config import Settings

Object = dict[str, Any]
Many = list[Object]

KEEP_S: Final = 10.0
KEEP_FRESH_S: Final = 1.0
BOUND: Final = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"

_log = structlog.get_logger(__name__)


class Lister(Protocol):
    """What is needed of the Kubernetes client."""

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
        kept: Callable[[Object], Object | None] | None = None,
    ) -> tuple[Many, str]:
        """All objects, and the resourceVersion of the list."""


class Objects(Protocol):
    """What is needed of the cache."""

    def list(self, kind: str, namespace: str | None = None) -> Many:
        """All objects of a kind."""


class FreeAccelerators:
    """Free accelerators for a spec; None in namespaced mode, or while the API server doesn't answer."""

    def __init__(
        self, kube: Lister, cache: Objects, settings: Settings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kube = kube
        self._cache = cache
        self._clock = clock
        self._sees_nodes = not settings.watch_namespaces
        self._listing = asyncio.Lock()
        self._pods: dict[str, Object] = {}
        self._listed_at: float | None = None

    async def free(self, spec: InferenceServiceSpec, *, fresh: bool = False) -> int | None:
        """Accelerators that pods of this spec could get now; other people's pods as seen up to 10 s ago, fresh: 1 s."""
        if not self._sees_nodes or not spec.accelerator.count or spec.accelerator.claim is not None:
            return None
        try:
            await self._refresh(KEEP_FRESH_S if fresh else KEEP_S)
        except ApiError as error:
            _log.warning("accelerators.unknown", error=str(error))
            return None
        # Our own pods are seen at once; an old LIST would offer what they have just taken.
        own = {pod["metadata"]["uid"]: pod for pod in self._cache.list("Pod")}
        return free_gpus(self._cache.list("Node"), {**self._pods, **own}.values(), spec)

    def nodes(self) -> Many | None:
        """All nodes as last seen; None in namespaced mode."""
        return self._cache.list("Node") if self._sees_nodes else None

    async def _refresh(self, keep_s: float) -> None:
        async with self._listing:
            now = self._clock()
            if self._listed_at is not None and now - self._listed_at < keep_s:
                return
            pods, _ = await self._kube.list(PODS, field_selector=BOUND, kept=_if_it_holds_devices)
            self._pods = {pod["metadata"]["uid"]: pod for pod in pods}
            self._listed_at = now


def _if_it_holds_devices(pod: Object) -> Object | None:
    return slim(pod) if _holds_devices(pod) else None


def _holds_devices(pod: Object) -> bool:
    """Whether a pod asks for any extended resource: those names have a slash."""
    spec = pod.get("spec") or {}
    for container in [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]:
        resources = container.get("resources") or {}
        if any("/" in name for name in {**(resources.get("limits") or {}), **(resources.get("requests") or {})}):
            return True
    return False
