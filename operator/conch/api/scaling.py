"""How many replicas a service has. Pure; a part of the InferenceService."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from conch.api.fields import Between, Duration, Resource, Rule


class QueueDepth(Resource):
    """Scaling on waiting requests."""

    target: float = Field(
        8,
        gt=0,
        le=1_000_000,
        description="Requests that may wait per model and ready replica; below every queue.maxSize. Default: 8.",
    )


class GpuMemory(Resource):
    """Scaling on accelerator memory."""

    max: int = Field(
        90,
        ge=1,
        le=100,
        description="Percent of accelerator memory above which a replica is added where memory grows with load, and "
        "that the survivors of a scale-down must stay below. Never read as idleness. Default: 90.",
    )


class Capacity(Resource):
    """What one replica serves."""

    per_replica: float | None = Field(
        None, gt=0, le=1_000_000_000, description="Requests per second within the objective. Default: unknown."
    )


class ScaleDown(Resource):
    """How replicas are taken away."""

    hold: Annotated[Duration, Between("1s", "24h")] = Field(
        300.0, description="How long fewer replicas must suffice before one goes, 1s to 24h. Default: 5m."
    )


class Scaling(Resource):
    """How many replicas there are."""

    rules = (
        Rule(
            "minReplicas",
            "self.minReplicas <= self.maxReplicas",
            "must be at most maxReplicas; lower minReplicas or raise maxReplicas",
            lambda scaling: scaling.min_replicas <= scaling.max_replicas,
        ),
    )

    mode: Literal["Automatic", "Advisory", "External"] = Field(
        "Automatic",
        description="Automatic writes replicas; Advisory only says in status what it would do; External leaves "
        "replicas to another scaler. Default: Automatic.",
    )
    min_replicas: int = Field(1, ge=1, le=1000, description="The fewest replicas, also without load. Default: 1.")
    max_replicas: int = Field(4, ge=1, le=1000, description="The most replicas. Default: 4.")
    queue_depth: QueueDepth = Field(QueueDepth(), description="Scaling on waiting requests.")
    gpu_memory: GpuMemory = Field(GpuMemory(), description="Scaling on accelerator memory.")
    capacity: Capacity = Field(Capacity(), description="What one replica serves.")
    startup: Annotated[Duration, Between("1s", "2h")] = Field(
        60.0,
        description="From ordering a replica to its readiness, image and model at hand, 1s to 2h. Sizes the startup "
        "probe. Default: 1m.",
    )
    scale_down: ScaleDown = Field(ScaleDown(), description="How replicas are taken away.")
    when_metrics_missing: Literal["Hold", "Floor"] = Field(
        "Hold",
        description="After 10 minutes without metrics: Hold keeps the replicas, Floor raises them to minReplicas "
        "and never lowers. Default: Hold.",
    )
