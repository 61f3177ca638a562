"""Progress for whatever takes over two seconds, on the terminal or as plain lines."""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from sandbox.errors import SandboxError

Say = Callable[[str], None]


def say(text: str) -> None:
    """One line on stderr, at once."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def quiet(_text: str) -> None:
    """Drop progress; for callers that show their own."""


@contextlib.contextmanager
def step(
    title: str, tell: Say = say, *, every_s: float = 5.0, detail: Callable[[], str] | None = None
) -> Iterator[None]:
    """Announce a step that may be long, then a line every `every_s` seconds, then its duration."""
    started = time.monotonic()
    done = threading.Event()

    def beat() -> None:
        while not done.wait(every_s):
            more = f" ({detail()})" if detail else ""
            tell(f"  … {title}: {time.monotonic() - started:.0f} s{more}")

    ticker = threading.Thread(target=beat, name="progress", daemon=True)
    tell(f"· {title}")
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()
    tell(f"  {title}: done in {time.monotonic() - started:.1f} s")


def checked(
    argv: Sequence[str | Path],
    *,
    fix: str,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
) -> str:
    """Run a command and return its standard output; on failure say what it printed and how to fix it."""
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words, input=stdin, capture_output=True, text=True, timeout=timeout_s, env=env, cwd=cwd, check=False
        )
    except FileNotFoundError as error:
        message = f"{words[0]} is missing; {fix}"
        raise SandboxError(message) from error
    except subprocess.TimeoutExpired as error:
        message = f"`{' '.join(words[:6])} …` took over {timeout_s:.0f} s; {fix}"
        raise SandboxError(message) from error
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        message = f"`{' '.join(words[:8])} …` failed ({done.returncode}); {fix}\n{tail}"
        raise SandboxError(message)
    return done.stdout
