"""The cache: what is news, what is a ghost, what is kept."""

from __future__ import annotations

import json
from typing import Any

import pytest

from conch.kube.cache import Cache, Change, replicas_owners


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(clock: Clock) -> Cache:
    return Cache(clock=clock)


def make(
    kind: str = "Service",
    name: str = "a",
    namespace: str = "team",
    *,
    uid: str | None = None,
    version: str = "1",
    service: str | None = None,
    created: str = "2026-11-30T10:00:00Z",
    **rest: Any,
) -> dict[str, Any]:
    labels = {"app.kubernetes.io/managed-by": "conch", "conch.dev/service": service} if service else {}
    return {
        "apiVersion": "v1",
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid or f"{kind}-{namespace}-{name}",
            "resourceVersion": version,
            "creationTimestamp": created,
            "labels": labels,
        },
        **rest,
    }


def names(changes: list[Change]) -> list[tuple[str, bool]]:
    return [(change.obj["metadata"]["name"], change.deleted) for change in changes]


def test_the_same_resource_version_is_no_news(cache: Cache) -> None:
    assert cache.put(make())
    assert not cache.put(make())
    assert cache.put(make("NetworkPolicy"))
    assert cache.put(make("NetworkPolicy", version="2"))


@pytest.mark.parametrize("kind", ["Service", "PodDisruptionBudget"])
def test_a_status_that_nobody_reads_is_no_news(cache: Cache, kind: str) -> None:
    assert cache.put(make(kind))
    assert not cache.put({**make(kind, version="2"), "status": {"disruptionsAllowed": 1}})
    stored = cache.get(kind, "team", "a")
    assert stored is not None
    assert stored["metadata"]["resourceVersion"] == "2"


def test_an_object_is_found_by_kind_namespace_and_name(cache: Cache) -> None:
    cache.put(make(name="a"))
    cache.put(make(name="b"))
    cache.put(make(name="a", namespace="other"))
    cache.put(make(kind="Node", name="n", namespace=""))
    found = cache.get("Service", "team", "a")
    assert found is not None
    assert found["metadata"]["uid"] == "Service-team-a"
    assert len(cache.list("Service")) == 3
    assert len(cache.list("Service", "team")) == 2
    assert len(cache.list("Node")) == 1
    assert cache.get("Service", "team", "c") is None
    assert cache.list("Pod", "team") == []
    assert (len(cache), cache.count("Service")) == (4, 3)


def test_children_are_found_by_label_and_only_if_ours(cache: Cache) -> None:
    cache.put(make(name="a", service="m"))
    cache.put(make(kind="Pod", name="p", service="m"))
    cache.put(make(name="b", service="other"))
    foreign = make(name="c", service="m")
    foreign["metadata"]["labels"]["app.kubernetes.io/managed-by"] = "helm"
    cache.put(foreign)
    children = cache.children("team", "m")
    assert {kind: [obj["metadata"]["name"] for obj in objects] for kind, objects in children.items()} == {
        "Service": ["a"],
        "Pod": ["p"],
    }


def test_a_child_that_loses_its_label_or_changes_it_is_no_child_any_more(cache: Cache) -> None:
    cache.put(make(service="m"))
    cache.put(make(service="n", version="2"))
    assert cache.children("team", "m") == {}
    assert len(cache.children("team", "n")["Service"]) == 1
    cache.put(make(version="3"))
    assert cache.children("team", "n") == {}


def test_a_removed_object_is_gone_with_its_index(cache: Cache) -> None:
    cache.put(make(service="m"))
    assert cache.remove(make(service="m"))
    assert not cache.remove(make(service="m"))
    assert cache.get("Service", "team", "a") is None
    assert cache.children("team", "m") == {}


def test_the_deletion_of_a_predecessor_leaves_its_successor(cache: Cache) -> None:
    cache.put(make(uid="old"))
    cache.put(make(uid="new", created="2026-11-30T11:00:00Z"))
    assert not cache.remove(make(uid="old"))
    assert cache.get("Service", "team", "a") is not None


def test_a_late_event_of_a_predecessor_changes_nothing(cache: Cache) -> None:
    cache.put(make(uid="new", created="2026-11-30T11:00:00Z"))
    assert not cache.put(make(uid="old", version="9"))
    found = cache.get("Service", "team", "a")
    assert found is not None
    assert found["metadata"]["uid"] == "new"


def test_an_object_that_gets_its_label_back_was_only_out_of_sight(cache: Cache) -> None:
    cache.put(make(version="5"))
    cache.remove(make(version="6"))
    assert not cache.put(make(version="5"))
    assert cache.put(make(version="7"))
    assert cache.get("Service", "team", "a") is not None


def test_an_event_older_than_the_answer_to_our_write_changes_nothing(cache: Cache) -> None:
    assert cache.put(make(version="10"))
    assert not cache.put(make(version="9"))
    found = cache.get("Service", "team", "a")
    assert found is not None
    assert found["metadata"]["resourceVersion"] == "10"


def test_a_child_that_gets_its_label_back_is_seen_again(cache: Cache, clock: Clock) -> None:
    """To a watch with a selector, an object that loses its label is deleted."""
    cache.put(make(version="7"))
    cache.remove(make(version="8"))
    assert not cache.put(make(version="7"))
    assert cache.put(make(version="9"))
    assert cache.get("Service", "team", "a") is not None
    cache.remove(make(version="10"))
    clock.now += 1
    assert [change.deleted for change in cache.replace("Service", None, [make(version="11")], clock.now)] == [False]


def test_an_event_from_before_our_own_write_changes_nothing(cache: Cache) -> None:
    cache.put(make(version="12"))
    assert not cache.put(make(version="11"))
    found = cache.get("Service", "team", "a")
    assert found is not None
    assert found["metadata"]["resourceVersion"] == "12"


def test_r3_what_a_list_lacks_is_evicted_and_told(cache: Cache, clock: Clock) -> None:
    cache.put(make(name="kept"))
    cache.put(make(name="ghost", service="m"))
    clock.now += 10
    changes = cache.replace("Service", None, [make(name="kept"), make(name="fresh")], clock.now)
    assert names(changes) == [("fresh", False), ("ghost", True)]
    assert cache.get("Service", "team", "ghost") is None
    assert cache.children("team", "m") == {}


def test_r3_what_came_after_the_list_began_is_no_ghost(cache: Cache, clock: Clock) -> None:
    started = clock.now
    clock.now += 1
    cache.put(make(name="young"))
    assert cache.replace("Service", None, [], started) == []
    assert cache.get("Service", "team", "young") is not None


def test_r3_a_listed_item_never_replaces_a_newer_event(cache: Cache, clock: Clock) -> None:
    started = clock.now
    clock.now += 1
    cache.put(make(version="8"))
    assert cache.replace("Service", None, [make(version="7")], started) == []
    found = cache.get("Service", "team", "a")
    assert found is not None
    assert found["metadata"]["resourceVersion"] == "8"


def test_r3_a_deletion_during_a_list_is_not_undone_by_it(cache: Cache, clock: Clock) -> None:
    cache.put(make())
    started = clock.now + 1
    clock.now += 2
    cache.remove(make())
    assert cache.replace("Service", None, [make()], started) == []
    assert cache.get("Service", "team", "a") is None
    clock.now += 300
    cache.replace("Service", None, [], clock.now)
    assert not cache._gone["Service"]


def test_r3_a_list_of_some_namespaces_evicts_only_there(cache: Cache, clock: Clock) -> None:
    cache.put(make(namespace="mine"))
    cache.put(make(namespace="theirs"))
    clock.now += 1
    assert names(cache.replace("Service", ["mine"], [], clock.now)) == [("a", True)]
    assert cache.get("Service", "theirs", "a") is not None


def test_r3_a_later_list_evicts_what_an_earlier_list_brought(cache: Cache, clock: Clock) -> None:
    cache.replace("Service", None, [make()], clock.now)
    clock.now += 300
    assert names(cache.replace("Service", None, [], clock.now)) == [("a", True)]


def test_managed_fields_and_the_last_applied_copy_are_dropped_and_the_input_is_left_alone(cache: Cache) -> None:
    obj = make()
    obj["metadata"]["managedFields"] = [{"manager": "x"}]
    obj["metadata"]["annotations"] = {"kubectl.kubernetes.io/last-applied-configuration": "{}", "kept": "1"}
    cache.put(obj)
    stored = cache.get("Service", "team", "a")
    assert stored is not None
    assert "managedFields" not in stored["metadata"]
    assert stored["metadata"]["annotations"] == {"kept": "1"}
    assert obj["metadata"]["managedFields"]


def owner(manager: str, operation: str, fields: dict[str, Any], subresource: str = "") -> dict[str, Any]:
    entry = {"manager": manager, "operation": operation, "fieldsV1": fields}
    return {**entry, "subresource": subresource} if subresource else entry


REPLICAS: dict[str, Any] = {"f:spec": {"f:replicas": {}}}


def test_r1_the_owners_of_replicas_are_read_before_managed_fields_are_dropped(cache: Cache) -> None:
    obj = make("Deployment", name="m-server")
    obj["metadata"]["managedFields"] = [
        owner("conch-workload", "Apply", {"f:spec": {"f:template": {}}}),
        owner("conch-scaling", "Apply", REPLICAS, "scale"),
        owner("kubectl", "Update", REPLICAS, "scale"),
        owner("kube-controller-manager", "Update", {"f:status": {}}, "status"),
    ]
    cache.put(obj)
    want = {"conch-scaling": "Apply/scale", "kubectl": "Update/scale"}
    assert cache.replicas_owners("team", "m-server") == want
    cache.remove(obj)
    assert cache.replicas_owners("team", "m-server") == {}


def test_r1_a_manager_with_two_entries_shows_both() -> None:
    fields = [owner("x", "Apply", REPLICAS), owner("x", "Update", REPLICAS, "scale")]
    obj = make("Deployment")
    obj["metadata"]["managedFields"] = fields
    assert replicas_owners(obj) == {"x": "Apply,Update/scale"}
    assert replicas_owners(make("Deployment")) == {}


def test_of_a_pod_only_what_is_used_is_kept(cache: Cache) -> None:
    pod = make(
        "Pod",
        spec={
            "nodeName": "n1",
            "volumes": [{"name": "x"}],
            "containers": [{"name": "triton", "image": "t", "resources": {"limits": {"g": "1"}}, "env": [1]}],
        },
        status={
            "phase": "Running",
            "podIP": "10.0.0.1",
            "hostIP": "10.1.1.1",
            "conditions": [{"type": "Ready", "status": "True", "lastProbeTime": None}],
            "containerStatuses": [
                {"name": "triton", "ready": True, "restartCount": 2, "containerID": "c", "state": {}}
            ],
        },
    )
    pod["metadata"]["annotations"] = {"conch.dev/model-plan": "p", "cni.example/networks": "x"}
    cache.put(pod)
    stored = cache.get("Pod", "team", "a")
    assert stored is not None
    assert stored["spec"] == {
        "nodeName": "n1",
        "containers": [{"name": "triton", "image": "t", "resources": {"limits": {"g": "1"}}}],
    }
    assert stored["status"] == {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [{"name": "triton", "ready": True, "restartCount": 2, "state": {}}],
    }
    assert stored["metadata"]["annotations"] == {"conch.dev/model-plan": "p"}


def node(version: str, heartbeat: str, *, ready: str = "True") -> dict[str, Any]:
    return make(
        "Node",
        namespace="",
        version=version,
        spec={"podCIDR": "10.0.0.0/24", "taints": [{"key": "gpu"}]},
        status={
            "allocatable": {"nvidia.com/gpu": "7"},
            "capacity": {"nvidia.com/gpu": "8"},
            "images": [{"names": ["x"] * 50}],
            "conditions": [{"type": "Ready", "status": ready, "lastHeartbeatTime": heartbeat}],
        },
    )


def test_a_nodes_heartbeat_is_no_news_but_its_condition_is(cache: Cache) -> None:
    assert cache.put(node("1", "10:00"))
    assert not cache.put(node("2", "10:05"))
    stored = cache.get("Node", "", "a")
    assert stored is not None
    assert stored["metadata"]["resourceVersion"] == "2"
    assert stored["spec"] == {"taints": [{"key": "gpu"}]}
    assert stored["status"].keys() == {"allocatable", "capacity", "conditions"}
    assert cache.put(node("3", "10:10", ready="False"))


def test_the_empty_lists_of_go_are_no_obstacle(cache: Cache) -> None:
    pod = make("Pod", spec={"containers": None}, status={"conditions": None, "containerStatuses": None})
    pod["metadata"]["labels"] = None
    pod["metadata"]["managedFields"] = None
    assert cache.put(pod)


@pytest.mark.parametrize("kind", ["Deployment", "Pod", "Service", "InferenceService"])
def test_r1_what_a_list_drops_on_arrival_is_nothing_that_is_stored(kind: str) -> None:
    def full() -> dict[str, Any]:
        obj = make(kind)
        container = {"name": "c", "image": "i", "env": [{"name": "A"}], "restartPolicy": "Always"}
        obj |= {"spec": {"replicas": 2, "initContainers": [container]}, "status": {"phase": "Running"}}
        owns: dict[str, Any] = {"f:spec": {"f:replicas": {}, "f:selector": {}}}
        obj["metadata"]["managedFields"] = [
            {"manager": "hpa", "operation": "Update", "subresource": "scale", "time": "t", "fieldsV1": owns},
            {"manager": "x", "operation": "Apply", "fieldsV1": {"f:metadata": {}}},
        ]
        return obj

    whole, slender, namespace, name = Cache(), Cache(), "team", full()["metadata"]["name"]
    whole.put(full())
    slender.replace(kind, None, [slender.slim(full())], 1.0)
    assert whole.get(kind, namespace, name) is not None
    assert slender.get(kind, namespace, name) == whole.get(kind, namespace, name)
    assert slender.replicas_owners(namespace, name) == whole.replicas_owners(namespace, name)
    assert slender.replicas_owners(namespace, name) == ({"hpa": "Update/scale"} if kind == "Deployment" else {})
    assert "f:selector" not in json.dumps(Cache().slim(full()))
    # What is known costs no second copy, and a list of it takes nothing away.
    known = slender.slim(full())
    assert known is slender.get(kind, namespace, name)
    assert slender.replace(kind, None, [known], 2.0) == []
    assert slender.replicas_owners(namespace, name) == whole.replicas_owners(namespace, name)
