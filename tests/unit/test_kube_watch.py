"""The watches through kopf itself, against an API server of a hundred lines on loopback."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import prometheus_client
import pytest
from aiohttp import web

from conch.config import Settings
from conch.kube.cache import Cache
from conch.kube.client import DEPLOYMENTS, PODS, Kube
from conch.kube.connection import Connection
from conch.kube.watch import Watch, WatchedKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

KINDS = (WatchedKind(DEPLOYMENTS, "app.kubernetes.io/managed-by=conch"), WatchedKind(PODS))
LIMIT_S = 30.0


def make(name: str, version: int, kind: str = "Deployment", namespace: str = "team") -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1" if kind == "Deployment" else "v1",
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
            "creationTimestamp": "2026-11-30T10:00:00Z",
        },
    }


class Server:
    """Discovery, LIST and watch of Deployments and Pods."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, dict[str, Any]]] = {"deployments": {}, "pods": {}}
        self.version = 1
        self.streams: dict[str, list[asyncio.Queue[dict[str, Any] | None]]] = {"deployments": [], "pods": []}
        self.requests: list[web.Request] = []
        self.watch_answers: list[int] = []
        self.changed = asyncio.Condition()
        self.url = ""

    def put(self, name: str, plural: str = "deployments", *, quietly: bool = False) -> None:
        self.version += 1
        known = name in self.objects[plural]
        obj = make(name, self.version, "Deployment" if plural == "deployments" else "Pod")
        self.objects[plural][name] = obj
        if not quietly:
            self.send("MODIFIED" if known else "ADDED", obj, plural)

    def delete(self, name: str, plural: str = "deployments", *, quietly: bool = False) -> None:
        self.version += 1
        obj = self.objects[plural].pop(name)
        if not quietly:
            self.send("DELETED", obj, plural)

    def send(self, type_: str, obj: dict[str, Any], plural: str = "deployments") -> None:
        for stream in self.streams[plural]:
            stream.put_nowait({"type": type_, "object": obj})

    def expire(self, plural: str = "deployments") -> None:
        self.send("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"}, plural)
        for stream in self.streams[plural]:
            stream.put_nowait(None)

    def close(self) -> None:
        for streams in self.streams.values():
            for stream in streams:
                stream.put_nowait(None)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S), self.changed:
            await self.changed.wait_for(condition)

    async def watched(self) -> None:
        await self.until(lambda: all(self.streams.values()))

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        assert request.method == "GET", f"{request.method} {request.path}"
        async with self.changed:
            self.changed.notify_all()
        if request.path in DISCOVERY:
            return web.json_response(DISCOVERY[request.path])
        plural = request.path.rpartition("/")[2]
        if "watch" in request.query:
            int(request.query["timeoutSeconds"])
            return await self.watch(request, plural)
        items = list(self.objects[plural].values())
        return web.json_response({"kind": "List", "metadata": {"resourceVersion": str(self.version)}, "items": items})

    async def watch(self, request: web.Request, plural: str) -> web.StreamResponse:
        if self.watch_answers:
            return web.json_response({"kind": "Status"}, status=self.watch_answers.pop())
        response = web.StreamResponse()
        await response.prepare(request)
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.streams[plural].append(queue)
        async with self.changed:
            self.changed.notify_all()
        try:
            while (event := await queue.get()) is not None:
                await response.write(json.dumps(event).encode() + b"\n")
        finally:
            self.streams[plural].remove(queue)
        return response


def discovered(name: str, kind: str, *, namespaced: bool) -> dict[str, Any]:
    verbs = ["get", "list", "watch"]
    return {"name": name, "singularName": "", "kind": kind, "namespaced": namespaced, "verbs": verbs}


def group(name: str) -> dict[str, Any]:
    version = {"groupVersion": f"{name}/v1", "version": "v1"}
    return {"name": name, "versions": [version], "preferredVersion": version}


DISCOVERY: dict[str, dict[str, Any]] = {
    "/api": {"versions": ["v1"]},
    "/api/v1": {
        "resources": [
            discovered("pods", "Pod", namespaced=True),
            discovered("namespaces", "Namespace", namespaced=False),
        ]
    },
    "/apis": {"groups": [group("apps"), group("apiextensions.k8s.io")]},
    "/apis/apps/v1": {"resources": [discovered("deployments", "Deployment", namespaced=True)]},
    "/apis/apiextensions.k8s.io/v1": {
        "resources": [discovered("customresourcedefinitions", "CustomResourceDefinition", namespaced=False)]
    },
}


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    fake = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fake.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield fake
    fake.close()
    await runner.cleanup()


class Operator:
    """What the rest of the operator sees."""

    def __init__(self) -> None:
        self.cache = Cache()
        self.changes: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.watch: Watch

    def on_change(self, obj: dict[str, Any], deleted: bool) -> None:  # noqa: FBT001 - the protocol
        if obj["metadata"]["name"] == "poison":
            raise ZeroDivisionError
        self.changes.put_nowait((obj["metadata"]["name"], deleted))

    async def next(self) -> tuple[str, bool]:
        async with asyncio.timeout(LIMIT_S):
            return await self.changes.get()


@asynccontextmanager
async def operator(server: Server, **settings: Any) -> AsyncIterator[Operator]:
    state = Operator()
    connection = Connection.to(server.url)
    configured = Settings(**settings)
    registry = prometheus_client.CollectorRegistry()
    stop = asyncio.Event()
    async with Kube(connection, configured, may_write=lambda: False, registry=registry) as kube:
        state.watch = Watch(
            state.cache,
            state.on_change,
            kube=kube,
            connection=connection,
            settings=configured,
            kinds=KINDS,
            fatal=state.died.set_result,
            registry=registry,
        )
        await state.watch.prime()
        task = asyncio.create_task(state.watch.run(stop))
        try:
            yield state
        finally:
            stop.set()
            async with asyncio.timeout(LIMIT_S):
                await task


async def test_what_exists_is_cached_before_the_watches_start(server: Server) -> None:
    server.put("a")
    async with operator(server) as state:
        assert await state.next() == ("a", False)
        assert state.cache.get("Deployment", "team", "a") is not None


async def test_events_reach_the_cache_and_only_news_is_told(server: Server) -> None:
    server.put("a")
    async with operator(server) as state:
        await state.next()
        await server.watched()
        server.put("b")
        assert await state.next() == ("b", False)
        server.put("a")
        assert await state.next() == ("a", False)
        server.delete("b")
        assert await state.next() == ("b", True)
        assert state.cache.get("Deployment", "team", "b") is None
        assert state.watch.last_event_at("Deployment") is not None
        assert state.changes.empty()
    assert {request.method for request in server.requests} == {"GET"}


async def test_an_object_that_nobody_understands_hurts_only_itself(server: Server) -> None:
    server.put("poison")
    async with operator(server) as state:
        await server.watched()
        server.put("poison")
        server.put("a")
        assert await state.next() == ("a", False)


async def test_r3_what_was_deleted_during_a_410_is_evicted_and_told(server: Server) -> None:
    server.put("a")
    server.put("ghost")
    async with operator(server) as state:
        assert {await state.next(), await state.next()} == {("a", False), ("ghost", False)}
        await server.watched()
        server.delete("ghost", quietly=True)
        server.expire()
        assert await state.next() == ("ghost", True)
        assert state.cache.get("Deployment", "team", "ghost") is None


async def test_r3_the_last_object_deleted_during_a_410_is_evicted_too(server: Server) -> None:
    server.put("ghost")
    async with operator(server) as state:
        await state.next()
        await server.watched()
        server.delete("ghost", quietly=True)
        server.expire()
        assert await state.next() == ("ghost", True)


async def test_r3_what_vanished_between_our_list_and_the_first_watch_is_evicted(server: Server) -> None:
    server.put("ghost")
    async with operator(server) as state:
        server.delete("ghost", quietly=True)
        assert await state.next() == ("ghost", False)
        assert await state.next() == ("ghost", True)


async def test_r3_a_missed_event_is_found_by_the_next_list(server: Server) -> None:
    async with operator(server, relist_s=0.2) as state:
        await server.watched()
        server.put("missed", quietly=True)
        assert await state.next() == ("missed", False)


async def test_selectors_filter_on_the_server_in_lists_and_watches(server: Server) -> None:
    async with operator(server):
        await server.watched()
    for request in server.requests:
        if request.path.endswith("deployments"):
            assert request.query["labelSelector"] == "app.kubernetes.io/managed-by=conch"
        elif request.path.endswith("pods"):
            assert "labelSelector" not in request.query


async def test_in_namespaced_mode_every_request_names_a_namespace(server: Server) -> None:
    async with operator(server, watch_namespaces=("team",)) as state:
        await server.watched()
        server.put("a")
        assert await state.next() == ("a", False)
    for request in server.requests:
        if request.path not in DISCOVERY:
            assert "/namespaces/team/" in request.path


async def test_row_54_an_opened_watch_is_young(server: Server) -> None:
    async with operator(server) as state:
        await server.watched()
        assert set(state.watch.ages()) == {"Deployment", "Pod"}
        assert max(state.watch.ages().values()) < LIMIT_S
        assert state.watch.silent() == []


async def test_a_throttled_or_failing_watch_is_opened_again(server: Server) -> None:
    server.watch_answers = [429, 503]
    async with operator(server) as state:
        await server.watched()
        server.put("a")
        assert await state.next() == ("a", False)
        assert not state.died.done()


async def test_a_watch_that_can_not_go_on_ends_the_process_with_its_reason(server: Server) -> None:
    async with operator(server) as state:
        await server.watched()
        server.send("ERROR", {"kind": "Status", "code": 500, "reason": "InternalError"})
        async with asyncio.timeout(LIMIT_S):
            why = await state.died
        assert "WatchingError" in why


async def test_our_own_tasks_outlive_kopf(server: Server) -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with operator(server):
        await server.watched()
        task = asyncio.create_task(work())
    await asyncio.sleep(0)
    assert not ended.is_set()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
