"""Servers that sources are fetched from in tests: moto's S3, something between that misbehaves, and an HTTP proxy."""

from __future__ import annotations

import http.client
import http.server
import os
import re
import select
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

ROOT = Path(__file__).parents[1]
MOTO = ROOT / ".venv" / "stores" / "bin" / "moto_server"
START_LIMIT_S = 30.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        return int(unused.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + START_LIMIT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            assert process.poll() is None, f"{process.args!r} ended with {process.returncode}"
            assert time.monotonic() < until_s, f"{process.args!r} doesn't listen"
            time.sleep(0.05)
        else:
            return


@contextmanager
def running(command: list[str], port: int, **changes: str) -> Iterator[None]:
    """A server program that listens on the port."""
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, env=os.environ | changes, stdout=quiet, stderr=quiet) as process:
        try:
            wait_for_port(port, process)
            yield
        finally:
            process.terminate()
            process.wait(10)


@dataclass(frozen=True)
class S3Server:
    """moto's server; it keeps what it is given in memory."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def make_bucket(self, bucket: str) -> None:
        """A bucket that anybody may read."""
        self._change("PUT", f"/{bucket}")

    def put(self, bucket: str, key: str, data: bytes = b"") -> None:
        """An object that anybody may read; a key with a slash at its end is what consoles make for a folder."""
        self._change("PUT", f"/{bucket}/{quote(key)}", data)

    def delete(self, bucket: str, key: str) -> None:
        self._change("DELETE", f"/{bucket}/{quote(key)}")

    def _change(self, method: str, path: str, data: bytes = b"") -> None:
        scope = "Credential=owner/20260101/us-east-1/s3/aws4_request"
        headers = {
            "x-amz-acl": "public-read",
            "Authorization": f"AWS4-HMAC-SHA256 {scope}, SignedHeaders=host, Signature=0",
        }
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            assert response.status in (200, 204), response.read()


@contextmanager
def s3_server(listen: str = "127.0.0.1") -> Iterator[S3Server]:
    """Raises AssertionError with the fix where it isn't installed: a skipped test would say that all is well."""
    assert MOTO.exists(), f"{MOTO.relative_to(ROOT)} is missing: run `python3 e2e/environment.py install`"
    port = free_port()
    with running([str(MOTO), "-H", listen, "-p", str(port)], port):
        yield S3Server(port)


@dataclass
class Reply:
    """What the store behind answered."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class Asked:
    """A request as it came."""

    path: str
    headers: dict[str, str]

    @property
    def range(self) -> str | None:
        return self.headers.get("range")


class BetweenHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server = cast("Between", self.server)
        asked = Asked(self.path, {name.lower(): text for name, text in self.headers.items()})
        with server.lock:
            server.asked.append(asked)
            fault = server.next_fault(asked)
        self.close_connection = True
        fault(self, server.behind(asked))

    def send(self, reply: Reply, body: bytes | None = None, **changes: str | int) -> None:
        """The reply, with another body or headers in its place."""
        headers = {name: text for name, text in reply.headers.items() if name.lower() not in ("connection", "date")}
        headers |= {name.replace("_", "-"): str(text) for name, text in changes.items()}
        self.send_response(reply.status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(reply.body if body is None else body)
        self.wfile.flush()

    def log_message(self, *_arguments: object) -> None:
        pass


Fault = Callable[[BetweenHandler, Reply], None]


class Between(http.server.ThreadingHTTPServer):
    """Stands between `conch fetch` and the store. The faults are used up by requests for a range, in their order."""

    def __init__(
        self, store: S3Server, faults: tuple[Fault, ...], certificate: Path | None, listen: str = "127.0.0.1"
    ) -> None:
        super().__init__((listen, 0), BetweenHandler)
        self._store = store
        self.faults = list(faults)
        self.every: Fault | None = None
        self.asked: list[Asked] = []
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self._tls: ssl.SSLContext | None = None
        if certificate is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(certificate)

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://localhost:{self.server_port}"

    @property
    def ranges(self) -> list[str]:
        return [asked.range for asked in self.asked if asked.range]

    def next_fault(self, asked: Asked) -> Fault:
        if self.every is not None:
            return self.every
        return self.faults.pop(0) if asked.range and self.faults else passed

    def behind(self, asked: Asked) -> Reply:
        with closing(http.client.HTTPConnection("127.0.0.1", self._store.port, timeout=30)) as connection:
            headers = {name: text for name, text in asked.headers.items() if name not in ("host", "connection")}
            connection.request("GET", asked.path, headers=headers)
            response = connection.getresponse()
            return Reply(response.status, dict(response.getheaders()), response.read())

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self._tls is None:
            super().finish_request(request, client_address)
            return
        with self._tls.wrap_socket(request, server_side=True) as secured:
            super().finish_request(secured, client_address)

    def handle_error(self, *_arguments: object) -> None:
        """A client that turns away is part of most tests."""


@contextmanager
def between(
    store: S3Server,
    *faults: Fault,
    every: Fault | None = None,
    certificate: Path | None = None,
    listen: str = "127.0.0.1",
) -> Iterator[Between]:
    server = Between(store, faults, certificate, listen)
    server.every = every
    with _served(server):
        yield server


@contextmanager
def _served(server: Between | Proxy) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def passed(handler: BetweenHandler, reply: Reply) -> None:
    """As the store said."""
    handler.send(reply)


def dropped(handler: BetweenHandler, reply: Reply) -> None:
    """Promises all, sends 1,000,000 bytes and closes."""
    handler.send(reply, reply.body[:1_000_000])


def hangs(handler: BetweenHandler, reply: Reply) -> None:
    """Sends 1,000,000 bytes, then nothing, and keeps the connection open."""
    dropped(handler, reply)
    cast("Between", handler.server).closing.wait(20)


def silent(handler: BetweenHandler, _reply: Reply) -> None:
    cast("Between", handler.server).closing.wait(20)


def silent_for_ever(handler: BetweenHandler, _reply: Reply) -> None:
    """Longer than a pod's stall time-out of a minute; `silent` suits tests with a shorter one."""
    cast("Between", handler.server).closing.wait(600)


def as_large_as_promised(promised_bytes: int) -> Fault:
    """A store whose listing says that each object has so many bytes."""

    def listed(handler: BetweenHandler, reply: Reply) -> None:
        body = re.sub(rb"<Size>\d+</Size>", b"<Size>%d</Size>" % promised_bytes, reply.body)
        handler.send(reply, body, Content_Length=len(body))

    return listed


def shorter_than_promised(handler: BetweenHandler, reply: Reply) -> None:
    """A whole answer of fewer bytes than were asked for."""
    handler.send(reply, reply.body[:1000], Content_Length=1000)


def without_length(handler: BetweenHandler, reply: Reply) -> None:
    """Ends early without having said how long it is."""
    del reply.headers["Content-Length"]
    handler.send(reply, reply.body[:1_000_000])


def more_than_asked(handler: BetweenHandler, reply: Reply) -> None:
    handler.send(reply, reply.body + bytes(1_000_000), Content_Length=len(reply.body) + 1_000_000)


def another_range(handler: BetweenHandler, reply: Reply) -> None:
    handler.send(reply, reply.body[:10], Content_Length=10, Content_Range="bytes 5-14/20")


def other_bytes(handler: BetweenHandler, reply: Reply) -> None:
    handler.send(reply, bytes(len(reply.body)))


def status(code: int, xml_code: str = "", more: str = "") -> Fault:
    """An answer of the store's own making."""
    body = f"<?xml version='1.0'?><Error><Code>{xml_code}</Code>{more}</Error>".encode() if xml_code else b""

    def answer(handler: BetweenHandler, _reply: Reply) -> None:
        handler.send(Reply(code, {"Content-Length": str(len(body)), "Content-Type": "application/xml"}, body))

    return answer


class ProxyHandler(http.server.BaseHTTPRequestHandler):
    def do_CONNECT(self) -> None:
        server = cast("Proxy", self.server)
        server.connects.append(self.path)
        self.close_connection = True
        if server.refusal is not None:
            self.send_error(server.refusal)
            return
        host, _, port = self.path.rpartition(":")
        with socket.create_connection((host, int(port)), 10) as there:
            self.send_response(200)
            self.end_headers()
            self._tunnel(there)

    def _tunnel(self, there: socket.socket) -> None:
        ends = {self.connection: there, there: self.connection}
        while True:
            ready, _, _ = select.select(list(ends), [], [], 20)
            for end in ready:
                data = end.recv(1 << 16)
                if not data:
                    return
                ends[end].sendall(data)

    def log_message(self, *_arguments: object) -> None:
        pass


class Proxy(http.server.ThreadingHTTPServer):
    """An HTTP proxy that opens tunnels, or refuses to."""

    def __init__(self, refusal: int | None) -> None:
        super().__init__(("127.0.0.1", 0), ProxyHandler)
        self.refusal = refusal
        self.connects: list[str] = []
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_arguments: object) -> None:
        """A client that turns away is part of the tests."""


@contextmanager
def proxy(refusal: int | None = None) -> Iterator[Proxy]:
    server = Proxy(refusal)
    with _served(server):
        yield server


@dataclass(frozen=True)
class SecretFolder:
    """A Secret's keys as the kubelet mounts them: links into a hidden folder."""

    folder: Path
    keys: dict[str, str] = field(default_factory=dict)

    def mounted(self) -> str:
        data = self.folder / "..2026_01_01"
        data.mkdir(parents=True)
        for key, text in self.keys.items():
            (data / key).write_text(text)
            (self.folder / key).symlink_to(f"..2026_01_01/{key}")
        return str(self.folder)
