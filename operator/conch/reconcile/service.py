"""One InferenceService: gather, validate, decide, apply, observe, status. I/O through what it is given."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import structlog

from conch import names
from conch.api.conditions import ConditionType, Reason
from conch.api.demands import engines
from conch.api.inferenceservice import InvalidSpec
from conch.kube.client import POD_MONITORS, RESOURCE_CLAIM_TEMPLATES
from conch.kube.errors import Conflict, Forbidden, Invalid, NotFound
from conch.reconcile import steps
from conch.reconcile.errors import ReconcileError, Retryable, Stalled, Waiting
from conch.reconcile.observation import NOTHING, observe
from conch.reconcile.status import StatusInputs, build_status, first_sight
from conch.scaling import scale
from conch.triton import refusals
from conch.triton.releases import release_of
from conch.workload import claims
from conch.workload.deployment import (
    SURGE_ON_CREATE,
    Images,
    Strategy,
    choose_strategy,
    keeps_template,
    server_image,
    template_inputs,
)
from conch.workload.desired import child_names, desired_children
from conch.workload.fit import Fit, Surroundings, fit, measured_before, models_digest
from conch.workload.offline import check_plan_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from conch.api.inferenceservice import InferenceServiceSpec
    from conch.api.parsed import ParsedSpecs
    from conch.kube.cache import Cache
    from conch.kube.client import Kube, Resource
    from conch.reconcile.observation import Observation
    from conch.reconcile.reading import Look
    from conch.reconcile.status import Scaling

Object = dict[str, Any]
log = structlog.get_logger(__name__)

FREE_RETRY_S: Final = 15.0
"""How often status looks again at what is free while pods wait."""
NODES_RETRY_S: Final = 30.0
"""How often status looks again at the nodes while none suits."""
NO_CLAIMS: Final = (
    "spec.accelerator.claim needs the API resource.k8s.io/v1, which this cluster does not serve, or did not when the "
    "operator started: use accelerator.resource, or a cluster of Kubernetes 1.34 or later, and restart the operator."
)


class Key(NamedTuple):
    """What the work queue holds: one InferenceService."""

    namespace: str
    name: str


class Recorder(Protocol):
    """Where Events go; never blocks and never fails."""

    def record(self, obj: Object, reason: str, message: str, type_: str = "Normal") -> None:
        """Tell what happened to an object."""


class Autoscaler(Protocol):
    """What the reconcile needs of scaling."""

    def record(self, namespace: str, name: str) -> Scaling | None:
        """The last decision."""

    def initial_replicas(self, namespace: str, name: str, spec: InferenceServiceSpec) -> int:
        """How many replicas a new Deployment starts with."""

    def memory_used(self, service: Object) -> int | None:
        """Bytes that the models of this very spec were seen to use on an accelerator; None: not measured yet."""


class Accelerators(Protocol):
    """What the cluster has."""

    async def free(self, spec: InferenceServiceSpec, *, fresh: bool = False) -> int | None:
        """Matching accelerators that nothing has requested; None when unknown."""

    def nodes(self) -> list[Object] | None:
        """All nodes; None when the operator sees none."""


class Models(Protocol):
    """What the servers have loaded."""

    async def look(
        self, service: Object, spec: InferenceServiceSpec | None, children: Mapping[str, list[Object]]
    ) -> Look:
        """What is known of the present template's models; asks a pod if nobody has yet, within seconds."""

    def forget(self, namespace: str, name: str) -> None:
        """The service is gone."""


class Fetching(Protocol):
    """Tells of pods whose models take long to fetch."""

    async def look(self, service: Object, children: Mapping[str, list[Object]]) -> float | None:
        """Tell what there is to tell; the seconds after which to look again, or None."""


@dataclass(frozen=True)
class Collaborators:
    """Everything outside the reconciler."""

    kube: Kube
    cache: Cache
    parsed: ParsedSpecs
    autoscaler: Autoscaler
    accelerators: Accelerators
    models: Models
    fetching: Fetching
    recorder: Recorder
    images: Images
    prometheus_namespace: str
    serves: Callable[[Resource], bool]
    """Whether the cluster serves a kind that not every cluster has."""
    node_autoscaling: bool
    clock: Callable[[], float]
    now: Callable[[], str]
    """The present instant, RFC 3339, for transition times."""
    allowed: refusals.Allowed = field(default_factory=refusals.Allowed)


class ServiceReconciler:
    """Brings one InferenceService's children and status to where its spec wants them."""

    def __init__(self, outside: Collaborators) -> None:
        self._out = outside
        self._repairs = steps.RepairLimit(outside.clock)
        # New services whose names were checked in their first pass, of which the second has yet to come.
        self._unfinished: dict[str, None] = {}

    async def reconcile(self, key: Key) -> float | None:
        """Work on one key; the seconds after which to look again, or None. Raises Retryable and ApiError."""
        service = self._out.cache.get(names.SERVICE_KIND, key.namespace, key.name)
        if service is None or "deletionTimestamp" in service["metadata"]:
            # The garbage collector removes the children; a write now would bring them back for ever (R4).
            self._out.models.forget(*key)
            return None
        outcome = _Outcome()
        try:
            spec = self._out.parsed.get(service)
            outcome = replace(outcome, spec=spec, fit=self._fit(service, spec))
            service = await self._acknowledge(service, outcome)
            outcome = await self._converge(service, outcome)
        except InvalidSpec as error:
            outcome = replace(outcome, error=Stalled(Reason.INVALID_SPEC, str(error)))
        except ReconcileError as error:
            outcome = replace(outcome, error=error)
        except (Invalid, Forbidden) as error:
            # Another spec, role or cluster policy heals this; the server's own words say which.
            refused = Waiting(Reason.API_ERROR, f"The API server refuses a child: {error.message}")
            outcome = replace(outcome, error=refused)
        read_again_after_s = await self._write_status(service, outcome)
        if isinstance(outcome.error, Retryable):
            raise outcome.error
        again_after_s = outcome.error.retry_after_s if isinstance(outcome.error, Waiting) else outcome.again_after_s
        return min((s for s in (again_after_s, read_again_after_s) if s is not None), default=None)

    async def _acknowledge(self, service: Object, outcome: _Outcome) -> Object:
        """Say that a generation was seen before any slow work is done (R10)."""
        status = service.get("status") or {}
        if status.get("observedGeneration") == service["metadata"]["generation"]:
            return service
        if status or outcome.spec is None:
            return await self._apply_status(service, first_sight(service, self._out.now()))
        # A new service's first status is what the pass that follows will find, which then has nothing to write.
        metadata = service["metadata"]
        wanted = self._out.autoscaler.initial_replicas(metadata["namespace"], metadata["name"], outcome.spec)
        expected = replace(NOTHING, exists=True, wanted=wanted)
        return await self._apply_status(service, self._status(service, outcome, expected))

    async def _converge(self, service: Object, outcome: _Outcome) -> _Outcome:
        """Apply the children, the Deployment last, and prune what is no longer wanted."""
        spec, out = outcome.spec, self._out
        assert spec is not None  # noqa: S101 - set by the caller, for the type checker
        if spec.paused:
            return outcome
        namespace, name = service["metadata"]["namespace"], service["metadata"]["name"]
        if spec.accelerator.claim is not None and not out.serves(RESOURCE_CLAIM_TEMPLATES):
            raise Waiting(Reason.NO_CLAIMS, NO_CLAIMS)
        with_pod_monitor = out.serves(POD_MONITORS)
        every = child_names(name, spec, with_pod_monitor=with_pod_monitor)
        children = await steps.check_names(
            out.kube, service, every, out.cache.children(namespace, name),
            just_checked=self._unfinished.pop(service["metadata"]["uid"], None) is not None,
        )  # fmt: skip
        live = _deployment(children, name)
        _refuse(spec, server_image(spec, out.images, live), allowed=out.allowed)
        _hold_back(outcome.fit, spec, live)
        strategy, free = await self._strategy(spec, live)
        wanted = desired_children(
            service,
            spec,
            images=out.images,
            strategy=strategy or SURGE_ON_CREATE,
            live_deployment=live,
            prometheus_namespace=out.prometheus_namespace,
            with_pod_monitor=with_pod_monitor,
            allow_code=out.allowed.python_models,
        )
        check_plan_size(wanted)
        applied = await steps.apply_children(
            out.kube, out.cache, wanted, children,
            limit=self._repairs, last=lambda child: self._apply_deployment(service, spec, child, live),
        )  # fmt: skip
        if not claims.unused(live, _wanted_deployment(wanted)):
            # Pods of the old revision that start again need their own.
            children = {kind: found for kind, found in children.items() if kind not in steps.NAMED_BY_PODS}
        removed = await steps.prune(out.kube, out.cache, service, wanted, children)
        for what in applied.repaired:
            out.recorder.record(service, "DriftRepaired", f"Put back {what}.", "Warning")
        for what in removed:
            out.recorder.record(service, "Pruned", f"Removed {what}, which is no longer wanted.")
        await self._claim_replicas(spec, namespace, name)
        again = steps.REPAIR_WINDOW_S if applied.postponed else None
        if applied.unfinished:
            if len(self._unfinished) > steps.REMEMBERED:
                self._unfinished.clear()  # of services that were deleted meanwhile; the others are looked up again
            self._unfinished[service["metadata"]["uid"]] = None
            again = 0.0
        if strategy is None and free is not None:
            again = FREE_RETRY_S  # other people's pods come and go without an event for us
        elif again is None and outcome.fit is not None and outcome.fit.suits is False:
            again = NODES_RETRY_S
        return replace(outcome, strategy=strategy, free=free, again_after_s=again)

    def _fit(self, service: Object, spec: InferenceServiceSpec) -> Fit:
        """Whether the cluster can run this spec at all; old pods that it doesn't concern serve on."""
        out, used, metadata = self._out, self._out.autoscaler.memory_used(service), service["metadata"]
        tensor_rt = None
        if engines(spec):
            # A template that stays keeps its image, whatever this operator's own is (R7).
            live = _deployment(out.cache.children(metadata["namespace"], metadata["name"]), metadata["name"])
            tensor_rt = release_of(server_image(spec, out.images, live), spec.runtime.release).tensorrt
        around = Surroundings(
            nodes=out.accelerators.nodes() if spec.accelerator.devices else None,
            node_autoscaling=out.node_autoscaling,
            tensor_rt=tensor_rt,
            memory_used=measured_before(service, spec) if used is None else used,
        )
        return fit(spec, around)

    async def _strategy(self, spec: InferenceServiceSpec, live: Object | None) -> tuple[Strategy | None, int | None]:
        """Choose how to roll when a rollout is about to start; a running one keeps its numbers (R12)."""
        if live is None or keeps_template(spec, live):
            pending = live is not None and (live.get("status") or {}).get("unavailableReplicas", 0) > 0
            free = await self._out.accelerators.free(spec) if pending and spec.accelerator.count else None
            return None, free
        # The numbers stay for the whole rollout, so they are chosen on what is free at this moment.
        free = await self._out.accelerators.free(spec, fresh=True) if spec.accelerator.count else None
        return choose_strategy(spec, replicas=live["spec"].get("replicas", 1), free=free), free

    async def _apply_deployment(
        self, service: Object, spec: InferenceServiceSpec, child: Object, live: Object | None
    ) -> Object:
        """Apply with replicas only while nobody else owns them: leaving them out then would set 1 (R1)."""
        namespace, name = service["metadata"]["namespace"], service["metadata"]["name"]
        deployment_name = child["metadata"]["name"]
        body = {**child, "metadata": dict(child["metadata"]), "spec": dict(child["spec"])}
        if live is None:
            body["spec"]["replicas"] = self._out.autoscaler.initial_replicas(namespace, name, spec)
        elif not self._others_own_replicas(namespace, deployment_name):
            body["spec"]["replicas"] = live["spec"].get("replicas", 1)
            # A scaler may take over at this very moment; its value must not be reset by ours.
            body["metadata"]["resourceVersion"] = live["metadata"]["resourceVersion"]
        return await steps.put(self._out.kube, body, live)

    async def _claim_replicas(self, spec: InferenceServiceSpec, namespace: str, name: str) -> None:
        """Hand spec.replicas from the renderer to the autoscaler right after creation (R1)."""
        deployment_name = names.deployment(name)
        deployment = self._out.cache.get("Deployment", namespace, deployment_name)
        if deployment is None or spec.scaling.mode == "External":
            return
        owners = self._out.cache.replicas_owners(namespace, deployment_name)
        if names.WORKLOAD_MANAGER in owners and not self._others_own_replicas(namespace, deployment_name):
            await scale.claim(self._out.kube, deployment)

    def _others_own_replicas(self, namespace: str, deployment_name: str) -> bool:
        return bool(self._out.cache.replicas_owners(namespace, deployment_name).keys() - {names.WORKLOAD_MANAGER})

    async def _write_status(self, service: Object, outcome: _Outcome) -> float | None:
        """Make the status anew from what is known now, and write it if it differs; when to look at the pods again."""
        out, metadata = self._out, service["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        # Before the status is made, so that Ready and what the servers have loaded are one write.
        look = await out.models.look(service, outcome.spec, out.cache.children(namespace, name))
        seen = observe(out.cache.children(namespace, name), name, outcome.spec)
        status = self._status(service, outcome, seen, look)
        if status != service.get("status"):
            self._tell_transitions(service, status)
            await self._apply_status(service, status)
        fetched_again_after_s = await out.fetching.look(service, out.cache.children(namespace, name))
        return min((s for s in (look.again_after_s, fetched_again_after_s) if s is not None), default=None)

    def _status(self, service: Object, outcome: _Outcome, observation: Observation, look: Look | None = None) -> Object:
        metadata = service["metadata"]
        used = self._out.autoscaler.memory_used(service)
        measured = "memoryOf" in ((service.get("status") or {}).get("gpus") or {})
        inputs = StatusInputs(
            service=service,
            spec=outcome.spec,
            template_inputs=template_inputs(outcome.spec) if outcome.spec else None,
            observation=observation,
            scaling=self._out.autoscaler.record(metadata["namespace"], metadata["name"]),
            strategy=outcome.strategy,
            free_accelerators=outcome.free,
            fit=outcome.fit,
            memory_used=used,
            models_digest=models_digest(outcome.spec) if outcome.spec and (used is not None or measured) else None,
            look=look,
            error=outcome.error,
        )
        return build_status(inputs, self._out.now())

    async def _apply_status(self, service: Object, status: Object) -> Object:
        metadata = service["metadata"]
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.SERVICE_KIND,
            # The uid makes a write to a namesake that was made meanwhile fail instead of lie.
            "metadata": {key: metadata[key] for key in ("name", "namespace", "uid")},
            "status": status,
        }
        try:
            written = await self._out.kube.apply(body, manager=names.STATUS_MANAGER, subresource="status")
        except (NotFound, Conflict):
            return service  # deleted, or deleted and made again: the watch brings the truth
        self._out.cache.put(written)
        return written

    def _tell_transitions(self, service: Object, status: Object) -> None:
        """An Event for each condition that turned, so that `kubectl describe` reads as a story."""
        old = {c["type"]: c for c in (service.get("status") or {}).get("conditions") or []}
        for condition in status["conditions"]:
            before = old.get(condition["type"], {})
            if (before.get("status"), before.get("reason")) == (condition["status"], condition["reason"]):
                continue
            bad = condition["type"] != ConditionType.READY
            if condition["reason"] == Reason.STARTING:
                continue  # the Deployment's own events tell it, pod by pod
            if condition["type"] == ConditionType.READY or condition["status"] == "True":
                warn = condition["status"] == "True" if bad else condition["status"] == "False"
                quiet = condition["type"] == ConditionType.RECONCILING
                type_ = "Warning" if warn and not quiet else "Normal"
                self._out.recorder.record(service, condition["reason"], condition["message"], type_)


@dataclass(frozen=True)
class _Outcome:
    """What one pass found out; its status is made from this."""

    spec: InferenceServiceSpec | None = None
    strategy: Strategy | None = None
    free: int | None = None
    fit: Fit | None = None
    error: ReconcileError | None = None
    again_after_s: float | None = None


def _refuse(spec: InferenceServiceSpec, image: str, *, allowed: refusals.Allowed) -> None:
    """Stop before anything is changed: another setting or image may heal this without a new spec (R9)."""
    forbidden = refusals.by_settings(spec, allowed)
    if forbidden:
        raise Waiting(Reason.NOT_ALLOWED, "\n".join(forbidden))
    unsupported = refusals.by_release(spec, image)
    if unsupported:
        raise Waiting(Reason.UNSUPPORTED_RELEASE, "\n".join(unsupported))


def _hold_back(verdict: Fit | None, spec: InferenceServiceSpec, live: Object | None) -> None:
    """Make no pod that could never serve, and give up no serving pod for one: what runs stays as it is.

    A new service for which a node is missing gets its pods all the same: a cluster that grows needs to see them wait.
    """
    if verdict is None or verdict.suits is not False or keeps_template(spec, live):
        return
    if verdict.reason is Reason.ENGINE_MISMATCH and spec.runtime.image is not None:
        raise Stalled(verdict.reason, verdict.message)  # both versions stand in the spec itself (R9)
    if verdict.refuses or live is not None:
        raise Waiting(verdict.reason, verdict.message)


def _wanted_deployment(wanted: list[Object]) -> Object:
    return next(child for child in wanted if child["kind"] == "Deployment")


def _deployment(children: Mapping[str, list[Object]], service: str) -> Object | None:
    wanted = names.deployment(service)
    return next((item for item in children.get("Deployment", []) if item["metadata"]["name"] == wanted), None)
