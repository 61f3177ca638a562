"""From apply to deletion on real Triton pods: what serves goes on serving while a spec changes, for better or worse."""

from __future__ import annotations

import contextlib
import json
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

import demo
from conch import names
from operators import NAMESPACE, wait_until
from services import (
    NO_GPU,
    Background,
    Service,
    condition,
    free_gpus,
    held_gpus,
    is_ready,
    leader,
    left_in,
    prometheus_value,
    restricted_namespace,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clusters import Clusters
    from load import Result
    from sandbox import AnyRegion

pytestmark = pytest.mark.sandbox

# Every model of these services is the sample's, on a CPU: what is tested isn't the scheduling of GPUs.
SERVING, BROKEN, ROLLING = (f"t-{word}-{uuid.uuid4().hex[:6]}" for word in ("serving", "broken", "rolling"))


@dataclass(frozen=True)
class Others:
    """Services of later tests."""

    broken: dict[str, Service]
    rolling: dict[str, Service]


@pytest.fixture(scope="module")
def others(clusters: Clusters) -> Iterator[Others]:
    """All services of this module are applied at its start, so that their starts overlap with other tests."""
    region = clusters.region(nodes=True)
    # On a busy machine a start may be late, and its replacement would be one replica more.
    one = {**NO_GPU, "scaling.maxReplicas": 1}
    yield Others(
        {name: Service(region, BROKEN, name, one) for name in BAD},
        {
            "surge": Service(region, ROLLING, "surge", one),
            "replace": Service(region, ROLLING, "replace", {"scaling.minReplicas": 2, "scaling.maxReplicas": 2}),
        },
    )
    region.kubectl("delete", "namespace", SERVING, BROKEN, ROLLING, "--wait=false", "--ignore-not-found")


@pytest.fixture
def served(quick_operator: AnyRegion, others: Others) -> Service:
    """The sample as it is, Ready, in a namespace that enforces Pod Security's `restricted`."""
    region = quick_operator
    service = Service(region, SERVING)
    if not region.kubectl("get", "namespace", SERVING, "--ignore-not-found"):
        for namespace in (SERVING, BROKEN, ROLLING):
            restricted_namespace(region, namespace)
        for each in (service, *others.broken.values(), *others.rolling.values()):
            each.apply()
    return service.wait_ready()


def test_the_sample_answers_a_real_inference_in_a_restricted_namespace(served: Service) -> None:
    labels = demo.read_labels(served.region, demo.read_sample(), SERVING)
    scores = served.infer()
    assert labels[int(scores.argmax())] == "python"
    assert scores.max() > 0.5


def test_kubectl_get_shows_ready_replicas_waiting_and_reason(served: Service) -> None:
    header, row = served.region.kubectl("get", "cisvc", served.name, "-n", SERVING).splitlines()
    assert header.split() == ["NAME", "READY", "REPLICAS", "WAITING", "REASON", "AGE"]
    assert row.split()[:3] == ["filetype", "True", "1/1"]


def test_the_children_are_the_wanted_ones_and_all_belong_to_the_service(served: Service) -> None:
    listed = served.region.get(
        "deployments,services,serviceaccounts,poddisruptionbudgets,networkpolicies",
        "-n", SERVING, "-l", f"{names.SERVICE_LABEL}={served.name}",
    )["items"]  # fmt: skip
    assert {(item["kind"], item["metadata"]["name"]) for item in listed} == {
        ("Deployment", "filetype-server"),
        ("Service", "filetype"),
        ("Service", "filetype-replicas"),
        ("ServiceAccount", "filetype-identity"),
        ("PodDisruptionBudget", "filetype-disruption"),
        ("NetworkPolicy", "filetype-network"),
    }
    uid = served.get()["metadata"]["uid"]
    for item in listed:
        (owner,) = item["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (uid, True)
    (pod,) = served.pods()
    assert not [volume for volume in pod["spec"]["volumes"] if "token" in json.dumps(volume).lower()]
    assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_the_service_says_what_happened_to_it_as_events(served: Service) -> None:
    assert served.events("Ready")
    assert not served.events("DriftRepaired")


def test_the_installed_operator_has_one_leader_of_two_and_prometheus_reads_both(quick_operator: AnyRegion) -> None:
    pods = quick_operator.get("pods", "-n", NAMESPACE)["items"]
    running = {pod["metadata"]["name"] for pod in pods if is_ready(pod)}
    assert len(running) == 2
    assert leader(quick_operator) in running
    enforced = quick_operator.get("namespace", NAMESPACE)["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    assert enforced == "restricted"
    wait_until(lambda: prometheus_value(quick_operator, "sum(conch_leader)") == 1, 30, "one leader in Prometheus", 1)
    assert prometheus_value(quick_operator, 'count(up{job="conch"} == 1)') == 2


# --- a spec that can't become ready


@dataclass(frozen=True)
class Bad:
    """A change that breaks a service, and what must be said of it."""

    change: dict[str, Any]
    reason: str
    says: tuple[str, ...]


BAD = {
    "image": Bad(
        {"runtime.image": "sandbox.local/triton:none"},
        "ImagePullFailed",
        ("sandbox.local/triton:none", "spec.runtime.image"),
    ),
    "path": Bad(
        {"models[0].source.uri": "image://sandbox.local/models/filetype:1#/nowhere"},
        "FetchFailed",
        ("has no /nowhere", "filetype", "correct the path in spec.models[0].source.uri"),
    ),
    "file": Bad(
        {"models[0].source.uri": "image://sandbox.local/models/filetype:1#/filetype/labels.txt"},
        "ModelLoadFailed",
        ("Protobuf parsing failed", "filetype"),
    ),
    "digest": Bad(
        {"models[0].source.digest": "sha256:" + "0" * 64},
        "FetchFailed",
        ("has digest sha256:", "not sha256:0000", "correct spec.models[0].source.digest"),
    ),
}


@pytest.fixture
def changed(served: Service, others: Others) -> dict[str, Service]:
    """Four services on the CPU, all Ready, then each changed into something that can't become ready."""
    del served
    for name, service in others.broken.items():
        if service.get()["metadata"]["generation"] == 1:
            service.wait_ready()
            service.apply(BAD[name].change)
    return others.broken


@pytest.mark.parametrize("name", BAD)
def test_a_change_that_can_not_become_ready_leaves_the_old_pods_serving_and_says_why(
    changed: dict[str, Service], name: str
) -> None:
    service, bad = changed[name], BAD[name]
    message = service.wait_condition("RolloutBlocked", "True", says=bad.says[0])
    for words in bad.says:
        assert words in message
    status = service.status()
    assert condition(status, "RolloutBlocked")["reason"] == bad.reason
    assert condition(status, "Ready")["status"] == "True"
    assert condition(status, "Ready")["observedGeneration"] == 1
    assert condition(status, "Reconciling")["status"] == "True"
    assert service.infer().max() > 0.5


def test_a_service_whose_change_was_taken_back_is_settled_again(changed: dict[str, Service]) -> None:
    service = changed["digest"]
    service.apply({"models[0].source.digest": None}).wait_ready()
    assert condition(service.status(), "RolloutBlocked")["status"] == "False"


# --- a good change


@dataclass(frozen=True)
class Rolled:
    """A service whose spec was changed under load while no GPU was free."""

    service: Service
    before: frozenset[str]
    result: Result
    rollout: dict[str, str]

    def assert_without_loss(self) -> None:
        """Every request was answered, and no pod of before is left."""
        assert self.result.total > 20
        assert self.result.errors == {}
        assert not self.before & uids(self.service)


def uids(service: Service) -> frozenset[str]:
    """Of its pods."""
    return frozenset(pod["metadata"]["uid"] for pod in service.pods())


def wait_only(service: Service, replicas: int) -> None:
    """Until the pods that were told to go are gone."""
    wait_until(lambda: len(service.pods()) == replicas, 60, "the old pods' end", 0.5)


CHANGE = {"models[0].parameters.sandbox_compute_ms": "20"}


@pytest.fixture(scope="module")
def finished() -> dict[str, Rolled]:
    """What was rolled already, for the tests that look at it."""
    return {}


@pytest.fixture
def rolled(
    quick_operator: AnyRegion, served: Service, others: Others, finished: dict[str, Rolled]
) -> dict[str, Rolled]:
    """Once: change a parameter of two services at the same time while requests come in, until only new pods serve."""
    del served
    if finished:
        return finished
    replicas = {"surge": 1, "replace": 2}
    for name, count in replicas.items():
        others.rolling[name].wait_ready(count)
    before = {name: uids(others.rolling[name]) for name in replicas}
    with contextlib.ExitStack() as running:
        running.enter_context(held_gpus(quick_operator, "default", free_gpus(quick_operator)))
        loads = {
            name: running.enter_context(Background(others.rolling[name].url(), rate=5 * count))
            for name, count in replicas.items()
        }
        for name in replicas:
            others.rolling[name].apply(CHANGE)
        for name, count in replicas.items():
            wait_only(others.rolling[name].wait_ready(count), count)
    for name, load in loads.items():
        service = others.rolling[name]
        finished[name] = Rolled(service, before[name], load.result(), service.status().get("rollout", {}))
    return finished


def test_a_good_change_rolls_under_load_without_a_failed_request(rolled: dict[str, Rolled]) -> None:
    rolled["surge"].assert_without_loss()
    assert rolled["surge"].rollout["strategy"] == "Surge"


def test_row_66_without_a_spare_gpu_pods_are_replaced_one_at_a_time_and_status_says_so(
    rolled: dict[str, Rolled],
) -> None:
    rolled["replace"].assert_without_loss()
    rollout = rolled["replace"].rollout
    assert rollout["strategy"] == "Replace"
    assert "No matching nvidia.com/gpu is free" in rollout["reason"]


def test_rule_r12_one_replica_without_a_spare_gpu_serves_on_and_status_says_why_the_rollout_waits(
    quick_operator: AnyRegion, served: Service
) -> None:
    with held_gpus(quick_operator, "default", free_gpus(quick_operator)):
        served.apply({"models[0].parameters.sandbox_compute_ms": "90"})
        message = served.wait_condition("RolloutBlocked", "True", says="none is free")
        assert "The old pods serve on." in message
        status = served.status()
        assert status["rollout"]["strategy"] == "Surge"
        assert "only one replica serves" in status["rollout"]["reason"]
        assert served.infer().max() > 0.5
    served.wait_ready()
    assert condition(served.status(), "RolloutBlocked")["status"] == "False"


# --- the end; the last test here, as it deletes what the others use


def test_deletion_removes_everything_pods_included(served: Service) -> None:
    assert left_in(served.region, SERVING)
    served.delete(wait=True)
    wait_until(lambda: not left_in(served.region, SERVING), 90, "nothing to be left", 1)
