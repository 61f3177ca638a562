"""Fetch an object, or every object below a prefix, from an S3 or Google Cloud store. Network and disk.

Parts of all files are asked for in order, a few at once, and written in order: what is on disk is always the beginning
of the whole, which makes a killed run resumable, hashing a by-product, and memory PARTS_AT_ONCE x PART_BYTES.
"""

import hashlib
import json
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from urllib.parse import urlsplit

from conch.storage.archive import Limits
from conch.storage.connection import authority_of
from conch.storage.credentials import MountedSecret, require_aws_identity
from conch.storage.digest import hash_into, lines_digest
from conch.storage.download import Clock, Log, Patience, Progress
from conch.storage.errors import (
    DigestMismatchError,
    FetchError,
    PlanInvalidError,
    SourceRefusedError,
    SourceStalledError,
    WrongLayoutError,
)
from conch.storage.plan import PlannedModel
from conch.storage.space import require_room
from conch.storage.store_failures import (
    DEFAULT_REGION,
    ChangedError,
    PassingError,
    connection_cause,
    explained,
)

if TYPE_CHECKING:
    from hashlib import _Hash

PART_BYTES: Final = 4 << 20
PARTS_AT_ONCE: Final = 8

_CHUNK_BYTES: Final = 256 << 10
_PART_TIMEOUT_S: Final = 600.0
_CHANGES_MAX: Final = 3
_LIES: Final = "the store, or a proxy on the way to it, is wrong about lengths; use another"
_SEGMENT_MAX_BYTES: Final = 255

_Result = TypeVar("_Result")


class Store(Protocol):
    """The part of obstore's stores that is used here."""

    def get(self, path: str, /, *, options: Any = None) -> Any:
        """One object, or a range of it; its body comes as a stream."""

    def list(self, prefix: str | None = None) -> Any:
        """Every object below a prefix, in batches."""


@dataclass(frozen=True)
class Listed:
    """One object: `relative` to the prefix (empty for the object that the URI names), `key` in the bucket."""

    relative: str
    key: str
    size_bytes: int
    etag: str | None
    modified: str


@dataclass(frozen=True)
class Fetched:
    """What came: `path` is a file or a folder, `digest` the file's or the tree's."""

    path: Path
    is_folder: bool
    digest: str
    size_bytes: int


@dataclass
class _Part:
    file: Listed
    start: int
    end: int


@dataclass
class _Tree:
    """The files so far on disk. One thread writes, in the order of `files`."""

    root: Path
    files: list[Listed]
    hexadecimal: dict[str, str] = field(default_factory=dict)
    resumed: bool = False

    def place(self, file: Listed) -> Path:
        return self.root / "tree" / file.relative if file.relative else self.root / "file"


def open_store(model: PlannedModel, ca_file: Path | None, patience: Patience) -> Store:
    """The bucket of an s3 or gs source, with the source's credentials. Raises FetchError."""
    # Late: this is a shared object of 16 MiB, which other sources don't need.
    from obstore.store import GCSStore, S3Store

    bucket = urlsplit(str(model.uri)).netloc
    options: Any = {
        "user_agent": "conch-fetch",
        "allow_http": str(model.endpoint).startswith("http://"),
        "connect_timeout": f"{round(patience.connect_timeout_s * 1000)}ms",
        "read_timeout": f"{round(patience.stall_timeout_s * 1000)}ms",
        "timeout": f"{round(max(_PART_TIMEOUT_S, patience.stall_timeout_s))}s",
    }
    roots = [authority_of(model), None if ca_file is None else _authorities(ca_file)]
    if any(roots):
        options["root_certificate"] = "\n".join(text for text in roots if text)
    if model.proxy is not None:
        options |= {
            "proxy_url": model.proxy,
            "proxy_excludes": "169.254.169.254,169.254.170.23,metadata.google.internal",
        }
    # Trying again is done here, where it is logged and counted.
    settings: Any = {"client_options": options, "retry_config": {"max_retries": 0}}
    kind, config = (S3Store, _s3_config(model)) if model.scheme == "s3" else (GCSStore, _gs_config(model))
    try:
        store: Store = kind(bucket, config=config, **settings)
    except Exception as error:  # noqa: BLE001 - the library has no narrower one, and its words may quote a key
        raise SourceRefusedError(
            f"{model.uri} can't be reached with these settings ({type(error).__name__})",
            f"correct {model.at('source')} and the Secret of its secretRef",
        ) from None
    return store


def _authorities(ca_file: Path) -> str:
    try:
        return ca_file.read_text(encoding="ascii")
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it isn't text"
        raise PlanInvalidError(
            f"--ca-file {ca_file} can't be used ({cause})", "give a PEM file of certificates"
        ) from error


def _s3_config(model: PlannedModel) -> Any:
    config: dict[str, Any] = {"region": model.region or DEFAULT_REGION}
    if model.endpoint is not None:
        config["endpoint"] = model.endpoint
    if model.secret is not None:
        keys = MountedSecret(Path(model.secret), model.at("source")).s3_keys()
        config |= {"access_key_id": keys.access_key_id, "secret_access_key": keys.secret_access_key}
        if keys.session_token is not None:
            config["session_token"] = keys.session_token
    elif model.identity == "ServiceAccount":
        require_aws_identity(model.at("source"))
    else:
        config["skip_signature"] = True
    return config


def _gs_config(model: PlannedModel) -> Any:
    config: dict[str, Any] = {}
    if model.endpoint is not None:
        config["base_url"] = model.endpoint
    if model.secret is not None:
        config["service_account_key"] = MountedSecret(Path(model.secret), model.at("source")).gs_key()
    elif model.identity == "Anonymous":
        config["skip_signature"] = True
    return config


class ObjectFetcher:
    """Fetches one model from its bucket."""

    def __init__(
        self,
        store: Store,
        model: PlannedModel,
        patience: Patience,
        *,
        clock: Clock,
        jitter: Callable[[], float],
        log: Log,
        limits: Limits,
    ) -> None:
        """`jitter` gives numbers from 0 to 1, such as random.random."""
        self._store = store
        self._model = model
        self._uri = str(model.uri)
        self._key = urlsplit(self._uri).path.strip("/")
        self._patience = patience
        self._clock = clock
        self._jitter = jitter
        self._log = log
        self._limits = limits
        self._stop = threading.Event()
        self._deadline_s = clock.monotonic() + patience.total_timeout_s

    def fetch(self, downloads: Path) -> Fetched:
        """Everything, verified, in a file or a folder below `downloads`, where a killed run is continued.

        Raises SourceRefusedError, DigestMismatchError, SourceStalledError, DiskFullError, WrongLayoutError, and
        OSError for the disk.
        """
        for _ in range(_CHANGES_MAX):
            files = self._patiently(self._find)
            tree = self._tree(downloads, files)
            try:
                self._download(tree)
            except ChangedError:
                self._log.warning("restarting", source=self._uri, cause="the source was changed meanwhile")
                continue
            fetched = self._fetched(tree)
            if self._model.digest in (None, fetched.digest):
                return fetched
            shutil.rmtree(tree.root)
            if tree.resumed:
                self._log.warning("restarting", source=self._uri, cause="the joined parts have another digest")
                continue
            kind = "folder" if fetched.is_folder else "object"
            raise DigestMismatchError(
                f"the {kind} {self._uri} has digest {fetched.digest} ({fetched.size_bytes} bytes), not "
                f"{self._model.digest}",
                f"correct {self._model.at('source.digest')}, or the source if it was changed",
            )
        raise SourceStalledError(
            f"{self._uri} was changed {_CHANGES_MAX} times during the download",
            "wait until its upload is done, or name a source that stays",
        )

    def _find(self) -> list[Listed]:
        """The object itself, or what is below the prefix, in the order of the paths."""
        if not self._uri.endswith("/"):
            try:
                # Not HEAD: its answer has no body, which alone tells a missing bucket from a missing object.
                meta = self._store.get(self._key).meta
            except FileNotFoundError as error:
                self._refuse_missing_bucket(error)
            else:
                return [Listed("", self._key, int(meta["size"]), meta.get("e_tag"), str(meta.get("last_modified")))]
        found: list[Listed] = []
        for batch in self._store.list(f"{self._key}/"):
            for meta in batch:
                relative = str(meta["path"])[len(self._key) + 1 :]
                found.append(
                    Listed(
                        relative,
                        str(meta["path"]),
                        int(meta["size"]),
                        meta.get("e_tag"),
                        str(meta.get("last_modified")),
                    )
                )
            if len(found) > self._limits.files_max:
                raise WrongLayoutError(
                    f"{self._uri} holds more than {self._limits.files_max} objects",
                    f"name the model's own prefix in {self._model.at('source.uri')}",
                )
        files = _without_markers(found)
        if not files:
            raise SourceRefusedError(
                f"{self._uri} is no object, and there is none below it", f"correct {self._model.at('source.uri')}"
            )
        folders = _folders(files)
        for file in files:
            self._check_name(file)
            if file.relative in folders:
                raise WrongLayoutError(
                    f"the object {file.key[:200]!r} is also the beginning of other objects' names, so it would be a "
                    "file and a folder at once",
                    "rename it, or what is below it, in the bucket",
                )
        return sorted(files, key=lambda file: file.relative)

    def _check_name(self, file: Listed) -> None:
        parts = file.relative.split("/")
        too_long = any(len(part.encode()) > _SEGMENT_MAX_BYTES for part in parts)
        if too_long or not file.relative.isprintable() or "\\" in file.relative or {"", ".", ".."} & set(parts):
            raise WrongLayoutError(
                f"the object {file.key[:200]!r} can't be a file of that name", "rename the object in the bucket"
            )

    def _refuse_missing_bucket(self, error: FileNotFoundError) -> None:
        if "<Code>NoSuchBucket" in str(error):
            self._passing(error)

    def _tree(self, downloads: Path, files: list[Listed]) -> _Tree:
        """The folder of exactly these objects. What was begun of others under the same URI is thrown away."""
        source = hashlib.sha256(f"{self._model.endpoint}\n{self._uri}".encode()).hexdigest()[:32]
        described = json.dumps([[file.relative, file.size_bytes, file.etag, file.modified] for file in files])
        root = downloads / f"{source}.{hashlib.sha256(described.encode()).hexdigest()[:32]}.objects"
        for other in downloads.glob(f"{source}.*.objects"):
            if other != root:
                shutil.rmtree(other)
        root.mkdir(exist_ok=True)
        return _Tree(root, files)

    def _download(self, tree: _Tree) -> None:
        total_bytes = sum(file.size_bytes for file in tree.files)
        present_bytes = sum(_size(tree.place(file)) for file in tree.files)
        if present_bytes:
            tree.resumed = True
            self._log.info("resuming", source=self._uri, bytes_present=present_bytes)
        require_room(tree.root, total_bytes - present_bytes)
        progress = Progress(self._uri, self._clock, self._log)
        writer = _Writer(tree, progress, total_bytes)
        self._stop.clear()
        pool = ThreadPoolExecutor(PARTS_AT_ONCE, "part")
        pending: deque[tuple[_Part, bytearray, Future[None]]] = deque()
        # Used again and again: given back and asked for anew, their memory would scatter over the threads' heaps.
        free = [bytearray(PART_BYTES) for _ in range(PARTS_AT_ONCE)]

        def write_oldest() -> None:
            part, buffer, received = pending.popleft()
            received.result()
            writer.write(part, memoryview(buffer)[: part.end - part.start])
            free.append(buffer)

        try:
            for part in writer.missing_parts():
                if not free:
                    write_oldest()
                buffer = free.pop()
                pending.append((part, buffer, pool.submit(self._receive_part, part, buffer)))
            while pending:
                write_oldest()
        finally:
            writer.close()
            self._stop.set()
            pool.shutdown(wait=True, cancel_futures=True)

    def _receive_part(self, part: _Part, buffer: bytearray) -> None:
        """Fill the buffer's beginning with the part; what came before a drop isn't asked for again."""
        filled = 0

        def attempt() -> None:
            nonlocal filled
            while filled < part.end - part.start:
                filled = self._receive(part, buffer, filled)

        def further() -> int:
            return filled

        self._patiently(attempt, further)

    def _receive(self, part: _Part, buffer: bytearray, filled: int) -> int:
        """One request; the new count of filled bytes, also after a drop that got further."""
        options: dict[str, Any] = {"range": (part.start + filled, part.end)}
        if part.file.etag is not None:
            options["if_match"] = part.file.etag
        began = filled
        try:
            for chunk in self._store.get(part.file.key, options=options).stream(min_chunk_size=_CHUNK_BYTES):
                filled = self._keep(memoryview(chunk), buffer, filled, part.end - part.start)
        except (FetchError, PassingError):
            raise
        except Exception as error:
            if filled == began:
                raise
            cause = connection_cause(str(error), self._patience.stall_timeout_s)
            self._log.warning("reconnecting", source=self._uri, key=part.file.key, cause=cause)
            return filled
        if filled < part.end - part.start:
            raise PassingError("the store sent less than was asked for", _LIES)
        return filled

    def _keep(self, chunk: memoryview, buffer: bytearray, filled: int, wanted_bytes: int) -> int:
        if filled + len(chunk) > wanted_bytes:
            raise PassingError("the store sent more than was asked for", _LIES)
        buffer[filled : filled + len(chunk)] = chunk
        if self._stop.is_set():
            raise SourceStalledError(f"{self._uri} was given up", "see what failed first")
        if self._clock.monotonic() >= self._deadline_s:
            raise self._too_long()
        return filled + len(chunk)

    def _patiently(self, action: Callable[[], _Result], further: Callable[[], int] = lambda: 0) -> _Result:
        """Try again as long as it helps. Raises FetchError and ChangedError."""
        fruitless, reached = 0, further()
        while True:
            try:
                return action()
            except (FetchError, ChangedError):
                raise
            except PassingError as error:
                passing = error
            except Exception as error:  # noqa: BLE001 - what the store's library raises is sorted there
                passing = self._passing(error)
            fruitless = 1 if further() > reached else fruitless + 1
            reached = further()
            self._back_off(passing, fruitless)

    def _passing(self, error: Exception) -> PassingError:
        meaning = explained(error, self._model, stall_timeout_s=self._patience.stall_timeout_s)
        if isinstance(meaning, PassingError):
            return meaning
        # Not from the error: its text may quote what was sent.
        raise meaning from None

    def _back_off(self, passing: PassingError, fruitless: int) -> None:
        patience = self._patience
        if fruitless >= patience.attempts:
            raise SourceStalledError(
                f"{self._uri} failed {fruitless} times in a row, the last time because {passing.cause}",
                passing.fix,
            )
        if self._stop.is_set():
            raise SourceStalledError(f"{self._uri} was given up", "see what failed first")
        wait_s = min(patience.backoff_max_s, patience.backoff_s * 2.0 ** (fruitless - 1)) * (0.5 + self._jitter() / 2)
        if self._clock.monotonic() + wait_s >= self._deadline_s:
            raise self._too_long()
        self._log.warning("retrying", source=self._uri, cause=passing.cause, wait_s=round(wait_s, 2))
        self._clock.sleep(wait_s)

    def _fetched(self, tree: _Tree) -> Fetched:
        is_folder = bool(tree.files[0].relative)
        hexadecimal = tree.hexadecimal
        digest = lines_digest(hexadecimal) if is_folder else f"sha256:{hexadecimal['']}"
        path = tree.root / ("tree" if is_folder else "file")
        return Fetched(path, is_folder, digest, sum(file.size_bytes for file in tree.files))

    def _too_long(self) -> SourceStalledError:
        return SourceStalledError(
            f"{self._uri} is not complete after {self._patience.total_timeout_s:g} s", "use a faster source"
        )


class _Writer:
    """Writes parts in their order, hashing them as they pass."""

    def __init__(self, tree: _Tree, progress: Progress, total_bytes: int) -> None:
        self._tree = tree
        self._progress = progress
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._file: Any = None
        self._hasher: _Hash = hashlib.sha256()
        self._hashers: dict[str, _Hash] = {}

    def missing_parts(self) -> Iterator[_Part]:
        """What isn't on disk yet. What is there is hashed on the way."""
        for file in self._tree.files:
            place = self._tree.place(file)
            place.parent.mkdir(parents=True, exist_ok=True)
            hasher = hashlib.sha256()
            present = _size(place)
            if present > file.size_bytes:
                place.unlink()
                present = 0
            if present:
                hash_into(hasher, place, self._progress.verified)
                self._done_bytes += present
            self._hashers[file.relative] = hasher
            if present == file.size_bytes:
                place.touch()
                self._tree.hexadecimal[file.relative] = hasher.hexdigest()
                continue
            for start in range(present, file.size_bytes, PART_BYTES):
                yield _Part(file, start, min(start + PART_BYTES, file.size_bytes))

    def write(self, part: _Part, view: memoryview) -> None:
        """Raises OSError."""
        file = part.file
        if self._file is None:
            # Unbuffered: a kill loses nothing that was counted.
            self._file = self._tree.place(file).open("ab", buffering=0)
        hasher = self._hashers[file.relative]
        while view:
            written = self._file.write(view)
            hasher.update(view[:written])
            self._done_bytes += written
            view = view[written:]
        self._progress.received(self._done_bytes, self._total_bytes)
        if part.end == file.size_bytes:
            self.close()
            self._tree.hexadecimal[file.relative] = self._hashers.pop(file.relative).hexdigest()

    def close(self) -> None:
        """Let go of the file that is being written."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _without_markers(found: list[Listed]) -> list[Listed]:
    """Without the empty objects that consoles make for folders; the library drops the slash at their end."""
    folders = {"", *_folders(found)}
    return [file for file in found if file.relative not in folders or file.size_bytes]


def _folders(files: list[Listed]) -> set[str]:
    """Every path that is a beginning of another one."""
    found: set[str] = set()
    for file in files:
        parts = file.relative.split("/")
        found.update("/".join(parts[:count]) for count in range(1, len(parts)))
    return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
