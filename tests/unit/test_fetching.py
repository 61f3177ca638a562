"""Events about slow fetching: when the log is read, what is told, and that it costs little."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from child_makers import make_pod
from conch.kube.errors import ApiError, Forbidden
from conch.reconcile.fetching import (
    AT_ONCE,
    FIRST_AGAIN_S,
    LAST_AGAIN_S,
    LONG_S,
    NEWS_S,
    FetchTeller,
    arrived,
    cache_trouble,
    progress_of,
    trouble_of,
)
from makers import make_service, stored

if TYPE_CHECKING:
    from collections.abc import Mapping

Object = dict[str, Any]
SERVICE = stored(make_service())
STARTED = "2026-11-30T10:00:00Z"
STARTED_S = 1796032800.0


def line(event: str = "downloading", **fields: Any) -> str:
    return json.dumps({"source": "s3://m/x", "bytes_done": 3.2e9, "bytes_per_s": 8e7, **fields, "event": event})


@dataclass
class FakeLogs:
    """Gives the log it is told, counts who asked, and may keep them waiting."""

    text: str = line(total_bytes=10e9)
    error: ApiError | None = None
    asked: list[str] = field(default_factory=list)
    held: asyncio.Event | None = None
    events: list[tuple[str, str]] = field(default_factory=list)

    async def logs(self, namespace: str, pod: str, container: str, *, tail_lines: int, limit_bytes: int) -> str:
        assert (namespace, container) == ("default", "fetch")
        assert tail_lines <= 20
        assert limit_bytes <= 2**14
        self.asked.append(pod)
        if self.held is not None:
            await self.held.wait()
        if self.error is not None:
            raise self.error
        return self.text

    def record(self, obj: Object, reason: str, message: str, type_: str = "Normal") -> None:
        troubled = reason == "ModelCacheUnused" or "again, since" in message
        assert (obj, type_) == (SERVICE, "Warning" if troubled else "Normal")
        self.events.append((reason, message))


class World:
    """A teller with a fake clock, and pods of one service."""

    def __init__(self, *pods: Object) -> None:
        self.out = FakeLogs()
        self.now = STARTED_S
        self.teller = FetchTeller(self.out, self.out, now=lambda: self.now)
        self.pods = list(pods) or [fetching()]

    async def look(self, after_s: float) -> float | None:
        self.now = STARTED_S + after_s
        return await self.teller.look(SERVICE, {"Pod": self.pods})


def fetching(name: str = "p", started: str = STARTED) -> Object:
    return make_pod(name, fetch={"ready": False, "state": {"running": {"startedAt": started}}})


def ended(name: str = "p", **how: Any) -> Object:
    return make_pod(name, fetch={"state": {"terminated": {"exitCode": 0, **how}}})


async def test_quick_fetching_is_no_news_and_reads_no_log() -> None:
    world = World()
    assert await world.look(1) == LONG_S - 1
    world.pods = [ended()]
    assert await world.look(14) is None
    assert (world.out.asked, world.out.events) == ([], [])


async def test_slow_fetching_is_told_with_how_far_it_is_and_its_end_with_what_came() -> None:
    world = World()
    await world.look(15)
    world.pods = [ended(message='{"fetched":[{"model":"m","origin":"Download","bytes":10000000000,"seconds":120.5}]}')]
    assert await world.look(130) is None
    assert await world.look(131) is None
    assert world.out.events == [
        ("FetchingModels", "Pod p fetches 3.2 of 10 GB of s3://m/x (80 MB/s)."),
        ("ModelsFetched", "Pod p has its models: m (10 GB downloaded in 120.5 s)."),
    ]


async def test_a_log_on_a_silent_node_keeps_nobody_waiting_and_is_looked_at_again() -> None:
    world = World()
    world.out.held = asyncio.Event()
    world.teller = FetchTeller(world.out, world.out, now=lambda: world.now, patience_s=0.01)
    assert await world.look(15) == FIRST_AGAIN_S
    world.out.held.set()
    await world.look(30)
    assert world.out.asked == ["p", "p"]
    assert world.out.events[-1][1] == "Pod p fetches 3.2 of 10 GB of s3://m/x (80 MB/s)."


async def test_a_fetch_that_failed_is_a_conditions_matter() -> None:
    world = World()
    await world.look(15)
    world.pods = [ended(exitCode=4, message="the digest differs")]
    await world.look(20)
    assert [reason for reason, _ in world.out.events] == ["FetchingModels"]


def with_trouble(name: str, finished: str = STARTED, **how: Any) -> Object:
    message = {"fetched": [], "cache": "the model cache can't be written (Permission denied): make it writable"}
    return ended(name, finishedAt=finished, message=json.dumps(message), **how)


async def test_a_cache_of_no_use_is_told_once_of_each_pod_and_in_the_same_words_of_a_node() -> None:
    world = World(with_trouble("a"), with_trouble("b"), with_trouble("failed", exitCode=3))
    for number, pod in enumerate(world.pods):
        pod["metadata"]["uid"] = f"uid-{number}"
        pod["spec"] = {"nodeName": "n1"}
    for after_s in (1, 2, NEWS_S):
        assert await world.look(after_s) is None
    words = "On node n1, the model cache can't be written (Permission denied): make it writable."
    assert world.out.events == [("ModelCacheUnused", words)] * 2


async def test_an_operator_that_starts_later_tells_nothing_of_old_pods_caches() -> None:
    world = World(with_trouble("a"))
    await world.look(NEWS_S + 1)
    assert world.out.events == []


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("", ""),
        ("{", ""),
        ("[]", ""),
        ('{"fetched": []}', ""),
        ('{"cache": 1}', ""),
        ('{"cache": "a\\u001b[31m\\nb"}', "a?[31m?b"),
    ],
)
def test_what_a_termination_message_says_of_the_cache(message: str, told: str) -> None:
    assert cache_trouble(message) == told


async def test_the_log_is_read_ever_more_seldom() -> None:
    world = World()
    at = 0.0
    times: list[float] = []
    while at < 4 * 3600:
        wait_s = await world.look(at)
        assert wait_s is not None
        if len(world.out.asked) > len(times):
            times.append(at)
        # Whoever comes early reads nothing.
        asked = len(world.out.asked)
        assert await world.look(at + wait_s / 2) == pytest.approx(wait_s / 2)
        assert len(world.out.asked) == asked
        at += wait_s
    assert times[0] == LONG_S
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == LAST_AGAIN_S
    assert len(times) < 35


async def test_of_many_pods_one_is_read() -> None:
    world = World(fetching("b"), fetching("a"), fetching("late", "2026-11-30T10:00:05Z"))
    await world.look(60)
    assert world.out.asked == ["a"]


@pytest.mark.parametrize("error", [Forbidden(403), ApiError(0)])
async def test_a_log_that_can_not_be_read_is_told_once_without_figures(error: ApiError) -> None:
    world = World()
    world.out.error = error
    for after_s in (15, 60, 600):
        await world.look(after_s)
    assert world.out.events == [("FetchingModels", "Pod p fetches its models, and does not say how far it is.")]


async def test_only_so_many_logs_are_read_at_once() -> None:
    world = World()
    world.out.held = asyncio.Event()
    world.now = STARTED_S + 20
    asking = [
        asyncio.ensure_future(world.teller.look(SERVICE, {"Pod": [fetching(f"p{number}")]}))
        for number in range(AT_ONCE + 2)
    ]
    await asyncio.sleep(0)
    assert len(world.out.asked) == AT_ONCE
    world.out.held.set()
    assert sorted(await asyncio.gather(*asking))[:2] == [1.0, 1.0]  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([], ""),
        (["no json", "[1]", '{"event": "complete"}', '{"event": []}'], ""),
        ([line(total_bytes=10e9)], "3.2 of 10 GB of s3://m/x (80 MB/s)"),
        ([line(total_bytes=None)], "3.2 GB of s3://m/x (80 MB/s)"),
        ([line(bytes_done=5, total_bytes=700, bytes_per_s=0)], "5 of 700 bytes of s3://m/x"),
        ([line(bytes_done=1e6), line(bytes_done=2e6)], "2 MB of s3://m/x (80 MB/s)"),
        ([line("verifying", bytes_per_s=1e9)], "3.2 GB of s3://m/x, which is being verified (1 GB/s)"),
        ([line(bytes_done="many")], ""),
        ([line(bytes_done=-1)], ""),
    ],
)
def test_the_last_line_about_bytes_is_told(lines: list[str], told: str) -> None:
    assert progress_of(lines) == told


STALL = line("retrying", cause="no byte came for 60 s")
TOLD_STALL = "it tries s3://m/x again, since no byte came for 60 s"


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([line(), STALL], TOLD_STALL),
        ([STALL], TOLD_STALL),
        ([line("retrying", cause="it\nbroke\x1b[31m off")], "it tries s3://m/x again, since it broke [31m off"),
        ([STALL, line("resuming")], TOLD_STALL),
        ([STALL, line()], ""),  # bytes move again
        ([STALL, line("verified")], ""),
        ([STALL, line("another pod downloads this model; waiting for it")], ""),
        ([line("reconnecting", cause="one of many connections broke")], ""),
        ([line("retrying")], ""),
        ([line()], ""),
    ],
)
def test_why_the_last_attempt_broke_off_is_told_until_bytes_move_again(lines: list[str], told: str) -> None:
    assert trouble_of(lines) == told


async def test_a_source_that_sends_nothing_is_a_warning_long_before_the_fetch_gives_up() -> None:
    world = World()
    world.out.text = f"{line(total_bytes=10e9)}\n{STALL}"
    await world.look(70)
    assert world.out.events == [("FetchingModels", f"Pod p fetches 3.2 of 10 GB of s3://m/x; {TOLD_STALL}.")]
    world.out.text = STALL
    await world.look(200)
    assert world.out.events[1:] == [("FetchingModels", f"Pod p fetches its models; {TOLD_STALL}.")]


@given(st.lists(st.text(max_size=100) | st.builds(lambda done: line(bytes_done=done), st.floats() | st.integers())))
def test_whatever_a_log_holds_is_one_line_or_nothing(lines: list[str]) -> None:
    assert "\n" not in progress_of(lines)
    assert "\n" not in trouble_of(lines)


@pytest.mark.parametrize("message", ["", "{", "[]", '{"fetched": 1}', '{"fetched": [{"model": "m"}]}', "null"])
def test_a_summary_that_is_none_is_left_out(message: str) -> None:
    assert arrived(message) == ""


async def test_pods_that_go_or_have_no_fetch_are_no_matter() -> None:
    gone: Mapping[str, Any] = {**fetching(), "metadata": {**fetching()["metadata"], "deletionTimestamp": STARTED}}
    world = World(dict(gone), make_pod("q"))
    assert await world.look(60) is None
    assert world.out.asked == []
