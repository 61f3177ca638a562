"""The client against a real HTTP server on loopback."""

from __future__ import annotations

import asyncio
import gzip
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import prometheus_client
import pytest
from aiohttp import web

from conch.config import Settings
from conch.kube.client import DEPLOYMENTS, NODES, PODS, RESOURCE_BY_KIND, SCALED_OBJECTS, SERVICES, Kube
from conch.kube.connection import Connection
from conch.kube.errors import (
    ApiError,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    NotLeader,
    NotSent,
    Throttled,
    Unreachable,
    from_answer,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


class Server:
    """Answers from a list of prepared answers, the last one for ever; remembers what was asked."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any, dict[str, str]]] = []
        self.asked: list[web.Request] = []
        self.bodies: list[Any] = []
        self.delay_s = 0.0
        self.url = ""

    def answer(self, status: int, body: Any, **headers: str) -> None:
        self.answers.append((status, body, {name.replace("_", "-"): value for name, value in headers.items()}))

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append(request)
        raw = await request.read()
        self.bodies.append(json.loads(raw) if raw else None)
        await asyncio.sleep(self.delay_s)
        status, body, headers = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        content = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
        return web.Response(status=status, body=content, headers=headers)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    fake = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fake.handle)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield fake
    await runner.cleanup()


class Leadership:
    def __init__(self) -> None:
        self.leading = True

    def __call__(self) -> bool:
        return self.leading


@asynccontextmanager
async def client(url: str, leadership: Leadership | None = None, **settings: Any) -> AsyncIterator[Kube]:
    kube = Kube(
        Connection.to(url),
        Settings(**{"api_timeout_s": 5.0, **settings}),
        may_write=leadership or Leadership(),
        registry=prometheus_client.CollectorRegistry(),
        sleep=no_sleep,
    )
    async with kube:
        yield kube


SLEPT: list[float] = []


async def no_sleep(delay_s: float) -> None:
    SLEPT.append(delay_s)


@pytest.fixture(autouse=True)
def _forget_sleeps() -> None:
    SLEPT.clear()


DEPLOYMENT = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "m-server", "namespace": "team"}}


async def test_an_apply_is_sent_as_one(server: Server) -> None:
    server.answer(200, {**DEPLOYMENT, "status": {}})
    async with client(server.url) as kube:
        assert await kube.apply(DEPLOYMENT, manager="conch-workload") == {**DEPLOYMENT, "status": {}}
        assert kube.writes == {("apply", "Deployment", "", "conch-workload"): 1}
    (asked,) = server.asked
    assert (asked.method, asked.path) == ("PATCH", "/apis/apps/v1/namespaces/team/deployments/m-server")
    assert asked.content_type == "application/apply-patch+yaml"
    assert dict(asked.query) == {"fieldManager": "conch-workload", "force": "true", "fieldValidation": "Strict"}
    assert server.bodies == [DEPLOYMENT]


async def test_r2_a_scale_addresses_the_deployment_and_carries_its_resource_version(server: Server) -> None:
    scale = {
        "apiVersion": "autoscaling/v1",
        "kind": "Scale",
        "metadata": {"name": "m-server", "namespace": "team", "resourceVersion": "7"},
        "spec": {"replicas": 5},
    }
    server.answer(409, {"reason": "Conflict", "message": "the object has been modified"})
    async with client(server.url) as kube:
        with pytest.raises(Conflict):
            await kube.apply(scale, manager="conch-scaling", subresource="scale")
        assert kube.writes == {("apply", "Deployment", "scale", "conch-scaling"): 1}
    (asked,) = server.asked
    assert asked.path == "/apis/apps/v1/namespaces/team/deployments/m-server/scale"
    assert server.bodies[0]["metadata"]["resourceVersion"] == "7"


async def test_r2_fence_refuses_every_write_without_the_lease_and_sends_nothing(server: Server) -> None:
    leadership = Leadership()
    leadership.leading = False
    server.answer(200, DEPLOYMENT)
    async with client(server.url, leadership) as kube:
        with pytest.raises(NotLeader):
            await kube.apply(DEPLOYMENT, manager="conch-workload")
        with pytest.raises(NotLeader):
            await kube.delete(DEPLOYMENTS, "team", "m-server", uid="u", resource_version=None)
        assert server.asked == []
        assert not kube.writes
        assert await kube.get(DEPLOYMENTS, "team", "m-server") == DEPLOYMENT


async def test_r2_fence_is_asked_again_before_each_try(server: Server) -> None:
    leadership = Leadership()
    server.answer(429, {"reason": "TooManyRequests"}, Retry_After="1")

    async def lose(_: float) -> None:
        leadership.leading = False

    kube = Kube(
        Connection.to(server.url),
        Settings(),
        may_write=leadership,
        registry=prometheus_client.CollectorRegistry(),
        sleep=lose,
    )
    async with kube:
        with pytest.raises(NotLeader):
            await kube.apply(DEPLOYMENT, manager="conch-workload")
    assert len(server.asked) == 1


async def test_r6_a_deletion_names_the_object_that_was_looked_at(server: Server) -> None:
    server.answer(200, {"kind": "Status"})
    async with client(server.url) as kube:
        assert await kube.delete(SERVICES, "team", "m", uid="u-1", resource_version="9")
        assert await kube.delete(SERVICES, "team", "m", uid="u-1", resource_version=None)
    assert server.bodies[0]["preconditions"] == {"uid": "u-1", "resourceVersion": "9"}
    assert server.bodies[0]["propagationPolicy"] == "Background"
    assert server.bodies[1]["preconditions"] == {"uid": "u-1"}


async def test_what_is_already_gone_is_no_error(server: Server) -> None:
    server.answer(404, {"reason": "NotFound"})
    async with client(server.url) as kube:
        assert not await kube.delete(SERVICES, "team", "m", uid="u-1", resource_version="9")
        assert await kube.get(SERVICES, "team", "m") is None


async def test_r6_another_object_of_the_same_name_is_a_conflict(server: Server) -> None:
    server.answer(409, {"reason": "Conflict", "message": "the UID in the precondition does not match"})
    async with client(server.url) as kube:
        with pytest.raises(Conflict):
            await kube.delete(SERVICES, "team", "m", uid="u-1", resource_version="9")


async def test_a_list_is_read_in_chunks_and_its_items_say_what_they_are(server: Server) -> None:
    server.answer(200, {"metadata": {"continue": "c1", "resourceVersion": "5"}, "items": [{"metadata": {"name": "a"}}]})
    server.answer(200, {"metadata": {"resourceVersion": "5"}, "items": [{"metadata": {"name": "b"}}]})
    async with client(server.url) as kube:
        items, version = await kube.list(DEPLOYMENTS, "team", label_selector="a=b", field_selector="c=d")
    assert [item["metadata"]["name"] for item in items] == ["a", "b"]
    assert {(item["apiVersion"], item["kind"]) for item in items} == {("apps/v1", "Deployment")}
    assert version == "5"
    first, second = (dict(asked.query) for asked in server.asked)
    assert first == {"limit": "200", "labelSelector": "a=b", "fieldSelector": "c=d"}
    assert second == {**first, "continue": "c1"}
    assert server.asked[0].path == "/apis/apps/v1/namespaces/team/deployments"


async def test_of_each_object_of_a_list_only_what_is_kept_stays(server: Server) -> None:
    named = [{"metadata": {"name": name}, "spec": {}} for name in "ab"]
    server.answer(200, {"metadata": {"resourceVersion": "5"}, "items": named})
    async with client(server.url) as kube:
        items, _ = await kube.list(
            PODS, kept=lambda pod: {"kind": pod["kind"]} if pod["metadata"]["name"] > "a" else None
        )
    assert items == [{"kind": "Pod"}]


async def test_a_list_whose_snapshot_expired_starts_again(server: Server) -> None:
    server.answer(200, {"metadata": {"continue": "c1"}, "items": [{"metadata": {"name": "a"}}]})
    server.answer(410, {"reason": "Expired"})
    server.answer(200, {"metadata": {"resourceVersion": "9"}, "items": None})
    async with client(server.url) as kube:
        assert await kube.list(PODS) == ([], "9")
    assert [asked.query.get("continue") for asked in server.asked] == [None, "c1", None]


async def test_a_list_that_expires_for_ever_ends(server: Server) -> None:
    server.answer(410, {"reason": "Expired"})
    async with client(server.url) as kube:
        with pytest.raises(ApiError) as caught:
            await kube.list(PODS)
    assert caught.value.status == 410
    assert len(server.asked) == 5


@pytest.mark.parametrize("status", [429, 500, 503, 504])
async def test_a_read_is_tried_again_while_the_server_is_unwell(server: Server, status: int) -> None:
    server.answer(status, "unwell")
    server.answer(status, "unwell")
    server.answer(200, DEPLOYMENT)
    async with client(server.url) as kube:
        assert await kube.get(DEPLOYMENTS, "team", "m-server") == DEPLOYMENT
    assert len(server.asked) == 3
    assert len(SLEPT) == 2


async def test_a_read_gives_up_after_four_tries(server: Server) -> None:
    server.answer(503, {"message": "down"})
    async with client(server.url) as kube:
        with pytest.raises(Unreachable, match="down"):
            await kube.get(DEPLOYMENTS, "team", "m-server")
    assert len(server.asked) == 4


@pytest.mark.parametrize("body", ["<html>log in</html>", gzip.compress(b"{}"), "", '{"kind": "Deplo'])
async def test_an_answer_that_is_no_json_is_the_failure_of_something_between(server: Server, body: str | bytes) -> None:
    server.answer(200, body)
    async with client(server.url) as kube:
        with pytest.raises(Unreachable, match="NotJSON"):
            await kube.get(DEPLOYMENTS, "team", "m-server")
        assert len(server.asked) == 4  # it may have been for a moment
        with pytest.raises(Unreachable, match="no JSON"):
            await kube.delete(DEPLOYMENTS, "team", "m-server", uid="u", resource_version="1")
        assert len(server.asked) == 5


async def test_a_write_is_not_repeated_after_an_answer_that_leaves_it_open(server: Server) -> None:
    server.answer(500, {"message": "etcd timed out"})
    async with client(server.url) as kube:
        with pytest.raises(Unreachable):
            await kube.apply(DEPLOYMENT, manager="conch-workload")
    assert len(server.asked) == 1


async def test_a_throttled_write_waits_as_long_as_it_is_told(server: Server) -> None:
    server.answer(429, {"details": {"retryAfterSeconds": 1}}, Retry_After="3")
    server.answer(200, DEPLOYMENT)
    async with client(server.url) as kube:
        await kube.apply(DEPLOYMENT, manager="conch-workload")
        assert kube.writes.total() == 2
    assert SLEPT == [3.0]


async def test_a_pause_that_is_too_long_is_left_to_the_caller(server: Server) -> None:
    server.answer(429, "slow down", Retry_After="600")
    async with client(server.url) as kube:
        with pytest.raises(Throttled) as caught:
            await kube.get(DEPLOYMENTS, "team", "m-server")
    assert caught.value.retry_after_s == 600
    assert SLEPT == []


async def test_a_refused_connection_is_tried_again_even_for_a_write(unused_tcp_port: int) -> None:
    async with client(f"http://127.0.0.1:{unused_tcp_port}") as kube:
        with pytest.raises(NotSent):
            await kube.apply(DEPLOYMENT, manager="conch-workload")
    assert len(SLEPT) == 3


@pytest.fixture
def unused_tcp_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def test_a_write_without_an_answer_in_time_is_not_repeated(server: Server) -> None:
    server.answer(200, DEPLOYMENT)
    server.delay_s = 5.0
    async with client(server.url, api_timeout_s=0.1) as kube:
        with pytest.raises(Unreachable):
            await kube.apply(DEPLOYMENT, manager="conch-workload")
    assert len(server.asked) == 1


async def test_the_bucket_lets_twice_the_rate_through_and_then_spreads(server: Server) -> None:
    server.answer(200, DEPLOYMENT)
    async with client(server.url, api_requests_per_s=1.0) as kube:
        for _ in range(4):
            await kube.get(DEPLOYMENTS, "team", "m-server")
    assert len(SLEPT) == 2
    assert SLEPT[0] == pytest.approx(1.0, abs=0.5)
    assert SLEPT[1] == pytest.approx(2.0, abs=0.5)


async def test_the_end_of_a_log_is_read_as_text_and_asked_for_as_such(server: Server) -> None:
    server.answer(200, "one\ntwo\n")
    async with client(server.url) as kube:
        assert await kube.logs("team", "p-1", "fetch", tail_lines=20, limit_bytes=4096) == "one\ntwo\n"
        assert not kube.writes
    (asked,) = server.asked
    assert asked.path == "/api/v1/namespaces/team/pods/p-1/log"
    assert dict(asked.query) == {"container": "fetch", "tailLines": "20", "limitBytes": "4096"}
    # Asked for JSON, the API server answers 406.
    assert asked.headers["Accept"] == "*/*"


async def test_discovery_says_whether_a_kind_is_served(server: Server) -> None:
    server.answer(404, "404 page not found")
    server.answer(200, {"resources": [{"name": "deployments"}, {"name": "deployments/scale"}]})
    server.answer(200, {"resources": [{"name": "daemonsets"}]})
    server.answer(200, {"gitVersion": "v1.36.3"})
    async with client(server.url) as kube:
        assert not await kube.has_resource(SCALED_OBJECTS)
        assert await kube.has_resource(DEPLOYMENTS)
        assert not await kube.has_resource(DEPLOYMENTS)
        assert await kube.server_version() == "v1.36.3"
    assert [asked.path for asked in server.asked] == [
        "/apis/keda.sh/v1alpha1",
        "/apis/apps/v1",
        "/apis/apps/v1",
        "/version",
    ]


@pytest.mark.parametrize(
    ("status", "want"),
    [
        (400, Invalid),
        (401, Forbidden),
        (403, Forbidden),
        (404, NotFound),
        (409, Conflict),
        (418, ApiError),
        (422, Invalid),
        (429, Throttled),
        (500, Unreachable),
        (504, Unreachable),
    ],
)
def test_each_status_has_its_class(status: int, want: type[ApiError]) -> None:
    error = from_answer(status, {"reason": "Because", "message": "of this"})
    assert type(error) is want
    assert str(error) == f"{status} Because: of this"


def test_an_unknown_field_is_invalid_although_the_server_calls_it_its_own_error() -> None:
    message = "failed to create typed patch object (team/m; /v1, Kind=Service): .spec.x: field not declared in schema"
    assert type(from_answer(500, {"message": message})) is Invalid


@pytest.mark.parametrize("body", ["<html>", None, [], {"details": None}, {"details": {"retryAfterSeconds": "soon"}}])
def test_an_answer_that_is_no_status_object_is_an_error_all_the_same(body: Any) -> None:
    assert from_answer(502, body, retry_after=None).retry_after_s is None


@pytest.mark.parametrize(("value", "want"), [("2", 2.0), ("-5", 0.0), ("Wed, 21 Oct 2026 07:28:00 GMT", None)])
def test_retry_after_is_read_in_seconds_only(value: str, want: float | None) -> None:
    assert from_answer(429, {}, retry_after=value).retry_after_s == want


def test_paths_are_quoted_and_never_address_more_than_was_meant() -> None:
    assert PODS.path("a/b", "../c?") == "/api/v1/namespaces/a%2Fb/pods/..%2Fc%3F"
    assert NODES.path("", "n") == "/api/v1/nodes/n"
    assert DEPLOYMENTS.path() == "/apis/apps/v1/deployments"
    for namespace, name in (("team", ""), ("", "m"), (None, "m")):
        with pytest.raises(ValueError, match="needs a name"):
            PODS.path(namespace, name)


def test_every_kind_is_listed_once() -> None:
    assert all(kind == resource.kind for kind, resource in RESOURCE_BY_KIND.items())


async def test_proxy_variables_are_ignored(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    server.answer(200, DEPLOYMENT)
    async with client(server.url) as kube:
        assert await kube.get(DEPLOYMENTS, "team", "m-server") == DEPLOYMENT


async def test_a_rotated_service_account_token_is_read_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kubernetes.aio.client import Configuration
    from kubernetes.aio.config.incluster_config import InClusterConfigLoader

    token = tmp_path / "token"
    token.write_text("first\n")
    (tmp_path / "ca.crt").write_text("any")
    host, port = server.url.removeprefix("http://").split(":")
    environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
    configuration = Configuration()
    loader = InClusterConfigLoader(str(token), str(tmp_path / "ca.crt"), environ=environ)  # type: ignore[no-untyped-call]
    loader.load_and_set(configuration)  # type: ignore[no-untyped-call]
    monkeypatch.setattr(loader, "host", server.url)
    monkeypatch.setattr(loader, "ssl_ca_cert", None)
    loader._set_config(configuration)  # type: ignore[no-untyped-call]
    server.answer(200, DEPLOYMENT)
    kube = Kube(
        Connection(configuration), Settings(), may_write=Leadership(), registry=prometheus_client.CollectorRegistry()
    )
    async with kube:
        await kube.get(DEPLOYMENTS, "team", "m-server")
        token.write_text("second")
        loader.token_expires_at = loader.token_expires_at.replace(year=2000)
        await kube.get(DEPLOYMENTS, "team", "m-server")
    assert [asked.headers["Authorization"] for asked in server.asked] == ["bearer first", "bearer second"]


async def test_requests_are_counted_by_verb_kind_and_code(server: Server) -> None:
    registry = prometheus_client.CollectorRegistry()
    server.answer(200, DEPLOYMENT)
    server.answer(404, {})
    kube = Kube(Connection.to(server.url), Settings(), may_write=Leadership(), registry=registry)
    async with kube:
        await kube.get(DEPLOYMENTS, "team", "m-server")
        await kube.get(PODS, "team", "p")
    for kind, code in (("Deployment", "200"), ("Pod", "404")):
        labels = {"verb": "get", "kind": kind, "code": code}
        assert registry.get_sample_value("conch_api_requests_total", labels) == 1
