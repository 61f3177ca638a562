"""The tick: signals and cache → one decision for each service → /scale, Events and what status says of it (I/O)."""

from __future__ import annotations

import asyncio
import datetime as dt
import math
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog

from conch import names
from conch.api.conditions import Condition, ConditionType, Reason
from conch.api.inferenceservice import InvalidSpec
from conch.kube.errors import ApiError, NotLeader
from conch.scaling import scale
from conch.scaling.policy import (
    LANDED_S,
    Decision,
    Direction,
    History,
    Limit,
    Quality,
    QualityKind,
    Rail,
    ReplicaState,
    ScalingSpec,
    Signals,
    Term,
    TermName,
    after_step,
    decide,
    memory_unknown,
    rested,
)
from conch.scaling.scale import Outcome, ScaleApi
from conch.scaling.signals import SINGLE_MODELS, Pipeline, ReadyPod, Samples, join
from conch.triton.metrics import Query
from conch.workload import gpus
from conch.workload.deployment import template_inputs
from conch.workload.fit import measured_before

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from conch.api.inferenceservice import InferenceServiceSpec
    from conch.api.parsed import ParsedSpecs
    from conch.config import Settings

Object = dict[str, Any]
Many = list[Object]
Key = tuple[str, str]

QUIET_S: Final = 15.0
WRITES_AT_ONCE: Final = 16
# Our write comes back as a watch event; if that is lost, the cache's own LIST repairs it and we go on meanwhile.
ECHO_S: Final = 30.0
# What replicas use of an accelerator is learned: it is told when it moves by a tenth, at most every ten minutes (R11).
MEMORY_STEP: Final = 1.1
MEMORY_TOLD_S: Final = 600.0
AGES: Final = (
    (86400, "a day"), (3600, "an hour"), (1800, "30 minutes"), (600, "10 minutes"), (300, "5 minutes"),
    (60, "a minute"), (30, "30 seconds"),
)  # fmt: skip

_OWN_MANAGERS: Final = frozenset({names.WORKLOAD_MANAGER, names.SCALING_MANAGER, "before-first-apply"})
_REASONS: Final = {
    QualityKind.PARTIAL: Reason.METRICS_PARTIAL,
    QualityKind.STALE: Reason.METRICS_OLD,
    QualityKind.MISSING: Reason.METRICS_MISSING,
    QualityKind.NON_FINITE: Reason.METRICS_NOT_FINITE,
}

_log = structlog.get_logger(__name__)


class Objects(Protocol):
    """What is needed of the cache."""

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """One object."""

    def list(self, kind: str, namespace: str | None = None) -> Many:
        """All objects of a kind."""

    def children(self, namespace: str, service: str) -> dict[str, Many]:
        """A service's children by kind."""

    def replicas_owners(self, namespace: str, name: str) -> dict[str, str]:
        """Field managers of a Deployment's spec.replicas."""


class Recorder(Protocol):
    """Where Events go; never blocks and never fails."""

    def record(self, obj: Object, reason: str, message: str, type_: str = "Normal") -> None:
        """Tell what happened to an object."""


class SignalsSource(Protocol):
    """Where samples come from."""

    @property
    def promql(self) -> Mapping[Query, str]:
        """The queries, for people."""

    async def read(self) -> Samples:
        """One tick's samples; never raises."""


class Accelerators(Protocol):
    """What the cluster has."""

    async def free(self, spec: InferenceServiceSpec) -> int | None:
        """Matching accelerators that nothing has requested; None when unknown."""


@dataclass(frozen=True)
class ScalingRecord:
    """What status says of a service's scaling: status.scaling and two conditions."""

    decision: Direction
    replicas: int
    term: TermName
    rail: Rail
    message: str
    terms: tuple[Term, ...]
    waiting: float | None
    """Requests in all queues, coarse; None when unknown."""
    quality: QualityKind
    last_scale_up: str | None
    last_scale_down: str | None
    metrics_stale: Condition
    scaling_limited: Condition

    def to_status(self) -> dict[str, Any]:
        """The content of status.scaling; what is not known is left out."""
        status: dict[str, Any] = {
            "decision": str(self.decision),
            "replicas": self.replicas,
            "term": str(self.term) or None,
            "rail": str(self.rail) or None,
            "message": self.message,
            "terms": [_term_status(term) for term in self.terms],
            "waiting": self.waiting,
            "quality": str(self.quality),
            "lastScaleUp": self.last_scale_up,
            "lastScaleDown": self.last_scale_down,
        }
        return {key: value for key, value in status.items() if value is not None}

    @property
    def lasting(self) -> tuple[object, ...]:
        """What a write of status is worth on its own (R11)."""
        return (self.decision, self.replicas, self.quality, self.metrics_stale.status, self.last_scale_up)

    @property
    def explained(self) -> tuple[object, ...]:
        """What may wait for some seconds, so that noise around a bound writes nothing."""
        return (self.term, self.rail, self.waiting, self.metrics_stale, self.scaling_limited, self.last_scale_down)


def _term_status(term: Term) -> dict[str, Any]:
    status: dict[str, Any] = {"name": str(term.name), "detail": term.message}
    return status if term.replicas is None else {**status, "replicas": term.replicas}


@dataclass(frozen=True, slots=True)
class _Pods:
    """A service's pods, as far as scaling looks at them."""

    ready: tuple[ReadyPod, ...] = ()
    starting: tuple[float, ...] = ()
    unschedulable: int = 0
    terminating: int = 0


@dataclass(slots=True)
class _Service:
    """What is remembered of one service between two ticks."""

    uid: str
    history: History
    generation: int = -1
    spec: ScalingSpec = field(default_factory=ScalingSpec)
    pipeline: Pipeline = SINGLE_MODELS
    pods_seen: tuple[str, ...] | None = None
    pods: _Pods = field(default_factory=_Pods)
    record: ScalingRecord | None = None
    told_at: float = -math.inf
    seen: tuple[object, ...] | None = None
    """The inputs of the last decision, if it would be the same at any later instant."""
    seen_at: float = 0.0
    bad_since: float | None = None
    notices: frozenset[str] = frozenset()
    foreign: str | None = None
    template_inputs: str = ""
    """Of the present generation: pods of another template say nothing of these models."""
    most_memory: float = 0.0
    """The most bytes that a replica was seen to use on an accelerator."""
    memory_used: int | None = None
    """The same as it was last told; None: not measured."""
    memory_told_at: float = -math.inf
    wrote_on: tuple[str, float] | None = None
    """The Deployment's resourceVersion before our last write, and when that was."""


@dataclass(frozen=True, slots=True)
class _Case:
    """One service in one tick."""

    service: Object
    spec: InferenceServiceSpec
    deployment: Object
    memory: _Service
    signals: Signals
    replicas: ReplicaState
    inputs: tuple[object, ...]

    @property
    def key(self) -> Key:
        metadata = self.service["metadata"]
        return metadata["namespace"], metadata["name"]


class ScalingController:
    """Scales all services on one tick; what it knows of each is kept by name and lost with the process.

    Args:
        settings: the operator's settings.
        cache: the cluster as last seen.
        kube: reads and writes Deployments and their scale.
        recorder: where Events go.
        signals: the samples of a tick.
        accelerators: what is free.
        parsed: specs, parsed once for each generation.
        enqueue: called with namespace and name when a service's record changed.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        settings: Settings,
        cache: Objects,
        kube: ScaleApi,
        *,
        recorder: Recorder,
        signals: SignalsSource,
        accelerators: Accelerators,
        parsed: ParsedSpecs,
        enqueue: Callable[[str, str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._cache = cache
        self._kube = kube
        self._recorder = recorder
        self._signals = signals
        self._accelerators = accelerators
        self._parsed = parsed
        self._enqueue = enqueue
        self._clock = clock
        self._services: dict[Key, _Service] = {}
        self._leading = False

    def start(self) -> None:
        """Begin to decide, as the leader: what an earlier term remembered is forgotten, so nothing is reduced early."""
        self._services.clear()
        self._leading = True

    def record(self, namespace: str, name: str) -> ScalingRecord | None:
        """The last decision about a service; None before the first."""
        memory = self._services.get((namespace, name))
        return None if memory is None else memory.record

    def memory_used(self, service: Object) -> int | None:
        """Bytes that a replica was seen to use on an accelerator, with this very spec; None: not measured yet."""
        metadata = service["metadata"]
        memory = self._services.get((metadata["namespace"], metadata["name"]))
        # Until the next tick the figure is of the spec before, whose models may be others.
        known = memory is not None and (memory.uid, memory.generation) == (metadata["uid"], metadata["generation"])
        return memory.memory_used if memory is not None and known else None

    def initial_replicas(self, namespace: str, name: str, spec: InferenceServiceSpec) -> int:
        """How many replicas a Deployment that has to be made (again) starts with: as many as were last decided."""
        record = self.record(namespace, name)
        service = self._cache.get(names.SERVICE_KIND, namespace, name) or {}
        told = ((service.get("status") or {}).get("scaling") or {}).get("replicas")
        last = record.replicas if record is not None else told if isinstance(told, int) else 0
        return min(max(last, spec.scaling.min_replicas), spec.scaling.max_replicas)

    async def tick(self) -> None:
        """Decide about every service once, and carry the decisions out.

        Raises:
            NotLeader: the lease was lost meanwhile; nothing more is written.
        """
        if not self._leading:
            return
        samples = await self._signals.read()
        now = self._clock()
        rivals = self._rivals()
        services = self._cache.list(names.SERVICE_KIND)
        self._forget_all_but(services)
        due: list[tuple[_Case, Decision]] = []
        for count, service in enumerate(services):
            try:
                case = self._case(service, samples, rivals, now)
                if case is not None:
                    decision = decide(case.memory.spec, case.signals, case.replicas, case.memory.history, now)
                    if self._acts(case, decision):
                        due.append((case, decision))
                    else:
                        self._keep(case, decision, now)
            except Exception:  # noqa: BLE001 - logged with its trace
                # A poisoned object hurts only itself.
                _log.exception("scaling.service_failed", service=_name(service))
            if count % 100 == 99:  # noqa: PLR2004 - often enough that probes and watch events don't wait
                await asyncio.sleep(0)
        await self._carry_out(due, now)

    # --- what a decision is made from

    def _case(self, service: Object, samples: Samples, rivals: Mapping[Key, str], now: float) -> _Case | None:
        """The inputs of one decision; None when there is nothing to decide."""
        metadata = service["metadata"]
        if "deletionTimestamp" in metadata:
            return None
        namespace, name = metadata["namespace"], metadata["name"]
        try:
            spec = self._parsed.get(service)
        except InvalidSpec:
            return None
        memory = self._memory(service, spec)
        if spec.paused:
            self._keep_paused(memory, (namespace, name), now)
            return None
        children = self._cache.children(namespace, name)
        deployment = self._cache.get("Deployment", namespace, names.deployment(name))
        if deployment is None or "deletionTimestamp" in deployment["metadata"]:
            return None
        version = deployment["metadata"]["resourceVersion"]
        if memory.wrote_on is not None and memory.wrote_on[0] == version and now - memory.wrote_on[1] < ECHO_S:
            return None  # the cache doesn't show our own last step yet
        memory.wrote_on = None
        pods = _pods(memory, children.get("Pod", []))
        self._look_for_sharing(memory, spec, children.get("Pod", []))
        self._measure(memory, (namespace, name), samples, deployment, now)
        signals = join(
            samples,
            namespace,
            pods.ready,
            now=now,
            stale_s=self._settings.metrics_stale_s,
            memory=memory.spec.memory_matters,
            pipeline=memory.pipeline,
        )
        rival = rivals.get((namespace, names.deployment(name)))
        seen = (version, memory.pods_seen, rival, memory.spec, signals)
        if seen == memory.seen:
            memory.seen_at = now
            return None
        if memory.seen is not None:
            memory.history = rested(memory.history, memory.seen_at)
            memory.seen = None
        owners = self._cache.replicas_owners(namespace, names.deployment(name))
        replicas = _replica_state(deployment, pods, owners, rival, now)
        return _Case(service, spec, deployment, memory, signals, replicas, seen)

    def _memory(self, service: Object, spec: InferenceServiceSpec) -> _Service:
        metadata = service["metadata"]
        key = metadata["namespace"], metadata["name"]
        memory = self._services.get(key)
        if memory is None or memory.uid != metadata["uid"]:
            told = (service.get("status") or {}).get("scaling") or {}
            history = History.rebuilt(_instant(told.get("lastScaleUp")), _instant(told.get("lastScaleDown")))
            memory = self._services[key] = _Service(metadata["uid"], history)
        if memory.generation != metadata["generation"]:
            memory.generation = metadata["generation"]
            memory.spec = ScalingSpec.of(spec, self._settings)
            memory.pipeline = Pipeline.of(spec)
            memory.template_inputs = template_inputs(spec)
            memory.memory_used = measured_before(service, spec)
            memory.most_memory = memory.memory_used or 0.0
        return memory

    def _look_for_sharing(self, memory: _Service, spec: InferenceServiceSpec, pods: Iterable[Object]) -> None:
        """Others on the same device couple its metrics to strangers: the memory term must not be used then."""
        if not memory.spec.accelerators:
            return
        on = {str(name) for pod in pods if (name := (pod.get("spec") or {}).get("nodeName"))}
        shared = spec.accelerator.shared or any(
            gpus.is_shared(self._cache.get("Node", "", name), spec.accelerator) for name in on
        )
        if shared != memory.spec.shared:
            memory.spec = replace(memory.spec, shared=shared)

    def _measure(self, memory: _Service, key: Key, samples: Samples, deployment: Object, now: float) -> None:
        """Learn what these models take of an accelerator, from pods that were all made for them."""
        status, metadata = deployment.get("status") or {}, deployment["metadata"]
        annotations = metadata.get("annotations") or {}
        if (
            memory.spec.shared
            or not memory.spec.accelerators
            or annotations.get(names.TEMPLATE_INPUTS_ANNOTATION) != memory.template_inputs
            # Right after a new template the status still counts the old pods as up to date.
            or status.get("observedGeneration", 0) < metadata.get("generation", 0)
            or status.get("updatedReplicas", 0) != status.get("replicas", 0)
        ):
            return
        seen = [samples.memory_used.get((key[0], pod.name), 0.0) for pod in memory.pods.ready]
        memory.most_memory = max(memory.most_memory, *seen, 0.0)
        told = memory.memory_used or 0
        if memory.most_memory >= max(1.0, MEMORY_STEP * told) and now - memory.memory_told_at >= MEMORY_TOLD_S:
            memory.memory_used, memory.memory_told_at = int(memory.most_memory), now
            self._enqueue(*key)

    def _rivals(self) -> dict[Key, str]:
        """Autoscalers that target a Deployment, by its namespace and name (R1)."""
        rivals: dict[Key, str] = {}
        for kind in ("HorizontalPodAutoscaler", "ScaledObject"):
            for scaler in self._cache.list(kind):
                target = (scaler.get("spec") or {}).get("scaleTargetRef") or {}
                if target.get("kind", "Deployment") == "Deployment" and "name" in target:
                    metadata = scaler["metadata"]
                    rivals[metadata["namespace"], target["name"]] = f"{kind} {metadata['name']}"
        return rivals

    def _forget_all_but(self, services: Iterable[Object]) -> None:
        if len(self._services) == 0:
            return
        present = {(s["metadata"]["namespace"], s["metadata"]["name"]) for s in services}
        for key in self._services.keys() - present:
            del self._services[key]

    # --- what becomes of it

    def _acts(self, case: _Case, decision: Decision) -> bool:
        if case.memory.spec.mode != "Automatic":
            return False
        return decision.take_back or decision.replicas != case.replicas.wanted

    async def _carry_out(self, due: Sequence[tuple[_Case, Decision]], now: float) -> None:
        gate = asyncio.Semaphore(WRITES_AT_ONCE)

        async def one(case: _Case, decision: Decision) -> None:
            async with gate:
                try:
                    await self._step(case, decision, now)
                except NotLeader:
                    raise
                except ApiError as error:
                    self._keep(case, _failed(case, decision, error), now)

        results = await asyncio.gather(*(one(*item) for item in due), return_exceptions=True)
        for (case, _), result in zip(due, results, strict=True):
            if isinstance(result, NotLeader):
                self._leading = False
                raise result
            if isinstance(result, Exception):
                _log.error("scaling.step_failed", service=_name(case.service), exc_info=result)
            elif isinstance(result, BaseException):
                raise result

    async def _step(self, case: _Case, decision: Decision, now: float) -> None:
        """Write one decision and, once its effect is read back, say so."""
        memory, before = case.memory, case.replicas.wanted
        if decision.replicas > before and case.spec.accelerator.devices and not self._settings.node_autoscaling:
            free = await self._accelerators.free(case.spec)
            if free is not None:
                known = replace(case.replicas, free=free // case.spec.accelerator.devices)
                decision = decide(memory.spec, case.signals, known, memory.history, now)
                if not self._acts(case, decision):
                    self._keep(case, decision, now)
                    return
        written = await scale.write_scale(
            self._kube,
            case.key[0],
            case.deployment["metadata"]["name"],
            decision.replicas,
            decided_on=before,
            uid=case.deployment["metadata"].get("uid"),
            take_back=decision.take_back,
        )
        if written.outcome is not Outcome.WRITTEN:
            memory.history = decision.next_history
            _log.info("scaling.dropped", service=_name(case.service), why=written.why or "it is so already")
            return
        memory.wrote_on = (case.deployment["metadata"]["resourceVersion"], now)
        shown = decision.replicas if written.replicas is None else written.replicas
        history = after_step(decision.next_history, decision, before, now)
        decision = replace(decision, replicas=shown, next_history=history, settled=False)
        self._tell_step(case, decision)
        self._keep(case, decision, now)

    def _tell_step(self, case: _Case, decision: Decision) -> None:
        before, after = case.replicas.wanted, decision.replicas
        if decision.take_back:
            message = f"replicas, which {case.replicas.foreign} had set to {before}, are decided by Conch again"
            self._recorder.record(case.service, "ReplicasTakenBack", message)
        if decision.direction is not Direction.HOLD:
            reason = f"Scaled{decision.direction}"
            self._recorder.record(case.service, reason, f"from {before} to {after}: {decision.message}")

    def _keep(self, case: _Case, decision: Decision, now: float) -> None:
        """Remember a decision, and have status written if people should see something new."""
        memory = case.memory
        memory.history = decision.next_history
        self._tell_notices(case, decision)
        quality, stale = self._metrics_stale(case, decision, now)
        unsure = memory.bad_since is not None and quality is QualityKind.FRESH
        if decision.rail is Rail.METRICS and unsure and memory.record is not None:
            memory.seen = None
            return  # a scrape was lost, perhaps only once: it forbids a reduction, but people need not read of it
        record = ScalingRecord(
            decision=decision.direction,
            replicas=decision.replicas,
            term=decision.term,
            rail=decision.rail,
            message=_sentence(decision.message),
            terms=decision.terms,
            waiting=_coarse(case.signals.waiting),
            quality=quality,
            last_scale_up=_rfc3339(memory.history.last_up),
            last_scale_down=_rfc3339(memory.history.last_down),
            metrics_stale=stale,
            scaling_limited=_scaling_limited(decision),
        )
        told = self._publish(memory, case.key, record, now)
        # While something is still to be told, the next tick must look again even if nothing else changes.
        memory.seen, memory.seen_at = case.inputs if told and decision.settled else None, now

    def _publish(self, memory: _Service, key: Key, record: ScalingRecord, now: float) -> bool:
        """Replace the record and enqueue the service; false if that has to wait."""
        old = memory.record
        if old is not None and old.lasting == record.lasting:
            if old.explained == record.explained:
                return True
            if now - memory.told_at < QUIET_S:
                return False
        memory.record, memory.told_at = record, now
        self._enqueue(*key)
        return True

    def _keep_paused(self, memory: _Service, key: Key, now: float) -> None:
        memory.seen = None
        deployment = self._cache.get("Deployment", key[0], names.deployment(key[1])) or {"spec": {}}
        record = memory.record or _blank(memory.history)
        message = "spec.paused is true: replicas stay as they are."
        unlimited = Condition(ConditionType.SCALING_LIMITED, False, Reason.PAUSED, message)
        unmeasured = Condition(ConditionType.METRICS_STALE, False, Reason.PAUSED, "spec.paused is true.")
        paused = replace(
            record,
            decision=Direction.HOLD,
            replicas=deployment["spec"].get("replicas", record.replicas),
            term=TermName.NONE,
            rail=Rail.NONE,
            message=message,
            waiting=None,
            metrics_stale=unmeasured,
            scaling_limited=unlimited,
        )
        self._publish(memory, key, paused, now)

    def _tell_notices(self, case: _Case, decision: Decision) -> None:
        memory, foreign = case.memory, case.replicas.foreign
        for notice in decision.notices:
            if notice.reason not in memory.notices:
                self._recorder.record(case.service, notice.reason, _sentence(notice.message), "Warning")
        memory.notices = frozenset(notice.reason for notice in decision.notices)
        if decision.rail is Rail.PERSON and foreign is not None and memory.foreign != foreign:
            self._recorder.record(case.service, "ReplicasSetByHand", _sentence(decision.message))
        memory.foreign = foreign

    def _metrics_stale(self, case: _Case, decision: Decision, now: float) -> tuple[QualityKind, Condition]:
        """The quality to show and its condition; a scrape that was lost once shows nowhere (R11)."""
        memory, signals = case.memory, case.signals
        query, quality = _worst(signals)
        if quality.kind is QualityKind.FRESH and memory_unknown(memory.spec, decision.next_history, now):
            query, quality = Query.MEMORY, replace(signals.memory, kind=max(signals.memory.kind, QualityKind.MISSING))
        good = _metrics_condition(False, Reason.FRESH, "The metrics of all ready replicas are fresh.")
        if not signals.configured:
            message = "No Prometheus is configured (CONCH_PROMETHEUS_URL), so replicas change only with the spec."
            return QualityKind.MISSING, _metrics_condition(None, Reason.NOT_CONFIGURED, message)
        if quality.kind is QualityKind.FRESH:
            memory.bad_since = None
            return quality.kind, good
        if case.replicas.ready == 0 or signals.too_young:
            memory.bad_since = None
            message = "No replica has been ready for long enough to be measured."
            kind = QualityKind.MISSING if memory.record is None else memory.record.quality
            return kind, _metrics_condition(False, Reason.NO_READY_REPLICAS, message)
        memory.bad_since = now if memory.bad_since is None else memory.bad_since
        sure = bool(quality.detail) or quality.kind is QualityKind.NON_FINITE
        if not sure and now - memory.bad_since < self._settings.metrics_stale_s:
            if memory.record is None:
                return QualityKind.MISSING, _metrics_condition(None, Reason.STARTING, "Not measured yet.")
            return memory.record.quality, memory.record.metrics_stale
        message = _explained(quality, self._signals.promql[query])
        return quality.kind, _metrics_condition(True, _REASONS[quality.kind], message)


def _failed(case: _Case, decision: Decision, error: ApiError) -> Decision:
    """A decision that could not be written: nothing changed, and people see why."""
    _log.warning("scaling.write_failed", service=_name(case.service), error=str(error))
    limit = Limit(Reason.API_ERROR, f"replicas can't be written: {error}")
    return replace(
        decision,
        replicas=case.replicas.wanted,
        direction=Direction.HOLD,
        message="the last decision could not be written",
        limit=limit,
        settled=False,
    )


def _pods(memory: _Service, pods: Sequence[Object]) -> _Pods:
    """The pods' state, read again only when one of them changed."""
    seen = tuple([pod["metadata"]["resourceVersion"] for pod in pods])
    if seen != memory.pods_seen:
        memory.pods_seen, memory.pods = seen, _read_pods(pods)
    return memory.pods


def _read_pods(pods: Iterable[Object]) -> _Pods:
    ready: list[ReadyPod] = []
    starting: list[float] = []
    unschedulable = terminating = 0
    for pod in pods:
        metadata, status = pod["metadata"], pod.get("status") or {}
        if "deletionTimestamp" in metadata:
            terminating += 1
            continue
        if status.get("phase") in {"Succeeded", "Failed"}:
            continue
        conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
        is_ready, placed = conditions.get("Ready", {}), conditions.get("PodScheduled", {})
        created = _instant(metadata.get("creationTimestamp")) or 0.0
        if is_ready.get("status") == "True":
            since = _instant(is_ready.get("lastTransitionTime"))
            ready.append(ReadyPod(metadata["name"], created if since is None else since))
        elif placed.get("status") == "False":
            unschedulable += 1
        elif (pod.get("spec") or {}).get("nodeName"):
            # A pod that waited for its node begins to start when it gets one.
            since = _instant(placed.get("lastTransitionTime"))
            starting.append(created if since is None else since)
    return _Pods(tuple(ready), tuple(starting), unschedulable, terminating)


def _replica_state(
    deployment: Object, pods: _Pods, owners: Mapping[str, str], second_scaler: str | None, now: float
) -> ReplicaState:
    status = deployment.get("status") or {}
    foreign = sorted(owners.keys() - _OWN_MANAGERS) if names.SCALING_MANAGER not in owners else []
    return ReplicaState(
        wanted=deployment["spec"].get("replicas", 1),
        ready=len(pods.ready),
        landed=sum(1 for pod in pods.ready if now - pod.ready_since >= LANDED_S),
        starting=pods.starting,
        unschedulable=pods.unschedulable,
        terminating=pods.terminating,
        rollout=status.get("updatedReplicas", 0) != status.get("replicas", 0),
        foreign=foreign[0] if foreign else None,
        second_scaler=second_scaler,
    )


def _worst(signals: Signals) -> tuple[Query, Quality]:
    order = list(QualityKind)
    return max(
        ((Query.WAITING, signals.queue), (Query.SUCCESSES, signals.flow)), key=lambda pair: order.index(pair[1].kind)
    )


def _metrics_condition(status: bool | None, reason: Reason, message: str) -> Condition:  # noqa: FBT001
    return Condition(ConditionType.METRICS_STALE, status, reason, message)


def _explained(quality: Quality, promql: str) -> str:
    """What is wrong, the query to try, and how old the last sample is, in steps that a lasting outage rarely takes."""
    what = {
        QualityKind.PARTIAL: "Some ready replicas have no sample",
        QualityKind.STALE: "The newest samples are too old",
        QualityKind.MISSING: "No ready replica has a sample",
        QualityKind.NON_FINITE: "A sample is negative, not finite, or impossible",
    }.get(quality.kind, "The metrics can't be used")
    cause = f" ({quality.detail})" if quality.detail else ""
    older = next((words for age_s, words in AGES if quality.age_s is not None and quality.age_s > age_s), None)
    age = "no sample has been seen since the operator started"
    if quality.age_s is not None:
        age = f"the last sample is more than {older} old" if older else "the last sample is younger than 30 seconds"
    return f"{what}{cause}; {age}. Replicas are not reduced meanwhile. Query: {promql}"


def _scaling_limited(decision: Decision) -> Condition:
    if decision.limit is None:
        message = "Nothing keeps the replicas below what is wanted."
        return Condition(ConditionType.SCALING_LIMITED, False, Reason.UNLIMITED, message)
    return Condition(
        ConditionType.SCALING_LIMITED,
        True,
        decision.limit.reason,
        _sentence(decision.limit.message),
    )


def _blank(history: History) -> ScalingRecord:
    unknown = _metrics_condition(None, Reason.PAUSED, "spec.paused is true.")
    unlimited = Condition(ConditionType.SCALING_LIMITED, None, Reason.PAUSED, "spec.paused is true.")
    return ScalingRecord(
        Direction.HOLD, 0, TermName.NONE, Rail.NONE, "", (), None, QualityKind.MISSING,
        _rfc3339(history.last_up), _rfc3339(history.last_down), unknown, unlimited,
    )  # fmt: skip


def _coarse(waiting: tuple[tuple[str, float], ...] | None) -> float | None:
    """Two digits tell people enough, and change rarely."""
    if waiting is None:
        return None
    total = sum(count for _, count in waiting)
    return float(f"{total:.2g}") if total >= 10 else float(round(total))  # noqa: PLR2004 - two digits


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def _instant(text: object) -> float | None:
    if not isinstance(text, str):
        return None
    try:
        return dt.datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _rfc3339(instant: float | None) -> str | None:
    if instant is None:
        return None
    return dt.datetime.fromtimestamp(instant, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _name(service: Object) -> str:
    return f"{service['metadata'].get('namespace')}/{service['metadata'].get('name')}"
