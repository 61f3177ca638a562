"""/healthz, /readyz and /metrics of the operator itself (I/O). What they answer comes in as callables."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Self

from aiohttp import web
from prometheus_client.exposition import choose_encoder

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from types import TracebackType

    import prometheus_client

_SECOND: Final = 1.0


class HttpServer:
    """Serves until it is closed; use as `async with`. An event loop that no longer turns answers nothing at all.

    Args:
        address: where to listen.
        port: where to listen; 0 takes a free one, see `port`.
        silent_watches: kinds whose watch shows no sign of life.
        api_answers: whether a GET of our own succeeds now; called only while a watch is silent.
        ready: whether this replica can work, or could at once take over, and in words why (not).
        registry: what /metrics shows.
        api_check_s: how long `api_answers` may take.
    """

    def __init__(
        self,
        address: str,
        port: int,
        *,
        silent_watches: Callable[[], Sequence[str]],
        api_answers: Callable[[], Awaitable[bool]],
        ready: Callable[[], tuple[bool, str]],
        registry: prometheus_client.CollectorRegistry,
        api_check_s: float = 5.0,
    ) -> None:
        self._address = address
        self._port = port
        self._silent_watches = silent_watches
        self._api_answers = api_answers
        self._ready = ready
        self._registry = registry
        self._api_check_s = api_check_s
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        """Listen."""
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SECOND)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._address, self._port).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        if self._runner is None or not self._runner.addresses:
            raise RuntimeError("the server is not running")
        return int(self._runner.addresses[0][1])

    async def _healthz(self, _: web.Request) -> web.Response:
        silent = self._silent_watches()
        if not silent:
            return web.Response(text="ok\n")
        what = f"no sign of life from the watch of {', '.join(silent)}"
        # A restart helps a watch that is stuck, and makes an API outage worse: every operator would start, and list
        # the whole cluster, in the moment in which the server comes back (R17).
        if await self._api_is_there():
            return web.Response(status=503, text=f"{what}, while the API server answers\n")
        return web.Response(text=f"ok: {what}, but the API server does not answer either\n")

    async def _api_is_there(self) -> bool:
        try:
            async with asyncio.timeout(self._api_check_s):
                return await self._api_answers()
        except Exception:  # noqa: BLE001 - whatever fails here, the API server did not answer
            return False

    async def _readyz(self, _: web.Request) -> web.Response:
        ready, why = self._ready()
        return web.Response(status=200 if ready else 503, text=f"{why}\n")

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": content_type})
