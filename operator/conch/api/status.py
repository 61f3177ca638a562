"""What Conch answers in a service's status. Pure; a part of the InferenceService."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from conch.api.fields import ByName, Resource

Text = Annotated[str, Field(max_length=1024)]
ShortText = Annotated[str, Field(max_length=253)]
Instant = Annotated[str, Field(max_length=40, json_schema_extra={"format": "date-time"})]


class ConditionStatus(Resource):
    """One condition, in kstatus' meaning."""

    type: ShortText = Field(description="What the condition is about, such as Ready.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    reason: ShortText = Field(description="Why, in one word for programs.")
    message: Text = Field("", description="Why, in a sentence, with the fix where there is one.")
    observed_generation: int | None = Field(None, description="The spec's generation that this is about.")
    last_transition_time: Instant = Field(description="When the status last changed.")


class ReplicasStatus(Resource):
    """Replicas as they are."""

    ready: int = Field(description="Replicas that answer requests.")
    wanted: int = Field(description="Replicas that are ordered.")
    summary: ShortText = Field(description="ready/wanted, such as 1/2.")


class WaitingReason(Resource):
    """Why pods wait for accelerators."""

    reason: ShortText = Field(description="Why, in one word.")
    message: Text = Field("", description="What the scheduler or the node says.")


class GpusStatus(Resource):
    """Accelerators asked for and free."""

    resource: ShortText = Field(description="The extended resource, or the class of the claimed devices.")
    per_replica: int = Field(description="Accelerators per pod.")
    free: int | None = Field(None, description="Matching accelerators that nothing has requested; null: unknown.")
    memory_used: ShortText | None = Field(
        None, description="Most memory that a replica was seen to use on one accelerator; absent: not measured."
    )
    memory_of: ShortText | None = Field(None, description="Digest of the spec.models that it was measured of.")
    waiting: list[WaitingReason] = Field([], max_length=16, description="Why pods wait; empty: none waits.")


class ModelStatus(Resource):
    """One model as its servers have it."""

    name: ShortText = Field(description="The model's name.")
    ready: bool | None = Field(None, description="Whether the ready replicas answer for it; absent: not known yet.")
    versions: list[ShortText] = Field([], max_length=64, description="The versions that are served.")
    max_batch_size: int | None = Field(
        None, description="The largest batch that the server takes, completed by Triton where the spec leaves it out."
    )
    message: Text | None = Field(None, description="Why it can't be loaded; absent: nothing is wrong.")


class RolloutStatus(Resource):
    """How the last change is rolled out."""

    strategy: Literal["Surge", "Replace"] = Field(
        description="Surge starts a new pod before an old one stops; Replace stops one first."
    )
    reason: Text = Field(description="Why this way.")


class TermStatus(Resource):
    """One term of a scaling decision."""

    name: ShortText = Field(description="The term, such as queueDepth.")
    replicas: int | None = Field(None, description="The replicas that it asks for; null: unknown.")
    detail: Text = Field("", description="Its inputs, in words.")


class ScalingStatus(Resource):
    """The last scaling decision and its inputs."""

    decision: Literal["Up", "Down", "Hold"] | None = Field(None, description="What was decided.")
    replicas: int | None = Field(None, description="The replicas decided on.")
    term: ShortText | None = Field(None, description="The term that won.")
    rail: ShortText | None = Field(None, description="The rail that clipped it; absent: none.")
    message: Text | None = Field(None, description="The decision in a sentence.")
    terms: Annotated[list[TermStatus], ByName()] = Field([], max_length=16, description="What each term asks for.")
    waiting: float | None = Field(None, description="Requests waiting in all replicas; null: unknown.")
    quality: ShortText | None = Field(None, description="How good the metrics are, such as fresh or missing.")
    last_scale_up: Instant | None = Field(None, description="When replicas were last added.")
    last_scale_down: Instant | None = Field(None, description="When replicas were last taken away.")


class InferenceServiceStatus(Resource):
    """What Conch answers."""

    observed_generation: int | None = Field(None, description="The spec's generation that Conch has seen.")
    conditions: Annotated[
        list[ConditionStatus],
        Field(
            max_length=16,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ] = Field([], description="Ready, Reconciling and Stalled carry kstatus' meaning; the others say the rest.")
    replicas: ReplicasStatus | None = Field(None, description="Replicas as they are.")
    gpus: GpusStatus | None = Field(None, description="Accelerators asked for and free.")
    models: Annotated[list[ModelStatus], ByName()] = Field(
        [], max_length=16, description="The models as the servers have loaded them, in the order of the spec."
    )
    models_revision: ShortText | None = Field(
        None, description="Digest of the pod template whose servers were asked for their models; absent: none was yet."
    )
    rollout: RolloutStatus | None = Field(None, description="How the last change is rolled out.")
    scaling: ScalingStatus | None = Field(None, description="The last scaling decision and its inputs.")
