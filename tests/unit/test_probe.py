"""The probe against a real HTTP server on loopback: what it asks, and how each fault ends."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from conch.triton.probe import MAX_ANSWER_BYTES, Probe, Unreadable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

TOTAL_S = 0.5
CONFIG = {"name": "m", "max_batch_size": 8}
METADATA = {"name": "m", "versions": ["1", "3"]}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.asynccontextmanager
async def serving(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[int]:
    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield port
    finally:
        await runner.cleanup()


async def read(port: int, models: list[str]) -> Any:
    async with Probe(port, total_s=TOTAL_S) as probe:
        return await probe.read("127.0.0.1", models)


async def test_each_model_is_asked_for_its_configuration_and_its_versions() -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.raw_path)
        return web.json_response(CONFIG if request.path.endswith("/config") else METADATA)

    async with serving(answer) as port:
        loaded = await read(port, ["m", "odd name"])
    assert sorted(asked) == [
        "/v2/models/m",
        "/v2/models/m/config",
        "/v2/models/odd%20name",
        "/v2/models/odd%20name/config",
    ]
    assert loaded["m"].config.max_batch_size == 8
    assert loaded["m"].versions == ("1", "3")


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (404, b'{"error": "unknown model"}', "answered /v2/models/m/config with HTTP 404"),
        (403, b"", "with HTTP 403"),
        (302, b"", "with HTTP 302"),
        (200, b"<html>", 'the configuration of model "m": the answer can\'t be read'),
        (200, b" " * (MAX_ANSWER_BYTES + 1), "more than 262144 bytes"),
    ],
)
async def test_an_answer_that_is_none_says_so_and_names_no_address(status: int, body: bytes, says: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        if not request.path.endswith("/config"):
            return web.json_response(METADATA)
        return web.Response(status=status, body=body, headers={"Location": "http://127.0.0.1:1/"})

    async with serving(answer) as port:
        with pytest.raises(Unreadable) as error:
            await read(port, ["m"])
    assert says in str(error.value)
    assert "127.0.0.1" not in str(error.value)


async def test_an_answer_is_not_unpacked() -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.headers["Accept-Encoding"])
        bomb = gzip.compress(b" " * 64 * MAX_ANSWER_BYTES)
        return web.Response(body=bomb, headers={"Content-Encoding": "gzip"})

    async with serving(answer) as port:
        with pytest.raises(Unreadable, match="can't be read"):
            await read(port, ["m"])
    assert set(asked) == {"identity"}


async def test_a_server_that_is_not_there_is_unreadable_at_once() -> None:
    with pytest.raises(Unreadable, match="can't be reached"):
        await read(free_port(), ["m"])


async def test_a_server_that_never_answers_holds_nobody_for_long() -> None:
    async def answer(_: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    loop = asyncio.get_running_loop()
    began = loop.time()
    async with serving(answer) as port:
        with pytest.raises(Unreadable, match="didn't answer on port"):
            await read(port, [f"m{i}" for i in range(8)])
    assert loop.time() - began < 30  # of the 60 s that one answer takes


async def test_a_server_that_trickles_is_broken_off_too() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            for _ in range(600):
                await response.write(b" ")
                await asyncio.sleep(0.1)
        return response

    async with serving(answer) as port:
        with pytest.raises(Unreadable):
            await read(port, ["m"])


async def test_a_server_that_hangs_up_is_unreadable() -> None:
    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async with serving(answer) as port:
        with pytest.raises(Unreadable):
            await read(port, ["m"])


async def test_json_of_the_wrong_shape_is_unreadable() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=json.dumps([1, 2]).encode())

    async with serving(answer) as port:
        with pytest.raises(Unreadable, match="can't be read"):
            await read(port, ["m"])
