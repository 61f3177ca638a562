"""Unpack a tar or zip archive from a source that nobody vouches for. Reads one file, writes below one new folder.

The bytes are streamed: memory stays bounded whatever the headers say. Nothing that a header claims is believed: sizes
are counted while they are written, names are checked before they are used, and no member is written through a link.
What isn't a plain file, a folder or a link to a sibling is refused, and then nothing is left behind.
"""

import bz2
import errno
import gzip
import io
import lzma
import os
import re
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, cast

from conch.storage.errors import FetchError, WrongLayoutError
from conch.storage.space import full_disk_explained

_CHUNK_BYTES: Final = 256 << 10
# A pax or GNU header is read whole by the standard library; a longer one is no name but an attack on memory.
_HEADER_MAX_BYTES: Final = 256 << 10
_ZIP_DIRECTORY_MAX_BYTES: Final = 8 << 20
_XZ_MEMORY_MAX_BYTES: Final = 96 << 20  # `xz -9` needs 65 MiB
_NAME_MAX_BYTES: Final = 255
_PATH_MAX_BYTES: Final = 1024
_LINK_MAX_BYTES: Final = 1024
_SHOWN_CHARACTERS: Final = 120
_TAR_BLOCK: Final = 512

ARCHIVE_NAME: Final = re.compile(r".*\.(tar|tar\.gz|tgz|tar\.bz2|tbz2|tar\.xz|txz|zip)", re.IGNORECASE | re.DOTALL)
"""Names of archives. The first bytes decide how one is read, never whether: a PyTorch model.pt is a zip file too."""


@dataclass(frozen=True)
class Limits:
    """What an archive may hold.

    `ratio_max` bounds the unpacked size to that many times the archive's, from `ratio_free_bytes` on: small files may
    well be mostly zeros. Trained weights shrink to a half at best.
    """

    files_max: int = 100_000
    size_max_bytes: int = 2 << 40
    ratio_max: int = 100
    ratio_free_bytes: int = 256 << 20


class ArchiveRefusedError(WrongLayoutError):
    """Exit 5: the archive holds what may not be unpacked, or more than it may."""


class ArchiveBrokenError(WrongLayoutError):
    """Exit 5: the archive is cut short, damaged or of a kind that can't be read."""


class _LimitError(Exception):
    """A limit was met in the middle of reading; the sentence's cause and fix."""

    def __init__(self, cause: str, fix: str) -> None:
        super().__init__(cause, fix)
        self.cause = cause
        self.fix = fix


def is_archive_name(name: str) -> bool:
    """Whether a file so named is unpacked."""
    return ARCHIVE_NAME.fullmatch(name) is not None


def unpack(archive: Path, into: Path, *, limits: Limits) -> None:
    """Unpack the archive into the new folder `into`, or leave nothing there.

    Files get mode 0644, or 0755 if anybody may execute them; times, owners and further modes are dropped. A symbolic
    link becomes one if it is relative and leads to something inside, a hard link if it names an earlier file.

    Args:
        archive: a tar (plain, gzip, bzip2, xz) or a zip file.
        into: a folder that doesn't exist, or is empty; its parent must exist.
        limits: how much may be unpacked.

    Raises:
        ArchiveRefusedError: it holds what may not be unpacked; the message names archive, member and fix.
        ArchiveBrokenError: it can't be read to its end.
        DiskFullError: the file system has no room for it.
        OSError: the disk fails in another way.
    """
    shown = _shown(archive.name)
    into.mkdir(exist_ok=True)
    if any(into.iterdir()):
        raise FileExistsError(errno.EEXIST, "the folder to unpack into isn't empty", str(into))
    try:
        with full_disk_explained(), archive.open("rb") as file:
            # Links lead out or not as the kernel sees it, so from the folder's real place.
            writer = _Writer(into.resolve(strict=True), shown, limits, os.fstat(file.fileno()).st_size)
            with _breakage_named(shown):
                _unpack(file, writer)
            writer.make_links()
    except BaseException:
        shutil.rmtree(into, ignore_errors=True)
        raise


def _unpack(file: IO[bytes], writer: "_Writer") -> None:
    start = file.read(_TAR_BLOCK)
    file.seek(0)
    if start.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        _unpack_zip(file, writer)
        return
    with closing(_decompressed(file, start)) as plain:
        _unpack_tar(plain, writer)


def _decompressed(file: IO[bytes], start: bytes) -> IO[bytes]:
    if start.startswith(b"\x1f\x8b"):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=file, mode="rb"))
    if start.startswith(b"BZh"):
        return cast("IO[bytes]", bz2.BZ2File(file))
    if start.startswith(b"\xfd7zXZ\x00"):
        return io.BufferedReader(_Xz(file), _CHUNK_BYTES)
    if start.startswith(b"\x28\xb5\x2f\xfd"):
        raise _LimitError("is compressed with zstd, which isn't read", "pack it as .tar.gz, .tar.xz or .zip")
    if start.startswith(b"7z\xbc\xaf\x27\x1c"):
        raise _LimitError("is a 7z archive, which isn't read", "pack it as .tar.gz, .tar.xz or .zip")
    # A reader of its own, so that closing it leaves the caller's file open.
    plain = io.FileIO(os.dup(file.fileno()), "rb")
    plain.seek(0)
    return cast("IO[bytes]", plain)


class _Xz(io.RawIOBase):
    """An xz stream with bounded memory: lzma.LZMAFile lets the stream choose a dictionary of up to 4 GiB."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._decoder = self._fresh()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview | bytearray") -> int:  # type: ignore[override]
        while True:
            if self._decoder.eof:
                rest = self._decoder.unused_data or self._file.read(_CHUNK_BYTES)
                # Streams may follow each other, with zeros between them.
                rest = rest.lstrip(b"\0") if rest else b""
                if not rest:
                    return 0
                self._decoder = self._fresh()
                data = self._decoder.decompress(rest, len(buffer))
            elif self._decoder.needs_input:
                raw = self._file.read(_CHUNK_BYTES)
                if not raw:
                    raise EOFError("it ends in the middle of a compressed stream")
                data = self._decoder.decompress(raw, len(buffer))
            else:
                data = self._decoder.decompress(b"", len(buffer))
            if data:
                buffer[: len(data)] = data
                return len(data)

    @staticmethod
    def _fresh() -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_MAX_BYTES)


class _Forward:
    """What tarfile reads from: forward only, each header bounded, and every byte counted, used or not."""

    def __init__(self, file: IO[bytes], writer: "_Writer") -> None:
        self._file = file
        self._writer = writer
        self._place = 0
        self._header_bytes = 0
        self.last_read = b""

    def next_member(self) -> None:
        """What is read from now on belongs to another member."""
        self._header_bytes = 0

    def tell(self) -> int:
        return self._place

    def seek(self, place: int) -> None:
        """Read on to `place` and throw the bytes away. A size that a header made negative would lead back."""
        if place < self._place:
            raise tarfile.ReadError("a member has a size below zero")
        while self._place < place:
            if not self._take(min(_CHUNK_BYTES, place - self._place)):
                raise tarfile.ReadError("it ends in the middle of a member")

    def read(self, count: int) -> bytes:
        """A header, or a part of one."""
        self._header_bytes += count
        if self._header_bytes > _HEADER_MAX_BYTES or count < 0:
            raise _LimitError("has a header that is too long", "pack it without extended attributes")
        parts = [self._take(count)]
        while parts[-1] and (missing := count - sum(map(len, parts))):
            parts.append(self._take(missing))
        self.last_read = b"".join(parts)
        return self.last_read

    def data(self, size_bytes: int) -> Iterator[bytes]:
        """A member's content. Raises tarfile.ReadError if there is less."""
        while size_bytes > 0:
            piece = self._take(min(_CHUNK_BYTES, size_bytes))
            if not piece:
                raise tarfile.ReadError("it ends in the middle of a member")
            size_bytes -= len(piece)
            yield piece

    def _take(self, count: int) -> bytes:
        piece = self._file.read(count)
        self._place += len(piece)
        self._writer.count_decompressed(self._place)
        return piece


def _unpack_tar(plain: IO[bytes], writer: "_Writer") -> None:
    forward = _Forward(plain, writer)
    tar = tarfile.TarFile(fileobj=cast("IO[bytes]", forward), mode="r", encoding="utf-8", errors="surrogateescape")
    while (member := tar.next()) is not None:
        _take_tar_member(member, forward, writer)
        # tarfile keeps every member and every pax record that it has met.
        tar.members, tar.pax_headers = [], {}  # type: ignore[attr-defined]  # documented, but not in the stubs
        forward.next_member()
    # tarfile takes a damaged header for the end; only a block of zeros is one.
    if forward.last_read != bytes(_TAR_BLOCK):
        raise tarfile.ReadError("it ends without an end mark, or a header in its middle is damaged")


def _take_tar_member(member: tarfile.TarInfo, forward: _Forward, writer: "_Writer") -> None:
    name = member.name
    if member.issparse():
        raise writer.refused(name, "is a sparse file", "pack the archive without --sparse")
    if member.isdir():
        writer.folder(name)
    elif member.issym():
        writer.symbolic_link(name, member.linkname)
    elif member.islnk():
        writer.hard_link(name, member.linkname)
    elif member.isreg():
        forward.seek(member.offset_data)
        writer.file(name, forward.data(member.size), executable=bool(member.mode & 0o111))
    elif member.isdev():
        kind = "a named pipe" if member.isfifo() else "a device"
        raise writer.refused(name, f"is {kind}", "remove it from the archive")
    else:
        raise writer.refused(name, f"is of the unknown kind {_kind(member)}", "remove it from the archive")


def _kind(member: tarfile.TarInfo) -> str:
    return _shown(member.type.decode("ascii", "replace"))


def _unpack_zip(file: IO[bytes], writer: "_Writer") -> None:
    _check_zip_directory(file)
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            _take_zip_member(archive, member, writer)


def _take_zip_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, writer: "_Writer") -> None:
    # The name as stored: zipfile cuts it at a NUL.
    name = member.orig_filename
    if member.flag_bits & 0x1:
        raise writer.refused(name, "is encrypted", "pack the archive without a password")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        # The standard library unpacks a whole block of the others in memory, whatever it grows to.
        raise writer.refused(name, "isn't stored or deflated", "pack the archive with zip's default method")
    mode = member.external_attr >> 16
    kind = stat.S_IFMT(mode)
    if name.endswith("/"):
        writer.folder(name)
        return
    if kind not in (0, stat.S_IFREG, stat.S_IFLNK):
        raise writer.refused(name, "is neither a file, a folder nor a link", "remove it from the archive")
    with archive.open(member) as content:
        if kind != stat.S_IFLNK:
            pieces = iter(lambda: content.read(_CHUNK_BYTES), b"")
            writer.file(name, pieces, executable=bool(mode & 0o111))
            return
        target = content.read(_LINK_MAX_BYTES + 1)
    writer.symbolic_link(name, target.decode("utf-8", "surrogateescape"))


def _check_zip_directory(file: IO[bytes]) -> None:
    """Refuse a table of contents that zipfile, which reads all of it, had better not read."""
    end_record, longest_comment = struct.Struct("<4s4H2LH"), 0xFFFF
    size_bytes = file.seek(0, os.SEEK_END)
    file.seek(max(0, size_bytes - longest_comment - end_record.size - 20))
    tail = file.read()
    file.seek(0)
    place = tail.rfind(b"PK\x05\x06")
    if place < 0 or place + end_record.size > len(tail):
        raise zipfile.BadZipFile("it has no table of contents, as if it were cut short")
    directory_bytes = end_record.unpack_from(tail, place)[5]
    if tail[max(0, place - 20) : place].startswith(b"PK\x06\x07"):  # zip64: the record that counts lies elsewhere
        (where,) = struct.unpack_from("<Q", tail, place - 20 + 8)
        file.seek(min(where, size_bytes))
        record = file.read(56)
        file.seek(0)
        if record.startswith(b"PK\x06\x06") and len(record) == 56:  # noqa: PLR2004  # its fixed size
            (directory_bytes,) = struct.unpack_from("<Q", record, 40)
    if directory_bytes > _ZIP_DIRECTORY_MAX_BYTES:
        raise _LimitError("has a table of contents that is too long for a zip archive", "pack it as .tar.gz")


class _Writer:
    """Writes members below a folder and keeps to the limits. Names and sizes are whatever a stranger wrote."""

    def __init__(self, root: Path, archive: str, limits: Limits, archive_bytes: int) -> None:
        self._root = root
        self._archive = archive
        self._limits = limits
        self._grown_max_bytes = max(limits.ratio_free_bytes, limits.ratio_max * archive_bytes)
        self._members = 0
        self._written_bytes = 0
        self._links: dict[str, str] = {}

    def refused(self, name: str, what: str, fix: str) -> ArchiveRefusedError:
        return ArchiveRefusedError(f"in {self._archive} the member {_shown(name)} {what}", fix)

    def count_decompressed(self, total_bytes: int) -> None:
        """Headers and skipped members count too: nobody should wait for a terabyte of zeros."""
        if total_bytes > self._grown_max_bytes:
            raise _LimitError(
                f"unpacks to more than {self._grown_max_bytes} bytes, over {self._limits.ratio_max} times its size",
                "pack the model without runs of empty data, or give its folder instead of an archive",
            )

    def folder(self, name: str) -> None:
        parts = self._admit(name)
        if parts:
            self._make_folders(name, parts)

    def file(self, name: str, pieces: Iterator[bytes], *, executable: bool) -> None:
        place = self._new_place(name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            handle = os.open(place, flags, 0o600)
        except FileExistsError:
            raise self._twice(name) from None
        with os.fdopen(handle, "wb", buffering=0) as file:
            for piece in pieces:
                self._count_written(len(piece))
                view = memoryview(piece)
                while view:
                    view = view[file.write(view) :]
            os.fchmod(handle, 0o755 if executable else 0o644)

    def symbolic_link(self, name: str, target: str) -> None:
        """Noted, and made when every file is there: until then nothing can be written through it."""
        parts = self._admit(name)
        if not parts:
            raise self.refused(name, "is a link in the archive's own place", "remove it")
        # What isn't printable can't be a member's name either.
        if not target or not target.isprintable() or target.startswith("/") or len(target.encode()) > _LINK_MAX_BYTES:
            raise self.refused(
                name, f"is a link to {_shown(target)}", "make it a relative link inside the archive, or a copy"
            )
        key = "/".join(parts)
        if key in self._links or os.path.lexists(self._root / key):
            raise self._twice(name)
        self._links[key] = target

    def hard_link(self, name: str, target: str) -> None:
        place = self._new_place(name)
        parts = self._parts(target, of_link=name)
        source = self._root.joinpath(*parts)
        # No link is made yet, so nothing on this path is one.
        if not stat.S_ISREG(_mode(source)):
            raise self.refused(
                name,
                f"is a hard link to {_shown(target)}, which is no earlier file of it",
                "pack the file itself (tar --hard-dereference)",
            )
        try:
            place.hardlink_to(source)
        except FileExistsError:
            raise self._twice(name) from None

    def make_links(self) -> None:
        """Make the symbolic links, then see where each one leads."""
        for name, target in self._links.items():
            place = self._root / name
            if os.path.lexists(place):
                raise self._twice(name)
            self._make_folders(name, name.split("/")[:-1])
            place.symlink_to(target)
        for name, target in self._links.items():
            inside, there = self._leads(self._root / name)
            if not inside:
                raise self.refused(
                    name, f"is a link that leads out, to {_shown(target)}", "pack the file itself (tar --dereference)"
                )
            if not there:
                raise self.refused(
                    name, f"is a link to {_shown(target)}, which isn't there", "pack the file that it is to mean"
                )

    def _leads(self, link: Path) -> tuple[bool, bool]:
        """Whether a link leads to a place inside, and whether there is something. Loops lead nowhere."""
        try:
            return link.resolve(strict=True).is_relative_to(self._root), True
        except (OSError, RuntimeError):
            pass
        try:
            return link.resolve().is_relative_to(self._root), False
        except (OSError, RuntimeError):
            return True, False

    def _admit(self, name: str) -> list[str]:
        self._members += 1
        if self._members > self._limits.files_max:
            raise _LimitError(
                f"holds more than {self._limits.files_max} files and folders",
                "pack many small files as one, or give the model's folder instead of an archive",
            )
        parts = self._parts(name)
        if self._through_link(parts[:-1]):
            raise self.refused(name, "would be written through a link", "pack the folder itself (tar --dereference)")
        return parts

    def _parts(self, name: str, of_link: str | None = None) -> list[str]:
        subject, link = (name, "") if of_link is None else (of_link, f"is a hard link to {_shown(name)}, which ")
        if name.startswith("/"):
            raise self.refused(subject, f"{link}has an absolute path", "pack it relative to the model's folder")
        if not name.isprintable() or "\\" in name:
            raise self.refused(
                subject, f"{link}has a backslash, a control character or bytes that are no UTF-8", "rename the file"
            )
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise self.refused(subject, f"{link}has '..' in its path", "pack it relative to the model's folder")
        encoded = [len(part.encode()) for part in parts]
        if sum(encoded) + len(parts) > _PATH_MAX_BYTES or max(encoded, default=0) > _NAME_MAX_BYTES:
            raise self.refused(
                subject,
                f"{link}has a path of more than {_PATH_MAX_BYTES} bytes, or a name of more than {_NAME_MAX_BYTES}",
                "use shorter names",
            )
        return parts

    def _new_place(self, name: str) -> Path:
        parts = self._admit(name)
        if not parts or name.endswith("/"):
            raise self.refused(name, "is a file named like a folder", "rename it")
        if "/".join(parts) in self._links:
            raise self._twice(name)
        return self._make_folders(name, parts[:-1]) / parts[-1]

    def _make_folders(self, name: str, parts: list[str]) -> Path:
        """One by one: what is there must be a folder, and none of ours is a link before `make_links`."""
        folder = self._root
        for part in parts:
            folder /= part
            mode = _mode(folder)
            if mode == 0:
                folder.mkdir()
                folder.chmod(0o755)
            elif not stat.S_ISDIR(mode):
                raise self.refused(
                    name, "needs a folder where another member is a file or a link", "rename one of the two"
                )
        return folder

    def _through_link(self, parts: list[str]) -> bool:
        return bool(self._links) and any("/".join(parts[:end]) in self._links for end in range(1, len(parts) + 1))

    def _count_written(self, count: int) -> None:
        self._written_bytes += count
        if self._written_bytes > self._limits.size_max_bytes:
            raise _LimitError(
                f"unpacks to more than {self._limits.size_max_bytes} bytes", "give the model's folder instead"
            )
        self.count_decompressed(self._written_bytes)

    def _twice(self, name: str) -> ArchiveRefusedError:
        return self.refused(name, "is there twice", "pack each file once, each under a name of its own")


@contextmanager
def _breakage_named(archive: str) -> Iterator[None]:
    """Turn what the standard library raises for odd bytes into errors that name the archive."""
    try:
        yield
    except FetchError:
        raise
    except _LimitError as error:
        raise ArchiveRefusedError(f"the archive {archive} {error.cause}", error.fix) from error
    except RecursionError as error:
        raise ArchiveRefusedError(
            f"the archive {archive} has headers of headers without end", "pack it without extended attributes"
        ) from error
    except (
        tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, gzip.BadGzipFile, EOFError, UnicodeError,
        NotImplementedError, ValueError, OverflowError, struct.error,
    ) as error:  # fmt: skip
        raise _broken(archive, str(error)) from error
    except OSError as error:
        # bz2 reports damage without a number; zipfile seeks to wherever a damaged table of contents says.
        if error.errno not in (None, errno.EINVAL):
            raise
        raise _broken(archive, str(error)) from error


def _broken(archive: str, reason: str) -> ArchiveBrokenError:
    return ArchiveBrokenError(
        f"the archive {archive} can't be read ({_plain(reason)})",
        "check that it is a whole .tar, .tar.gz, .tar.bz2, .tar.xz or .zip file, and pack it anew if it isn't",
    )


def _mode(path: Path) -> int:
    """The mode of what lies at the path itself; 0 if nothing does."""
    try:
        return path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _plain(text: str) -> str:
    line = "".join(character if character.isprintable() else "?" for character in text)
    return line if len(line) <= _SHOWN_CHARACTERS else line[: _SHOWN_CHARACTERS - 1] + "…"


def _shown(name: str) -> str:
    """A stranger's name in quotes, escaped and short."""
    return _plain(repr(name))
