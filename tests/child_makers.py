"""Builders of children: as they are wanted, as the API server returns them, and pods in every state."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from conch import names
from conch.api.inferenceservice import parse_service
from conch.workload.deployment import SURGE_ON_CREATE
from conch.workload.desired import desired_children
from makers import IMAGES, make_service, stored

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from conch.workload.deployment import Images, Strategy


def make_wanted(
    service: Mapping[str, Any],
    *,
    images: Images = IMAGES,
    strategy: Strategy = SURGE_ON_CREATE,
    live: Mapping[str, Any] | None = None,
    with_pod_monitor: bool = True,
    allow_code: bool = True,
) -> dict[str, dict[str, Any]]:
    """The wanted children of a stored service, by name."""
    children = desired_children(
        service,
        parse_service(service),
        images=images,
        strategy=strategy,
        live_deployment=live,
        prometheus_namespace="monitoring",
        with_pod_monitor=with_pod_monitor,
        allow_code=allow_code,
    )
    return {f"{child['kind']} {child['metadata']['name']}": child for child in children}


def make_live(wanted: Mapping[str, Any], *, uid: str | None = None, version: str = "7") -> dict[str, Any]:
    """A child as the API server returns it: with an identity and with the defaults that a server fills in."""
    live = copy.deepcopy(dict(wanted))
    live["metadata"] |= {
        "uid": uid or f"uid-of-{live['kind']}-{live['metadata']['name']}",
        "resourceVersion": version,
        "generation": 1,
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    if live["kind"] == "Service":
        defaults = {"type": "ClusterIP", "sessionAffinity": "None", "internalTrafficPolicy": "Cluster"}
        live["spec"] = {"clusterIP": "10.0.0.7", **defaults, **live["spec"]}
    if live["kind"] == "Deployment":
        pod = live["spec"]["template"]["spec"]
        pod |= {"restartPolicy": "Always", "dnsPolicy": "ClusterFirst", "schedulerName": "default-scheduler"}
        pod["serviceAccount"] = pod["serviceAccountName"]
        for container in [*pod["initContainers"], *pod["containers"]]:
            container.setdefault("terminationMessagePath", "/dev/termination-log")
        for volume in pod["volumes"]:
            for item in volume.get("downwardAPI", {}).get("items", []):
                item["fieldRef"]["apiVersion"] = "v1"
            if "downwardAPI" in volume:
                volume["downwardAPI"]["defaultMode"] = 420
    return live


def make_deployment(
    service: Mapping[str, Any] | None = None,
    *,
    images: Images = IMAGES,
    strategy: Strategy = SURGE_ON_CREATE,
    wanted: int = 1,
    replicas: int | None = None,
    ready: int | None = None,
    updated: int | None = None,
    generation: int = 1,
    seen: int | None = None,
    conditions: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """A live Deployment of a stored service; all that isn't said is as in a finished rollout."""
    service = stored(make_service()) if service is None else service
    children = make_wanted(service, images=images, strategy=strategy)
    live = make_live(children[f"Deployment {names.deployment(service['metadata']['name'])}"])
    replicas = wanted if replicas is None else replicas
    live["metadata"]["generation"] = generation
    live["spec"]["replicas"] = wanted
    live["status"] = {
        "observedGeneration": generation if seen is None else seen,
        "replicas": replicas,
        "updatedReplicas": replicas if updated is None else updated,
        "readyReplicas": replicas if ready is None else ready,
        "conditions": [dict(condition) for condition in conditions],
    }
    return live


def make_pod(
    name: str = "vision-server-5d8f-aaaaa",
    *,
    created: str = "2026-01-01T00:00:00Z",
    phase: str = "Running",
    unschedulable: str | None = None,
    fetch: Mapping[str, Any] | None = None,
    triton: Mapping[str, Any] | None = None,
    deleted: bool = False,
    ready_at: str | None = None,
    of: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A pod of the service `vision` as the cache holds it; ready unless a container's status says otherwise.

    `ready_at` is the address of a pod that a kubelet calls ready; `of` is the Deployment that it was made from.
    """
    status: dict[str, Any] = {"phase": "Pending" if unschedulable else phase}
    if unschedulable:
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": unschedulable}
        status["conditions"] = [condition]
    else:
        done = {"exitCode": 0, "reason": "Completed"}
        status["initContainerStatuses"] = [
            {"name": names.FETCH_CONTAINER, "image": IMAGES.fetch, "ready": True, "state": {"terminated": done}}
            | dict(fetch or {})
        ]
        status["containerStatuses"] = [
            {"name": names.SERVER_CONTAINER, "image": IMAGES.triton, "ready": True, "state": {"running": {}}}
            | dict(triton or {})
        ]
    if ready_at is not None:
        status["podIP"] = ready_at
        status["conditions"] = [{"type": "Ready", "status": "True", "lastTransitionTime": created}]
    template: Mapping[str, Any] = {} if of is None else of["spec"]["template"]
    metadata = {"name": name, "namespace": "default", "uid": f"uid-of-{name}", "creationTimestamp": created}
    if deleted:
        metadata["deletionTimestamp"] = "2026-01-01T01:00:00Z"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **metadata,
            "labels": names.pod_labels("vision"),
            **({"annotations": dict(template["metadata"]["annotations"])} if template else {}),
        },
        **({"spec": {"containers": template["spec"]["containers"]}} if template else {}),
        "status": status,
    }
