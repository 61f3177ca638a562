"""One model from its remote source → verified content on disk, whatever the scheme. Network and disk."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol
from urllib.parse import unquote, urlsplit

from conch.storage.archive import Limits, is_archive_name, unpack
from conch.storage.credentials import MountedSecret
from conch.storage.download import Clock, Log, Patience, Wanted
from conch.storage.errors import PlanInvalidError
from conch.storage.plan import PlannedModel

if TYPE_CHECKING:
    from conch.storage.download import Downloader


class Fetcher(Protocol):
    """Fetches models; what `storage.fetch` needs of this module."""

    def fetch(self, model: PlannedModel, content: Path, downloads: Path) -> None:
        """Make the new file or folder `content` what the source holds, an archive unpacked, its digest verified.

        `downloads` is a folder on the same file system, in which a killed run is continued. Raises FetchError and
        OSError.
        """


def is_archive(model: PlannedModel) -> bool:
    """Whether the source is unpacked: it is a single file with an archive's name."""
    if model.scheme == "oci" or model.uri is None or model.uri.endswith("/"):
        return False
    path = model.path if model.path is not None else unquote(urlsplit(model.uri).path)
    return is_archive_name(path)


def digest_of_content(model: PlannedModel) -> bool:
    """Whether the model's digest is that of its content, and not of what the content is made from."""
    return model.scheme != "oci" and not is_archive(model)


def content_digest(model: PlannedModel) -> str | None:
    """The digest that names the content: the model's, or the manifest's in an oci URI; None: it isn't known."""
    if model.digest is None and model.scheme == "oci" and model.uri is not None:
        return model.uri.rpartition("@")[2]
    return model.digest


class Remote:
    """Fetches from https, s3, gs and oci sources. Each source has connections, trust and credentials of its own."""

    def __init__(
        self,
        patience: Patience,
        *,
        ca_file: Path | None,
        clock: Clock,
        jitter: Callable[[], float],
        log: Log,
        limits: Limits | None = None,
    ) -> None:
        """`ca_file` holds further authorities that are trusted for every source; `jitter` is such as random.random."""
        self._patience = patience
        self._ca_file = ca_file
        self._clock = clock
        self._jitter = jitter
        self._log = log
        self._limits = limits or Limits()

    def fetch(self, model: PlannedModel, content: Path, downloads: Path) -> None:
        """See `Fetcher`."""
        ways = {"https": self._file, "oci": self._artifact, "s3": self._objects, "gs": self._objects}
        ways[model.scheme](model, content, downloads)

    def _file(self, model: PlannedModel, content: Path, downloads: Path) -> None:
        if model.uri is None or model.digest is None:
            raise PlanInvalidError("an https source has no digest", f"set {model.at('source.digest')}")
        login = None
        if model.secret is not None:
            login = MountedSecret(Path(model.secret), model.at("source")).https_login()
        wanted = Wanted(model.uri, model.digest, model.at("source"), authorization=login)
        partial = downloads / f"{model.digest.removeprefix('sha256:')}.partial"
        self._downloader(model).download(wanted, partial)
        self._settle(model, partial, content)
        partial.with_name(f"{partial.name}.json").unlink(missing_ok=True)

    def _objects(self, model: PlannedModel, content: Path, downloads: Path) -> None:
        from conch.storage.objects import ObjectFetcher, open_store

        fetcher = ObjectFetcher(
            open_store(model, self._ca_file, self._patience),
            model,
            self._patience,
            clock=self._clock,
            jitter=self._jitter,
            log=self._log,
            limits=self._limits,
        )
        fetched = fetcher.fetch(downloads)
        if model.digest is None:
            self._log.info("fetched without a digest to verify", model=model.name, digest=fetched.digest)
        if fetched.is_folder:
            fetched.path.rename(content)
        else:
            self._settle(model, fetched.path, content)
        shutil.rmtree(fetched.path.parent)

    def _artifact(self, model: PlannedModel, content: Path, downloads: Path) -> None:
        from conch.storage.oci import Reference, fetch_artifact, registry_authorization

        reference, field = Reference.parse(str(model.uri), model.digest), model.at("source")
        stop = threading.Event()
        downloader = self._downloader(model, stop)
        login = None
        if model.secret is not None:
            login = MountedSecret(Path(model.secret), field).registry_login(reference.registry)
        authorization = registry_authorization(reference, login, downloader, field)
        aside = content.with_name(f"{content.name}.new")
        _remove(aside)
        fetch_artifact(
            reference, aside, downloads, downloader, authorization, field=field, limits=self._limits, stop=stop
        )
        aside.rename(content)

    def _settle(self, model: PlannedModel, file: Path, content: Path) -> None:
        """Make a verified file the content, whole or not at all."""
        if not is_archive(model):
            file.rename(content)
            return
        aside, naming = content.with_name(f"{content.name}.new"), content.with_name(f"{content.name}.archive")
        _remove(aside)
        _remove(naming)
        naming.mkdir()
        # Under the source's own name, which is in the sentence about what can't be unpacked.
        archive = naming / (PurePosixPath(unquote(urlsplit(str(model.uri)).path)).name or "archive")
        archive.hardlink_to(file)
        try:
            unpack(archive, aside, limits=self._limits)
        finally:
            shutil.rmtree(naming)
        aside.rename(content)
        file.unlink()

    def _downloader(self, model: PlannedModel, stop: threading.Event | None = None) -> "Downloader":
        from conch.storage.connection import pool_for
        from conch.storage.download import Downloader

        return Downloader(
            pool_for(model, self._ca_file),
            self._patience,
            clock=self._clock,
            jitter=self._jitter,
            log=self._log,
            stopped=(stop or threading.Event()).is_set,
        )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
