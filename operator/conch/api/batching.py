"""Dynamic batching and the queue before it. Pure; a part of the InferenceService."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from conch.api.fields import Between, ByName, Duration, Resource, Rule

MAX_PRIORITIES: Final = 32

Priority = Annotated[int, Field(ge=1, le=MAX_PRIORITIES)]
BatchSizes = Annotated[list[Annotated[int, Field(ge=1, le=65536)]], Field(max_length=16)]


class Batching(Resource):
    """Triton's dynamic batching: requests that wait are answered together."""

    rules = (
        Rule(
            "defaultPriority",
            "!has(self.defaultPriority) || (has(self.priorityLevels) && self.defaultPriority <= self.priorityLevels)",
            "must be at most priorityLevels; lower it or set priorityLevels",
            lambda batching: (
                batching.default_priority is None or batching.default_priority <= (batching.priority_levels or 0)
            ),
        ),
        Rule(
            "preserveOrdering",
            "!self.preserveOrdering || !has(self.priorityLevels) || self.priorityLevels == 1",
            "can't be kept across priorities; set it to false, or priorityLevels to 1",
            lambda batching: not batching.preserve_ordering or batching.priority_levels in {None, 1},
        ),
    )

    preferred_sizes: BatchSizes = Field(
        [], description="Batch sizes to prefer, each at most maxBatchSize. Default: none."
    )
    max_queue_delay: Annotated[Duration, Between("0s", "1m")] = Field(
        0.0, description="How long a request may wait for others to batch with, up to 1m. Default: 0ms."
    )
    preserve_ordering: bool = Field(
        False,
        description="True: answers leave in the order in which their requests came, which several instances then wait "
        "for. Default: false.",
    )
    priority_levels: Priority | None = Field(
        None,
        description="How many priorities requests may have; 1 is the highest, whose requests always go first. "
        "Default: none.",
    )
    default_priority: Priority | None = Field(
        None,
        description="The priority of a request that names none. Default: the lowest, so that going first is asked for.",
    )


class QueueLimits(Resource):
    """Limits of a queue inside Triton."""

    rules = (
        Rule(
            "timeoutAction",
            "self.timeoutAction != 'Delay' || has(self.timeout) || self.allowTimeoutOverride",
            "Delay needs a timeout; set timeout or allowTimeoutOverride, or use Reject",
            lambda queue: queue.timeout_action != "Delay" or queue.timeout is not None or queue.allow_timeout_override,
        ),
    )

    max_size: int | None = Field(
        None, ge=1, le=1_000_000, description="Requests that may wait; more are refused with 503. Default: no limit."
    )
    timeout: Annotated[Duration, Between("1ms", "24h")] | None = Field(
        None, description="How long a request may wait before timeoutAction; 1ms to 24h. Default: for ever."
    )
    timeout_action: Literal["Reject", "Delay"] = Field(
        "Reject",
        description="What happens to a request that waited longer than timeout: Reject answers it with an error, Delay "
        "serves it after those that are in time. Default: Reject.",
    )
    allow_timeout_override: bool = Field(
        False, description="True: a request may ask for a timeout shorter than this one. Default: false."
    )


class QueueLevel(QueueLimits):
    """Limits of one priority's queue; nothing is taken over from the queue's own."""

    priority: Priority = Field(description="The priority, from 1 to batching.priorityLevels.")


class Queue(QueueLimits):
    """Limits of a model's queue inside Triton."""

    levels: Annotated[list[QueueLevel], ByName("priority")] = Field(
        [],
        max_length=MAX_PRIORITIES,
        description="Limits of single priorities, in the place of the others; need batching.priorityLevels. "
        "Default: none.",
    )
