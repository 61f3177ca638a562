"""Download one https file: resumed after a drop, bounded in time and memory, its digest checked. Network and disk.

Files of https sources and blobs of OCI registries come this way; `storage.objects` has the object stores.

The digest decides what is a complete file. Lengths, ranges and validators that servers send only save work: a wrong
one costs another attempt and never a wrong file.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self
from urllib.parse import urljoin, urlsplit

import urllib3
from urllib3.exceptions import (
    HTTPError,
    InvalidHeader,
    LocationValueError,
    ProtocolError,
    ProxyError,
    ReadTimeoutError,
    SSLError,
)

from conch.storage.digest import CHUNK_BYTES, hash_into
from conch.storage.errors import DigestMismatchError, FetchError, SourceRefusedError, SourceStalledError
from conch.storage.space import require_room

_REDIRECTS_MAX = 5
_REDIRECT_STATUSES = frozenset((301, 302, 303, 307, 308))
# The server is there but can't answer now; every other 4xx stays as it is however often one asks.
_PASSING_STATUSES = frozenset((408, 425, 429))
_TUNNEL_REFUSED = re.compile(r"Tunnel connection failed: (\d{3})", re.ASCII)
_CHALLENGES_MAX = 2
_CONTENT_RANGE = re.compile(r"bytes\s+(?:(?P<start>\d+)-\d+|\*)/(?P<total>\d+|\*)", re.ASCII)
_LOG_INTERVAL_S = 5.0


class Clock(Protocol):
    """Time as the download sees it; the module `time` is one."""

    def monotonic(self) -> float:
        """Seconds since some fixed instant."""

    def sleep(self, seconds: float, /) -> None:
        """Wait."""


class Log(Protocol):
    """The part of a structlog logger that is used here."""

    def info(self, event: str, /, **fields: Any) -> Any:
        """Record that something went as it should."""

    def warning(self, event: str, /, **fields: Any) -> Any:
        """Record that something will be tried again."""


class Authorization(Protocol):
    """What a request says about who asks. It is never sent to another server than the one it is for."""

    @property
    def from_secret(self) -> bool:
        """Whether the credentials of a Secret are behind it."""

    def header(self) -> str | None:
        """The value of the header Authorization; None: no such header."""

    def challenged(self, challenge: str) -> bool:
        """The server answered 401 with that WWW-Authenticate. Whether `header` differs now; raises FetchError."""


@dataclass(frozen=True)
class Patience:
    """How long to try. `attempts` counts attempts in a row that got no further into the file."""

    stall_timeout_s: float = 60.0
    connect_timeout_s: float = 10.0
    attempts: int = 6
    total_timeout_s: float = 6 * 3600.0
    backoff_s: float = 1.0
    backoff_max_s: float = 30.0
    retry_after_max_s: float = 120.0


@dataclass(frozen=True)
class Wanted:
    """A file: where it is, and the digest (`sha256:<hex>`) that its bytes must have.

    `field` is the place of its source in the resource, for messages. A file longer than `size_bytes` is refused without
    being read to its end; None: unknown. `authorization` is asked for a header for the file's own server.
    """

    uri: str
    digest: str
    field: str = "source"
    size_bytes: int | None = None
    authorization: "Authorization | None" = None

    @property
    def shown(self) -> str:
        """The address without its query, which may hold a signature."""
        return _without_query(self.uri)


class _InterruptedError(Exception):
    """An attempt ended early. `unverified`: it seemed complete, but without a length only the digest could tell."""

    def __init__(
        self, cause: str, *, retry_after_s: float = 0.0, unverified: bool = False, proxy: bool = False
    ) -> None:
        super().__init__(cause)
        self.cause = cause
        self.retry_after_s = retry_after_s
        self.unverified = unverified
        self._proxy = proxy

    def fix(self, field: str) -> str:
        """What to do when it stays so."""
        if self._proxy:
            return f"correct {field}.proxy, or check that the proxy answers"
        return "check that the pod may reach the server (NetworkPolicy, DNS, proxy) and that it answers"


class Partial:
    """The bytes so far, on disk and in the hash. A file `<path>.json` beside it keeps the server's validator.

    `joined`: they come from more than one response, so they may be of two versions of the file.

    A new process continues where the last one was killed: it hashes what is there and asks for the rest.
    """

    def __init__(self, path: Path, wanted: Wanted, on_bytes: Callable[[int], None]) -> None:
        self._validator_path = path.with_name(f"{path.name}.json")
        self._uri_digest = hashlib.sha256(wanted.uri.encode()).hexdigest()
        self.etag = self._stored_etag()
        self.hasher = hashlib.sha256()
        path.touch()
        self.size_bytes = hash_into(self.hasher, path, on_bytes)
        self.joined = self.size_bytes > 0
        self.path = path
        # Unbuffered: a kill loses nothing that was counted.
        self._file = path.open("r+b", buffering=0)
        self._file.seek(self.size_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def digest(self) -> str:
        """`sha256:<hex>` of the bytes so far."""
        return f"sha256:{self.hasher.hexdigest()}"

    def append(self, data: bytes) -> None:
        """Write and hash. Raises OSError."""
        view = memoryview(data)
        while view:
            written = self._file.write(view)
            self.hasher.update(view[:written])
            self.size_bytes += written
            view = view[written:]

    def restart(self) -> None:
        """Forget the bytes so far."""
        self._file.seek(0)
        self._file.truncate()
        self.hasher = hashlib.sha256()
        self.size_bytes = 0
        self.joined = False

    def remember(self, etag: str | None) -> None:
        """Keep the validator of the response whose bytes follow. Raises OSError."""
        self.etag = etag
        content = json.dumps({"uri": self._uri_digest, "etag": etag})
        fresh = self._validator_path.with_name(f"{self._validator_path.name}.new")
        fresh.write_text(content, encoding="utf-8")
        fresh.replace(self._validator_path)

    def _stored_etag(self) -> str | None:
        try:
            stored = json.loads(self._validator_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(stored, dict) or stored.get("uri") != self._uri_digest:
            return None
        etag = stored.get("etag")
        return etag if isinstance(etag, str) else None


class Downloader:
    """Downloads through one connection pool. The pool's TLS context decides whom to trust."""

    def __init__(
        self,
        pool: urllib3.PoolManager,
        patience: Patience,
        *,
        clock: Clock,
        jitter: Callable[[], float],
        log: Log,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """`jitter` gives numbers from 0 to 1, such as random.random. `stopped`: another thread's failure ends this."""
        self._stopped = stopped
        self._pool = pool
        self._patience = patience
        self._clock = clock
        self._jitter = jitter
        self._log = log

    def download(self, wanted: Wanted, partial_path: Path) -> None:
        """Fill `partial_path` with the wanted file, starting from what it already holds.

        Raises SourceRefusedError, DigestMismatchError, SourceStalledError, DiskFullError, and OSError for the disk.
        """
        deadline_s = self._clock.monotonic() + self._patience.total_timeout_s
        progress = Progress(wanted.shown, self._clock, self._log)
        with Partial(partial_path, wanted, progress.verified) as partial:
            if partial.size_bytes:
                self._log.info("resuming", source=wanted.shown, bytes_present=partial.size_bytes)
            furthest_bytes, fruitless = partial.size_bytes, 0
            while partial.digest() != wanted.digest:
                try:
                    self._attempt(wanted, partial, deadline_s, progress)
                except _InterruptedError as interruption:
                    if partial.digest() == wanted.digest:
                        break
                    further = partial.size_bytes > furthest_bytes
                    furthest_bytes = max(furthest_bytes, partial.size_bytes)
                    fruitless = 1 if further else fruitless + 1
                    if fruitless >= self._patience.attempts and interruption.unverified:
                        found, size_bytes = partial.digest(), partial.size_bytes
                        partial.restart()
                        raise _mismatch(wanted, found, size_bytes) from None
                    self._back_off(interruption, wanted, partial.size_bytes, fruitless, deadline_s)
                    continue
                self._check_complete(wanted, partial)

    def _check_complete(self, wanted: Wanted, partial: Partial) -> None:
        if partial.digest() == wanted.digest:
            return
        # The file may have changed on the server between two responses; whole from one response it is what it is.
        joined, found, size_bytes = partial.joined, partial.digest(), partial.size_bytes
        partial.restart()
        if joined:
            self._log.warning("restarting", source=wanted.shown, cause="the joined parts have another digest")
            return
        raise _mismatch(wanted, found, size_bytes)

    def _back_off(
        self, interruption: _InterruptedError, wanted: Wanted, present_bytes: int, fruitless: int, deadline_s: float
    ) -> None:
        patience = self._patience
        if self._stopped():
            raise _given_up(wanted)
        if fruitless >= patience.attempts:
            raise SourceStalledError(
                f"{wanted.shown} failed {fruitless} times in a row, the last time because {interruption.cause}",
                interruption.fix(wanted.field),
            )
        backoff_s = min(patience.backoff_max_s, patience.backoff_s * 2.0 ** (max(1, fruitless) - 1))
        asked_s = min(interruption.retry_after_s, patience.retry_after_max_s)
        # Jitter on top of what the server asked: a whole Deployment starts at once and would come back at once.
        wait_s = asked_s + backoff_s * (0.5 + self._jitter() / 2)
        if self._clock.monotonic() + wait_s >= deadline_s:
            raise self._too_long(wanted, present_bytes)
        self._log.warning(
            "retrying",
            source=wanted.shown,
            cause=interruption.cause,
            wait_s=round(wait_s, 2),
            bytes_present=present_bytes,
        )
        self._clock.sleep(wait_s)

    def _attempt(self, wanted: Wanted, partial: Partial, deadline_s: float, progress: "Progress") -> None:
        """One request and its body. Returns when the server says that this was all of it."""
        response = self._open(wanted, partial)
        try:
            total_bytes = _accept(response, partial)
            if total_bytes is not None:
                if total_bytes == partial.size_bytes:
                    return
                require_room(partial.path.parent, total_bytes - partial.size_bytes)
            partial.remember(_strong_etag(response))
            partial.joined = partial.size_bytes > 0
            while data := self._read(response):
                partial.append(data)
                if wanted.size_bytes is not None and partial.size_bytes > wanted.size_bytes:
                    size_bytes = partial.size_bytes
                    partial.restart()
                    raise _too_big(wanted, size_bytes)
                if self._stopped():
                    raise _given_up(wanted)
                progress.received(partial.size_bytes, total_bytes)
                if self._clock.monotonic() >= deadline_s:
                    raise self._too_long(wanted, partial.size_bytes)
        finally:
            # Not back into the pool: what is left of the body may be long, or never come.
            response.close()
        if total_bytes is None and not _is_chunked(response) and partial.digest() != wanted.digest:
            raise _InterruptedError("the body ended without a stated length and isn't complete", unverified=True)

    def _open(self, wanted: Wanted, partial: Partial) -> urllib3.BaseHTTPResponse:
        headers = {}
        if partial.size_bytes:
            headers["Range"] = f"bytes={partial.size_bytes}-"
            if partial.etag:
                headers["If-Range"] = partial.etag
        return self._follow(wanted, headers)

    def read(self, wanted: Wanted, headers: Mapping[str, str], limit_bytes: int) -> bytes:
        """A small document, tried as often as a file; its digest isn't checked. Raises as `download` does."""
        deadline_s = self._clock.monotonic() + self._patience.total_timeout_s
        fruitless = 0
        while True:
            try:
                return self._read_small(wanted, headers, limit_bytes, deadline_s)
            except _InterruptedError as interruption:
                fruitless += 1
                self._back_off(interruption, wanted, 0, fruitless, deadline_s)

    def _read_small(self, wanted: Wanted, headers: Mapping[str, str], limit_bytes: int, deadline_s: float) -> bytes:
        response = self._follow(wanted, headers)
        content = bytearray()
        try:
            while data := self._read(response):
                content += data
                if len(content) > limit_bytes:
                    raise SourceRefusedError(
                        f"{wanted.shown} has more than {limit_bytes} bytes", f"correct {wanted.field}.uri"
                    )
                if self._clock.monotonic() >= deadline_s:
                    raise self._too_long(wanted, len(content))
        finally:
            response.close()
        return bytes(content)

    def _follow(self, wanted: Wanted, further: Mapping[str, str]) -> urllib3.BaseHTTPResponse:
        """The response at the end of the redirects, its status checked."""
        headers = {"Accept-Encoding": "identity", "User-Agent": "conch-fetch", **further}
        uri, own, authorization = wanted.uri, _origin(wanted.uri), wanted.authorization
        challenges = 0
        for _ in range(_REDIRECTS_MAX + 1):
            header = authorization.header() if authorization is not None and _origin(uri) == own else None
            response = self._request(uri, {**headers, **({"Authorization": header} if header else {})}, wanted)
            if response.status == 401 and authorization is not None and _origin(uri) == own:  # noqa: PLR2004
                challenge = response.headers.get("WWW-Authenticate", "")
                challenges += 1
                if challenges <= _CHALLENGES_MAX and authorization.challenged(challenge):
                    response.close()
                    continue
            if response.status not in _REDIRECT_STATUSES:
                _check_status(response, _without_query(uri), wanted)
                return response
            response.close()
            uri = _redirected(uri, response.headers.get("Location"))
        raise SourceRefusedError(
            f"{wanted.shown} redirects more than {_REDIRECTS_MAX} times",
            f"write the address that it leads to into {wanted.field}.uri",
        )

    def _request(self, uri: str, headers: dict[str, str], wanted: Wanted) -> urllib3.BaseHTTPResponse:
        timeout = urllib3.Timeout(connect=self._patience.connect_timeout_s, read=self._patience.stall_timeout_s)
        try:
            return self._pool.request(
                "GET", uri, headers=headers, timeout=timeout, retries=False, redirect=False, preload_content=False
            )
        except SSLError as error:
            if "CERTIFICATE_VERIFY_FAILED" not in str(error):
                raise _InterruptedError(f"TLS failed ({error})") from error
            raise SourceRefusedError(
                f"{_without_query(uri)} shows a certificate that is not trusted ({error})",
                f"use a certificate of a public authority, or name your own authority in {wanted.field}.caRef",
            ) from error
        except ReadTimeoutError as error:
            raise self._silence() from error
        except ProxyError as error:
            raise _proxy_failure(error, wanted) from error
        except (LocationValueError, UnicodeError) as error:
            raise SourceRefusedError(
                f"{_without_query(uri)} is no usable address", f"correct {wanted.field}.uri"
            ) from error
        except HTTPError as error:
            raise _InterruptedError(f"the connection failed ({error})") from error

    def _read(self, response: urllib3.BaseHTTPResponse) -> bytes:
        try:
            return response.read1(CHUNK_BYTES, decode_content=False)
        except ReadTimeoutError as error:
            raise self._silence() from error
        except ProtocolError as error:
            raise _InterruptedError("the server closed the connection in mid-body") from error
        except HTTPError as error:
            raise _InterruptedError(f"the transfer broke ({error})") from error

    def _silence(self) -> _InterruptedError:
        return _InterruptedError(f"no byte came for {self._patience.stall_timeout_s:g} s")

    def _too_long(self, wanted: Wanted, present_bytes: int) -> FetchError:
        return SourceStalledError(
            f"{wanted.shown} is not complete after {self._patience.total_timeout_s:g} s ({present_bytes} bytes)",
            "use a faster source",
        )


class Progress:
    """A log line every few seconds while bytes move."""

    def __init__(self, source: str, clock: Clock, log: Log) -> None:
        self._source = source
        self._clock = clock
        self._log = log
        self._logged_s = clock.monotonic()
        self._logged_bytes = 0
        self._verified_bytes = 0

    def received(self, size_bytes: int, total_bytes: int | None) -> None:
        """The file has `size_bytes` of `total_bytes` now."""
        self._tick("downloading", size_bytes, total_bytes=total_bytes)

    def verified(self, count: int) -> None:
        """`count` more bytes were hashed."""
        self._verified_bytes += count
        self._tick("verifying", self._verified_bytes)

    def _tick(self, event: str, size_bytes: int, **fields: object) -> None:
        passed_s = self._clock.monotonic() - self._logged_s
        if passed_s < _LOG_INTERVAL_S:
            return
        rate = max(0.0, size_bytes - self._logged_bytes) / passed_s
        self._log.info(event, source=self._source, bytes_done=size_bytes, bytes_per_s=round(rate), **fields)
        self._logged_s += passed_s
        self._logged_bytes = size_bytes


def _accept(response: urllib3.BaseHTTPResponse, partial: Partial) -> int | None:
    """Bring `partial` to where the response's body starts. Returns the whole file's size where the server says it."""
    content_range = _CONTENT_RANGE.match(response.headers.get("Content-Range", ""))
    stated = content_range and content_range["total"]
    ranged_total_bytes = int(stated) if stated and stated != "*" else None
    if response.status == 416:  # noqa: PLR2004 - Range Not Satisfiable
        if ranged_total_bytes != partial.size_bytes:
            partial.restart()
            raise _InterruptedError("the server refused to resume")
        return ranged_total_bytes
    if response.status == 206:  # noqa: PLR2004 - Partial Content
        start = content_range and content_range["start"]
        if start is None or int(start) != partial.size_bytes:
            partial.restart()
            raise _InterruptedError("the server sent another range than was asked for")
        if ranged_total_bytes is not None:
            return ranged_total_bytes
    elif partial.size_bytes:
        partial.restart()
    length = response.headers.get("Content-Length", "")
    return partial.size_bytes + int(length) if length.isascii() and length.isdigit() else None


def _check_status(response: urllib3.BaseHTTPResponse, shown: str, wanted: Wanted) -> None:
    status = response.status
    if status in (200, 206, 416):
        return
    response.close()
    if status in _PASSING_STATUSES or status >= 500:  # noqa: PLR2004 - server errors
        try:
            retry_after_s = urllib3.Retry().get_retry_after(response) or 0.0
        except InvalidHeader:
            retry_after_s = 0.0
        raise _InterruptedError(f"the server answered {status}", retry_after_s=retry_after_s)
    field, known = wanted.field, wanted.authorization is not None and wanted.authorization.from_secret
    fixes = {
        401: f"correct the credentials in the Secret of {field}.secretRef"
        if known
        else f"the server wants credentials; name a Secret with them in {field}.secretRef",
        403: f"allow the credentials of {field}.secretRef to read it"
        if known
        else f"allow reading it, or name a Secret with credentials in {field}.secretRef",
        404: f"correct {field}.uri",
        407: f"the proxy wants credentials, which can't be given; use another in {field}.proxy",
        410: f"it was removed for good; choose another source in {field}.uri",
    }
    raise SourceRefusedError(f"{shown} answered {status}", fixes.get(status, f"correct {field}.uri"))


def _proxy_failure(error: ProxyError, wanted: Wanted) -> Exception:
    cause = error.original_error
    refusal = _TUNNEL_REFUSED.search(str(cause))
    if refusal is not None and not refusal[1].startswith("5"):
        return SourceRefusedError(
            f"the proxy refused the way to {wanted.shown} with {refusal[1]}",
            f"allow it in the proxy, or correct {wanted.field}.proxy",
        )
    return _InterruptedError(f"the proxy failed ({cause})", proxy=True)


def _redirected(uri: str, location: str | None) -> str:
    try:
        target = urljoin(uri, location or "")
        parts = urlsplit(target)
    except ValueError:
        location, target = None, ""
    if location and parts.scheme == "https" and parts.hostname:
        return target
    raise SourceRefusedError(
        f"{_without_query(uri)} redirects to {_without_query(target) if location else 'no address'}",
        "only https addresses are followed; use one that stays on https",
    )


def _strong_etag(response: urllib3.BaseHTTPResponse) -> str | None:
    # If-Range takes no weak validators; without one, the digest finds a file that changed in between.
    etag = response.headers.get("ETag")
    return etag if etag and etag.startswith('"') else None


def _is_chunked(response: urllib3.BaseHTTPResponse) -> bool:
    return "chunked" in response.headers.get("Transfer-Encoding", "").lower()


def _origin(uri: str) -> tuple[str | None, int]:
    parts = urlsplit(uri)
    return parts.hostname, parts.port or 443


def _without_query(uri: str) -> str:
    return urlsplit(uri)._replace(query="", fragment="").geturl()


def _mismatch(wanted: Wanted, found: str, size_bytes: int) -> DigestMismatchError:
    return DigestMismatchError(
        f"{wanted.shown} has digest {found} ({size_bytes} bytes), not {wanted.digest}",
        f"correct {wanted.field}.digest, or the source if it was changed",
    )


def _given_up(wanted: Wanted) -> SourceStalledError:
    return SourceStalledError(f"{wanted.shown} was given up", "see what failed first")


def _too_big(wanted: Wanted, size_bytes: int) -> DigestMismatchError:
    return DigestMismatchError(
        f"{wanted.shown} has more than the {wanted.size_bytes} bytes that it should have (over {size_bytes})",
        "the source lies about its length; use another, or upload it anew",
    )
