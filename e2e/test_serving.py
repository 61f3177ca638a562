"""From apply to deletion on real Triton pods: what serves goes on serving while a spec changes, for better or worse."""

from __future__ import annotations

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
    from contextlib import AbstractContextManager

    from clusters import Clusters
    from load import Result
    from sandbox import Region

pytestmark = pytest.mark.sandbox

# Every model of these services is the sample's, on a CPU: what is tested isn't the scheduling of GPUs.
SERVING, BROKEN, ROLLING = (f"t-{word}-{uuid.uuid4().hex[:6]}" for word in ("serving", "broken", "rolling"))


@pytest.fixture
def served(quick_operator: Region) -> Service:
    """The sample as it is, Ready, in a namespace that enforces Pod Security's `restricted`."""
    service = Service(quick_operator, SERVING)
    if not quick_operator.kubectl("get", "namespace", SERVING, "--ignore-not-found"):
        restricted_namespace(quick_operator, SERVING)
        service.apply()
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


def test_the_installed_operator_has_one_leader_of_two_and_prometheus_reads_both(quick_operator: Region) -> None:
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
        ("has no /nowhere", "filetype", "correct the path in source.uri"),
    ),
    "file": Bad(
        {"models[0].source.uri": "image://sandbox.local/models/filetype:1#/filetype/labels.txt"},
        "ServerFailed",
        ("Protobuf parsing failed", "filetype"),
    ),
    "digest": Bad(
        {"models[0].source.digest": "sha256:" + "0" * 64},
        "FetchFailed",
        ("has digest sha256:", "not sha256:0000", "correct the digest"),
    ),
}


@pytest.fixture(scope="module")
def broken(clusters: Clusters) -> dict[str, Service]:
    """Four services on the CPU, all Ready, then each changed into something that can't become ready."""
    region = clusters.region(nodes=True)
    restricted_namespace(region, BROKEN)
    return {name: Service(region, BROKEN, name, NO_GPU).apply() for name in BAD}


@pytest.fixture
def changed(quick_operator: Region, broken: dict[str, Service]) -> dict[str, Service]:
    """The same, once the bad change is applied to all of them."""
    del quick_operator
    for name, service in broken.items():
        if service.get()["metadata"]["generation"] == 1:
            service.wait_ready()
            service.apply(BAD[name].change)
    return broken


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
    """A service whose spec was changed under load."""

    service: Service
    before: frozenset[str]
    result: Result
    rollout: dict[str, str]


def roll(service: Service, replicas: int) -> Rolled:
    """Change a model's parameter while requests come in, until only new pods serve."""
    before = frozenset(pod["metadata"]["uid"] for pod in service.pods())
    with Background(service.url(), rate=5) as load:
        service.apply({"models[0].parameters.sandbox_compute_ms": "20"})
        service.wait_ready(replicas)
        wait_until(lambda: len(service.pods()) == replicas, 60, "the old pods to be gone", 0.5)
    return Rolled(service, before, load.result(), service.status().get("rollout", {}))


def assert_no_request_failed(result: Result) -> None:
    """Zero, and the errors when it isn't."""
    assert result.total > 20
    assert result.errors == {}


def test_a_good_change_rolls_under_load_without_a_failed_request(quick_operator: Region) -> None:
    restricted_namespace(quick_operator, ROLLING)
    service = Service(quick_operator, ROLLING, "surge", NO_GPU).apply().wait_ready()
    rolled = roll(service, 1)
    assert_no_request_failed(rolled.result)
    assert rolled.rollout["strategy"] == "Surge"
    assert not rolled.before & {pod["metadata"]["uid"] for pod in service.pods()}


def test_row_66_without_a_spare_gpu_pods_are_replaced_one_at_a_time_and_status_says_so(quick_operator: Region) -> None:
    restricted_namespace(quick_operator, ROLLING)
    service = Service(quick_operator, ROLLING, "replace", {"scaling.minReplicas": 2}).apply().wait_ready(2)
    with held_all_gpus(quick_operator):
        rolled = roll(service, 2)
    assert_no_request_failed(rolled.result)
    assert rolled.rollout["strategy"] == "Replace"
    assert "No matching nvidia.com/gpu is free" in rolled.rollout["reason"]
    assert not rolled.before & {pod["metadata"]["uid"] for pod in service.pods()}


def held_all_gpus(region: Region) -> AbstractContextManager[None]:
    """Nothing is free."""
    return held_gpus(region, "default", free_gpus(region))


def test_rule_r12_one_replica_without_a_spare_gpu_serves_on_and_status_says_why_the_rollout_waits(
    quick_operator: Region, served: Service
) -> None:
    with held_all_gpus(quick_operator):
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


@pytest.fixture(scope="module", autouse=True)
def _away(clusters: Clusters) -> Iterator[None]:
    yield
    region = clusters.region(nodes=True)
    region.kubectl("delete", "namespace", SERVING, BROKEN, ROLLING, "--wait=false", "--ignore-not-found")
