"""kstatus for a custom resource, by its published rules: what Flux and `helm --wait` conclude from a status."""

from __future__ import annotations

from typing import Any


def compute(obj: dict[str, Any]) -> str:
    """Terminating, InProgress, Failed or Current."""
    metadata, status = obj["metadata"], obj.get("status") or {}
    if metadata.get("deletionTimestamp"):
        return "Terminating"
    observed = status.get("observedGeneration")
    if observed is not None and observed != metadata.get("generation"):
        return "InProgress"
    conditions = status.get("conditions") or []
    # In the order of the list: whichever of the two comes first and is true decides.
    for condition in conditions:
        if condition["type"] == "Reconciling" and condition["status"] == "True":
            return "InProgress"
        if condition["type"] == "Stalled" and condition["status"] == "True":
            return "Failed"
    for condition in conditions:
        if condition["type"] == "Ready":
            return "Current" if condition["status"] == "True" else "InProgress"
    return "Current"
