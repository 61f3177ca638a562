"""Stays outside the namespaces, starts their first process and cleans up after it, however the run ends.

Runs as `python -m sandbox.guard RUN RUN_FOLDER OWNER_PIDFD` (-1: no owner).
It ends the run on SIGTERM or when the owner's process is gone; if it is itself killed, the kernel ends the run
(parent-death signals down to the namespace's first process) and the next start removes the empty groups.
"""

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from sandbox import cgroups
from sandbox.namespaces import namespace_argv
from sandbox.paths import OWNED, run_lock

PR_SET_PDEATHSIG = 1
TRANSIENT = ("keeper.sock", "containerd", "ipam")


def remove_state(folder: Path) -> None:
    """Sockets and container stores of every region; logs stay to be read."""
    for place in [folder, *(path for path in folder.iterdir() if path.is_dir())]:
        for part in TRANSIENT:
            target = place / part
            if target.is_dir():
                shutil.rmtree(target, ignore_errors=True)
            else:
                target.unlink(missing_ok=True)


def main() -> None:
    """Start, watch, clean."""
    run, folder, owner = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    with (folder / "guard.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / "guard.pid").write_text(str(os.getpid()))
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        library = ctypes.CDLL(None)

        def enter() -> None:
            library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            cgroups.join(run, os.getpid())

        keeper = Path(__file__).with_name("keeper.py")
        with subprocess.Popen(
            namespace_argv(keeper, folder / "keeper.sock"),
            stdin=subprocess.DEVNULL,
            preexec_fn=enter,
        ) as child:
            ended = os.pidfd_open(child.pid)
            watched = [reader, ended] + ([owner] if owner >= 0 else [])
            ready, _, _ = select.select(watched, [], [])
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(20)
        cgroups.sweep(run)
        remove_state(folder)
        (folder / "guard.pid").unlink(missing_ok=True)
        # who ends the run with `down` may still want its logs; a gone owner wants nothing
        if owner in ready and (folder / OWNED).exists():
            shutil.rmtree(folder, ignore_errors=True)
            run_lock(run).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
