"""Operators of the tests' own: none, one that is restarted, two of which one leads."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from apiserver import ApiServer, condition
from stories import CHILDREN, create, images, left, made, replicas, served, settled, until, versions

from conch import names
from conch.kube.client import DEPLOYMENTS, INFERENCE_SERVICES, LEASES
from operators import NAMESPACE, LocalOperator, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fault_proxy import FaultProxy, Request

    from conftest import Shared
    from sandbox import Region

pytestmark = pytest.mark.cluster

Start = Callable[..., LocalOperator]
SHORT_LEASE = {"CONCH_LEASE_DURATION_S": "8", "CONCH_LEASE_RENEW_DEADLINE_S": "6", "CONCH_LEASE_RETRY_S": "1"}
LOST_EXIT_CODE = 17
SEVERAL_TICKS_S = 2.5


@pytest.fixture
def running(api: ApiServer, shared: Shared) -> LocalOperator:
    """The shared operator, started again if a test with operators of its own has stopped it."""
    del api
    return shared.lead()


def test_r17_without_its_api_server_an_operator_waits_and_ends_in_order(control_plane: Region, tmp_path: Path) -> None:
    nobody = f"http://127.0.0.1:{free_port(control_plane)}"
    operator = LocalOperator(control_plane, tmp_path, server=nobody)
    operator.start(wait=False)
    try:
        until("it to wait", lambda: "waits_for_api_server" in operator.log.read_text())
        assert operator.get("/readyz") == (503, "the cache is being filled\n")
    finally:
        code = operator.stop()
    assert code == 0, operator.log.read_text()


# --- deletion


def test_row_53_deletion_needs_no_operator(api: ApiServer, namespace: str, start: Start) -> None:
    """Neither that of a service nor that of a whole namespace."""
    whole = f"{namespace}-whole"
    operator = start()
    api.create_namespace(whole)
    for where in (namespace, whole):
        assert "finalizers" not in made(api, where)["metadata"]
    assert operator.stop() == 0
    api.delete_namespace(whole)
    api.delete(INFERENCE_SERVICES, namespace, "vision")
    until("the service to go", lambda: api.find(INFERENCE_SERVICES, namespace, "vision") is None)
    until("its children to go", lambda: not left(api, namespace, "vision"))
    until("the namespace to go", lambda: not there(api, whole))


def there(api: ApiServer, namespace: str) -> bool:
    found = api.call("GET", "/api/v1/namespaces")["items"]
    return namespace in {item["metadata"]["name"] for item in found}


@pytest.mark.usefixtures("running")
def test_row_51_a_namespace_goes_while_the_operator_runs(api: ApiServer) -> None:
    api.create_namespace("t-going-too")
    for name in ("one", "two", "three"):
        create(api, "t-going-too", name=name)
    settled(api, "t-going-too", "three")
    api.delete_namespace("t-going-too")
    until("the namespace to go", lambda: not there(api, "t-going-too"))


@pytest.mark.usefixtures("running")
def test_r4_foreground_deletion_ends_while_the_operator_runs(api: ApiServer, namespace: str, proxy: FaultProxy) -> None:
    made(api, namespace)
    mark = proxy.mark()
    api.delete(INFERENCE_SERVICES, namespace, "vision", propagation="Foreground")
    until("the service to go", lambda: api.find(INFERENCE_SERVICES, namespace, "vision") is None)
    until("its children to go", lambda: not left(api, namespace, "vision"))
    assert proxy.writes(mark, namespace=namespace) == []


@pytest.mark.usefixtures("running")
def test_row_50_row_52_a_service_that_never_started_goes_at_once(api: ApiServer, namespace: str) -> None:
    """Its claim does not exist, and neither does a node for it."""
    create(api, namespace, {"placement.nodeSelector": {"no": "such-node"}})
    until("a status", lambda: "status" in api.service(namespace, "vision"))
    api.delete(INFERENCE_SERVICES, namespace, "vision")
    until("its children to go", lambda: not left(api, namespace, "vision"))
    made(api, namespace)  # the same name is free at once


# --- restart


def test_row_24_a_restart_keeps_the_replicas_that_were_decided(api: ApiServer, namespace: str, start: Start) -> None:
    first = start("before")
    made(api, namespace, {"scaling.minReplicas": 3})
    create(api, namespace)
    until("the status", lambda: settled(api, namespace)["status"]["scaling"]["replicas"] == 3)
    first.stop()
    # While nobody looks, the Deployment goes too: only the status still knows of three.
    api.delete(DEPLOYMENTS, namespace, "vision-server")
    until("the Deployment to go", lambda: api.deployment(namespace, "vision") is None)
    start("after")
    until("the Deployment to come back", lambda: api.deployment(namespace, "vision"))
    assert replicas(api, namespace) == 3
    time.sleep(SEVERAL_TICKS_S)
    assert replicas(api, namespace) == 3


def test_r7_another_operator_version_rolls_nothing_until_the_spec_changes(
    api: ApiServer, namespace: str, proxy: FaultProxy, start: Start
) -> None:
    old = start("old", CONCH_TRITON_IMAGE="example.com/triton:old", CONCH_FETCH_IMAGE="example.com/conch:old")
    made(api, namespace)
    served(api, namespace)
    before = api.get(DEPLOYMENTS, namespace, "vision-server")
    all_before = versions(api, namespace, [resource for resource, _ in CHILDREN])
    old.stop()
    mark = proxy.mark()
    start("new", CONCH_TRITON_IMAGE="example.com/triton:new", CONCH_FETCH_IMAGE="example.com/conch:new")
    time.sleep(SEVERAL_TICKS_S)
    assert versions(api, namespace, [resource for resource, _ in CHILDREN]) == all_before
    written = {asked.resource for asked in proxy.writes(mark, namespace=namespace)}
    assert written <= {"events", "inferenceservices/status"}
    create(api, namespace, {"scaling.maxReplicas": 5})
    settled(api, namespace)
    assert images(api.get(DEPLOYMENTS, namespace, "vision-server")) == images(before)
    create(api, namespace, {"scaling.maxReplicas": 5, "resources.memory": "3Gi"})
    until("the new images", lambda: "triton:new" in str(images(api.get(DEPLOYMENTS, namespace, "vision-server"))))
    assert images(api.get(DEPLOYMENTS, namespace, "vision-server")) == {
        names.FETCH_CONTAINER: "example.com/conch:new",
        names.SERVER_CONTAINER: "example.com/triton:new",
    }


def test_row_61_a_service_replaced_by_force_keeps_its_pods(api: ApiServer, namespace: str, start: Start) -> None:
    """As `kubectl replace` and `helm --force` do: every annotation and label of the Deployment is lost."""
    start()
    made(api, namespace, {"scaling.minReplicas": 2})
    before = api.get(DEPLOYMENTS, namespace, "vision-server")
    lost = [{"op": "remove", "path": "/metadata/annotations"}]
    api.edit(DEPLOYMENTS, namespace, "vision-server", lost)
    until(
        "the annotations to be back",
        lambda: names.DESIRED_ANNOTATION in str(api.get(DEPLOYMENTS, namespace, "vision-server")),
    )
    after = api.get(DEPLOYMENTS, namespace, "vision-server")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["spec"]["template"] == before["spec"]["template"]
    assert after["spec"]["replicas"] == 2


# --- two operators


def lease(api: ApiServer) -> dict[str, Any]:
    return api.get(LEASES, NAMESPACE, names.LEASE_NAME)["spec"]  # type: ignore[no-any-return]


def writes_of(proxy: FaultProxy, mark: int, who: str) -> list[Request]:
    return [asked for asked in proxy.writes(mark) if asked.who == who]


def churn(api: ApiServer, namespace: str) -> Iterator[None]:
    """Something to write with each step: a service whose spec changes."""
    for number in range(1000):
        create(api, namespace, {"runtime.image": f"example.com/triton:{number}"})
        yield


def wait_for_takeover(api: ApiServer, namespace: str, other: LocalOperator, began: float) -> float:
    work = churn(api, namespace)
    while not other.leads():
        assert time.monotonic() - began < 90, "nobody took over"
        next(work)
        time.sleep(0.3)
    return time.monotonic() - began


LEASES_OF_LEADERS = [
    pytest.param(SHORT_LEASE, id="a short lease"),
    pytest.param({}, id="the default lease", marks=pytest.mark.long),  # its quarter of a minute shows nothing more
]


@pytest.mark.parametrize("settings", LEASES_OF_LEADERS)
def test_r17_row_21_a_killed_leader_is_succeeded_by_the_standby(
    api: ApiServer,
    namespace: str,
    proxy: FaultProxy,
    start: Start,
    *,
    record_property: Callable[[str, object], None],
    settings: dict[str, str],
) -> None:
    first = start("first", **settings)
    second = start("second", lead=False, **settings)
    mark = proxy.mark()
    made(api, namespace)
    assert (first.leads(), second.leads()) == (True, False)
    assert writes_of(proxy, mark, "second") == []
    standby = f"standby; the leader is {lease(api)['holderIdentity']}"
    until("the standby to know its leader", lambda: second.get("/readyz")[1].startswith(standby))
    killed, began = proxy.mark(), time.monotonic()
    first.signal(signal.SIGKILL)
    takeover_s = wait_for_takeover(api, namespace, second, began)
    create(api, namespace, {"runtime.image": "example.com/triton:last"})
    until("the new leader's work", lambda: "triton:last" in str(api.deployment(namespace, "vision")))
    record_property("takeover_s", round(takeover_s, 1))
    print(f"\ntakeover after kill -9 with {settings or 'the default lease'}: {takeover_s:.1f} s")  # noqa: T201 - a figure for people
    assert writes_of(proxy, killed, "second")
    assert lease(api)["leaseTransitions"] >= 1


def test_r2_a_leader_that_was_stopped_writes_nothing_when_it_goes_on(
    api: ApiServer, namespace: str, proxy: FaultProxy, start: Start
) -> None:
    first = start("stopped", **SHORT_LEASE)
    second = start("successor", lead=False, **SHORT_LEASE)
    made(api, namespace)
    first.signal(signal.SIGSTOP)
    stopped, began = proxy.mark(), time.monotonic()
    takeover_s = wait_for_takeover(api, namespace, second, began)
    print(f"\ntakeover after SIGSTOP with a lease of 8 s: {takeover_s:.1f} s")  # noqa: T201 - a figure for people
    # It wakes with work in its queue: the spec has changed meanwhile.
    create(api, namespace, {"runtime.image": "example.com/triton:last"})
    first.signal(signal.SIGCONT)
    until("it to end", lambda: not first.running())
    assert first.exit_code() == LOST_EXIT_CODE
    until("the successor's work", lambda: "triton:last" in str(api.deployment(namespace, "vision")))
    own = writes_of(proxy, stopped, "stopped")
    assert [(asked.verb, asked.resource) for asked in own if asked.at > began + 0.5] == []
    took = [
        asked for asked in proxy.since(stopped) if asked.resource == "leases" and asked.writes and asked.carried_out
    ]
    assert {asked.who for asked in took} == {"successor"}
    assert json.dumps(lease(api)["holderIdentity"]).startswith('"successor_')
    assert condition(api.service(namespace, "vision"), "Stalled")["status"] == "False"
