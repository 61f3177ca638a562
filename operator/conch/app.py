"""Composition root: what the operator is built from, and the order in which it starts and stops."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import random
import signal
import time
from typing import TYPE_CHECKING, Any, Final

import prometheus_client
import structlog

from conch import names
from conch.api.parsed import ParsedSpecs
from conch.kube.cache import Cache
from conch.kube.client import POD_MONITORS, RESOURCE_CLAIM_TEMPLATES, Kube, Resource
from conch.kube.connection import Connection
from conch.kube.errors import ApiError, NotLeader
from conch.kube.events import Recorder
from conch.kube.lease import LOOP_SILENCE_S, Elector, HttpLeaseStore
from conch.kube.watch import Watch, watched_kinds
from conch.observe.http import HttpServer
from conch.reconcile import steps
from conch.reconcile.errors import Retryable
from conch.reconcile.fetching import FetchTeller
from conch.reconcile.queue import Queue
from conch.reconcile.reading import ModelReader
from conch.reconcile.service import Collaborators, Key, ServiceReconciler
from conch.scaling.accelerators import FreeAccelerators
from conch.scaling.controller import ScalingController
from conch.scaling.signals import PrometheusSignals
from conch.triton.probe import Probe
from conch.triton.refusals import Allowed
from conch.workload.deployment import Images

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

    from conch.config import Settings

Object = dict[str, Any]
log = structlog.get_logger(__name__)

FATAL_EXIT_CODE: Final = 1
STOP_LIMIT_S: Final = 20.0
FIRST_WAIT_S: Final = 1.0
LAST_WAIT_S: Final = 30.0
OPTIONAL_KINDS: Final = (POD_MONITORS, RESOURCE_CLAIM_TEMPLATES)
"""Kinds of children that not every cluster serves."""
# One rollout step shows as several events of the Deployment and its pods within moments; they are one reason to look.
CHILD_DELAY_S: Final = 0.2
# A LIST this young needs no second one before the first write.
FRESH_S: Final = 10.0


class Operator:
    """One replica of the operator: a warm standby until it holds the Lease, then the one that writes."""

    def __init__(self, settings: Settings, connection: Connection) -> None:
        self._settings = settings
        self._registry = prometheus_client.CollectorRegistry()
        prometheus_client.ProcessCollector(registry=self._registry)
        self._stop = asyncio.Event()
        self._leading = asyncio.Event()
        self._beat = time.monotonic()
        self._failure = ""
        self._warm = False
        self._primed_at = 0.0
        self._loop = asyncio.get_running_loop()

        self.cache = Cache()
        self.queue: Queue[Key] = Queue()
        self._parsed = ParsedSpecs()
        self._elector = Elector(
            HttpLeaseStore(connection, settings),
            settings,
            loop_alive=lambda: time.monotonic() - self._beat < LOOP_SILENCE_S,
            on_acquired=self._acquired,
        )
        self.kube = Kube(connection, settings, may_write=self._elector.may_write, registry=self._registry)
        self._recorder = Recorder(self.kube, instance=settings.identity, registry=self._registry)
        self._watch = Watch(
            self.cache,
            self._changed,
            kube=self.kube,
            connection=connection,
            settings=settings,
            kinds=watched_kinds(settings),
            fatal=self._fail,
            registry=self._registry,
        )
        accelerators = FreeAccelerators(self.kube, self.cache, settings)
        self._signals = PrometheusSignals(settings)
        self._scaling = ScalingController(
            settings,
            self.cache,
            self.kube,
            recorder=self._recorder,
            signals=self._signals,
            accelerators=accelerators,
            parsed=self._parsed,
            enqueue=lambda namespace, name: self.queue.add(Key(namespace, name)),
        )
        self._served: frozenset[Resource] = frozenset()
        self._probe = Probe()
        self._reconciler = ServiceReconciler(
            Collaborators(
                kube=self.kube,
                cache=self.cache,
                parsed=self._parsed,
                autoscaler=self._scaling,
                accelerators=accelerators,
                models=ModelReader(self._probe, clock=time.monotonic),
                fetching=FetchTeller(self.kube, self._recorder, now=time.time),
                recorder=self._recorder,
                images=Images(settings.fetch_image, settings.triton_image, settings.image_pull_policy),
                prometheus_namespace=settings.prometheus_namespace,
                allowed=Allowed(settings.allow_python_models, settings.model_cache_host_paths),
                serves=lambda resource: resource in self._served,
                node_autoscaling=settings.node_autoscaling,
                clock=time.monotonic,
                now=_now,
            )
        )
        self._http = HttpServer(
            settings.http_address,
            settings.http_port,
            silent_watches=self._watch.silent,
            api_answers=self._api_answers,
            ready=self._ready,
            registry=self._registry,
        )
        self._outcomes = prometheus_client.Counter(
            "conch_reconciles", "Reconciles by outcome.", ("outcome",), registry=self._registry
        )
        self._durations = prometheus_client.Histogram(
            "conch_reconcile_seconds", "Duration of a reconcile.", registry=self._registry
        )
        depth = prometheus_client.Gauge("conch_queue_depth", "Keys that wait for a worker.", registry=self._registry)
        depth.set_function(lambda: len(self.queue))
        leading = prometheus_client.Gauge("conch_leader", "1 on the leader.", registry=self._registry)
        leading.set_function(lambda: float(self._elector.leading))

    async def run(self) -> int:
        """Work until SIGTERM or a failure; the process's exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop.set)
        heart = asyncio.create_task(self._heartbeat())
        async with self.kube, self._http, self._probe:
            if await self._unless_stopped(self._prime()):
                await self._run_primed()
        heart.cancel()
        self._signals.close()
        if self._failure:
            log.error("operator.failed", why=self._failure)
            return FATAL_EXIT_CODE
        return 0

    async def _run_primed(self) -> None:
        """Watch, stand for election and, once elected, work."""
        self._warm = True
        recording = asyncio.create_task(self._recorder.run(self._stop))
        watching = asyncio.create_task(self._watch.run(self._stop))
        self._elector.start()
        working = asyncio.create_task(self._lead())
        for task in (recording, watching, working):
            task.add_done_callback(self._ended)
        await self._stop.wait()
        # Workers end before the Lease is given back: whoever takes it over starts to write at once.
        working.cancel()
        await asyncio.wait({working, watching, recording}, timeout=STOP_LIMIT_S)
        await asyncio.to_thread(self._elector.stop)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task of ours that breaks must not leave a leader behind that holds the Lease and does nothing."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("operator.task_broke", exc_info=error)
            self._fail(f"a task broke: {error!r}")

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do it, or give it up as soon as the process is to end; whether it was done."""
        task, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if task.done():
            task.result()
            return True
        task.cancel()
        await asyncio.wait({task}, timeout=STOP_LIMIT_S)
        return False

    async def _prime(self) -> None:
        """Fill the cache; an API server that doesn't answer is waited for, by crash-looping no one is helped."""
        delay_s = FIRST_WAIT_S
        while True:
            try:
                self._primed_at = time.monotonic()
                await self._watch.prime()
                self._served = await self._still_served(OPTIONAL_KINDS)
            except ApiError as error:
                log.warning("operator.waits_for_api_server", error=str(error))
                await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))  # noqa: S311 - spreads load only
                delay_s = min(delay_s * 2, LAST_WAIT_S)
            else:
                return

    async def _lead(self) -> None:
        """Once the Lease is held: reconcile everything, then whatever changes, and scale."""
        await self._leading.wait()
        log.info("operator.leads", services=self.cache.count(names.SERVICE_KIND))
        if time.monotonic() - self._primed_at > FRESH_S:
            await self._prime()  # what changed while we stood by must be seen before the first write
        self._scaling.start()
        for service in self.cache.list(names.SERVICE_KIND):
            self.queue.add(_key(service))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._settings.workers):
                tasks.create_task(self._work())
            tasks.create_task(self._resync())
            tasks.create_task(self._scale())

    async def _work(self) -> None:
        while True:
            key = await self.queue.get()
            try:
                with self._durations.time():
                    again_after_s = await self._reconciler.reconcile(key)
            except (ApiError, Retryable) as error:
                if not isinstance(error, NotLeader):  # the elector ends the process, or the next renewal comes through
                    log.warning("reconcile.failed", service=str(key), error=str(error))
                self._outcomes.labels(type(error).__name__).inc()
                self.queue.retry(key)
            except Exception:
                # A poisoned object hurts only itself.
                log.exception("reconcile.crashed", service=str(key))
                self._outcomes.labels("crashed").inc()
                self.queue.retry(key)
            else:
                self._outcomes.labels("ok").inc()
                self.queue.forget(key)
                if again_after_s is not None:
                    self.queue.add_after(key, again_after_s)
            finally:
                self.queue.done(key)

    async def _resync(self) -> None:
        """Every service once in `resync_s`, spread evenly, whatever events were missed."""
        while True:
            await self._look_for_optional_kinds()
            services = [_key(service) for service in self.cache.list(names.SERVICE_KIND)]
            pause_s = self._settings.resync_s / max(1, len(services))
            for key in services:
                await asyncio.sleep(pause_s)
                self.queue.add(key)
            if not services:
                await asyncio.sleep(self._settings.resync_s)

    async def _look_for_optional_kinds(self) -> None:
        """Stop making objects of a kind that is gone; one that comes later is in no watch before a restart."""
        try:
            self._served = await self._still_served(self._served)
        except ApiError as error:
            log.warning("operator.discovery_failed", error=str(error))

    async def _still_served(self, kinds: Iterable[Resource]) -> frozenset[Resource]:
        return frozenset([kind for kind in kinds if await self.kube.has_resource(kind)])

    async def _scale(self) -> None:
        while True:
            started = time.monotonic()
            try:
                await self._scaling.tick()
            except ApiError as error:
                log.warning("scaling.tick_failed", error=str(error))
            except Exception:
                # The next tick starts from the cluster again; a dead loop would never scale anybody.
                log.exception("scaling.tick_crashed")
            await asyncio.sleep(max(0.1, self._settings.tick_s - (time.monotonic() - started)))

    async def _heartbeat(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(0.5)

    def _changed(self, obj: Object, deleted: bool) -> None:  # noqa: FBT001 - the watch's callback
        """Map an object to the service that it concerns."""
        kind, metadata = obj["kind"], obj["metadata"]
        namespace = metadata.get("namespace", "")
        if kind == names.SERVICE_KIND:
            if deleted:
                self._parsed.forget(metadata["uid"])
            self.queue.add(Key(namespace, metadata["name"]))
            return
        # The owner too: a child whose label was edited away is a child in need of repair.
        labelled = (metadata.get("labels") or {}).get(names.SERVICE_LABEL)
        for service in {labelled, steps.owner_name(obj)}:
            if service is not None:
                self.queue.add_after(Key(namespace, service), CHILD_DELAY_S)

    def _acquired(self) -> None:
        """Called in the elector's thread."""
        self._loop.call_soon_threadsafe(self._leading.set)

    async def _api_answers(self) -> bool:
        return bool(await self.kube.server_version())

    def _ready(self) -> tuple[bool, str]:
        if not self._warm:
            return False, "the cache is being filled"
        return (
            True,
            "leader" if self._elector.leading else f"standby; the leader is {self._elector.holder or 'unknown'}",
        )

    def _fail(self, why: str) -> None:
        self._failure = why
        self._stop.set()


async def run(settings: Settings, kubeconfig: str | None = None) -> int:
    """Run the operator in this process; the exit code."""
    connection = await Connection.load(kubeconfig)
    return await Operator(settings, connection).run()


def start(settings: Settings, kubeconfig: str | None = None) -> None:
    """Run the operator and end the process, also when a thread is stuck in a system call."""
    code = asyncio.run(run(settings, kubeconfig))
    os._exit(code)


def _key(service: Object) -> Key:
    return Key(service["metadata"]["namespace"], service["metadata"]["name"])


def _now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
