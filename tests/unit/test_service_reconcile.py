"""One reconcile from key to status, against a store with the API server's rules for field owners."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from child_makers import make_live, make_pod
from conch import names
from conch.api.inferenceservice import parse_service
from conch.api.parsed import ParsedSpecs
from conch.kube.cache import Cache
from conch.kube.client import POD_MONITORS
from conch.kube.errors import Conflict, Invalid
from conch.reconcile.fetching import FetchTeller
from conch.reconcile.reading import FIRST_RETRY_S, ModelReader
from conch.reconcile.service import Collaborators, Key, ServiceReconciler
from conch.storage.plan import Plan
from conch.triton.modelconfig import model_config
from conch.triton.refusals import Allowed
from fake_server import FakeServer, make_loaded
from kstatus import compute
from makers import IMAGES, make_service, stored

if TYPE_CHECKING:
    from conch.api.inferenceservice import InferenceServiceSpec
    from conch.kube.client import Resource
    from conch.workload.deployment import Images

Object = dict[str, Any]
KEY = Key("default", "vision")
NOW = "2026-11-30T10:00:00Z"
DEPLOYMENT = ("Deployment", "vision-server")


class FakeApi:
    """Stores what is applied; of ownership it knows one field, spec.replicas of the Deployment."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.objects: dict[tuple[str, str], Object] = {}
        self.writes: list[str] = []
        self.applied: list[Object] = []
        self.refuses: dict[str, Exception] = {}
        self._version = 100

    async def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        assert namespace == "default"
        return copy.deepcopy(self.objects.get((resource.kind, name)))

    async def apply(self, body: Object, *, manager: str, force: bool = True, subresource: str | None = None) -> Object:
        kind, name = body["kind"], body["metadata"]["name"]
        self.writes.append(f"{manager} {kind} {name}")
        self.applied.append(copy.deepcopy(body))
        if kind in self.refuses:
            raise self.refuses[kind]
        if kind == "Scale":
            return self._scale(body, manager)
        known = self.objects.get((kind, name))
        asked = body["metadata"].get("resourceVersion")
        if asked and (known is None or known["metadata"]["resourceVersion"] != asked):
            raise Conflict(409)
        if subresource == "status":
            assert known is not None
            return self._store({**known, "status": copy.deepcopy(body["status"])})
        fresh = make_live(body)
        if known is not None:
            fresh["metadata"]["uid"] = known["metadata"]["uid"]
            changed = known["spec"] != fresh["spec"] if "spec" in fresh else False
            fresh["metadata"]["generation"] = known["metadata"]["generation"] + changed
            fresh["status"] = known.get("status", {})
        if kind == "Deployment":
            self._own_replicas(fresh, known, manager, force=force)
        return self._store(fresh)

    def _own_replicas(self, fresh: Object, known: Object | None, manager: str, *, force: bool) -> None:
        owners = set(owners_of(known)) if known else set()
        if "replicas" in fresh["spec"]:
            if known and known["spec"]["replicas"] != fresh["spec"]["replicas"]:
                if not force and owners - {manager}:
                    raise Conflict(409)
                owners = set()
            owners |= {manager}
        else:
            owners -= {manager}
            # A field that its last owner gives up falls back to the default.
            fresh["spec"]["replicas"] = known["spec"]["replicas"] if known and owners else 1
        fresh["metadata"]["managedFields"] = [owns_replicas(owner) for owner in sorted(owners)]

    def _scale(self, body: Object, manager: str) -> Object:
        known = self.objects[DEPLOYMENT]
        if body["metadata"]["resourceVersion"] != known["metadata"]["resourceVersion"]:
            raise Conflict(409)
        changed = copy.deepcopy(known)
        same = known["spec"]["replicas"] == body["spec"]["replicas"]
        owners = ({*owners_of(known)} if same else set()) | {manager}
        changed["spec"]["replicas"] = body["spec"]["replicas"]
        changed["metadata"]["managedFields"] = [owns_replicas(owner) for owner in sorted(owners)]
        self._store(changed)
        return body

    async def delete(
        self, resource: Resource, namespace: str, name: str, *, uid: str, resource_version: str | None
    ) -> bool:
        known = self.objects[resource.kind, name]
        assert (known["metadata"]["uid"], known["metadata"]["resourceVersion"]) == (uid, resource_version)
        assert namespace == "default"
        self.writes.append(f"delete {resource.kind} {name}")
        del self.objects[resource.kind, name]
        return True

    def _store(self, obj: Object) -> Object:
        self._version += 1
        obj["metadata"]["resourceVersion"] = str(self._version)
        self.objects[obj["kind"], obj["metadata"]["name"]] = obj
        return copy.deepcopy(obj)

    def user_writes(self, obj: Object) -> None:
        """Somebody writes; the watch tells it at once."""
        self._store(copy.deepcopy(obj))
        self.watch()

    def watch(self) -> None:
        """Bring the cache up to date, as events would."""
        for obj in self.objects.values():
            self.cache.put(copy.deepcopy(obj))


def owns_replicas(manager: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"f:spec": {"f:replicas": {}}}
    return {"manager": manager, "operation": "Apply", "fieldsV1": fields}


def owners_of(deployment: Object) -> list[str]:
    return [entry["manager"] for entry in deployment["metadata"].get("managedFields", [])]


@dataclass
class FakeOutside:
    """The autoscaler, the accelerators and the recorder."""

    first: int = 1
    free_now: int | None = None
    nodes_now: list[Object] | None = None
    used_now: int | None = None
    events: list[str] = field(default_factory=list)

    def record(self, *args: Any, **_: Any) -> None:
        # The autoscaler's `record` has no decision yet; the recorder's has four words.
        if len(args) > 2:
            self.events.append(args[1])

    def initial_replicas(self, namespace: str, name: str, spec: InferenceServiceSpec) -> int:
        assert (namespace, name) == KEY
        return max(self.first, spec.scaling.min_replicas)

    async def free(self, spec: InferenceServiceSpec, *, fresh: bool = False) -> int | None:  # noqa: ARG002
        assert spec.accelerator.count
        return self.free_now

    def nodes(self) -> list[Object] | None:
        return self.nodes_now

    def memory_used(self, service: Object) -> int | None:
        assert (service["metadata"]["namespace"], service["metadata"]["name"]) == KEY
        return self.used_now


class World:
    """A reconciler with all that is around it."""

    def __init__(self, service: Object | None = None, *, images: Images = IMAGES) -> None:
        self.cache = Cache()
        self.api = FakeApi(self.cache)
        self.outside = FakeOutside()
        self.server = FakeServer()
        self.reconciler = self.operator(images)
        if service is not None:
            self.api.user_writes(service)

    def operator(
        self, images: Images = IMAGES, *, monitors: bool = False, claims: bool = False, autoscaling: bool = False
    ) -> ServiceReconciler:
        """A new process of the operator over the same cluster."""
        collaborators: Any = Collaborators(
            kube=self.api,  # type: ignore[arg-type]
            cache=self.cache,
            parsed=ParsedSpecs(),
            autoscaler=self.outside,
            accelerators=self.outside,
            models=ModelReader(self.server, clock=lambda: 0.0),
            fetching=FetchTeller(self.api, self.outside, now=lambda: 0.0),  # type: ignore[arg-type]
            recorder=self.outside,
            images=images,
            prometheus_namespace="monitoring",
            serves=lambda resource: monitors if resource is POD_MONITORS else claims,
            node_autoscaling=autoscaling,
            clock=lambda: 0.0,
            now=lambda: NOW,
        )
        return ServiceReconciler(collaborators)

    async def run(self) -> list[str]:
        """One reconcile, and another where it asks for it at once; what they wrote."""
        before = len(self.api.writes)
        while await self.reconciler.reconcile(KEY) == 0:
            self.api.watch()
        self.api.watch()
        return self.api.writes[before:]

    @property
    def deployment(self) -> Object:
        return self.api.objects[DEPLOYMENT]

    @property
    def service(self) -> Object:
        return self.api.objects["InferenceService", "vision"]

    def pods_become_ready(self) -> None:
        count = self.deployment["spec"]["replicas"]
        status = {"replicas": count, "updatedReplicas": count, "readyReplicas": count}
        seen = {"observedGeneration": self.deployment["metadata"]["generation"]}
        self.api.user_writes({**self.deployment, "status": {**status, **seen}})

    def scale(self, replicas: int, manager: str = names.SCALING_MANAGER) -> None:
        spec = {**self.deployment["spec"], "replicas": replicas}
        metadata = {**self.deployment["metadata"], "managedFields": [owns_replicas(manager)]}
        self.api.user_writes({**self.deployment, "spec": spec, "metadata": metadata})

    def change(self, fields: dict[str, Any], generation: int) -> None:
        changed = stored(make_service(fields), generation=generation)
        self.api.user_writes({**changed, "status": self.service.get("status", {})})


def user_service(fields: dict[str, Any] | None = None) -> Object:
    return stored(make_service(fields))


async def settled(fields: dict[str, Any] | None = None) -> World:
    world = World(user_service(fields))
    await world.run()
    world.pods_become_ready()
    await world.run()
    return world


# --- from creation to rest


async def test_a_new_service_becomes_its_children_and_a_status_and_then_nothing_is_written() -> None:
    world = World(user_service())
    writes = await world.run()
    assert writes[0] == "conch-status InferenceService vision"
    assert sorted(writes[1:3]) == [
        "conch-workload NetworkPolicy vision-network",
        "conch-workload ServiceAccount vision-identity",
    ]
    assert writes[3:5] == ["conch-workload Deployment vision-server", "conch-scaling Scale vision-server"]
    assert sorted(writes[5:]) == [
        "conch-workload PodDisruptionBudget vision-disruption",
        "conch-workload Service vision",
        "conch-workload Service vision-replicas",
    ], "the first status already said what there is to say"
    world.pods_become_ready()
    assert await world.run() == ["conch-status InferenceService vision"]
    assert compute(world.service) == "Current"
    assert await world.run() == []


async def test_r11_ready_and_what_the_servers_have_loaded_are_one_write() -> None:
    world = World(user_service())
    await world.run()
    (model,) = parse_service(world.service).models
    world.server.loaded = {"resnet50": make_loaded(model_config(model, gpu=True), max_batch_size=4)}
    world.pods_become_ready()
    world.api.user_writes(make_pod(ready_at="10.0.0.1", of=world.deployment))
    assert await world.run() == ["conch-status InferenceService vision"]
    assert world.service["status"]["models"] == [
        {"name": "resnet50", "ready": True, "versions": ["1"], "maxBatchSize": 4}
    ]
    assert await world.run() == []
    world.reconciler = world.operator()
    assert await world.run() == []
    assert world.server.asked == ["10.0.0.1"]


async def test_a_pod_that_can_not_be_asked_leaves_ready_alone_and_is_asked_again_later() -> None:
    world = World(user_service())
    await world.run()
    world.server.silent = "a ready server can't be reached on port 8000"
    world.pods_become_ready()
    world.api.user_writes(make_pod(ready_at="10.0.0.1", of=world.deployment))
    assert await world.reconciler.reconcile(KEY) == FIRST_RETRY_S
    world.api.watch()
    assert compute(world.service) == "Current"
    assert await world.run() == []
    assert world.server.asked == ["10.0.0.1"]


async def test_r10_a_generation_is_acknowledged_before_anything_else_is_written() -> None:
    world = await settled()
    world.change({"resources.memory": "8Gi"}, generation=2)
    start = len(world.api.applied)
    await world.run()
    first = world.api.applied[start]
    assert (first["kind"], first["status"]["observedGeneration"]) == ("InferenceService", 2)
    assert compute({**world.service, "status": first["status"]}) == "InProgress"


# --- replicas (R1)


async def test_r1_a_new_deployment_starts_with_the_decided_count_and_hands_it_over_at_once() -> None:
    world = World(user_service({"scaling.minReplicas": 3}))
    await world.run()
    assert world.deployment["spec"]["replicas"] == 3
    assert "conch-scaling" in owners_of(world.deployment)


@pytest.mark.parametrize("owner", ["conch-scaling", "kube-controller-manager", "keda", "kubectl"])
async def test_r1_row_35_row_38_row_40_a_changed_spec_leaves_another_owners_replicas_alone(owner: str) -> None:
    world = await settled({"scaling.maxReplicas": 9})
    world.scale(7, owner)
    world.change({"resources.memory": "8Gi", "scaling.maxReplicas": 9}, generation=2)
    await world.run()
    assert world.deployment["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"] == "8Gi"
    assert world.deployment["spec"]["replicas"] == 7
    assert owners_of(world.deployment) == [owner]


async def test_r1_without_another_owner_the_live_count_is_sent_and_fenced() -> None:
    world = await settled({"scaling.mode": "External"})
    assert owners_of(world.deployment) == ["conch-workload"]
    seen = world.deployment["metadata"]["resourceVersion"]
    world.change({"scaling.mode": "External", "resources.memory": "8Gi"}, generation=2)
    await world.run()
    body = [body for body in world.api.applied if body["kind"] == "Deployment"][-1]
    assert body["spec"]["replicas"] == 1
    assert body["metadata"]["resourceVersion"] == seen


async def test_r1_a_stale_cache_makes_the_apply_fail_instead_of_resetting_replicas() -> None:
    world = await settled({"scaling.mode": "External"})
    scaled = copy.deepcopy(world.deployment)
    scaled["spec"]["replicas"] = 7
    scaled["metadata"] |= {"resourceVersion": "999", "managedFields": [owns_replicas("keda")]}
    world.api.objects[DEPLOYMENT] = scaled
    changed = stored(make_service({"scaling.mode": "External", "resources.memory": "8Gi"}), generation=2)
    changed["metadata"]["resourceVersion"] = "998"
    world.api.objects["InferenceService", "vision"] = changed
    world.cache.put(changed)
    with pytest.raises(Conflict):
        await world.reconciler.reconcile(KEY)
    assert world.deployment["spec"]["replicas"] == 7


async def test_row_37_an_external_scaler_keeps_the_replicas_to_itself() -> None:
    world = World(user_service({"scaling.mode": "External"}))
    writes = await world.run()
    assert not any("Scale" in write for write in writes)


async def test_r1_a_deployment_that_lost_our_labels_is_repaired_and_keeps_its_replicas_and_images() -> None:
    world = await settled({"scaling.maxReplicas": 9})
    world.scale(7)
    bare = copy.deepcopy(world.deployment)
    bare["metadata"]["labels"] = {}
    # The watch is by label: it tells a DELETED event, and the live object is in no cache.
    world.cache.remove(world.deployment)
    world.api.objects[DEPLOYMENT] = bare
    world.reconciler = world.operator(type(IMAGES)("new/conch:2", "new/triton:2"))
    writes = await world.run()
    assert "conch-workload Deployment vision-server" in writes
    assert world.deployment["spec"]["replicas"] == 7
    assert world.deployment["metadata"]["labels"] == names.child_labels("vision")
    assert world.deployment["spec"]["template"]["spec"]["containers"][0]["image"] == IMAGES.triton


# --- deletion (R4)


@pytest.mark.parametrize("status", [None, {}])
async def test_r4_nothing_is_written_under_a_deletion_timestamp(status: dict[str, Any] | None) -> None:
    service = user_service()
    service["metadata"]["deletionTimestamp"] = NOW
    world = World(service if status is None else {**service, "status": status})
    assert await world.run() == []


async def test_r4_children_that_the_collector_removed_do_not_come_back() -> None:
    world = await settled()
    for key in [key for key in world.api.objects if key[0] != "InferenceService"]:
        world.cache.remove(world.api.objects.pop(key))
    gone = {**world.service, "metadata": {**world.service["metadata"], "deletionTimestamp": NOW}}
    world.api.user_writes(gone)
    assert await world.run() == []


async def test_a_service_that_is_unknown_is_nothing_to_do() -> None:
    assert await World().run() == []


# --- names (R5), repair (R8), upgrades (R7)


async def test_r5_a_name_conflict_writes_nothing_but_the_status() -> None:
    world = World(user_service())
    users = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "vision", "namespace": "default", "uid": "x"}}
    world.api.objects["Service", "vision"] = {**users, "spec": {"selector": {"app": "mine"}}}
    await world.reconciler.reconcile(KEY)
    assert set(world.api.writes) == {"conch-status InferenceService vision"}
    assert compute(world.service) == "Failed"


async def test_every_child_that_is_deleted_by_hand_comes_back() -> None:
    world = await settled()
    for key in [key for key in world.api.objects if key[0] != "InferenceService"]:
        world.cache.remove(world.api.objects.pop(key))
        await world.run()
        assert key in world.api.objects


async def test_r8_row_42_drift_is_put_back_with_an_event_and_without_reconciling() -> None:
    world = await settled()
    edited = copy.deepcopy(world.api.objects["Service", "vision"])
    edited["spec"]["ports"][0]["port"] = 9999
    world.api.user_writes(edited)
    assert await world.run() == ["conch-workload Service vision"]
    assert "DriftRepaired" in world.outside.events
    assert compute(world.service) == "Current"


async def test_r7_an_upgraded_operator_writes_nothing() -> None:
    world = await settled()
    world.reconciler = world.operator(type(IMAGES)("new/conch:2", "new/triton:2"))
    assert await world.run() == []


async def test_a_pod_monitor_is_made_when_its_kind_appears_and_pruned_when_it_is_unwanted() -> None:
    world = await settled()
    world.reconciler = world.operator(monitors=True)
    assert await world.run() == ["conch-workload PodMonitor vision-metrics"]
    world.reconciler = world.operator()
    assert await world.run() == ["delete PodMonitor vision-metrics"]
    assert "Pruned" in world.outside.events


# --- bad specs and refusals (R9)


async def test_r9_an_invalid_spec_changes_nothing_that_runs() -> None:
    world = await settled()
    world.change({"models[0].format": "Pickle"}, generation=2)
    assert await world.run() == ["conch-status InferenceService vision"]
    assert compute(world.service) == "Failed"
    ready = next(c for c in world.service["status"]["conditions"] if c["type"] == "Ready")
    assert (ready["status"], ready["observedGeneration"]) == ("True", 1)
    assert await world.run() == []


async def test_r9_a_corrected_spec_is_no_longer_stalled() -> None:
    world = await settled()
    world.change({"models[0].format": "Pickle"}, generation=2)
    await world.run()
    world.change({}, generation=3)
    await world.run()
    assert compute(world.service) == "Current"


async def test_r9_a_child_that_the_server_refuses_is_waited_for_and_told() -> None:
    world = World(user_service())
    world.api.refuses["Deployment"] = Invalid(422, "Invalid", "quota exceeded")
    again_s = await world.reconciler.reconcile(KEY)
    assert again_s == 30
    assert compute(world.service) == "InProgress"
    assert "quota exceeded" in str(world.service["status"]["conditions"])


async def test_a_paused_service_is_left_alone_and_says_so() -> None:
    world = await settled()
    world.change({"paused": True}, generation=2)
    edited = copy.deepcopy(world.deployment)
    edited["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 1
    world.api.user_writes(edited)
    assert set(await world.run()) == {"conch-status InferenceService vision"}
    assert compute(world.service) == "Current"


# --- rollouts (R12)


@pytest.mark.parametrize(
    ("free", "replicas", "numbers", "name"),
    [
        (1, 3, {"maxSurge": 1, "maxUnavailable": 0}, "Surge"),
        (0, 3, {"maxSurge": 0, "maxUnavailable": 1}, "Replace"),
        (0, 1, {"maxSurge": 1, "maxUnavailable": 0}, "Surge"),
        (None, 3, {"maxSurge": 1, "maxUnavailable": 0}, "Surge"),
    ],
)
async def test_r12_row_66_a_rollout_keeps_the_numbers_that_it_started_with(
    free: int | None, replicas: int, numbers: dict[str, int], name: str
) -> None:
    world = await settled()
    world.scale(replicas)
    world.outside.free_now = free
    world.change({"resources.memory": "8Gi"}, generation=2)
    await world.run()
    assert world.deployment["spec"]["strategy"]["rollingUpdate"] == numbers
    assert world.service["status"]["rollout"]["strategy"] == name
    world.outside.free_now = 5 if free == 0 else 0
    assert await world.run() == []
    assert world.deployment["spec"]["strategy"]["rollingUpdate"] == numbers


# --- accelerators that the cluster has, or hasn't


def gpu_node(product: str = "NVIDIA-L4", mib: int = 23034, capability: str = "8.9") -> Object:
    labels = {
        "nvidia.com/gpu.product": product,
        "nvidia.com/gpu.memory": str(mib),
        "nvidia.com/gpu.compute.major": capability[0],
        "nvidia.com/gpu.compute.minor": capability[2],
    }
    return {"metadata": {"name": "n", "labels": labels}, "status": {"allocatable": {"nvidia.com/gpu": "1"}}}


def condition_of(service: Object, type_: str) -> tuple[str, str, str]:
    found = next(c for c in service["status"]["conditions"] if c["type"] == type_)
    return found["status"], found["reason"], found["message"]


L5 = {"accelerator.products": ["NVIDIA-L5"]}


async def test_row_82_a_product_that_no_node_has_is_told_and_the_pods_wait_for_one() -> None:
    world = World(user_service(L5))
    world.outside.nodes_now = [gpu_node()]
    assert await world.reconciler.reconcile(KEY) == 0
    world.api.watch()
    assert await world.reconciler.reconcile(KEY) == 30
    world.api.watch()
    assert DEPLOYMENT in world.api.objects
    status, reason, message = condition_of(world.service, "CapacityConstrained")
    assert (status, reason) == ("True", "NoSuitableNode")
    assert "NVIDIA-L5; the cluster has NVIDIA-L4" in message
    assert compute(world.service) == "InProgress"
    world.outside.nodes_now = [gpu_node(), gpu_node("NVIDIA-L5")]
    await world.run()
    assert condition_of(world.service, "CapacityConstrained")[:2] == ("False", "SuitableNodes")


async def test_row_82_no_serving_pod_is_given_up_for_one_that_no_node_can_take() -> None:
    world = await settled()
    world.outside.nodes_now = [gpu_node()]
    world.change(L5, generation=2)
    assert await world.reconciler.reconcile(KEY) == 30
    world.api.watch()
    assert "affinity" not in world.deployment["spec"]["template"]["spec"]
    assert condition_of(world.service, "Ready")[0] == "True"
    assert condition_of(world.service, "Reconciling")[:2] == ("True", "NoSuitableNode")
    world.outside.nodes_now = [gpu_node("NVIDIA-L5")]
    await world.run()
    assert "affinity" in world.deployment["spec"]["template"]["spec"]


async def test_with_node_autoscaling_a_missing_node_is_a_remark_and_holds_nothing_back() -> None:
    world = await settled()
    world.reconciler = world.operator(autoscaling=True)
    world.outside.nodes_now = [gpu_node()]
    world.change(L5, generation=2)
    await world.run()
    assert "affinity" in world.deployment["spec"]["template"]["spec"]
    status, reason, message = condition_of(world.service, "CapacityConstrained")
    assert (status, reason) == ("False", "NodesAwaited")
    assert "Node autoscaling may bring one" in message


async def test_nodes_that_nobody_can_see_are_unknown_and_hold_nothing_back() -> None:
    world = await settled()
    world.change(L5, generation=2)
    await world.run()
    assert "affinity" in world.deployment["spec"]["template"]["spec"]
    assert condition_of(world.service, "CapacityConstrained")[:2] == ("Unknown", "NodesUnknown")


async def test_nodes_that_went_hold_back_no_repair() -> None:
    world = await settled(L5)
    world.outside.nodes_now = [gpu_node()]
    world.cache.remove(world.api.objects.pop(("Service", "vision")))
    await world.run()
    assert ("Service", "vision") in world.api.objects
    assert compute(world.service) == "Current"


OFFICIAL = "nvcr.io/nvidia/tritonserver:24.10-py3"
PLAN = {"models[0].format": "TensorRT", "models[0].source.engine": {"tensorRT": "10.3"}}


@pytest.mark.parametrize(("own_image", "verdict"), [(False, "InProgress"), (True, "Failed")])
async def test_row_80_an_engine_of_another_version_is_never_rolled_out_and_the_old_pods_serve(
    *, own_image: bool, verdict: str
) -> None:
    world = await settled()
    world.reconciler = world.operator(type(IMAGES)("conch.example/conch:1", OFFICIAL))
    before = copy.deepcopy(world.deployment["spec"])
    world.change({**PLAN, **({"runtime.image": OFFICIAL} if own_image else {})}, generation=2)
    await world.run()
    assert world.deployment["spec"] == before
    assert compute(world.service) == verdict
    assert condition_of(world.service, "Ready")[0] == "True"
    said = condition_of(world.service, "Stalled" if own_image else "Reconciling")
    assert said[:2] == ("True", "EngineMismatch")
    assert "built with TensorRT 10.3, and the image has 10.5.0" in said[2]
    world.change({**PLAN, "models[0].source.engine": {"tensorRT": "10.5"}}, generation=3)
    await world.run()
    assert world.deployment["spec"] != before


async def test_row_80_a_new_service_with_such_an_engine_makes_no_pod() -> None:
    world = World(user_service(PLAN), images=type(IMAGES)("conch.example/conch:1", OFFICIAL))
    await world.run()
    assert DEPLOYMENT not in world.api.objects
    assert condition_of(world.service, "Ready")[:2] == ("False", "EngineMismatch")


async def test_r7_an_operator_with_a_newer_default_image_finds_no_fault_with_engines_that_keep_theirs() -> None:
    newer = type(IMAGES)("conch.example/conch:1", OFFICIAL)
    older = replace(newer, triton=OFFICIAL.replace("24.10", "24.08"))
    world = World(user_service(PLAN), images=older)
    await world.run()
    world.pods_become_ready()
    await world.run()
    before = condition_of(world.service, "CapacityConstrained")
    assert before[0] != "True"
    world.reconciler = world.operator(newer)
    assert await world.run() == []
    assert condition_of(world.service, "CapacityConstrained") == before


async def test_what_was_measured_is_told_and_refuses_a_smaller_accelerator() -> None:
    world = await settled()
    world.outside.nodes_now = [gpu_node("NVIDIA-A100", 40536), gpu_node()]
    world.outside.used_now = 30 * 2**30
    await world.run()
    assert world.service["status"]["gpus"]["memoryUsed"] == "30720Mi"
    world.outside.used_now = None  # the operator restarts
    world.change({"accelerator.products": ["NVIDIA-L4"]}, generation=2)
    await world.run()
    assert "affinity" not in world.deployment["spec"]["template"]["spec"]
    assert condition_of(world.service, "Reconciling")[:2] == ("True", "AcceleratorTooSmall")
    assert "were seen to use 30Gi" in condition_of(world.service, "Reconciling")[2]
    assert world.service["status"]["gpus"]["memoryUsed"] == "30720Mi"
    world.change({"accelerator.products": ["NVIDIA-L4"], "models[0].acceleratorMemory": "20Gi"}, generation=3)
    await world.run()
    assert "affinity" in world.deployment["spec"]["template"]["spec"]
    assert "memoryUsed" not in world.service["status"]["gpus"], "it was measured of another spec.models"


# --- what settings and releases refuse


async def test_r9_a_format_that_the_operator_forbids_is_waited_for_and_the_old_pods_serve() -> None:
    world = await settled()
    before = copy.deepcopy(world.deployment["spec"])
    world.reconciler = ServiceReconciler(replace(world.reconciler._out, allowed=Allowed(python_models=False)))
    world.change({"models[0].format": "Python"}, generation=2)
    await world.run()
    assert world.deployment["spec"] == before
    assert condition_of(world.service, "Ready")[0] == "True"
    assert condition_of(world.service, "Stalled")[0] == "False"
    status, reason, message = condition_of(world.service, "Reconciling")
    assert (status, reason) == ("True", "NotAllowed")
    assert "spec.models[0].format: Python runs Python code" in message
    assert "CONCH_ALLOW_PYTHON_MODELS=false" in message
    world.reconciler = ServiceReconciler(replace(world.reconciler._out, allowed=Allowed()))
    await world.run()
    assert world.deployment["spec"] != before, "the setting alone heals it"


async def test_r7_a_setting_against_code_reaches_the_pods_with_the_next_change_of_the_spec() -> None:
    def allowed(world: World) -> bool:
        annotations = world.deployment["spec"]["template"]["metadata"]["annotations"]
        return Plan.from_json(annotations[names.PLAN_ANNOTATION]).allow_code

    world = await settled()
    world.reconciler = ServiceReconciler(replace(world.reconciler._out, allowed=Allowed(python_models=False)))
    await world.run()
    assert allowed(world)
    world.change({"resources.cpu": "2"}, generation=2)
    await world.run()
    assert not allowed(world)


async def test_r7_a_newer_default_image_refuses_nothing_of_a_service_that_keeps_its_own() -> None:
    older, newer = (f"nvcr.io/nvidia/tritonserver:{release}-py3" for release in ("25.02", "25.03"))
    world = World(user_service({"models[0].format": "TensorFlow"}), images=type(IMAGES)("conch.example/conch:1", older))
    await world.run()
    world.pods_become_ready()
    world.reconciler = world.operator(type(IMAGES)("conch.example/conch:2", newer))
    await world.run()
    assert condition_of(world.service, "Ready")[0] == "True"
    world.change({"models[0].format": "TensorFlow", "resources.cpu": "2"}, generation=2)
    await world.run()
    status, reason, message = condition_of(world.service, "Reconciling")
    assert (status, reason) == ("True", "UnsupportedRelease")
    assert "TensorFlow is not in Triton's images from 25.03 on" in message
    assert world.deployment["spec"]["template"]["spec"]["containers"][0]["image"] == older


async def test_our_service_account_stays_until_no_pod_runs_as_it_and_comes_back_when_it_is_wanted() -> None:
    world = await settled()
    ours = ("ServiceAccount", names.service_account("vision"))
    assert ours in world.api.objects
    world.change({"runtime.serviceAccountName": "team-a"}, generation=2)
    await world.run()
    assert world.deployment["spec"]["template"]["spec"]["serviceAccountName"] == "team-a"
    assert ours in world.api.objects, "a pod of the old revision may start again"
    world.pods_become_ready()
    await world.run()
    assert ours not in world.api.objects
    assert await world.run() == []
    world.change({}, generation=3)
    await world.run()
    assert ours in world.api.objects


# --- claims (DRA)

A_CLAIM = {"accelerator.claim": {"deviceClass": "gpu.nvidia.com"}}


def claim_templates(world: World) -> list[str]:
    return sorted(name for kind, name in world.api.objects if kind == "ResourceClaimTemplate")


async def test_row_83_a_changed_claim_is_a_second_template_until_no_old_pod_is_left() -> None:
    world = World(user_service(A_CLAIM))
    world.reconciler = world.operator(claims=True)
    writes = await world.run()
    assert claim_templates(world)[0] in writes[1] + writes[2] + writes[3], "before the Deployment"
    world.pods_become_ready()
    await world.run()
    first = claim_templates(world)
    world.change({"accelerator.claim": {"deviceClass": "gpu.nvidia.com", "count": 2}}, generation=2)
    await world.run()
    assert len(claim_templates(world)) == 2
    status = {"observedGeneration": world.deployment["metadata"]["generation"], "replicas": 2, "updatedReplicas": 1}
    world.api.user_writes({**world.deployment, "status": status})
    await world.run()
    assert len(claim_templates(world)) == 2, "a pod of the old revision may start again"
    world.pods_become_ready()
    await world.run()
    assert len(claim_templates(world)) == 1
    assert claim_templates(world) != first
    world.change({}, generation=3)
    await world.run()
    world.pods_become_ready()
    await world.run()
    assert claim_templates(world) == []
    assert await world.run() == []


async def test_row_83_without_the_api_a_claim_is_waited_for_and_the_old_pods_serve() -> None:
    world = await settled()
    world.change(A_CLAIM, generation=2)
    await world.run()
    assert claim_templates(world) == []
    assert "resourceClaims" not in world.deployment["spec"]["template"]["spec"]
    status, reason, message = condition_of(world.service, "Reconciling")
    assert (status, reason) == ("True", "NoClaims")
    assert "resource.k8s.io/v1" in message
