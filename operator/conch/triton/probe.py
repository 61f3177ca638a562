"""Asks a Triton server what it has loaded, over plain HTTP (I/O): bounded in time, size and number, never tried again.

Whoever calls decides when to ask once more.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import quote

import aiohttp

from conch import names
from conch.triton.readback import Loaded, UnreadableAnswer, parse_loaded

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

CONNECT_S: Final = 1.0
"""A pod network that drops packets must not hold a worker for long."""
TOTAL_S: Final = 2.5
"""For all models of one pod together."""
CONNECTIONS_PER_POD: Final = 4
MAX_ANSWER_BYTES: Final = 2**18
"""Real ones have some KiB; parsing takes 0.6 s of the event loop for the worst MiB."""


class Unreadable(Exception):
    """A server that could not be asked; the words are the same for the same cause, and name no pod (R11)."""


class Probe:
    """An HTTP client for pods. Use as `async with`."""

    def __init__(self, port: int = names.HTTP_PORT, *, total_s: float = TOTAL_S) -> None:
        self._port = port
        self._total_s = total_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Open the session; a pod is asked once, so no connection is kept."""
        connector = aiohttp.TCPConnector(limit_per_host=CONNECTIONS_PER_POD, force_close=True)
        # Neither proxies nor .netrc: a pod's address is none of theirs.
        self._session = aiohttp.ClientSession(
            connector=connector,
            trust_env=False,
            # Compressed, a few bytes could become any number before they are counted.
            auto_decompress=False,
            headers={"User-Agent": "conch", "Accept": "application/json", "Accept-Encoding": "identity"},
            timeout=aiohttp.ClientTimeout(total=self._total_s, sock_connect=CONNECT_S),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def read(self, address: str, models: Sequence[str]) -> dict[str, Loaded]:
        """Each model as the server at a pod's IP has loaded it, within `total_s`. Raises Unreadable."""
        try:
            async with asyncio.timeout(self._total_s):
                loaded = await asyncio.gather(*(self._model(address, model) for model in models))
        except TimeoutError:
            raise Unreadable(f"a ready server didn't answer on port {self._port} in time") from None
        except aiohttp.ClientConnectionError:
            raise Unreadable(f"a ready server can't be reached on port {self._port}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unreadable(f"a ready server's answer broke off ({type(error).__name__})") from None
        return dict(zip(models, loaded, strict=True))

    async def _model(self, address: str, model: str) -> Loaded:
        path = f"/v2/models/{quote(model, safe='')}"
        config, metadata = await asyncio.gather(self._get(address, f"{path}/config"), self._get(address, path))
        try:
            return parse_loaded(config, metadata)
        except UnreadableAnswer as error:
            raise Unreadable(f'the configuration of model "{model}": {error}') from None

    async def _get(self, address: str, path: str) -> bytes:
        if self._session is None:
            raise RuntimeError("Probe is used outside of `async with`")
        host = f"[{address}]" if ":" in address else address
        url = f"http://{host}:{self._port}{path}"
        async with self._session.get(url, allow_redirects=False) as answer:
            body: Any = await answer.content.read(MAX_ANSWER_BYTES + 1)
            while len(body) <= MAX_ANSWER_BYTES and (more := await answer.content.read(MAX_ANSWER_BYTES)):
                body += more
            if len(body) > MAX_ANSWER_BYTES:
                raise Unreadable(f"a ready server answered {path} with more than {MAX_ANSWER_BYTES} bytes")
            if answer.status != 200:  # noqa: PLR2004 - HTTP's own number
                raise Unreadable(f"a ready server answered {path} with HTTP {answer.status}")
            return bytes(body)
