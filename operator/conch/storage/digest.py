"""Digests of files and folders, streamed in chunks of CHUNK_BYTES. Reads files."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hashlib import _Hash

    from conch.storage.layout import TreeFile

CHUNK_BYTES = 1 << 20

OnBytes = Callable[[int], None]
"""Called with the count of bytes just hashed."""


def _ignore(_count: int) -> None:
    pass


def hash_into(hasher: "_Hash", path: Path, on_bytes: OnBytes = _ignore) -> int:
    """Feed a file to the hasher and return its size in bytes. Raises OSError."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    size_bytes = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
            size_bytes += count
            on_bytes(count)
    return size_bytes


def file_digest(path: Path, on_bytes: OnBytes = _ignore) -> str:
    """`sha256:` and the hexadecimal SHA-256 of the file's bytes. Raises OSError."""
    hasher = hashlib.sha256()
    hash_into(hasher, path, on_bytes)
    return f"sha256:{hasher.hexdigest()}"


def tree_digest(files: Iterable["TreeFile"], on_bytes: OnBytes = _ignore) -> str:
    r"""The digest of a folder, independent of times, owners, modes, order and empty folders.

    For every file below the folder, at any depth and hidden ones too, one line:

        <64 lower-case hexadecimal digits of the file's SHA-256> <space> <space> <path> <newline>

    `path` is relative to the folder, its segments joined by `/`, without a leading `./`. Symbolic links are followed
    and count as what they point to. A folder `lost+found` directly in the folder is left out, as the file system owns
    it. The lines stand in the order of the paths' bytes. The tree digest is `sha256:` and the hexadecimal SHA-256 of
    all lines together. With GNU tools, in the folder:

        find -L . -path ./lost+found -prune -o -type f -printf '%P\0' \
            | LC_ALL=C sort -z | xargs -0 sha256sum -- | sha256sum

    docs/models.md says the same for users. `storage.layout.walk` refuses the names that sha256sum would escape
    (backslash, control characters). Raises OSError.
    """
    return lines_digest(
        {file.relative: file_digest(file.real, on_bytes).removeprefix("sha256:") for file in _in_order(files)}
    )


def lines_digest(files: Mapping[str, str]) -> str:
    """The tree digest of files whose own SHA-256 is known: relative path → hexadecimal digits."""
    lines = hashlib.sha256()
    for relative in sorted(files, key=os.fsencode):
        lines.update(f"{files[relative]}  ".encode() + os.fsencode(relative) + b"\n")
    return f"sha256:{lines.hexdigest()}"


def _in_order(files: Iterable["TreeFile"]) -> list["TreeFile"]:
    return sorted(files, key=lambda file: os.fsencode(file.relative))
