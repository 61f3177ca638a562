"""Accelerators on a real API server: claim templates, and nodes' labels in the words of a condition."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from apiserver import ApiServer, condition
from stories import create, made, served, until

from conch import names
from conch.kube.client import DEPLOYMENTS, NODES, RESOURCE_CLAIM_TEMPLATES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from operators import LocalOperator

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("leader")]

CLAIM: dict[str, Any] = {"deviceClass": "gpu.example.com", "selectors": ["device.driver == 'gpu.example.com'"]}
LABELS = {
    "nvidia.com/gpu.product": "NVIDIA-L4",
    "nvidia.com/gpu.memory": "23034",
    "nvidia.com/gpu.compute.major": "8",
    "nvidia.com/gpu.compute.minor": "9",
}
NODE = "labelled"


@pytest.fixture
def node(api: ApiServer, leader: LocalOperator) -> Iterator[str]:
    """A node as GPU feature discovery and the device plugin would show it; no kubelet stands behind it."""
    del leader
    api.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE, "labels": LABELS}})
    api.call(
        "PATCH",
        f"{NODES.path(None, NODE)}/status",
        {"status": {"allocatable": {"nvidia.com/gpu": "1"}, "capacity": {"nvidia.com/gpu": "1"}}},
        "application/merge-patch+json",
    )
    yield NODE
    api.delete(NODES, "", NODE)


def templates(api: ApiServer, namespace: str) -> dict[str, int]:
    """Devices by ResourceClaimTemplate."""
    found = api.all(RESOURCE_CLAIM_TEMPLATES, namespace)
    return {
        item["metadata"]["name"]: item["spec"]["spec"]["devices"]["requests"][0]["exactly"]["count"] for item in found
    }


def claims(api: ApiServer, namespace: str) -> list[int]:
    """Devices that the pods' own claims ask for, which the cluster makes of the templates."""
    found = api.call("GET", f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims")["items"]
    return sorted(item["spec"]["devices"]["requests"][0]["exactly"]["count"] for item in found)


def test_row_83_a_claim_template_is_made_changed_and_pruned(api: ApiServer, namespace: str) -> None:
    made(api, namespace, {"accelerator.claim": CLAIM})
    first = templates(api, namespace)
    assert list(first.values()) == [1]
    until("the pod's claim", lambda: claims(api, namespace) == [1])
    served(api, namespace)
    create(api, namespace, {"accelerator.claim": {**CLAIM, "count": 2}})
    both = until("the second template", lambda: len(found := templates(api, namespace)) == 2 and found)
    assert first.items() < both.items(), "pods of the old revision need the first one"
    served(api, namespace)
    until("the first to go", lambda: list(templates(api, namespace).values()) == [2])
    create(api, namespace)
    served(api, namespace)
    until("the last to go", lambda: not templates(api, namespace))
    pod = api.get(DEPLOYMENTS, namespace, names.deployment("vision"))["spec"]["template"]["spec"]
    assert "resourceClaims" not in pod


def test_row_83_a_selector_that_is_no_cel_is_refused_in_the_api_servers_own_words(
    api: ApiServer, namespace: str
) -> None:
    create(api, namespace, {"accelerator.claim": {**CLAIM, "selectors": ["device.nothing("]}})

    def refused() -> bool:
        return condition(api.service(namespace, "vision"), "Ready").get("reason") == "ApiError"

    until("the refusal", refused)
    assert "Syntax error" in condition(api.service(namespace, "vision"), "Ready")["message"]
    assert api.deployment(namespace, "vision") is None


def test_row_82_what_no_node_has_is_told_with_what_the_cluster_has(api: ApiServer, namespace: str, node: str) -> None:
    del node
    create(api, namespace, {"accelerator.products": ["NVIDIA-L5"]})

    def told() -> str:
        found = condition(api.service(namespace, "vision"), "CapacityConstrained")
        return str(found["message"]) if found.get("reason") == "NoSuitableNode" else ""

    assert until("the condition", told) == (
        "No node has nvidia.com/gpu.product NVIDIA-L5; the cluster has NVIDIA-L4: add such a node, or change "
        "spec.accelerator.products."
    )
    until("the pods, which wait for a node", lambda: api.deployment(namespace, "vision"))
    create(api, namespace, {"accelerator": {"products": ["NVIDIA-L4"], "memory": "22Gi", "computeCapability": "8.6"}})
    until("the end of it", lambda: not told())
    pod = api.get(DEPLOYMENTS, namespace, names.deployment("vision"))["spec"]["template"]["spec"]
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert len(terms) == 2


def test_row_80_an_engine_for_another_device_leaves_the_old_pods_alone(
    api: ApiServer, namespace: str, node: str
) -> None:
    del node
    made(api, namespace)
    served(api, namespace)
    before = api.get(DEPLOYMENTS, namespace, names.deployment("vision"))["spec"]["template"]
    create(api, namespace, {"models[0].format": "TensorRT", "models[0].source.engine": {"computeCapability": "8.0"}})

    def held_back() -> str:
        found = condition(api.service(namespace, "vision"), "Reconciling")
        return str(found["message"]) if found.get("reason") == "NoSuitableNode" else ""

    said = until("the refusal", held_back)
    assert "compute capability 8.0, for which the engine was built; the cluster has 8.9" in said
    assert api.get(DEPLOYMENTS, namespace, names.deployment("vision"))["spec"]["template"] == before
    assert condition(api.service(namespace, "vision"), "Ready")["status"] == "True"
