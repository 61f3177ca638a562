"""The control groups of a run: every process of it is in one, so what is left over can be found and removed."""

import contextlib
import os
import signal
import time
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
PREFIX = "conch-sandbox-"


def unified() -> bool:
    """Whether this machine has version 2 only."""
    return (MOUNT / "cgroup.controllers").exists()


def hierarchies() -> list[Path]:
    """Mount points of the hierarchies in which containers get groups."""
    if unified():
        return [MOUNT]
    if not MOUNT.is_dir():
        return []
    return [
        path
        for path in sorted(MOUNT.iterdir())
        if path.is_dir() and not path.is_symlink() and (path / "cgroup.procs").exists()
    ]


def name(run: str) -> str:
    """The run's group, in every hierarchy."""
    return PREFIX + run


def join(run: str, pid: int) -> None:
    """Put a process, and what it will start, into the run's group."""
    root = MOUNT if unified() else MOUNT / "pids"
    group = root / name(run) / "components"
    group.mkdir(parents=True, exist_ok=True)
    (group / "cgroup.procs").write_text(str(pid))


def folders(run: str | None = None) -> list[Path]:
    """Group folders of one run, or of all, deepest first."""
    found: list[Path] = []
    for root in hierarchies():
        tops = [root / name(run)] if run else sorted(root.glob(PREFIX + "*"))
        for top in tops:
            # os.walk, unlike rglob, stands folders that vanish meanwhile
            found += [Path(folder) for folder, _, _ in os.walk(top, topdown=False)]
    return found


def processes(run: str | None = None) -> set[int]:
    """Processes in the groups of one run, or of all."""
    pids: set[int] = set()
    for folder in folders(run):
        with contextlib.suppress(OSError):
            pids |= {int(word) for word in (folder / "cgroup.procs").read_text().split()}
    return pids


def sweep(run: str, limit_s: float = 20) -> bool:
    """Kill what still runs in the run's groups and remove them; true when nothing is left."""
    deadline = time.monotonic() + limit_s
    while True:
        for pid in processes(run):
            if pid > 0:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for folder in folders(run):
            with contextlib.suppress(OSError):
                folder.rmdir()
        if not folders(run):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
