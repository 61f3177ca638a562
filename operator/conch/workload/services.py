"""The Service that clients call, the headless Service of the pods, and the pods' ServiceAccount. Pure."""

from __future__ import annotations

from typing import Any

from conch import names


def clients_service(service: str) -> dict[str, Any]:
    """What clients call; a router will stand behind the same name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": names.clients_service(service)},
        "spec": {
            "selector": names.pod_labels(service),
            "ports": [_port("http", names.HTTP_PORT), _port("grpc", names.GRPC_PORT, "kubernetes.io/h2c")],
        },
    }


def replicas_service(service: str) -> dict[str, Any]:
    """The pods themselves, for Prometheus and for a router."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": names.replicas_service(service)},
        "spec": {
            "clusterIP": "None",
            "selector": names.pod_labels(service),
            "ports": [
                _port("http", names.HTTP_PORT),
                _port("grpc", names.GRPC_PORT, "kubernetes.io/h2c"),
                _port("metrics", names.METRICS_PORT),
            ],
        },
    }


def service_account(service: str) -> dict[str, Any]:
    """An identity without a token: Triton never talks to the API server."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": names.service_account(service)},
        "automountServiceAccountToken": False,
    }


def _port(name: str, number: int, app_protocol: str | None = None) -> dict[str, Any]:
    port: dict[str, Any] = {"name": name, "port": number, "targetPort": name, "protocol": "TCP"}
    if app_protocol:
        port["appProtocol"] = app_protocol
    return port
