"""Room on the model volume. Asks the file system."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from conch.storage.errors import DiskFullError

_UNITS: Final = ((1e18, "EB"), (1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_ROUNDS_UP: Final = 0.9995
"""In three digits, 999.6 kB would be 1e+03 kB."""
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
_FIX = "free space on the node, on whose disk it lies, or use a pvc or image source, which needs no copy"


def size_unit(count: float) -> tuple[float, str]:
    """The size and name of the unit in which people read so many bytes: of powers of ten, as of stores and disks."""
    return next(((size, unit) for size, unit in _UNITS if count >= _ROUNDS_UP * size), (1.0, "bytes"))


def readable_size(count: float) -> str:
    """Bytes in words: `12.6 GB`, `700 bytes`."""
    size, unit = size_unit(count)
    return f"{count / size:.3g} {unit}"


def require_room(folder: Path, needed_bytes: int) -> None:
    """Raise DiskFullError now rather than after an hour of downloading."""
    volume = os.statvfs(folder)
    free_bytes = volume.f_bavail * volume.f_frsize
    if needed_bytes > free_bytes:
        needed, free = readable_size(needed_bytes), readable_size(free_bytes)
        if needed == free:  # in three digits
            needed, free = f"{needed_bytes} bytes", f"{free_bytes} bytes"
        raise DiskFullError(f"{needed} more are needed and {free} are free on the model volume", _FIX)


@contextmanager
def full_disk_explained() -> Iterator[None]:
    """Turn the operating system's "no space" into DiskFullError."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFullError("the model volume is full", _FIX) from error
        raise
