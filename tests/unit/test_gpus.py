"""Free accelerators: nodes that match, allocatable minus what everybody requested."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.api.inferenceservice import InvalidSpec
from conch.workload.gpus import free_gpus, is_shared, node_terms, requested
from makers import make_spec

GPU = "nvidia.com/gpu"


def node(name: str = "n1", gpus: int | str = 4, **changes: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "labels": {"nvidia.com/gpu.product": "NVIDIA-L4", "pool": "a", **changes.get("labels", {})},
        },
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


MEMORY, MAJOR, MINOR = "nvidia.com/gpu.memory", "nvidia.com/gpu.compute.major", "nvidia.com/gpu.compute.minor"
INTOLERANT = {"placement.tolerateAcceleratorTaints": False}
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
        ([node(spec={"taints": [{"key": GPU, "effect": "NoExecute"}]})], [], {}, 0),
        ([node(spec={"taints": [{"key": GPU, "effect": "NoSchedule"}]})], [], INTOLERANT, 0),
        ([node(labels={MEMORY: "23034"})], [], {"accelerator.memory": "22Gi"}, 4),
        ([node(labels={MEMORY: "23034"})], [], {"accelerator.memory": "24Gi"}, 0),
        ([node()], [], {"accelerator.memory": "1Gi"}, 0),
        ([node(labels={MAJOR: "8", MINOR: "9"})], [], {"accelerator.computeCapability": "8.6"}, 4),
        ([node(labels={MAJOR: "9", MINOR: "0"})], [], {"accelerator.computeCapability": "8.6"}, 4),
        ([node(labels={MAJOR: "8", MINOR: "0"})], [], {"accelerator.computeCapability": "8.6"}, 0),
        ([node()], [], {"accelerator.computeCapability": "8.6"}, 0),
        ([node(labels={MAJOR: "8", MINOR: "9"})], [], {"models[0].source.engine.computeCapability": "8.6"}, 0),
        ([node(spec={"taints": [{"key": "k", "effect": "PreferNoSchedule"}]})], [], {}, 4),
        ([node()], [], {"accelerator.products": ["NVIDIA-L4"]}, 4),
        ([node()], [], {"accelerator.products": ["NVIDIA-H100"]}, 0),
        ([node()], [], {"placement.nodeSelector": {"pool": "a"}}, 4),
        ([node()], [], {"placement.nodeSelector": {"pool": "b"}}, 0),
        ([node(gpus=3), node("n2", 1)], [], {"accelerator.count": 2}, 2),
        ([node(gpus="")], [], {}, 0),
        ([node(gpus="1k")], [], {}, 1000),
        ([node(gpus="many")], [], {}, 0),
        ([], [], {}, 0),
    ],
)
def test_free_accelerators_are_those_of_matching_nodes_minus_what_is_requested(
    nodes: list[dict[str, Any]], pods: list[dict[str, Any]], fields: dict[str, Any], free: int
) -> None:
    assert free_gpus(nodes, pods, make_spec(fields)) == free


def test_without_node_data_the_answer_is_unknown_and_not_zero() -> None:
    assert free_gpus(None, [], make_spec()) is None


def test_row_83_what_a_claim_can_get_is_unknown_and_not_zero() -> None:
    assert free_gpus([node()], [], make_spec({"accelerator.claim": {"deviceClass": "gpu.nvidia.com"}})) is None


@pytest.mark.parametrize(
    ("resource", "labels", "shared"),
    [
        (GPU, {}, False),
        (GPU, {"nvidia.com/gpu.sharing-strategy": "none"}, False),
        (GPU, {"nvidia.com/gpu.sharing-strategy": "time-slicing"}, True),
        (GPU, {"nvidia.com/gpu.sharing-strategy": "mps"}, True),
        ("nvidia.com/gpu.shared", {}, True),
        ("nvidia.com/mig-1g.5gb", {}, False),
        ("nvidia.com/mig-1g.5gb.shared", {}, True),
    ],
)
def test_row_9_a_shared_accelerator_is_known_by_its_resource_or_its_nodes_label(
    resource: str, labels: dict[str, str], *, shared: bool
) -> None:
    accelerator = make_spec({"accelerator.resource": resource}).accelerator
    assert is_shared(node(labels=labels), accelerator) is shared
    assert is_shared(None, accelerator) is accelerator.shared


def test_an_init_container_counts_when_it_needs_more_and_a_sidecar_always() -> None:
    def container(gpus: int, **more: str) -> dict[str, Any]:
        return {"name": "i", "resources": {"requests": {GPU: str(gpus)}}, **more}

    assert requested(pod(1, initContainers=[container(2)]), GPU) == 2
    assert requested(pod(2, initContainers=[container(1)]), GPU) == 2
    assert requested(pod(2, initContainers=[container(1, restartPolicy="Always"), container(1)]), GPU) == 3


def scheduler_takes(terms: list[dict[str, Any]], labels: dict[str, str]) -> bool:
    """What the scheduler makes of nodeSelectorTerms (Kubernetes, NodeSelectorRequirement)."""

    def meets(expression: dict[str, Any]) -> bool:
        value, values = labels.get(expression["key"]), expression.get("values", [])
        if expression["operator"] == "DoesNotExist":
            return value is None
        if expression["operator"] == "In":
            return value in values
        if expression["operator"] == "NotIn":
            return value not in values
        assert expression["operator"] == "Gt"
        return value is not None and value.isdecimal() and int(value) > int(values[0])

    return not terms or any(all(meets(one) for one in term["matchExpressions"]) for term in terms)


CAPABILITY = st.sampled_from(["7.5", "8.0", "8.6", "8.9", "9.0", "12.0"])


@given(
    accelerator=st.fixed_dictionaries(
        {},
        optional={
            "products": st.lists(st.sampled_from(["A", "B"]), max_size=2),
            "memory": st.sampled_from(["1Mi", "22.5Gi", "24G", "24Gi", "80Gi"]),
            "computeCapability": CAPABILITY,
            "count": st.sampled_from([1, 2, 4]),
        },
    ),
    engine=st.fixed_dictionaries(
        {},
        optional={
            "computeCapability": CAPABILITY,
            "hardwareCompatibility": st.sampled_from(["None", "AmperePlus"]),
            "platform": st.just("linux/amd64"),
        },
    ),
    labels=st.fixed_dictionaries(
        {"kubernetes.io/arch": st.sampled_from(["amd64", "arm64"])},
        optional={
            "nvidia.com/gpu.product": st.sampled_from(["A", "B", "C"]),
            "nvidia.com/gpu.slices.gi": st.just("1"),
            "nvidia.com/gpu.sharing-strategy": st.sampled_from(["none", "mps", "time-slicing"]),
            MEMORY: st.sampled_from(["1", "23034", "24576", "81559", "much"]),
        },
    ),
    capability=st.none() | CAPABILITY,
)
def test_what_is_counted_is_what_the_scheduler_takes(
    accelerator: dict[str, Any], engine: dict[str, Any], labels: dict[str, str], capability: str | None
) -> None:
    try:
        spec = make_spec({"accelerator": accelerator, "models[0].source.engine": engine})
    except InvalidSpec:
        return  # an engine below the least capability
    if capability is not None:
        labels = {**labels, MAJOR: capability.split(".")[0], MINOR: capability.split(".")[1]}
    found = node()
    found["metadata"]["labels"] = labels
    assert (free_gpus([found], [], spec) == 4) is scheduler_takes(node_terms(spec), labels)
