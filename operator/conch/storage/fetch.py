"""`conch fetch`: carry out a plan. Reads the plan and the mounted sources, downloads, writes the repository."""

import os
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from conch.storage.digest import file_digest, tree_digest
from conch.storage.download import Clock, Downloader, Log, Progress, Wanted
from conch.storage.errors import DigestMismatchError, FetchError, PlanInvalidError, SourceRefusedError
from conch.storage.layout import Source, inspect
from conch.storage.plan import Plan, PlanError, PlannedModel
from conch.storage.repository import Repository
from conch.storage.space import full_disk_explained

if TYPE_CHECKING:
    from collections.abc import Iterator

MakeDownloader = Callable[[float], Downloader]
"""From the plan's stall time-out in seconds."""


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


def carry_out(plan: Plan, into: Path, make_downloader: MakeDownloader, *, clock: Clock, log: Log) -> None:
    """Make `into` the model repository of the plan, or leave what is visible there as it was.

    Everything is verified before anything is shown; see `storage.repository`. Raises FetchError that names the model,
    and OSError for a disk that fails in other ways than being full.
    """
    repository = Repository(into)
    downloader = make_downloader(plan.stall_timeout_seconds)
    with full_disk_explained():
        repository.prepare()
    # Mounted sources first: a wrong layout there should not show only after an hour of downloading.
    for model in sorted(plan.models, key=lambda model: model.scheme == "https"):
        with _naming(model), full_disk_explained():
            if model.scheme == "https":
                _stage_download(model, repository, downloader, clock, log)
            else:
                _stage_mounted(model, repository, clock, log)
        log.info("verified", model=model.name)
    with full_disk_explained():
        repository.show(plan.models)
    for stranger in repository.strangers(plan.models):
        log.warning("unplanned folder in the model repository; Triton will load it", folder=stranger)


def install_tools(folder: Path) -> None:
    """Copy the drain script for Triton's preStop hook to `folder`, whole or not at all. Raises OSError."""
    packaged = resources.files("conch.triton") / "drain.py"
    fresh = folder / ".drain.py.new"
    fresh.unlink(missing_ok=True)
    with full_disk_explained(), packaged.open("rb") as source, fresh.open("xb") as copy:
        shutil.copyfileobj(source, copy)
        os.fchmod(copy.fileno(), 0o555)
    fresh.replace(folder / "drain.py")


def _stage_download(
    model: PlannedModel, repository: Repository, downloader: Downloader, clock: Clock, log: Log
) -> None:
    if model.digest is None:
        raise PlanInvalidError("an https source has no digest", "set source.digest")
    wanted = Wanted(model.uri, model.digest)
    shown = repository.shown_file(model)
    if shown.is_file() and file_digest(shown, Progress(wanted.shown, clock, log).verified) == model.digest:
        log.info("already there", model=model.name, source=wanted.shown)
        repository.stage_file(model, shown)
        return
    partial = repository.partial(model.digest)
    downloader.download(wanted, partial)
    repository.stage_file(model, partial)


def _stage_mounted(model: PlannedModel, repository: Repository, clock: Clock, log: Log) -> None:
    source = inspect(model)
    if model.digest is not None:
        found = _digest(source, Progress(model.uri, clock, log), model.uri)
        if found != model.digest:
            kind = "folder" if source.is_folder else "file"
            raise DigestMismatchError(
                f"the {kind} {model.uri} has digest {found}, not {model.digest}",
                "correct the digest, or the source if it was changed",
            )
    repository.stage_links(model, source.links)


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
        raise error.about(model.name) from error
