"""Who may write replicas, and what happens when others do (R1, R2) on a real API server, without Prometheus."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from apiserver import ApiServer, condition, managers
from stories import create, made, replicas, settled, until

from conch import names
from conch.kube.client import HORIZONTAL_POD_AUTOSCALERS, SCALED_OBJECTS
from makers import make_service

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fault_proxy import FaultProxy

    from conftest import Shared

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("leader")]

HPA = "HorizontalPodAutoscaler"
SEVERAL_TICKS_S = 2.0


def owners(api: ApiServer, namespace: str) -> set[str]:
    deployment = api.deployment(namespace, "vision")
    assert deployment is not None
    return managers(deployment, "spec.replicas")


def hpa(namespace: str) -> dict[str, Any]:
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": names.deployment("vision")}
    return {
        "apiVersion": HORIZONTAL_POD_AUTOSCALERS.api_version,
        "kind": HPA,
        "metadata": {"name": "theirs", "namespace": namespace},
        "spec": {"scaleTargetRef": target, "minReplicas": 1, "maxReplicas": 9},
    }


def scaled_object(namespace: str) -> dict[str, Any]:
    return {
        "apiVersion": SCALED_OBJECTS.api_version,
        "kind": "ScaledObject",
        "metadata": {"name": "theirs", "namespace": namespace},
        "spec": {"scaleTargetRef": {"name": names.deployment("vision")}},
    }


Rivals = dict[str, tuple[Any, dict[str, Any]]]


@pytest.fixture(scope="module", autouse=True)
def rivals(api: ApiServer, shared: Shared) -> Iterator[Rivals]:
    """Two services whose Deployments other autoscalers target, from before the first test on.

    A condition may take a quarter of a minute to change (R11); the other tests run meanwhile.
    """
    shared.lead()
    rivals: Rivals = {
        "t-hpa": (HORIZONTAL_POD_AUTOSCALERS, hpa("t-hpa")),
        "t-keda": (SCALED_OBJECTS, scaled_object("t-keda")),
    }
    for where, (_, rival) in rivals.items():
        api.create_namespace(where)
        made(api, where)
        until("the handshake", lambda: names.SCALING_MANAGER in owners(api, where))  # noqa: B023 - awaited here
        api.create(rival)
    yield rivals
    for where in rivals:
        api.delete_namespace(where)


def limited(api: ApiServer, namespace: str, reason: str) -> Any:
    found = condition(api.service(namespace, "vision"), "ScalingLimited")
    return found if found.get("reason") == reason else None


def test_r1_replicas_are_handed_to_the_scaler_right_after_creation(api: ApiServer, namespace: str) -> None:
    made(api, namespace, {"scaling.minReplicas": 2})
    until("the handshake", lambda: names.SCALING_MANAGER in owners(api, namespace))
    assert replicas(api, namespace) == 2


def test_r1_row_35_row_38_a_spec_update_never_resets_replicas(
    api: ApiServer, namespace: str, proxy: FaultProxy
) -> None:
    made(api, namespace, {"scaling.minReplicas": 3})
    until("the handshake", lambda: names.SCALING_MANAGER in owners(api, namespace))
    mark = proxy.mark()
    create(api, namespace, {"scaling.minReplicas": 1, "runtime.image": "example.com/triton:2"})
    settled(api, namespace)
    until("the new template", lambda: "example.com/triton:2" in str(api.deployment(namespace, "vision")))
    time.sleep(SEVERAL_TICKS_S)
    # Nothing is known of the load, so nothing is reduced either.
    assert replicas(api, namespace) == 3
    applied = [
        asked.body
        for asked in proxy.writes(mark, namespace=namespace)
        if asked.resource == "deployments" and asked.query.get("fieldManager") == names.WORKLOAD_MANAGER
    ]
    assert applied
    assert all("replicas" not in body["spec"] for body in applied)


def test_r1_row_40_what_a_person_scaled_holds_and_is_then_taken_back(api: ApiServer, namespace: str) -> None:
    made(api, namespace, {"scaling.scaleDown.hold": "6s"})
    until("the handshake", lambda: names.SCALING_MANAGER in owners(api, namespace))
    api.region.kubectl("-n", namespace, "scale", "deploy/vision-server", "--replicas=3")
    found = until("the condition", lambda: limited(api, namespace, "PersonScaled"))
    assert found["message"] == "Kubectl changed replicas; this holds for scaleDown.hold and is then taken back."
    assert replicas(api, namespace) == 3
    until("the event", lambda: api.events(namespace, "ReplicasSetByHand"))
    until("the ownership to be taken back", lambda: names.SCALING_MANAGER in owners(api, namespace))
    until("the event", lambda: api.events(namespace, "ReplicasTakenBack"))
    # Taken back at the value that it has: without metrics nothing is reduced.
    assert replicas(api, namespace) == 3


def test_row_36_row_39_beside_another_autoscaler_conch_stops_and_names_it(
    api: ApiServer, proxy: FaultProxy, rivals: Rivals
) -> None:
    for where, (_, rival) in rivals.items():
        found = until("the condition", lambda: limited(api, where, "SecondScaler"))  # noqa: B023 - awaited here
        assert found["message"].startswith(f"{rival['kind']} theirs also scales this Deployment")
    mark = proxy.mark()
    for where in rivals:
        for count in (3, 4):
            api.scale(where, "vision", count, manager="horizontal-pod-autoscaler")
            create(api, where, {"runtime.image": f"example.com/triton:{count}"})
            until("the new template", lambda: f"triton:{count}" in str(api.deployment(where, "vision")))  # noqa: B023
            assert replicas(api, where) == count
    time.sleep(SEVERAL_TICKS_S)
    for where, (resource, rival) in rivals.items():
        assert replicas(api, where) == 4
        assert scale_writes(proxy, mark, where) == []
        kept = api.get(resource, where, "theirs")
        assert kept["spec"] == {**kept["spec"], **rival["spec"]}
        assert not any("conch" in entry["manager"] for entry in kept["metadata"]["managedFields"])
        api.delete(resource, where, "theirs")


def test_row_37_with_mode_external_replicas_are_left_to_the_other_scaler(
    api: ApiServer, namespace: str, proxy: FaultProxy
) -> None:
    made(api, namespace, {"scaling.mode": "External", "scaling.minReplicas": 2})
    mark = proxy.mark()
    api.scale(namespace, "vision", 4, manager="keda")
    create(api, namespace, {"scaling.mode": "External", "runtime.image": "example.com/triton:2"})
    settled(api, namespace)
    until("the new template", lambda: "example.com/triton:2" in str(api.deployment(namespace, "vision")))
    time.sleep(SEVERAL_TICKS_S)
    assert replicas(api, namespace) == 4
    assert scale_writes(proxy, mark, namespace) == []


def test_r2_a_scale_decided_on_an_old_view_is_dropped(api: ApiServer, namespace: str, proxy: FaultProxy) -> None:
    made(api, namespace, {"scaling.maxReplicas": 9})
    until("the handshake", lambda: names.SCALING_MANAGER in owners(api, namespace))
    mark = proxy.mark()
    with proxy.fault(verb="patch", resource="deployments/scale", namespace=namespace, delay_s=2.0) as fault:
        create(api, namespace, {"scaling.minReplicas": 3, "scaling.maxReplicas": 9})
        until("the write to be on its way", lambda: fault.hits)
        api.scale(namespace, "vision", 7)
        until("its refusal", lambda: scale_writes(proxy, mark, namespace))
    time.sleep(SEVERAL_TICKS_S)
    first, *more = scale_writes(proxy, mark, namespace)
    assert first.body["metadata"]["resourceVersion"]
    assert first.status == 409
    assert more == []
    assert replicas(api, namespace) == 7


def scale_writes(proxy: FaultProxy, mark: int, namespace: str) -> list[Any]:
    return [asked for asked in proxy.writes(mark, namespace=namespace) if asked.resource == "deployments/scale"]


def test_r11_one_step_is_one_write_and_few_of_status(api: ApiServer, namespace: str, proxy: FaultProxy) -> None:
    made(api, namespace)
    until("the handshake", lambda: names.SCALING_MANAGER in owners(api, namespace))
    time.sleep(SEVERAL_TICKS_S)
    mark = proxy.mark()
    api.apply(make_service({"scaling.minReplicas": 3}, namespace=namespace))
    until("the step", lambda: replicas(api, namespace) == 3)
    time.sleep(SEVERAL_TICKS_S)
    asked = [write.resource for write in proxy.writes(mark, namespace=namespace)]
    assert asked.count("deployments/scale") == 1
    assert asked.count("inferenceservices/status") <= 5
    assert "deployments" not in asked


def test_row_39_once_the_other_autoscaler_is_gone_the_condition_ends(api: ApiServer, rivals: Rivals) -> None:
    """Last here: it takes a quarter of a minute from their deletion, in which the other tests run."""
    for where, (resource, _) in rivals.items():
        if api.find(resource, where, "theirs") is not None:
            api.delete(resource, where, "theirs")
        until("the condition to end", lambda: not limited(api, where, "SecondScaler"))  # noqa: B023 - awaited here
