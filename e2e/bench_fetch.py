"""What `make bench` measures of `conch fetch`: the peak of its memory and its rate for a big file, over https and s3.

The real command in a process of its own; a server in another makes the bytes up as they are sent. The S3 side of it is
a fake, since moto's server reads an object whole for each range of it: moto itself serves a smaller one.
"""

from __future__ import annotations

import argparse
import hashlib
import http.server
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from operators import ROOT, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE_BYTES: Final = 10 << 30
MOTO_SIZE_BYTES: Final = 128 << 20
ROOM_BYTES: Final = 2 << 30
"""What stays free on the disk."""
BLOCK: Final = bytes(range(256)) * 4096
LIMIT_S: Final = 1800
_RANGE: Final = re.compile(r"bytes=(\d+)-(\d*)")


class GeneratedHandler(http.server.BaseHTTPRequestHandler):
    """BLOCK over and over: as an https file, and as an S3 object with ranges."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        size_bytes = cast("Generated", self.server).size_bytes
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        start = int(asked[1]) if asked else 0
        end = int(asked[2]) + 1 if asked and asked[2] else size_bytes
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(end - start))
        self.send_header("ETag", '"generated"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size_bytes}")
        self.end_headers()
        try:
            self._send(start, end)
        except OSError:
            self.close_connection = True  # an object is opened for its size first, and its body left

    def _send(self, start: int, end: int) -> None:
        block = memoryview(BLOCK)
        while start < end:
            offset = start % len(BLOCK)
            piece = block[offset : min(len(BLOCK), offset + end - start)]
            self.wfile.write(piece)
            start += len(piece)

    def log_message(self, *_arguments: object) -> None:
        pass


class Generated(http.server.ThreadingHTTPServer):
    """Serves one file of `size_bytes` under every path."""

    def __init__(self, port: int, size_bytes: int, certificate: Path) -> None:
        super().__init__(("127.0.0.1", port), GeneratedHandler)
        self.size_bytes = size_bytes
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate)
        self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def handle_error(self, *_arguments: object) -> None:
        """A client that has seen enough is no error."""


@contextmanager
def generated(folder: Path, size_bytes: int) -> Iterator[str]:
    """The address of a server process; ca.pem lies in the folder."""
    import trustme

    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
    port = _free_port()
    arguments = [sys.executable, __file__, "serve", str(port), str(size_bytes), str(folder / "server.pem")]
    with subprocess.Popen(arguments) as server:
        try:
            wait_until(lambda: _listens(port), 30, "the server to listen")
            yield f"https://localhost:{port}"
        finally:
            server.terminate()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        return int(unused.getsockname()[1])


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def generated_digest(size_bytes: int) -> str:
    """The digest of what the server sends."""
    hasher = hashlib.sha256()
    for _ in range(size_bytes // len(BLOCK)):
        hasher.update(BLOCK)
    hasher.update(BLOCK[: size_bytes % len(BLOCK)])
    return f"sha256:{hasher.hexdigest()}"


def measured(folder: Path, model: dict[str, Any], size_bytes: int) -> dict[str, Any]:
    """Run `conch fetch` for one model, and say what it took; the model is removed again."""
    models = folder / "models"
    models.mkdir()
    plan = folder / "plan.json"
    fields = {"name": "big", "fileName": "model.onnx", "config": ""}
    plan.write_text(json.dumps({"models": [fields | model]}))
    command = [sys.executable, "-m", "conch.cli.main", "fetch", f"--plan={plan}", f"--into={models}"]
    command += [f"--termination-log={folder / 'termination'}"]
    peak_bytes, began = 0, time.monotonic()
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as running:
        while running.poll() is None:
            peak_bytes = max(peak_bytes, _peak_bytes(running.pid))
            if time.monotonic() - began > LIMIT_S:
                running.kill()
            time.sleep(0.02)
    seconds = time.monotonic() - began
    try:
        if running.returncode:
            raise SystemExit(f"conch fetch failed: {(folder / 'log').read_text()[-2000:]}")
        found = (models / "big" / "1" / "model.onnx").stat().st_size
        if found != size_bytes:
            raise SystemExit(f"conch fetch left {found} bytes of {size_bytes}")
    finally:
        shutil.rmtree(models)
    return {
        "bytes": size_bytes,
        "seconds": round(seconds, 2),
        "mib_per_s": round(size_bytes / seconds / (1 << 20), 1),
        "rss_mib": round(peak_bytes / (1 << 20), 1),
    }


def _peak_bytes(process: int) -> int:
    """The kernel's high-water mark; 0 once the process is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


@contextmanager
def moto(size_bytes: int) -> Iterator[tuple[str, str]]:
    """The address of moto's server, which holds s3://models/big.onnx, and the object's digest."""
    from obstore.store import S3Store

    port = _free_port()
    data = os.urandom(1 << 20) * (size_bytes >> 20)
    command = [str(ROOT / ".venv/stores/bin/moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_until(lambda: _listens(port), 30, "moto to listen")
            url = f"http://127.0.0.1:{port}"
            subprocess.run(["curl", "-sS", "-X", "PUT", f"{url}/models"], check=True, timeout=30, capture_output=True)
            config: Any = {"endpoint": url, "region": "us-east-1", "access_key_id": "a", "secret_access_key": "b"}
            options: Any = {"allow_http": True, "timeout": "120s"}
            S3Store("models", config=config, client_options=options).put("big.onnx", data, use_multipart=False)
            yield url, f"sha256:{hashlib.sha256(data).hexdigest()}"
        finally:
            server.terminate()


def fetch_figures(size_bytes: int = SIZE_BYTES) -> dict[str, Any]:
    """Bytes, seconds, MiB/s and the peak of resident memory in MiB, by source."""
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as name:
        folder = Path(name)
        room = shutil.disk_usage(folder).free - ROOM_BYTES
        size_bytes = min(size_bytes, room)
        digest = generated_digest(size_bytes)
        with generated(folder, size_bytes) as url:
            ca = {"digest": digest, "ca": str(folder / "ca.pem")}
            https = measured(folder, {"uri": f"{url}/big.onnx", **ca}, size_bytes)
            fake_s3 = measured(folder, {"uri": "s3://models/big.onnx", "endpoint": url, **ca}, size_bytes)
        with moto(MOTO_SIZE_BYTES) as (url, digest):
            secret = folder / "secret"
            secret.mkdir()
            (secret / "accessKeyId").write_text("a")
            (secret / "secretAccessKey").write_text("b")
            source = {"uri": "s3://models/big.onnx", "endpoint": url, "digest": digest, "secret": str(secret)}
            moto_s3 = measured(folder, source, MOTO_SIZE_BYTES)
    return {"fetch_https": https, "fetch_s3_fake_store": fake_s3, "fetch_s3_moto": moto_s3}


def main() -> None:
    """Print the figures, or be the server."""
    if sys.argv[1:2] == ["serve"]:
        port, size_bytes, certificate = sys.argv[2:]
        Generated(int(port), int(size_bytes), Path(certificate)).serve_forever()
        return
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--gib", type=float, default=SIZE_BYTES / (1 << 30), help="size (default: %(default)s)")
    options = arguments.parse_args()
    for source, figures in fetch_figures(int(options.gib * (1 << 30))).items():
        print(source, figures)


if __name__ == "__main__":
    main()
