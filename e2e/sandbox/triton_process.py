"""Triton's real server as a plain process: the sandbox's image unpacked once, on loopback, without a cluster.

For what only Triton can tell about a configuration. The folder of the image lies in the cache; the server runs in it by
chroot, in mount and process namespaces of its own that end with it.
"""

import contextlib
import json
import shutil
import socket
import subprocess
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sandbox import images
from sandbox.content import locked
from sandbox.errors import SandboxError
from sandbox.paths import PACKAGE, cache_root
from sandbox.progress import Say

START_LIMIT_S = 60.0
STOP_LIMIT_S = 20.0
_WHITEOUT = ".wh."
# /dev/shm and /tmp are the process' own; the repository is shown where pods have it.
_ENTER = """
set -eu
root=$1 repository=$2; shift 2
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t tmpfs tmpfs "$root/tmp"
mkdir -p "$root/models"
mount --bind "$repository" "$root/models"
exec chroot "$root" env -i PATH=/opt/tritonserver/bin:/usr/local/bin:/usr/bin:/bin HOME=/tmp \
  PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 tritonserver "$@"
"""


def root_folder(tell: Say) -> Path:
    """The folder of the sandbox's Triton image, unpacked when it isn't yet."""
    sources = PACKAGE / "images" / "triton"
    image = images.ensure(images.TRITON, "triton", sources, [sources], tell)
    folder = cache_root() / "roots" / f"triton-{image.key}"
    with locked(cache_root() / "roots.lock"):
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            for older in folder.parent.glob("triton-*"):
                shutil.rmtree(older)
            draft = Path(tempfile.mkdtemp(prefix=".triton-", dir=folder.parent))
            unpack(image.archive, draft)
            draft.chmod(0o755)
            draft.rename(folder)
    return folder


def unpack(archive: Path, into: Path) -> None:
    """The files of an OCI archive with one image, later layers over earlier ones."""
    with tarfile.open(archive) as outer:

        def blob(digest: str) -> Any:
            return outer.extractfile(f"blobs/{digest.replace(':', '/')}")

        index = json.load(outer.extractfile("index.json") or blob(""))
        manifest = json.load(blob(index["manifests"][0]["digest"]))
        for layer in manifest["layers"]:
            with tarfile.open(fileobj=blob(layer["digest"]), mode="r:*") as files:
                for entry in files:
                    _apply(files, entry, into)


def _apply(files: tarfile.TarFile, entry: tarfile.TarInfo, into: Path) -> None:
    place = Path(entry.name)
    if place.name == ".wh..wh..opq":
        for child in (into / place.parent).iterdir():
            _remove(child)
    elif place.name.startswith(_WHITEOUT):
        _remove(into / place.with_name(place.name.removeprefix(_WHITEOUT)))
    elif not (entry.ischr() or entry.isblk()):
        target = into / place
        if target.is_symlink() or (target.exists() and not (target.is_dir() and entry.isdir())):
            _remove(target)
        files.extract(entry, into, filter="fully_trusted")  # our own image, with links that lead anywhere in it


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class TritonProcess:
    """A running server."""

    def __init__(self, address: str, log: Path, process: subprocess.Popen[bytes]) -> None:
        self.address, self.log, self.process = address, log, process

    def get(self, path: str) -> Any:
        """The answer to a GET as data; HTTPError when it is refused."""
        with urllib.request.urlopen(f"http://{self.address}{path}", timeout=10) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The answer to a POST as data; HTTPError when it is refused."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"http://{self.address}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.loads(answer.read())

    def said(self) -> str:
        """What the server has logged."""
        return self.log.read_text(errors="replace")


@contextlib.contextmanager
def triton(repository: Path, arguments: Sequence[str], log: Path, tell: Say) -> Iterator[TritonProcess]:
    """The server on a model repository, ready or with every model decided; SandboxError with its log otherwise."""
    root = root_folder(tell)
    ports = _free_ports(2)
    flags = [
        "--model-repository=/models", "--http-address=127.0.0.1", f"--http-port={ports[0]}", "--allow-grpc=false",
        "--metrics-address=127.0.0.1", f"--metrics-port={ports[1]}", "--allow-gpu-metrics=false",
        "--exit-timeout-secs=5", "--exit-on-error=false", *arguments,
    ]  # fmt: skip
    with log.open("wb") as output:
        command = ["unshare", "-m", "-p", "-f", "--kill-child", "sh", "-c", _ENTER, "enter", str(root), str(repository)]
        process = subprocess.Popen([*command, *flags], stdout=output, stderr=output, start_new_session=True)
        server = TritonProcess(f"127.0.0.1:{ports[0]}", log, process)
        try:
            _await(server)
            yield server
        finally:
            # Its child, the first process of the namespace, dies with it, and takes every other one along.
            process.kill()
            process.wait(STOP_LIMIT_S)


def _await(server: TritonProcess) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        with contextlib.suppress(OSError):
            # Live means that the loading of all models has ended, well or not (exit-on-error is off).
            server.get("/v2/health/live")
            return
        time.sleep(0.1)
    status = server.process.poll()
    message = f"tritonserver (exit status {status}) didn't start; its log ends with: {server.said()[-2000:]}"
    raise SandboxError(message)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
