"""Events about fetching: how far pods are whose models take long, and a cache without use (I/O through a client).

Only pods whose init container has run for `LONG_S` cost anything: one read of the end of its log at a time, for one pod
of a service, ever more seldom. Their number at once is bounded for the whole operator.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog

from conch import names
from conch.kube.errors import ApiError
from conch.storage.space import readable_size, size_unit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

Object = dict[str, Any]
_log = structlog.get_logger(__name__)

LONG_S: Final = 15.0
"""Fetching that is over before is no news."""
FIRST_AGAIN_S: Final = 15.0
LAST_AGAIN_S: Final = 600.0
AT_ONCE: Final = 4
PATIENCE_S: Final = 3.0
"""The API server asks the pod's node, which may be gone."""
TAIL_LINES: Final = 20
LIMIT_BYTES: Final = 16384
REMEMBERED: Final = 1000
NEWS_S: Final = 600.0
"""An operator that has just started tells nothing again of pods that have had their models for longer."""
MAX_SAID: Final = 600

_PROGRESS: Final = frozenset({"downloading", "verifying"})
_TROUBLE: Final = frozenset({"retrying", "restarting"})
# "reconnecting" follows bytes that came: of many connections one broke.
_STILL: Final = frozenset({"resuming", "reconnecting"})

_ORIGINS: Final = {
    "Download": "downloaded",
    "Cache": "out of the node's cache",
    "Present": "left by an earlier run and verified",
    "Volume": "on its volume, verified",
}


class Logs(Protocol):
    """What is needed of the API client."""

    async def logs(self, namespace: str, pod: str, container: str, *, tail_lines: int, limit_bytes: int) -> str:
        """The end of a container's log."""


class Recorder(Protocol):
    """Where Events go."""

    def record(self, obj: Object, reason: str, message: str, type_: str = "Normal") -> None:
        """Tell what happened to an object."""


@dataclass
class _Told:
    times: int
    not_before: float


class FetchTeller:
    """Tells of slow fetching on the InferenceService; one event loop, no tasks of its own."""

    def __init__(
        self, kube: Logs, recorder: Recorder, *, now: Callable[[], float], patience_s: float = PATIENCE_S
    ) -> None:
        self._kube = kube
        self._recorder = recorder
        self._now = now
        self._patience_s = patience_s
        self._told: dict[str, _Told] = {}
        self._heard: set[str] = set()
        self._running = 0

    async def look(self, service: Object, children: Mapping[str, list[Object]]) -> float | None:
        """Tell what there is to tell; the seconds after which to look again, or None. Never raises ApiError."""
        now = self._now()
        fetching: list[tuple[float, Object]] = []
        for pod in children.get("Pod", []):
            state = _fetch_state(pod)
            started = _instant((state.get("running") or {}).get("startedAt"))
            if started is not None:
                fetching.append((started, pod))
            elif "terminated" in state:
                if pod["metadata"]["uid"] in self._told:
                    self._tell_end(service, pod, state["terminated"])
                self._tell_cache(service, pod, state["terminated"], now)
        if not fetching:
            return None
        # The one that began first, always the same while it runs: several pods of one template fetch the same.
        started, pod = min(fetching, key=lambda item: (item[0], item[1]["metadata"]["name"]))
        told = self._told.get(pod["metadata"]["uid"])
        due = started + LONG_S if told is None else told.not_before
        if now < due:
            return due - now
        if self._running >= AT_ONCE:
            return 1.0
        times = 0 if told is None else told.times
        wait_s = min(FIRST_AGAIN_S * 2.0 ** min(times, 16), LAST_AGAIN_S)
        self._remember(pod["metadata"]["uid"], _Told(times + 1, now + wait_s))
        lines = await self._log_lines(pod)
        trouble = trouble_of(lines)
        progress = progress_of(lines, rate=not trouble)
        if progress or trouble or told is None:
            what = progress or ("its models" if trouble else "its models, and does not say how far it is")
            message = f"Pod {pod['metadata']['name']} fetches {what}{f'; {trouble}' if trouble else ''}."
            self._recorder.record(service, "FetchingModels", message, "Warning" if trouble else "Normal")
        return wait_s

    def _tell_end(self, service: Object, pod: Object, ended: Mapping[str, Any]) -> None:
        del self._told[pod["metadata"]["uid"]]
        if ended.get("exitCode") == 0:  # what went wrong is a condition
            said = arrived(str(ended.get("message") or ""))
            message = f"Pod {pod['metadata']['name']} has its models{f': {said}' if said else ''}."
            self._recorder.record(service, "ModelsFetched", message)

    def _tell_cache(self, service: Object, pod: Object, ended: Mapping[str, Any], now: float) -> None:
        uid, ended_at = pod["metadata"]["uid"], _instant(ended.get("finishedAt"))
        if uid in self._heard or ended_at is None or now - ended_at > NEWS_S or ended.get("exitCode") != 0:
            return
        if len(self._heard) >= REMEMBERED:
            self._heard.clear()  # at the worst it raises the count of an Event
        self._heard.add(uid)
        trouble = cache_trouble(str(ended.get("message") or ""))
        if trouble:
            # Of all pods of a node one Event: its message is the same, so a further one raises its count.
            node = (pod.get("spec") or {}).get("nodeName") or "unknown"
            self._recorder.record(service, "ModelCacheUnused", f"On node {node}, {trouble}.", "Warning")

    async def _log_lines(self, pod: Object) -> list[str]:
        metadata = pod["metadata"]
        self._running += 1
        try:
            # The client's own time-out, thrice, would keep the service's key from a pod that becomes ready meanwhile.
            async with asyncio.timeout(self._patience_s):
                text = await self._kube.logs(
                    metadata["namespace"],
                    metadata["name"],
                    names.FETCH_CONTAINER,
                    tail_lines=TAIL_LINES,
                    limit_bytes=LIMIT_BYTES,
                )
        except (ApiError, TimeoutError) as error:
            # Mostly the container ended meanwhile, or its node is silent; the role may lack the verb.
            where = f"{metadata['namespace']}/{metadata['name']}"
            _log.info("fetching.log_unreadable", pod=where, error=str(error) or "no answer in time")
            return []
        finally:
            self._running -= 1
        return text.splitlines()

    def _remember(self, uid: str, told: _Told) -> None:
        if len(self._told) >= REMEMBERED:
            # Of pods that went while they fetched.
            self._told = {key: one for key, one in self._told.items() if one.not_before > self._now() - LAST_AGAIN_S}
        self._told[uid] = told


def arrived(message: str) -> str:
    """What a successful `conch fetch` left as its termination message, in words; empty: it left none."""
    try:
        models = json.loads(message)["fetched"]
        told = [
            f"{one['model']} ({readable_size(one['bytes'])} {_ORIGINS.get(one['origin'], 'fetched')} in "
            f"{one['seconds']:g} s)"
            for one in models
            if one["origin"] != "None"  # an ensemble has no files
        ]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return "; ".join(told)[:MAX_SAID]


def cache_trouble(message: str) -> str:
    """Why a successful `conch fetch` downloaded what a cache should have held or kept; empty: it says nothing of it."""
    try:
        said = json.loads(message)["cache"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    if not isinstance(said, str):
        return ""
    # File systems and sources choose some of the words.
    return "".join(character if character.isprintable() else "?" for character in said)[:MAX_SAID]


def progress_of(lines: Iterable[str], *, rate: bool = True) -> str:
    """What `conch fetch` last logged of bytes that move: `3.2 of 10 GB of s3://m/x (80 MB/s)`; empty: nothing yet."""
    last = ""
    for said in _events(lines):
        if said["event"] not in _PROGRESS:
            continue
        done, total, per_s = (_number(said.get(key)) for key in ("bytes_done", "total_bytes", "bytes_per_s"))
        if done is not None:
            source = _one_line(said.get("source") or "its models")
            verb = "" if said["event"] == "downloading" else ", which is being verified"
            speed = f" ({readable_size(per_s)}/s)" if per_s and rate else ""
            last = f"{_share(done, total)} of {source}{verb}{speed}"
    return last


def trouble_of(lines: Iterable[str]) -> str:
    """Why `conch fetch` last broke off, if it got no further since: `it tries X again, since Y`; empty: all is well."""
    trouble = ""
    for said in _events(lines):
        if said["event"] in _TROUBLE and said.get("cause"):
            source, cause = _one_line(said.get("source") or "the source"), _one_line(said["cause"])
            trouble = f"it tries {source} again, since {cause}"
        elif said["event"] not in _STILL:
            trouble = ""
    return trouble


def _events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(said, dict) and isinstance(said.get("event"), str):
            yield said


def _one_line(said: object) -> str:
    # A source and a server choose some of the words.
    text = "".join(character if character.isprintable() else " " for character in str(said))
    return " ".join(text.split())[:MAX_SAID]


def _share(done: float, total: float | None) -> str:
    if total is None or total < done:
        return readable_size(done)
    size, unit = size_unit(total)
    return f"{done / size:.3g} of {total / size:.3g} {unit}"


def _number(value: object) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2.0**63
    return float(value) if known and isinstance(value, int | float) else None


def _fetch_state(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    if "deletionTimestamp" in pod["metadata"]:
        return {}
    statuses = (pod.get("status") or {}).get("initContainerStatuses") or ()
    state: Mapping[str, Any] = next(
        (one.get("state") or {} for one in statuses if one["name"] == names.FETCH_CONTAINER), {}
    )
    return state


def _instant(text: object) -> float | None:
    try:
        return dt.datetime.fromisoformat(str(text)).timestamp() if text else None
    except ValueError:
        return None
