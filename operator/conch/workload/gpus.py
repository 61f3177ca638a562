"""How many accelerators are free for one service's pods: nodes that match, allocatable minus requested. Pure.

The pods must be all that run on the nodes, not only Conch's: whoever else holds an accelerator counts. The watch keeps
only Conch's own pods, since one over all pods of a cluster would cost more memory than everything else together; the
caller therefore lists them when a service wants more, and keeps the answer for some seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from conch.api.inferenceservice import InferenceServiceSpec
    from conch.api.placement import Toleration

PRODUCT_LABEL: Final = "nvidia.com/gpu.product"
_ENDED: Final = frozenset({"Succeeded", "Failed"})
_REPELS: Final = frozenset({"NoSchedule", "NoExecute"})


def free_gpus(
    nodes: Iterable[Mapping[str, Any]] | None, pods: Iterable[Mapping[str, Any]], spec: InferenceServiceSpec
) -> int | None:
    """Accelerators that pods of this spec could get now, counted in whole pods per node.

    Args:
        nodes: all nodes; None when they are not known, as in namespaced mode.
        pods: every pod that is bound to a node, of any owner.
        spec: the service, whose accelerator and placement decide which nodes match.

    Returns:
        The number of accelerators, a multiple of `accelerator.count`; 0 without an accelerator; None when unknown.
    """
    if nodes is None:
        return None
    accelerator = spec.accelerator
    if accelerator.count == 0:
        return 0
    free = {
        node["metadata"]["name"]: _integer((node.get("status") or {}).get("allocatable"), accelerator.resource)
        for node in nodes
        if _takes_pods(node, spec)
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
    return int(text) if text.isdigit() else 0


def _takes_pods(node: Mapping[str, Any], spec: InferenceServiceSpec) -> bool:
    node_spec, status = node.get("spec") or {}, node.get("status") or {}
    labels = node["metadata"].get("labels") or {}
    ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in status.get("conditions") or ())
    return (
        ready
        and "deletionTimestamp" not in node["metadata"]
        and not node_spec.get("unschedulable")
        and (not spec.accelerator.products or labels.get(PRODUCT_LABEL) in spec.accelerator.products)
        and all(labels.get(key) == value for key, value in spec.placement.node_selector.items())
        and all(_tolerated(taint, spec) for taint in node_spec.get("taints") or () if taint.get("effect") in _REPELS)
    )


def _tolerated(taint: Mapping[str, Any], spec: InferenceServiceSpec) -> bool:
    # The admission plugin ExtendedResourceToleration gives a pod this one for its own resource, where it is on.
    if taint.get("key") == spec.accelerator.resource:
        return True
    return any(_tolerates(toleration, taint) for toleration in spec.placement.tolerations)


def _tolerates(toleration: Toleration, taint: Mapping[str, Any]) -> bool:
    if toleration.effect and toleration.effect != taint.get("effect"):
        return False
    if toleration.operator == "Exists":
        return not toleration.key or toleration.key == taint.get("key")
    return toleration.key == taint.get("key") and toleration.value == (taint.get("value") or "")
