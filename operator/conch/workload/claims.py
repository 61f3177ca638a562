"""Accelerators by dynamic resource allocation: the ResourceClaimTemplate, and what the pods say of it. Pure.

A template's spec can't be changed, and pods of an old revision that start again must find what they were made for. So
the name carries a digest of the content: a change makes a second template, and the first one goes when no pod of its
revision is left.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from conch import names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from conch.api.accelerator import Claim
    from conch.api.inferenceservice import InferenceServiceSpec

Object = dict[str, Any]


def template_name(service: str, claim: Claim) -> str:
    """The name of the template for this claim: the same for the same content."""
    content = json.dumps(claim.model_dump(by_alias=True, exclude_defaults=True), sort_keys=True)
    return names.claim_template(service, hashlib.sha256(content.encode()).hexdigest())


def claim_template(service: str, claim: Claim) -> Object:
    """The ResourceClaimTemplate; its CEL expressions are data that the API server checks and the scheduler runs."""
    request: Object = {"deviceClassName": claim.device_class, "allocationMode": "ExactCount", "count": claim.count}
    if claim.selectors:
        request["selectors"] = [{"cel": {"expression": expression}} for expression in claim.selectors]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": template_name(service, claim)},
        "spec": {"spec": {"devices": {"requests": [{"name": names.ACCELERATOR_CLAIM, "exactly": request}]}}},
    }


def pod_claims(service: str, spec: InferenceServiceSpec) -> list[Object]:
    """The pod's `resourceClaims`; empty without a claim."""
    claim = spec.accelerator.claim
    if claim is None:
        return []
    return [{"name": names.ACCELERATOR_CLAIM, "resourceClaimTemplateName": template_name(service, claim)}]


def unused(live: Mapping[str, Any] | None, wanted: Mapping[str, Any]) -> bool:
    """Whether no pod needs another template, or another ServiceAccount, than the wanted Deployment names.

    Args:
        live: the Deployment as it was before this pass; None if there is none.
        wanted: the Deployment as it is applied.
    """
    if live is None:
        return True
    status = live.get("status") or {}
    seen = status.get("observedGeneration", 0) >= live["metadata"].get("generation", 0)
    done = seen and status.get("updatedReplicas", 0) == status.get("replicas", 0)
    return bool(done and _named(live) == _named(wanted))


def _named(deployment: Mapping[str, Any]) -> tuple[str, list[str]]:
    pod = deployment["spec"]["template"]["spec"]
    claims = [claim.get("resourceClaimTemplateName", "") for claim in pod.get("resourceClaims") or ()]
    return pod.get("serviceAccountName", ""), claims
