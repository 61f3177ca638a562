"""Whether the cluster can run a service at all: its nodes, their memory, the engines' TensorRT version. Pure.

What is free now is another question (`gpus.free_gpus`). Here a node counts also while it is full, cordoned or not
ready: it will be back, and a node of another kind won't do then either.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from conch.api.conditions import Reason
from conch.api.demands import MemoryDemand, engines, memory_demand, mig_size, size_text
from conch.api.fields import parse_quantity
from conch.triton.engines import version_problem
from conch.workload import gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from conch.api.inferenceservice import InferenceServiceSpec

    Node = Mapping[str, Any]

MAX_KINDS: Final = 8
"""Kinds of nodes that a message lists."""
_MIB: Final = 2**20
# What the cluster puts on a node for a while, whatever the node has.
_PASSING: Final = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")
# Backends that take as much of a device as they are given: what they used says nothing of what they need.
_FILLS_THE_DEVICE: Final = frozenset({"TensorFlow", "Python", "DALI", "vLLM", "TensorRTLLM", "Auto"})


@dataclass(frozen=True)
class Surroundings:
    """What the cluster and the operator's settings say."""

    nodes: Sequence[Node] | None
    """All nodes; None when the operator sees none, as in namespaced mode."""
    node_autoscaling: bool = False
    """Whether nodes come when pods wait for them."""
    tensor_rt: str | None = None
    """The TensorRT version of the image that new pods get; None: not known."""
    memory_used: int | None = None
    """Bytes that these very models were seen to use on an accelerator; None: not measured."""


@dataclass(frozen=True)
class Fit:
    """A verdict; the message names what is wanted, what there is, and the fix."""

    suits: bool | None
    """None: not known."""
    reason: Reason
    message: str
    refuses: bool = False
    """Whether pods of this spec could never serve, so that none may be made and no serving pod given up."""


def fit(spec: InferenceServiceSpec, around: Surroundings) -> Fit:
    """The verdict on a spec: engines first, which need no node, then nodes, then memory."""
    problem = _engine_problem(spec, around.tensor_rt)
    if problem is not None:
        return Fit(suits=False, reason=Reason.ENGINE_MISMATCH, message=problem, refuses=True)
    if not spec.accelerator.devices:
        return Fit(suits=True, reason=Reason.SUITABLE_NODES, message="The service needs no accelerator.")
    if spec.accelerator.claim is not None:
        message = "Which devices meet spec.accelerator.claim only their driver knows: how many there are is unknown."
        return Fit(suits=None, reason=Reason.NODES_UNKNOWN, message=message)
    if around.nodes is None:
        message = "Whether a node suits is unknown: the operator works in single namespaces and sees no nodes."
        return Fit(suits=None, reason=Reason.NODES_UNKNOWN, message=message)
    if not around.nodes:
        return Fit(suits=None, reason=Reason.NODES_UNKNOWN, message="The cluster has no node yet.")
    demand, said = _memory(spec, around)
    wanted = gpus.Wanted.of(spec)
    # The first node that will do ends the search: a cluster may have thousands.
    suitable = (node for node in around.nodes if _suits(node, wanted))
    first = next(suitable, None)
    if first is None:
        return _no_node(spec, wanted, around)
    if demand is None or any(_holds(node, spec, demand) for node in itertools.chain([first], suitable)):
        return Fit(suits=True, reason=Reason.SUITABLE_NODES, message="The cluster has suitable nodes.")
    # A node that says nothing would have held it, so each says what it has.
    largest = max(_most(node, spec) or 0 for node in around.nodes if _suits(node, wanted))
    message = f"{said}, and the largest accelerator of a suitable node has {size_text(largest)}: {_MEMORY_FIX}."
    if around.node_autoscaling:
        return Fit(suits=True, reason=Reason.NODES_AWAITED, message=f"A larger node must come: {message}")
    return Fit(suits=False, reason=Reason.ACCELERATOR_TOO_SMALL, message=message, refuses=True)


_MEMORY_FIX: Final = (
    "add a node with a larger one, lower the instances, or set what the models need in spec.models[].acceleratorMemory"
)


def models_digest(spec: InferenceServiceSpec) -> str:
    """A short digest of what decides how much memory a replica takes on an accelerator, whichever one that is."""
    part = spec.model_dump(mode="json", include={"models"}, by_alias=True, exclude_defaults=True)
    part["devices"] = spec.accelerator.devices
    return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:16]


def measured_before(service: Mapping[str, Any], spec: InferenceServiceSpec) -> int | None:
    """Bytes that status says these very models used on an accelerator; None if it says nothing of them."""
    gpus_status = (service.get("status") or {}).get("gpus") or {}
    if "memoryOf" not in gpus_status or gpus_status["memoryOf"] != models_digest(spec):
        return None
    try:
        return int(parse_quantity(gpus_status.get("memoryUsed")))
    except ValueError:
        return None


def _engine_problem(spec: InferenceServiceSpec, tensor_rt: str | None) -> str | None:
    allows = any(
        backend.name == "tensorrt" and backend.settings.get("version-compatible", "").lower() == "true"
        for backend in spec.runtime.backends
    )
    for index, engine in engines(spec):
        problem = version_problem(engine, tensor_rt, backend_allows=allows)
        if problem is not None:
            return f"spec.models[{index}] ({spec.models[index].name}): {problem}."
    return None


def _memory(spec: InferenceServiceSpec, around: Surroundings) -> tuple[int | None, str]:
    """What the models take of one accelerator in bytes, and the sentence's beginning; declared goes before measured."""
    demand: MemoryDemand | None = memory_demand(spec)
    if demand is not None:
        return demand.size, f"The models take {demand.sum} of one accelerator"
    if around.memory_used is None or any(model.format in _FILLS_THE_DEVICE for model in spec.models):
        return None, ""
    return around.memory_used, f"The models were seen to use {size_text(around.memory_used)} of one accelerator"


def _holds(node: Node, spec: InferenceServiceSpec, size: int) -> bool:
    """Whether an accelerator of the node has that much memory, or doesn't say what it has."""
    most = _most(node, spec)
    return most is None or size <= most


def _most(node: Node, spec: InferenceServiceSpec) -> int | None:
    """Bytes of one accelerator by the node's label or the MIG profile's name; None when neither says it."""
    has = gpus.memory_mib(node, spec.accelerator)
    return mig_size(spec.accelerator) if has is None else has * _MIB


@dataclass(frozen=True)
class _Criterion:
    """One thing that a node must have."""

    wanted: str
    """As in `no node has …`."""
    field: str
    met: Callable[[Node], bool]
    shown: Callable[[Node], str]
    """What a node has of it; empty: nothing."""


def _criteria(spec: InferenceServiceSpec, must: gpus.Wanted) -> Iterable[_Criterion]:
    accelerator = spec.accelerator
    yield _Criterion(
        f"{accelerator.count} {accelerator.resource}",
        "spec.accelerator.count",
        lambda node: gpus.built_in(node, accelerator.resource) >= accelerator.count,
        lambda node: f"{gpus.built_in(node, accelerator.resource)} {accelerator.resource}",
    )
    if accelerator.products:
        yield _Criterion(
            f"{gpus.PRODUCT_LABEL} {' or '.join(accelerator.products)}",
            "spec.accelerator.products",
            must.right_product,
            lambda node: _label(node, gpus.PRODUCT_LABEL),
        )
    if gpus.wants_several_gpus(accelerator):
        yield _Criterion(
            "whole GPUs (several MIG slices or shares give no more than one)",
            "spec.accelerator.count",
            must.whole,
            lambda node: "whole ones" if must.whole(node) else _label(node, gpus.PRODUCT_LABEL) or "divided ones",
        )
    if must.least_mib is not None:
        label = gpus.memory_label(accelerator)
        yield _Criterion(
            f"{label} of {must.least_mib} MiB ({accelerator.memory}) or more",
            "spec.accelerator.memory",
            must.enough_memory,
            lambda node: f"{_label(node, label)} MiB" if _label(node, label) else "",
        )
    exact, at_least = must.exact, must.least
    if exact is not None or at_least is not None:
        yield _Criterion(
            f"compute capability {_dotted(exact)}, for which the engine was built"
            if exact is not None
            else f"compute capability {_dotted(at_least)} or more",
            "the engine" if exact is not None else "spec.accelerator.computeCapability",
            must.right_capability,
            lambda node: _dotted(gpus.capability_of(node)),
        )
    if must.architecture is not None:
        yield _Criterion(
            f"{gpus.ARCHITECTURE_LABEL} {must.architecture}, for which the engine was built",
            "the engine",
            must.right_architecture,
            lambda node: _label(node, gpus.ARCHITECTURE_LABEL),
        )
    if spec.placement.node_selector:
        yield _Criterion(
            "the labels of spec.placement.nodeSelector",
            "spec.placement.nodeSelector",
            must.selected,
            lambda node: ", ".join(_said(node, key) for key in sorted(spec.placement.node_selector)),
        )
    yield _Criterion(
        "only taints that the pods tolerate",
        "spec.placement.tolerations",
        lambda node: not _lasting(node, must),
        lambda node: ", ".join(_taint(taint) for taint in _lasting(node, must)),
    )


def _suits(node: Node, wanted: gpus.Wanted) -> bool:
    accelerator = wanted.accelerator
    return (
        gpus.built_in(node, accelerator.resource) >= accelerator.count
        and wanted.labels_and_devices_suit(node)
        and not _lasting(node, wanted)
    )


def _no_node(spec: InferenceServiceSpec, wanted: gpus.Wanted, around: Surroundings) -> Fit:
    """Why no node will do: the criteria that none meets, or all of them where each is met by some node."""
    nodes, resource = around.nodes or (), spec.accelerator.resource
    with_it = [node for node in nodes if gpus.built_in(node, resource)]
    if not with_it:
        kinds = {name for node in nodes for name in _devices(node)}
        said = f"No node has {resource}; the cluster has {_list(kinds) or 'no accelerators'}"
        fields = ["spec.accelerator.resource"]
    else:
        criteria = list(_criteria(spec, wanted))
        failed = [one for one in criteria if not any(one.met(node) for node in with_it)]
        told = failed or [one for one in criteria if not all(one.met(node) for node in with_it)]
        kinds = {" with ".join(dict.fromkeys(shown for one in told if (shown := one.shown(node)))) for node in with_it}
        missing = " and ".join(one.wanted for one in told)
        said = f"No node has {missing}{'' if failed else ' together'}; the cluster has {_list(kinds)}"
        fields = list(dict.fromkeys(one.field for one in told))
    fix = f"add such a node, or change {' or '.join(fields)}"
    if around.node_autoscaling:
        message = f"{said}. Node autoscaling may bring one; if none comes, {fix}."
        return Fit(suits=True, reason=Reason.NODES_AWAITED, message=message)
    return Fit(suits=False, reason=Reason.NO_SUITABLE_NODE, message=f"{said}: {fix}.")


def _list(kinds: Iterable[str]) -> str:
    """`NVIDIA-A100, NVIDIA-L4`; neither the words nor their order change while nodes of the same kinds come and go."""
    texts = [kind or "nodes without that label" for kind in sorted(set(kinds))]
    return ", ".join(texts if len(texts) <= MAX_KINDS else [*texts[:MAX_KINDS], "and more kinds"])


def _devices(node: Node) -> list[str]:
    status = node.get("status") or {}
    return [
        name
        for name in {**(status.get("allocatable") or {}), **(status.get("capacity") or {})}
        if "/" in name and not name.partition("/")[0].endswith("kubernetes.io") and gpus.built_in(node, name)
    ]


def _lasting(node: Node, wanted: gpus.Wanted) -> list[Mapping[str, Any]]:
    return [taint for taint in wanted.repelling(node) if not str(taint.get("key", "")).startswith(_PASSING)]


def _taint(taint: Mapping[str, Any]) -> str:
    value = f"={taint['value']}" if taint.get("value") else ""
    return f"taint {taint.get('key')}{value}:{taint.get('effect')}"


def _said(node: Node, key: str) -> str:
    value = _label(node, key)
    return f"{key}={value}" if value else f"no {key}"


def _label(node: Node, key: str) -> str:
    return str((node["metadata"].get("labels") or {}).get(key, ""))


def _dotted(capability: tuple[int, int] | None) -> str:
    return "" if capability is None else f"{capability[0]}.{capability[1]}"
