"""Steps that tests on the API server have in common: a service, its children, pods that pretend to be ready."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from apiserver import ApiServer, Refused, condition

from conch import names
from conch.kube.client import (
    DEPLOYMENTS,
    EVENTS,
    INFERENCE_SERVICES,
    NETWORK_POLICIES,
    POD_DISRUPTION_BUDGETS,
    POD_MONITORS,
    PODS,
    REPLICA_SETS,
    SERVICE_ACCOUNTS,
    SERVICES,
)
from makers import make_service
from operators import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from conch.kube.client import Resource

Object = dict[str, Any]
LIMIT_S: Final = 60.0
"""Generous: it bounds a hang, it measures nothing."""

CHILDREN: Final = (
    (SERVICE_ACCOUNTS, names.service_account),
    (NETWORK_POLICIES, names.network_policy),
    (DEPLOYMENTS, names.deployment),
    (SERVICES, names.clients_service),
    (SERVICES, names.replicas_service),
    (POD_DISRUPTION_BUDGETS, names.disruption_budget),
    (POD_MONITORS, names.pod_monitor),
)
ALL_KINDS: Final = (
    INFERENCE_SERVICES, DEPLOYMENTS, REPLICA_SETS, PODS, SERVICES, SERVICE_ACCOUNTS, NETWORK_POLICIES,
    POD_DISRUPTION_BUDGETS, POD_MONITORS, EVENTS,
)  # fmt: skip


def until(what: str, state: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """The first true answer; a 404 on the way there is a no."""

    def answer() -> Any:
        try:
            return state()
        except Refused as error:
            if error.status == 404:
                return None
            raise

    return wait_until(answer, limit_s, what, every_s=0.1)


def create(
    api: ApiServer, namespace: str, fields: Mapping[str, Any] | None = None, *, name: str = "vision", **more: Any
) -> Object:
    """Apply a service as GitOps does; fields as `make_service` takes them."""
    return api.apply(make_service(fields, name=name, namespace=namespace, **more))


def settled(api: ApiServer, namespace: str, name: str = "vision") -> Object:
    """Wait until all children are there and the status tells of this generation; the service."""
    until(f"the children of {name}", lambda: not missing(api, namespace, name))
    return until(f"the status of {name}", lambda: told(api.service(namespace, name)))  # type: ignore[no-any-return]


def told(service: Object) -> Object | None:
    """The service once its status was made by a whole reconcile of its present generation and by a scaling tick."""
    status = service.get("status") or {}
    seen = status.get("observedGeneration") == service["metadata"]["generation"]
    whole = bool(condition(service, "Ready")) and condition(service, "Stalled").get("reason") != "RollingOut"
    return service if seen and whole and "scaling" in status else None


def made(api: ApiServer, namespace: str, fields: Mapping[str, Any] | None = None, *, name: str = "vision") -> Object:
    """Create, and wait until it is settled."""
    create(api, namespace, fields, name=name)
    return settled(api, namespace, name)


def missing(api: ApiServer, namespace: str, name: str) -> list[str]:
    """Children that aren't there."""
    return [
        f"{resource.kind} {child(name)}"
        for resource, child in CHILDREN
        if api.find(resource, namespace, child(name)) is None
    ]


def left(api: ApiServer, namespace: str, name: str) -> list[str]:
    """Children that are still there."""
    return [
        f"{resource.kind} {child(name)}"
        for resource, child in CHILDREN
        if api.find(resource, namespace, child(name)) is not None
    ]


def versions(api: ApiServer, namespace: str, kinds: Iterable[Resource] = ALL_KINDS) -> dict[str, str]:
    """The resourceVersion of everything in a namespace."""
    return {
        f"{item['kind']} {item['metadata']['name']}": item["metadata"]["resourceVersion"]
        for resource in kinds
        for item in api.all(resource, namespace)
    }


def replicas(api: ApiServer, namespace: str, name: str = "vision") -> int:
    """spec.replicas of the Deployment."""
    return int(api.get(DEPLOYMENTS, namespace, names.deployment(name))["spec"]["replicas"])


def fake_readiness(api: ApiServer, namespace: str, *, ready: bool = True) -> None:
    """Write into every pod's status what a kubelet would: nothing runs here. The controllers count it as any other."""
    for pod in api.all(PODS, namespace):
        state = {"type": "Ready", "status": str(ready), "lastTransitionTime": "2026-01-01T00:00:00Z"}
        status = {"status": {"phase": "Running", "conditions": [state]}}
        api.edit(PODS, namespace, pod["metadata"]["name"], status, sub="status", manager="fake-kubelet")


def served(api: ApiServer, namespace: str, name: str = "vision") -> Object:
    """Pretend that the pods are ready, and wait until the status says that the spec is served."""

    def is_served() -> Object | None:
        fake_readiness(api, namespace)
        service = api.service(namespace, name)
        return service if condition(service, "Reconciling").get("reason") == "Settled" else None

    return until(f"{name} to be served", is_served)  # type: ignore[no-any-return]


def edit_port(api: ApiServer, namespace: str) -> None:
    """A person changes the port of the Service that clients call."""
    edit = [{"op": "replace", "path": "/spec/ports/0/port", "value": 8888}]
    api.edit(SERVICES, namespace, "vision", edit)


def port_is_back(api: ApiServer, namespace: str) -> bool:
    """Whether that Service has its own port."""
    service = api.clients_service(namespace, "vision")
    return service is not None and service["spec"]["ports"][0]["port"] == names.HTTP_PORT


def images(deployment: Mapping[str, Any]) -> dict[str, str]:
    """Container name → image of a Deployment's template."""
    pod = deployment["spec"]["template"]["spec"]
    return {container["name"]: container["image"] for container in [*pod["initContainers"], *pod["containers"]]}
