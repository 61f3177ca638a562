"""Which nodes a service's pods may run on, by labels and taints, and how many accelerators are free there. Pure.

The labels are those of NVIDIA's GPU feature discovery (NVIDIA/k8s-device-plugin, docs/gpu-feature-discovery). It
writes memory in MiB; a MIG profile under the mixed strategy has labels of its own, named after its resource.

The pods must be all that run on the nodes, not only Conch's: whoever else holds an accelerator counts. The watch keeps
only Conch's own pods, since one over all pods of a cluster would cost more memory than everything else together; the
caller therefore lists them when a service wants more, and keeps the answer for some seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING
from typing import TYPE_CHECKING, Any, Final

from conch.api.accelerator import DEFAULT_RESOURCE
from conch.api.demands import engines
from conch.api.fields import parse_quantity
from conch.api.placement import Toleration
from conch.triton.engines import capability

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from conch.api.accelerator import Accelerator
    from conch.api.inferenceservice import InferenceServiceSpec

PRODUCT_LABEL: Final = "nvidia.com/gpu.product"
MAJOR_LABEL: Final = "nvidia.com/gpu.compute.major"
MINOR_LABEL: Final = "nvidia.com/gpu.compute.minor"
SLICES_LABEL: Final = "nvidia.com/gpu.slices.gi"
"""On nodes only whose `nvidia.com/gpu` are MIG slices (MIG's strategy "single"); a process can use one of them."""
SHARING_LABEL: Final = "nvidia.com/gpu.sharing-strategy"
SHARING_STRATEGIES: Final = ("time-slicing", "mps")
ARCHITECTURE_LABEL: Final = "kubernetes.io/arch"
USUAL_TAINT: Final = "nvidia.com/gpu"
_ENDED: Final = frozenset({"Succeeded", "Failed"})
_REPELS: Final = frozenset({"NoSchedule", "NoExecute"})


def memory_label(accelerator: Accelerator) -> str:
    """The node label that holds the memory of one accelerator of this resource, in MiB."""
    return f"{accelerator.resource.removesuffix('.shared')}.memory"


def least_memory_mib(accelerator: Accelerator) -> int | None:
    """`accelerator.memory` in whole MiB, rounded up; None when it isn't set."""
    if accelerator.memory is None:
        return None
    return int((parse_quantity(accelerator.memory) / 2**20).to_integral_value(ROUND_CEILING))


def least_capability(spec: InferenceServiceSpec) -> tuple[int, int] | None:
    """The least compute capability that the accelerator and the engines ask for; None: any."""
    asked = spec.accelerator.compute_capability
    found = [capability(asked)] if asked is not None else []
    found += [engine.least_capability for _, engine in engines(spec) if engine.least_capability is not None]
    return max(found, default=None)


def exact_capability(spec: InferenceServiceSpec) -> tuple[int, int] | None:
    """The one compute capability that the engines run on; None: they don't say, or there are none."""
    return next((engine.exact_capability for _, engine in engines(spec) if engine.exact_capability is not None), None)


def architecture(spec: InferenceServiceSpec) -> str | None:
    """The architecture of the node that the engines run on, as its label says it; None: they don't say."""
    return next((engine.architecture for _, engine in engines(spec) if engine.architecture is not None), None)


def wants_several_gpus(accelerator: Accelerator) -> bool:
    """Whether a pod asks for several of what are GPUs on some nodes, MIG slices or shares of one GPU on others."""
    return accelerator.resource == DEFAULT_RESOURCE and accelerator.count > 1


def node_terms(spec: InferenceServiceSpec) -> list[dict[str, Any]]:
    """The nodeSelectorTerms that products, number, memory, compute capability and engines ask for; empty: any node.

    Terms are alternatives and expressions in one must all hold, so a least capability of 8.6 takes two terms. With a
    claim there are none: its driver knows the devices, and the labels may describe others.
    """
    accelerator = spec.accelerator
    if not accelerator.devices or accelerator.claim is not None:
        return []
    common: list[dict[str, Any]] = []
    if accelerator.products:
        common.append(_one_of(PRODUCT_LABEL, list(accelerator.products)))
    memory = least_memory_mib(accelerator)
    if memory is not None:
        common.append(_more_than(memory_label(accelerator), memory - 1))
    if wants_several_gpus(accelerator):
        common.append({"key": SLICES_LABEL, "operator": "DoesNotExist"})
        common.append({"key": SHARING_LABEL, "operator": "NotIn", "values": list(SHARING_STRATEGIES)})
    arch = architecture(spec)
    if arch is not None:
        common.append(_one_of(ARCHITECTURE_LABEL, [arch]))
    terms = [[*common, *alternative] for alternative in _capabilities(spec)]
    return [{"matchExpressions": term} for term in terms if term]


def _capabilities(spec: InferenceServiceSpec) -> list[list[dict[str, Any]]]:
    exact, least = exact_capability(spec), least_capability(spec)
    alternatives: list[list[dict[str, Any]]]
    if exact is not None:
        alternatives = [[_one_of(MAJOR_LABEL, [str(exact[0])]), _one_of(MINOR_LABEL, [str(exact[1])])]]
    elif least is not None and least[1] == 0:
        alternatives = [[_more_than(MAJOR_LABEL, least[0] - 1)]]
    elif least is not None:
        same_major = [_one_of(MAJOR_LABEL, [str(least[0])]), _more_than(MINOR_LABEL, least[1] - 1)]
        alternatives = [[_more_than(MAJOR_LABEL, least[0])], same_major]
    else:
        return [[]]
    if spec.accelerator.compute_capability is None:
        # Only an engine asks: a node that doesn't say what it has may well run it, and nothing is refused unknown.
        alternatives.append([{"key": MAJOR_LABEL, "operator": "DoesNotExist"}])
    return alternatives


def _one_of(key: str, values: list[str]) -> dict[str, Any]:
    return {"key": key, "operator": "In", "values": values}


def _more_than(key: str, number: int) -> dict[str, Any]:
    # There is no "at least"; the scheduler compares whole numbers only.
    return {"key": key, "operator": "Gt", "values": [str(number)]}


def tolerations(spec: InferenceServiceSpec) -> list[dict[str, Any]]:
    """The pods' tolerations: those of the spec, and with an accelerator those of the usual taints."""
    return [toleration.model_dump(by_alias=True, exclude_defaults=True) for toleration in _tolerations(spec)]


def _tolerations(spec: InferenceServiceSpec) -> list[Toleration]:
    found = list(spec.placement.tolerations)
    if spec.accelerator.devices and spec.placement.tolerate_accelerator_taints:
        for key in dict.fromkeys((USUAL_TAINT, spec.accelerator.resource)):
            usual = Toleration(key=key, operator="Exists", effect="NoSchedule")
            if usual not in found:
                found.append(usual)
    return found


def memory_mib(node: Mapping[str, Any], accelerator: Accelerator) -> int | None:
    """Memory of one accelerator as the node's label says it, in MiB; None when it doesn't say."""
    text = _labels(node).get(memory_label(accelerator), "")
    return int(text) if text.isdecimal() else None


def capability_of(node: Mapping[str, Any]) -> tuple[int, int] | None:
    """The compute capability of a node's accelerators; None when its labels don't say."""
    labels = _labels(node)
    major, minor = labels.get(MAJOR_LABEL, ""), labels.get(MINOR_LABEL, "")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def is_shared(node: Mapping[str, Any] | None, accelerator: Accelerator) -> bool:
    """Whether other pods may be on the same device: by time-slicing or MPS, where a metric of the device is of all."""
    if accelerator.shared:
        return True
    return node is not None and _labels(node).get(SHARING_LABEL, "none") not in {"", "none"}


def offered(node: Mapping[str, Any], resource: str) -> int:
    """How many of a resource a node has for pods now."""
    return _integer((node.get("status") or {}).get("allocatable"), resource)


def built_in(node: Mapping[str, Any], resource: str) -> int:
    """How many of a resource a node has, also those that are unhealthy: a device that is repaired comes back.

    While a device plugin restarts, a node offers none, and its capacity still says what it has.
    """
    return max(offered(node, resource), _integer((node.get("status") or {}).get("capacity"), resource))


@dataclass(frozen=True)
class Wanted:
    """What a node must have for a service's pods, worked out of the spec once: clusters have thousands of nodes."""

    accelerator: Accelerator
    least_mib: int | None
    exact: tuple[int, int] | None
    """The one compute capability that the engines run on."""
    least: tuple[int, int] | None
    architecture: str | None
    labels: Mapping[str, str]
    tolerations: Sequence[Toleration]

    @classmethod
    def of(cls, spec: InferenceServiceSpec) -> Wanted:
        """From a parsed spec."""
        return cls(
            spec.accelerator,
            least_memory_mib(spec.accelerator),
            exact_capability(spec),
            least_capability(spec),
            architecture(spec),
            spec.placement.node_selector,
            _tolerations(spec),
        )

    def right_product(self, node: Mapping[str, Any]) -> bool:
        """Whether the node has one of the products."""
        return not self.accelerator.products or _labels(node).get(PRODUCT_LABEL) in self.accelerator.products

    def whole(self, node: Mapping[str, Any]) -> bool:
        """Whether the node's GPUs are whole ones, where several together are wanted."""
        labels = _labels(node)
        divided = SLICES_LABEL in labels or labels.get(SHARING_LABEL) in SHARING_STRATEGIES
        return not (divided and wants_several_gpus(self.accelerator))

    def enough_memory(self, node: Mapping[str, Any]) -> bool:
        """Whether the node's label says that an accelerator has the least memory."""
        return self.least_mib is None or (memory_mib(node, self.accelerator) or 0) >= self.least_mib

    def right_capability(self, node: Mapping[str, Any]) -> bool:
        """Whether the accelerators' compute capability will do; one that the labels don't say, for an engine only."""
        if self.exact is None and self.least is None:
            return True
        has = capability_of(node)
        if has is None:
            return self.accelerator.compute_capability is None
        return has == self.exact if self.exact is not None else self.least is None or has >= self.least

    def right_architecture(self, node: Mapping[str, Any]) -> bool:
        """Whether the engines' platform is the node's."""
        return self.architecture is None or _labels(node).get(ARCHITECTURE_LABEL) == self.architecture

    def selected(self, node: Mapping[str, Any]) -> bool:
        """Whether the node has the labels of `placement.nodeSelector`."""
        labels = _labels(node)
        return all(labels.get(key) == value for key, value in self.labels.items())

    def repelling(self, node: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The node's taints that keep the service's pods away."""
        taints = (node.get("spec") or {}).get("taints") or ()
        return [
            taint
            for taint in taints
            if taint.get("effect") in _REPELS
            and not any(_tolerates(toleration, taint) for toleration in self.tolerations)
        ]

    def labels_and_devices_suit(self, node: Mapping[str, Any]) -> bool:
        """All that a node has for good: everything but its taints and its state."""
        return (
            self.right_product(node)
            and self.whole(node)
            and self.enough_memory(node)
            and self.right_capability(node)
            and self.right_architecture(node)
            and self.selected(node)
        )


def _labels(node: Mapping[str, Any]) -> Mapping[str, str]:
    return node["metadata"].get("labels") or {}


def free_gpus(
    nodes: Iterable[Mapping[str, Any]] | None, pods: Iterable[Mapping[str, Any]], spec: InferenceServiceSpec
) -> int | None:
    """Accelerators that pods of this spec could get now, counted in whole pods per node.

    Args:
        nodes: all nodes; None when they are not known, as in namespaced mode.
        pods: every pod that is bound to a node, of any owner.
        spec: the service, whose accelerator and placement decide which nodes match.

    Returns:
        The number of accelerators, a multiple of `accelerator.count`; 0 without an accelerator; None when unknown, as
        with a claim, whose devices only their driver knows.
    """
    accelerator = spec.accelerator
    if nodes is None or accelerator.claim is not None:
        return None
    if accelerator.count == 0:
        return 0
    wanted = Wanted.of(spec)
    free = {
        node["metadata"]["name"]: offered(node, accelerator.resource) for node in nodes if _takes_pods(node, wanted)
    }
    for pod in pods:
        node_name = (pod.get("spec") or {}).get("nodeName")
        if node_name in free and (pod.get("status") or {}).get("phase") not in _ENDED:
            free[node_name] -= requested(pod, accelerator.resource)
    # Two halves on two nodes make no pod that needs both.
    return sum(max(0, count) // accelerator.count * accelerator.count for count in free.values())


def requested(pod: Mapping[str, Any], resource: str) -> int:
    """What the scheduler books for a pod: its containers' sum, or an init container that needs more."""
    spec = pod.get("spec") or {}
    sidecars = running = largest_init = 0
    for container in spec.get("initContainers") or ():
        own = _of_container(container, resource)
        if container.get("restartPolicy") == "Always":
            sidecars += own
            largest_init = max(largest_init, sidecars)
        else:
            largest_init = max(largest_init, sidecars + own)
    for container in spec.get("containers") or ():
        running += _of_container(container, resource)
    return max(running + sidecars, largest_init)


def _of_container(container: Mapping[str, Any], resource: str) -> int:
    resources = container.get("resources") or {}
    # The API server copies an extended resource's limit into the request; a static pod's mirror may lack it.
    return _integer({**(resources.get("limits") or {}), **(resources.get("requests") or {})}, resource)


def _integer(quantities: Mapping[str, Any] | None, resource: str) -> int:
    text = str((quantities or {}).get(resource, "0"))
    if text.isdecimal():
        return int(text)
    try:
        return int(parse_quantity(text))  # the API server writes 1000 as 1k
    except ValueError:
        return 0


def _takes_pods(node: Mapping[str, Any], wanted: Wanted) -> bool:
    node_spec, status = node.get("spec") or {}, node.get("status") or {}
    ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in status.get("conditions") or ())
    return (
        ready
        and "deletionTimestamp" not in node["metadata"]
        and not node_spec.get("unschedulable")
        and wanted.labels_and_devices_suit(node)
        and not wanted.repelling(node)
    )


def _tolerates(toleration: Toleration, taint: Mapping[str, Any]) -> bool:
    if toleration.effect and toleration.effect != taint.get("effect"):
        return False
    if toleration.operator == "Exists":
        return not toleration.key or toleration.key == taint.get("key")
    return toleration.key == taint.get("key") and toleration.value == (taint.get("value") or "")
