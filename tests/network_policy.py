"""Decides whether NetworkPolicies let a connection through, by the published meaning of networking.k8s.io/v1.

A pod that no policy selects for a direction accepts everything in it. Otherwise the union of the selecting policies'
rules decides. A connection needs the sender's egress and the receiver's ingress. The node's own traffic to its pods
(the kubelet's probes) passes always and is not modelled.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Policy = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """A pod with the labels of its namespace."""

    namespace: str
    labels: Mapping[str, str] = field(default_factory=dict)
    ip: str = "10.1.0.9"
    port_names: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """A named container port → its protocol and number."""

    @property
    def namespace_labels(self) -> Mapping[str, str]:
        """The API server gives each namespace this label."""
        return {"kubernetes.io/metadata.name": self.namespace}


@dataclass(frozen=True)
class Outside:
    """An address that is no pod's: the internet, or the API server."""

    ip: str


End = Pod | Outside


@dataclass(frozen=True)
class Flow:
    """One connection or datagram."""

    source: End
    destination: End
    port: int
    protocol: str = "TCP"


def allowed(policies: Iterable[Policy], flow: Flow) -> bool:
    """Whether the flow passes."""
    policies = list(policies)
    return _passes(policies, flow, "Egress") and _passes(policies, flow, "Ingress")


def _passes(policies: list[Policy], flow: Flow, direction: str) -> bool:
    pod, peer = (flow.source, flow.destination) if direction == "Egress" else (flow.destination, flow.source)
    if not isinstance(pod, Pod):
        return True
    isolating = [policy for policy in policies if _selects(policy, pod) and direction in _types(policy)]
    if not isolating:
        return True
    rules, peers = ("egress", "to") if direction == "Egress" else ("ingress", "from")
    return any(
        _peers_match(rule.get(peers), policy["metadata"]["namespace"], peer) and _ports_match(rule.get("ports"), flow)
        for policy in isolating
        for rule in policy["spec"].get(rules) or ()
    )


def _types(policy: Policy) -> list[str]:
    spec = policy["spec"]
    return spec.get("policyTypes") or ["Ingress", *(["Egress"] if spec.get("egress") else [])]


def _selects(policy: Policy, pod: Pod) -> bool:
    return policy["metadata"]["namespace"] == pod.namespace and matches(policy["spec"]["podSelector"], pod.labels)


def _peers_match(peers: list[dict[str, Any]] | None, namespace: str, end: End) -> bool:
    return not peers or any(_peer_matches(peer, namespace, end) for peer in peers)


def _peer_matches(peer: dict[str, Any], namespace: str, end: End) -> bool:
    if "ipBlock" in peer:
        address, block = ipaddress.ip_address(end.ip), peer["ipBlock"]
        inside = address in ipaddress.ip_network(block["cidr"])
        return inside and not any(address in ipaddress.ip_network(hole) for hole in block.get("except", ()))
    if not isinstance(end, Pod):
        return False
    if "namespaceSelector" in peer:
        if not matches(peer["namespaceSelector"], end.namespace_labels):
            return False
    elif end.namespace != namespace:
        return False
    return matches(peer.get("podSelector") or {}, end.labels)


def _ports_match(ports: list[dict[str, Any]] | None, flow: Flow) -> bool:
    return not ports or any(_port_matches(port, flow) for port in ports)


def _port_matches(port: dict[str, Any], flow: Flow) -> bool:
    if port.get("protocol", "TCP") != flow.protocol:
        return False
    number = port.get("port")
    if number is None:
        return True
    if isinstance(number, str):
        named = flow.destination.port_names if isinstance(flow.destination, Pod) else {}
        return named.get(number) == (flow.protocol, flow.port)
    return int(number) <= flow.port <= int(port.get("endPort", number))


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector matches; an empty one matches everything."""
    wanted: Mapping[str, str] = selector.get("matchLabels") or {}
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _expression_holds(expression, labels) for expression in selector.get("matchExpressions") or ()
    )


def _expression_holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    key, values = expression["key"], expression.get("values") or ()
    match expression["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
        case unknown:
            raise ValueError(f"operator: {unknown} is not one of In, NotIn, Exists, DoesNotExist")
