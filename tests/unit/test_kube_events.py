"""The Event recorder with a recording client."""

from __future__ import annotations

import asyncio
import datetime as dt
from typing import TYPE_CHECKING, Any, cast

import prometheus_client
import pytest

from conch.kube.errors import ApiError, Forbidden, NotLeader, Unreachable
from conch.kube.events import LONGEST_QUEUE, PER_MINUTE, Recorder

if TYPE_CHECKING:
    from conch.kube.client import Kube

SERVICE = {
    "apiVersion": "conch.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "m", "namespace": "team", "uid": "u-1"},
}


class FakeKube:
    def __init__(self) -> None:
        self.applied: list[dict[str, Any]] = []
        self.error: ApiError | None = None
        self.first = asyncio.Event()

    async def apply(self, body: dict[str, Any], *, manager: str) -> dict[str, Any]:
        assert manager == "conch-events"
        if self.error is not None:
            raise self.error
        self.applied.append(body)
        self.first.set()
        return body


class World:
    def __init__(self) -> None:
        self.kube = FakeKube()
        self.seconds = 0.0
        self.registry = prometheus_client.CollectorRegistry()
        start = dt.datetime(2026, 11, 30, 12, tzinfo=dt.UTC)
        self.recorder = Recorder(
            cast("Kube", self.kube),
            instance="conch-0",
            registry=self.registry,
            clock=lambda: self.seconds,
            now=lambda: start + dt.timedelta(seconds=self.seconds),
        )

    def dropped(self, why: str) -> float:
        return self.registry.get_sample_value("conch_events_dropped_total", {"why": why}) or 0.0


@pytest.fixture
def world() -> World:
    return World()


async def test_an_event_says_what_happened_to_which_object(world: World) -> None:
    world.recorder.record(SERVICE, "Scaled", "2 to 3: the queue is long")
    assert await world.recorder.flush()
    (event,) = world.kube.applied
    assert event["involvedObject"] == {
        "apiVersion": "conch.dev/v1alpha1",
        "kind": "InferenceService",
        "name": "m",
        "namespace": "team",
        "uid": "u-1",
    }
    assert event["metadata"]["namespace"] == "team"
    assert event["metadata"]["name"].startswith("m.")
    assert (event["reason"], event["type"], event["count"]) == ("Scaled", "Normal", 1)
    assert event["firstTimestamp"] == event["lastTimestamp"] == "2026-11-30T12:00:00Z"


async def test_the_same_again_raises_the_count_of_the_same_event(world: World) -> None:
    for _ in range(3):
        world.recorder.record(SERVICE, "Scaled", "same")
        await world.recorder.flush()
        world.seconds += 10
    assert [event["count"] for event in world.kube.applied] == [1, 2, 3]
    assert len({event["metadata"]["name"] for event in world.kube.applied}) == 1
    assert world.kube.applied[-1]["firstTimestamp"] == "2026-11-30T12:00:00Z"
    assert world.kube.applied[-1]["lastTimestamp"] == "2026-11-30T12:00:20Z"


async def test_a_burst_of_the_same_is_one_write(world: World) -> None:
    for _ in range(50):
        world.recorder.record(SERVICE, "Scaled", "same")
    await world.recorder.flush()
    assert [event["count"] for event in world.kube.applied] == [50]


async def test_reason_message_type_and_object_make_an_event_of_their_own(world: World) -> None:
    other = {**SERVICE, "metadata": {"name": "m", "namespace": "team", "uid": "u-2"}}
    world.recorder.record(SERVICE, "A", "x")
    world.recorder.record(SERVICE, "B", "x")
    world.recorder.record(SERVICE, "A", "y")
    world.recorder.record(SERVICE, "A", "x", "Warning")
    world.recorder.record(other, "A", "x")
    await world.recorder.flush()
    assert len({event["metadata"]["name"] for event in world.kube.applied}) == 5


async def test_one_noisy_object_is_limited_and_the_others_are_not(world: World) -> None:
    for number in range(100):
        world.recorder.record(SERVICE, "Noise", f"number {number}")
    other = {**SERVICE, "metadata": {"name": "n", "namespace": "team", "uid": "u-2"}}
    world.recorder.record(other, "Scaled", "x")
    await world.recorder.flush()
    assert len(world.kube.applied) == PER_MINUTE + 1
    assert world.dropped("limit") == 100 - PER_MINUTE
    world.seconds += 60
    world.recorder.record(SERVICE, "Noise", "later")
    await world.recorder.flush()
    assert world.kube.applied[-1]["message"] == "later"


async def test_an_hour_later_a_series_starts_anew(world: World) -> None:
    world.recorder.record(SERVICE, "Scaled", "same")
    world.seconds += 3601
    world.recorder.record(SERVICE, "Scaled", "same")
    await world.recorder.flush()
    assert world.kube.applied[-1]["count"] == 1


async def test_an_outage_keeps_what_is_pending_up_to_a_bound(world: World) -> None:
    world.kube.error = Unreachable(0, "down", "")
    for number in range(LONGEST_QUEUE + 5):
        obj = {**SERVICE, "metadata": {"name": "m", "namespace": "team", "uid": f"u-{number}"}}
        world.recorder.record(obj, "Scaled", "x")
    assert not await world.recorder.flush()
    assert world.dropped("queue") == 5
    world.kube.error = None
    assert await world.recorder.flush()
    assert len(world.kube.applied) == LONGEST_QUEUE
    assert world.kube.applied[0]["involvedObject"]["uid"] == "u-0"


@pytest.mark.parametrize(
    ("error", "why"),
    [(NotLeader("apply"), "standby"), (Forbidden(403, "Forbidden", "namespace is terminating"), "refused")],
)
async def test_what_can_not_be_written_is_dropped_and_counted(world: World, error: ApiError, why: str) -> None:
    world.kube.error = error
    world.recorder.record(SERVICE, "Scaled", "x")
    assert await world.recorder.flush()
    assert world.dropped(why) == 1


async def test_a_long_message_is_cut_and_a_cluster_scoped_object_is_told_of_in_default(world: World) -> None:
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n" * 253}}
    world.recorder.record(node, "Cordoned", "x" * 5000)
    await world.recorder.flush()
    (event,) = world.kube.applied
    assert len(event["message"]) == 1024
    assert len(event["metadata"]["name"]) <= 253
    assert event["metadata"]["namespace"] == "default"


async def test_the_task_writes_what_comes_and_ends_when_told(world: World) -> None:
    stop = asyncio.Event()
    task = asyncio.create_task(world.recorder.run(stop))
    world.recorder.record(SERVICE, "Scaled", "x")
    async with asyncio.timeout(5):
        await world.kube.first.wait()
    world.recorder.record(SERVICE, "Scaled", "y")
    stop.set()
    async with asyncio.timeout(5):
        await task
    assert len(world.kube.applied) == 2
