"""Whether the cluster can run a service at all, and the words when it can't."""

from __future__ import annotations

from typing import Any

import pytest

from conch.api.conditions import MAX_MESSAGE, Reason
from conch.api.demands import memory_demand
from conch.api.inferenceservice import InvalidSpec
from conch.workload.fit import Fit, Surroundings, fit, measured_before, models_digest
from makers import make_model, make_service, make_spec, stored

GPU = "nvidia.com/gpu"
Node = dict[str, Any]


def node(
    product: str | None = "NVIDIA-L4", mib: int | None = 23034, capability: str | None = "8.9", *, count: int = 1,
    resource: str = GPU, taint: str | None = None, labels: dict[str, str] | None = None,
) -> Node:  # fmt: skip
    major, _, minor = (capability or "").partition(".")
    found = {
        "nvidia.com/gpu.product": product,
        f"{resource.removesuffix('.shared')}.memory": None if mib is None else str(mib),
        "nvidia.com/gpu.compute.major": major or None,
        "nvidia.com/gpu.compute.minor": minor or None,
        **(labels or {}),
    }
    return {
        "metadata": {"name": "n", "labels": {key: value for key, value in found.items() if value is not None}},
        "spec": {"taints": [{"key": taint, "effect": "NoSchedule"}]} if taint else {},
        "status": {"allocatable": {"cpu": "8", "hugepages-2Mi": "0", resource: str(count)}},
    }


A100 = node("NVIDIA-A100", 40536, "8.0", count=8)
NODES = [node(), node(), node(), A100]
SLICED = node("NVIDIA-H100-MIG-1g.10gb", 9728, "9.0", count=7, labels={"nvidia.com/gpu.slices.gi": "1"})
SHARED = node("NVIDIA-L4-SHARED", count=4, labels={"nvidia.com/gpu.sharing-strategy": "time-slicing"})
BARE = {"metadata": {"name": "n"}, "status": {"allocatable": {"cpu": "8"}}}


def verdict(fields: dict[str, Any] | None = None, nodes: list[Node] | None = NODES, **around: Any) -> Fit:
    return fit(make_spec(fields), Surroundings(nodes, **around))


ENGINE = "models[0].source.engine"


@pytest.mark.parametrize(
    ("fields", "nodes", "says"),
    [
        (
            {"accelerator.products": ["NVIDIA-L5"]},
            NODES,
            (
                "No node has nvidia.com/gpu.product NVIDIA-L5; the cluster has NVIDIA-A100, NVIDIA-L4: "
                "add such a node, or change spec.accelerator.products."
            ),
        ),
        (
            {"accelerator.products": ["NVIDIA-L5"]},
            [node(None)],
            "the cluster has nodes without that label: add such a node",
        ),
        (
            {"accelerator.memory": "80Gi"},
            NODES,
            (
                "No node has nvidia.com/gpu.memory of 81920 MiB (80Gi) or more; the cluster has 23034 MiB, "
                "40536 MiB: add such a node, or change spec.accelerator.memory."
            ),
        ),
        (
            {"accelerator.computeCapability": "9.0"},
            NODES,
            "No node has compute capability 9.0 or more; the cluster has 8.0, 8.9",
        ),
        (
            {"accelerator": {"products": ["NVIDIA-A100"], "computeCapability": "8.6"}},
            NODES,
            (
                "No node has nvidia.com/gpu.product NVIDIA-A100 and compute capability 8.6 or more together; the "
                "cluster has NVIDIA-A100 with 8.0, NVIDIA-L4 with 8.9"
            ),
        ),
        (
            {"accelerator.count": 16},
            NODES,
            "No node has 16 nvidia.com/gpu; the cluster has 1 nvidia.com/gpu, 8 nvidia.com/gpu",
        ),
        (
            {"accelerator.count": 2},
            [SLICED, SHARED],
            (
                "No node has whole GPUs (several MIG slices or shares give no more than one); the cluster has "
                "NVIDIA-H100-MIG-1g.10gb, NVIDIA-L4-SHARED: add such a node, or change spec.accelerator.count."
            ),
        ),
        (
            {"accelerator": {"count": 2, "products": ["NVIDIA-L4-SHARED"]}},
            [SHARED, node(count=2)],
            (
                "No node has nvidia.com/gpu.product NVIDIA-L4-SHARED and whole GPUs (several MIG slices or shares give "
                "no more than one) together; the cluster has NVIDIA-L4 with whole ones, NVIDIA-L4-SHARED: add such a "
                "node, or change spec.accelerator.products or spec.accelerator.count."
            ),
        ),
        (
            {"accelerator.resource": "amd.com/gpu"},
            NODES,
            (
                "No node has amd.com/gpu; the cluster has nvidia.com/gpu: add such a node, or change "
                "spec.accelerator.resource."
            ),
        ),
        ({}, [BARE], "No node has nvidia.com/gpu; the cluster has no accelerators"),
        (
            {"placement.nodeSelector": {"pool": "a"}},
            [node(labels={"pool": "b"}), node()],
            "No node has the labels of spec.placement.nodeSelector; the cluster has no pool, pool=b",
        ),
        (
            {},
            [node(taint="team")],
            (
                "No node has only taints that the pods tolerate; the cluster has taint team:NoSchedule: add "
                "such a node, or change spec.placement.tolerations."
            ),
        ),
        (
            {f"{ENGINE}.computeCapability": "8.6"},
            NODES,
            "No node has compute capability 8.6, for which the engine was built; the cluster has 8.0, 8.9",
        ),
        (
            {f"{ENGINE}.platform": "linux/arm64"},
            [node(labels={"kubernetes.io/arch": "amd64"})],
            "No node has kubernetes.io/arch arm64, for which the engine was built; the cluster has amd64",
        ),
    ],
)
def test_row_80_and_82_what_no_node_has_is_named_with_what_the_cluster_has(
    fields: dict[str, Any], nodes: list[Node], says: str
) -> None:
    found = verdict(fields, nodes)
    assert (found.suits, found.reason) == (False, Reason.NO_SUITABLE_NODE)
    assert says in found.message
    assert len(found.message) <= MAX_MESSAGE
    # Nodes come and go: new pods may wait for one.
    assert not found.refuses
    remark = verdict(fields, nodes, node_autoscaling=True)
    assert (remark.suits, remark.reason) == (True, Reason.NODES_AWAITED)
    assert "Node autoscaling may bring one" in remark.message
    assert says.partition(": add")[0] in remark.message


@pytest.mark.parametrize(
    ("fields", "nodes"),
    [
        ({}, NODES),
        ({"accelerator.products": ["NVIDIA-L5", "NVIDIA-L4"]}, NODES),
        ({"accelerator.memory": "24G"}, NODES),
        ({"accelerator.computeCapability": "8.9"}, NODES),
        ({"accelerator.count": 8}, NODES),
        ({"accelerator.count": 2}, [SLICED, A100]),
        ({"accelerator.count": 1}, [SLICED]),
        ({"accelerator.count": 1}, [SHARED]),
        ({"accelerator.count": 2}, [node(count=2, labels={"nvidia.com/gpu.sharing-strategy": "none"})]),
        ({f"{ENGINE}.computeCapability": "8.0"}, NODES),
        ({f"{ENGINE}.computeCapability": "8.6"}, [node(capability=None), A100]),
        ({f"{ENGINE}": {"computeCapability": "8.6", "hardwareCompatibility": "AmperePlus"}}, NODES),
        ({"accelerator.resource": "nvidia.com/mig-1g.5gb"}, [node(resource="nvidia.com/mig-1g.5gb", mib=4864)]),
        ({}, [node(taint="nvidia.com/gpu")]),
        # What passes by itself: a node that isn't ready, that is cordoned, that is full.
        ({}, [node(taint="node.kubernetes.io/unreachable")]),
        ({}, [{**node(), "spec": {"unschedulable": True}}]),
    ],
)
def test_a_suitable_node_is_enough(fields: dict[str, Any], nodes: list[Node]) -> None:
    assert verdict(fields, nodes) == Fit(True, Reason.SUITABLE_NODES, "The cluster has suitable nodes.")


@pytest.mark.parametrize(
    ("fields", "nodes", "says"),
    [
        ({}, None, "sees no nodes"),
        ({"accelerator.products": ["NVIDIA-L5"]}, None, "sees no nodes"),
        ({}, [], "no node yet"),
        ({"accelerator.claim": {"deviceClass": "gpu.nvidia.com"}}, NODES, "only their driver knows"),
    ],
)
def test_what_is_not_known_is_said_and_refuses_nothing(
    fields: dict[str, Any], nodes: list[Node] | None, says: str
) -> None:
    found = verdict(fields, nodes)
    assert (found.suits, found.reason, found.refuses) == (None, Reason.NODES_UNKNOWN, False)
    assert says in found.message


def test_without_an_accelerator_no_node_is_looked_for() -> None:
    assert verdict({"accelerator.count": 0}, [BARE]).suits


def test_r11_nodes_of_the_same_kinds_come_and_go_and_the_words_stay() -> None:
    lone, many = verdict({"accelerator.products": ["NVIDIA-L5"]}, [node(), A100]), [A100, A100, A100, node()]
    assert verdict({"accelerator.products": ["NVIDIA-L5"]}, many) == lone
    assert verdict({"accelerator.resource": "amd.com/gpu"}, many) == verdict(
        {"accelerator.resource": "amd.com/gpu"}, [node()]
    )


def test_many_kinds_of_nodes_are_cut() -> None:
    found = verdict({"accelerator.products": ["NVIDIA-L5"]}, [node(f"P{number:02}") for number in range(100)])
    assert "P07, and more kinds" in found.message


# --- engines


def test_row_80_an_engine_of_another_version_is_refused_with_both_versions_and_the_fix() -> None:
    fields = {"models[0].format": "TensorRT", f"{ENGINE}.tensorRT": "10.3"}
    found = verdict(fields, tensor_rt="10.5.0")
    assert (found.suits, found.reason, found.refuses) == (False, Reason.ENGINE_MISMATCH, True)
    assert found.message == (
        "spec.models[0] (resnet50): the engine was built with TensorRT 10.3, and the image has 10.5.0: build it again "
        "with 10.5.0, or set spec.runtime.image to a release with TensorRT 10.3."
    )
    # It needs no node to be known.
    assert verdict(fields, None, tensor_rt="10.5.0") == found
    assert verdict(fields, tensor_rt="10.3.0").suits
    assert verdict(fields, tensor_rt=None).suits


def test_row_80_a_version_compatible_engine_needs_the_backends_setting() -> None:
    fields = {f"{ENGINE}": {"tensorRT": "10.3", "versionCompatible": True}}
    assert "runtime.backends" in verdict(fields, tensor_rt="10.5.0").message
    setting = {"runtime.backends": [{"name": "tensorrt", "settings": {"version-compatible": "true"}}]}
    assert verdict({**fields, **setting}, tensor_rt="10.5.0").suits


@pytest.mark.parametrize(
    ("one", "other", "field", "says"),
    [
        ({"computeCapability": "8.6"}, {"computeCapability": "8.9"}, "computeCapability", "no accelerator runs both"),
        (
            {"computeCapability": "7.5"},
            {"computeCapability": "8.6", "hardwareCompatibility": "AmperePlus"},
            "hardwareCompatibility",
            "runs from 8.0 on",
        ),
        ({"platform": "linux/amd64"}, {"platform": "linux/arm64"}, "platform", "differs from that of spec.models[0]"),
    ],
)
def test_row_80_engines_that_no_device_runs_together_are_refused(
    one: dict[str, Any], other: dict[str, Any], field: str, says: str
) -> None:
    models = [
        make_model(name=name, source={"uri": "pvc://models/a", "engine": engine})
        for name, engine in (("a", one), ("b", other))
    ]
    with pytest.raises(InvalidSpec) as caught:
        make_spec(models=models)
    assert f"spec.models[1].source.engine.{field}: " in str(caught.value)
    assert says in str(caught.value)
    assert make_spec(models=[models[0]])


def test_row_80_an_engine_below_the_least_capability_is_refused() -> None:
    with pytest.raises(InvalidSpec, match=r"below spec\.accelerator\.computeCapability, 9\.0"):
        make_spec({f"{ENGINE}.computeCapability": "8.6", "accelerator.computeCapability": "9.0"})


# --- memory


def models(*memory: str | None, **first: Any) -> dict[str, Any]:
    made = [make_model(name=f"m{n}", acceleratorMemory=size) for n, size in enumerate(memory)]
    made[0] |= first
    return {"models": made}


@pytest.mark.parametrize(
    ("fields", "total", "words"),
    [
        (models("3Gi"), "3Gi", "m0 1 x 3Gi = 3Gi"),
        (models("3Gi", "20Gi", instances={"count": 2}), "26Gi", "m0 2 x 3Gi + m1 1 x 20Gi = 26Gi"),
        (models("512Mi"), "512Mi", "m0 1 x 512Mi = 512Mi"),
        (models("3Gi", None), "3Gi", "m0 1 x 3Gi = 3Gi"),
        (models(None), None, ""),
        (models("3Gi", instances={"kind": "CPU"}), None, ""),
        ({**models("3Gi", instances={"kind": "CPU"}), "accelerator.count": 0}, None, ""),
        # Two accelerators: the fuller one counts.
        ({**models("3Gi", "4Gi", instances={"gpus": [1]}), "accelerator.count": 2}, "7Gi", "m0 1 x 3Gi + m1 1 x 4Gi"),
        (
            {**models("3Gi", instanceGroups=[{"name": "a", "gpus": [0]}, {"name": "b", "gpus": [1], "count": 3}]),
             "accelerator.count": 2},
            "9Gi", "m0 3 x 3Gi = 9Gi",
        ),
        # A model that places itself counts where there is one place.
        (models("3Gi", instances={"kind": "Model"}), "3Gi", "m0 1 x 3Gi"),
        ({**models("3Gi", instances={"kind": "Model"}), "accelerator.count": 2}, None, ""),
    ],
)  # fmt: skip
def test_the_memory_of_all_instances_on_the_fullest_accelerator_is_added_up(
    fields: dict[str, Any], total: str | None, words: str
) -> None:
    demand = memory_demand(make_spec(fields))
    if demand is None:
        assert total is None
    else:
        assert demand.sum.endswith(f"= {total}")
        assert words in demand.sum


@pytest.mark.parametrize(
    ("accelerator", "path", "says"),
    [
        ({"memory": "22Gi"}, "spec.accelerator.memory", "m0 1 x 3Gi + m1 1 x 20Gi = 23Gi"),
        ({"resource": "nvidia.com/mig-2g.20gb"}, "spec.accelerator.resource", "holds at most 20Gi"),
    ],
)
def test_models_that_cant_fit_one_accelerator_together_are_refused_with_the_sum(
    accelerator: dict[str, Any], path: str, says: str
) -> None:
    fields = {**models("3Gi", "20Gi"), "accelerator": accelerator}
    with pytest.raises(InvalidSpec) as caught:
        make_spec(fields)
    assert f"{path}: " in str(caught.value)
    assert says in str(caught.value)
    assert make_spec({**fields, **models("1Gi", "2Gi")})


MIB = 2**20


@pytest.mark.parametrize(
    ("fields", "around", "suits", "says"),
    [
        (models("20Gi"), {}, True, ""),
        (models("30Gi"), {}, True, ""),
        (models("45Gi"), {}, False, ("The models take m0 1 x 45Gi = 45Gi of one accelerator, and the largest "
         "accelerator of a suitable node has 39.6Gi: add a node with a larger one")),
        ({**models("30Gi"), "accelerator.products": ["NVIDIA-L4"]}, {}, False, "has 22.5Gi"),
        (models("45Gi"), {"node_autoscaling": True}, True, "A larger node must come"),
        # Measured, where nothing is declared.
        ({}, {"memory_used": 45 * 1024 * MIB}, False, "were seen to use 45Gi of one accelerator"),
        ({}, {"memory_used": 20 * 1024 * MIB}, True, ""),
        (models("20Gi"), {"memory_used": 45 * 1024 * MIB}, True, ""),
        ({"models[0].format": "Python"}, {"memory_used": 45 * 1024 * MIB}, True, ""),
        # A MIG profile whose label is missing: its name says what it has.
        (
            {"accelerator.resource": "nvidia.com/mig-1g.5gb"},
            {"memory_used": 6 * 1024 * MIB, "nodes": [node(resource="nvidia.com/mig-1g.5gb", mib=None)]},
            False,
            "a suitable node has 5Gi",
        ),
        # A node that doesn't say what it has refuses nothing.
        (models("45Gi"), {"nodes": [node(mib=None)]}, True, ""),
    ],
)  # fmt: skip
def test_what_the_models_take_is_held_against_the_largest_suitable_accelerator(
    fields: dict[str, Any],
    around: dict[str, Any],
    *,
    suits: bool,
    says: str,
) -> None:
    found = verdict(fields, **{"nodes": NODES, **around})
    assert found.suits is suits
    assert found.refuses is not suits
    assert says in found.message
    assert suits or found.reason is Reason.ACCELERATOR_TOO_SMALL


def test_what_was_measured_counts_for_the_same_models_on_whatever_accelerator() -> None:
    spec = make_spec()
    service = stored(make_service()) | {"status": {"gpus": {"memoryUsed": "2048Mi", "memoryOf": models_digest(spec)}}}
    assert measured_before(service, spec) == 2**31
    assert measured_before(service, make_spec({"accelerator.products": ["NVIDIA-L4"]})) == 2**31
    assert measured_before(service, make_spec({"models[0].instances.count": 2})) is None
    assert measured_before(service, make_spec({"accelerator.count": 2})) is None
    assert measured_before(stored(make_service()), spec) is None
    service["status"]["gpus"]["memoryUsed"] = "much"
    assert measured_before(service, spec) is None


def test_a_node_whose_devices_are_unhealthy_or_whose_plugin_restarts_is_still_a_suitable_one() -> None:
    restarting = node(count=0)
    restarting["status"]["capacity"] = {GPU: "1"}
    assert verdict(nodes=[restarting]).suits is True
    refused = verdict({"accelerator.products": ["NVIDIA-H100"]}, nodes=[restarting])
    assert "the cluster has NVIDIA-L4" in refused.message
