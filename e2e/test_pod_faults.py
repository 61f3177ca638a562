"""Pods and GPUs fail under real Triton servers; the service comes back, and its status says what it lacks."""

from __future__ import annotations

import threading
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from conch import names
from operators import wait_until
from services import (
    NO_GPU,
    SLOW,
    SLOW_CAPACITY,
    Background,
    Service,
    Trail,
    condition,
    free_gpus,
    held_gpus,
    is_ready,
    kill_container,
    restricted_namespace,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    import numpy as np
    import numpy.typing as npt

    from clusters import Clusters
    from sandbox import AnyRegion

pytestmark = pytest.mark.sandbox

FAULTS = f"t-faults-{uuid.uuid4().hex[:6]}"
BESIDE_LIMIT_S = 300.0
BAD_FILE = "image://sandbox.local/models/filetype:1#/filetype/labels.txt"


@pytest.fixture(scope="module")
def services(clusters: Clusters) -> Iterator[dict[str, Service]]:
    """Everything that these tests use, applied at once, so that starts overlap."""
    region = clusters.region(nodes=True)
    restricted_namespace(region, FAULTS)
    fields = {
        "killed": {**NO_GPU, "scaling.minReplicas": 2, "scaling.maxReplicas": 2},
        "broken": {**NO_GPU, "models[0].source.uri": BAD_FILE},
        "long": {**NO_GPU, "models[0].parameters.sandbox_compute_ms": "8000"},
        "gpu": SLOW,
        "sick": {**SLOW, "scaling.maxReplicas": 1},
    }
    yield {name: Service(region, FAULTS, name, change) for name, change in fields.items()}
    region.kubectl("delete", "namespace", FAULTS, "--wait=false", "--ignore-not-found")


@pytest.fixture
def running(quick_operator: AnyRegion, services: dict[str, Service]) -> dict[str, Service]:
    """The same, applied."""
    if not quick_operator.get(names.SERVICE_PLURAL, "-n", FAULTS)["items"]:
        for service in services.values():
            service.apply()
    return services


def lose_a_server(service: Service) -> None:
    """A server is killed under load; it is replaced, and only what it held may fail."""
    service.wait_ready(2)
    victim = next(pod["metadata"]["name"] for pod in service.pods() if is_ready(pod))
    rate = 10
    with Background(service.url(), rate=rate) as load:
        time.sleep(2)
        kill_container(service.region, FAULTS, victim, names.SERVER_CONTAINER)
        service.wait("the loss to be seen", lambda status: status.get("replicas", {}).get("ready") == 1, 30)
        service.wait_ready(2)
        since_s = load.load.elapsed_s
        time.sleep(3)
    result = load.result()
    print(f"killed under load: {result.failed} of {result.total} requests failed: {result.errors}")
    # Without a router, connections go to the dead pod until its endpoint is gone, which the kubelet's probes decide.
    assert result.failed < result.total / 2
    assert [record for record in result.failures if record.start_s > since_s] == []
    killed = next(pod for pod in service.pods() if pod["metadata"]["name"] == victim)
    assert killed["status"]["containerStatuses"][0]["restartCount"] == 1
    assert service.infer().max() > 0.5


def delete_a_working_pod(service: Service) -> None:
    """A pod is deleted while it works on a request; it answers first."""
    service.wait_ready()
    (pod,) = service.pods()
    answers: list[npt.NDArray[np.float32]] = []
    asking = threading.Thread(target=lambda: answers.append(service.infer()))
    asking.start()
    time.sleep(2)
    service.region.kubectl("delete", "pod", pod["metadata"]["name"], "-n", FAULTS, "--wait=false")
    asking.join(30)
    assert len(answers) == 1
    assert answers[0].max() > 0.5
    wait_until(
        lambda: pod["metadata"]["name"] not in {p["metadata"]["name"] for p in service.pods()}, 60, "its end", 0.5
    )
    service.wait_ready()


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    """For what runs beside the tests; the module ends when it has ended."""
    with ThreadPoolExecutor(2, "beside") as pool:
        yield pool


@pytest.fixture(scope="module")
def begun() -> dict[str, Future[None]]:
    """What was begun already."""
    return {}


@pytest.fixture
def beside(
    running: dict[str, Service], threads: ThreadPoolExecutor, begun: dict[str, Future[None]]
) -> dict[str, Future[None]]:
    """What happens to services without GPUs, begun once, beside the tests of those that want one."""
    if not begun:
        begun["killed"] = threads.submit(lose_a_server, running["killed"])
        begun["deleted"] = threads.submit(delete_a_working_pod, running["long"])
    return begun


def all_held(region: AnyRegion) -> AbstractContextManager[None]:
    """Nothing is free."""
    return held_gpus(region, "default", free_gpus(region))


@pytest.mark.usefixtures("beside")
def test_row_82_a_pod_without_a_gpu_is_explained_with_what_is_free_and_no_more_are_ordered(
    running: dict[str, Service],
) -> None:
    service = running["gpu"].wait_ready()
    with Background(service.url(), rate=1) as load, Trail(service) as trail:
        with all_held(service.region):
            load.rate(1.6 * SLOW_CAPACITY)
            status = service.wait("a pod to wait", lambda found: found.get("gpus", {}).get("waiting"))
            began = time.monotonic()
            (waiting,) = status["gpus"]["waiting"]
            assert waiting["reason"] == "NoFreeAccelerator"
            assert "waits for 1 nvidia.com/gpu" in waiting["message"]
            assert status["gpus"]["perReplica"] == 1
            service.wait("what is free", lambda found: found.get("gpus", {}).get("free") == 0, 30)
            message = service.wait_condition("ScalingLimited", "True", says="no more are ordered")
            assert "nvidia.com/gpu" in message
            time.sleep(max(0.0, 6 - (time.monotonic() - began)))
            assert trail.steps == [1, 2]
        service.wait("the waiting pod to serve", lambda found: found.get("replicas", {}).get("ready", 0) >= 2)
        load.rate(1)
    assert load.result().errors == {}
    service.wait("nothing to wait", lambda found: not found["gpus"].get("waiting"), 30)


def test_a_server_killed_under_load_is_replaced_and_only_what_it_held_may_fail(
    beside: dict[str, Future[None]],
) -> None:
    beside["killed"].result(BESIDE_LIMIT_S)


def test_row_72_a_deleted_pod_first_answers_what_it_works_on(beside: dict[str, Future[None]]) -> None:
    beside["deleted"].result(BESIDE_LIMIT_S)


def test_row_59_a_service_in_a_crash_loop_is_not_ready_and_quotes_triton(running: dict[str, Service]) -> None:
    service = running["broken"]
    message = service.wait_condition("Ready", "False", says="Protobuf parsing failed")
    assert "Model \"filetype\" can't be loaded: its file isn't a valid ONNX model" in message
    status = service.status()
    assert condition(status, "Ready")["reason"] == "ModelLoadFailed"
    (model,) = status["models"]
    assert (model["ready"], "isn't a valid ONNX model" in model["message"]) == (False, True)
    assert condition(status, "Stalled")["status"] == "False"
    assert status["observedGeneration"] == 1


def test_a_gpu_that_fails_is_not_used_again_and_the_lack_is_explained(running: dict[str, Service]) -> None:
    service = running["sick"].wait_ready()
    region = service.region
    (pod,) = service.pods()
    name = pod["metadata"]["name"]
    device = region.kubectl("exec", "-n", FAULTS, name, "-c", "triton", "--", "printenv", "NVIDIA_VISIBLE_DEVICES")
    index = int(device.strip().rpartition("-")[2])
    with all_held(region):
        whole = region.allocatable_gpus()
        region.gpus.set_healthy(index, healthy=False)
        wait_until(lambda: region.allocatable_gpus() == whole - 1, 30, "the node to offer one less")
        region.kubectl("delete", "pod", name, "-n", FAULTS, "--wait=false")
        message = service.wait_condition("Ready", "False", says="nvidia.com/gpu")
        assert "none is free" in message
        assert condition(service.status(), "Ready")["reason"] == "NoFreeAccelerator"
        region.gpus.set_healthy(index, healthy=True)
        service.wait_ready()
