"""Room on the model volume. Asks the file system."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conch.storage.errors import DiskFullError

_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
_FIX = "free space on the node, on whose disk it lies, or use a pvc or image source, which needs no copy"


def require_room(folder: Path, needed_bytes: int) -> None:
    """Raise DiskFullError now rather than after an hour of downloading."""
    volume = os.statvfs(folder)
    free_bytes = volume.f_bavail * volume.f_frsize
    if needed_bytes > free_bytes:
        raise DiskFullError(f"{needed_bytes} more bytes are needed and {free_bytes} are free on the model volume", _FIX)


@contextmanager
def full_disk_explained() -> Iterator[None]:
    """Turn the operating system's "no space" into DiskFullError."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFullError("the model volume is full", _FIX) from error
        raise
