"""The steps that write children: names first, then what differs, then what is no longer wanted."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from child_makers import make_live, make_wanted
from conch import names
from conch.api.conditions import Reason
from conch.kube.errors import Conflict, Invalid, Unreachable
from conch.reconcile import steps
from conch.reconcile.errors import Stalled, Waiting
from makers import make_service, stored

if TYPE_CHECKING:
    from conch.kube.client import Resource

Object = dict[str, Any]
Children = dict[str, list[Object]]

SERVICE = stored(make_service())
WANTED = make_wanted(SERVICE)


class FakeKube:
    """Objects by kind and name, and every call in order."""

    def __init__(self, *objects: Object) -> None:
        self.objects = {(obj["kind"], obj["metadata"]["name"]): obj for obj in objects}
        self.calls: list[str] = []
        self.deletions: list[tuple[str, str | None]] = []
        self.fails: dict[str, Exception] = {}

    async def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        assert namespace == "default"
        self._called("get", resource.kind, name)
        return self.objects.get((resource.kind, name))

    async def apply(self, body: Object, *, manager: str) -> Object:
        assert manager == "conch-workload"
        self._called("apply", body["kind"], body["metadata"]["name"])
        return make_live(body)

    async def merge(self, body: Object, *, manager: str) -> Object:
        assert manager == "conch-workload"
        self._called("merge", body["kind"], body["metadata"]["name"])
        assert body["metadata"]["resourceVersion"]
        # What stood in the apply's way is gone.
        self.fails.pop(f"apply {body['kind']} {body['metadata']['name']}", None)
        return make_live(body)

    async def delete(
        self, resource: Resource, namespace: str, name: str, *, uid: str, resource_version: str | None
    ) -> bool:
        assert namespace == "default"
        self._called("delete", resource.kind, name)
        self.deletions.append((uid, resource_version))
        return True

    def _called(self, verb: str, kind: str, name: str) -> None:
        call = f"{verb} {kind} {name}"
        self.calls.append(call)
        if call in self.fails:
            raise self.fails[call]


class FakeCache:
    """What was put and removed."""

    def __init__(self) -> None:
        self.stored: list[str] = []
        self.removed: list[str] = []

    def put(self, obj: Object) -> bool:
        self.stored.append(obj["metadata"]["name"])
        return True

    def remove(self, obj: Object) -> bool:
        self.removed.append(obj["metadata"]["name"])
        return True


class FakeClock:
    """A time that the test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def by_kind(*objects: Object) -> Children:
    children: Children = {}
    for obj in objects:
        children.setdefault(obj["kind"], []).append(obj)
    return children


def all_live(wanted: dict[str, Object] | None = None) -> Children:
    return by_kind(*(make_live(child) for child in (wanted or WANTED).values()))


def foreign(child: str, owner: dict[str, Any] | None = None) -> Object:
    """An object that has a wanted child's name and belongs to someone else."""
    live = make_live(WANTED[child])
    live["metadata"].pop("labels")
    live["metadata"]["ownerReferences"] = [owner] if owner else []
    return live


async def check(kube: FakeKube, children: Children | None = None) -> None:
    await steps.check_names(kube, SERVICE, list(WANTED.values()), children or {})


async def apply(
    kube: FakeKube,
    children: Children,
    wanted: dict[str, Object] | None = None,
    limit: steps.RepairLimit | None = None,
    cache: FakeCache | None = None,
) -> steps.Applied:
    async def last(child: Object) -> Object:
        return await kube.apply(child, manager=names.WORKLOAD_MANAGER)

    return await steps.apply_children(
        kube,
        cache or FakeCache(),
        list((wanted or WANTED).values()),
        children,
        limit=limit or steps.RepairLimit(FakeClock()),
        last=last,
    )


async def prune(kube: FakeKube, children: Children, wanted: dict[str, Object] | None = None) -> list[str]:
    return await steps.prune(kube, FakeCache(), SERVICE, list((wanted or WANTED).values()), children)


# --- names


async def test_r5_free_names_and_own_children_are_no_conflict() -> None:
    kube = FakeKube()
    await check(kube)
    assert len(kube.calls) == len(WANTED)
    known = FakeKube()
    await check(known, all_live())
    assert known.calls == []


@pytest.mark.parametrize("child", list(WANTED))
@pytest.mark.parametrize("owner", [None, {"kind": "Deployment", "name": "x", "uid": "u", "controller": True}])
async def test_r5_a_name_that_is_anothers_stalls_and_nothing_is_written(child: str, owner: dict[str, Any]) -> None:
    kube = FakeKube(foreign(child, owner))
    with pytest.raises(Stalled) as caught:
        await check(kube)
    assert caught.value.reason == Reason.NAME_CONFLICT
    assert child in caught.value.message
    assert "rename metadata.name" in caught.value.message
    assert all(call.startswith("get ") for call in kube.calls)


async def test_r5_an_object_with_our_labels_but_another_owner_is_not_taken_either() -> None:
    live = foreign("Service vision", {"kind": "Deployment", "name": "x", "uid": "u", "controller": True})
    live["metadata"]["labels"] = names.child_labels("vision")
    with pytest.raises(Stalled):
        await check(FakeKube(), by_kind(live))


@pytest.mark.parametrize("owners", [[], [{"kind": "ConfigMap", "name": "x", "uid": "u"}]])
@pytest.mark.parametrize("child", list(WANTED))
async def test_r8_a_child_whose_owner_was_edited_away_is_taken_back(child: str, owners: list[dict[str, Any]]) -> None:
    children = all_live()
    (live,) = (obj for obj in children[child.split(maxsplit=1)[0]] if obj["metadata"]["name"] == child.split()[1])
    live["metadata"]["ownerReferences"] = owners
    kube = FakeKube()
    await check(kube, children)
    (repaired,) = (await apply(kube, children)).repaired
    assert repaired.startswith(f"{child}: metadata.ownerReferences")


async def test_r5_the_orphan_of_another_service_is_not_taken() -> None:
    live = foreign("Service vision-replicas")
    live["metadata"]["labels"] = names.child_labels("vision-replicas")
    with pytest.raises(Stalled):
        await check(FakeKube(live))


def owner(name: str, uid: str, **more: Any) -> dict[str, Any]:
    fixed = {"apiVersion": "conch.dev/v1alpha1", "kind": "InferenceService", "controller": True}
    return {**fixed, "name": name, "uid": uid, **more}


@pytest.mark.parametrize("version", ["conch.dev/v1alpha1", "conch.dev/v1"])
async def test_r5_a_predecessors_children_are_waited_for(version: str) -> None:
    kube = FakeKube(foreign("Deployment vision-server", owner("vision", "uid-0", apiVersion=version)))
    with pytest.raises(Waiting) as caught:
        await check(kube)
    assert caught.value.reason == Reason.NAME_CONFLICT
    assert caught.value.retry_after_s < 5
    assert "is being removed" in caught.value.message


async def test_r5_two_services_that_need_one_name_do_not_wait_for_each_other() -> None:
    # The service `vision` wants the Service vision-replicas; so does a service of that name.
    kube = FakeKube(foreign("Service vision-replicas", owner("vision-replicas", "uid-2")))
    with pytest.raises(Stalled) as caught:
        await check(kube)
    assert "belongs to the InferenceService vision-replicas" in caught.value.message


async def test_r5_an_owner_of_another_group_with_our_kinds_name_is_a_stranger() -> None:
    kserve = owner("vision", "u", apiVersion="serving.kserve.io/v1beta1")
    lookalike = owner("vision", "u", apiVersion="conch.dev.evil/v1")
    for stranger in (kserve, lookalike):
        with pytest.raises(Stalled):
            await check(FakeKube(foreign("Service vision", stranger)))


@pytest.mark.parametrize(
    ("owners", "owned"),
    [
        ([], False),
        ([owner("vision", "uid-1")], True),
        ([owner("vision", "uid-1", controller=False)], False),
        ([owner("vision", "uid-0")], False),
        ([owner("x", "uid-9", controller=False), owner("vision", "uid-1")], True),
    ],
)
def test_r6_a_child_is_ours_when_its_controller_has_our_uid(owners: list[dict[str, Any]], *, owned: bool) -> None:
    assert steps.owned_by({"metadata": {"ownerReferences": owners}}, "uid-1") is owned
    assert not steps.owned_by({"metadata": {}}, "uid-1")


# --- applying


URGENT = {"ServiceAccount vision-identity", "NetworkPolicy vision-network", "Deployment vision-server"}


async def test_a_new_services_first_pass_applies_what_pods_need_and_then_the_deployment() -> None:
    kube, cache = FakeKube(), FakeCache()
    applied = await apply(kube, {}, cache=cache)
    assert {call.removeprefix("apply ") for call in kube.calls} == URGENT
    assert kube.calls[-1] == "apply Deployment vision-server"
    assert (applied.repaired, applied.postponed, applied.unfinished) == ((), False, True)
    assert len(cache.stored) == len(URGENT)


@given(missing=st.sets(st.sampled_from(list(WANTED))))
async def test_only_what_is_missing_is_applied_and_pods_come_last(missing: set[str]) -> None:
    kube = FakeKube()
    applied = await apply(kube, by_kind(*(make_live(child) for name, child in WANTED.items() if name not in missing)))
    due = missing & URGENT if "Deployment vision-server" in missing else missing
    assert {call.removeprefix("apply ") for call in kube.calls} == due
    assert applied.unfinished == (due != missing)
    assert "apply Deployment vision-server" not in kube.calls[:-1]


async def test_r8_row_55_nothing_is_written_while_nothing_differs() -> None:
    kube = FakeKube()
    applied = await apply(kube, all_live())
    assert kube.calls == []
    assert (applied.written, applied.repaired, applied.postponed) == ((), (), False)


async def test_r8_row_42_a_hand_edit_is_put_back_and_told_although_the_digest_survives() -> None:
    children = all_live()
    children["Service"][0]["spec"]["ports"][0]["port"] = 9999
    kube = FakeKube()
    applied = await apply(kube, children)
    assert kube.calls == ["apply Service vision"]
    assert applied.repaired == ("Service vision: spec.ports[http].port",)


async def test_r8_row_42_an_edited_key_of_a_list_is_put_back_by_replacing_the_list() -> None:
    """A person's port 8888 would stay beside our 8000 under one name, which the API server refuses."""
    children = all_live()
    live = next(item for item in children["Service"] if item["metadata"]["name"] == "vision")
    live["spec"]["ports"][0]["port"] = 8888
    kube = FakeKube()
    kube.fails["apply Service vision"] = Invalid(422, "Invalid", 'spec.ports[1].name: Duplicate value: "http"')
    applied = await apply(kube, children)
    assert applied.repaired == ("Service vision: spec.ports[http].port",)
    assert kube.calls == ["apply Service vision", "merge Service vision", "apply Service vision"]


async def test_a_child_that_is_refused_when_it_is_made_is_not_merged() -> None:
    kube = FakeKube()
    kube.fails["apply NetworkPolicy vision-network"] = Invalid(422, "Invalid", "no")
    with pytest.raises(Invalid):
        await apply(kube, {})
    assert not any(call.startswith("merge") for call in kube.calls)


async def test_r8_a_field_that_is_no_longer_wanted_leads_to_an_apply_that_is_no_repair() -> None:
    with_field = make_wanted(stored(make_service({"placement.priorityClassName": "high"})))
    kube = FakeKube()
    applied = await apply(kube, all_live(with_field))
    assert kube.calls == ["apply Deployment vision-server"]
    assert applied.repaired == ()


async def test_a_lost_digest_is_an_apply_and_no_repair() -> None:
    children = all_live()
    for live in children["NetworkPolicy"]:
        del live["metadata"]["annotations"]
    kube = FakeKube()
    assert (await apply(kube, children)).repaired == ()
    assert kube.calls == ["apply NetworkPolicy vision-network"]


async def test_one_failure_does_not_leave_the_other_writes_unfinished_and_holds_the_deployment_back() -> None:
    kube = FakeKube()
    kube.fails["apply NetworkPolicy vision-network"] = Unreachable(503)
    with pytest.raises(Unreachable):
        await apply(kube, {})
    assert len(kube.calls) == len(URGENT) - 1
    assert "apply Deployment vision-server" not in kube.calls


def edited() -> Children:
    children = all_live()
    children["PodDisruptionBudget"][0]["spec"]["maxUnavailable"] = 0
    return children


async def test_row_39_two_that_disagree_do_not_fight_in_a_loop() -> None:
    clock = FakeClock()
    limit, kube = steps.RepairLimit(clock), FakeKube()
    results = []
    for _ in range(10):
        results.append(await apply(kube, edited(), limit=limit))
        clock.now_s += 1
    assert len(kube.calls) == steps.MAX_REPAIRS
    assert [result.postponed for result in results] == [False] * 3 + [True] * 7
    clock.now_s += steps.REPAIR_WINDOW_S
    assert not (await apply(kube, edited(), limit=limit)).postponed


async def test_the_limit_holds_for_each_child_alone_and_never_for_a_new_spec() -> None:
    limit = steps.RepairLimit(FakeClock())
    for _ in range(4):
        await apply(FakeKube(), edited(), limit=limit)
    other = all_live()
    other["Service"][1]["spec"]["ports"][2]["port"] = 1
    assert not (await apply(FakeKube(), other, limit=limit)).postponed
    kube = FakeKube()
    children = edited()
    children["PodDisruptionBudget"][0]["metadata"]["annotations"][names.DESIRED_ANNOTATION] = "of an older spec"
    assert not (await apply(kube, children, limit=limit)).postponed
    assert kube.calls == ["apply PodDisruptionBudget vision-disruption"]


def test_the_limit_remembers_only_what_was_repaired_lately() -> None:
    clock = FakeClock()
    limit = steps.RepairLimit(clock)
    for index in range(steps.REMEMBERED + 1):
        assert limit.allows(f"gone-{index}")
    clock.now_s += steps.REPAIR_WINDOW_S + 1
    assert limit.allows("u")
    assert len(limit._repairs) == 1


# --- pruning


def without(*children: str) -> dict[str, Object]:
    return {name: child for name, child in WANTED.items() if name not in children}


async def test_r6_what_is_no_longer_wanted_goes_with_preconditions() -> None:
    kube, children = FakeKube(), all_live()
    removed = await prune(kube, children, without("PodMonitor vision-metrics", "Service vision-replicas"))
    assert removed == ["PodMonitor vision-metrics", "Service vision-replicas"]
    assert kube.deletions == [("uid-of-PodMonitor-vision-metrics", "7"), ("uid-of-Service-vision-replicas", "7")]


async def test_r6_nothing_that_is_wanted_is_deleted() -> None:
    kube = FakeKube()
    assert await prune(kube, all_live()) == []
    assert kube.calls == []


@pytest.mark.parametrize("owners", [[], [owner("vision", "uid-0")], [owner("vision", "uid-1", controller=False)]])
async def test_r6_row_36_only_our_own_is_pruned(owners: list[dict[str, Any]]) -> None:
    extra = make_live(WANTED["Service vision-replicas"])
    extra["metadata"] |= {"name": "vision-users", "ownerReferences": owners}
    kube = FakeKube()
    assert await prune(kube, by_kind(extra)) == []
    assert kube.calls == []


@pytest.mark.parametrize("kind", ["Pod", "ReplicaSet", "HorizontalPodAutoscaler", "Secret"])
async def test_kinds_that_are_never_made_are_never_pruned(kind: str) -> None:
    extra = make_live(WANTED["Service vision-replicas"])
    extra |= {"kind": kind}
    kube = FakeKube()
    await prune(kube, by_kind(extra))
    assert kube.calls == []


async def test_r6_a_child_that_changed_since_it_was_seen_is_left_for_the_next_look() -> None:
    kube = FakeKube()
    kube.fails["delete PodMonitor vision-metrics"] = Conflict(409)
    wanted = without("PodMonitor vision-metrics", "Service vision-replicas")
    assert await prune(kube, all_live(), wanted) == ["Service vision-replicas"]


async def test_r4_a_child_that_is_being_deleted_is_not_deleted_again() -> None:
    children = all_live()
    children["PodMonitor"][0]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    kube = FakeKube()
    assert await prune(kube, children, without("PodMonitor vision-metrics")) == []
    assert kube.calls == []


async def test_the_cache_is_read_and_never_changed() -> None:
    children = edited()
    before = copy.deepcopy(children)
    await check(FakeKube(), children)
    await apply(FakeKube(), children)
    await prune(FakeKube(), children, without("PodMonitor vision-metrics"))
    assert children == before
