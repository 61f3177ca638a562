"""The Deployment that runs Triton: pod template, revision and rollout strategy. Pure."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from conch import names
from conch.api.fields import canonical_quantity
from conch.storage.plan import Plan, PlannedModel
from conch.triton import arguments, modelconfig, server
from conch.triton.releases import release_of
from conch.workload.claims import pod_claims
from conch.workload.gpus import node_terms, tolerations
from conch.workload.modelcache import cache_environment, cache_mounts, cache_volumes, planned_cache
from conch.workload.source import Source, fetch_mounts, planned_source, source_of, source_volumes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from conch.api.inferenceservice import InferenceServiceSpec

RENDERING: Final = "2"
"""Raised whenever this module renders the same spec differently; live templates keep theirs (R7)."""

USER_ID: Final = 1000
EKS_SKIPS: Final = "eks.amazonaws.com/skip-containers"
"""Containers that get no token of the ServiceAccount's AWS role (README of aws/amazon-eks-pod-identity-webhook)."""
PROVISIONING_ALLOWANCE_S: Final = 600
_SPREAD_KEYS: Final = {"Zone": "topology.kubernetes.io/zone", "Node": "kubernetes.io/hostname"}


@dataclass(frozen=True)
class Images:
    """What a template takes from the operator's settings."""

    fetch: str
    triton: str
    pull_policy: str = "IfNotPresent"


@dataclass(frozen=True)
class Strategy:
    """How pods are replaced, in absolute numbers, and why (R12)."""

    name: Literal["Surge", "Replace"]
    max_surge: int
    max_unavailable: int
    reason: str


SURGE_ON_CREATE: Final = Strategy("Surge", 1, 0, "A new service has nothing to replace.")


def choose_strategy(spec: InferenceServiceSpec, *, replicas: int, free: int | None) -> Strategy:
    """Surge where a pod more fits, replace one at a time where none does.

    Args:
        spec: the wanted spec.
        replicas: how many pods run now.
        free: matching accelerators that nothing has requested; None when it can't be known.
    """
    needed, resource = spec.accelerator.devices, spec.accelerator.noun
    if needed == 0:
        return Strategy("Surge", 1, 0, "The service needs no accelerator, so a new pod starts before an old one goes.")
    if free is None:
        return Strategy("Surge", 1, 0, f"How many {resource} are free is unknown, so no serving pod is given up first.")
    if free >= needed:
        return Strategy("Surge", 1, 0, f"A matching {resource} is free, so a new pod starts before an old one goes.")
    if replicas > 1:
        return Strategy("Replace", 0, 1, f"No matching {resource} is free, so pods are replaced one at a time.")
    return Strategy(
        "Surge",
        1,
        0,
        f"No matching {resource} is free and only one replica serves: it serves on until one becomes free.",
    )


def template_inputs(spec: InferenceServiceSpec) -> str:
    """A digest of the part of the spec that the pod template is made from."""
    # Without defaults: a field that the next version adds must not make every service look changed (R7). For the same
    # reason a default never changes within a version of the API: stored objects hold the old one, written out.
    part = spec.model_dump(
        mode="json",
        include={"models", "runtime", "accelerator", "resources", "placement"},
        by_alias=True,
        exclude_defaults=True,
    )
    part["startup"] = spec.scaling.startup
    return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:32]


def keeps_template(spec: InferenceServiceSpec, live: Mapping[str, Any] | None) -> bool:
    """Whether the live Deployment was rendered from this very spec, by whatever operator version."""
    if live is None:
        return False
    return bool(_annotations(live).get(names.TEMPLATE_INPUTS_ANNOTATION) == template_inputs(spec))


def deployment(
    service: str,
    spec: InferenceServiceSpec,
    *,
    images: Images,
    strategy: Strategy,
    live: Mapping[str, Any] | None,
    allow_code: bool = True,
) -> dict[str, Any]:
    """The Deployment without replicas, which belong to the autoscaler (R1).

    While the spec's template part is unchanged, the live template's images, rendering and strategy stay, so a new
    operator version or new settings roll nothing (R7), and a strategy never changes in the middle of a rollout.
    """
    rendering, inputs = RENDERING, template_inputs(spec)
    tensor_rt = release_of(spec.runtime.image or images.triton, spec.runtime.release).tensorrt
    tensor_rt = tensor_rt if _has_engines(spec) else None
    chosen = _Chosen(images, strategy.max_surge, strategy.max_unavailable, tensor_rt, allow_code)
    template: dict[str, Any]
    if live is not None and _annotations(live).get(names.TEMPLATE_INPUTS_ANNOTATION) == inputs:
        rendering = _annotations(live).get(names.RENDERING_ANNOTATION, RENDERING)
        chosen = _chosen_before(live, chosen)
    if live is not None and rendering != RENDERING:
        template = live["spec"]["template"]
    else:
        template = pod_template(service, spec, chosen.images, tensor_rt=chosen.tensor_rt, allow_code=chosen.allow_code)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": names.deployment(service),
            "annotations": {
                names.RENDERING_ANNOTATION: rendering,
                names.TEMPLATE_INPUTS_ANNOTATION: inputs,
                names.CHOSEN_ANNOTATION: json.dumps(asdict(chosen), sort_keys=True),
            },
        },
        "spec": {
            "selector": {"matchLabels": names.pod_labels(service)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": chosen.max_surge, "maxUnavailable": chosen.max_unavailable},
            },
            "progressDeadlineSeconds": round(3 * spec.scaling.startup) + PROVISIONING_ALLOWANCE_S,
            "revisionHistoryLimit": 3,
            "template": template,
        },
    }


@dataclass(frozen=True)
class _Chosen:
    """What was decided when a template was made, kept beside it for as long as it stays."""

    images: Images
    max_surge: int
    max_unavailable: int
    tensor_rt: str | None = None
    """The image's TensorRT version, which `conch fetch` holds engines against: a later table may know more."""
    allow_code: bool = True
    """Whether a model may bring a library that Triton loads (CONCH_ALLOW_PYTHON_MODELS)."""


def _has_engines(spec: InferenceServiceSpec) -> bool:
    return any(model.format in {"TensorRT", "TensorRTLLM", "Auto"} for model in spec.models)


def _chosen_before(live: Mapping[str, Any], fallback: _Chosen) -> _Chosen:
    """The annotation's word, so that a hand edit is repaired and not adopted (R8); without it, the live fields'."""
    try:
        kept = json.loads(_annotations(live)[names.CHOSEN_ANNOTATION])
        images = Images(*(str(kept["images"][key]) for key in ("fetch", "triton", "pull_policy")))
        tensor_rt = None if kept["tensor_rt"] is None else str(kept["tensor_rt"])
        allow_code = bool(kept["allow_code"])
        return _Chosen(images, int(kept["max_surge"]), int(kept["max_unavailable"]), tensor_rt, allow_code)
    except (KeyError, TypeError, ValueError):
        numbers = (live["spec"].get("strategy") or {}).get("rollingUpdate") or {}
        surge, unavailable = numbers.get("maxSurge"), numbers.get("maxUnavailable")
        plan = _live_plan(live)
        fallback = replace(
            fallback,
            images=live_images(live, fallback.images),
            tensor_rt=None if plan is None else plan.tensor_rt,
            allow_code=fallback.allow_code if plan is None else plan.allow_code,
        )
        if isinstance(surge, int) and isinstance(unavailable, int) and surge + unavailable > 0:
            return replace(fallback, max_surge=surge, max_unavailable=unavailable)
        return fallback


def _live_plan(live: Mapping[str, Any]) -> Plan | None:
    annotations = live["spec"]["template"]["metadata"].get("annotations") or {}
    try:
        return Plan.from_json(annotations[names.PLAN_ANNOTATION])
    except (KeyError, ValueError):
        return None


def server_image(spec: InferenceServiceSpec, images: Images, live: Mapping[str, Any] | None) -> str:
    """The Triton image that the Deployment gets: while its template stays, the one it has (R7)."""
    if live is not None and keeps_template(spec, live):
        images = _chosen_before(live, _Chosen(images, 1, 0)).images
    return spec.runtime.image or images.triton


def live_images(live: Mapping[str, Any], fallback: Images) -> Images:
    """The images that the live template runs; whatever it doesn't show comes from the fallback."""
    pod = live["spec"]["template"]["spec"]
    running = {
        container["name"]: container for container in [*pod.get("initContainers", []), *pod.get("containers", [])]
    }
    fetch, triton = running.get(names.FETCH_CONTAINER, {}), running.get(names.SERVER_CONTAINER, {})
    return Images(
        fetch.get("image", fallback.fetch),
        triton.get("image", fallback.triton),
        triton.get("imagePullPolicy", fallback.pull_policy),
    )


def pod_template(
    service: str,
    spec: InferenceServiceSpec,
    images: Images,
    *,
    tensor_rt: str | None = None,
    allow_code: bool = True,
) -> dict[str, Any]:
    """The pod: `conch fetch` lays out the whole model repository, then Triton starts."""
    sources = [source_of(model) for model in spec.models]
    pod: dict[str, Any] = {
        "serviceAccountName": spec.runtime.service_account_name or names.service_account(service),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": server.GRACE_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [_fetch_container(spec, sources, images)],
        "containers": [
            server.container(spec, image=spec.runtime.image or images.triton, pull_policy=images.pull_policy)
        ],
        "volumes": _volumes(spec, sources),
        **_placement(service, spec),
    }
    annotations = {names.PLAN_ANNOTATION: model_plan(spec, tensor_rt, allow_code=allow_code).to_json()}
    if any(model.source is not None and model.source.identity == "ServiceAccount" for model in spec.models):
        # The identity is there for fetching: EKS would hand its token to the code of the models as well.
        annotations[EKS_SKIPS] = names.SERVER_CONTAINER
    return {
        "metadata": {"labels": names.pod_labels(service), "annotations": annotations},
        "spec": pod,
    }


def model_plan(spec: InferenceServiceSpec, tensor_rt: str | None = None, *, allow_code: bool = True) -> Plan:
    """What `conch fetch` must do; it travels in the template, so an old revision's pod restarts with its own."""
    return Plan(
        models=tuple(
            PlannedModel(
                name=model.name,
                field=f"spec.models[{index}]",
                **planned_source(model, index),
                **modelconfig.planned(model, gpu=spec.accelerator.devices > 0),
            )
            for index, model in enumerate(spec.models)
        ),
        cache=planned_cache(spec),
        tensor_rt=tensor_rt,
        allow_code=allow_code,
    )


def _fetch_container(spec: InferenceServiceSpec, sources: list[Source], images: Images) -> dict[str, Any]:
    mounts: list[dict[str, Any]] = [
        {"name": "models", "mountPath": "/models"},
        {"name": "tools", "mountPath": "/conch"},
        {"name": "plan", "mountPath": "/etc/conch/plan", "readOnly": True},
    ]
    mounts += fetch_mounts(sources) + cache_mounts(spec)
    environment = cache_environment(spec)
    return {
        "name": names.FETCH_CONTAINER,
        "image": images.fetch,
        "imagePullPolicy": images.pull_policy,
        "command": ["conch", "fetch"],
        "args": ["--plan", "/etc/conch/plan/plan.json", "--into", "/models", "--tools", "/conch"],
        # About 100 MiB whatever a file's size; 290 were seen with the most files that a source may hold, and a cache.
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": server.SECURITY_CONTEXT,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
        **({"env": environment} if environment else {}),
    }


def _volumes(spec: InferenceServiceSpec, sources: list[Source]) -> list[dict[str, Any]]:
    plan_field = f"metadata.annotations['{names.PLAN_ANNOTATION}']"
    volumes: list[dict[str, Any]] = [
        {"name": "models", "emptyDir": {}},
        {"name": "tools", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": canonical_quantity(spec.runtime.shared_memory)}},
        {"name": "plan", "downwardAPI": {"items": [{"path": "plan.json", "fieldRef": {"fieldPath": plan_field}}]}},
    ]
    return volumes + source_volumes(sources) + cache_volumes(spec) + arguments.server_volumes(spec)


def _placement(service: str, spec: InferenceServiceSpec) -> dict[str, Any]:
    placement = spec.placement
    result: dict[str, Any] = {}
    if placement.node_selector:
        result["nodeSelector"] = dict(placement.node_selector)
    tolerated = tolerations(spec)
    if tolerated:
        result["tolerations"] = tolerated
    if placement.priority_class_name:
        result["priorityClassName"] = placement.priority_class_name
    if placement.runtime_class_name:
        result["runtimeClassName"] = placement.runtime_class_name
    if placement.topology_spread != "None":
        result["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": _SPREAD_KEYS[placement.topology_spread],
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": names.pod_labels(service)},
            }
        ]
    terms = node_terms(spec)
    if terms:
        required = {"nodeSelectorTerms": terms}
        result["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    claims = pod_claims(service, spec)
    if claims:
        result["resourceClaims"] = claims
    return result


def _annotations(obj: Mapping[str, Any]) -> dict[str, str]:
    return dict(obj["metadata"].get("annotations") or {})
