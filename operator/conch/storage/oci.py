"""Fetch an OCI artifact from a registry: its manifest by digest, then every layer, into one folder. Network and disk.

https://github.com/opencontainers/distribution-spec and image-spec. A layer with a title annotation is a file of that
name; a tar layer without one, or one that ORAS marked for unpacking, is unpacked. No registry client for Python that
was found (oras) checks a digest, resumes a blob or knows a time-out, so blobs come through `storage.download`.
"""

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlencode, urlsplit

from conch.storage.archive import Limits, is_archive_name, unpack
from conch.storage.credentials import Login
from conch.storage.download import Downloader, Wanted
from conch.storage.errors import DigestMismatchError, SourceRefusedError, WrongLayoutError
from conch.storage.space import require_room

_MANIFEST_MAX_BYTES: Final = 4 << 20
_TOKEN_MAX_BYTES: Final = 1 << 20
_LAYERS_MAX: Final = 1000
_BLOBS_AT_ONCE: Final = 4
_TITLE: Final = "org.opencontainers.image.title"
_UNPACK: Final = "io.deis.oras.content.unpack"
_INDEX_TYPES: Final = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_MANIFEST_TYPES: Final = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_EMPTY_TYPE: Final = "application/vnd.oci.empty.v1+json"
_TAR_TYPE: Final = re.compile(r"application/.+[.+]tar([.+-](gzip|zstd))?", re.ASCII)
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_PARAMETER: Final = re.compile(r'([A-Za-z_]+)="([^"]*)"', re.ASCII)
_DOCKER_HUB: Final = ("docker.io", "registry-1.docker.io")


@dataclass(frozen=True)
class Reference:
    """`oci://REGISTRY/REPOSITORY…` with the manifest's digest."""

    registry: str
    repository: str
    digest: str

    @classmethod
    def parse(cls, uri: str, digest: str | None) -> "Reference":
        """Of a validated URI; `digest` stands in for one that the URI doesn't hold."""
        registry, _, rest = uri.removeprefix("oci://").partition("/")
        name, _, pinned = rest.partition("@")
        repository = name.partition(":")[0]
        return cls(registry, repository, pinned or str(digest))

    def url(self, kind: Literal["manifests", "blobs"], digest: str) -> str:
        """Where the registry serves it."""
        host = "registry-1.docker.io" if self.registry in _DOCKER_HUB else self.registry
        return f"https://{host}/v2/{self.repository}/{kind}/{digest}"


@dataclass(frozen=True)
class Layer:
    """One blob: a file called `title`, or a tar to unpack (None)."""

    digest: str
    size_bytes: int
    title: str | None


class RegistryAuthorization:
    """Answers a registry's challenge: with the login itself, or with a token that its token service gives for it.

    https://distribution.github.io/distribution/spec/auth/token/. Used by several threads at once.
    """

    def __init__(self, login: Login | None, repository: str, fetch_token: Callable[[str, Login | None], str]) -> None:
        """`fetch_token` gets the address of the token service and who asks, and returns its answer's token."""
        self._login = login
        self._repository = repository
        self._fetch_token = fetch_token
        self._header: str | None = None
        self._lock = threading.Lock()

    @property
    def from_secret(self) -> bool:
        """Whether the login of a Secret is behind it."""
        return self._login is not None

    def header(self) -> str | None:
        """None until the registry asked."""
        return self._header

    def challenged(self, challenge: str) -> bool:
        """Prepare the header that the challenge asks for. False if there is none to give."""
        with self._lock:
            scheme, _, rest = challenge.partition(" ")
            if scheme.lower() == "basic":
                fresh = None if self._login is None else self._login.header()
            elif scheme.lower() == "bearer":
                fresh = self._bearer(dict(_PARAMETER.findall(rest)))
            else:
                fresh = None
            self._header = fresh
            return fresh is not None

    def _bearer(self, parameters: Mapping[str, str]) -> str | None:
        realm = parameters.get("realm", "")
        parts = urlsplit(realm)
        if parts.scheme != "https" or not parts.hostname:
            return None
        query = {"service": parameters["service"]} if "service" in parameters else {}
        # Not the scope that the registry names: one that only reads is enough.
        query["scope"] = f"repository:{self._repository}:pull"
        token = self._fetch_token(f"{realm}{'&' if parts.query else '?'}{urlencode(query)}", self._login)
        return f"Bearer {token}"


def registry_authorization(
    reference: Reference, login: Login | None, downloader: Downloader, field: str
) -> RegistryAuthorization:
    """The authorization of one repository, whose tokens come through the same proxy and trust as its blobs."""

    def fetch_token(address: str, login: Login | None) -> str:
        wanted = Wanted(address, "", field=field, authorization=login)
        content = downloader.read(wanted, {"Accept": "application/json"}, _TOKEN_MAX_BYTES)
        answer = _json_object(content, f"{wanted.shown} gave no token", f"check that {field}.uri names a registry")
        token = answer.get("token") or answer.get("access_token")
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise SourceRefusedError(f"{wanted.shown} gave no token", f"correct the Secret of {field}.secretRef")
        return token

    return RegistryAuthorization(login, reference.repository, fetch_token)


def fetch_artifact(
    reference: Reference,
    into: Path,
    downloads: Path,
    downloader: Downloader,
    authorization: RegistryAuthorization,
    *,
    field: str,
    limits: Limits,
    stop: threading.Event,
) -> int:
    """Make the new folder `into` the artifact's files; `downloads` keeps blobs for a run that continues this one.

    `stop` is what makes the downloader give up: it is set when one of several blobs has failed. Returns the bytes of
    all layers. Raises FetchError and OSError.
    """
    uri = f"oci://{reference.registry}/{reference.repository}@{reference.digest}"
    layers = _layers(reference, uri, downloader, authorization, field)
    partials = {layer.digest: downloads / f"{layer.digest.removeprefix('sha256:')}.partial" for layer in layers}
    sizes = {layer.digest: layer.size_bytes for layer in layers}
    present_bytes = sum(path.stat().st_size for path in partials.values() if path.exists())
    require_room(downloads, sum(sizes.values()) - present_bytes)

    def download(digest: str) -> None:
        wanted = Wanted(reference.url("blobs", digest), digest, field, sizes[digest], authorization)
        downloader.download(wanted, partials[digest])

    _all_at_once(download, list(partials), stop)
    _assemble(layers, partials, into, limits)
    for path in partials.values():
        path.unlink()
        path.with_name(f"{path.name}.json").unlink(missing_ok=True)
    return sum(layer.size_bytes for layer in layers)


def _assemble(layers: list[Layer], blobs: Mapping[str, Path], into: Path, limits: Limits) -> None:
    if len(layers) == 1 and is_archive_name(layers[0].title or ".tar"):
        unpack(blobs[layers[0].digest], into, limits=limits)
        return
    into.mkdir()
    for index, layer in enumerate(layers):
        try:
            if layer.title is None:
                _unpack_layer(blobs[layer.digest], into, into.with_name(f"{into.name}.{index}"), limits)
            else:
                place = into / layer.title
                _refuse_links(into, place.parent)
                place.parent.mkdir(parents=True, exist_ok=True)
                # Linked, not moved: two layers may be one blob.
                place.hardlink_to(blobs[layer.digest])
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            raise WrongLayoutError(
                f"two layers hold {Path(str(error.filename2 or error.filename)).name}",
                "push the artifact anew with one of each name",
            ) from error


def _all_at_once(download: Callable[[str], None], digests: list[str], stop: threading.Event) -> None:
    pool = ThreadPoolExecutor(_BLOBS_AT_ONCE, "blob")
    try:
        for done in as_completed([pool.submit(download, digest) for digest in digests]):
            done.result()
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


def _layers(
    reference: Reference, uri: str, downloader: Downloader, authorization: RegistryAuthorization, field: str
) -> list[Layer]:
    manifest = _manifest(reference, reference.digest, downloader, authorization, field)
    children = manifest.get("manifests")
    if isinstance(children, list):
        if len(children) != 1 or not isinstance(children[0], dict):
            raise SourceRefusedError(
                f"{uri} is an index of {len(children)} manifests", f"name the digest of one of them in {field}"
            )
        manifest = _manifest(reference, str(children[0].get("digest")), downloader, authorization, field)
    layers = manifest.get("layers")
    if not isinstance(layers, list) or not layers or len(layers) > _LAYERS_MAX:
        raise WrongLayoutError(
            f"{uri} is no artifact with 1 to {_LAYERS_MAX} layers",
            f"name an artifact that holds a model in {field}.uri",
        )
    found = [layer for entry in layers for layer in _layer(entry, uri)]
    titles = [layer.title for layer in found if layer.title is not None]
    for title in titles:
        if titles.count(title) > 1:
            raise WrongLayoutError(f"{uri} has two layers called {title!r}", "push it anew with one of each name")
    return found


def _manifest(
    reference: Reference,
    digest: str,
    downloader: Downloader,
    authorization: RegistryAuthorization,
    field: str,
) -> dict[str, Any]:
    if not _DIGEST.fullmatch(digest):
        raise SourceRefusedError(
            f"the registry names a manifest {digest[:80]!r}, which is no sha256 digest", "push the artifact anew"
        )
    wanted = Wanted(reference.url("manifests", digest), digest, field, authorization=authorization)
    accept = {"Accept": ", ".join((*_MANIFEST_TYPES, *_INDEX_TYPES))}
    content = downloader.read(wanted, accept, _MANIFEST_MAX_BYTES)
    found = f"sha256:{hashlib.sha256(content).hexdigest()}"
    if found != digest:
        raise DigestMismatchError(
            f"{wanted.shown} has digest {found} ({len(content)} bytes), not {digest}",
            "the registry or something on the way to it gives other bytes; check both",
        )
    return _json_object(content, f"{wanted.shown} is no manifest", f"correct {field}.uri")


def _layer(entry: Any, uri: str) -> Iterator[Layer]:
    fields = entry if isinstance(entry, dict) else {}
    digest, size, kind = fields.get("digest"), fields.get("size"), str(fields.get("mediaType"))
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest) or not isinstance(size, int) or size < 0:
        raise WrongLayoutError(f"{uri} has a layer without a sha256 digest and a size", "push the artifact anew")
    if kind == _EMPTY_TYPE:
        return
    annotations = fields.get("annotations")
    annotations = annotations if isinstance(annotations, dict) else {}
    title = annotations.get(_TITLE)
    is_tar = _TAR_TYPE.fullmatch(kind) is not None
    if str(annotations.get(_UNPACK)).lower() == "true" or (title is None and is_tar):
        yield Layer(digest, size, None)
        return
    if not isinstance(title, str):
        raise WrongLayoutError(
            f"the layer {digest} of {uri} has neither a title nor a tar's type ({kind[:80]})",
            f"push it with the annotation {_TITLE}, as oras push does",
        )
    parts = title.split("/")
    if not title.isprintable() or "\\" in title or any(part in ("", ".", "..") for part in parts):
        raise WrongLayoutError(
            f"a layer of {uri} is titled {title[:80]!r}, which is no relative path", "push it under another name"
        )
    yield Layer(digest, size, title)


def _unpack_layer(archive: Path, into: Path, aside: Path, limits: Limits) -> None:
    """Unpack a tar into its own folder, then put what it holds beside what earlier layers brought."""
    unpack(archive, aside, limits=limits)
    for folder, subfolders, names in os.walk(aside):
        inside = Path(folder).relative_to(aside)
        _refuse_links(into, into / inside)
        (into / inside).mkdir(parents=True, exist_ok=True)
        links = [name for name in subfolders if (Path(folder) / name).is_symlink()]
        for name in [*names, *links]:
            if name.startswith(".wh."):
                raise WrongLayoutError(
                    f"a layer removes {inside / name} of an earlier one, as container images do",
                    "use image:// for a container image",
                )
            (Path(folder) / name).replace(into / inside / name)
    shutil.rmtree(aside)


def _refuse_links(into: Path, folder: Path) -> None:
    """Refuse a folder that is reached by a link: two layers' links may lead out together, though neither does alone."""
    for place in (folder, *folder.parents):
        if place == into:
            return
        if place.is_symlink():
            raise WrongLayoutError(
                f"a layer would be written through the link {place.relative_to(into)} of an earlier one",
                "push the artifact anew with the folder itself",
            )


def _json_object(content: bytes, cause: str, fix: str) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise SourceRefusedError(cause, fix)
    return found
