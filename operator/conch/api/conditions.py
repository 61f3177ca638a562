"""Condition types and reasons, in kstatus' meaning. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

MAX_MESSAGE: Final = 1024


class ConditionType(StrEnum):
    """Every condition that Conch writes; each status write makes all of them anew."""

    READY = "Ready"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    METRICS_STALE = "MetricsStale"
    SCALING_LIMITED = "ScalingLimited"
    ROLLOUT_BLOCKED = "RolloutBlocked"
    MODEL_CONFIG_DRIFT = "ModelConfigDrift"
    CAPACITY_CONSTRAINED = "CapacityConstrained"


class Reason(StrEnum):
    """Machine-readable reasons."""

    READY = "Ready"
    INVALID_SPEC = "InvalidSpec"
    NAME_CONFLICT = "NameConflict"
    NOT_ALLOWED = "NotAllowed"
    UNSUPPORTED_RELEASE = "UnsupportedRelease"
    PAUSED = "Paused"
    ROLLING_OUT = "RollingOut"
    STARTING = "Starting"
    NO_FREE_ACCELERATOR = "NoFreeAccelerator"
    UNSCHEDULABLE = "Unschedulable"
    NO_SUITABLE_NODE = "NoSuitableNode"
    SUITABLE_NODES = "SuitableNodes"
    NODES_UNKNOWN = "NodesUnknown"
    NODES_AWAITED = "NodesAwaited"
    ACCELERATOR_TOO_SMALL = "AcceleratorTooSmall"
    ENGINE_MISMATCH = "EngineMismatch"
    NO_CLAIMS = "NoClaims"
    FETCH_FAILED = "FetchFailed"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    SERVER_FAILED = "ServerFailed"
    OUT_OF_MEMORY = "OutOfMemory"
    MODEL_LOAD_FAILED = "ModelLoadFailed"
    OUT_OF_SHARED_MEMORY = "OutOfSharedMemory"
    OUT_OF_ACCELERATOR_MEMORY = "OutOfAcceleratorMemory"
    NO_ACCELERATOR_IN_POD = "NoAcceleratorInPod"
    DRIVER_TOO_OLD = "DriverTooOld"
    BACKEND_MISSING = "BackendMissing"
    DISK_FULL = "DiskFull"
    EVICTED = "Evicted"
    NO_READY_REPLICAS = "NoReadyReplicas"
    SETTLED = "Settled"
    VALID = "Valid"
    FRESH = "Fresh"
    METRICS_MISSING = "MetricsMissing"
    METRICS_PARTIAL = "MetricsPartial"
    METRICS_OLD = "MetricsOld"
    METRICS_NOT_FINITE = "MetricsNotFinite"
    NOT_CONFIGURED = "NotConfigured"
    UNLIMITED = "Unlimited"
    MAX_REPLICAS = "MaxReplicas"
    SECOND_SCALER = "SecondScaler"
    PERSON_SCALED = "PersonScaled"
    NOT_BLOCKED = "NotBlocked"
    CONFIG_AS_WRITTEN = "ConfigAsWritten"
    CONFIG_DIFFERS = "ConfigDiffers"
    CONFIG_NOT_READ = "ConfigNotRead"
    CONFIG_UNREADABLE = "ConfigUnreadable"
    CANNOT_BECOME_READY = "CannotBecomeReady"
    API_ERROR = "ApiError"


@dataclass(frozen=True)
class Condition:
    """One condition before its transition time is known; the message holds no counters or instants (R11)."""

    type: ConditionType
    status: bool | None
    reason: Reason
    message: str

    def to_dict(self, *, generation: int, previous: list[dict[str, Any]], now: str) -> dict[str, Any]:
        """The Kubernetes form; the transition time moves only with the status (RFC 3339, UTC)."""
        status = "Unknown" if self.status is None else str(self.status)
        earlier = next((c for c in previous if c.get("type") == self.type), None)
        same = earlier is not None and earlier.get("status") == status
        return {
            "type": str(self.type),
            "status": status,
            "reason": str(self.reason),
            "message": self.message[:MAX_MESSAGE],
            "observedGeneration": generation,
            "lastTransitionTime": earlier["lastTransitionTime"] if same and earlier else now,
        }
