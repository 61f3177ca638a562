"""How many copies of a model run in a pod, and on what. Pure; a part of the InferenceService."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from conch.api.fields import ByName, Distinct, Matches, Resource, Rule
from conch.api.text import ModelName, TensorName
from conch.triton.backends import InstanceKind


class RateLimiterResource(Resource):
    """What one execution of an instance takes of a resource that instances share."""

    name: TensorName = Field(
        description="The resource's name, as runtime.rateLimiter.resources has it, if that lists any."
    )
    count: int = Field(1, ge=1, le=1_000_000, description="How much of it one execution takes. Default: 1.")
    shared: bool = Field(
        False,
        alias="global",
        description="True: one amount for the whole pod instead of one for each accelerator. Default: false.",
    )


class InstanceRateLimiter(Resource):
    """When an instance may execute, under Triton's rate limiter."""

    priority: int = Field(
        1, ge=1, le=1000, description="Weight among instances that wait: 2 is served half as often as 1. Default: 1."
    )
    resources: Annotated[list[RateLimiterResource], ByName()] = Field(
        [], max_length=8, description="What an execution must get before it starts. Default: nothing."
    )


class Instances(Resource):
    """How many copies of a model run in one pod."""

    rules = (
        Rule(
            "gpus",
            "!has(self.gpus) || self.gpus.size() == 0 || !has(self.kind) || self.kind == 'GPU'",
            "are for kind GPU; remove gpus or kind",
            lambda group: not group.gpus or group.kind in {None, "GPU"},
        ),
    )

    count: int = Field(1, ge=1, le=64, description="Copies of the model on each accelerator of the pod. Default: 1.")
    kind: InstanceKind | None = Field(
        None,
        description="Where the copies run: GPU, CPU, or Model, where the model itself decides. Default: what the "
        "format's backend asks for, else GPU when the pod has accelerators, else CPU.",
    )
    gpus: Annotated[list[Annotated[int, Field(ge=0, le=15)]], Distinct()] = Field(
        [],
        max_length=16,
        description="The pod's accelerators that get copies, counted from 0; a number below accelerator.count. "
        "Default: all.",
    )
    profiles: Annotated[
        list[
            Annotated[
                str,
                Field(max_length=32),
                Matches("[0-9]{1,4}", "must be the number of an optimization profile of the engine, such as '0'"),
            ]
        ],
        Distinct(),
    ] = Field([], max_length=8, description="TensorRT's optimization profiles that the copies use. Default: 0.")
    passive: bool = Field(
        False,
        description="True: the copies are loaded but get no requests; for a model that other models call by itself. "
        "Default: false.",
    )
    rate_limiter: InstanceRateLimiter | None = Field(
        None, description="When the copies may execute, under Triton's rate limiter. Default: whenever there is work."
    )


class InstanceGroup(Instances):
    """One of several groups of copies."""

    name: ModelName = Field(description="The group's name in Triton's log and configuration.")
