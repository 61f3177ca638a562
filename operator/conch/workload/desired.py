"""InferenceService → every child it should have, and how a live child is compared with it. Pure."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from conch import names
from conch.api.fields import parse_quantity
from conch.triton.arguments import server_ports
from conch.workload.claims import claim_template, template_name
from conch.workload.deployment import Images, Strategy, deployment
from conch.workload.disruption import disruption_budget
from conch.workload.monitors import pod_monitor
from conch.workload.network import network_policy
from conch.workload.services import clients_service, replicas_service, service_account
from conch.workload.source import source_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from conch.api.inferenceservice import InferenceServiceSpec


def child_names(service: str, spec: InferenceServiceSpec, *, with_pod_monitor: bool) -> list[dict[str, Any]]:
    """Kind and name of every child, which are known before anything is rendered."""
    claim = spec.accelerator.claim
    kinds = {
        "ServiceAccount": [names.service_account(service)] if own_account(service, spec) else [],
        "NetworkPolicy": [names.network_policy(service)],
        "Deployment": [names.deployment(service)],
        "Service": [names.clients_service(service), names.replicas_service(service)],
        "PodDisruptionBudget": [names.disruption_budget(service)],
        "PodMonitor": [names.pod_monitor(service)] if with_pod_monitor else [],
        "ResourceClaimTemplate": [template_name(service, claim)] if claim is not None else [],
    }
    return [{"kind": kind, "metadata": {"name": name}} for kind, found in kinds.items() for name in found]


def own_account(service: str, spec: InferenceServiceSpec) -> bool:
    """Whether the pods run as the ServiceAccount that Conch makes, and not as one of the user's."""
    return spec.runtime.service_account_name in {None, names.service_account(service)}


def desired_children(
    service: Mapping[str, Any],
    spec: InferenceServiceSpec,
    *,
    images: Images,
    strategy: Strategy,
    live_deployment: Mapping[str, Any] | None,
    prometheus_namespace: str,
    with_pod_monitor: bool,
    allow_code: bool = True,
) -> list[dict[str, Any]]:
    """The children in the order in which they are applied: pods need their identity and policy before they start.

    `allow_code`: whether models may bring code, as the operator's settings say.
    """
    name = service["metadata"]["name"]
    children = [
        *([service_account(name)] if own_account(name, spec) else []),
        network_policy(
            name,
            [source_of(model) for model in spec.models],
            prometheus_namespace=prometheus_namespace,
            server_ports=server_ports(spec),
        ),
        deployment(name, spec, images=images, strategy=strategy, live=live_deployment, allow_code=allow_code),
        clients_service(name),
        replicas_service(name),
        disruption_budget(name),
    ]
    if spec.accelerator.claim is not None:
        children.insert(0, claim_template(name, spec.accelerator.claim))
    if with_pod_monitor:
        children.append(pod_monitor(name))
    for child in children:
        _adopt(child, service)
    return children


def _adopt(child: dict[str, Any], service: Mapping[str, Any]) -> None:
    metadata, owner = child["metadata"], service["metadata"]
    metadata["namespace"] = owner["namespace"]
    metadata["labels"] = names.child_labels(owner["name"])
    metadata["ownerReferences"] = [
        {
            # No blockOwnerDeletion: OpenShift's admission plugin answers 403 to it (R4).
            "apiVersion": names.API_VERSION,
            "kind": names.SERVICE_KIND,
            "name": owner["name"],
            "uid": owner["uid"],
            "controller": True,
        }
    ]
    metadata.setdefault("annotations", {})[names.DESIRED_ANNOTATION] = digest(child)


def digest(child: Mapping[str, Any]) -> str:
    """A short digest of a wanted object; it tells a dropped field, which comparing values can't."""
    return hashlib.sha256(json.dumps(child, sort_keys=True).encode()).hexdigest()[:16]


def first_difference(live: Any, wanted: Any, path: str = "") -> str | None:
    """Where `live` first lacks a wanted value, such as `spec.ports[http].port`; None when applying changes nothing.

    Lists of named items match by name, all others in full; amounts of resources match by what they stand for. A field
    that is no longer wanted doesn't show here; the digest in the annotation shows it, and a digest alone survives a
    person's edit (R8): the two are needed together.
    """
    if not path and _holds(live, wanted):
        return None
    if isinstance(wanted, dict):
        if not isinstance(live, dict):
            return path
        pairs = ((key, live.get(key, _ABSENT), value) for key, value in wanted.items())
        return _first((first_difference(there, value, f"{path}.{key}".lstrip(".")) for key, there, value in pairs))
    if isinstance(wanted, list):
        if not isinstance(live, list):
            return path
        if wanted and all(isinstance(item, dict) and "name" in item for item in wanted):
            return _first(_named_difference(live, item, f"{path}[{item['name']}]") for item in wanted)
        if len(live) != len(wanted):
            return path
        return _first(
            first_difference(there, item, f"{path}[{index}]")
            for index, (there, item) in enumerate(zip(live, wanted, strict=True))
        )
    same = live == wanted and isinstance(live, bool) == isinstance(wanted, bool)
    return None if same or (_is_quantity(path) and _same_quantity(live, wanted)) else path


def _holds(live: Any, wanted: Any) -> bool:
    """Whether every wanted value is in its place, letter for letter: nearly always so, and half the cost of a pass."""
    if isinstance(wanted, dict):
        return isinstance(live, dict) and all(key in live and _holds(live[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return isinstance(live, list) and len(live) == len(wanted) and all(map(_holds, live, wanted))
    return bool(live == wanted) and isinstance(live, bool) == isinstance(wanted, bool)


_ABSENT = object()
_QUANTITIES = (".requests.", ".limits.", ".sizeLimit")


def _named_difference(live: list[Any], wanted: Mapping[str, Any], path: str) -> str | None:
    # Names aren't always unique: an owner may share one with another kind's, a volume can be mounted twice.
    namesakes = [item for item in live if isinstance(item, dict) and item.get("name") == wanted["name"]]
    differences = [first_difference(item, wanted, path) for item in namesakes]
    return None if None in differences else next(iter(differences), path)


def _is_quantity(path: str) -> bool:
    # Elsewhere "1" and "1.0" are two texts: labels, annotations, arguments.
    return any(part in path for part in _QUANTITIES)


def _first(differences: Iterable[str | None]) -> str | None:
    return next((difference for difference in differences if difference is not None), None)


def _same_quantity(live: Any, wanted: Any) -> bool:
    if not isinstance(live, str) or not isinstance(wanted, str):
        return False
    try:
        return parse_quantity(live) == parse_quantity(wanted)
    except ValueError:
        return False
