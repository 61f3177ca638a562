"""Entering the sandbox's namespaces from outside, and talking to the keeper inside one."""

import contextlib
import ctypes
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sandbox.errors import SandboxError
from sandbox.keeper import socket_address

CLONE_NEWNET = 0x40000000


def namespace_argv(keeper: Path, socket: Path, *more: str) -> list[str]:
    """Its own network, mount and pid namespaces, that end with this process."""
    unshare = ["unshare", "-n", "-m", "-p", "--fork", "--kill-child", "--mount-proc"]
    return [*unshare, sys.executable, "-IS", str(keeper), str(socket), *more]


class Control:
    """The keeper behind a socket: its processes, and its pid as this machine sees it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def connect(self) -> socket.socket:
        """A connected socket, or an OSError when the namespace isn't there."""
        client = socket.socket(socket.AF_UNIX)
        try:
            client.settimeout(10)
            address, folder = socket_address(self.path)
            try:
                client.connect(address)
            finally:
                os.close(folder)
        except OSError:
            client.close()
            raise
        return client

    def alive(self) -> bool:
        """Whether the namespace is up."""
        try:
            self.connect().close()
        except OSError:
            return False
        return True

    def pid(self) -> int:
        """Pid of the namespace's first process in the caller's own pid namespace."""
        with self.connect() as client:
            credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", credentials)[0])

    def ask(self, **request: Any) -> dict[str, Any]:
        """One request to the keeper."""
        try:
            with self.connect() as client, client.makefile("rwb") as stream:
                stream.write(json.dumps(request).encode() + b"\n")
                stream.flush()
                line = stream.readline()
        except OSError as error:
            message = f"nothing runs behind {self.path} ({error}); start it with `python -m sandbox up`"
            raise SandboxError(message) from error
        said: dict[str, Any] = json.loads(line) if line else {"error": "the keeper gave no answer"}
        if "error" in said:
            raise SandboxError(str(said["error"]))
        return said

    def wait_up(self, limit_s: float) -> None:
        """Until the keeper listens."""
        wait_for(self.alive, limit_s, f"the namespace behind {self.path} did not come up; see guard.log beside it")

    def network_argv(self) -> list[str]:
        """Prefix that runs a command in this network; it becomes the command, so signals reach it."""
        return ["nsenter", f"--net=/proc/{self.pid()}/ns/net", "--"]

    def inside_argv(self) -> list[str]:
        """Prefix that runs a command in all three namespaces."""
        return ["nsenter", "-t", str(self.pid()), "-n", "-m", "-p", "--"]


def set_network(descriptor: int) -> None:
    """Move the calling thread into a network namespace."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(descriptor, CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "setns")


@contextlib.contextmanager
def network(path: Path) -> Iterator[None]:
    """Be in that network for a while (this thread, and threads and processes it starts meanwhile)."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter(path)
        try:
            yield
        finally:
            set_network(own)
    finally:
        os.close(own)


def enter(path: Path) -> None:
    """Be in that network from now on."""
    other = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        set_network(other)
    finally:
        os.close(other)


def wait_for(condition: Callable[[], object], limit_s: float, otherwise: str, every_s: float = 0.05) -> None:
    """Poll until true; a bounded wait that says what was waited for."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            message = f"{otherwise} (waited {limit_s:.0f} s)"
            raise SandboxError(message)
        time.sleep(every_s)
