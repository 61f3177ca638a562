"""Prometheus' scrape configuration and the Service under which pods find it. Pure."""

import json
from typing import Any

from sandbox.components import DCGM_PORT, PROMETHEUS_PORT, Layout

OPERATOR_NAMESPACE = "conch-system"


def keep(label: str, value: str) -> dict[str, Any]:
    """Drop targets whose label differs."""
    return {"action": "keep", "source_labels": [label], "regex": value}


def copy(label: str, target: str) -> dict[str, Any]:
    """Carry a discovered label over to the series."""
    return {"action": "replace", "source_labels": [label], "target_label": target}


def config(layout: Layout) -> str:
    """Triton pods behind Conch's Services, the operator's pods, the (fake) DCGM exporter and Prometheus itself."""
    discovery = {"kubeconfig_file": str(layout.kubeconfig)}
    service_label = "__meta_kubernetes_service_label_app_kubernetes_io_managed_by"
    triton = {
        "job_name": "triton",
        "kubernetes_sd_configs": [{**discovery, "role": "endpointslice"}],
        "relabel_configs": [
            keep(service_label, "conch"),
            keep("__meta_kubernetes_endpointslice_port_name", "metrics"),
            keep("__meta_kubernetes_pod_name", ".+"),
            copy("__meta_kubernetes_namespace", "namespace"),
            copy("__meta_kubernetes_pod_name", "pod"),
            copy("__meta_kubernetes_service_name", "service"),
            copy("__meta_kubernetes_service_label_app_kubernetes_io_instance", "instance_name"),
        ],
    }
    operator = {
        "job_name": "conch",
        "kubernetes_sd_configs": [{**discovery, "role": "pod", "namespaces": {"names": [OPERATOR_NAMESPACE]}}],
        "relabel_configs": [
            keep("__meta_kubernetes_pod_container_port_name", "http"),
            copy("__meta_kubernetes_namespace", "namespace"),
            copy("__meta_kubernetes_pod_name", "pod"),
        ],
    }
    address = layout.spec.address
    dcgm = {
        "job_name": "dcgm",
        # the exporter's labels name the pod that holds the GPU, which is what the series is about
        "honor_labels": True,
        "static_configs": [{"targets": [f"{address}:{DCGM_PORT}"], "labels": {"node": layout.spec.node_name}}],
    }
    own = {"job_name": "prometheus", "static_configs": [{"targets": [f"{address}:{PROMETHEUS_PORT}"]}]}
    return json.dumps(
        {
            "global": {"scrape_interval": "1s", "scrape_timeout": "900ms", "evaluation_interval": "5s"},
            "scrape_configs": [triton, operator, dcgm, own],
        },
        indent=1,
    )


def service(layout: Layout) -> list[dict[str, Any]]:
    """http://prometheus.monitoring.svc:9090 for pods: a Service without selector, and the address behind it."""
    labels = {"kubernetes.io/service-name": "prometheus"}
    meta = {"name": "prometheus", "namespace": "monitoring"}
    ports = [{"name": "http", "port": PROMETHEUS_PORT, "protocol": "TCP"}]
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "monitoring"}},
        {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {"ports": ports}},
        {
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": {**meta, "labels": labels},
            "addressType": "IPv4", "ports": ports,
            "endpoints": [{"addresses": [layout.spec.address], "conditions": {"ready": True}}],
        },
    ]  # fmt: skip
