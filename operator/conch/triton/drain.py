"""Triton's preStop hook: wait until no inference is in flight, within a bound. Standard library only; always exits 0.

Copied into the pod by `conch fetch --tools` and run in Triton's container by that image's Python (3.8 or later), as
`python3 -I /conch/drain.py --bound 25 --endpoint-removal 5`. On SIGTERM Triton closes its listeners at once, so first
the pod must be out of routing, then what was sent must be answered.

In flight is what waits or runs:
- waiting: the sum of `nv_inference_pending_request_count`, which doesn't count requests that a model already works on;
- running: an established connection to an inference port. Who waits for an answer holds one open; a kept-alive idle
  one looks the same, and waiting for it costs time but no request.

Unknown is never zero. With unreadable metrics the connections alone decide: a request whose client has gone has nobody
waiting for it. With unreadable connections nothing shows that no model is working, so the whole bound is waited out.
"""

from __future__ import annotations

import argparse
import http.client
import math
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PENDING = "nv_inference_pending_request_count"
_ESTABLISHED = "01"
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_PAGE_MAX_BYTES = 8 << 20
# One quiet poll can fall between two requests of a client that opens a connection for each.
_QUIET_POLLS = 2
_BOUND_REACHED = "drain: bound reached with work in flight or unknown\n"


@dataclass(frozen=True)
class Load:
    """What one poll saw. None is unknown."""

    pending: float | None
    connections: int | None


class Sensor(Protocol):
    """Where the load is read."""

    def load(self, timeout_s: float) -> Load:
        """Look once, within about `timeout_s`."""


class Clock(Protocol):
    """The module `time` is one."""

    def monotonic(self) -> float:
        """Seconds since some fixed instant."""

    def sleep(self, seconds: float, /) -> None:
        """Wait."""


def pending_requests(page: str) -> float | None:
    """Sum of the pending gauge over all models on a metrics page; None when it isn't there or can't be read."""
    values = []
    for line in page.splitlines():
        name, brace, rest = line.partition("{")
        if not brace:
            name, _, rest = line.partition(" ")
        if name.strip() != PENDING:
            continue
        # Label values may hold spaces and braces; the value stands after the last brace.
        fields = rest.rpartition("}")[2].split()
        try:
            values.append(float(fields[0]))
        except (IndexError, ValueError):
            return None
    total = sum(values)
    return total if values and math.isfinite(total) else None


def established(table: str, ports: Iterable[int]) -> int:
    """Count of established connections to local `ports` in the text of /proc/net/tcp or tcp6. Raises ValueError."""
    wanted = frozenset(ports)
    count = 0
    for line in table.splitlines()[1:]:
        _slot, local, _remote, state, *_rest = line.split()
        if state == _ESTABLISHED and int(local.rpartition(":")[2], 16) in wanted:
            count += 1
    return count


def is_quiet(load: Load) -> bool:
    """Whether nothing is in flight; see the module's text for what is unknown."""
    return load.connections == 0 and load.pending in (None, 0)


def drain(sensor: Sensor, clock: Clock, *, bound_s: float, endpoint_removal_s: float, poll_s: float) -> bool:
    """Wait; True when it went quiet within `bound_s`, in which the time for endpoint removal is included."""
    end_s = clock.monotonic() + bound_s
    clock.sleep(min(endpoint_removal_s, bound_s))
    quiet_polls = 0
    while True:
        left_s = end_s - clock.monotonic()
        if left_s <= 0:
            return False
        quiet_polls = quiet_polls + 1 if is_quiet(sensor.load(min(1.0, left_s))) else 0
        if quiet_polls == _QUIET_POLLS:
            return True
        clock.sleep(max(0.0, min(poll_s, end_s - clock.monotonic())))


class PodSensor:
    """Triton's metrics page and the kernel's connection tables of this pod."""

    def __init__(self, metrics_url: str, ports: Sequence[int]) -> None:
        self._metrics = urlsplit(metrics_url)
        self._ports = ports

    def load(self, timeout_s: float) -> Load:
        """Look once."""
        return Load(self._pending(timeout_s), self._connections())

    def _pending(self, timeout_s: float) -> float | None:
        # No urllib opener: a proxy from the container's environment must not stand between two ends of loopback.
        connection = http.client.HTTPConnection(
            self._metrics.hostname or "127.0.0.1", self._metrics.port or 8002, timeout=timeout_s
        )
        try:
            connection.request("GET", self._metrics.path or "/metrics")
            response = connection.getresponse()
            page = response.read(_PAGE_MAX_BYTES)
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        return pending_requests(page.decode("utf-8", "replace")) if response.status == http.client.OK else None

    def _connections(self) -> int | None:
        """None unless at least one table can be read; a kernel without IPv6 has no second one."""
        counts = []
        for table in _TABLES:
            try:
                text = Path(table).read_text(encoding="ascii")
                counts.append(established(text, self._ports))
            except FileNotFoundError:
                continue
            except (OSError, ValueError):
                return None
        return sum(counts) if counts else None


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Wait until no inference is in flight.")
    parser.add_argument("--bound", type=float, default=25.0, help="seconds in all, at most")
    parser.add_argument(
        "--endpoint-removal", type=float, default=5.0, help="seconds until routing has forgotten the pod"
    )
    parser.add_argument("--poll", type=float, default=0.25, help="seconds between two looks")
    parser.add_argument("--metrics", default="http://127.0.0.1:8002/metrics")
    parser.add_argument("--ports", default="8000,8001", help="inference ports, comma-separated")
    parsed = parser.parse_args(arguments)
    parsed.ports = [int(port) for port in parsed.ports.split(",")]
    return parsed


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments, or the defaults when they can't be understood: waiting too long is better than not waiting."""
    try:
        return _arguments(arguments)
    except (SystemExit, ValueError) as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        return _arguments(())


def _leave(_number: int, _frame: object) -> None:
    os.write(sys.stderr.fileno(), _BOUND_REACHED.encode())
    os._exit(0)


def main(arguments: Sequence[str]) -> int:
    """Always 0: a hook that fails makes the kubelet end Triton at once, which cuts what is in flight."""
    chosen = options(arguments)
    # Whatever hangs, a metrics page that trickles for one, the bound holds: the grace period is running.
    signal.signal(signal.SIGALRM, _leave)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, chosen.bound))
    try:
        quiet = drain(
            PodSensor(chosen.metrics, chosen.ports),
            time,
            bound_s=max(0.0, chosen.bound),
            endpoint_removal_s=max(0.0, chosen.endpoint_removal),
            poll_s=max(0.01, chosen.poll),
        )
    except Exception as error:  # noqa: BLE001 - see the docstring
        sys.stderr.write(f"drain: {error!r}\n")
        time.sleep(max(0.0, chosen.bound))
        return 0
    sys.stderr.write("drain: quiet\n" if quiet else _BOUND_REACHED)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
