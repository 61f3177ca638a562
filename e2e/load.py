"""Open-loop load on a Triton server: requests start by the clock and never wait for answers.

    async with Load(url, body, rate=20, headers=headers) as load:
        await asyncio.sleep(30)
    assert not load.result().failed

One connection per request. Latency runs from the instant at which a request was due, so that a slow server can't hide
behind a generator that waits for it (coordinated omission). Sockets belong to the network of the thread that makes
them: be in the sandbox's network first. `python -m load --help` is the same by hand.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import json
import math
import random
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Self
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

TIMEOUT_S: Final = 30.0
MAX_REQUESTS: Final = 100_000
MAX_SECONDS: Final = 900.0
MAX_IN_FLIGHT: Final = 4096
MAX_ANSWER_BYTES: Final = 16 * 2**20
SPARE_FILES: Final = 128
SWEEP_S: Final = 0.25
HEADER_END: Final = b"\r\n\r\n"
INFERENCE_HEADER: Final = "inference-header-content-length"
OK: Final = 200

Check = Callable[[int, Mapping[str, str], bytes], str | None]
"""status, headers (lower case), body → what is wrong with the answer; None: nothing."""

TRITON_TYPES: Final = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "float32": "FP32", "float64": "FP64",
}  # fmt: skip


# --- Triton's protocol: https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md


def infer_request(**inputs: npt.NDArray[Any]) -> tuple[bytes, dict[str, str]]:
    """Body and headers of POST /v2/models/MODEL/infer in the binary tensor form; all outputs come back binary too."""
    payloads = [np.ascontiguousarray(array).tobytes() for array in inputs.values()]
    described = [
        {
            "name": name,
            "shape": list(array.shape),
            "datatype": TRITON_TYPES[array.dtype.name],
            "parameters": {"binary_data_size": len(payload)},
        }
        for (name, array), payload in zip(inputs.items(), payloads, strict=True)
    ]
    head = json.dumps({"inputs": described, "parameters": {"binary_data_output": True}}).encode()
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))}
    return b"".join([head, *payloads]), headers


def infer_answer(headers: Mapping[str, str], body: bytes) -> dict[str, npt.NDArray[Any]]:
    """Outputs by name, of a binary or a JSON answer.

    Raises:
        ValueError: The body isn't what the protocol says.
    """
    size = int(headers.get(INFERENCE_HEADER, len(body)))
    described, offset = json.loads(body[:size])["outputs"], size
    found: dict[str, npt.NDArray[Any]] = {}
    numpy_types = {triton: name for name, triton in TRITON_TYPES.items()}
    for output in described:
        kind = np.dtype(numpy_types[output["datatype"]])
        length = output.get("parameters", {}).get("binary_data_size")
        if length is None:
            flat = np.asarray(output["data"], kind)
        else:
            flat = np.frombuffer(body[offset : offset + length], kind)
            offset += length
        found[output["name"]] = flat.reshape(output["shape"])
    if not found or offset != len(body):
        raise ValueError(f"{len(body)} bytes of body, of which the header explains {offset}")
    return found


def check_infer(status: int, headers: Mapping[str, str], body: bytes) -> str | None:
    """The protocol's own consistency, without making arrays."""
    if status != OK:
        return f"HTTP {status}: {body[:200].decode(errors='replace').strip()}"
    try:
        size = int(headers.get(INFERENCE_HEADER, len(body)))
        outputs = json.loads(body[:size])["outputs"]
        binary = sum(output.get("parameters", {}).get("binary_data_size", 0) for output in outputs)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"no valid inference answer: {error!r}"
    if not outputs or size + binary != len(body):
        return f"no valid inference answer: {len(body)} bytes for {size} + {binary}"
    return None


# --- one exchange


class Exchange(asyncio.Protocol):
    """One HTTP/1.1 request on a connection of its own; `ended` gets (status, headers, body) or the reason for none."""

    __slots__ = ("body_at", "buffer", "due", "ended", "headers", "key", "length", "request", "status", "transport")

    def __init__(
        self, request: bytes, ended: Callable[[Exchange, str | None], None], key: int = 0, due: float = 0.0
    ) -> None:
        self.request = request
        self.ended: Callable[[Exchange, str | None], None] | None = ended
        self.key = key
        self.due = due
        self.transport: asyncio.Transport | None = None
        self.buffer = bytearray()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body_at = 0
        self.length: int | None = None

    @property
    def body(self) -> bytes:
        """What came after the headers."""
        return bytes(self.buffer[self.body_at :])

    def end(self, error: str | None) -> None:
        """Report once, and let go of the connection."""
        ended, self.ended = self.ended, None
        if self.transport is not None:
            self.transport.abort()
        if ended is not None:
            ended(self, error)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if self.ended is None:  # timed out while it connected
            transport.abort()
            return
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if not self.body_at:
            at = self.buffer.find(HEADER_END)
            if at < 0:
                if len(self.buffer) > MAX_ANSWER_BYTES:
                    self.end("the answer's headers have no end")
                return
            try:
                self.read_head(bytes(self.buffer[:at]))
            except ValueError as error:
                self.end(f"no HTTP answer: {error}")
                return
            self.body_at = at + len(HEADER_END)
        received = len(self.buffer) - self.body_at
        if self.length is not None and received >= self.length:
            self.end(None if received == self.length else f"{received} bytes of body instead of {self.length}")

    def read_head(self, head: bytes) -> None:
        """Status line and headers."""
        first, *lines = head.decode("latin-1").split("\r\n")
        version, status, *_ = first.split(" ", 2)
        if not version.startswith("HTTP/1."):
            raise ValueError(first[:80])
        self.status = int(status)
        pairs = (line.partition(":") for line in lines)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        if "chunked" in self.headers.get("transfer-encoding", ""):
            raise ValueError("chunked answers aren't supported")
        if "content-length" in self.headers:
            self.length = int(self.headers["content-length"])
            if not 0 <= self.length <= MAX_ANSWER_BYTES:
                raise ValueError(f"Content-Length {self.length}")

    def connection_lost(self, exc: Exception | None) -> None:
        whole = self.body_at and self.length is None and exc is None  # a body that ends with the connection
        self.end(None if whole else f"connection closed before the answer: {exc or 'end of stream'}")


def request_bytes(host: str, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    """A request that asks the server to close after it."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


async def fetch(
    url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None, *, timeout_s: float = TIMEOUT_S
) -> tuple[int, dict[str, str], bytes]:
    """One request outside any load: GET, or POST with a body. Returns status, headers in lower case, body.

    Raises:
        OSError: No answer: refused, cut, or too slow.
    """
    host, port, path = target(url)
    loop = asyncio.get_running_loop()
    done: asyncio.Future[str | None] = loop.create_future()

    def ended(_exchange: Exchange, error: str | None) -> None:
        if not done.done():
            done.set_result(error)

    method = "GET" if body is None else "POST"
    exchange = Exchange(request_bytes(f"{host}:{port}", method, path, body or b"", headers or {}), ended)
    try:
        async with asyncio.timeout(timeout_s):
            await loop.create_connection(lambda: exchange, host, port)
            error = await done
    finally:
        exchange.end("cancelled")
    if error:
        raise ConnectionError(f"{url}: {error}")
    return exchange.status, exchange.headers, exchange.body


def target(url: str) -> tuple[str, int, str]:
    """Host, port and path of a URL; only private addresses, as the sandbox's are, may be loaded."""
    parts = urlsplit(url)
    try:
        private = ipaddress.ip_address(parts.hostname or "").is_private
    except ValueError:
        private = False
    if parts.scheme != "http" or not private:
        raise ValueError(f"{url}: must be http://ADDRESS… with a private address, such as a Service's cluster IP")
    return str(parts.hostname), parts.port or 80, f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"


# --- results


@dataclass(frozen=True, slots=True)
class Record:
    """One request: when it was due (seconds after the load's start), how long until its end, HTTP status (0: none)."""

    start_s: float
    latency_s: float
    status: int
    error: str | None

    @property
    def end_s(self) -> float:
        """When it ended."""
        return self.start_s + self.latency_s


@dataclass(frozen=True, slots=True)
class Second:
    """One second of a run: requests due and ended in it, and latencies (seconds) of those that ended well in it."""

    second: int
    arrivals: int
    answered: int
    failed: int
    in_flight: int
    p50_s: float | None
    p99_s: float | None


def percentile(values: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile; None without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


@dataclass(frozen=True)
class Result:
    """All requests of a run, in the order in which they ended."""

    records: Sequence[Record]

    @property
    def total(self) -> int:
        """Requests that were started."""
        return len(self.records)

    @property
    def failures(self) -> list[Record]:
        """Everything but HTTP 200 with a valid body in time."""
        return [record for record in self.records if record.error is not None]

    @property
    def failed(self) -> int:
        """How many failed."""
        return len(self.failures)

    @property
    def errors(self) -> dict[str, int]:
        """Errors with their counts, most frequent first."""
        counts: dict[str, int] = {}
        for record in self.failures:
            counts[str(record.error)] = counts.get(str(record.error), 0) + 1
        return dict(sorted(counts.items(), key=lambda item: -item[1]))

    def percentile(self, share: float, since_s: float = 0.0, until_s: float = math.inf) -> float | None:
        """Latency in seconds of the requests answered well in a span of time."""
        return percentile(
            [r.latency_s for r in self.records if r.error is None and since_s <= r.end_s < until_s], share
        )

    def series(self) -> list[Second]:
        """The run second by second."""
        last = int(max((record.end_s for record in self.records), default=0.0))
        due = [0] * (last + 1)
        failed = [0] * (last + 1)
        latencies: list[list[float]] = [[] for _ in range(last + 1)]
        for record in self.records:
            due[int(record.start_s)] += 1
            if record.error is None:
                latencies[int(record.end_s)].append(record.latency_s)
            else:
                failed[int(record.end_s)] += 1
        seconds, waiting = [], 0
        for second in range(last + 1):
            answered = len(latencies[second])
            waiting += due[second] - answered - failed[second]
            p50, p99 = (percentile(latencies[second], share) for share in (0.5, 0.99))
            seconds.append(Second(second, due[second], answered, failed[second], waiting, p50, p99))
        return seconds

    def summary(self) -> dict[str, Any]:
        """Plain figures."""
        quantiles = {f"p{share:g}_s": self.percentile(share / 100) for share in (50, 90, 99, 99.9)}
        return {"requests": self.total, "failed": self.failed, "errors": self.errors, **quantiles}


# --- the generator


@dataclass(frozen=True)
class Step:
    """A rate, in requests per second, held for some seconds."""

    rate: float
    seconds: float


def room_for_connections() -> int:
    """Connections that this process may open, with its soft limit of files raised as far as that needs and may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_IN_FLIGHT + SPARE_FILES
    if soft < wanted:
        soft = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(MAX_IN_FLIGHT, soft - SPARE_FILES))


class Load:
    """Arrivals by the clock: evenly spaced, or with a seed a Poisson process. `rate` may be changed at any time.

    Leaving the context ends the arrivals and waits for the answers that are due, each at most `timeout_s`. Bounded:
    `max_requests`, `max_seconds`, and connections in flight; a request beyond the last counts as failed at once.
    """

    def __init__(
        self,
        url: str,
        body: bytes | Sequence[bytes],
        rate: float,
        *,
        headers: Mapping[str, str] | None = None,
        seed: int | None = None,
        timeout_s: float = TIMEOUT_S,
        max_requests: int = MAX_REQUESTS,
        max_seconds: float = MAX_SECONDS,
        check: Check = check_infer,
    ) -> None:
        self.host, self.port, path = target(url)
        bodies = [body] if isinstance(body, bytes) else list(body)
        host = f"{self.host}:{self.port}"
        self.requests = [request_bytes(host, "POST", path, each, headers or {}) for each in bodies]
        self.random = None if seed is None else random.Random(seed)
        self.timeout_s = timeout_s
        self.max_requests = max_requests
        self.max_seconds = max_seconds
        self.check = check
        self.records: list[Record] = []
        self.recent: deque[Record] = deque()
        self.started = 0
        self.failed = 0
        self.max_in_flight = MAX_IN_FLIGHT
        self.in_flight: dict[int, Exchange] = {}
        self._connecting: set[asyncio.Task[None]] = set()
        self._rate = rate
        self._next = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._idle: asyncio.Event | None = None

    # --- running

    async def __aenter__(self) -> Self:
        self.loop = asyncio.get_running_loop()
        self.max_in_flight = room_for_connections()
        self.begin = self.loop.time()
        self._idle = asyncio.Event()
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)
        self.rate = self._rate
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.rate = 0
        if kind is None:
            await self.drained()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for task in self._connecting:
            task.cancel()
        for exchange in list(self.in_flight.values()):
            exchange.end("cancelled")
        await asyncio.sleep(0)  # aborted transports close their sockets in the next turn of the loop

    async def drained(self) -> None:
        """Wait until nothing is in flight; every request ends by its time-out."""
        assert self._idle is not None
        while self.in_flight:
            self._idle.clear()
            await self._idle.wait()

    async def run(self, steps: Sequence[Step]) -> None:
        """Hold each step's rate in turn."""
        for step in steps:
            self.rate = step.rate
            await asyncio.sleep(step.seconds)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self.loop.time() - self.begin

    @property
    def rate(self) -> float:
        """Arrivals per second; 0: none."""
        return self._rate

    @rate.setter
    def rate(self, rate: float) -> None:
        if rate < 0 or not math.isfinite(rate):
            raise ValueError(f"rate must be 0 or more requests per second (got {rate})")
        self._rate = rate
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if rate:
            self._next = self.loop.time() + self._gap()
            self._timer = self.loop.call_at(self._next, self._fire)

    def _gap(self) -> float:
        return self.random.expovariate(self._rate) if self.random else 1 / self._rate

    def _fire(self) -> None:
        now = self.loop.time()
        while self._next <= now:
            if self.started >= self.max_requests or self._next - self.begin >= self.max_seconds:
                self._timer = None
                return
            self._start(self._next)
            self._next += self._gap()
        self._timer = self.loop.call_at(self._next, self._fire)

    def _start(self, due: float) -> None:
        request = self.requests[self.started % len(self.requests)]
        exchange = Exchange(request, self._ended, self.started, due)
        self.started += 1
        self.in_flight[exchange.key] = exchange
        if len(self.in_flight) > self.max_in_flight:
            exchange.end(f"more than {self.max_in_flight} requests in flight")
            return
        task = self.loop.create_task(self._connect(exchange))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, exchange: Exchange) -> None:
        try:
            await self.loop.create_connection(lambda: exchange, self.host, self.port)
        except OSError as error:
            exchange.end(f"no connection: {error.strerror or error}")

    def _sweep(self) -> None:
        """One timer for all time-outs. Requests are in the order of their due times."""
        late = self.loop.time() - self.timeout_s
        for exchange in list(self.in_flight.values()):
            if exchange.due > late:
                break
            exchange.end(f"no answer within {self.timeout_s:g} s")
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)

    def _ended(self, exchange: Exchange, error: str | None) -> None:
        latency = self.loop.time() - exchange.due
        if error is None:
            error = self.check(exchange.status, exchange.headers, exchange.body)
        record = Record(exchange.due - self.begin, latency, exchange.status, error)
        self.records.append(record)
        self.failed += error is not None
        self.recent.append(record)
        self.in_flight.pop(exchange.key, None)
        if not self.in_flight and self._idle is not None:
            self._idle.set()

    # --- looking

    def result(self) -> Result:
        """Everything that has ended so far."""
        return Result(tuple(self.records))

    def recently(self, seconds: float) -> list[Record]:
        """What ended within the last seconds; asks must not grow, for older records are forgotten here."""
        oldest = self.elapsed_s - seconds
        while self.recent and self.recent[0].end_s < oldest:
            self.recent.popleft()
        return list(self.recent)


# --- by hand


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m load", description="Open-loop load on a service of a running sandbox, with inputs of zeros."
    )
    top.add_argument("service", help="NAMESPACE/NAME of the Service")
    top.add_argument("--model", required=True)
    top.add_argument("--input", action="append", required=True, help="NAME:DTYPE:SHAPE, such as bytes:int32:1,2048")
    top.add_argument("--steps", default="10:10", help="RATE:SECONDS,… (default: 10:10)")
    top.add_argument("--seed", type=int, help="Poisson arrivals with this seed (default: evenly spaced)")
    top.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds (default: 30)")
    top.add_argument("--run", default="default", help="the sandbox's run (default: default)")
    top.add_argument("--region", help="default: the first")
    top.add_argument("--series", action="store_true", help="print the run second by second too")
    return top


def zeros(described: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Inputs out of NAME:DTYPE:SHAPE."""
    found = {}
    for text in described:
        name, kind, shape = text.split(":")
        found[name] = np.zeros([int(size) for size in shape.split(",")], kind)
    return found


async def by_hand(url: str, options: argparse.Namespace) -> Result:
    """Run the steps of the command line."""
    steps = [Step(*(float(word) for word in step.split(":"))) for step in options.steps.split(",")]
    body, headers = infer_request(**zeros(options.input))
    load = Load(url, body, 0, headers=headers, seed=options.seed, timeout_s=options.timeout)
    async with load:
        await load.run(steps)
    return load.result()


def main() -> int:
    """Exit with 1 when a request failed."""
    from sandbox import Sandbox

    options = parser().parse_args()
    region = Sandbox.attach(options.run).region(options.region)
    namespace, name = options.service.split("/")
    address = region.get("service", name, "-n", namespace)["spec"]["clusterIP"]
    with region.network():
        began = time.process_time()
        result = asyncio.run(by_hand(f"http://{address}:8000/v2/models/{options.model}/infer", options))
    used = time.process_time() - began
    if options.series:
        for second in result.series():
            print(json.dumps(asdict(second)))
    print(json.dumps({**result.summary(), "cpu_ms_per_request": 1000 * used / max(1, result.total)}))
    return 1 if result.failed else 0


if __name__ == "__main__":
    sys.exit(main())
