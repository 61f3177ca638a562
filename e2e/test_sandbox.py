"""The sandbox itself: a real node, a real Triton pod, and nothing left behind however it ends."""

import json
import signal
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from clusters import Clusters
from sandbox import AnyRegion, Sandbox, SandboxError, binaries, observers, prometheus
from sandbox.images import FILETYPE, TRITON
from sandbox.namespaces import wait_for
from sandbox.pod_component import PodComponent
from sandbox.progress import quiet

pytestmark = pytest.mark.sandbox

CONFIG = """
backend: "onnxruntime"
max_batch_size: 16
dynamic_batching { max_queue_delay_microseconds: 1000 }
instance_group [ { kind: KIND_CPU count: 1 } ]
parameters: { key: "sandbox_compute_ms" value: { string_value: "20" } }
"""
LAY_OUT = (
    "import os, shutil; shutil.copytree('/source/1', '/models/filetype/1');"
    "open('/models/filetype/config.pbtxt', 'w').write(os.environ['CONFIG'])"
)


def triton_objects(name: str) -> list[dict[str, Any]]:
    """A Triton pod by hand with the restrictions that production sets, and a Service that Prometheus discovers."""
    labels = {"app": name}
    models, tmp = {"name": "models", "mountPath": "/models"}, {"name": "tmp", "mountPath": "/tmp"}
    restricted = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": labels},
        "spec": {
            "terminationGracePeriodSeconds": 5,
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "fsGroup": 1000,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "initContainers": [
                {
                    "name": "lay-out",
                    "image": TRITON,
                    "command": ["python3", "-c", LAY_OUT],
                    "env": [{"name": "CONFIG", "value": CONFIG}],
                    "securityContext": restricted,
                    "volumeMounts": [models, {"name": "source", "mountPath": "/source", "subPath": "filetype"}],
                }
            ],
            "containers": [
                {
                    "name": "triton",
                    "image": TRITON,
                    "command": ["tritonserver"],
                    "args": ["--model-repository=/models", "--exit-timeout-secs=2"],
                    "ports": [{"name": "http", "containerPort": 8000}, {"name": "metrics", "containerPort": 8002}],
                    "readinessProbe": {"httpGet": {"path": "/v2/health/ready", "port": "http"}, "periodSeconds": 1},
                    "resources": {"limits": {"nvidia.com/gpu": "1", "memory": "512Mi"}, "requests": {"cpu": "20m"}},
                    "securityContext": restricted,
                    "volumeMounts": [models, tmp, {"name": "shm", "mountPath": "/dev/shm"}],
                }
            ],
            "volumes": [
                {"name": "models", "emptyDir": {}},
                {"name": "tmp", "emptyDir": {}},
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}},
                {"name": "source", "image": {"reference": FILETYPE, "pullPolicy": "IfNotPresent"}},
            ],
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "default", "labels": {"app.kubernetes.io/managed-by": "conch"}},
        "spec": {"selector": labels, "ports": [{"name": "http", "port": 8000}, {"name": "metrics", "port": 8002}]},
    }
    return [pod, service]


@pytest.fixture(scope="module")
def triton(clusters: Clusters) -> Iterator[dict[str, Any]]:
    """The pod, Ready."""
    region = clusters.region(nodes=True)
    region.apply(triton_objects("by-hand"))
    yield region.wait_pod_ready("by-hand")
    region.kubectl("delete", "pod,service", "by-hand", "--wait", "--timeout=60s")


def query(prometheus_url: str, expression: str) -> dict[tuple[str, str], float]:
    """(namespace, pod) to value."""
    url = f"{prometheus_url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    with urllib.request.urlopen(url, timeout=5) as answer:
        found = json.load(answer)["data"]["result"]
    return {
        (entry["metric"].get("namespace", ""), entry["metric"].get("pod", "")): float(entry["value"][1])
        for entry in found
    }


def infer(address: str) -> list[float]:
    """Probabilities that the classifier gives for a small shell script."""
    text = list(b"#!/usr/bin/env python3\nimport os\nprint(os.getcwd())\n".ljust(2048, b"\0"))
    body = {"inputs": [{"name": "bytes", "shape": [1, 2048], "datatype": "INT32", "data": text}]}
    request = urllib.request.Request(f"http://{address}:8000/v2/models/filetype/infer", data=json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=20) as answer:
        values: list[float] = json.load(answer)["outputs"][0]["data"]
    return values


def test_a_triton_pod_by_hand_answers_a_real_inference_over_its_pod_address(
    region: AnyRegion, triton: dict[str, Any]
) -> None:
    del region
    probabilities = infer(triton["status"]["podIP"])
    assert len(probabilities) > 100
    assert max(probabilities) > 0.5


def test_a_pod_reaches_the_api_server_and_prometheus_by_their_service_names(
    region: AnyRegion, triton: dict[str, Any]
) -> None:
    del triton
    program = (
        "import urllib.request as r, ssl; print(r.urlopen('http://prometheus.monitoring.svc:9090/-/ready').status);"
        "c = ssl.create_default_context(); c.check_hostname = False; c.verify_mode = ssl.CERT_NONE;"
        "print(r.urlopen('https://kubernetes.default.svc/version', context=c).status)"
    )
    said = region.kubectl("exec", "by-hand", "-c", "triton", "--", "python3", "-c", program)
    assert said.split() == ["200", "200"]


def test_a_service_address_is_reached_from_the_regions_and_the_outer_network(
    sandbox: Sandbox, region: AnyRegion, triton: dict[str, Any]
) -> None:
    del triton
    address = region.get("service", "by-hand")["spec"]["clusterIP"]
    wait_for(lambda: answers(address), 20, "the Service's address does not answer in the region's network")
    with sandbox.network():
        wait_for(lambda: answers(address), 20, "the Service's address does not answer in the outer network")


def answers(address: str) -> bool:
    """Whether a model server behind an address gives an inference."""
    try:
        return bool(infer(address))
    except urllib.error.URLError:
        return False


def test_prometheus_discovers_triton_and_gpu_memory_under_the_pods_own_labels(
    region: AnyRegion, triton: dict[str, Any]
) -> None:
    del triton
    key = ("default", "by-hand")
    wait_for(
        lambda: key in query(region.prometheus_url, "nv_inference_pending_request_count"), 30, "Triton isn't scraped"
    )
    region.gpus.set_memory_used("default/by-hand", 4321)
    wait_for(
        lambda: query(region.prometheus_url, "DCGM_FI_DEV_FB_USED").get(key) == 4321, 30, "no GPU memory of the pod"
    )


def test_the_container_is_told_which_gpu_is_its_own(region: AnyRegion, triton: dict[str, Any]) -> None:
    del triton
    said = region.kubectl(
        "exec",
        "by-hand",
        "-c",
        "triton",
        "--",
        "python3",
        "-c",
        "import os; print(os.environ['NVIDIA_VISIBLE_DEVICES'])",
    )
    assert said.startswith("GPU-fake-")


def test_an_unhealthy_gpu_lowers_what_the_node_offers(region: AnyRegion) -> None:
    whole = region.gpu_count
    wait_for(lambda: region.allocatable_gpus() == whole, 30, "the GPUs are not all offered at first")
    region.gpus.set_healthy(whole - 1, healthy=False)
    wait_for(lambda: region.allocatable_gpus() == whole - 1, 30, "an unhealthy GPU is still offered")
    region.gpus.set_healthy(whole - 1, healthy=True)
    wait_for(lambda: region.allocatable_gpus() == whole, 30, "a healed GPU is not offered")


def test_a_component_can_be_stopped_and_started(region: AnyRegion) -> None:
    prometheus = region.component("prometheus")
    prometheus.stop()
    assert region.get_url(region.prometheus_url + "/-/ready") == 0
    prometheus.start()
    wait_for(lambda: region.get_url(region.prometheus_url + "/-/ready") == 200, 30, "Prometheus is not back")


def test_the_gpus_and_the_running_pod_outlive_a_restart_of_the_kubelet(
    region: AnyRegion, triton: dict[str, Any]
) -> None:
    kubelet = region.component("kubelet")
    kubelet.stop()
    kubelet.start()
    registered = "registered nvidia.com/gpu"
    plugin = region.component("fake-gpu-plugin")
    wait_for(lambda: plugin.log().count(registered) > 1, 30, "the plugin has not registered again")
    wait_for(region.node_ready, 30, "the node is not Ready with its GPUs")
    assert infer(triton["status"]["podIP"])


@pytest.mark.long  # takes half a minute, and changes with e2e/sandbox/{observers,pod_component}.py only
def test_as_pods_which_they_are_on_kind_the_observers_do_the_same(
    sandbox: Sandbox, region: AnyRegion, triton: dict[str, Any]
) -> None:
    del triton
    layout = sandbox.region().layout
    place = observers.Place(region.node_name, layout.folder, binaries.ensure_tools(quiet))
    processes = [region.component(name) for name in observers.pods(place)]
    pods = {name: PodComponent(region, manifest) for name, manifest in observers.pods(place).items()}
    usual = region.prometheus_config.read_text()
    for process in processes:
        process.stop()
    try:
        region.kubectl("delete", "endpointslice", "prometheus", "-n", observers.NAMESPACE)
        region.prometheus_config.write_text(observers.prometheus_config(place))
        region.apply(observers.shared())
        for pod in pods.values():
            pod.start()
        address = region.get("service", "prometheus", "-n", observers.NAMESPACE)["spec"]["clusterIP"]
        assert_observed(region, pods, f"http://{address}:9090")
    finally:
        region.kubectl("delete", "pods", "--all", "-n", observers.NAMESPACE, "--grace-period=1")
        region.kubectl("delete", "services", "--all", "-n", observers.NAMESPACE)
        region.prometheus_config.write_text(usual)
        region.apply(prometheus.local_service(layout))
        for process in processes:
            process.start()
    wait_for(region.node_ready, 30, "the node is not Ready with its GPUs")


def assert_observed(region: AnyRegion, pods: dict[str, PodComponent], url: str) -> None:
    """GPUs are offered and can break, Prometheus scrapes what it should, and can be halted and stopped."""
    ready = f"{url}/-/ready"
    wait_for(region.node_ready, 30, "the node is not Ready with its GPUs")
    assert "registered nvidia.com/gpu" in pods["fake-gpu-plugin"].log()
    whole = region.gpu_count
    region.gpus.set_healthy(whole - 1, healthy=False)
    wait_for(lambda: region.allocatable_gpus() == whole - 1, 30, "an unhealthy GPU is still offered")
    region.gpus.set_healthy(whole - 1, healthy=True)
    wait_for(lambda: region.get_url(ready) == 200, 30, "Prometheus is not there")
    key = ("default", "by-hand")
    wait_for(lambda: key in query(url, "nv_inference_pending_request_count"), 30, "Triton isn't scraped")
    region.gpus.set_memory_used("default/by-hand", 1234)
    wait_for(lambda: query(url, "DCGM_FI_DEV_FB_USED").get(key) == 1234, 30, "no GPU memory of the pod")
    server = pods["prometheus"]
    server.kill(signal.SIGSTOP)
    assert region.get_url(ready) == 0
    server.kill(signal.SIGCONT)
    assert region.get_url(ready, 10) == 200
    server.stop()
    assert not server.running
    assert region.get_url(ready) == 0
    server.start()
    wait_for(lambda: region.get_url(ready) == 200, 30, "Prometheus is not back")


def test_up_a_second_time_changes_nothing(sandbox: Sandbox) -> None:
    before = {region.name: region.components() for region in sandbox.regions}
    again = Sandbox.up(sandbox.run, [region.spec for region in sandbox.regions], operator_image=False, tell=quiet)
    assert {region.name: region.components() for region in again.regions} == before


def test_up_with_other_settings_names_the_fix(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match="down"):
        Sandbox.up(sandbox.run, ["elsewhere"], operator_image=False, tell=quiet)
