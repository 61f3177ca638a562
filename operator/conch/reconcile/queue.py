"""A work queue of keys with client-go's contract: one run per key at a time, no lost wake-up, back-off per key.

One event loop, no locks. A single timer serves all delayed keys, so that 5,000 services waiting for their resync cost
one heap, not 5,000 tasks.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import time
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 300.0
JITTER = 0.2


class TimerHandle(Protocol):
    """What a scheduled call returns."""

    def cancel(self) -> None:
        """Make sure that the call doesn't happen."""


class Timer(Protocol):
    """Calls `callback` after `delay_s`; the event loop's `call_later` by default."""

    def __call__(self, delay_s: float, callback: Callable[[], None]) -> TimerHandle:
        """Schedule the call."""


class Queue(Generic[K]):
    """Keys to work on, each at most once at a time; added while it runs, a key runs once more."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        timer: Timer | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._clock = clock
        self._timer = timer or _loop_timer
        self._rng = rng or random.Random()  # noqa: S311 - spreads retries, hides nothing
        self._ready: asyncio.Queue[K] = asyncio.Queue()
        self._dirty: set[K] = set()
        self._running: set[K] = set()
        self._failures: dict[K, int] = {}
        self._due: dict[K, float] = {}
        # Entries whose time differs from `_due` are leftovers of a key that was brought forward.
        self._heap: list[tuple[float, int, K]] = []
        self._order = itertools.count()
        self._alarm: tuple[float, TimerHandle] | None = None

    def __len__(self) -> int:
        """Keys that wait for a worker now (not the delayed, not the running ones)."""
        return self._ready.qsize()

    @property
    def running(self) -> int:
        """Keys that workers hold."""
        return len(self._running)

    @property
    def delayed(self) -> int:
        """Keys that come back later."""
        return len(self._due)

    def failures(self, key: K) -> int:
        """Failed runs of `key` in a row."""
        return self._failures.get(key, 0)

    def add(self, key: K) -> None:
        """Work on `key` as soon as a worker is free."""
        if key in self._dirty:
            return
        self._dirty.add(key)
        if key not in self._running:
            self._ready.put_nowait(key)

    def add_after(self, key: K, delay_s: float) -> None:
        """Work on `key` in `delay_s`; of several delays the earliest counts."""
        if delay_s <= 0:
            self.add(key)
            return
        due = self._clock() + delay_s
        if self._due.get(key, float("inf")) <= due:
            return
        self._due[key] = due
        heapq.heappush(self._heap, (due, next(self._order), key))
        self._set_alarm()

    def retry(self, key: K) -> float:
        """Work on `key` again after a failure: 0.5 s, doubling to 5 min, ± 20 %; returns the delay."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        # The exponent is capped before the multiplication: 2.0 ** 1024 overflows after a week of failures.
        delay_s = min(FIRST_RETRY_S * 2.0 ** min(failures, 32), LAST_RETRY_S)
        delay_s *= self._rng.uniform(1 - JITTER, 1 + JITTER)
        self.add_after(key, delay_s)
        return delay_s

    def forget(self, key: K) -> None:
        """`key` succeeded, or is gone: its next failure starts at the first delay again."""
        self._failures.pop(key, None)

    async def get(self) -> K:
        """The next key; whoever gets it must call `done`."""
        key = await self._ready.get()
        self._dirty.discard(key)
        self._running.add(key)
        return key

    def done(self, key: K) -> None:
        """The run of `key` ended; what was added meanwhile becomes ready."""
        self._running.discard(key)
        if key in self._dirty:
            self._ready.put_nowait(key)

    def _set_alarm(self) -> None:
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        if not self._heap:
            return
        due = self._heap[0][0]
        if self._alarm is not None:
            if self._alarm[0] <= due:
                return
            self._alarm[1].cancel()
        self._alarm = (due, self._timer(max(0.0, due - self._clock()), self._release))

    def _release(self) -> None:
        self._alarm = None
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            due, _, key = heapq.heappop(self._heap)
            if self._due.get(key) == due:
                del self._due[key]
                self.add(key)
        self._set_alarm()


def _loop_timer(delay_s: float, callback: Callable[[], None]) -> TimerHandle:
    return asyncio.get_running_loop().call_later(delay_s, callback)
