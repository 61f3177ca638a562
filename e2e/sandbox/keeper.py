"""First process of a namespace: starts, signals and reaps the components there, asked through a unix socket.

Runs as a plain script (standard library only, so that it starts at once): keeper.py SOCKET [--region].
One JSON object per connection in, one out.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Kept at their default paths by components; a fresh tmpfs each, so that the machine's own folders stay untouched.
PRIVATE_FOLDERS = ("/run", "/var/lib", "/var/log")


@dataclass
class Process:
    """What was asked for under one name, and the process that stands for it now."""

    argv: list[str]
    env: dict[str, str]
    log: str
    pid: int = 0
    running: bool = False
    status: int | None = None
    starts: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def shown(self) -> dict[str, Any]:
        """The state as sent to who asks."""
        return {"pid": self.pid, "running": self.running, "status": self.status, "starts": self.starts, "log": self.log}


def socket_address(path: Path) -> tuple[str, int]:
    """An address short enough for a unix socket, however deep the folder is; close the descriptor after use."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    return f"/proc/self/fd/{folder}/{path.name}", folder


def prepare_namespace(*, region: bool) -> None:
    """Loopback, and for a region: private state folders and forwarding."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1\n")
    if not region:
        return
    # kubelet needs shared mounts; the group they form ends at this namespace, which came up private
    subprocess.run(["mount", "--make-rshared", "/"], check=True)
    for folder in PRIVATE_FOLDERS:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "sandbox", folder], check=True)
    for folder in ("/run/containerd", "/run/netns", "/run/lock", "/var/lib/kubelet", "/var/lib/cni", "/var/log/pods"):
        Path(folder).mkdir(parents=True)


class Keeper:
    """The loop of the namespace's first process."""

    def __init__(self, listener: socket.socket, wakeup: int) -> None:
        self.listener = listener
        self.wakeup = wakeup
        self.processes: dict[str, Process] = {}

    def spawn(self, process: Process) -> None:
        """Fork and execute; output is appended to the log."""
        log = os.open(process.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE):
                    signal.signal(number, signal.SIG_DFL)
                nothing = os.open(os.devnull, os.O_RDONLY)
                os.dup2(nothing, 0)
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.execvpe(process.argv[0], process.argv, process.env)  # noqa: S606
            except OSError as error:
                os.write(log, f"{process.argv[0]}: {error}\n".encode())
            finally:
                os._exit(127)
        os.close(log)
        process.pid, process.running, process.status = pid, True, None
        process.starts += 1

    def reap(self) -> None:
        """Collect every ended child; the first process of a namespace inherits strangers too."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for process in self.processes.values():
                if process.pid == pid and process.running:
                    process.running, process.status = False, os.waitstatus_to_exitcode(status)

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Do one request."""
        what, name = asked["op"], asked.get("name", "")
        if what == "list":
            return {"processes": {key: process.shown() for key, process in self.processes.items()}}
        if what == "start":
            process = self.processes.get(name)
            if process and process.running:
                return process.shown()
            if "argv" in asked:
                starts = process.starts if process else 0
                process = Process(asked["argv"], asked["env"], asked["log"], starts=starts)
                self.processes[name] = process
            if process is None:
                return {"error": f"{name} was never started here"}
            self.spawn(process)
            return process.shown()
        if what == "signal":
            process = self.processes.get(name)
            if process is None:
                return {"error": f"{name} was never started here; running: {', '.join(self.processes)}"}
            if process.running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, asked["signal"])
            return process.shown()
        return {"error": f"unknown operation {what}"}

    def serve_one(self) -> None:
        """One connection: a line in, a line out."""
        connection, _ = self.listener.accept()
        with connection:
            connection.settimeout(5)
            try:
                with connection.makefile("rwb") as stream:
                    line = stream.readline()
                    if line:
                        stream.write(json.dumps(self.answer(json.loads(line))).encode() + b"\n")
            except (OSError, ValueError, KeyError) as error:
                sys.stderr.write(f"keeper: {error!r}\n")

    def run(self) -> None:
        """Until killed."""
        while True:
            ready, _, _ = select.select([self.listener.fileno(), self.wakeup], [], [])
            if self.wakeup in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wakeup, 4096)
            self.reap()
            if self.listener.fileno() in ready:
                self.serve_one()


def main() -> None:
    """Set the namespace up, then listen; the socket appears when the namespace is ready."""
    path = Path(sys.argv[1])
    prepare_namespace(region="--region" in sys.argv[2:])
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    address, folder = socket_address(path)
    draft = address + ".new"
    listener.bind(draft)
    listener.listen(64)
    Path(draft).rename(address)
    os.close(folder)
    Keeper(listener, reader).run()


if __name__ == "__main__":
    main()
