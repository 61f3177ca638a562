"""Who is leader: a Lease held by a thread of its own, and the gate that every write passes (I/O, one thread).

kubernetes.aio's own elector renews for a crashed leader and can leave two leaders after a connection error; kopf's
peering is a notice board, no lock. Three clocks matter here and only one is trusted: expiry is judged by when *this*
process saw the record change, on a clock that no one can set and that goes on while the process is stopped.
"""

from __future__ import annotations

import datetime as dt
import http.client
import json
import os
import random
import socket
import threading
import time
import uuid
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import urlsplit

import structlog

from conch.kube.client import LEASES
from conch.kube.errors import ApiError, Conflict, NotFound, Unreachable, from_answer
from conch.names import LEASE_NAME

if TYPE_CHECKING:
    from collections.abc import Callable

    from conch.config import Settings
    from conch.kube.connection import Connection

Object = dict[str, Any]

WRITE_MARGIN_S: Final = 1.0
LOOP_SILENCE_S: Final = 10.0
LOST_EXIT_CODE: Final = 17

_log = structlog.get_logger(__name__)


class LeaseStore(Protocol):
    """The Lease object; every call ends within its time limit, or raises `ApiError`."""

    def read(self) -> Object | None:
        """The object, or None if there is none."""

    def create(self, body: Object) -> Object:
        """Create it; `Conflict` if it exists."""

    def update(self, body: Object) -> Object:
        """Replace it; `Conflict` unless the body's resourceVersion is the current one."""


class Elector:
    """Acquires and renews the lease in a thread. Anything between two steps can take for ever: see `may_write`.

    Args:
        store: the Lease.
        settings: identity and times; the lease is given up `lease_renew_deadline_s` after the last renewal, while
            others wait `lease_duration_s`, so the gate is closed well before someone else may write.
        loop_alive: whether the event loop ticked lately; a stuck leader must lose its lease.
        on_acquired: called once, in the elector's thread.
        on_lost: called once, in the elector's thread; ends the process.
    """

    def __init__(
        self,
        store: LeaseStore,
        settings: Settings,
        *,
        loop_alive: Callable[[], bool],
        on_acquired: Callable[[], None],
        on_lost: Callable[[str], None] | None = None,
        clock: Callable[[], float] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        # A pod's name alone would let a second process of the same pod think that it still holds the lease.
        self.identity = f"{settings.identity}_{uuid.uuid4().hex[:8]}"
        self._store = store
        self._settings = settings
        self._loop_alive = loop_alive
        self._on_acquired = on_acquired
        self._on_lost = on_lost or _exit
        self._clock = clock or boot_clock
        self._rng = rng or random.Random()  # noqa: S311 - spreads requests, hides nothing
        self._namespace = settings.namespace
        self._seen: Object | None = None
        self._seen_at = 0.0
        self._record: Object | None = None
        self._valid_until = float("-inf")
        self._leading = False
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def leading(self) -> bool:
        """Whether this replica took the lease and has not lost it; says nothing about this instant."""
        return self._leading

    @property
    def holder(self) -> str:
        """Who held the lease when it was last read; empty if nobody."""
        spec = self._seen or {}
        return str(spec.get("holderIdentity") or "")

    def may_write(self) -> bool:
        """Whether a write may be sent now. True for the leader only, and false at once in a resumed process."""
        return self._leading and self._valid_until > self._clock() + WRITE_MARGIN_S

    def start(self) -> None:
        """Begin to compete for the lease."""
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop competing, and hand a held lease over at once. Only after the workers ended: others write then."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=self._settings.lease_renew_deadline_s)
        was_leading, self._leading = self._leading, False
        if was_leading and self._record is not None:
            try:
                self._put(self._record, holder="", duration_s=1)
            except ApiError as error:
                _log.warning("lease.release_failed", error=str(error))

    def step(self) -> float:
        """One attempt to acquire or to renew; returns how long to wait for the next."""
        retry_s = self._settings.lease_retry_s * self._rng.uniform(1.0, 1.2)
        try:
            if not self._leading:
                self._compete()
                return retry_s
            if self._clock() >= self._valid_until:
                self._lose("no renewal came through in time")
                return retry_s
            if self._loop_alive():
                self._renew()
            else:
                _log.error("lease.not_renewed", why=f"the event loop has not turned for {LOOP_SILENCE_S:.0f} s")
        except ApiError as error:
            _log.warning("lease.request_failed", error=str(error), leading=self._leading)
        if not self._leading:
            return retry_s
        return max(0.0, min(retry_s, self._valid_until - self._clock()))

    def _run(self) -> None:
        # Replicas that start together must not ask together for ever.
        wait_s = self._rng.uniform(0.0, self._settings.lease_retry_s / 4)
        while not self._over.wait(wait_s):
            try:
                wait_s = self.step()
            except Exception as error:  # noqa: BLE001
                # A thread that dies quietly would leave a leader that never renews and never says so.
                _log.exception("lease.failed")
                if self._leading:
                    self._lose(f"the elector failed: {error!r}")
                wait_s = self._settings.lease_retry_s

    def _compete(self) -> None:
        current = self._store.read()
        if current is None:
            self._take(None)
            return
        spec = current.get("spec") or {}
        if spec != self._seen:
            # The instant after the answer, not before the question: the holder counts from when it sent the renewal.
            self._seen, self._seen_at = spec, self._clock()
        held_s = float(spec.get("leaseDurationSeconds") or self._settings.lease_duration_s)
        if spec.get("holderIdentity") and self._clock() - self._seen_at < held_s:
            return
        self._take(current)

    def _take(self, current: Object | None) -> None:
        started = self._clock()
        try:
            if current is None:
                self._record = self._store.create(self._body(None, transitions=0))
            else:
                transitions = int((current.get("spec") or {}).get("leaseTransitions") or 0) + 1
                self._record = self._store.update(self._body(current, transitions=transitions))
        except Conflict:
            return
        self._seen, self._seen_at = self._record.get("spec"), started
        self._valid_until = started + self._settings.lease_renew_deadline_s
        self._leading = True
        _log.info("lease.acquired", identity=self.identity)
        self._on_acquired()

    def _renew(self) -> None:
        # Others count from when they see the renewal, which is after this instant: the gate closes before they wake.
        started = self._clock()
        if self._record is None:
            raise RuntimeError("a leader without its record")
        try:
            self._record = self._put(self._record, holder=self.identity)
        except (Conflict, NotFound):
            current = self._store.read()
            if current is None:
                self._lose("the Lease was deleted")
                return
            holder = (current.get("spec") or {}).get("holderIdentity")
            if holder != self.identity:
                self._seen = current.get("spec")
                self._lose(f"{holder or 'nobody'} holds the Lease")
                return
            self._record = self._put(current, holder=self.identity)
        self._seen, self._seen_at = self._record.get("spec"), started
        self._valid_until = started + self._settings.lease_renew_deadline_s

    def _put(self, current: Object, *, holder: str, duration_s: float | None = None) -> Object:
        spec = {**current["spec"], "holderIdentity": holder, "renewTime": _now()}
        if duration_s is not None:
            spec["leaseDurationSeconds"] = int(duration_s)
        return self._store.update({**current, "spec": spec})

    def _body(self, current: Object | None, *, transitions: int) -> Object:
        now = _now()
        base = current or {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": {"name": LEASE_NAME, "namespace": self._namespace},
        }
        spec = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": max(1, round(self._settings.lease_duration_s)),
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }
        return {**base, "spec": spec}

    def _lose(self, why: str) -> None:
        self._leading = False
        self._valid_until = float("-inf")
        _log.error("lease.lost", why=why)
        self._on_lost(why)


class HttpLeaseStore:
    """The Lease over a synchronous connection of its own: a busy event loop can neither delay nor hide a renewal."""

    def __init__(self, connection: Connection, settings: Settings, *, name: str = LEASE_NAME) -> None:
        if connection.proxy:
            raise ValueError("a kubeconfig with proxy-url is not supported by the leader election")
        self._connection = connection
        self._timeout_s = settings.lease_renew_deadline_s / 2
        self._collection = LEASES.path(settings.namespace)
        self._path = LEASES.path(settings.namespace, name)
        self._http: http.client.HTTPConnection | None = None

    def read(self) -> Object | None:
        """See `LeaseStore`."""
        try:
            return self._call("GET", self._path)
        except NotFound:
            return None

    def create(self, body: Object) -> Object:
        """See `LeaseStore`."""
        return self._call("POST", self._collection, body)

    def update(self, body: Object) -> Object:
        """See `LeaseStore`."""
        return self._call("PUT", self._path, body)

    def _call(self, method: str, path: str, body: Object | None = None) -> Object:
        deadline = time.monotonic() + self._timeout_s
        reused = self._http is not None
        try:
            status, raw, retry_after = self._exchange(method, path, body, deadline)
        except (OSError, http.client.HTTPException) as error:
            self._close()
            # The server closes idle connections; with a resourceVersion in the body a second try is safe.
            if not reused or isinstance(error, TimeoutError):
                raise Unreachable(0, type(error).__name__, str(error)) from error
            try:
                status, raw, retry_after = self._exchange(method, path, body, deadline)
            except (OSError, http.client.HTTPException) as again:
                self._close()
                raise Unreachable(0, type(again).__name__, str(again)) from again
        try:
            answer = json.loads(raw)
        except ValueError:
            answer = raw.decode(errors="replace")
        if status >= HTTPStatus.MULTIPLE_CHOICES or not isinstance(answer, dict):
            raise from_answer(status, answer, retry_after=retry_after)
        return answer

    def _exchange(self, method: str, path: str, body: Object | None, deadline: float) -> tuple[int, bytes, str | None]:
        if self._http is None:
            self._http = self._connect(deadline)
        headers = {"Accept": "application/json", "Content-Type": "application/json", "User-Agent": "conch-lease"}
        authorization = self._connection.authorization()
        if authorization:
            headers["Authorization"] = authorization
        if self._http.sock is not None:
            self._http.sock.settimeout(_left(deadline))
        self._http.request(method, path, None if body is None else json.dumps(body).encode(), headers)
        response = self._http.getresponse()
        return response.status, response.read(), response.headers.get("Retry-After")

    def _connect(self, deadline: float) -> http.client.HTTPConnection:
        server = urlsplit(self._connection.server)
        host = server.hostname or ""
        port = server.port or (443 if server.scheme == "https" else 80)
        sock = socket.create_connection((host, port), timeout=_left(deadline))
        try:
            if server.scheme == "https":
                name = self._connection.server_name or host
                sock = self._connection.ssl_context.wrap_socket(sock, server_hostname=name)
        except OSError:
            sock.close()
            raise
        connection = http.client.HTTPConnection(host, port)
        connection.sock = sock
        return connection

    def _close(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None


def boot_clock() -> float:
    """Seconds on a clock that nobody sets and that also runs while the process or the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _left(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no answer in time")
    return left_s


def _now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _exit(why: str) -> None:
    _log.error("process.ends", why=why)
    # Nothing may run after this: a clean exit would first finish the writes that another replica now makes.
    os._exit(LOST_EXIT_CODE)
