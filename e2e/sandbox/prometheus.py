"""Prometheus' scrape configuration and the Service under which pods find it. Pure."""

import json
from collections.abc import Mapping
from typing import Any

from sandbox.components import DCGM_PORT, PROMETHEUS_PORT, Layout

OPERATOR_NAMESPACE = "conch-system"


def keep(label: str, value: str) -> dict[str, Any]:
    """Drop targets whose label differs."""
    return {"action": "keep", "source_labels": [label], "regex": value}


def copy(label: str, target: str) -> dict[str, Any]:
    """Carry a discovered label over to the series."""
    return {"action": "replace", "source_labels": [label], "target_label": target}


def config(discovery: Mapping[str, Any], *, node: str, exporter: str, own: str) -> str:
    """Triton pods behind Conch's Services, the operator's pods, the (fake) DCGM exporter and Prometheus itself.

    `discovery` says how the API server is reached (empty: as a pod does); `exporter` and `own` are HOST:PORT.
    """
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
    dcgm = {
        "job_name": "dcgm",
        # the exporter's labels name the pod that holds the GPU, which is what the series is about
        "honor_labels": True,
        "static_configs": [{"targets": [exporter], "labels": {"node": node}}],
    }
    itself = {"job_name": "prometheus", "static_configs": [{"targets": [own]}]}
    return json.dumps(
        {
            "global": {"scrape_interval": "1s", "scrape_timeout": "900ms", "evaluation_interval": "5s"},
            "scrape_configs": [triton, operator, dcgm, itself],
        },
        indent=1,
    )


def local_config(layout: Layout) -> str:
    """Of a Prometheus that is a process of the region."""
    address = layout.spec.address
    return config(
        {"kubeconfig_file": str(layout.kubeconfig)},
        node=layout.spec.node_name,
        exporter=f"{address}:{DCGM_PORT}",
        own=f"{address}:{PROMETHEUS_PORT}",
    )


def local_service(layout: Layout) -> list[dict[str, Any]]:
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
