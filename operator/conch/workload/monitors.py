"""The PodMonitor, for clusters with the Prometheus operator. Pure."""

from __future__ import annotations

from typing import Any

from conch import names


def pod_monitor(service: str) -> dict[str, Any]:
    """Scrape every Triton pod, also one that isn't ready yet."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": names.pod_monitor(service)},
        "spec": {
            "selector": {"matchLabels": names.pod_labels(service)},
            "podMetricsEndpoints": [{"port": "metrics", "interval": "5s"}],
        },
    }
