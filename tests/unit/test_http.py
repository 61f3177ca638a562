"""The operator's own endpoints over real HTTP."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import prometheus_client
import pytest

from conch.observe.http import HttpServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class World:
    """What the operator would say."""

    def __init__(self) -> None:
        self.silent: list[str] = []
        self.api: bool | Exception = True
        self.api_asked = 0
        self.ready = (True, "leader")
        self.registry = prometheus_client.CollectorRegistry()
        self.url = ""

    async def api_answers(self) -> bool:
        self.api_asked += 1
        if isinstance(self.api, Exception):
            raise self.api
        return self.api

    async def get(self, path: str, **headers: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.get(self.url + path, headers=headers) as response:
            return response.status, await response.text()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    state = World()
    server = HttpServer(
        "127.0.0.1",
        0,
        silent_watches=lambda: state.silent,
        api_answers=state.api_answers,
        ready=lambda: state.ready,
        registry=state.registry,
    )
    async with server:
        state.url = f"http://127.0.0.1:{server.port}"
        yield state


async def test_an_operator_whose_watches_live_is_healthy_and_asks_nothing(world: World) -> None:
    assert await world.get("/healthz") == (200, "ok\n")
    assert world.api_asked == 0


async def test_row_54_health_fails_when_watches_are_silent(world: World) -> None:
    world.silent = ["Pod", "Deployment"]
    status, text = await world.get("/healthz")
    assert status == 503
    assert "Pod, Deployment" in text


@pytest.mark.parametrize("api", [False, ConnectionError("refused"), TimeoutError()])
async def test_r17_an_api_outage_does_not_restart_the_operator(world: World, api: Any) -> None:
    world.silent = ["Pod"]
    world.api = api
    status, text = await world.get("/healthz")
    assert status == 200
    assert "does not answer either" in text


async def test_r17_an_api_that_hangs_counts_as_an_outage(world: World) -> None:
    async def hang() -> bool:
        await asyncio.sleep(60)
        return True

    world.silent = ["Pod"]
    server = HttpServer(
        "127.0.0.1",
        0,
        silent_watches=lambda: world.silent,
        api_answers=hang,
        ready=lambda: world.ready,
        registry=world.registry,
        api_check_s=0.05,
    )
    async with server:
        world.url = f"http://127.0.0.1:{server.port}"
        assert (await world.get("/healthz"))[0] == 200


@pytest.mark.parametrize(
    ("ready", "want"),
    [((True, "leader"), 200), ((True, "standby with a warm cache"), 200), ((False, "the cache is being filled"), 503)],
)
async def test_r17_a_warm_standby_is_ready_too(world: World, ready: tuple[bool, str], want: int) -> None:
    world.ready = ready
    assert await world.get("/readyz") == (want, f"{ready[1]}\n")


async def test_metrics_are_those_of_the_given_registry(world: World) -> None:
    prometheus_client.Gauge("conch_example", "An example.", registry=world.registry).set(3)
    status, text = await world.get("/metrics")
    assert status == 200
    assert "conch_example 3.0" in text
    openmetrics = await world.get("/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert openmetrics[1].endswith("# EOF\n")


async def test_a_server_that_is_not_running_has_no_port() -> None:
    any_callable: Any = None
    server = HttpServer(
        "127.0.0.1",
        0,
        silent_watches=any_callable,
        api_answers=any_callable,
        ready=any_callable,
        registry=prometheus_client.CollectorRegistry(),
    )
    with pytest.raises(RuntimeError):
        _ = server.port
