"""The NetworkPolicy: clients and Prometheus in, DNS and the model store out. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from conch import names

if TYPE_CHECKING:
    from collections.abc import Iterable

    from conch.workload.source import Source

NAMESPACE_NAME_LABEL = "kubernetes.io/metadata.name"
DNS_PORT = 53
METADATA_ADDRESSES = ("169.254.169.252", "169.254.169.254", "169.254.170.23")
"""GKE's metadata server on the node, the cloud's own, EKS Pod Identity's agent."""
METADATA_PORTS = (80, 987, 988)
"""80, and what GKE's metadata server listens on behind it."""


def network_policy(
    service: str, sources: Iterable[Source], *, prometheus_namespace: str, server_ports: Iterable[int] = ()
) -> dict[str, Any]:
    """Everything that isn't named here is refused.

    A NetworkPolicy knows pods, not containers, so the model store's port is open to the whole pod; it is there only
    for services that download, since volumes are mounted by the kubelet. The same holds for the node's metadata
    service, which only a source with the ServiceAccount's cloud identity needs. `server_ports` are those that Triton
    itself connects to; where Redis or the collector runs isn't known here, so they are open to every address.
    """
    sources = list(sources)
    ports = sorted({*(port for source in sources for port in source.ports), *server_ports})
    egress: list[dict[str, Any]] = [{"ports": [_port("UDP", DNS_PORT), _port("TCP", DNS_PORT)]}]
    if ports:
        egress.append({"ports": [_port("TCP", port) for port in ports]})
    if any(source.cloud_identity for source in sources):
        egress.append(
            {
                "to": [{"ipBlock": {"cidr": f"{address}/32"}} for address in METADATA_ADDRESSES],
                "ports": [_port("TCP", port) for port in METADATA_PORTS],
            }
        )
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": names.network_policy(service)},
        "spec": {
            "podSelector": {"matchLabels": names.pod_labels(service)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                {"ports": [_port("TCP", names.HTTP_PORT), _port("TCP", names.GRPC_PORT)]},
                {
                    "from": [{"namespaceSelector": {"matchLabels": {NAMESPACE_NAME_LABEL: prometheus_namespace}}}],
                    "ports": [_port("TCP", names.METRICS_PORT)],
                },
            ],
            "egress": egress,
        },
    }


def _port(protocol: str, port: int) -> dict[str, Any]:
    return {"protocol": protocol, "port": port}
