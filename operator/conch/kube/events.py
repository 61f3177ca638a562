"""Kubernetes Events that count instead of piling up; recording never blocks and never fails a reconcile (I/O)."""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import prometheus_client
import structlog

from conch.kube.client import EVENTS, Kube
from conch.kube.errors import ApiError, NotLeader, Throttled, Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Object = dict[str, Any]

MANAGER: Final = "conch-events"
COMPONENT: Final = "conch"
PER_MINUTE: Final = 10
LONGEST_QUEUE: Final = 1000
REMEMBERED: Final = 4096
# The API server drops an Event an hour after its last write; a series older than that starts anew.
FORGET_AFTER_S: Final = 3600.0
RETRY_S: Final = 5.0
LONGEST_MESSAGE: Final = 1024

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Series:
    body: Object
    first: dt.datetime
    last: dt.datetime
    at: float
    count: int = 0


@dataclass(slots=True)
class _Allowance:
    left: float
    at: float


class Recorder:
    """Records what happened to an object; the same reason and message again only raises a count.

    At most `PER_MINUTE` writes a minute and object, on average; what is over that is counted, not written.
    """

    def __init__(
        self,
        kube: Kube,
        *,
        instance: str,
        registry: prometheus_client.CollectorRegistry | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC),
    ) -> None:
        self._kube = kube
        self._instance = instance
        self._clock = clock
        self._now = now
        self._series: OrderedDict[str, _Series] = OrderedDict()
        self._allowances: OrderedDict[str, _Allowance] = OrderedDict()
        self._pending: OrderedDict[str, None] = OrderedDict()
        self._wake = asyncio.Event()
        self._dropped = prometheus_client.Counter(
            "conch_events_dropped",
            "Kubernetes Events that were not written: over the limit, refused, or the queue was full.",
            ("why",),
            registry=registry,
        )

    def record(self, obj: Mapping[str, Any], reason: str, message: str, type_: str = "Normal") -> None:
        """Note that `reason` (CamelCase) happened to `obj`; returns at once."""
        metadata = obj["metadata"]
        uid = metadata.get("uid", "")
        message = message[:LONGEST_MESSAGE]
        name = f"{metadata['name'][:200]}.{_digest(uid, type_, reason, message)}"
        key = f"{metadata.get('namespace') or 'default'}/{name}"
        now, at = self._now(), self._clock()
        series = self._series.pop(key, None)
        if series is None or at - series.at > FORGET_AFTER_S:
            body = _body(obj, name=name, reason=reason, message=message, type_=type_, instance=self._instance)
            series = _Series(body, first=now, last=now, at=at)
        series.count += 1
        series.last, series.at = now, at
        self._series[key] = series
        _shorten(self._series, REMEMBERED)
        if key in self._pending:
            return
        if not self._allowed(uid or key, at):
            self._dropped.labels("limit").inc()
        elif len(self._pending) >= LONGEST_QUEUE:
            self._dropped.labels("queue").inc()
        else:
            self._pending[key] = None
            self._wake.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Write what was recorded until `stop` is set; what is left then is tried once."""
        stopping = asyncio.ensure_future(stop.wait())
        try:
            while not stop.is_set():
                waking = asyncio.ensure_future(self._wake.wait())
                await asyncio.wait({stopping, waking}, return_when=asyncio.FIRST_COMPLETED)
                waking.cancel()
                self._wake.clear()
                if not await self.flush():
                    await asyncio.wait({stopping}, timeout=RETRY_S)
                    self._wake.set()
        finally:
            stopping.cancel()

    async def flush(self) -> bool:
        """Write all that is pending; false if the server could not take it now and it is still pending."""
        while self._pending:
            key, _ = self._pending.popitem(last=False)
            series = self._series.get(key)
            if series is None:
                continue
            body = {
                **series.body,
                "count": series.count,
                "firstTimestamp": _stamp(series.first),
                "lastTimestamp": _stamp(series.last),
            }
            try:
                await self._kube.apply(body, manager=MANAGER)
            except NotLeader:
                self._dropped.labels("standby").inc()
            except (Throttled, Unreachable):
                self._pending[key] = None
                self._pending.move_to_end(key, last=False)
                return False
            except ApiError as error:
                # Mostly a namespace that is going away; an Event about that helps nobody.
                self._dropped.labels("refused").inc()
                _log.info("event.refused", about=key, error=str(error))
        return True

    def _allowed(self, uid: str, at: float) -> bool:
        allowance = self._allowances.pop(uid, None) or _Allowance(PER_MINUTE, at)
        allowance.left = min(PER_MINUTE, allowance.left + (at - allowance.at) * PER_MINUTE / 60)
        allowance.at = at
        self._allowances[uid] = allowance
        _shorten(self._allowances, REMEMBERED)
        if allowance.left < 1:
            return False
        allowance.left -= 1
        return True


def _body(obj: Mapping[str, Any], *, name: str, reason: str, message: str, type_: str, instance: str) -> Object:
    metadata = obj["metadata"]
    involved = {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "name": metadata["name"]}
    for field in ("namespace", "uid"):
        if metadata.get(field):
            involved[field] = metadata[field]
    return {
        "apiVersion": EVENTS.api_version,
        "kind": EVENTS.kind,
        "metadata": {"name": name, "namespace": metadata.get("namespace") or "default"},
        "involvedObject": involved,
        "reason": reason,
        "message": message,
        "type": type_,
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "reportingInstance": instance,
    }


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _shorten(kept: OrderedDict[str, Any], longest: int) -> None:
    while len(kept) > longest:
        kept.popitem(last=False)


def _stamp(at: dt.datetime) -> str:
    return at.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
