"""The elector on a fake clock and a fake Lease; its HTTP store against a real server."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from conch.config import Settings
from conch.kube.connection import Connection
from conch.kube.errors import Conflict, Forbidden, Unreachable
from conch.kube.lease import WRITE_MARGIN_S, Elector, HttpLeaseStore, boot_clock

if TYPE_CHECKING:
    from collections.abc import Iterator

DURATION_S, DEADLINE_S, RETRY_S = 15.0, 10.0, 2.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Store:
    """One Lease with resourceVersions; can be cut off, per replica, by `down`."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.writes = 0
        self.down = False

    def read(self) -> dict[str, Any] | None:
        self._check()
        return copy.deepcopy(self.lease)

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        self._check()
        if self.lease is not None:
            raise Conflict(409, "AlreadyExists", "")
        return self._write(body)

    def update(self, body: dict[str, Any]) -> dict[str, Any]:
        self._check()
        if self.lease is None or body["metadata"]["resourceVersion"] != str(self.version):
            raise Conflict(409, "Conflict", "")
        return self._write(body)

    def _write(self, body: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.writes += 1
        self.lease = copy.deepcopy(body)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(self.lease)

    def _check(self) -> None:
        if self.down:
            raise Unreachable(0, "TimeoutError", "no answer in time")

    @property
    def spec(self) -> dict[str, Any]:
        assert self.lease is not None
        spec: dict[str, Any] = self.lease["spec"]
        return spec


class View:
    """One replica's way to the shared Lease."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.down = False

    def read(self) -> dict[str, Any] | None:
        self._check()
        return self.store.read()

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        self._check()
        return self.store.create(body)

    def update(self, body: dict[str, Any]) -> dict[str, Any]:
        self._check()
        return self.store.update(body)

    def _check(self) -> None:
        if self.down:
            raise Unreachable(0, "TimeoutError", "no answer in time")


class Replica:
    def __init__(self, name: str, store: Store, clock: Clock) -> None:
        self.view = View(store)
        self.clock = clock
        self.loop_alive = True
        self.acquired = 0
        self.lost: list[str] = []
        self.elector = Elector(
            self.view,
            Settings(
                identity=name,
                lease_duration_s=DURATION_S,
                lease_renew_deadline_s=DEADLINE_S,
                lease_retry_s=RETRY_S,
            ),
            loop_alive=lambda: self.loop_alive,
            on_acquired=self._count,
            on_lost=self.lost.append,
            clock=clock,
            rng=random.Random(1),
        )

    def _count(self) -> None:
        self.acquired += 1

    @property
    def leads(self) -> bool:
        return self.elector.leading

    def may_write(self) -> bool:
        return self.elector.may_write()

    def step(self) -> float:
        return self.elector.step()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def first(store: Store, clock: Clock) -> Replica:
    return Replica("a", store, clock)


@pytest.fixture
def second(store: Store, clock: Clock) -> Replica:
    return Replica("b", store, clock)


def test_the_first_takes_the_lease_and_the_second_waits(first: Replica, second: Replica, store: Store) -> None:
    first.step()
    second.step()
    assert (first.leads, second.leads) == (True, False)
    assert (first.may_write(), second.may_write()) == (True, False)
    assert first.acquired == 1
    assert store.spec["holderIdentity"] == first.elector.identity
    assert second.elector.holder == first.elector.identity
    assert store.spec["leaseDurationSeconds"] == 15
    assert store.spec["leaseTransitions"] == 0


def test_times_in_the_record_are_utc_with_microseconds(first: Replica, store: Store) -> None:
    first.step()
    for field in ("acquireTime", "renewTime"):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", store.spec[field])


def test_a_renewing_leader_keeps_the_lease_for_ever(first: Replica, second: Replica, clock: Clock) -> None:
    for _ in range(200):
        first.step()
        second.step()
        clock.now += RETRY_S
    assert (first.leads, second.leads) == (True, False)
    assert first.lost == []


def test_a_dead_leader_is_followed_after_the_lease_duration(
    first: Replica, second: Replica, clock: Clock, store: Store
) -> None:
    first.step()
    second.step()
    clock.now += DURATION_S - 0.1
    second.step()
    assert second.acquired == 0
    clock.now += 0.1
    second.step()
    assert second.leads
    assert store.spec["leaseTransitions"] == 1


def test_expiry_counts_from_the_change_that_was_seen_here_not_from_the_records_time(
    first: Replica, second: Replica, clock: Clock, store: Store
) -> None:
    first.step()
    assert store.lease is not None
    store.lease["spec"]["renewTime"] = "2001-01-01T00:00:00.000000Z"
    second.step()
    assert not second.leads
    clock.now += DURATION_S / 2
    second.step()
    assert not second.leads


def test_a_longer_duration_in_the_record_is_respected(clock: Clock, store: Store, second: Replica) -> None:
    store._write(
        {"metadata": {"name": "x"}, "spec": {"holderIdentity": "other", "leaseDurationSeconds": 60, "renewTime": "t"}}
    )
    second.step()
    clock.now += 59
    second.step()
    assert second.acquired == 0
    clock.now += 1
    second.step()
    assert second.leads


def test_a_cut_off_leader_closes_the_gate_before_another_can_take_over(
    first: Replica, second: Replica, clock: Clock
) -> None:
    first.step()
    second.step()
    first.view.down = True
    for _ in range(400):
        clock.now += 0.1
        if not first.lost:
            first.step()
        second.step()
        assert not (first.may_write() and second.may_write())
    assert second.leads
    assert first.lost == ["no renewal came through in time"]


def test_a_cut_off_leader_ends_when_its_deadline_passes_and_not_before(first: Replica, clock: Clock) -> None:
    first.step()
    first.view.down = True
    clock.now += DEADLINE_S - 0.5
    assert first.step() == pytest.approx(0.5)
    assert first.lost == []
    clock.now += 0.5
    first.step()
    assert first.lost


def test_the_gate_closes_a_margin_before_the_deadline(first: Replica, clock: Clock) -> None:
    first.step()
    clock.now += DEADLINE_S - WRITE_MARGIN_S - 0.01
    assert first.may_write()
    clock.now += 0.02
    assert not first.may_write()


def test_a_short_outage_costs_nothing(first: Replica, clock: Clock) -> None:
    first.step()
    first.view.down = True
    for _ in range(3):
        clock.now += RETRY_S
        first.step()
    first.view.down = False
    first.step()
    clock.now += DEADLINE_S - 2 * WRITE_MARGIN_S
    assert first.may_write()
    assert first.lost == []


def test_r2_a_leader_that_was_stopped_may_not_write_in_its_first_moment(
    first: Replica, second: Replica, clock: Clock
) -> None:
    first.step()
    second.step()
    clock.now += 60
    assert not first.may_write()
    second.step()
    assert second.leads
    first.step()
    assert first.lost == ["no renewal came through in time"]
    assert not first.may_write()


def test_a_leader_whose_loop_is_stuck_stops_renewing_and_loses(first: Replica, clock: Clock, store: Store) -> None:
    first.step()
    first.loop_alive = False
    writes = store.writes
    while not first.lost:
        clock.now += 1
        first.step()
    assert store.writes == writes
    assert clock.now == 1000 + DEADLINE_S


def test_a_lease_that_another_took_is_lost_at_once(first: Replica, store: Store) -> None:
    first.step()
    store._write({**(store.read() or {}), "spec": {**store.spec, "holderIdentity": "thief"}})
    first.step()
    assert first.lost == ["thief holds the Lease"]
    assert not first.may_write()


def test_a_deleted_lease_is_lost(first: Replica, store: Store) -> None:
    first.step()
    store.lease = None
    first.step()
    assert first.lost == ["the Lease was deleted"]


def test_a_record_that_someone_annotated_is_renewed_all_the_same(first: Replica, store: Store) -> None:
    first.step()
    lease = store.read() or {}
    lease["metadata"]["annotations"] = {"note": "x"}
    store._write(lease)
    first.step()
    assert (first.leads, first.lost) == (True, [])
    assert store.lease is not None
    assert store.lease["metadata"]["annotations"] == {"note": "x"}


def test_of_two_that_see_an_expired_lease_one_wins(first: Replica, second: Replica, clock: Clock, store: Store) -> None:
    store._write({"metadata": {"name": "x"}, "spec": {"holderIdentity": "dead", "leaseDurationSeconds": 15}})
    first.step()
    second.step()
    clock.now += DURATION_S
    stale = store.read()
    first.step()
    second.view.read = lambda: stale  # type: ignore[method-assign]
    second.step()
    assert (first.leads, second.leads) == (True, False)
    assert second.lost == []


def test_a_clean_stop_hands_over_at_once(first: Replica, second: Replica, store: Store) -> None:
    first.step()
    second.step()
    first.elector.stop()
    assert store.spec["holderIdentity"] == ""
    assert not first.may_write()
    second.step()
    assert second.leads
    assert first.lost == []


def test_a_stop_during_an_outage_is_no_error(first: Replica, store: Store) -> None:
    first.step()
    store.down = True
    first.elector.stop()
    assert not first.may_write()


def test_a_standby_survives_an_outage(first: Replica, store: Store, clock: Clock) -> None:
    store.down = True
    for _ in range(50):
        first.step()
        clock.now += RETRY_S
    assert first.lost == []
    store.down = False
    first.step()
    assert first.leads


def test_a_second_process_of_the_same_pod_does_not_inherit_the_lease(store: Store, clock: Clock) -> None:
    first, again = Replica("pod-0", store, clock), Replica("pod-0", store, clock)
    first.step()
    again.step()
    assert not again.leads


def test_replicas_do_not_ask_in_step(first: Replica) -> None:
    waits = {first.step() for _ in range(10)}
    assert len(waits) > 5
    assert all(RETRY_S <= wait <= RETRY_S * 1.2 for wait in waits)


def test_the_thread_acquires_renews_and_releases(store: Store) -> None:
    acquired = threading.Event()
    elector = Elector(
        store,
        Settings(lease_duration_s=3, lease_renew_deadline_s=2, lease_retry_s=0.05),
        loop_alive=lambda: True,
        on_acquired=acquired.set,
        on_lost=pytest.fail,
    )
    elector.start()
    assert acquired.wait(10)
    end = time.monotonic() + 10
    while store.writes < 3 and time.monotonic() < end:
        time.sleep(0.01)
    assert elector.may_write()
    elector.stop()
    assert store.spec["holderIdentity"] == ""


def test_an_elector_that_breaks_gives_the_lease_up(store: Store) -> None:
    lost = threading.Event()

    def broken() -> bool:
        raise ZeroDivisionError

    elector = Elector(
        store,
        Settings(lease_duration_s=3, lease_renew_deadline_s=2, lease_retry_s=0.05),
        loop_alive=broken,
        on_acquired=lambda: None,
        on_lost=lambda _: lost.set(),
    )
    elector.start()
    assert lost.wait(10)
    assert not elector.may_write()
    elector.stop()


def test_the_clock_goes_on_and_never_back() -> None:
    before = boot_clock()
    assert boot_clock() >= before


class Api(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.store = Store()
        self.hang = threading.Event()
        self.hanging = False
        self.connections = 0
        self.drop = False
        self.forbid = False
        self.headers: list[dict[str, str]] = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Api

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Tests print nothing."""

    def _answer(self, status: int, body: Any) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        # Whoever asked may have given up: that is what some of these tests are about.
        with contextlib.suppress(ConnectionError):
            self.wfile.write(raw)
        # The server closes the idle connection without a word, as a load balancer does.
        self.close_connection = self.server.drop

    def _handle(self) -> None:
        self.server.headers.append(dict(self.headers))
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        if self.server.hanging:
            self.server.hang.wait(10)
        if self.server.forbid:
            self._answer(403, {"reason": "Forbidden", "message": "no"})
            return
        try:
            if self.command == "GET":
                found = self.server.store.read()
                self._answer(404 if found is None else 200, found or {"reason": "NotFound"})
            elif self.command == "POST":
                self._answer(201, self.server.store.create(body or {}))
            else:
                self._answer(200, self.server.store.update(body or {}))
        except Conflict:
            self._answer(409, {"reason": "Conflict"})

    do_GET = do_POST = do_PUT = _handle  # noqa: N815 - the base class's names


@pytest.fixture
def api() -> Iterator[Api]:
    server = Api()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.hang.set()
    server.shutdown()
    server.server_close()
    thread.join()


def http_store(api: Api, deadline_s: float = 10.0) -> HttpLeaseStore:
    connection = Connection.to(f"http://127.0.0.1:{api.server_address[1]}")
    return HttpLeaseStore(connection, Settings(lease_renew_deadline_s=deadline_s))


BODY = {"metadata": {"name": "conch-operator", "namespace": "conch-system"}, "spec": {"holderIdentity": "a"}}


def test_the_lease_is_created_read_and_updated_over_one_connection(api: Api) -> None:
    store = http_store(api)
    assert store.read() is None
    created = store.create(BODY)
    assert store.read() == created
    store.update({**created, "spec": {"holderIdentity": "b"}})
    with pytest.raises(Conflict):
        store.update(created)
    assert api.connections == 1
    store._close()


def test_a_connection_that_the_server_closed_is_replaced(api: Api) -> None:
    store = http_store(api)
    api.drop = True
    created = store.create(BODY)
    time.sleep(0.05)
    assert store.read() == created
    assert api.connections == 2
    store._close()


def test_a_hung_renewal_ends_after_half_the_deadline(api: Api) -> None:
    store = http_store(api, deadline_s=0.4)
    api.hanging = True
    with pytest.raises(Unreachable):
        store.read()
    api.hang.set()
    api.hanging = False
    assert store.read() is None
    store._close()


def test_a_missing_role_is_told(api: Api) -> None:
    store = http_store(api)
    api.forbid = True
    with pytest.raises(Forbidden):
        store.read()
    store._close()


def test_a_server_that_is_not_there_is_unreachable(api: Api) -> None:
    port = api.server_address[1]
    api.shutdown()
    api.server_close()
    store = HttpLeaseStore(Connection.to(f"http://127.0.0.1:{port}"), Settings())
    with pytest.raises(Unreachable):
        store.read()
