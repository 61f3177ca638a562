"""The PodDisruptionBudget. Pure."""

from __future__ import annotations

from typing import Any

from conch import names


def disruption_budget(service: str) -> dict[str, Any]:
    """One pod at a time; a pod that isn't ready serves nobody and may always go (R13)."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": names.disruption_budget(service)},
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": names.pod_labels(service)},
        },
    }
