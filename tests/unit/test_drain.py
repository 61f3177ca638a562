"""The preStop hook that lets Triton finish: its parsing, its rule, and the real script on real sockets."""

import http.server
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conch.triton import drain

PAGE = """\
# HELP nv_inference_pending_request_count Instantaneous number of pending requests awaiting execution per-model.
# TYPE nv_inference_pending_request_count gauge
nv_inference_pending_request_count{model="a",version="1"} 2
nv_inference_pending_request_count{model="b} 7",version="1"} 1
nv_inference_pending_request_count_total{model="a"} 99
nv_inference_request_success{model="a",version="1"} 12
"""
TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
   1: 0100007F:1F40 0100007F:D2F0 01 00000000:00000000 00:00000000 00000000     0        0 2 1 0 100 0 0 10 0
   2: 0100007F:D2F0 0100007F:1F40 01 00000000:00000000 00:00000000 00000000     0        0 3 1 0 100 0 0 10 0
   3: 0100007F:1F41 0100007F:D2F2 06 00000000:00000000 00:00000000 00000000     0        0 4 1 0 100 0 0 10 0
"""
TABLE_6 = """\
  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when
   0: 0000000000000000FFFF00000100007F:1F41 0000000000000000FFFF00000100007F:D2F4 01 00000000:00000000 00:00000000
"""


class Instants:
    """A clock that only moves when slept on."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float, /) -> None:
        self.now_s += seconds


class Script:
    """Loads in turn, the last one for ever."""

    def __init__(self, *loads: drain.Load) -> None:
        self.loads = list(loads)
        self.polls = 0

    def load(self, timeout_s: float) -> drain.Load:
        assert timeout_s > 0
        self.polls += 1
        return self.loads.pop(0) if len(self.loads) > 1 else self.loads[0]


QUIET = drain.Load(pending=0, connections=0)


@pytest.mark.parametrize(
    ("page", "pending"),
    [
        (PAGE, 3),
        (PAGE.replace("} 2", "} 0").replace("} 1\n", "} 0\n"), 0),
        ("nv_inference_pending_request_count 4\n", 4),
        ('nv_inference_pending_request_count{model="a"} 1e3 1700000000\n', 1000),
        ('nv_inference_pending_request_count{model="a"} NaN\n', None),
        ('nv_inference_pending_request_count{model="a"} many\n', None),
        ('nv_inference_pending_request_count{model="a"}\n', None),
        ('nv_inference_request_success{model="a"} 1\n', None),
        ("", None),
    ],
)
def test_pending_requests_are_summed_and_what_is_not_there_is_unknown(page: str, pending: float | None) -> None:
    assert drain.pending_requests(page) == pending


def test_only_established_connections_to_our_own_ports_count() -> None:
    assert drain.established(TABLE, [8000, 8001]) == 1
    assert drain.established(TABLE, [8001]) == 0
    assert drain.established(TABLE_6, [8000, 8001]) == 1


@pytest.mark.parametrize(
    ("pending", "connections", "quiet"),
    [(0, 0, True), (1, 0, False), (0, 1, False), (None, 0, True), (None, 1, False), (0, None, False),
     (None, None, False)],
)  # fmt: skip
def test_unknown_is_never_zero(pending: float | None, connections: int | None, quiet: bool) -> None:  # noqa: FBT001
    assert drain.is_quiet(drain.Load(pending, connections)) is quiet


def test_one_quiet_look_between_two_requests_does_not_end_the_wait() -> None:
    clock, sensor = Instants(), Script(QUIET, drain.Load(0, 1), QUIET, QUIET)
    assert drain.drain(sensor, clock, bound_s=25, endpoint_removal_s=5, poll_s=0.5)
    assert sensor.polls == 4
    assert clock.now_s == 100 + 5 + 3 * 0.5


@pytest.mark.parametrize("endpoint_removal_s", [0, 5, 25, 60])
def test_the_bound_holds_whatever_the_load(endpoint_removal_s: float) -> None:
    clock = Instants()
    busy = Script(drain.Load(None, None))
    assert not drain.drain(busy, clock, bound_s=25, endpoint_removal_s=endpoint_removal_s, poll_s=0.3)
    assert clock.now_s == pytest.approx(125)


class Inference(http.server.BaseHTTPRequestHandler):
    """Answers /metrics at once, and any other path when `release` is set."""

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        body = b"done"
        if self.path == "/metrics":
            body = server.page.encode()
        else:
            server.started.set()
            server.release.wait(20)
            server.answered_s = time.monotonic()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Inference)
        self.page = 'nv_inference_pending_request_count{model="a"} 0\n'
        self.started, self.release = threading.Event(), threading.Event()
        self.answered_s = 0.0

    def handle_error(self, *_arguments: object) -> None:
        """A client that was cut off is part of some tests."""


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.release.set()
        server.shutdown()
        server.server_close()
        thread.join()


def run_drain(port: int, metrics_port: int, *, bound_s: float, endpoint_removal_s: float = 0) -> tuple[str, float]:
    """The real script, as the preStop hook runs it: what it says, and the instant at which it ended."""
    script = Path(drain.__file__)
    command = [sys.executable, "-I", str(script), f"--bound={bound_s}", f"--endpoint-removal={endpoint_removal_s}",
               "--poll=0.05", f"--ports={port}", f"--metrics=http://127.0.0.1:{metrics_port}/metrics"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    assert done.returncode == 0
    return done.stderr, time.monotonic()


def test_row_72_drain_waits_until_the_inference_in_flight_is_answered() -> None:
    with serving() as inference, serving() as metrics:
        client = socket.create_connection(("127.0.0.1", inference.server_port))
        with client:
            client.sendall(b"GET /v2/models/a/infer HTTP/1.0\r\n\r\n")
            assert inference.started.wait(10)
            threading.Timer(0.7, inference.release.set).start()
            said, ended_s = run_drain(inference.server_port, metrics.server_port, bound_s=15)
            assert said == "drain: quiet\n"
            assert ended_s >= inference.answered_s > 0
            assert client.recv(4096).endswith(b"done")


def test_row_72_drain_ends_at_its_bound_when_an_inference_never_ends() -> None:
    with serving() as inference, serving() as metrics:
        with socket.create_connection(("127.0.0.1", inference.server_port)) as client:
            client.sendall(b"GET /v2/models/a/infer HTTP/1.0\r\n\r\n")
            assert inference.started.wait(10)
            said, _ = run_drain(inference.server_port, metrics.server_port, bound_s=0.6)
        assert said.startswith("drain: bound reached")


def test_row_72_requests_in_the_queue_are_waited_for_without_any_connection() -> None:
    with serving() as inference, serving() as metrics:
        metrics.page = 'nv_inference_pending_request_count{model="a"} 3\n'
        said, _ = run_drain(inference.server_port, metrics.server_port, bound_s=0.6)
        assert said.startswith("drain: bound reached")


def test_without_metrics_the_connections_alone_decide() -> None:
    with serving() as inference:
        with socket.create_server(("127.0.0.1", 0)) as unused:
            closed_port = unused.getsockname()[1]
        said, _ = run_drain(inference.server_port, closed_port, bound_s=15)
        assert said == "drain: quiet\n"


def test_a_metrics_page_that_hangs_does_not_stretch_the_bound() -> None:
    with serving() as inference, socket.create_server(("127.0.0.1", 0)) as silent:
        begun_s = time.monotonic()
        _, ended_s = run_drain(inference.server_port, silent.getsockname()[1], bound_s=0.5)
        assert ended_s - begun_s < 10


def test_endpoint_removal_is_slept_through_first_even_when_all_is_quiet() -> None:
    with serving() as inference, serving() as metrics:
        begun_s = time.monotonic()
        _, ended_s = run_drain(inference.server_port, metrics.server_port, bound_s=10, endpoint_removal_s=0.5)
        assert ended_s - begun_s >= 0.5


@pytest.mark.parametrize("arguments", [["--bound", "soon"], ["--unknown"], ["--ports", "http"]])
def test_wrong_arguments_fall_back_to_the_defaults_instead_of_failing_the_hook(arguments: list[str]) -> None:
    chosen = drain.options(arguments)
    assert (chosen.bound, chosen.endpoint_removal, chosen.ports) == (25, 5, [8000, 8001])
