"""Free accelerators: nodes that match, allocatable minus what everybody requested."""

from __future__ import annotations

from typing import Any

import pytest

from conch.workload.gpus import free_gpus, requested
from makers import make_spec

GPU = "nvidia.com/gpu"


def node(name: str = "n1", gpus: int | str = 4, **changes: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"nvidia.com/gpu.product": "NVIDIA-L4", "pool": "a"}},
        "spec": changes.get("spec", {}),
        "status": {
            "allocatable": {GPU: str(gpus)},
            "conditions": [{"type": "Ready", "status": changes.get("ready", "True")}],
        },
    }


def pod(gpus: int, node_name: str | None = "n1", phase: str = "Running", **spec: Any) -> dict[str, Any]:
    container = {"name": "c", "resources": {"limits": {GPU: str(gpus)}}}
    placed = {} if node_name is None else {"nodeName": node_name}
    return {
        "metadata": {"name": "p"},
        "spec": {"containers": [container], **placed, **spec},
        "status": {"phase": phase},
    }


TAINT = {"taints": [{"key": "team", "value": "x", "effect": "NoSchedule"}]}


@pytest.mark.parametrize(
    ("nodes", "pods", "fields", "free"),
    [
        ([node()], [], {}, 4),
        ([node(), node("n2", 2)], [pod(1), pod(2, "n2")], {}, 3),
        ([node()], [pod(3), pod(1, phase="Succeeded"), pod(1, phase="Failed"), pod(1, None)], {}, 1),
        ([node()], [pod(9)], {}, 0),
        ([node(ready="False")], [], {}, 0),
        ([node(ready="Unknown")], [], {}, 0),
        ([node(spec={"unschedulable": True})], [], {}, 0),
        ([node(spec=TAINT)], [], {}, 0),
        ([node(spec=TAINT)], [], {"placement.tolerations": [{"key": "team", "value": "x"}]}, 4),
        ([node(spec=TAINT)], [], {"placement.tolerations": [{"key": "team", "operator": "Exists"}]}, 4),
        ([node(spec=TAINT)], [], {"placement.tolerations": [{"key": "team", "value": "y"}]}, 0),
        ([node(spec={"taints": [{"key": GPU, "effect": "NoSchedule"}]})], [], {}, 4),
        ([node(spec={"taints": [{"key": "k", "effect": "PreferNoSchedule"}]})], [], {}, 4),
        ([node()], [], {"accelerator.products": ["NVIDIA-L4"]}, 4),
        ([node()], [], {"accelerator.products": ["NVIDIA-H100"]}, 0),
        ([node()], [], {"placement.nodeSelector": {"pool": "a"}}, 4),
        ([node()], [], {"placement.nodeSelector": {"pool": "b"}}, 0),
        ([node(gpus=3), node("n2", 1)], [], {"accelerator.count": 2}, 2),
        ([node(gpus="")], [], {}, 0),
        ([], [], {}, 0),
    ],
)
def test_free_accelerators_are_those_of_matching_nodes_minus_what_is_requested(
    nodes: list[dict[str, Any]], pods: list[dict[str, Any]], fields: dict[str, Any], free: int
) -> None:
    assert free_gpus(nodes, pods, make_spec(fields)) == free


def test_without_node_data_the_answer_is_unknown_and_not_zero() -> None:
    assert free_gpus(None, [], make_spec()) is None


def test_an_init_container_counts_when_it_needs_more_and_a_sidecar_always() -> None:
    def container(gpus: int, **more: str) -> dict[str, Any]:
        return {"name": "i", "resources": {"requests": {GPU: str(gpus)}}, **more}

    assert requested(pod(1, initContainers=[container(2)]), GPU) == 2
    assert requested(pod(2, initContainers=[container(1)]), GPU) == 2
    assert requested(pod(2, initContainers=[container(1, restartPolicy="Always"), container(1)]), GPU) == 3
