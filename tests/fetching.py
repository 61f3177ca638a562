"""A real HTTPS server that answers by a script, and the real `conch fetch` in a process of its own."""

import http.server
import json
import os
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

SOURCE_ROOT = Path(__file__).parents[1] / "operator"


class Handler(http.server.BaseHTTPRequestHandler):
    """Each request is noted, then answered by the next behaviour of the server's script; the last one stays."""

    def do_GET(self) -> None:
        server = cast("Server", self.server)
        with server.lock:
            server.requests.append({"path": self.path, **{name.lower(): text for name, text in self.headers.items()}})
            answer = server.script.pop(0) if len(server.script) > 1 else server.script[0]
        self.close_connection = True
        answer(self)

    def offset(self) -> int:
        asked = self.headers.get("Range")
        return int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0

    def start(self, status: int, **headers: str | int) -> None:
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), str(text))
        self.end_headers()

    def log_message(self, *_arguments: object) -> None:
        pass


Answer = Callable[[Handler], None]


def dropped_after(answer: Answer, count: int) -> Answer:
    """The same answer, of whose body only `count` bytes are sent before the connection closes."""

    class Cut:
        def __init__(self, file: Any) -> None:
            self._file = file

        def write(self, data: bytes) -> int:
            self._file.write(data[:count])
            return len(data)

    def cut(handler: Handler) -> None:
        real, start = handler.wfile, handler.end_headers

        def end_headers() -> None:
            start()
            handler.wfile = cast("Any", Cut(real))

        handler.end_headers = end_headers  # type: ignore[method-assign]
        answer(handler)
        handler.wfile = real

    return cut


class Server(http.server.ThreadingHTTPServer):
    def __init__(self, certificate: Path, script: tuple[Answer, ...]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.load_cert_chain(certificate)
        self.script = list(script)
        self.requests: list[dict[str, str]] = []
        self.lock = threading.Lock()
        self.closing = threading.Event()

    def finish_request(self, request: Any, client_address: Any) -> None:
        with self.tls.wrap_socket(request, server_side=True) as secured:
            super().finish_request(secured, client_address)

    def handle_error(self, *_arguments: object) -> None:
        """A client that turns away is part of most tests."""

    def url(self, path: str = "/model.onnx") -> str:
        return f"https://localhost:{self.server_port}{path}"


def make_authority(folder: Path) -> Path:
    """Put ca.pem and server.pem (with server.crt and server.key) into the folder, the latter for localhost."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=30)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=test authority")
    openssl("req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=localhost")
    (folder / "names").write_text("subjectAltName=DNS:localhost\n")
    openssl("x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
            "-out", "server.crt", "-days", "2", "-extfile", "names")  # fmt: skip
    (folder / "server.pem").write_text((folder / "server.key").read_text() + (folder / "server.crt").read_text())
    return folder


@contextmanager
def serving(authority: Path, *script: Answer) -> Iterator[Server]:
    """A server that answers by the script."""
    server = Server(authority / "server.pem", script)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


class Haste:
    """Real time, but back-off is noted instead of waited for."""

    def __init__(self) -> None:
        self.waits_s: list[float] = []

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float, /) -> None:
        self.waits_s.append(seconds)


class Result:
    def __init__(self, code: int, stderr: str, termination: str) -> None:
        self.code = code
        self.stderr = stderr
        self.termination = termination


def command(
    folder: Path,
    models: list[dict[str, Any]],
    ca_file: Path | None,
    *,
    cache: dict[str, Any] | None = None,
    **options: Path,
) -> list[str]:
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"models": models, "stallTimeoutSeconds": 0.5, "cache": cache}))
    (folder / "models").mkdir(exist_ok=True)
    arguments = [sys.executable, "-m", "conch.cli.main", "fetch", f"--plan={plan}", f"--into={folder / 'models'}"]
    arguments += [f"--termination-log={folder / 'termination'}"]
    arguments += [f"--ca-file={ca_file}"] if ca_file else []
    return arguments + [f"--{name}={value}" for name, value in options.items()]


def environment(**changes: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(SOURCE_ROOT)} | changes


def conch_fetch(
    folder: Path,
    models: list[dict[str, Any]],
    ca_file: Path | None,
    *,
    prefix: tuple[str, ...] = (),
    cache: dict[str, Any] | None = None,
    **options: Path,
) -> Result:
    """The real command in a process of its own."""
    arguments = [*prefix, *command(folder, models, ca_file, cache=cache, **options)]
    done = subprocess.run(arguments, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    termination = folder / "termination"
    return Result(done.returncode, done.stderr, termination.read_text() if termination.exists() else "")


def visible(folder: Path) -> set[str]:
    """What Triton would find: every file but those of hidden folders."""
    root = folder / "models"
    paths = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return {str(path) for path in paths if not path.parts[0].startswith(".")}


def resident_peak_bytes(process: int) -> int:
    """The kernel's high-water mark; 0 once the process is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
