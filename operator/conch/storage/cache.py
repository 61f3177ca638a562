"""A cache of verified models on the node or on a shared claim, keyed by digest. Reads and writes one folder.

How a model gets from here to Triton
    As a copy, into the pod's own volume, always; a clone that shares its blocks where the file system can (XFS, Btrfs
    and bcachefs, also across mounts since Linux 5.18). The other ways were weighed:

    - Hard links: a container sees the cache and the pod's emptyDir as two mounts, and the kernel refuses a hard link
      across mounts even if one file system is behind both.
    - Symbolic links into the cache, mounted in Triton's container too: Triton reads a model long after the init
      container ended, and again whenever its container restarts, which runs no init container. The entry would have to
      outlive the pod, yet nothing on the node tells this process which pods still live. A lease that is renewed needs
      a process per pod for its whole life; a lease that isn't renewed takes a serving pod's model away after some
      restart. And user code in Triton's container could see every cached model of the node.

    So an entry is in use only while a process copies it. Once the copy is there nothing in the cache matters to the
    pod any more: entries can go, the volume can fail, the claim can be deleted. The price is a copy at the disk's
    speed, which hashes the bytes as they pass, and the same room in the pod's volume that a download takes.

What makes it safe
    Locks save work; they never decide what is right. Entries appear and disappear by one rename. What is copied is
    compared with the digest, or, where it was cloned, with the sizes and times that were noted when it was written. A
    file system without locks costs a download too many, or an entry that goes while it is copied, which is then a
    miss. A cache that is full, read-only, damaged or slow to lock is a miss and a warning, never a failed start.

On disk, below `v1/`
    entries/<hex>/        `content` (a file or a folder), `entry.json` (its marker), `used` (its time is the last use);
                          and `owner`, of no use any more.
    building/<hex>.<bytes>.<random>/  an entry in the making; its file `owner` is locked as long as its writer lives, so
                          what a killed writer left is told from what is being written. `….gone`: being removed.
    locks/                one per 1/4096 of all digests, held while that model is downloaded: a second pod waits for
                          the first one's copy as long as the holder shows signs of life (the lock file's time moves).
    space.lock            held for the moment in which room is counted, made and reserved.

Whoever can write the folder can replace models that are cloned out of it, unless `verification` is "Full"; copies are
always hashed. What was unpacked from an archive or an OCI artifact has a digest of its own, which stands in the folder
too, so against a stranger who writes there neither helps. On a node's folder each namespace has a part of its own, so
that a digest, which is no secret, opens no other team's models; Triton's container mounts nothing of it.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from conch.names import CACHE_TENANT_VARIABLE
from conch.storage.boot import boot_name
from conch.storage.digest import CHUNK_BYTES, file_digest, lines_digest
from conch.storage.download import Clock, Log
from conch.storage.errors import FetchError
from conch.storage.layout import TreeFile, walk
from conch.storage.plan import PlannedCache

_FORMAT: Final = "v1"
_FICLONE: Final = 0x40049409
"""ioctl that makes a file share another one's blocks; the number is the same on x86-64 and arm64."""
_NO_LOCKS: Final = frozenset((errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL))
_FOLDER_MODE: Final = 0o775
_LOCK_MODE: Final = 0o664
_MARKER_MAX_BYTES: Final = 32 << 20
_LEFTOVER_AGE_S: Final = 24 * 3600.0
NODE_RESERVE: Final = 0.15
"""The part of the node's disk that stays free: at 10 to 15 % the kubelet begins to evict pods."""

_CHECK_VOLUME: Final = "check that the cache's volume has room and may be written by the pod's user or group"
_TENANT: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")

Verification = Literal["Marker", "Full"]


@dataclass(frozen=True)
class CachePatience:
    """How long to wait for others, in seconds.

    `sign_of_life_s`: another process that downloads the same model and shows none for so long is given up.
    """

    sign_of_life_s: float = 60.0
    total_s: float = 6 * 3600.0
    space_s: float = 20.0
    heartbeat_s: float = 5.0
    poll_s: float = 0.25


def open_cache(
    planned: PlannedCache | None, environment: Mapping[str, str], *, clock: Clock, log: Log
) -> "ModelCache | None":
    """The cache that the plan names, in the namespace's own part of it where the environment tells one."""
    if planned is None:
        return None
    tenant = environment.get(CACHE_TENANT_VARIABLE, "")
    if not _TENANT.fullmatch(tenant):
        tenant = ""
    return ModelCache(Path(planned.path) / tenant, planned.size_bytes, clock=clock, log=log)


class _BusyError(Exception):
    """Somebody else holds the lock."""


class _DamagedError(Exception):
    """An entry isn't what its marker says."""


@dataclass(frozen=True)
class _Marker:
    """What an entry holds. `content` is the content's own digest; `files`: relative path → size in bytes, mtime in ns.

    `boot` is the kernel's boot at which it was written: after a crash of the node a file may have its size and time
    but not all of its bytes.
    """

    key: str
    content: str
    is_folder: bool
    size_bytes: int
    boot: str
    files: dict[str, tuple[int, int]]

    def to_json(self) -> str:
        return json.dumps(
            {
                "key": self.key,
                "content": self.content,
                "isFolder": self.is_folder,
                "sizeBytes": self.size_bytes,
                "boot": self.boot,
                "files": self.files,
            }
        )

    @classmethod
    def read(cls, entry: Path) -> "_Marker":
        """Raises _DamagedError, and OSError if there is none."""
        with (entry / "entry.json").open("rb") as file:
            raw = file.read(_MARKER_MAX_BYTES)
        try:
            found: dict[str, Any] = json.loads(raw)
            files = {str(name): (int(size), int(time_ns)) for name, (size, time_ns) in found["files"].items()}
            texts = (str(found["key"]), str(found["content"]))
            return cls(*texts, bool(found["isFolder"]), int(found["sizeBytes"]), str(found["boot"]), files)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _DamagedError("its marker can't be read") from error


class ModelCache:
    """Verified models by digest. Nothing here raises because of the cache itself: it warns and does without.

    One object may be used by several threads at once.
    """

    def __init__(
        self,
        root: Path,
        size_max_bytes: int,
        *,
        clock: Clock,
        log: Log,
        patience: CachePatience | None = None,
        verification: Verification = "Marker",
        node_reserve: float = NODE_RESERVE,
    ) -> None:
        """`root` is the mounted folder. "Full" hashes clones too, which reads each model once before Triton does.

        `node_reserve`: the part of the disk that stays free where cache and content share one.
        """
        self._root = root / _FORMAT
        self._size_max_bytes = size_max_bytes
        self._clock = clock
        self._log = log
        self._patience = patience or CachePatience()
        self._verification = verification
        self._node_reserve = node_reserve
        self._boot = boot_name()
        self._can_lock = True
        self.trouble = ""
        """Why the cache wasn't used, or not for everything: the first cause, one sentence. Empty: there was none."""
        self._writable = self._prepare()

    def obtain(self, digest: str, place: Path, download: Callable[[], None], *, exact: bool = True) -> bool:
        """Fill `place` out of the cache, or by `download`, and keep what that brought. Whether it came from here.

        Of all pods that share the cache one downloads; the others wait for it as long as it lives.

        Args:
            digest: `sha256:<hex>`.
            place: a file or a folder to be; what lies there is replaced by what is cached, and left for `download`.
            download: fills `place` with verified content, or raises.
            exact: `digest` is that of the content (`digest.file_digest`, `digest.tree_digest`). False: it is of what
                the content was made from, such as an archive or an OCI manifest.

        Raises: what `download` raises.
        """
        if self.take(digest, place, exact=exact):
            return True
        with self.alone(digest) as waited:
            if waited and self.take(digest, place, exact=exact):
                return True
            download()
            self.keep(digest, place, exact=exact)
        return False

    def take(self, digest: str, place: Path, *, exact: bool = True) -> bool:
        """Put a verified copy of an entry at `place`; False if there is none."""
        entry = self._entry(digest, exact=exact)
        fresh = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
        try:
            with self._lock(entry / "entry.json", exclusive=False, create=False):
                started_s = self._clock.monotonic()
                marker = _Marker.read(entry)
                try:
                    how = self._copy_out(entry, marker, digest, fresh, exact=exact)
                except FileNotFoundError as error:
                    if (entry / "entry.json").exists():
                        raise _DamagedError("a file is missing") from error
                    raise
                with suppress(OSError):
                    os.utime(entry / "used")
            if place.is_dir():
                shutil.rmtree(place)
            fresh.rename(place)
        except FileNotFoundError:
            # Never there, or removed by somebody who needed its room.
            return False
        except _BusyError:
            return False
        except _DamagedError as error:
            self._log.warning("dropping a damaged model from the cache", digest=digest, cause=str(error))
            self._drop_damaged(entry)
            return False
        except (OSError, FetchError) as error:
            self._warn("the model cache can't be read", digest=digest, cause=str(error), fix=_CHECK_VOLUME)
            return False
        finally:
            _remove(fresh)
        took_s = round(self._clock.monotonic() - started_s, 3)
        self._log.info("from the model cache", digest=digest, bytes=marker.size_bytes, how=how, seconds=took_s)
        return True

    def keep(self, digest: str, content: Path, *, exact: bool = True) -> bool:
        """Add a copy of verified content, dropping what was longest not used if room is needed. Whether it is there."""
        if not self._writable:
            return False
        entry = self._entry(digest, exact=exact)
        try:
            files = _files(content)
            size_bytes = sum(file.real.stat().st_size for file in files)
            if (entry / "entry.json").exists():
                return True
            with self._building(entry.name, size_bytes, content) as building:
                if building is None:
                    return False
                started_s = self._clock.monotonic()
                self._write(building, digest, content, files, exact=exact)
                try:
                    building.rename(entry)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
                    return True  # another pod was faster
        except _DamagedError as error:
            self._warn("not kept in the model cache", digest=digest, cause=str(error), fix=_CHECK_VOLUME)
            return False
        except (OSError, FetchError, _BusyError) as error:
            cause = str(error) or "another process holds its lock"
            self._warn("not kept in the model cache", digest=digest, cause=cause, fix=_CHECK_VOLUME)
            return False
        took_s = round(self._clock.monotonic() - started_s, 3)
        self._log.info("kept in the model cache", digest=digest, bytes=size_bytes, seconds=took_s)
        return True

    @contextmanager
    def alone(self, digest: str) -> Iterator[bool]:
        """Hold off other processes that want to download this model. Gives whether it had to wait.

        The wait ends when the holder is done or killed, or shows no sign of life; then, and where locks don't work,
        this goes on without.
        """
        if not self._writable:
            yield False
            return
        path = self._root / "locks" / f"{_hexadecimal(digest)[:3]}.lock"
        handle, waited = self._wait_for(path, digest)
        stop = threading.Event()
        beat = threading.Thread(target=self._beat, args=(path, stop), daemon=True)
        try:
            if handle is not None:
                beat.start()
            yield waited
        finally:
            stop.set()
            if handle is not None:
                beat.join()
                os.close(handle)

    def _prepare(self) -> bool:
        try:
            for folder in (
                self._root.parent,
                self._root,
                *(self._root / name for name in ("entries", "building", "locks")),
            ):
                if not folder.is_dir():
                    folder.mkdir(exist_ok=True)
                    folder.chmod(_FOLDER_MODE)
            probe = self._root / "building" / f"probe.0.{secrets.token_hex(8)}.gone"
            probe.mkdir()
            probe.rmdir()
        except OSError as error:
            self._warn(
                "the model cache can't be written; what is in it is used, nothing is added",
                folder=str(self._root.parent),
                cause=error.strerror,
                fix=f"make the folder of runtime.modelCache writable for user {os.geteuid()} or group {os.getegid()}, "
                "or remove runtime.modelCache",
            )
            return False
        return True

    def _warn(self, sentence: str, *, cause: str | None, fix: str, **fields: object) -> None:
        self._log.warning(sentence, **fields, cause=cause, fix=fix)
        self.trouble = self.trouble or f"{sentence} ({cause}): {fix}"

    def _entry(self, digest: str, *, exact: bool) -> Path:
        return self._root / "entries" / (_hexadecimal(digest) + ("" if exact else "-made"))

    def _copy_out(self, entry: Path, marker: _Marker, digest: str, fresh: Path, *, exact: bool) -> str:
        """Copy and verify. Returns how it was done. Raises _DamagedError."""
        if marker.key != digest or (exact and marker.content != digest):
            raise _DamagedError("its marker is of another digest")
        content = entry / "content"
        if content.is_dir() != marker.is_folder:
            raise _DamagedError("its content is of another kind")
        files = _files(content)
        if _stamps(files) != marker.files:
            raise _DamagedError("sizes or times aren't what they were when it was written")
        hashes, cloned = _copy(content, files, fresh, is_folder=marker.is_folder)
        trusted = cloned and self._verification == "Marker" and marker.boot == self._boot
        if not trusted:
            found = _digest_of(hashes, fresh, is_folder=marker.is_folder)
            if found != marker.content:
                raise _DamagedError(f"its digest is {found}")
        return "cloned" if cloned else "copied"

    def _write(self, building: Path, digest: str, content: Path, files: list[TreeFile], *, exact: bool) -> None:
        is_folder = content.is_dir()
        place = building / "content"
        hashes, cloned = _copy(content, files, place, is_folder=is_folder)
        # What was cloned is what the caller verified a moment ago; other bytes went through here, so they are compared.
        found = digest if exact and cloned else _digest_of(hashes, place, is_folder=is_folder)
        if exact and found != digest:
            raise _DamagedError(f"the copy's digest is {found}")
        stamps = _stamps(_files(place))
        size_bytes = sum(size for size, _ in stamps.values())
        marker = _Marker(digest, found, is_folder, size_bytes, self._boot, stamps)
        (building / "entry.json").write_text(marker.to_json(), encoding="utf-8")
        for name in ("entry.json", "used"):
            (building / name).touch()
            (building / name).chmod(_LOCK_MODE)

    @contextmanager
    def _building(self, name: str, size_bytes: int, content: Path) -> Iterator[Path | None]:
        """A folder with room reserved for it, removed afterwards unless it was renamed; None: there is no room."""
        place = self._root / "building" / f"{name}.{size_bytes}.{secrets.token_hex(8)}"
        with self._lock(self._root / "space.lock", exclusive=True, wait_s=self._patience.space_s):
            if not self._make_room(size_bytes, content):
                yield None
                return
            place.mkdir()
            place.chmod(_FOLDER_MODE)
            # Nobody can see the folder unlocked: collecting leftovers needs the lock of the space.
            owner = self._open_locked(place / "owner", exclusive=True, create=True)
        try:
            yield place
        finally:
            _remove(place)
            os.close(owner)

    def _make_room(self, size_bytes: int, content: Path) -> bool:
        """Collect leftovers, then drop entries until the new one fits. Holds the space lock."""
        reserved_bytes = self._collect_leftovers()
        entries = self._entries()
        kept_bytes = sum(size for _, _, size in entries)
        free_min_bytes = self._free_min_bytes(content)
        # Where dropping everything would not be enough, dropping anything helps nobody.
        droppable = sorted(entries)
        if (
            reserved_bytes + size_bytes > self._size_max_bytes
            or _free_bytes(self._root) + kept_bytes - size_bytes < free_min_bytes
        ):
            droppable = []
        for _, entry, entry_bytes in [*droppable, (0, None, 0)]:
            lacking = kept_bytes + reserved_bytes + size_bytes > self._size_max_bytes
            if not lacking and _free_bytes(self._root) - size_bytes >= free_min_bytes:
                return True
            if entry is not None and self._drop(entry):
                kept_bytes -= entry_bytes
                self._log.info("dropped from the model cache", entry=entry.name, bytes=entry_bytes)
        # No figure that changes from pod to pod: the operator makes an Event of it, and one is enough for all.
        full = kept_bytes + reserved_bytes + size_bytes > self._size_max_bytes
        self._warn(
            "not kept in the model cache: no room",
            bytes=size_bytes,
            limit_bytes=self._size_max_bytes,
            free_bytes=_free_bytes(self._root),
            cause="its size would be exceeded" if full else "too little is free on its volume",
            fix="raise runtime.modelCache.size, or give the cache a larger volume",
        )
        return False

    def _free_min_bytes(self, content: Path) -> int:
        """On the pod's own disk, which is the node's, enough stays free for the kubelet not to evict pods."""
        if self._root.stat().st_dev != content.stat().st_dev:
            return 0
        volume = os.statvfs(self._root)
        return int(volume.f_blocks * volume.f_frsize * self._node_reserve)

    def _entries(self) -> list[tuple[int, Path, int]]:
        """Last use in ns, place and size of every entry; damaged ones are dropped."""
        found = []
        for entry in (self._root / "entries").iterdir():
            try:
                size_bytes = _Marker.read(entry).size_bytes
                found.append(((entry / "used").stat().st_mtime_ns, entry, size_bytes))
            except (_DamagedError, OSError) as error:
                self._log.warning("dropping a damaged model from the cache", entry=entry.name, cause=str(error))
                self._drop(entry)
        return found

    def _collect_leftovers(self) -> int:
        """Remove what killed writers left; the bytes that living ones have reserved. Holds the space lock."""
        reserved_bytes = 0
        for place in (self._root / "building").iterdir():
            size = place.name.split(".")[1] if place.name.count(".") >= 2 else ""  # noqa: PLR2004  # the name's parts
            if not place.name.endswith(".gone") and self._is_alive(place / "owner"):
                reserved_bytes += int(size) if size.isascii() and size.isdigit() else 0
                continue
            _remove(place)
        return reserved_bytes

    def _is_alive(self, owner: Path) -> bool:
        try:
            with self._lock(owner, exclusive=True, create=False):
                # Without locks only age can tell. Both times are of the file system, whatever the nodes' clocks say.
                os.utime(self._root / "space.lock")
                age_s = (self._root / "space.lock").stat().st_mtime - owner.stat().st_mtime
                return not self._can_lock and age_s < _LEFTOVER_AGE_S
        except _BusyError:
            return True
        except OSError:
            return False

    def _drop_damaged(self, entry: Path) -> None:
        if self._writable:
            with suppress(OSError):
                self._drop(entry)

    def _drop(self, entry: Path) -> bool:
        """Remove an entry unless somebody copies it. It disappears by one rename. Raises OSError."""
        gone = self._root / "building" / f"{entry.name}.0.{secrets.token_hex(8)}.gone"
        try:
            with self._lock(entry / "entry.json", exclusive=True, create=False):
                entry.rename(gone)
        except _BusyError:
            return False
        except FileNotFoundError:
            # Without a marker, so nobody copies it; or gone already.
            with suppress(FileNotFoundError):
                entry.rename(gone)
        _remove(gone)
        return True

    def _wait_for(self, path: Path, digest: str) -> tuple[int | None, bool]:
        """The lock's handle, or None if it can't be had; and whether somebody else held it."""
        started_s = changed_s = self._clock.monotonic()
        seen_ns, waited = -1, False
        while True:
            try:
                return self._open_locked(path, exclusive=True, create=True), waited
            except _BusyError:
                pass
            except OSError as error:
                self._warn("the model cache can't be locked", digest=digest, cause=str(error), fix=_CHECK_VOLUME)
                return None, waited
            if not waited:
                self._log.info("another pod downloads this model; waiting for it", digest=digest)
                waited = True
            now_s = self._clock.monotonic()
            mtime_ns = _mtime_ns(path)
            if mtime_ns != seen_ns:
                seen_ns, changed_s = mtime_ns, now_s
            if now_s - changed_s > self._patience.sign_of_life_s or now_s - started_s > self._patience.total_s:
                self._log.warning("the other pod shows no sign of life; going on without it", digest=digest)
                return None, waited
            self._clock.sleep(self._patience.poll_s)

    def _beat(self, path: Path, stop: threading.Event) -> None:
        while not stop.wait(self._patience.heartbeat_s):
            with suppress(OSError):
                os.utime(path)

    @contextmanager
    def _lock(self, path: Path, *, exclusive: bool, create: bool = True, wait_s: float = 0.0) -> Iterator[None]:
        """Raises _BusyError after `wait_s`, and OSError."""
        deadline_s = self._clock.monotonic() + wait_s
        while True:
            try:
                handle = self._open_locked(path, exclusive=exclusive, create=create)
                break
            except _BusyError:
                if self._clock.monotonic() >= deadline_s:
                    raise
                self._clock.sleep(min(self._patience.poll_s, wait_s))
        try:
            yield
        finally:
            os.close(handle)

    def _open_locked(self, path: Path, *, exclusive: bool, create: bool) -> int:
        """An open file with a lock on it, without waiting. Raises _BusyError and OSError."""
        # NFS wants a file that is open for writing for an exclusive lock; a read-only cache allows no such file.
        access = os.O_RDWR if exclusive else os.O_RDONLY
        handle = os.open(path, access | (os.O_CREAT if create else 0) | os.O_CLOEXEC | os.O_NOFOLLOW, _LOCK_MODE)
        if create:
            with suppress(OSError):  # whatever the umask: pods of the same group may run as several users
                os.fchmod(handle, _LOCK_MODE)
        try:
            fcntl.flock(handle, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise _BusyError from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(handle)
                raise
            if self._can_lock:
                self._can_lock = False
                self._log.warning("the model cache's file system has no locks; pods may download the same model twice")
        return handle


def _copy(content: Path, files: list[TreeFile], place: Path, *, is_folder: bool) -> tuple[dict[str, str | None], bool]:
    """Copy or clone files to a new place. Returns relative path → SHA-256 in hexadecimal (None: cloned); all cloned?

    Empty folders come along: a version's folder without a file is a fault that every pod should see.

    Raises OSError.
    """
    if is_folder:
        place.mkdir()
        place.chmod(0o755)
    hashes: dict[str, str | None] = {}
    for file in files:
        target = place / file.relative if is_folder else place
        if is_folder:
            _make_folders(place, target.parent)
        hashes[file.relative] = _copy_file(file.real, target)
    if is_folder:
        for folder, _, _ in os.walk(content):
            _make_folders(place, place / Path(folder).relative_to(content))
    return hashes, all(value is None for value in hashes.values())


def _make_folders(root: Path, folder: Path) -> None:
    if folder != root and not folder.is_dir():
        _make_folders(root, folder.parent)
        folder.mkdir()
        folder.chmod(0o755)


def _copy_file(source: Path, target: Path) -> str | None:
    with source.open("rb", buffering=0) as old, target.open("xb", buffering=0) as new:
        status = os.fstat(old.fileno())
        os.fchmod(new.fileno(), 0o755 if status.st_mode & stat.S_IXUSR else 0o644)
        try:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
        except OSError:
            pass
        else:
            return None
        hasher = hashlib.sha256()
        buffer = memoryview(bytearray(CHUNK_BYTES))
        while count := old.readinto(buffer):
            piece = buffer[:count]
            hasher.update(piece)
            while piece:
                piece = piece[new.write(piece) :]
        return hasher.hexdigest()


def _digest_of(hashes: dict[str, str | None], place: Path, *, is_folder: bool) -> str:
    """The digest of what was copied; what was cloned is hashed now. Raises OSError."""
    known = {
        name: value or file_digest(place / name if is_folder else place).removeprefix("sha256:")
        for name, value in hashes.items()
    }
    return lines_digest(known) if is_folder else f"sha256:{next(iter(known.values()))}"


def _files(content: Path) -> list[TreeFile]:
    """Every file of the content; a single file has no relative path. Raises OSError and FetchError, _DamagedError."""
    real = content.resolve(strict=True)
    if real.is_file():
        return [TreeFile("", real)]
    if not real.is_dir():
        raise _DamagedError("it is neither a file nor a folder")  # reading a pipe would never end
    return sorted(walk(real, real, content.name), key=lambda file: file.relative)


def _stamps(files: list[TreeFile]) -> dict[str, tuple[int, int]]:
    statuses = {file.relative: file.real.stat() for file in files}
    return {name: (status.st_size, status.st_mtime_ns) for name, status in statuses.items()}


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _free_bytes(folder: Path) -> int:
    volume = os.statvfs(folder)
    return volume.f_bavail * volume.f_frsize


def _mtime_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return -1


def _hexadecimal(digest: str) -> str:
    return digest.removeprefix("sha256:")
