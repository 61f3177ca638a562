"""The work queue on a fake clock."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from conch.reconcile.queue import FIRST_RETRY_S, JITTER, LAST_RETRY_S, Queue

if TYPE_CHECKING:
    from collections.abc import Callable


class FakeTime:
    """A clock and its timer: `advance` runs what falls due, in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[FakeCall] = []

    def clock(self) -> float:
        return self.now

    def timer(self, delay_s: float, callback: Callable[[], None]) -> FakeCall:
        call = FakeCall(self.now + delay_s, callback)
        self.calls.append(call)
        return call

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [call for call in self.calls if not call.cancelled and call.at <= end]:
            call = min(due, key=lambda call: call.at)
            self.calls.remove(call)
            self.now = max(self.now, call.at)
            call.callback()
        self.now = end

    @property
    def pending(self) -> int:
        return sum(not call.cancelled for call in self.calls)


class FakeCall:
    def __init__(self, at: float, callback: Callable[[], None]) -> None:
        self.at = at
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


@pytest.fixture
def queue(time: FakeTime) -> Queue[str]:
    return Queue(clock=time.clock, timer=time.timer, rng=random.Random(1))


async def test_a_key_added_twice_runs_once(queue: Queue[str]) -> None:
    queue.add("a")
    queue.add("a")
    assert len(queue) == 1
    assert await queue.get() == "a"
    assert len(queue) == 0


async def test_a_key_never_runs_twice_at_a_time(queue: Queue[str]) -> None:
    queue.add("a")
    key = await queue.get()
    queue.add("a")
    queue.add("b")
    assert await queue.get() == "b"
    assert len(queue) == 0
    assert queue.running == 2
    queue.done(key)
    assert len(queue) == 1


async def test_a_key_added_while_it_runs_runs_once_more(queue: Queue[str]) -> None:
    queue.add("a")
    key = await queue.get()
    for _ in range(3):
        queue.add("a")
    queue.done(key)
    assert await queue.get() == "a"
    queue.done("a")
    assert (len(queue), queue.running) == (0, 0)


async def test_a_waiting_worker_wakes_up(queue: Queue[str]) -> None:
    worker = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add("a")
    assert await worker == "a"


async def test_a_cancelled_worker_loses_no_key(queue: Queue[str]) -> None:
    worker = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add("a")
    worker.cancel()
    await asyncio.gather(worker, return_exceptions=True)
    queue.add("a")
    assert await asyncio.wait_for(queue.get(), 1) == "a"


async def test_of_several_delays_the_earliest_counts(queue: Queue[str], time: FakeTime) -> None:
    queue.add_after("a", 30)
    queue.add_after("a", 5)
    queue.add_after("a", 60)
    assert queue.delayed == 1
    time.advance(4.9)
    assert len(queue) == 0
    time.advance(0.1)
    assert len(queue) == 1
    await queue.get()
    queue.done("a")
    time.advance(100)
    assert len(queue) == 0


async def test_no_delay_means_now(queue: Queue[str]) -> None:
    queue.add_after("a", 0)
    assert len(queue) == 1


async def test_thousands_of_delayed_keys_need_one_timer(time: FakeTime) -> None:
    numbers: Queue[int] = Queue(clock=time.clock, timer=time.timer)
    for number in range(5000):
        numbers.add_after(number, 600 - number * 0.1)
    assert time.pending == 1
    time.advance(600)
    assert len(numbers) == 5000
    assert time.pending == 0


async def test_failures_back_off_from_half_a_second_to_five_minutes(queue: Queue[str]) -> None:
    delays = [queue.retry("a") for _ in range(2000)]
    wants = [min(FIRST_RETRY_S * 2.0 ** min(n, 32), LAST_RETRY_S) for n in range(2000)]
    for delay, want in zip(delays, wants, strict=True):
        assert want * (1 - JITTER) <= delay <= want * (1 + JITTER)
    assert len({round(delay, 6) for delay in delays[-50:]}) > 40


async def test_success_resets_the_back_off_of_that_key_only(queue: Queue[str]) -> None:
    for _ in range(5):
        queue.retry("a")
        queue.retry("b")
    queue.forget("a")
    assert queue.failures("a") == 0
    assert queue.retry("a") < 1
    assert queue.retry("b") > 5


async def test_a_poisoned_key_does_not_delay_the_others(queue: Queue[str], time: FakeTime) -> None:
    queue.add("poison")
    queue.add("good")
    assert await queue.get() == "poison"
    queue.retry("poison")
    queue.done("poison")
    assert await queue.get() == "good"
    time.advance(1)
    assert await queue.get() == "poison"


async def test_the_event_loops_own_timer_is_the_default() -> None:
    queue: Queue[str] = Queue()
    queue.add_after("a", 0.01)
    assert await asyncio.wait_for(queue.get(), 5) == "a"
