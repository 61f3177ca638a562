"""The path of `make demo` on the cluster of the test run; before it, what the demonstration and its load stand on."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import yaml

import demo
import demo_page
from load import Load, Record, Result, check_infer, fetch, infer_answer, infer_request
from services import set_field

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from sandbox import AnyRegion

HEAD = json.dumps(
    {"outputs": [{"name": "o", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}]}
).encode()
RIGHT = HEAD + np.array([1, 2], np.float32).tobytes()
HEADERS = f"Content-Length: {len(RIGHT)}\r\nInference-Header-Content-Length: {len(HEAD)}\r\n".encode()
ANSWERS = {
    "/right": b"HTTP/1.1 200 OK\r\n" + HEADERS + b"\r\n" + RIGHT,
    "/refused": b'HTTP/1.1 503 Service Unavailable\r\nContent-Length: 16\r\n\r\n{"error":"full"}',
    "/cut": b"HTTP/1.1 200 OK\r\n" + HEADERS + b"\r\n" + RIGHT[:-1],
    "/empty": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "/noise": b"220 mail.example\r\n\r\n",
}


@contextlib.asynccontextmanager
async def server() -> AsyncIterator[str]:
    """Answers each path as the table says; paths that it doesn't know get no answer."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            path = head.split(b" ")[1].decode()
            if path not in ANSWERS:
                await reader.read()
            writer.write(ANSWERS.get(path, b""))
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


async def test_a_load_of_right_answers_has_no_failures_and_keeps_its_rate() -> None:
    async with server() as url, Load(f"{url}/right", b"x", 50, seed=1) as load:
        await asyncio.sleep(1)
        load.rate = 0
        await load.drained()
        result = load.result()
    assert result.failed == 0, result.errors
    assert result.total == load.started > 20
    assert sum(second.arrivals for second in result.series()) == result.total
    assert result.series()[-1].in_flight == 0


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/refused", "HTTP 503"),
        ("/cut", "closed before the answer"),
        ("/empty", "no valid inference answer"),
        ("/noise", "no HTTP answer"),
        ("/silent", "no answer within 0.5 s"),
    ],
)
async def test_whatever_is_no_valid_answer_in_time_counts_as_failed(path: str, words: str) -> None:
    async with server() as url, Load(f"{url}{path}", b"x", 100, timeout_s=0.5, max_requests=5) as load:
        await asyncio.sleep(0.5)
        await load.drained()
    assert [words in str(record.error) for record in load.records] == [True] * 5


async def test_arrivals_do_not_wait_for_answers_and_are_bounded() -> None:
    async with server() as url, Load(f"{url}/silent", b"x", 200, timeout_s=2, max_requests=60) as load:
        await asyncio.sleep(0.5)
        assert len(load.in_flight) == load.started == 60


async def test_a_server_that_is_not_there_fails_every_request() -> None:
    async with server() as url:
        pass
    async with Load(f"{url}/right", b"x", 100, max_requests=5) as load:
        await asyncio.sleep(0.3)
    assert load.failed == 5
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await fetch(f"{url}/right")


@pytest.mark.parametrize("url", ["http://8.8.8.8/", "http://example.com/", "https://127.0.0.1/"])
def test_only_private_addresses_are_loaded(url: str) -> None:
    with pytest.raises(ValueError, match="private address"):
        Load(url, b"", 1)


def test_an_inference_request_and_its_answer_follow_the_binary_protocol() -> None:
    body, headers = infer_request(bytes=np.arange(4, dtype=np.int32).reshape(1, 4))
    size = int(headers["Inference-Header-Content-Length"])
    assert json.loads(body[:size])["inputs"][0]["shape"] == [1, 4]
    assert body[size:] == np.arange(4, dtype=np.int32).tobytes()
    answered = {"inference-header-content-length": str(len(HEAD))}
    assert check_infer(200, answered, RIGHT) is None
    assert infer_answer(answered, RIGHT)["o"].tolist() == [1, 2]
    with pytest.raises(ValueError, match="header explains"):
        infer_answer(answered, RIGHT + b"more")


def test_a_file_becomes_its_first_and_last_bytes_without_surrounding_whitespace() -> None:
    short = demo.features(b"  ab \n")
    assert short[:5].tolist() == [97, 98, 32, 10, 256]
    assert short[-5:].tolist() == [256, 32, 32, 97, 98]
    long = demo.features(b"\n" + b"a" * 5000 + b"b" * 5000 + b" ")
    assert set(long[:1024].tolist()) == {97}
    assert set(long[1024:].tolist()) == {98}
    assert demo.features(b"").tolist() == [256] * 2048


def outcome(*replicas: int) -> demo.Outcome:
    samples = [demo.Sample(at_s=float(at), ready=count, wanted=count) for at, count in enumerate(replicas)]
    return demo.Outcome(samples=samples, gone_s=1.0, result=Result([Record(0, 0.1, 200, None)]))


def test_the_demonstration_fails_when_it_did_not_show_what_it_promises() -> None:
    assert demo.problems(outcome(1, 3, 2, 1)) == []
    assert "1 → N → 1" in demo.problems(outcome(1, 1, 1))[0]
    assert "1 → N → 1" in demo.problems(outcome(1, 3))[0]
    lost = replace(outcome(1, 2, 1), result=Result([Record(0, 0.1, 503, "HTTP 503")]))
    assert demo.problems(lost) == ["1 of 1 requests failed: HTTP 503"]
    left = replace(outcome(1, 2, 1), gone_s=None, left=["pod/x"])
    assert demo.problems(left) == ["left after deletion: pod/x"]
    wrong = replace(outcome(1, 2, 1), predictions=[demo.Prediction("a.py", "go", 0.9, "python")])
    assert demo.problems(wrong) == ["a.py was taken for go, not python"]


def test_the_page_escapes_what_the_operator_says_and_loads_nothing() -> None:
    page = demo_page.render(replace(outcome(1, 2, 1), decisions=[(1.0, "<script>alert(1)</script>")]))
    assert "&lt;script&gt;" in page
    assert page.count("<svg") == 1
    assert not [word for word in ("<script", "<link", "src=", "@import", "url(http") if word in page]


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """The sample, with a shorter hold and one replica fewer: each on the way down takes a quarter of a minute."""
    manifest = yaml.safe_load(demo.SAMPLE.read_text())
    set_field(manifest["spec"], "scaling.scaleDown.hold", "10s")
    set_field(manifest["spec"], "scaling.maxReplicas", 3)
    path = tmp_path / demo.SAMPLE.name
    path.write_text(yaml.safe_dump(manifest))
    return path


@pytest.mark.sandbox
@pytest.mark.usefixtures("operator")
def test_one_service_goes_from_apply_through_load_to_deletion_without_a_lost_request(
    region: AnyRegion, sample: Path
) -> None:
    said: list[str] = []

    class Told(demo.Stage):
        def say(self, text: str) -> None:
            said.append(text)

    played = demo.Play(region, Told(), namespace="demo-path", sample=sample).run()
    assert demo.problems(played) == [], "\n".join([*said, *map(demo.line, played.samples)])
    figures = played.summary()
    assert figures["ok"]
    assert figures["requests"] > played.step_rate * demo.STEP_S[0]
    assert {prediction.label for prediction in played.predictions} >= {"python", "go", "yaml"}
    assert any(sample.waiting for sample in played.samples)
    assert max(sample.memory_mib or 0 for sample in played.samples) > 0
    assert any(decision for _, decision in played.decisions)
    json.dumps(figures)
    assert "As promised" in demo_page.render(played)
