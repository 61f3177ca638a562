"""A proxy between operators and the API server: it records every request and injects scripted faults (I/O).

It ends the API server's TLS, so operators speak plain HTTP to it on the loopback of the region's network, and passes
their Authorization header on. Each operator gets an address of its own, which tells the requests apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Self
from urllib.parse import unquote

import aiohttp
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType

    from sandbox import Region

WRITES: Final = frozenset({"create", "update", "patch", "delete", "deletecollection"})
START_LIMIT_S: Final = 20.0
CLOSING_S: Final = 0.3
"""aiohttp closes TLS connections some turns of the loop after its session."""
_PASSED_ON: Final = ("Authorization", "Accept", "Accept-Encoding", "Content-Type", "User-Agent")
_ANSWERED: Final = ("Content-Type", "Content-Encoding", "Retry-After")
"""With the encoding, as bodies are copied as they came: a LIST of over 128 KiB comes compressed."""
_PATH: Final = re.compile(
    r"^/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+)/(?P<version>[^/]+))"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/))?/(?P<resource>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[^/]+))?$"
)
_REASONS: Final = {403: "Forbidden", 409: "Conflict", 410: "Expired", 429: "TooManyRequests", 500: "InternalError"}


@dataclass(frozen=True)
class Request:
    """One request as RBAC sees it, and what was answered."""

    at: float
    who: str
    verb: str
    group: str
    resource: str
    """With its subresource: `deployments/scale`. Empty for what is no resource, such as /version."""
    namespace: str
    name: str
    query: Mapping[str, str]
    body: Any = None
    status: int = 0
    """0: no answer came through."""

    @property
    def writes(self) -> bool:
        """Whether it asks for a change."""
        return self.verb in WRITES

    @property
    def carried_out(self) -> bool:
        """Whether the API server said that it was done."""
        return 200 <= self.status < 300


@dataclass
class Fault:
    """What happens to matching requests; None matches everything."""

    verb: str | None = None
    resource: str | None = None
    namespace: str | None = None
    name: str | None = None
    who: str | None = None
    status: int | None = None
    """Answer this, without asking the API server. On a watch, 410 comes as an ERROR event, as from the server."""
    retry_after_s: int | None = None
    drop: Literal["request", "answer"] | None = None
    """Break the connection before the API server is asked, or after it answered."""
    delay_s: float = 0.0
    times: int = 1_000_000
    hits: int = field(default=0, init=False)

    def matches(self, asked: Request) -> bool:
        """Whether this request is meant."""
        if self.hits >= self.times:
            return False
        wanted = (self.verb, self.resource, self.namespace, self.name, self.who)
        found = (asked.verb, asked.resource, asked.namespace, asked.name, asked.who)
        return all(want is None or want == have for want, have in zip(wanted, found, strict=True))


class FaultProxy:
    """Runs in a thread of its own, whose network is the region's. Use as a context manager."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._lock = threading.Lock()
        self._records: list[Request] = []
        self._faults: list[Fault] = []
        self._watches: dict[asyncio.Task[None], Request] = {}
        self._who: dict[int, str] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None
        self._started = threading.Event()
        self._ending: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(START_LIMIT_S), "the proxy did not start"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._loop is not None and self._ending is not None:
            self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(START_LIMIT_S)

    # --- what tests call

    def address(self, who: str) -> str:
        """An address for one operator; the same for the same name."""
        port = next((port for port, name in self._who.items() if name == who), None)
        return f"http://127.0.0.1:{port or self._call(self._listen(who))}"

    def mark(self) -> int:
        """A place in the record, for `since`."""
        with self._lock:
            return len(self._records)

    def since(self, mark: int, *, namespace: str | None = None) -> list[Request]:
        """What was asked after a mark, of one namespace or of all; watches are recorded when they open."""
        with self._lock:
            found = self._records[mark:]
        return [asked for asked in found if namespace in {None, asked.namespace}]

    def writes(self, mark: int, *, namespace: str | None = None) -> list[Request]:
        """The requests for a change among them, the Lease aside."""
        return [asked for asked in self.since(mark, namespace=namespace) if asked.writes and asked.resource != "leases"]

    @contextlib.contextmanager
    def fault(self, **what: Any) -> Iterator[Fault]:
        """A fault for the length of a block; the newest that matches is the one that happens."""
        fault = Fault(**what)
        with self._lock:
            self._faults.insert(0, fault)
        try:
            yield fault
        finally:
            with self._lock:
                self._faults.remove(fault)

    def cut_watches(self, resource: str | None = None) -> int:
        """Break the open watches of one kind, or all; how many there were."""
        return int(self._call(self._cut(resource)))

    # --- the loop

    def _call(self, coroutine: Any) -> Any:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(START_LIMIT_S)

    def _run(self) -> None:
        with self._region.network():
            asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        context = ssl.create_default_context(cafile=str(self._region.layout.pki / "ca.crt"))
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        connector = aiohttp.TCPConnector(limit=0, ssl=context)
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            skip_auto_headers=("Accept-Encoding",),
        ) as self._session:
            self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
            await self._runner.setup()
            self._started.set()
            await self._ending.wait()
            await self._cut(None)
            await self._runner.cleanup()
        await asyncio.sleep(CLOSING_S)

    async def _listen(self, who: str) -> int:
        assert self._runner is not None
        before = {address[1] for address in self._runner.addresses}
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        port = next(address[1] for address in self._runner.addresses if address[1] not in before)
        self._who[port] = who
        return int(port)

    async def _cut(self, resource: str | None) -> int:
        cut = [task for task, asked in self._watches.items() if resource in {None, asked.resource}]
        for task in cut:
            task.cancel()
        if cut:
            await asyncio.wait(cut, timeout=5)
        return len(cut)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        asked = _asked(request, raw, self._who)
        with self._lock:
            fault = next((fault for fault in self._faults if fault.matches(asked)), None)
            if fault is not None:
                fault.hits += 1
        if fault is not None:
            await asyncio.sleep(fault.delay_s)
            if fault.drop == "request":
                return self._break_off(request, asked)
            if fault.status is not None:
                return await self._refuse(request, asked, fault)
        if asked.verb == "watch":
            return await self._watch(request, asked)
        assert self._session is not None
        async with self._session.request(
            request.method, self._target(request), data=raw or None, headers=_passed_on(request)
        ) as answer:
            content = await answer.read()
            if fault is not None and fault.drop == "answer":
                return self._break_off(request, asked)
            self._note(asked, answer.status)
            return web.Response(status=answer.status, body=content, headers=_answered(answer))

    async def _watch(self, request: web.Request, asked: Request) -> web.StreamResponse:
        assert self._session is not None
        async with self._session.get(self._target(request), headers=_passed_on(request)) as answer:
            self._note(asked, answer.status)
            response = web.StreamResponse(status=answer.status, headers=_answered(answer))
            await response.prepare(request)

            async def copy() -> None:
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)

            task = asyncio.create_task(copy())
            self._watches[task] = asked
            try:
                await asyncio.wait({task})
            finally:
                task.cancel()
                del self._watches[task]
            if not task.cancelled() and task.exception() is None:
                await response.write_eof()
            elif request.transport is not None:
                request.transport.abort()
            return response

    async def _refuse(self, request: web.Request, asked: Request, fault: Fault) -> web.StreamResponse:
        assert fault.status is not None
        self._note(asked, fault.status)
        status = {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": fault.status,
            "reason": _REASONS.get(fault.status, "Unknown"), "message": "injected by the tests' proxy",
        }  # fmt: skip
        if asked.verb == "watch" and fault.status == 410:
            event = json.dumps({"type": "ERROR", "object": status}) + "\n"
            return web.Response(text=event, content_type="application/json")
        headers = {} if fault.retry_after_s is None else {"Retry-After": str(fault.retry_after_s)}
        del request
        return web.json_response(status, status=fault.status, headers=headers)

    def _break_off(self, request: web.Request, asked: Request) -> web.StreamResponse:
        self._note(asked, 0)
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    def _target(self, request: web.Request) -> Any:
        from yarl import URL

        return URL(self._region.api_url + request.raw_path, encoded=True)

    def _note(self, asked: Request, status: int) -> None:
        with self._lock:
            self._records.append(Request(**{**asked.__dict__, "at": time.monotonic(), "status": status}))


def _asked(request: web.Request, raw: bytes, who: Mapping[int, str]) -> Request:
    own = request.transport.get_extra_info("sockname")[1] if request.transport is not None else 0
    found = _PATH.match(request.path)
    parts = found.groupdict() if found else {}
    resource, name = parts.get("resource") or "", unquote(parts.get("name") or "")
    if parts.get("sub"):
        resource = f"{resource}/{parts['sub']}"
    body: Any = None
    with contextlib.suppress(ValueError):
        body = json.loads(raw) if raw else None
    return Request(
        at=time.monotonic(),
        who=who.get(own, ""),
        verb=_verb(request, name),
        group=parts.get("group") or "",
        resource=resource,
        namespace=unquote(parts.get("namespace") or ""),
        name=name,
        query=dict(request.query),
        body=body,
    )


def _verb(request: web.Request, name: str) -> str:
    if request.method == "GET":
        if request.query.get("watch", "") not in {"", "0", "false"}:
            return "watch"
        return "get" if name else "list"
    collection = "deletecollection" if not name else "delete"
    return {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": collection}[request.method]


def _passed_on(request: web.Request) -> dict[str, str]:
    return {name: request.headers[name] for name in _PASSED_ON if name in request.headers}


def _answered(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: answer.headers[name] for name in _ANSWERED if name in answer.headers}
