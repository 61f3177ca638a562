"""The Triton server of a pod: probes, time limits and its container, from the spec. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from conch import names
from conch.api.fields import canonical_quantity
from conch.triton.arguments import EXIT_TIMEOUT_S, MODELS_PATH, server_args, server_env, server_mounts

if TYPE_CHECKING:
    from conch.api.inferenceservice import InferenceServiceSpec

USER_ID: Final = 1000
"""`triton-server` in NVIDIA's image."""

TOOLS_PATH: Final = "/conch"
SOURCES_PATH: Final = "/sources"

ENDPOINT_REMOVAL_S: Final = 5
"""Time until every router of the cluster has heard that the pod is leaving."""
DRAIN_BOUND_S: Final = 25
"""The longest that the preStop hook takes, waiting for endpoint removal and then for what is in flight."""
GRACE_MARGIN_S: Final = 5
GRACE_S: Final = ENDPOINT_REMOVAL_S + DRAIN_BOUND_S + EXIT_TIMEOUT_S + GRACE_MARGIN_S
"""terminationGracePeriodSeconds: it starts before preStop (R26), and SIGKILL must never come first."""

STARTUP_FACTOR: Final = 3
MIN_STARTUP_S: Final = 60
STARTUP_PERIOD_S: Final = 1

SECURITY_CONTEXT: Final[dict[str, Any]] = {
    "runAsNonRoot": True,
    "runAsUser": USER_ID,
    "runAsGroup": USER_ID,
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""Pod Security's `restricted`, on each container, so that no pod-level default is relied on."""


def readiness_path(spec: InferenceServiceSpec) -> str:
    """The path that answers 200 when every model of the service can be asked."""
    if len(spec.models) == 1:
        return f"/v2/models/{spec.models[0].name}/ready"
    return "/v2/health/ready"


def startup_probe(spec: InferenceServiceSpec) -> dict[str, Any]:
    """Three times the usual start-up, at least a minute: a slow start is no crash, and a restart makes it slower."""
    allowed_s = max(MIN_STARTUP_S, STARTUP_FACTOR * spec.scaling.startup)
    # Each second of probing too late is a second of a ready replica unused.
    return _probe(
        readiness_path(spec),
        period_s=STARTUP_PERIOD_S,
        timeout_s=2,
        failures=math.ceil(allowed_s / STARTUP_PERIOD_S),
    )


def readiness_probe(spec: InferenceServiceSpec) -> dict[str, Any]:
    """Out of routing after about 6 s without an answer, back with the first one."""
    return _probe(readiness_path(spec), period_s=2, timeout_s=2, failures=3)


def liveness_probe() -> dict[str, Any]:
    """A restart costs a whole start-up, so only a server that is silent for a minute gets one."""
    return _probe("/v2/health/live", period_s=10, timeout_s=5, failures=6)


def container(spec: InferenceServiceSpec, image: str, *, pull_policy: str = "IfNotPresent") -> dict[str, Any]:
    """The Triton container as plain data.

    It expects the volumes models, tools, shm and tmp, source-INDEX for each model whose source is a volume, and those
    of `arguments.server_volumes`.
    Every value is written as the API server stores it, so that live and wanted compare equal.
    """
    return {
        "name": names.SERVER_CONTAINER,
        "image": image,
        "imagePullPolicy": pull_policy,
        "command": ["tritonserver"],
        "args": server_args(spec, image),
        # Libraries that insist on a cache folder find a writable one.
        "env": [
            {"name": "HOME", "value": "/tmp"},  # noqa: S108 - the pod's own
            {"name": "TMPDIR", "value": "/tmp"},  # noqa: S108 - the pod's own
            *server_env(spec),
        ],
        "ports": [
            {"name": "http", "containerPort": names.HTTP_PORT, "protocol": "TCP"},
            {"name": "grpc", "containerPort": names.GRPC_PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": names.METRICS_PORT, "protocol": "TCP"},
        ],
        "resources": resources(spec),
        "startupProbe": startup_probe(spec),
        "readinessProbe": readiness_probe(spec),
        "livenessProbe": liveness_probe(),
        "lifecycle": {"preStop": {"exec": {"command": _drain_command()}}},
        "securityContext": SECURITY_CONTEXT,
        # Triton's last lines name the model that didn't load: they become the status' words.
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _mounts(spec),
    }


def resources(spec: InferenceServiceSpec) -> dict[str, Any]:
    """Requests and limits. No CPU limit: throttling shows as latency; memory is limited to what is requested."""
    memory = {"memory": canonical_quantity(spec.resources.memory)}
    accelerator = spec.accelerator
    if accelerator.claim is not None:
        claims = {"claims": [{"name": names.ACCELERATOR_CLAIM}]}
        return {"requests": {"cpu": canonical_quantity(spec.resources.cpu), **memory}, "limits": memory, **claims}
    devices = {accelerator.resource: str(accelerator.count)} if accelerator.count else {}
    return {
        "requests": {"cpu": canonical_quantity(spec.resources.cpu), **memory, **devices},
        "limits": {**memory, **devices},
    }


def _drain_command() -> list[str]:
    return [
        "python3",
        "-I",
        f"{TOOLS_PATH}/drain.py",
        "--bound",
        str(DRAIN_BOUND_S),
        "--endpoint-removal",
        str(ENDPOINT_REMOVAL_S),
    ]


def _mounts(spec: InferenceServiceSpec) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        {"name": "models", "mountPath": MODELS_PATH, "readOnly": True},
        {"name": "tools", "mountPath": TOOLS_PATH, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - the pod's own
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - the pod's own
    ]
    # The repository holds links into the mounted sources, so both containers mount them at the same place.
    mounts += [
        {"name": f"source-{index}", "mountPath": f"{SOURCES_PATH}/{index}", "readOnly": True}
        for index, model in enumerate(spec.models)
        if model.source is not None and model.source.uri.startswith(("pvc://", "image://"))
    ]
    return mounts + server_mounts(spec)


def _probe(path: str, *, period_s: int, timeout_s: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "http", "scheme": "HTTP"},
        "periodSeconds": period_s,
        "timeoutSeconds": timeout_s,
        "failureThreshold": failures,
        "successThreshold": 1,
    }
