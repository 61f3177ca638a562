"""The tick on a real cache, with an in-memory API server that knows resourceVersions and field owners."""

from __future__ import annotations

import datetime as dt
import json
from collections import Counter
from dataclasses import replace
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any

import pytest

from conch import names
from conch.api.conditions import Reason
from conch.api.parsed import ParsedSpecs
from conch.api.status import InferenceServiceStatus
from conch.config import Settings
from conch.kube.cache import Cache
from conch.kube.errors import Conflict, Forbidden, NotLeader
from conch.scaling import scale
from conch.scaling.accelerators import FreeAccelerators
from conch.scaling.controller import ScalingController, ScalingRecord
from conch.scaling.policy import Direction, QualityKind, Rail
from conch.scaling.scale import Outcome, write_scale
from conch.scaling.signals import Samples
from conch.triton.metrics import Labels, Query, promql
from conch.workload.deployment import template_inputs
from conch.workload.fit import models_digest
from makers import make_service, make_spec, stored

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from conch.kube.client import Resource

NS, NAME = "default", "vision"
DEPLOYMENT = names.deployment(NAME)
START = 1_800_000_000.0
Object = dict[str, Any]


def instant(at: float) -> str:
    return dt.datetime.fromtimestamp(at, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Cluster:
    """Deployments with resourceVersions and owners of replicas; a change reaches the cache unless it is held back."""

    def __init__(self) -> None:
        self.cache = Cache()
        self.live: dict[tuple[str, str], Object] = {}
        self.writes: list[tuple[str, int, bool]] = []
        self.reads = 0
        self.fail: Exception | None = None
        self.behind = False
        self._version = 100

    def put(self, deployment: Object) -> None:
        self._version += 1
        deployment = {**deployment, "metadata": {**deployment["metadata"], "resourceVersion": str(self._version)}}
        self.live[deployment["metadata"]["namespace"], deployment["metadata"]["name"]] = deployment
        if not self.behind:
            self.cache.put(deployment)

    def own(self, manager: str, replicas: int, name: str = DEPLOYMENT) -> None:
        """Another writer sets replicas."""
        self.put(_owned(self.live[NS, name], manager, replicas))

    async def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        assert resource.kind == "Deployment"
        self.reads += 1
        return self.live.get((namespace, name))

    async def apply(self, body: Object, *, manager: str, force: bool = True, subresource: str | None = None) -> Object:
        assert (body["kind"], subresource, manager) == ("Scale", "scale", names.SCALING_MANAGER)
        if self.fail is not None:
            raise self.fail
        metadata, count = body["metadata"], body["spec"]["replicas"]
        live = self.live[metadata["namespace"], metadata["name"]]
        if metadata["resourceVersion"] != live["metadata"]["resourceVersion"]:
            raise Conflict(409, "Conflict", "the object has been modified")
        owners = [field["manager"] for field in live["metadata"]["managedFields"]]
        same = count == live["spec"]["replicas"]
        if not same and set(owners) - {manager} and not force:
            raise Conflict(409, "Conflict", f"conflict with {owners}")
        # As the real API server does: a value that is left as it was leaves its owners, too.
        self.put(_owned(live, manager, count, also=[owner for owner in owners if same and owner != manager]))
        self.writes.append((metadata["name"], count, force))
        return {**body, "spec": {"replicas": count}}


def _owned(deployment: Object, manager: str, replicas: int, also: Sequence[str] = ()) -> Object:
    fields = [
        {"manager": owner, "operation": "Update", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
        for owner in (manager, *also)
    ]
    return {
        **deployment,
        "metadata": {**deployment["metadata"], "managedFields": fields},
        "spec": {**deployment["spec"], "replicas": replicas},
    }


class Metrics:
    """Samples as a test sets them; `count` reads."""

    def __init__(self) -> None:
        self.samples = Samples()
        self.promql = promql(Labels(), 30, 30)
        self.count = 0

    async def read(self) -> Samples:
        self.count += 1
        return self.samples


class Accelerators:
    def __init__(self) -> None:
        self.count: int | None = None
        self.asked = 0

    async def free(self, spec: Any) -> int | None:
        del spec
        self.asked += 1
        return self.count


class World:
    """Services, their pods and one controller on a clock that a test moves."""

    def __init__(self, **settings: Any) -> None:
        self.now = START
        self._versions = count()
        self.cluster = Cluster()
        self.cache = self.cluster.cache
        self.metrics = Metrics()
        self.accelerators = Accelerators()
        self.events: list[tuple[str, str, str]] = []
        self.enqueued: Counter[tuple[str, str]] = Counter()
        self.settings = Settings(**settings)
        self.controller = self.restarted()

    def restarted(self) -> ScalingController:
        self.controller = ScalingController(
            self.settings,
            self.cache,
            self.cluster,
            recorder=self,
            signals=self.metrics,
            accelerators=self.accelerators,
            parsed=ParsedSpecs(),
            enqueue=lambda namespace, name: self.enqueued.update([(namespace, name)]),
            clock=lambda: self.now,
        )
        self.controller.start()
        return self.controller

    def memory_used(self) -> int | None:
        service = self.cache.get(names.SERVICE_KIND, NS, NAME)
        assert service is not None
        return self.controller.memory_used(service)

    def record(self, obj: Object, reason: str, message: str, type_: str = "Normal") -> None:
        self.events.append((obj["metadata"]["name"], reason, message))
        assert type_ in {"Normal", "Warning"}

    def service(
        self, fields: dict[str, Any] | None = None, *, name: str = NAME, generation: int = 1, **more: Any
    ) -> None:
        defaults = {"accelerator.count": 0, "scaling.maxReplicas": 10}
        service = stored(make_service({**defaults, **(fields or {})}, name=name), uid=name, generation=generation)
        service["metadata"].update(more.pop("metadata", {}))
        service["metadata"]["resourceVersion"] = f"s{next(self._versions)}"
        self.cache.put({**service, **more})

    def deployment(self, replicas: int, *, name: str = NAME, manager: str = names.SCALING_MANAGER) -> None:
        deployment = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {
                "name": names.deployment(name), "namespace": NS, "uid": f"d-{name}", "labels": names.child_labels(name),
            },
            "spec": {"replicas": replicas},
            "status": {"replicas": replicas, "updatedReplicas": replicas},
        }  # fmt: skip
        self.cluster.put(_owned(deployment, manager, replicas))

    def pods(self, ready: int, *, name: str = NAME, starting: int = 0, pending: int = 0) -> None:
        old = instant(START - 3600)
        for pod in self.cache.children(NS, name).get("Pod", []):
            self.cache.remove(pod)
        states = ["ready"] * ready + ["starting"] * starting + ["pending"] * pending
        for number, state in enumerate(states):
            placed = {"type": "PodScheduled", "status": str(state != "pending"), "lastTransitionTime": old}
            conditions = [
                {"type": "Ready", "status": str(state == "ready"), "lastTransitionTime": old},
                {**placed, "lastTransitionTime": instant(self.now)} if state == "starting" else placed,
            ]
            self.cache.put(
                {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {
                        "name": f"{name}-{number}", "namespace": NS, "uid": f"{name}-{number}-{state}-{self.now}",
                        "labels": names.child_labels(name), "creationTimestamp": old, "resourceVersion": state,
                    },
                    "spec": {} if state == "pending" else {"nodeName": "n1"},
                    "status": {"phase": "Running", "conditions": conditions},
                }
            )  # fmt: skip

    def measure(self, waiting: float, rate: float = 1.0, *, pods: int = 1, name: str = NAME) -> None:
        keys = [(NS, f"{name}-{number}") for number in range(pods)]
        self.metrics.samples = Samples(
            waiting={key: {"m": waiting / pods} for key in keys},
            successes={key: {"m": rate / pods} for key in keys},
            in_system={key: {"m": (waiting + rate / 100) / pods} for key in keys},
            busy={key: {"m": rate / 100 / pods} for key in keys},
            last_seen=dict.fromkeys(keys, self.now),
        )

    async def ticks(self, count: int = 1) -> None:
        for _ in range(count):
            await self.controller.tick()
            self.now += 5

    @property
    def replicas(self) -> int:
        count: int = self.cluster.live[NS, DEPLOYMENT]["spec"]["replicas"]
        return count

    @property
    def told(self) -> ScalingRecord:
        record = self.controller.record(NS, NAME)
        assert record is not None
        return record


def serving(count: int, fields: dict[str, Any] | None = None, **settings: Any) -> World:
    world = World(**settings)
    world.service(fields)
    world.deployment(count)
    world.pods(count)
    world.measure(0, pods=count)
    return world


async def test_a_queue_becomes_replicas_an_event_and_a_status() -> None:
    world = serving(2)
    world.measure(31, pods=2)
    await world.ticks()
    assert world.cluster.writes == [(DEPLOYMENT, 4, True)]
    assert world.events == [
        (NAME, "ScaledUp", "from 2 to 4: queue depth: 31 requests wait where 2 replicas may hold 16")
    ]
    status = world.told.to_status()
    assert (status["decision"], status["replicas"], status["term"], status["waiting"]) == ("Up", 4, "queueDepth", 31)
    assert status["lastScaleUp"] == instant(START)
    assert world.enqueued[NS, NAME] == 1


async def test_what_status_says_fits_the_resource() -> None:
    world = serving(2)
    world.measure(31, pods=2)
    await world.ticks()
    InferenceServiceStatus.model_validate({"scaling": world.told.to_status()})


async def test_row_20_nothing_is_told_until_the_effect_is_read_back() -> None:
    world = serving(2)
    world.measure(31, pods=2)
    world.cluster.fail = Conflict(409, "Conflict", "someone was faster")
    await world.ticks()
    assert world.controller.record(NS, NAME) is None
    assert world.events == []
    world.cluster.fail = None
    await world.ticks()
    assert world.told.decision is Direction.UP


async def test_a_write_that_is_forbidden_is_said_in_the_condition() -> None:
    world = serving(2)
    world.measure(31, pods=2)
    world.cluster.fail = Forbidden(403, "Forbidden", "no scale for you")
    await world.ticks()
    assert world.told.scaling_limited.reason is Reason.API_ERROR
    assert "no scale for you" in world.told.scaling_limited.message
    assert world.told.last_scale_up is None


async def test_a_lost_lease_stops_the_tick() -> None:
    world = serving(2)
    world.measure(31, pods=2)
    world.cluster.fail = NotLeader("apply")
    with pytest.raises(NotLeader):
        await world.ticks()
    await world.ticks()
    assert world.metrics.count == 1


async def test_r11_a_steady_state_enqueues_nothing_and_writes_nothing() -> None:
    world = serving(1)
    await world.ticks(3)
    before = world.enqueued.total()
    await world.ticks(200)
    assert (world.enqueued.total() - before, world.cluster.writes, world.cluster.reads) == (0, [], 0)


async def test_r11_noise_in_the_queue_is_told_at_most_every_fifteen_seconds() -> None:
    world = serving(1, {"scaling.maxReplicas": 1})
    for tick in range(60):
        world.measure(100 + 13 * (tick % 7), pods=1)
        await world.ticks()
    assert world.enqueued.total() <= 1 + 300 / 15


async def test_r11_a_scrape_that_was_lost_once_shows_nowhere() -> None:
    world = serving(1)
    await world.ticks(3)
    before = world.enqueued.total()
    world.metrics.samples = Samples(last_seen={(NS, "vision-0"): world.now})
    await world.ticks()
    world.measure(0, pods=1)
    await world.ticks(3)
    assert world.enqueued.total() == before


async def test_row_3_a_lasting_gap_names_the_query_and_the_last_samples_age() -> None:
    world = serving(1)
    await world.ticks()
    seen = world.now
    for _ in range(20):
        world.metrics.samples = Samples(last_seen={(NS, "vision-0"): seen})
        await world.ticks()
    stale = world.told.metrics_stale
    assert (stale.status, stale.reason, world.told.quality) == (True, Reason.METRICS_MISSING, QualityKind.MISSING)
    assert world.metrics.promql[Query.WAITING] in stale.message
    assert "more than a minute old" in stale.message


async def test_a_refused_prometheus_is_said_at_once_and_reduces_nothing() -> None:
    world = serving(5)
    await world.ticks(59)
    refused = "Prometheus can't be reached"
    world.metrics.samples = Samples(errors=dict.fromkeys(Query, refused))
    await world.ticks()
    assert refused in world.told.metrics_stale.message
    await world.ticks(500)
    assert world.replicas == 5


async def test_row_40_only_the_scale_subresource_is_ever_written() -> None:
    world = serving(5)
    world.measure(500, pods=5)
    await world.ticks(30)
    assert world.cluster.writes  # the in-memory API server refuses any other write


async def test_row_13_load_that_goes_takes_the_replicas_with_it_step_by_step() -> None:
    world = serving(4)
    seen = [4]
    for _ in range(150):
        world.pods(world.replicas)
        world.measure(0, pods=world.replicas)
        await world.ticks()
        seen.append(world.replicas)
    assert (seen[59], seen[-1]) == (4, 1)
    assert {before - after for before, after in pairwise(seen)} == {0, 1}


async def test_row_24_a_restart_forgets_nothing_that_matters_and_reduces_nothing_early() -> None:
    world = serving(4)
    world.service(status={"scaling": {"lastScaleUp": instant(START - 100), "replicas": 4}})
    await world.ticks(40)
    world.restarted()
    assert world.controller.record(NS, NAME) is None
    await world.ticks(59)
    assert world.replicas == 4
    await world.ticks(60)
    assert world.replicas == 1
    assert world.told.last_scale_up == instant(START - 100)


async def test_rail_a_users_new_minimum_acts_at_once_after_a_restart() -> None:
    world = serving(1)
    world.metrics.samples = Samples()
    world.service({"scaling.minReplicas": 3}, generation=2)
    await world.ticks()
    assert world.replicas == 3


async def test_row_17_the_minimum_holds_without_prometheus() -> None:
    world = serving(1, {"scaling.minReplicas": 2})
    world.metrics.samples = Samples(configured=False)
    await world.ticks()
    assert world.replicas == 2
    assert world.told.metrics_stale.reason is Reason.NOT_CONFIGURED


async def test_paused_writes_nothing_and_says_so() -> None:
    world = serving(1, {"paused": True, "scaling.minReplicas": 3})
    await world.ticks(3)
    assert (world.cluster.writes, world.replicas) == ([], 1)
    assert world.told.scaling_limited.reason is Reason.PAUSED


@pytest.mark.parametrize("mode", ["Advisory", "External"])
async def test_rail_advisory_and_external_never_write(mode: str) -> None:
    world = serving(2, {"scaling.mode": mode})
    world.measure(90, pods=2)
    await world.ticks(20)
    assert (world.cluster.writes, world.cluster.reads, world.events) == ([], 0, [])
    assert world.told.decision is (Direction.UP if mode == "Advisory" else Direction.HOLD)


async def test_r4_a_service_that_is_being_deleted_is_left_alone() -> None:
    world = serving(2)
    world.service(metadata={"deletionTimestamp": instant(START), "generation": 2})
    world.measure(90, pods=2)
    await world.ticks()
    assert world.cluster.writes == []


async def test_an_invalid_spec_changes_nothing_and_hurts_no_other_service() -> None:
    world = serving(2)
    world.service({"scaling.minReplicas": 9, "scaling.maxReplicas": 3}, name="broken")
    world.deployment(1, name="broken")
    world.measure(31, pods=2)
    await world.ticks()
    assert [write[0] for write in world.cluster.writes] == [DEPLOYMENT]


async def test_row_33_services_share_no_state() -> None:
    world = serving(2)
    world.service(name="other")
    world.deployment(2, name="other")
    world.pods(2, name="other")
    world.measure(31, pods=2)
    await world.ticks()
    assert world.cluster.writes == [(DEPLOYMENT, 4, True)]


@pytest.mark.parametrize("kind", ["HorizontalPodAutoscaler", "ScaledObject"])
async def test_r1_and_row_39_an_autoscaler_that_targets_us_is_named_and_not_fought(kind: str) -> None:
    world = serving(2)
    target = {"kind": "Deployment", "name": DEPLOYMENT} if kind == "HorizontalPodAutoscaler" else {"name": DEPLOYMENT}
    scaler = {
        "kind": kind,
        "metadata": {"name": "theirs", "namespace": NS, "uid": "h", "resourceVersion": "1"},
        "spec": {"scaleTargetRef": target},
    }
    world.cache.put(scaler)
    world.measure(90, pods=2)
    await world.ticks(5)
    assert world.cluster.writes == []
    limited = world.told.scaling_limited
    assert (limited.status, limited.reason) == (True, Reason.SECOND_SCALER)
    assert f"{kind} theirs" in limited.message
    world.cache.remove(scaler)
    await world.ticks()
    assert world.cluster.writes == [(DEPLOYMENT, 6, True)]


async def test_r1_a_persons_scale_holds_and_is_then_taken_back_with_an_event() -> None:
    world = serving(2)
    await world.ticks()
    world.cluster.own("kubectl", 6)
    world.pods(6)
    world.measure(0, pods=6)
    await world.ticks(60)
    assert (world.replicas, world.cluster.writes) == (6, [])
    assert world.told.scaling_limited.reason is Reason.PERSON_SCALED
    await world.ticks(2)
    assert world.cluster.writes[0][2], "the claim is forced"
    assert [reason for _, reason, _ in world.events][:2] == ["ReplicasSetByHand", "ReplicasTakenBack"]
    assert names.SCALING_MANAGER in world.cache.replicas_owners(NS, DEPLOYMENT)


async def test_r1_a_person_who_is_faster_than_our_cache_is_not_overruled() -> None:
    world = serving(2)
    world.cluster.behind = True
    world.cluster.own("kubectl", 3)
    written = await write_scale(world.cluster, NS, DEPLOYMENT, 5, decided_on=2)
    assert (written.outcome, world.replicas) == (Outcome.DROPPED, 3)


async def test_r1_after_an_unchanged_value_was_taken_back_the_next_step_is_not_refused() -> None:
    world = serving(2)
    world.cluster.own("kubectl", 6)
    taken = await write_scale(world.cluster, NS, DEPLOYMENT, 6, decided_on=6, take_back=True)
    assert taken.outcome is Outcome.WRITTEN
    assert world.cache.replicas_owners(NS, DEPLOYMENT).keys() == {names.SCALING_MANAGER, "kubectl"}
    lowered = await write_scale(world.cluster, NS, DEPLOYMENT, 5, decided_on=6)
    assert (lowered.outcome, world.replicas) == (Outcome.WRITTEN, 5)
    assert world.cache.replicas_owners(NS, DEPLOYMENT).keys() == {names.SCALING_MANAGER}


async def test_r1_a_deployment_that_was_just_made_is_claimed_at_its_live_value() -> None:
    world = serving(2)
    world.deployment(3, manager=names.WORKLOAD_MANAGER)
    claimed = await scale.claim(world.cluster, world.cluster.live[NS, DEPLOYMENT])
    assert (claimed.outcome, claimed.replicas) == (Outcome.WRITTEN, 3)
    assert world.cluster.writes == [(DEPLOYMENT, 3, True)]


async def test_r1_a_deployment_that_changed_since_it_was_read_is_not_claimed() -> None:
    world = serving(2)
    seen = world.cluster.live[NS, DEPLOYMENT]
    world.cluster.own("kubectl", 3)
    assert (await scale.claim(world.cluster, seen)).outcome is Outcome.DROPPED
    assert world.replicas == 3


async def test_r1_a_new_deployment_starts_with_what_was_last_decided_within_the_bounds() -> None:
    world = World()
    world.service(status={"scaling": {"replicas": 4}})
    spec = make_spec({"scaling.minReplicas": 2, "scaling.maxReplicas": 5})
    assert world.controller.initial_replicas(NS, NAME, spec) == 4
    assert world.controller.initial_replicas(NS, "unknown", spec) == 2
    assert world.controller.initial_replicas(NS, NAME, make_spec({"scaling.maxReplicas": 3})) == 3


async def test_our_own_step_is_not_repeated_while_the_cache_is_behind() -> None:
    world = serving(2)
    world.measure(31, pods=2)
    world.cluster.behind = True
    await world.ticks(4)
    assert world.cluster.writes == [(DEPLOYMENT, 4, True)]


# --- R2: fenced writes


@pytest.mark.parametrize(
    ("live", "decided_on", "replicas", "outcome", "after"),
    [
        (3, 3, 5, Outcome.WRITTEN, 5),
        (7, 3, 5, Outcome.DROPPED, 7),
        (4, 3, 5, Outcome.WRITTEN, 5),
        (5, 5, 4, Outcome.WRITTEN, 4),
        (3, 5, 4, Outcome.DROPPED, 3),
        (6, 5, 4, Outcome.DROPPED, 6),
        (5, 3, 5, Outcome.UNCHANGED, 5),
    ],
)
async def test_r2_a_decision_on_a_stale_value_never_cuts(
    live: int, decided_on: int, replicas: int, outcome: Outcome, after: int
) -> None:
    world = serving(live)
    written = await write_scale(world.cluster, NS, DEPLOYMENT, replicas, decided_on=decided_on)
    assert (written.outcome, world.replicas) == (outcome, after)


async def test_r2_a_conflict_drops_the_decision_and_is_not_retried() -> None:
    world = serving(3)
    world.cluster.fail = Conflict(409, "Conflict", "modified")
    written = await write_scale(world.cluster, NS, DEPLOYMENT, 5, decided_on=3)
    assert (written.outcome, world.cluster.reads, world.replicas) == (Outcome.DROPPED, 1, 3)


async def test_r2_a_namesake_and_a_deleted_deployment_are_not_written() -> None:
    world = serving(3)
    namesake = await write_scale(world.cluster, NS, DEPLOYMENT, 5, decided_on=3, uid="another")
    live = world.cluster.live[NS, DEPLOYMENT]
    world.cluster.put({**live, "metadata": {**live["metadata"], "deletionTimestamp": instant(START)}})
    deleted = await write_scale(world.cluster, NS, DEPLOYMENT, 5, decided_on=3)
    assert {namesake.outcome, deleted.outcome} == {Outcome.DROPPED}
    assert (await scale.claim(world.cluster, world.cluster.live[NS, DEPLOYMENT])).outcome is Outcome.DROPPED
    assert world.cluster.writes == []


# --- accelerators


async def test_rail_free_accelerators_are_asked_for_only_when_more_are_wanted() -> None:
    world = serving(2, {"accelerator.count": 1, "scaling.gpuMemory.max": 100})
    await world.ticks(10)
    assert world.accelerators.asked == 0
    world.accelerators.count = 1
    world.measure(90, pods=2)
    await world.ticks()
    assert (world.accelerators.asked, world.replicas) == (1, 4)
    assert world.told.rail is Rail.FREE_ACCELERATORS


async def test_rail_pending_pods_are_explained_and_not_ordered_again() -> None:
    world = serving(3, {"accelerator.count": 1, "scaling.gpuMemory.max": 100})
    world.pods(2, pending=1)
    world.accelerators.count = 0
    world.measure(90, pods=2)
    await world.ticks(20)
    assert world.replicas == 3
    assert world.told.scaling_limited.reason is Reason.NO_FREE_ACCELERATOR


def gpu_node(**labels: str) -> Object:
    metadata = {"name": "n1", "uid": f"n1-{labels}", "labels": labels, "resourceVersion": str(len(str(labels)))}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata}


def made_for(world: World, fields: dict[str, Any]) -> None:
    """All pods run the template of this spec."""
    live = world.cluster.live[NS, DEPLOYMENT]
    inputs = template_inputs(make_spec({"scaling.maxReplicas": 10, **fields}))
    world.cluster.put(
        {**live, "metadata": {**live["metadata"], "annotations": {names.TEMPLATE_INPUTS_ANNOTATION: inputs}}}
    )


def terms_of(world: World) -> dict[str, str]:
    return {term["name"]: term["detail"] for term in world.told.to_status()["terms"]}


@pytest.mark.parametrize(
    ("resource", "label", "shared"),
    [
        ("nvidia.com/gpu", "none", False),
        ("nvidia.com/gpu", "time-slicing", True),
        ("nvidia.com/gpu", "mps", True),
        ("nvidia.com/gpu.shared", "time-slicing", True),
    ],
)
async def test_row_9_on_a_shared_accelerator_the_memory_term_is_not_used_and_status_says_so(
    resource: str, label: str, *, shared: bool
) -> None:
    world = serving(2, {"accelerator": {"resource": resource, "count": 1}})
    made_for(world, {"accelerator": {"resource": resource, "count": 1}})
    world.cache.put(gpu_node(**{"nvidia.com/gpu.sharing-strategy": label}))
    keys = [(NS, f"{NAME}-{number}") for number in range(2)]
    # A stranger on the same device fills it; a metric of the device can't tell.
    full = replace(
        world.metrics.samples, memory=dict.fromkeys(keys, 0.97), memory_used=dict.fromkeys(keys, 20 * 2.0**30)
    )
    world.metrics.samples = full
    await world.ticks(3)
    assert ("others share the accelerator" in terms_of(world)["gpuMemory"]) is shared
    assert world.memory_used() == (None if shared else 20 * 2**30)
    # Where it isn't used, not to know it is no reason to hold.
    blind = serving(2, {"accelerator": {"resource": resource, "count": 1}})
    blind.cache.put(gpu_node(**{"nvidia.com/gpu.sharing-strategy": label}))
    await blind.ticks(200)
    assert (blind.replicas == 1) is shared


async def test_what_replicas_use_of_an_accelerator_is_learned_and_rarely_told() -> None:
    world = serving(2, {"accelerator.count": 1})
    keys = [(NS, f"{NAME}-{number}") for number in range(2)]

    def use(gib: float) -> None:
        used = dict(zip(keys, (gib * 2**30, 2.0**30), strict=True))
        world.metrics.samples = replace(world.metrics.samples, memory_used=used)

    use(10)
    await world.ticks(2)
    assert world.memory_used() is None, "pods of another template say nothing of these models"
    made_for(world, {"accelerator.count": 1})
    told = world.enqueued[NS, NAME]
    await world.ticks(2)
    assert world.memory_used() == 10 * 2**30
    for gib in (10.5, 9, 12):
        use(gib)
        await world.ticks(2)
    assert world.memory_used() == 10 * 2**30
    assert world.enqueued[NS, NAME] <= told + 2
    world.now += 600
    await world.ticks()
    assert world.memory_used() == 12 * 2**30


async def test_what_was_measured_outlives_a_restart_and_ends_with_other_models() -> None:
    world = serving(2, {"accelerator.count": 1})
    spec = make_spec({"accelerator.count": 1, "scaling.maxReplicas": 10})
    measured: dict[str, Any] = {"status": {"gpus": {"memoryUsed": "1024Mi", "memoryOf": models_digest(spec)}}}
    world.service({"accelerator.count": 1}, **measured)
    await world.ticks()
    assert world.memory_used() == 2**30
    world.service({"accelerator.count": 1, "models[0].instances.count": 2}, generation=2, **measured)
    # The reconcile comes before the next tick; told now, the figure would be kept as that of the new models.
    assert world.memory_used() is None
    await world.ticks()
    assert world.memory_used() is None


async def test_pods_that_a_new_template_has_not_replaced_yet_are_not_measured_for_it() -> None:
    world = serving(1, {"accelerator.count": 1})
    made_for(world, {"accelerator.count": 1})
    live = world.cluster.live[NS, DEPLOYMENT]
    # The template was applied, the deployment controller has not looked at it: all pods count as updated.
    seen = {**live["status"], "observedGeneration": 1}
    world.cluster.put({**live, "metadata": {**live["metadata"], "generation": 2}, "status": seen})
    world.metrics.samples = replace(world.metrics.samples, memory_used={(NS, f"{NAME}-0"): 2.0**30})
    await world.ticks(2)
    assert world.memory_used() is None
    live = world.cluster.live[NS, DEPLOYMENT]
    world.cluster.put({**live, "status": {**live["status"], "observedGeneration": 2}})
    await world.ticks(2)
    assert world.memory_used() == 2**30


class Pods:
    def __init__(self) -> None:
        self.lists = 0

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
        kept: Callable[[Object], Object | None] | None = None,
    ) -> tuple[list[Object], str]:
        assert (resource.kind, namespace, label_selector) == ("Pod", None, None)
        assert field_selector is not None
        assert kept is not None
        self.lists += 1
        sidecar = {"name": "s", "restartPolicy": "Always", "resources": {"requests": {"nvidia.com/gpu": "1"}}}
        found = [self.pod("theirs", sidecar), self.pod("cpu", {"name": "c", "resources": {"limits": {"cpu": "1"}}})]
        slim = [pod for pod in map(kept, found) if pod is not None]
        assert [pod["metadata"]["uid"] for pod in slim] == ["theirs"]
        assert "env" not in json.dumps(slim)
        return slim, "1"

    def pod(self, uid: str, container: Object) -> Object:
        spec = {"nodeName": "n1", "initContainers": [{**container, "env": []}], "containers": [{"name": "main"}]}
        metadata = {"uid": uid, "name": uid, "managedFields": []}
        return {"kind": "Pod", "metadata": metadata, "spec": spec, "status": {"phase": "Running"}}


async def test_free_accelerators_count_everybodys_pods_and_list_them_at_most_every_ten_seconds() -> None:
    cache, pods, now = Cache(), Pods(), [0.0]
    cache.put(
        {
            "kind": "Node",
            "metadata": {"name": "n1", "uid": "n1", "resourceVersion": "1"},
            "status": {
                "allocatable": {"nvidia.com/gpu": "4"},
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        }
    )
    accelerators = FreeAccelerators(pods, cache, Settings(), clock=lambda: now[0])
    assert [await accelerators.free(make_spec()) for _ in range(3)] == [3, 3, 3]
    now[0] = 10.0
    await accelerators.free(make_spec())
    assert pods.lists == 2
    now[0] = 11.0
    await accelerators.free(make_spec(), fresh=True)
    assert pods.lists == 3
    namespaced = FreeAccelerators(pods, cache, Settings(watch_namespaces=("a",)))
    assert await namespaced.free(make_spec()) is None


async def test_a_record_leaves_out_what_is_not_known() -> None:
    world = serving(1)
    world.metrics.samples = Samples(configured=False)
    await world.ticks()
    status = world.told.to_status()
    assert "waiting" not in status
    assert "lastScaleUp" not in status
    assert replace(world.told, rail=Rail.NONE).to_status().get("rail") is None
