"""Watch events into the cache: the only file that imports kopf, and only as an event source (I/O).

kopf runs in a thread with an event loop of its own. On its way out it cancels every task of its loop that it did not
find there at its start, which in our loop would be the workers; and a burst of 5,000 events costs it seconds, in which
our loop would not turn. Bodies come over in batches. Whatever kopf may miss, our own LISTs correct (R3).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import aiohttp
import kopf
import prometheus_client
import structlog

from conch import names
from conch.kube.client import (
    CHUNK,
    DEPLOYMENTS,
    HORIZONTAL_POD_AUTOSCALERS,
    INFERENCE_SERVICES,
    NETWORK_POLICIES,
    NODES,
    POD_DISRUPTION_BUDGETS,
    POD_MONITORS,
    PODS,
    RESOURCE_CLAIM_TEMPLATES,
    SCALED_OBJECTS,
    SERVICE_ACCOUNTS,
    SERVICES,
    Kube,
    Resource,
)
from conch.kube.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from conch.config import Settings
    from conch.kube.cache import Cache
    from conch.kube.connection import Connection

Object = dict[str, Any]

# An int: the API server refuses "300.0".
SERVER_TIMEOUT_S: Final = 300
INACTIVITY_S: Final = 70.0
# A watch that lives is asked for again within its time limit; a minute more covers a slow reconnect.
SILENT_AFTER_S: Final = SERVER_TIMEOUT_S + INACTIVITY_S + 60.0
BATCH: Final = 100
LIST_RETRY_S: Final = 10.0
STOP_S: Final = 15.0
LOGIN_PAUSE_S: Final = 5.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class WatchedKind:
    """A kind to watch; an optional one only if the cluster serves it when we start."""

    resource: Resource
    label_selector: str | None = None
    optional: bool = False


def watched_kinds(settings: Settings) -> tuple[WatchedKind, ...]:
    """What the operator watches; in namespaced mode nothing that is cluster-scoped."""
    children = (DEPLOYMENTS, SERVICES, PODS, POD_DISRUPTION_BUDGETS, NETWORK_POLICIES, SERVICE_ACCOUNTS)
    kinds = (
        WatchedKind(INFERENCE_SERVICES),
        *(WatchedKind(resource, names.MANAGED_SELECTOR) for resource in children),
        WatchedKind(POD_MONITORS, names.MANAGED_SELECTOR, optional=True),
        WatchedKind(RESOURCE_CLAIM_TEMPLATES, names.MANAGED_SELECTOR, optional=True),
        WatchedKind(HORIZONTAL_POD_AUTOSCALERS),
        WatchedKind(SCALED_OBJECTS, optional=True),
        WatchedKind(NODES),
    )
    return tuple(kind for kind in kinds if kind.resource.namespaced or not settings.watch_namespaces)


class Watch:
    """Keeps a cache warm, on the leader and on a standby alike (R17).

    Args:
        cache: what is kept warm.
        on_change: called in this loop with each new, altered or (second argument) deleted object.
        kube: reads for our own LISTs.
        connection: where kopf gets its own session from.
        settings: namespaces and how often to LIST.
        kinds: what to watch.
        fatal: called in this loop when kopf ended by itself; the process must end then.
        registry: where the metrics are registered.
        clock: the cache's clock.
    """

    def __init__(
        self,
        cache: Cache,
        on_change: Callable[[Object, bool], None],
        *,
        kube: Kube,
        connection: Connection,
        settings: Settings,
        kinds: Sequence[WatchedKind],
        fatal: Callable[[str], None],
        registry: prometheus_client.CollectorRegistry | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._on_change = on_change
        self._kube = kube
        self._connection = connection
        self._settings = settings
        self._kinds = tuple(kinds)
        self._fatal = fatal
        self._clock = clock
        self._served: tuple[WatchedKind, ...] = ()
        self._listed_at: dict[str, float] = {}
        self._alive_at: dict[str, float] = {}
        self._event_at: dict[str, float] = {}
        self._inbox: deque[tuple[Object, bool]] = deque()
        self._draining = False
        self._hand_over = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wanted: set[str] = set()
        self._wake = asyncio.Event()
        self._stopping = False
        self._stop_kopf: Callable[[], object] | None = None
        self._login_at = float("-inf")
        self._sessions: list[aiohttp.ClientSession] = []
        self._ages = prometheus_client.Gauge(
            "conch_watch_age_seconds",
            "Seconds since a watch was opened or brought an event, the longest of the kind's watches.",
            ("kind",),
            registry=registry,
        )

    async def prime(self) -> None:
        """LIST every kind once, before the workers start; raises `ApiError` when one can't be read."""
        served = [kind for kind in self._kinds if not kind.optional or await self._kube.has_resource(kind.resource)]
        self._served = tuple(served)
        for kind in self._served:  # all at once would only take memory
            await self._list(kind)

    async def run(self, stop: asyncio.Event) -> None:
        """Watch until `stop` is set. `prime` comes first: it finds out which kinds there are."""
        self._loop = asyncio.get_running_loop()
        now = self._clock()
        for kind in self._served:
            for path in self._paths(kind.resource):
                self._alive_at.setdefault(path, now)
            self._ages.labels(kind.resource.kind).set_function(partial(self._age, kind.resource))
        thread = threading.Thread(target=self._run_kopf, name="kopf", daemon=True)
        thread.start()
        try:
            await self._keep_listing(stop)
        finally:
            self._stopping = True
            if self._stop_kopf is not None and thread.is_alive():
                # Its loop may have ended just now.
                with contextlib.suppress(RuntimeError):
                    self._stop_kopf()
            await asyncio.to_thread(thread.join, STOP_S)

    def ages(self) -> dict[str, float]:
        """Seconds since each kind's watch showed a sign of life: an event, or being opened."""
        return {kind.resource.kind: self._age(kind.resource) for kind in self._served}

    def silent(self) -> list[str]:
        """Kinds whose watch has shown no sign of life for longer than a living one can."""
        return [kind for kind, age_s in self.ages().items() if age_s > SILENT_AFTER_S]

    def last_event_at(self, kind: str) -> float | None:
        """When the kind's last event came, on the cache's clock; None if none has."""
        return self._event_at.get(kind)

    def _age(self, resource: Resource) -> float:
        now = self._clock()
        return max(now - self._alive_at.get(path, now) for path in self._paths(resource))

    def _paths(self, resource: Resource) -> list[str]:
        namespaces = self._settings.watch_namespaces
        return [resource.path(namespace) for namespace in namespaces] if namespaces else [resource.path()]

    async def _keep_listing(self, stop: asyncio.Event) -> None:
        stopping = asyncio.ensure_future(stop.wait())
        try:
            due = self._clock() + self._settings.relist_s
            while not stop.is_set():
                waking = asyncio.ensure_future(self._wake.wait())
                await asyncio.wait(
                    {stopping, waking},
                    timeout=max(0.0, due - self._clock()),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                waking.cancel()
                if stop.is_set():
                    return
                self._wake.clear()
                if self._clock() >= due:
                    self._wanted.update(kind.resource.kind for kind in self._served)
                    due = self._clock() + self._settings.relist_s
                await self._list_wanted()
        finally:
            stopping.cancel()

    async def _list_wanted(self) -> None:
        wanted, self._wanted = self._wanted, set()
        for kind in self._served:
            if kind.resource.kind not in wanted:
                continue
            try:
                await self._list(kind)
            except ApiError as error:
                _log.warning("watch.list_failed", kind=kind.resource.kind, error=str(error))
                self._wanted.add(kind.resource.kind)
        if self._wanted:
            asyncio.get_running_loop().call_later(LIST_RETRY_S, self._wake.set)

    async def _list(self, kind: WatchedKind) -> None:
        resource, namespaces = kind.resource, self._settings.watch_namespaces
        started = self._clock()
        items: list[Object] = []
        for namespace in namespaces or (None,):
            found, _ = await self._kube.list(
                resource, namespace, label_selector=kind.label_selector, kept=self._cache.slim
            )
            items += found
        # Only now: had the LIST failed, it would still be owed.
        self._listed_at[resource.kind] = started
        for obj, deleted in self._cache.replace(resource.kind, namespaces or None, items, started):
            self._tell(obj, deleted=deleted)

    def _receive(self, body: Object, deleted: bool) -> None:  # noqa: FBT001 - a queue's item
        """Take an event, in kopf's thread."""
        with self._hand_over:
            self._inbox.append((body, deleted))
            if self._draining or self._loop is None:
                return
            self._draining = True
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        for _ in range(BATCH):
            with self._hand_over:
                if not self._inbox:
                    self._draining = False
                    return
                body, deleted = self._inbox.popleft()
            self._take(body, deleted=deleted)
        # The loop turns between batches, so that a flood of events can't make us look dead.
        asyncio.get_running_loop().call_soon(self._drain)

    def _take(self, body: Object, *, deleted: bool) -> None:
        kind, metadata = body["kind"], body["metadata"]
        self._event_at[kind] = self._clock()
        if deleted:
            if self._cache.remove(body):
                self._tell(body, deleted=True)
        elif self._cache.put(body):
            stored = self._cache.get(kind, metadata.get("namespace") or "", metadata["name"])
            self._tell(stored or body, deleted=False)

    def _tell(self, obj: Object, *, deleted: bool) -> None:
        try:
            self._on_change(obj, deleted)
        except Exception:  # noqa: BLE001
            # One object that nobody understands must not end the delivery of all others.
            _log.exception("watch.change_failed", kind=obj["kind"], name=obj["metadata"]["name"])

    def _opened(self, path: str, *, watch: bool) -> None:
        """Kopf got an answer to a LIST or a watch, in its thread."""
        now = self._clock()
        for kind in self._served:
            if path not in self._paths(kind.resource):
                continue
            if watch:
                self._alive_at[path] = now
            elif self._loop is not None:
                # After kopf's own LIST, at its start as after a 410, deletions may have gone by unseen.
                self._loop.call_soon_threadsafe(self._want, kind.resource.kind, now)

    def _want(self, kind: str, since: float) -> None:
        if self._listed_at.get(kind, float("-inf")) < since:
            self._wanted.add(kind)
            self._wake.set()

    def _run_kopf(self) -> None:
        # Each event handled is a line at INFO, each object a logger.
        logging.getLogger("kopf.objects").setLevel(logging.WARNING)
        logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
        try:
            asyncio.run(self._operate())
        except Exception as error:  # noqa: BLE001 - whatever ends kopf ends the process, with its reason
            self._ended(error)

    async def _operate(self) -> None:
        # The flag belongs to kopf's loop: for a threading.Event kopf blocks a thread, and could not end by itself.
        stop = asyncio.Event()
        self._stop_kopf = partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set)
        if self._stopping:
            return
        namespaces = self._settings.watch_namespaces
        tasks = await kopf.spawn_tasks(
            registry=self.registry(),
            settings=kopf_settings(self._served),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
            stop_flag=stop,
            # Left out, kopf looks up the user's name, and an arbitrary user id in a container has none.
            identity=cast("Any", self._settings.identity),
        )
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        errors = [task.exception() for task in done if not task.cancelled()]
        self._ended(next((error for error in errors if error is not None), None))
        # kopf's own way out waits for watchers that wait for a new login, and after 30 s it kills the process.
        stop.set()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=STOP_S / 3)
        for session in self._sessions:
            await session.close()

    def _ended(self, error: BaseException | None) -> None:
        if self._stopping or self._loop is None:
            return
        why = f"{type(error).__name__}: {error}" if error is not None else "kopf stopped by itself"
        self._loop.call_soon_threadsafe(self._fatal, f"the watches ended: {why}")

    def registry(self) -> kopf.OperatorRegistry:
        """Kopf's handlers: nothing but events, which is the one mode that writes nothing to any object."""
        registry = kopf.OperatorRegistry()

        async def receive(event: kopf.RawEvent, resource: kopf.Resource, **_: Any) -> None:
            body: Object = dict(event["object"])
            path = self._path_of(resource, body)
            if event["type"] is not None and path in self._alive_at:
                self._alive_at[path] = self._clock()
            self._receive(body, event["type"] == "DELETED")

        async def login(**_: Any) -> kopf.AiohttpSession:
            return await self._login()

        for kind in self._served:
            group, _, version = kind.resource.api_version.rpartition("/")
            kopf.on.event(group=group, version=version, plural=kind.resource.plural, registry=registry)(receive)
        kopf.on.login(registry=registry)(login)
        return registry

    def _path_of(self, resource: kopf.Resource, body: Object) -> str:
        api_version = f"{resource.group}/{resource.version}" if resource.group else resource.version
        known = Resource(api_version, resource.plural, "", namespaced=bool(resource.namespaced))
        return known.path(body["metadata"].get("namespace") if self._settings.watch_namespaces else None)

    async def _login(self) -> kopf.AiohttpSession:
        # kopf asks again after each 401: credentials that stay wrong must not become a flood.
        pause_s = self._login_at + LOGIN_PAUSE_S - self._clock()
        if pause_s > 0:
            await asyncio.sleep(pause_s)
        self._login_at = self._clock()
        trace = aiohttp.TraceConfig()

        async def answered(_: aiohttp.ClientSession, __: object, answer: aiohttp.TraceRequestEndParams) -> None:
            if answer.response.ok and "continue" not in answer.url.query:
                self._opened(answer.url.path, watch="watch" in answer.url.query)

        trace.on_request_end.append(answered)
        session = self._connection.session(trace_configs=[trace], headers={"User-Agent": "conch-watch"})
        self._sessions = [known for known in self._sessions if not known.closed] + [session]
        return kopf.AiohttpSession(server=self._connection.server, aiohttp_session=session)


def kopf_settings(kinds: Sequence[WatchedKind]) -> kopf.OperatorSettings:
    """Settings for watching only; what concerns writing is set all the same, against a handler added by mistake."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.server_timeout = SERVER_TIMEOUT_S
    settings.watching.client_timeout = SERVER_TIMEOUT_S + 30
    settings.watching.connect_timeout = 10
    settings.watching.inactivity_timeout = INACTIVITY_S
    settings.watching.reconnect_backoff = 1
    settings.watching.chunk_size = CHUNK // 2  # kopf lists all kinds at once
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.networking.error_backoffs = _Backoffs()
    settings.queueing.worker_limit = None
    settings.queueing.idle_timeout = 1
    settings.persistence.finalizer = f"{names.GROUP}/kopf"
    settings.persistence.diffbase_storage = _NoDiffBase()
    settings.persistence.progress_storage = _NoProgress()
    settings.process.ultimate_exiting_timeout = 30
    for kind in kinds:
        if kind.label_selector:
            group, _, version = kind.resource.api_version.rpartition("/")
            settings.watching.label_selectors[group, version, kind.resource.plural] = kind.label_selector
    return settings


class _Backoffs:
    """kopf gives up, and ends, after the last of its delays; an API server may be away for longer than that (R17)."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((1, 1, 2, 3, 5), itertools.repeat(10))


class _NoDiffBase(kopf.DiffBaseStorage):
    """No diff base: kopf would build one from each event, only to compare it with none."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        return None

    def store(self, **_: Any) -> None:
        """Nothing is ever written."""


class _NoProgress(kopf.ProgressStorage):
    """No progress: event handlers have none."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Nothing is ever written."""

    def purge(self, **_: Any) -> None:
        """Nothing is ever written."""

    def touch(self, **_: Any) -> None:
        """Nothing is ever written."""

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence
