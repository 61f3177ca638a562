"""Signals out of a real HTTP server on loopback, which answers as Prometheus does, or as a broken one."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import socket
import subprocess
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlparse

import pytest

from conch.config import Settings
from conch.scaling.policy import QualityKind, Signals
from conch.scaling.signals import SINGLE_MODELS, Pipeline, PrometheusSignals, ReadyPod, Samples, join
from conch.triton.metrics import Query
from makers import make_model, make_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NS = "ns"
BUILT = sorted((Path.home() / ".cache/conch/sandbox").glob("bin-*/prometheus"))
PROMETHEUS = shutil.which("prometheus") or (str(BUILT[0]) if BUILT else None)
Row = dict[str, Any]


def row(pod: str, value: object, **labels: str) -> Row:
    return {"metric": {"namespace": NS, "pod": pod, **labels}, "value": [1.0, str(value)]}


def by_model(pod: str, value: object, model: str = "m") -> Row:
    return row(pod, value, model=model)


def memory(pod: str, **gauges: float) -> list[Row]:
    return [row(pod, value, __name__=name, gpu_uuid="G") for name, value in gauges.items()]


def gauges(pod: str, used: float = 8e9, total: float = 24e9) -> list[Row]:
    return memory(pod, nv_gpu_memory_used_bytes=used, nv_gpu_memory_total_bytes=total)


def healthy(*pods: str) -> dict[Query, list[Row]]:
    return {
        Query.WAITING: [by_model(pod, 3) for pod in pods],
        Query.SUCCESSES: [by_model(pod, 5) for pod in pods],
        Query.IN_SYSTEM: [by_model(pod, 2) for pod in pods],
        Query.BUSY: [by_model(pod, 0.5) for pod in pods],
        Query.MEMORY: [gauge for pod in pods for gauge in gauges(pod)],
    }


class Server(ThreadingHTTPServer):
    """Answers each query by its name; `reply` may be replaced to misbehave."""

    daemon_threads = True

    def __init__(self) -> None:
        self.rows: dict[Query, list[Row]] = {}
        self.names: dict[str, Query] = {}
        self.asked: list[Query] = []
        self.reply: Callable[[BaseHTTPRequestHandler, Query], None] = self.answer
        super().__init__(("127.0.0.1", 0), Handler)

    def answer(self, handler: BaseHTTPRequestHandler, query: Query) -> None:
        result = {"resultType": "vector", "result": self.rows.get(query, [])}
        send(handler, 200, json.dumps({"status": "success", "data": result}).encode())

    def source(self, **settings: Any) -> PrometheusSignals:
        url = f"http://127.0.0.1:{self.server_address[1]}"
        source = PrometheusSignals(Settings(**{"prometheus_url": url, "prometheus_timeout_s": 0.5, **settings}))
        self.names = {text: query for query, text in source.promql.items()}
        return source


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        query = self.server.names[parse_qs(urlparse(self.path).query)["query"][0]]
        self.server.asked.append(query)
        try:
            self.server.reply(self, query)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Nothing: a test's output is its own."""


def send(handler: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@contextmanager
def reading(source: PrometheusSignals) -> Iterator[PrometheusSignals]:
    try:
        yield source
    finally:
        source.close()


async def signals_of(
    server: Server,
    pods: tuple[str, ...] = ("a", "b"),
    *,
    ready_for_s: float = 600.0,
    pipeline: Pipeline = SINGLE_MODELS,
    **settings: Any,
) -> Signals:
    with reading(server.source(**settings)) as source:
        return joined(await source.read(), pods, ready_for_s=ready_for_s, pipeline=pipeline)


def joined(
    samples: Samples,
    pods: tuple[str, ...] = ("a", "b"),
    *,
    ready_for_s: float = 600.0,
    pipeline: Pipeline = SINGLE_MODELS,
) -> Signals:
    now = time.time()
    ready = [ReadyPod(pod, now - ready_for_s) for pod in pods]
    return join(samples, NS, ready, now=now, stale_s=30, memory=True, pipeline=pipeline)


async def test_healthy_answers_are_summed_over_the_ready_pods(server: Server) -> None:
    server.rows = healthy("a", "b")
    signals = await signals_of(server)
    assert (signals.waiting, signals.completions) == ((("m", 6.0),), 10.0)
    assert (signals.in_system, signals.busy) == ((("m", 4.0),), (("m", 1.0),))
    assert signals.memory_share == pytest.approx(1 / 3)
    assert {signals.queue.kind, signals.flow.kind, signals.memory.kind} == {QualityKind.FRESH}


async def test_row_18_series_of_deleted_pods_and_of_other_namespaces_are_not_counted(server: Server) -> None:
    server.rows = healthy("a", "b", "deleted")
    server.rows[Query.WAITING] += [{"metric": {"namespace": "other", "pod": "a", "model": "m"}, "value": [1, "900"]}]
    server.rows[Query.WAITING] += [{"metric": {"model": "m"}, "value": [1, "900"]}]
    assert (await signals_of(server)).waiting == (("m", 6.0),)


async def test_r18_copies_of_one_series_count_once(server: Server) -> None:
    server.rows = healthy("a", "b")
    server.rows[Query.WAITING] *= 2
    assert (await signals_of(server)).waiting == (("m", 6.0),)


async def test_row_14_an_empty_answer_is_missing_and_not_zero(server: Server) -> None:
    signals = await signals_of(server)
    assert (signals.waiting, signals.completions, signals.memory_share) == (None, None, None)
    assert {signals.queue.kind, signals.flow.kind, signals.memory.kind} == {QualityKind.MISSING}


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "9e999"])
@pytest.mark.parametrize("query", [Query.WAITING, Query.SUCCESSES, Query.IN_SYSTEM, Query.BUSY])
async def test_row_15_what_is_not_finite_or_negative_is_refused_at_the_edge(
    server: Server, query: Query, value: str
) -> None:
    server.rows = healthy("a", "b")
    server.rows[query][0] = by_model("a", value)
    signals = await signals_of(server)
    assert QualityKind.NON_FINITE in {signals.queue.kind, signals.flow.kind}
    assert not (signals.queue.known and signals.flow.known)
    figures = [
        v for part in (signals.waiting, signals.successes, signals.in_system, signals.busy) for _, v in part or ()
    ]
    assert all(math.isfinite(figure) and figure >= 0 for figure in figures)


async def test_rail_half_of_the_pods_missing_is_partial_and_not_known(server: Server) -> None:
    server.rows = healthy("a", "b")
    signals = await signals_of(server, ("a", "b", "c", "d"))
    assert (signals.queue.kind, signals.queue.coverage, signals.queue.known) == (QualityKind.PARTIAL, 0.5, False)
    assert signals.waiting == (("m", 6.0),)


async def test_row_23_one_pod_of_five_missing_is_tolerated_and_reported(server: Server) -> None:
    server.rows = healthy("a", "b", "c", "d")
    signals = await signals_of(server, ("a", "b", "c", "d", "e"))
    assert (signals.queue.covered, signals.queue.expected, signals.queue.known) == (4, 5, True)


async def test_a_newly_found_target_without_a_rate_is_missing_and_not_zero(server: Server) -> None:
    server.rows = healthy("a", "b")
    server.rows[Query.SUCCESSES].pop()
    signals = await signals_of(server)
    assert (signals.flow.kind, signals.flow.covered, signals.queue.kind) == (QualityKind.PARTIAL, 1, QualityKind.FRESH)


async def test_a_pod_that_has_just_become_ready_need_not_have_a_sample(server: Server) -> None:
    signals = await signals_of(server, ready_for_s=3)
    assert signals.too_young
    assert signals.waiting is None


async def test_r18_a_stale_sample_is_not_believed_and_its_age_is_known(server: Server) -> None:
    server.rows = healthy("a", "b")
    server.rows[Query.AGE] = [row("a", 200), row("b", 240)]
    signals = await signals_of(server)
    assert (signals.queue.kind, signals.waiting) == (QualityKind.STALE, None)
    assert signals.queue.age_s == pytest.approx(200, abs=5)
    server.rows[Query.AGE].pop()
    assert (await signals_of(server)).queue.kind is QualityKind.PARTIAL


@pytest.mark.parametrize(
    "broken",
    [
        memory("a", nv_gpu_memory_used_bytes=0, nv_gpu_memory_total_bytes=0),
        memory("a", nv_gpu_memory_used_bytes=0, nv_gpu_memory_total_bytes=24e9),
        memory("a", nv_gpu_memory_used_bytes=30e9, nv_gpu_memory_total_bytes=24e9),
        memory("a", nv_gpu_memory_used_bytes=8e9),
        memory("a", DCGM_FI_DEV_FB_USED=9.223372036854775e18, DCGM_FI_DEV_FB_FREE=1000),
        memory("a", DCGM_FI_DEV_FB_USED=1000, DCGM_FI_DEV_FB_FREE=9.223372036854775e18),
        memory("a", DCGM_FI_DEV_FB_USED=0, DCGM_FI_DEV_FB_FREE=24000),
        memory("a", nv_gpu_memory_used_bytes=math.nan, nv_gpu_memory_total_bytes=24e9),
    ],
)
async def test_a_memory_gauge_that_failed_is_unknown_and_never_idle(server: Server, broken: list[Row]) -> None:
    server.rows = healthy("a", "b")
    server.rows[Query.MEMORY] = broken
    signals = await signals_of(server, ("a",))
    assert signals.memory_share is None
    assert not signals.memory.known


async def test_dcgm_speaks_where_triton_has_no_gauges_or_broken_ones(server: Server) -> None:
    server.rows = healthy("a")
    dcgm = memory("a", DCGM_FI_DEV_FB_USED=9000, DCGM_FI_DEV_FB_FREE=1000)
    for triton in ([], gauges("a", 0, 0)):
        server.rows[Query.MEMORY] = [*triton, *dcgm]
        assert (await signals_of(server, ("a",))).memory_share == pytest.approx(0.9)


async def test_the_bytes_on_the_fullest_accelerator_come_from_whoever_can_be_believed(server: Server) -> None:
    triton = [*gauges("a", 8e9), *(row("a", value, __name__=name, gpu_uuid="H") for name, value in HALF_FULL.items())]
    dcgm = memory("a", DCGM_FI_DEV_FB_USED=9000, DCGM_FI_DEV_FB_FREE=1000)
    for answer, used in (
        (triton, 12e9),
        ([*triton, *dcgm], 12e9),
        ([*gauges("a", 0, 0), *dcgm], 9000 * 2**20),
        (dcgm, 9000 * 2**20),
        (gauges("a", 30e9), None),
        ([], None),
    ):
        server.rows = {**healthy("a"), Query.MEMORY: answer}
        with reading(server.source()) as source:
            assert (await source.read()).memory_used.get((NS, "a")) == used


HALF_FULL = {"nv_gpu_memory_used_bytes": 12e9, "nv_gpu_memory_total_bytes": 24e9}


async def test_row_28_a_refused_connection_is_a_state_of_its_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with reading(PrometheusSignals(Settings(prometheus_url=url))) as source:
        signals = joined(await source.read())
    assert signals.queue.kind is QualityKind.MISSING
    assert signals.queue.detail == "Prometheus can't be reached"


async def test_a_server_that_never_answers_is_cut_off(server: Server) -> None:
    release = threading.Event()

    def hang(_handler: BaseHTTPRequestHandler, _query: Query) -> None:
        release.wait(20)

    server.reply = hang
    with reading(server.source(prometheus_timeout_s=0.2, prometheus_workers=8)) as source:
        samples = await asyncio.wait_for(source.read(), 10)
        assert set(samples.errors) == set(Query)
        assert samples.errors[Query.WAITING] == "Prometheus did not answer within 0.2 s"
        release.set()


async def test_a_server_that_drips_its_answer_is_cut_off_as_well(server: Server) -> None:
    stop = threading.Event()

    def drip(handler: BaseHTTPRequestHandler, _query: Query) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "100000")
        handler.end_headers()
        while not stop.wait(0.05):
            handler.wfile.write(b" ")
            handler.wfile.flush()

    server.reply = drip
    with reading(server.source(prometheus_timeout_s=0.3, prometheus_workers=8)) as source:
        samples = await asyncio.wait_for(source.read(), 10)
        assert samples.errors[Query.WAITING] == "Prometheus did not answer within 0.3 s"
        # The threads are free again: nothing of the last tick is still in flight.
        server.reply = server.answer
        server.rows = healthy("a", "b")
        assert joined(await source.read()).queue.kind is QualityKind.FRESH
    stop.set()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (503, b"no"),
        (400, b'{"status":"error"}'),
        (200, b"<html>"),
        (200, b'{"status":"success"}'),
        (200, b'{"status":"success","data":{"result":"scalar"}}'),
        (200, b'{"status":"success","data":{"result":[{"metric":{}}, 1]}}'),
        (200, b'{"status":"success","data":{"result":[{"metric":{"namespace":"ns","pod":"a"},"value":[1,"x"]}]}}'),
    ],
)
async def test_what_is_no_prometheus_is_never_believed(server: Server, status: int, body: bytes) -> None:
    server.reply = lambda handler, _query: send(handler, status, body)
    signals = await signals_of(server)
    assert (signals.queue.kind, signals.waiting) == (QualityKind.MISSING, None)
    assert signals.queue.detail


@pytest.mark.parametrize("query", list(Query))
async def test_row_22_a_single_query_that_fails_never_looks_like_less_load(server: Server, query: Query) -> None:
    server.rows = healthy("a", "b")

    def reply(handler: BaseHTTPRequestHandler, asked: Query) -> None:
        if asked is query:
            send(handler, 500, b"boom")
        else:
            server.answer(handler, asked)

    server.reply = reply
    signals = await signals_of(server, pipeline=LLM if query is Query.ENGINES else SINGLE_MODELS)
    lost = {
        Query.ENGINES: not signals.queue.known,
        Query.WAITING: not signals.queue.known,
        Query.AGE: not signals.queue.known,
        Query.SUCCESSES: not signals.flow.known,
        Query.FAILURES: not signals.flow.known,
        Query.IN_SYSTEM: signals.in_system is None,
        Query.BUSY: signals.busy is None,
        Query.MEMORY: signals.memory_share is None,
    }
    assert lost[query]


async def test_the_number_of_queries_does_not_grow_with_the_services(server: Server) -> None:
    counts = []
    for pods in (1, 1000):
        server.rows = healthy(*(f"p{i}" for i in range(pods)))
        with reading(server.source()) as source:
            await source.read()
            counts.append(source.queries)
    assert counts == [8, 8]


# --- models that feed each other, and backends with a queue of their own

CHAIN = Pipeline(ensembles=(("e", ("a", "b")),))
LLM = Pipeline(engines=("m",))


def engine(pod: str, metric: str, value: object, model: str = "m", **labels: str) -> Row:
    return row(pod, value, __name__=metric, model=model, version="1", **labels)


def vllm(pod: str, *, waiting: object, running: object) -> list[Row]:
    return [
        engine(pod, "vllm:num_requests_waiting", waiting),
        engine(pod, "vllm:num_requests_running", running),
    ]


def of_models(pod: str, **figures: float) -> list[Row]:
    return [by_model(pod, value, model) for model, value in figures.items()]


async def test_an_ensembles_queue_is_its_members_and_its_requests_count_once(server: Server) -> None:
    # As tritonserver 2.51 counted 8 clients of an ensemble of two steps.
    server.rows = {
        Query.WAITING: of_models("p", e=0, a=6, b=0),
        Query.SUCCESSES: of_models("p", e=5, a=5, b=5),
        Query.IN_SYSTEM: of_models("p", e=8, a=6.6, b=1.4),
        Query.BUSY: of_models("p", e=2, a=1, b=1),
        Query.MEMORY: gauges("p"),
    }
    signals = await signals_of(server, ("p",), pipeline=CHAIN)
    assert signals.waiting == (("a", 6.0), ("b", 0.0))
    assert signals.completions == 5.0
    assert signals.in_system == (("a", 6.6), ("b", 1.4))
    assert signals.busy == (("a", 1.0), ("b", 1.0))


async def test_what_clients_ask_of_a_member_itself_counts_beside_the_ensemble(server: Server) -> None:
    server.rows = {**healthy("p"), Query.SUCCESSES: of_models("p", e=5, a=7, b=5), Query.FAILURES: of_models("p", a=1)}
    assert (await signals_of(server, ("p",), pipeline=CHAIN)).completions == 8.0


async def test_a_member_that_failed_its_part_of_an_ensemble_makes_no_request_negative(server: Server) -> None:
    # The first step failed: the second was never asked.
    server.rows = {**healthy("p"), Query.SUCCESSES: of_models("p", a=0, b=0), Query.FAILURES: of_models("p", e=5, a=5)}
    assert (await signals_of(server, ("p",), pipeline=CHAIN)).completions == 5.0


async def test_a_queue_inside_the_backend_is_added_to_tritons(server: Server) -> None:
    rows = [engine_row for pod in ("a", "b") for engine_row in vllm(pod, waiting=20, running=16)]
    server.rows = {**healthy("a", "b"), Query.ENGINES: rows}
    signals = await signals_of(server, pipeline=LLM)
    assert signals.waiting == (("m", 46.0),)
    # Triton hands a request over at once and sees nothing more of it: the engine says what it works on.
    assert signals.busy == (("m", 32.0),)
    assert signals.in_system == (("m", 72.0),)
    assert signals.queue.kind is QualityKind.FRESH


async def test_tensorrt_llms_gauge_is_told_by_its_label(server: Server) -> None:
    metric = "nv_trt_llm_request_metrics"
    types = {"waiting": 3, "scheduled": 8, "active": 11, "max": 64, "context": 1}
    rows = [engine("a", metric, value, request_type=type_) for type_, value in types.items()]
    server.rows = {**healthy("a"), Query.ENGINES: rows}
    signals = await signals_of(server, ("a",), pipeline=LLM)
    assert (signals.waiting, signals.busy) == ((("m", 6.0),), (("m", 8.0),))


async def test_a_backends_gauge_that_is_missing_is_unknown_and_not_an_empty_queue(server: Server) -> None:
    server.rows = healthy("a", "b")
    signals = await signals_of(server, pipeline=LLM)
    assert (signals.queue.kind, signals.waiting) == (QualityKind.MISSING, None)
    assert "REPORT_CUSTOM_METRICS" in signals.queue.detail
    assert signals.busy is None
    assert signals.in_system is None
    server.rows[Query.ENGINES] = vllm("a", waiting=1, running=1)
    partly = await signals_of(server, pipeline=LLM)
    assert (partly.queue.kind, partly.queue.covered) == (QualityKind.PARTIAL, 1)
    assert partly.busy is None
    # A pod that has just become ready need not have a sample yet.
    young = await signals_of(server, ("b",), ready_for_s=1, pipeline=LLM)
    assert (young.too_young, young.queue.detail) == (True, "")


@pytest.mark.parametrize("value", ["NaN", "+Inf", -1])
async def test_a_backends_gauge_that_is_no_number_is_not_believed(server: Server, value: object) -> None:
    server.rows = {**healthy("a"), Query.ENGINES: vllm("a", waiting=value, running=1)}
    assert (await signals_of(server, ("a",), pipeline=LLM)).queue.kind is QualityKind.NON_FINITE


async def test_other_services_need_no_gauge_of_a_backend(server: Server) -> None:
    server.rows = healthy("a", "b")
    assert (await signals_of(server)).queue.kind is QualityKind.FRESH


def test_the_pipeline_is_read_from_the_spec() -> None:
    step = {"inputs": {"x": "x"}, "outputs": {"y": "y"}}
    spec = make_spec(
        models=[
            make_model(name="a"),
            make_model(name="llm", format="vLLM"),
            make_model(
                name="e", format="Ensemble", source=None,
                inputs=[{"name": "x", "dataType": "FP32", "dims": [4]}],
                outputs=[{"name": "y", "dataType": "FP32", "dims": [4]}],
                steps=[{"model": "a", **step}],
            ),
        ]
    )  # fmt: skip
    assert Pipeline.of(spec) == Pipeline(ensembles=(("e", ("a",)),), engines=("llm",))


async def test_without_a_prometheus_nothing_is_asked_and_that_is_said() -> None:
    with reading(PrometheusSignals(Settings())) as source:
        signals = joined(await source.read())
        assert source.queries == 0
    assert not signals.configured
    assert not signals.queue.known


async def test_row_3_the_last_samples_age_is_remembered_through_an_outage(server: Server) -> None:
    server.rows = healthy("a", "b")
    with reading(server.source()) as source:
        await source.read()
        server.rows = {}
        signals = joined(await source.read())
    assert signals.queue.kind is QualityKind.MISSING
    assert signals.queue.age_s == pytest.approx(0, abs=5)


@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not built yet; the sandbox's build makes it")
async def test_a_real_prometheus_answers_every_query(tmp_path: Path) -> None:
    """A real server scrapes a Triton-like page over HTTP; the signals come out of it as they went in."""
    page = (
        "".join(
            f'{name}{{model="m",version="1"}} {value}\n'
            for name, value in (("nv_inference_pending_request_count", 4), ("nv_inference_request_success", 0))
        )
        + 'nv_gpu_memory_used_bytes{gpu_uuid="G"} 6e9\nnv_gpu_memory_total_bytes{gpu_uuid="G"} 24e9\n'
    )

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
            """Nothing: a test's output is its own."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as target, socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        probe.close()
        serving = threading.Thread(target=target.serve_forever, kwargs={"poll_interval": 0.05})
        serving.start()
        address = f"127.0.0.1:{target.server_address[1]}"
        labels = {"namespace": NS, "pod": "a"}
        scrape = {"job_name": "t", "static_configs": [{"targets": [address], "labels": labels}]}
        config = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": [scrape]}
        (tmp_path / "prometheus.yml").write_text(json.dumps(config))
        assert PROMETHEUS is not None
        process = await asyncio.create_subprocess_exec(
            PROMETHEUS,
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            with reading(PrometheusSignals(Settings(prometheus_url=f"http://127.0.0.1:{port}"))) as source:
                for _ in range(120):
                    samples = await source.read()
                    signals = joined(samples, ("a",))
                    if signals.queue.known and signals.flow.known and signals.memory.known:
                        break
                    await asyncio.sleep(0.5)
        finally:
            process.terminate()
            await asyncio.wait_for(process.wait(), 20)
            target.shutdown()
            serving.join()
    assert samples.errors == {}
    assert (signals.waiting, signals.completions, signals.memory_share) == ((("m", 4.0),), 0.0, 0.25)
