"""The process as a whole: what it does while the API server doesn't answer, and when a part of it breaks."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from conch import app
from conch.app import FATAL_EXIT_CODE, Operator
from conch.config import Settings
from conch.kube.connection import Connection
from conch.kube.errors import Unreachable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest

SOON_S = 5.0


@asynccontextmanager
async def silent_server() -> AsyncIterator[str]:
    """Takes connections and never answers."""
    held: list[asyncio.StreamWriter] = []

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        with suppress(ConnectionError):
            await reader.read()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        for writer in held:
            writer.close()
        server.close()


def make_operator(url: str, port: int) -> Operator:
    return Operator(Settings(http_address="127.0.0.1", http_port=port), Connection.to(url))


async def until(condition: Any) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110 - of another task's state
            await asyncio.sleep(0.01)


async def test_r17_a_process_that_waits_for_a_silent_api_server_ends_at_once_when_told_to(
    unused_tcp_port: int,
) -> None:
    async with silent_server() as url:
        operator = make_operator(url, unused_tcp_port)
        running = asyncio.create_task(operator.run())
        await asyncio.sleep(0.3)
        assert not running.done()
        began = time.monotonic()
        operator._stop.set()
        assert await asyncio.wait_for(running, SOON_S) == 0
        assert time.monotonic() - began < SOON_S  # one request alone may take 10 s


async def test_r17_a_new_leader_that_cant_read_tries_again_and_then_works(
    unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "FIRST_WAIT_S", 0.01)
    operator = make_operator("http://127.0.0.1:1", unused_tcp_port)
    tried: list[bool] = []

    async def prime() -> None:
        tried.append(operator._scaling._leading)
        if len(tried) < 3:
            raise Unreachable(0, "ClientError", "no answer in time")

    async def served(_: Any) -> frozenset[Any]:
        return frozenset()

    monkeypatch.setattr(operator._watch, "prime", prime)
    monkeypatch.setattr(operator, "_still_served", served)
    operator._primed_at = -1e9
    operator._leading.set()
    leading = asyncio.create_task(operator._lead())
    await until(lambda: operator._scaling._leading)
    assert tried == [False, False, False]  # no decision before all is read
    leading.cancel()
    await asyncio.wait({leading})


async def test_r17_a_part_that_breaks_ends_the_process_with_its_reason(
    unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = make_operator("http://127.0.0.1:1", unused_tcp_port)

    async def nothing(*_: Any) -> None:
        await asyncio.sleep(0)

    async def broken() -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(operator, "_prime", nothing)
    monkeypatch.setattr(operator._watch, "run", nothing)
    monkeypatch.setattr(operator._recorder, "run", nothing)
    monkeypatch.setattr(operator._elector, "start", lambda: None)
    monkeypatch.setattr(operator._elector, "stop", lambda: None)
    monkeypatch.setattr(operator, "_lead", broken)
    assert await asyncio.wait_for(operator.run(), SOON_S) == FATAL_EXIT_CODE
    assert operator._failure == "a task broke: RuntimeError('a fault of ours')"
