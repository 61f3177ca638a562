"""The real scheduler and a real node's labels and taint: where pods for an accelerator may go."""

import json
from typing import Any

import pytest

from conch.workload.deployment import Images, pod_template
from makers import make_spec
from operators import wait_until
from sandbox import AnyRegion

pytestmark = pytest.mark.sandbox

LABELS = {
    "nvidia.com/gpu.product": "NVIDIA-L4",
    "nvidia.com/gpu.memory": "23034",
    "nvidia.com/gpu.compute.major": "8",
    "nvidia.com/gpu.compute.minor": "9",
}
TAINT = "nvidia.com/gpu=present:NoSchedule"
ENGINE = "models[0].source.engine"
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "any": ({}, True),
    "no-toleration": ({"placement.tolerateAcceleratorTaints": False}, False),
    "product": ({"accelerator.products": ["NVIDIA-A100", "NVIDIA-L4"]}, True),
    "another-product": ({"accelerator.products": ["NVIDIA-A100"]}, False),
    "memory": ({"accelerator.memory": "23034Mi"}, True),
    "more-memory": ({"accelerator.memory": "23035Mi"}, False),
    "capability": ({"accelerator.computeCapability": "8.9"}, True),
    "lower-capability": ({"accelerator.computeCapability": "7.5"}, True),
    "higher-capability": ({"accelerator.computeCapability": "9.0"}, False),
    "together": ({"accelerator": {"products": ["NVIDIA-L4"], "memory": "22Gi", "computeCapability": "8.6"}}, True),
    "engine": ({f"{ENGINE}.computeCapability": "8.9"}, True),
    "engine-of-another": ({f"{ENGINE}.computeCapability": "8.6"}, False),
    "engine-from-ampere": ({ENGINE: {"computeCapability": "8.6", "hardwareCompatibility": "AmperePlus"}}, True),
}


def pod_like(name: str, namespace: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A pod that is placed as the service's own would be, and does nothing."""
    wanted = pod_template("vision", make_spec(fields), Images("x.example/fetch:1", "x.example/triton:1"))["spec"]
    placed = {key: wanted[key] for key in ("affinity", "tolerations") if key in wanted}
    container = {"name": "c", "image": "x.example/none:1", "imagePullPolicy": "Never"}
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container], **placed}}


def verdicts(region: AnyRegion, namespace: str) -> dict[str, bool]:
    """Whether each pod got a node, as far as the scheduler has looked at it."""
    pods = json.loads(region.kubectl("get", "pods", "-n", namespace, "-o", "json"))["items"]
    return {
        pod["metadata"]["name"]: condition["status"] == "True"
        for pod in pods
        for condition in pod.get("status", {}).get("conditions", [])
        if condition["type"] == "PodScheduled"
    }


def test_row_80_and_83_the_scheduler_takes_the_nodes_that_suit_and_no_others(region: AnyRegion, namespace: str) -> None:
    nodes = [item["metadata"] for item in json.loads(region.kubectl("get", "nodes", "-o", "json"))["items"]]
    before = {node["name"]: [f"{key}-" for key in LABELS if key not in node.get("labels", {})] for node in nodes}
    region.kubectl("label", "nodes", "--all", "--overwrite", *(f"{key}={value}" for key, value in LABELS.items()))
    region.kubectl("taint", "nodes", "--all", "--overwrite", TAINT)
    try:
        region.apply([pod_like(name, namespace, fields) for name, (fields, _) in CASES.items()])

        def placed() -> dict[str, bool] | None:
            found = verdicts(region, namespace)
            return found if found.keys() == CASES.keys() else None

        found = wait_until(placed, 60, "the scheduler to look at every pod", every_s=0.2)
        assert found == {name: taken for name, (_, taken) in CASES.items()}
    finally:
        region.kubectl("taint", "nodes", "--all", f"{TAINT}-")
        for name, added in before.items():
            if added:
                region.kubectl("label", "node", name, *added)
