"""`conch fetch`: carry out a plan. Reads the plan and the mounted sources, downloads, writes the repository.

For each model: out of the cache or from its source → digest → unpacked → arrangement checked → staged; all are shown
together at the end. What was downloaded stays until then, so that a run that was killed is continued by the next one.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from conch.storage.archive import Limits, unpack
from conch.storage.boot import boot_name
from conch.storage.cache import open_cache
from conch.storage.digest import file_digest, tree_digest
from conch.storage.download import Clock, Log, Progress
from conch.storage.errors import (
    DigestMismatchError,
    DiskFullError,
    FetchError,
    PlanInvalidError,
    SourceRefusedError,
    WrongLayoutError,
)
from conch.storage.layout import Source, arrange, inspect, located, walk
from conch.storage.plan import Plan, PlanError, PlannedModel
from conch.storage.remote import Fetcher, content_digest, digest_of_content, is_archive
from conch.storage.repository import Repository
from conch.storage.space import full_disk_explained

if TYPE_CHECKING:
    from collections.abc import Iterator

_TROUBLE_MAX: Final = 500
"""Characters; the whole message has to fit in 4096 bytes with what 16 models need."""
_LIBRARY: Final = re.compile(r"libtriton_.*\.so", re.DOTALL)

MakeFetcher = Callable[[float], Fetcher]
"""From the plan's stall time-out in seconds."""


@dataclass(frozen=True)
class Arrival:
    """How a model came. `origin`: Download, Cache (the node's), Present (an earlier run left it), Volume, None."""

    model: str
    origin: str
    size_bytes: int
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What a successful run brought. `cache_trouble`: why the model cache wasn't used as it should be; mostly empty."""

    arrivals: list[Arrival]
    cache_trouble: str


def summary(outcome: Outcome) -> str:
    """A successful run's termination message, one line of JSON of which the operator makes Events."""
    models: list[dict[str, object]] = [
        {
            "model": arrival.model,
            "origin": arrival.origin,
            "bytes": arrival.size_bytes,
            "seconds": round(arrival.seconds, 2),
        }
        for arrival in outcome.arrivals
    ]
    said: dict[str, object] = {"fetched": models}
    # A cache that is filled by others and only read is well used while it holds every model.
    if outcome.cache_trouble and any(arrival.origin == "Download" for arrival in outcome.arrivals):
        # JSON takes six bytes for each other character, and file systems choose some of the words.
        plain = (
            char if char.isascii() and char.isprintable() else "?" for char in outcome.cache_trouble[:_TROUBLE_MAX]
        )
        said["cache"] = "".join(plain)
    return json.dumps(said, separators=(",", ":"))


def read_plan(path: Path) -> Plan:
    """Raises PlanInvalidError."""
    try:
        return Plan.from_json(path.read_bytes())
    except OSError as error:
        raise PlanInvalidError(
            f"the plan {path} can't be read ({error.strerror})", "project the pod's plan annotation there"
        ) from error
    except PlanError as error:
        raise PlanInvalidError(
            f"the plan {path} is not valid: {error}", "use operator and fetch images of one release"
        ) from error


def carry_out(plan: Plan, into: Path, make_fetcher: MakeFetcher, *, clock: Clock, log: Log) -> Outcome:
    """Make `into` the model repository of the plan, or leave what is visible there as it was.

    Everything is verified before anything is shown; see `storage.repository`. Raises FetchError that names the model,
    and OSError for a disk that fails in other ways than being full.
    """
    run = _Run(plan, Repository(into), make_fetcher(plan.stall_timeout_seconds), clock, log)
    with full_disk_explained():
        run.repository.prepare()
    arrivals = []
    # Mounted sources first: a wrong layout there should not show only after an hour of downloading.
    for model in sorted(plan.models, key=lambda model: model.remote):
        started_s = clock.monotonic()
        with _naming(model):
            origin, size_bytes = run.stage_with_room(model)
        arrivals.append(Arrival(model.name, origin, size_bytes, clock.monotonic() - started_s))
        log.info("verified", model=model.name, origin=origin)
    with full_disk_explained():
        run.repository.show(plan.models)
    for stranger in run.repository.strangers(plan.models):
        log.warning("unplanned folder in the model repository; Triton will load it", folder=stranger)
    return Outcome(arrivals, run.cache_trouble)


def install_tools(folder: Path) -> None:
    """Copy the drain script for Triton's preStop hook to `folder`, whole or not at all. Raises OSError."""
    packaged = resources.files("conch.triton") / "drain.py"
    fresh = folder / ".drain.py.new"
    fresh.unlink(missing_ok=True)
    with full_disk_explained(), packaged.open("rb") as source, fresh.open("xb") as copy:
        shutil.copyfileobj(source, copy)
        os.fchmod(copy.fileno(), 0o555)
    fresh.replace(folder / "drain.py")


class _Run:
    """Stages models one after the other."""

    def __init__(self, plan: Plan, repository: Repository, fetcher: Fetcher, clock: Clock, log: Log) -> None:
        self.repository = repository
        self._plan = plan
        self._fetcher = fetcher
        self._clock = clock
        self._log = log
        self._cache = open_cache(plan.cache, os.environ, clock=clock, log=log)

    @property
    def cache_trouble(self) -> str:
        return "" if self._cache is None else self._cache.trouble

    def stage_with_room(self, model: PlannedModel) -> tuple[str, int]:
        """The same as `stage`; where the disk is full, without the copy that an earlier run of this pod has shown.

        A node that was restarted runs its pods' init containers again, on volumes that are as they were. Triton isn't
        running then, and what can't be verified any more is of no use to it.
        """
        try:
            with full_disk_explained():
                return self.stage(model)
        except DiskFullError:
            if not self.repository.make_way(model):
                raise
            self._log.warning("removed the copy of an earlier run, since the disk is full", model=model.name)
        with full_disk_explained():
            return self.stage(model)

    def stage(self, model: PlannedModel) -> tuple[str, int]:
        """Build the model in the hidden folder. Returns where it came from, and its size in bytes."""
        if model.uri is None:
            self.repository.stage_nothing(model)
            return "None", 0
        if model.remote:
            return self._stage_remote(model, model.uri)
        if is_archive(model):
            archive = located(model)
            if archive.is_file():
                return self._stage_mounted_archive(model, archive)
        return self._stage_mounted(model, model.uri)

    def _stage_remote(self, model: PlannedModel, uri: str) -> tuple[str, int]:
        shown = self.repository.shown_file(model)
        single = model.digest is not None and digest_of_content(model) and model.file_name is not None
        verified = Progress(uri, self._clock, self._log).verified
        if single and shown.is_file() and file_digest(shown, verified) == model.digest:
            self._log.info("already there", model=model.name, source=uri)
            self.repository.stage_file(model, shown)
            return "Present", shown.stat().st_size
        content = self.repository.content(_key(model))
        origin = "Present" if self._is_whole(model, content) else self._bring(model, content)
        # ORAS packs a pushed folder with its own name, as most archives are packed.
        packed = is_archive(model) or model.scheme == "oci"
        return origin, self._arrange(model, content, from_archive=packed)

    def _bring(self, model: PlannedModel, content: Path) -> str:
        """Fill `content` from the cache or the source."""
        downloads, digest = self.repository.downloads, content_digest(model)

        def download() -> None:
            _discard(content)
            self._fetcher.fetch(model, content, downloads)

        from_cache = False
        if self._cache is None or digest is None:
            download()
        else:
            from_cache = self._cache.obtain(digest, content, download, exact=digest_of_content(model))
        _marker(content).write_text(_state(content), encoding="utf-8")
        return "Cache" if from_cache else "Download"

    def _is_whole(self, model: PlannedModel, content: Path) -> bool:
        """Whether an interrupted run, or another model with the same source, left the whole content."""
        if not content.exists():
            return False
        if _marker(content).is_file() and _marker(content).read_text(encoding="utf-8") == _state(content):
            return True
        # After a crash of the node a file may be there without all of its bytes.
        verified = Progress(str(model.uri), self._clock, self._log).verified
        if model.digest is None or not digest_of_content(model):
            return False
        if not content.is_dir():
            return file_digest(content, verified) == model.digest
        real = content.resolve()
        return tree_digest(walk(real, real, str(model.uri)), verified) == model.digest

    def _stage_mounted_archive(self, model: PlannedModel, archive: Path) -> tuple[str, int]:
        if model.digest is not None:
            found = file_digest(archive, Progress(str(model.uri), self._clock, self._log).verified)
            _require_same(found, model, "file")
        content = self.repository.content(_key(model))
        _discard(content)
        unpack(archive, content, limits=Limits())
        return "Volume", self._arrange(model, content, from_archive=True)

    def _stage_mounted(self, model: PlannedModel, uri: str) -> tuple[str, int]:
        source = inspect(model, tensor_rt=self._plan.tensor_rt)
        self._check_code(model, source)
        if model.digest is not None:
            found = _digest(source, Progress(uri, self._clock, self._log), uri)
            _require_same(found, model, "folder" if source.is_folder else "file")
        self.repository.stage_links(model, source.links)
        return "Volume", _size_bytes(source)

    def _arrange(self, model: PlannedModel, content: Path, *, from_archive: bool) -> int:
        source = arrange(model, content, tensor_rt=self._plan.tensor_rt, from_archive=from_archive)
        self._check_code(model, source)
        self.repository.stage_downloaded(model, source.links, content if content.is_dir() else content.parent)
        return _size_bytes(source)

    def _check_code(self, model: PlannedModel, source: Source) -> None:
        """Triton looks for a backend's library in the model's own folders first (core, src/backend_model.cc)."""
        places = () if self._plan.allow_code else (file.relative for file in source.files)
        library = next((place for place in places if _LIBRARY.fullmatch(PurePosixPath(place).name)), None)
        if library is not None:
            place = library if source.is_folder else f"1/{library}"
            raise WrongLayoutError(
                f"Triton would load {place} ({model.uri}) in place of its own backend, which the operator's setting "
                "CONCH_ALLOW_PYTHON_MODELS=false forbids",
                "remove it from the source, or ask whoever runs Conch",
            )


def _require_same(found: str, model: PlannedModel, kind: str) -> None:
    if found != model.digest:
        raise DigestMismatchError(
            f"the {kind} {model.uri} has digest {found}, not {model.digest}",
            f"correct {model.at('source.digest')}, or the source if it was changed",
        )


def _key(model: PlannedModel) -> str:
    """The same for two models with the same source."""
    parts = (model.uri, model.digest, model.endpoint, model.region)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _marker(content: Path) -> Path:
    return content.with_name(f"{content.name}.whole")


def _discard(content: Path) -> None:
    _marker(content).unlink(missing_ok=True)
    if content.is_dir() and not content.is_symlink():
        shutil.rmtree(content)
    else:
        content.unlink(missing_ok=True)


def _state(content: Path) -> str:
    """What a whole content's marker holds: the node's boot, and how much there is.

    A killed run may have removed a part of it while it cleared up, and a node that crashed may have lost bytes.
    """
    places = (
        [content]
        if not content.is_dir()
        else [Path(top) / name for top, _, names in os.walk(content) for name in names]
    )
    sizes = [place.lstat().st_size for place in places]
    return f"{boot_name()} {len(sizes)} {sum(sizes)}"


def _size_bytes(source: Source) -> int:
    return sum(file.real.stat().st_size for file in source.files)


def _digest(source: Source, progress: Progress, uri: str) -> str:
    try:
        if source.is_folder:
            return tree_digest(source.files, progress.verified)
        return file_digest(source.files[0].real, progress.verified)
    except OSError as error:
        raise SourceRefusedError(
            f"{uri} can't be read ({Path(error.filename or '').name}: {error.strerror})",
            "make its files readable for the pod's user or group (fsGroup) and check the volume",
        ) from error


@contextmanager
def _naming(model: PlannedModel) -> "Iterator[None]":
    try:
        yield
    except FetchError as error:
        raise error.about(model.name, model.at("source") if model.field else "") from error
