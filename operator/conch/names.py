"""Every group, label, annotation, field manager and child name. Pure."""

from __future__ import annotations

from typing import Final

GROUP: Final = "conch.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
SERVICE_KIND: Final = "InferenceService"
SERVICE_PLURAL: Final = "inferenceservices"

# One field manager per concern, so that the autoscaler and the renderer never undo each other.
WORKLOAD_MANAGER: Final = "conch-workload"
SCALING_MANAGER: Final = "conch-scaling"
STATUS_MANAGER: Final = "conch-status"

MANAGED_BY_LABEL: Final = "app.kubernetes.io/managed-by"
MANAGED_BY: Final = "conch"
MANAGED_SELECTOR: Final = f"{MANAGED_BY_LABEL}={MANAGED_BY}"
SERVICE_LABEL: Final = f"{GROUP}/service"
COMPONENT_LABEL: Final = "app.kubernetes.io/component"
SERVER_COMPONENT: Final = "triton"

# Which renderer made the template, and a digest of the part of the spec it was made from: while that part is
# unchanged, another operator version keeps the live template (R7).
RENDERING_ANNOTATION: Final = f"{GROUP}/rendering"
TEMPLATE_INPUTS_ANNOTATION: Final = f"{GROUP}/template-inputs"
# What was chosen when that template was made (images, numbers of the rollout), so that it stays although settings
# change, and a person's edit of the same fields still shows as one. Lost, it is read from the fields themselves.
CHOSEN_ANNOTATION: Final = f"{GROUP}/chosen"
# A digest of the child as it was last applied, beside which the values themselves are compared (R8).
DESIRED_ANNOTATION: Final = f"{GROUP}/desired"
# The model plan travels in the pod template, so that a pod of an old revision restarts with its own plan.
PLAN_ANNOTATION: Final = f"{GROUP}/model-plan"

LEASE_NAME: Final = "conch-operator"

HTTP_PORT: Final = 8000
GRPC_PORT: Final = 8001
METRICS_PORT: Final = 8002

# Where on the nodes a model cache may lie unless the settings say otherwise.
CACHE_HOST_PATH: Final = "/var/cache/conch"

SERVER_CONTAINER: Final = "triton"
# What the pods call their claim, and its one request.
ACCELERATOR_CLAIM: Final = "accelerators"
FETCH_CONTAINER: Final = "fetch"
# The init container's environment variable that names its part of a node's model cache: the namespace.
CACHE_TENANT_VARIABLE: Final = "CONCH_CACHE_TENANT"

# metadata.name is at most this long, so that every child name stays within 63 characters (R5).
MAX_SERVICE_NAME: Final = 45


def deployment(service: str) -> str:
    """Name of the Deployment that runs Triton."""
    return f"{service}-server"


def clients_service(service: str) -> str:
    """Name of the Service that clients call: the resource's own name."""
    return service


def replicas_service(service: str) -> str:
    """Name of the headless Service of the pods themselves."""
    return f"{service}-replicas"


def disruption_budget(service: str) -> str:
    """Name of the PodDisruptionBudget."""
    return f"{service}-disruption"


def network_policy(service: str) -> str:
    """Name of the NetworkPolicy."""
    return f"{service}-network"


def service_account(service: str) -> str:
    """Name of the pods' ServiceAccount, which has no token."""
    return f"{service}-identity"


def pod_monitor(service: str) -> str:
    """Name of the PodMonitor, made when its CRD exists."""
    return f"{service}-metrics"


def claim_template(service: str, digest: str) -> str:
    """Name of the ResourceClaimTemplate of this content: its spec can't be changed, so another one has another name."""
    return f"{service}-claim-{digest[:8]}"


def child_labels(service: str) -> dict[str, str]:
    """Labels of every child: they map it back to its service without reading owners."""
    return {MANAGED_BY_LABEL: MANAGED_BY, SERVICE_LABEL: service}


def pod_labels(service: str) -> dict[str, str]:
    """Labels of the Triton pods; also their selector."""
    return {**child_labels(service), COMPONENT_LABEL: SERVER_COMPONENT}
