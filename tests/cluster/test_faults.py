"""Answers that fail, connections that break, watches that lie: the reconcile converges all the same."""

from __future__ import annotations

import gzip
import json
import time
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from apiserver import TIMEOUT_S, ApiServer, condition
from stories import create, images, left, made, missing, settled, until

from conch import names
from conch.kube.client import DEPLOYMENTS, INFERENCE_SERVICES, SERVICES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fault_proxy import FaultProxy

    from operators import LocalOperator
    from sandbox import Region

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("leader")]

FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("409 on a child", {"verb": "patch", "resource": "deployments", "status": 409, "times": 2}),
    ("409 on the status", {"verb": "patch", "resource": "inferenceservices/status", "status": 409, "times": 2}),
    ("429 with Retry-After", {"verb": "patch", "status": 429, "retry_after_s": 1, "times": 3}),
    ("500 on writes", {"verb": "patch", "status": 500, "times": 4}),
    ("500 on reads", {"verb": "get", "status": 500, "times": 4}),
    ("requests that break off", {"verb": "patch", "drop": "request", "times": 4}),
    ("answers that break off", {"verb": "patch", "drop": "answer", "times": 4}),
    ("a slow server", {"verb": "patch", "delay_s": 0.5, "times": 12}),
    ("500 on the handshake", {"resource": "deployments/scale", "status": 500, "times": 2}),
]


@pytest.fixture(scope="module")
def cases(api: ApiServer, proxy: FaultProxy, leader: LocalOperator) -> Iterator[dict[str, Future[None]]]:
    """Every fault in a namespace of its own, all at once."""
    del leader
    with ThreadPoolExecutor(len(FAULTS)) as pool:
        yield {
            what: pool.submit(converge, api.region, proxy, f"t-fault-{i}", fault)
            for i, (what, fault) in enumerate(FAULTS)
        }


def converge(region: Region, proxy: FaultProxy, namespace: str, fault: dict[str, Any]) -> None:
    """A service is created and changed while its requests fail; in the end all is as the last spec wants."""
    api = ApiServer(region)
    api.create_namespace(namespace)
    with proxy.fault(namespace=namespace, **fault) as injected:
        create(api, namespace, {"scaling.minReplicas": 2, "runtime.image": "example.com/triton:1"})
        until("the fault", lambda: injected.hits)
        settled(api, namespace)
        create(api, namespace, {"scaling.minReplicas": 2, "runtime.image": "example.com/triton:2"})
        settled(api, namespace)

    def is_last() -> bool:
        deployment = api.get(DEPLOYMENTS, namespace, names.deployment("vision"))
        return images(deployment)[names.SERVER_CONTAINER] == "example.com/triton:2"

    until("the last spec", is_last)
    assert missing(api, namespace, "vision") == []
    deployment = api.get(DEPLOYMENTS, namespace, names.deployment("vision"))
    assert deployment["spec"]["replicas"] == 2
    until("an untroubled status", lambda: condition(api.service(namespace, "vision"), "Ready")["reason"] == "Starting")
    api.delete_namespace(namespace)
    api.close()


@pytest.mark.parametrize("what", [row[0] for row in FAULTS])
def test_the_reconcile_converges_in_spite_of(what: str, cases: dict[str, Future[None]]) -> None:
    cases[what].result(timeout=180)


def test_a_refused_child_is_told_in_the_status_and_made_once_it_is_allowed(
    api: ApiServer, namespace: str, proxy: FaultProxy
) -> None:
    with proxy.fault(namespace=namespace, verb="patch", resource="deployments", status=403):
        create(api, namespace)
        found = until("the refusal", lambda: refused(api, namespace))
        assert "injected by the tests' proxy" in found["message"]
        assert condition(api.service(namespace, "vision"), "Stalled")["status"] == "False"
    create(api, namespace, {"scaling.maxReplicas": 5})
    settled(api, namespace)


def refused(api: ApiServer, namespace: str) -> Any:
    found = condition(api.service(namespace, "vision"), "Ready")
    return found if found.get("reason") == "ApiError" else None


def test_dropped_watches_lose_nothing(api: ApiServer, namespace: str, proxy: FaultProxy) -> None:
    made(api, namespace)
    with proxy.fault(verb="watch", status=500, times=6):
        assert proxy.cut_watches() > 5
        create(api, namespace, {"scaling.minReplicas": 2, "runtime.image": "example.com/triton:2"})
        api.delete(SERVICES, namespace, "vision")
        create(api, namespace, name="second")
    settled(api, namespace)
    settled(api, namespace, "second")
    until("the new template", lambda: "example.com/triton:2" in str(api.deployment(namespace, "vision")))


def test_a_compressed_answer_comes_through_as_it_is(api: ApiServer, namespace: str, proxy: FaultProxy) -> None:
    """Of the tests' own proxy: the API server compresses what is over 128 KiB, such as a LIST of many services."""
    path, large = f"/api/v1/namespaces/{namespace}/configmaps", {"text": "x" * 200_000}
    api.call("POST", path, {"metadata": {"name": "large"}, "data": large})
    asked = urllib.request.Request(
        f"{proxy.address('compressed')}{path}", headers={**api.credentials(), "Accept-Encoding": "gzip"}
    )
    with api.region.network(), urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
        assert answer.headers["Content-Encoding"] == "gzip"
        found = json.loads(gzip.decompress(answer.read()))
    assert large in [item["data"] for item in found["items"]]


def test_r3_a_child_deleted_during_a_410_is_missed_and_comes_back(
    api: ApiServer, namespace: str, proxy: FaultProxy
) -> None:
    made(api, namespace)
    with proxy.fault(verb="watch", resource="services", status=500):
        proxy.cut_watches("services")
        api.delete(SERVICES, namespace, "vision")
        time.sleep(1)
        with proxy.fault(verb="watch", resource="services", status=410, times=1) as gone:
            until("the 410", lambda: gone.hits)
            until("the Service to come back", lambda: api.clients_service(namespace, "vision") is not None)


def test_r3_a_service_deleted_during_a_410_is_evicted(api: ApiServer, namespace: str, proxy: FaultProxy) -> None:
    made(api, namespace)
    with proxy.fault(verb="watch", resource="inferenceservices", status=500):
        proxy.cut_watches("inferenceservices")
        api.delete(INFERENCE_SERVICES, namespace, "vision")
        time.sleep(1)
        with proxy.fault(verb="watch", resource="inferenceservices", status=410, times=1) as gone:
            until("the 410", lambda: gone.hits)
            until("the children to go", lambda: not left(api, namespace, "vision"))
    until("the ghost to write no more", lambda: quiet(proxy, namespace))
    assert left(api, namespace, "vision") == []


def quiet(proxy: FaultProxy, namespace: str) -> bool:
    mark = proxy.mark()
    time.sleep(2)
    return not [asked for asked in proxy.writes(mark, namespace=namespace) if asked.resource != "events"]


def test_r17_an_api_server_that_is_away_for_a_while_ends_nothing(
    api: ApiServer, namespace: str, proxy: FaultProxy, leader: LocalOperator
) -> None:
    """Shorter than the Lease's renew deadline, or the operator would rightly end."""
    made(api, namespace)
    pid = leader.pid
    with proxy.fault(who="shared", drop="request"):
        proxy.cut_watches()
        create(api, namespace, {"scaling.minReplicas": 2})
        time.sleep(4)
    until("the step", lambda: api.get(DEPLOYMENTS, namespace, "vision-server")["spec"]["replicas"] == 2)
    assert leader.running()
    assert leader.pid == pid
    assert leader.get("/healthz")[0] == 200
