"""Content hashes that name what is cached, and atomic writes into the cache."""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

SKIPPED = {"__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}


def files_under(paths: Iterable[Path]) -> Iterator[Path]:
    """Regular files of the given files and folders in a stable order, caches left out."""
    for path in paths:
        if path.is_dir():
            for child in sorted(path.rglob("*")):
                if child.is_file() and not SKIPPED.intersection(child.parts) and child.suffix != ".pyc":
                    yield child
        elif path.is_file():
            yield path


def digest(paths: Iterable[Path], *extra: str) -> str:
    """16 hex digits over names, modes and bytes of the files and over the extra strings."""
    total = hashlib.sha256()
    for path in files_under(paths):
        total.update(f"{path.name}\0{path.stat().st_mode & 0o111}\0".encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    for word in extra:
        total.update(f"\0{word}".encode())
    return total.hexdigest()[:16]


def write_atomic(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace a file so that a reader sees the old or the new text, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.chmod(mode)
    draft.replace(path)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock, so that two runs don't build the same thing twice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def tried(path: Path) -> Iterator[bool]:
    """Try to hold an advisory lock, without waiting; gives whether it is held."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
