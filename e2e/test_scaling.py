"""Replicas follow the load on real Triton pods and a real Prometheus, and nothing unknown ever reduces them."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
import urllib.request
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from conch import names
from operators import NAMESPACE, free_port, wait_until
from services import (
    NO_GPU,
    SLOW,
    SLOW_CAPACITY,
    Background,
    Service,
    Trail,
    condition,
    is_ready,
    kill_container,
    leader,
    prometheus_value,
    restricted_namespace,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clusters import Clusters
    from load import Result
    from sandbox import AnyRegion

pytestmark = pytest.mark.sandbox

SCALING = f"t-scaling-{uuid.uuid4().hex[:6]}"
MOST = 3
FALL_LIMIT_S = 240.0
HOLD_S = 5.0


# On a busy machine a start may be late, and its replacement would be a third replica.
IDLE = {**SLOW, **NO_GPU, "scaling.maxReplicas": 2}


@pytest.fixture(scope="module")
def services(clusters: Clusters) -> Iterator[dict[str, Service]]:
    """Everything that these tests use."""
    region = clusters.region(nodes=True)
    fields = {
        "steps": {**SLOW, "scaling.maxReplicas": MOST},
        "empty": {**IDLE, "scaling.minReplicas": 2},
        "half": {**IDLE, "scaling.minReplicas": 2},
        "nan": {**IDLE, "scaling.minReplicas": 2},
        "rivaled": IDLE,
    }
    yield {name: Service(region, SCALING, name, change) for name, change in fields.items()}
    region.kubectl("delete", "namespace", SCALING, "--wait=false", "--ignore-not-found")


@pytest.fixture
def running(quick_operator: AnyRegion, services: dict[str, Service]) -> dict[str, Service]:
    """The same, applied at once, so that their starts overlap; an HPA targets one of them."""
    region = quick_operator
    if not region.kubectl("get", "namespace", SCALING, "--ignore-not-found"):
        restricted_namespace(region, SCALING)
        for service in services.values():
            service.apply()
        scale_target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": names.deployment("rivaled")}
        hpa = {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": "rival", "namespace": SCALING},
            "spec": {"scaleTargetRef": scale_target, "minReplicas": 2, "maxReplicas": 2},
        }
        region.apply(hpa)
    return services


# --- one load step, up and down, with the operator's leader lost on the way


@dataclass(frozen=True)
class Fall:
    """What was seen until one replica was left."""

    whole: list[int]
    """spec.replicas from before the load step on, each change once."""
    result: Result


@dataclass(frozen=True)
class Story:
    """What was seen from the load step on."""

    up: list[int]
    """spec.replicas while the load was high, each change once."""
    told: list[str]
    """Messages of the Events of steps up."""
    explained: str
    leaders: list[str]
    falling: Future[Fall]
    """The rest, beside the tests that follow: each step down takes a quarter of a minute."""

    @property
    def fall(self) -> Fall:
        """The rest, once it is over."""
        return self.falling.result(FALL_LIMIT_S)


def replace_leader(region: AnyRegion, *, hard: bool) -> str:
    """End the leader, by SIGKILL to its process or by a graceful deletion; the new leader's name."""
    before = leader(region)
    if hard:
        kill_container(region, NAMESPACE, before, "operator")
    else:
        region.kubectl("delete", "pod", before, "-n", NAMESPACE, "--wait=false")
    wait_until(lambda: leader(region) not in {"", before}, 60, "another leader", 0.5)
    return leader(region)


@pytest.fixture(scope="module")
def stories() -> list[Story]:
    """What was played already, for the tests that look at it."""
    return []


@pytest.fixture(scope="module")
def thread() -> Iterator[ThreadPoolExecutor]:
    """For the story's second half; the module ends when that has ended."""
    with ThreadPoolExecutor(1, "falling") as pool:
        yield pool


@pytest.fixture
def story(running: dict[str, Service], stories: list[Story], thread: ThreadPoolExecutor) -> Story:
    """Played once: little load, more than one replica holds, more than two hold, little load again."""
    if not stories:
        with contextlib.ExitStack() as stack:
            service = running["steps"].wait_ready()
            load = stack.enter_context(Background(service.url(), rate=1))
            trail = stack.enter_context(Trail(service))
            up, told, explained, leaders = rise(service, load, trail)
            load.rate(0.3 * SLOW_CAPACITY)
            falling = thread.submit(fall, service, load, trail, stack.pop_all())
        stories.append(Story(up, told, explained, leaders, falling))
    return stories[0]


def rise(service: Service, load: Background, trail: Trail) -> tuple[list[int], list[str], str, list[str]]:
    """More and more load, and a leader lost at each step: replicas, Events, explanation, leaders."""
    region = service.region
    leaders = [leader(region)]
    time.sleep(2)
    load.rate(1.4 * SLOW_CAPACITY)
    trail.wait(lambda count: count > 1, "the first step up")
    wait_until(lambda: service.events("ScaledUp"), 20, "the Event of the first step", 0.5)
    leaders.append(replace_leader(region, hard=False))
    service.wait("a second replica", lambda status: status.get("replicas", {}).get("ready", 0) > 1)
    # More than two hold, and little enough that what piled up drains and that three have the spare of a reduction.
    load.rate(2.2 * SLOW_CAPACITY)
    trail.wait(lambda count: count == MOST, f"{MOST} replicas to be ordered", 90)
    leaders.append(replace_leader(region, hard=True))
    service.wait("all to be ready", lambda status: status.get("replicas", {}).get("ready") == MOST)
    # The new leader decides on this load for longer than a hold.
    time.sleep(1.5 * HOLD_S)
    return trail.steps, service.events("ScaledUp"), str(service.status()["scaling"]["message"]), leaders


def fall(service: Service, load: Background, trail: Trail, stack: contextlib.ExitStack) -> Fall:
    """Until one replica is left; then the service goes."""
    with stack:
        trail.wait(lambda count: count == 1, "one replica to be left", 120)
        wait_until(lambda: len(service.pods()) == 1, 60, "the others to be gone", 0.5)
    found = Fall(trail.steps, load.result())
    service.delete()
    return found


def test_a_load_step_raises_the_replicas_until_they_hold_it(story: Story) -> None:
    assert story.up[0] == 1
    assert story.up[-1] == MOST


def test_each_step_up_is_told_as_an_event_with_its_reason(story: Story) -> None:
    assert story.told
    assert all("from " in message and " to " in message for message in story.told)
    assert any("queue depth" in message or "surge" in message for message in story.told)
    assert story.explained


def test_row_24_losing_the_leader_at_each_step_never_reduces_and_ends_at_the_same_count(story: Story) -> None:
    assert len(set(story.leaders)) > 1
    assert story.up == sorted(story.up)


# --- metrics that can't be believed


@contextlib.contextmanager
def refused(region: AnyRegion) -> Iterator[None]:
    """Nothing listens."""
    prometheus = region.component("prometheus")
    prometheus.stop()
    try:
        yield
    finally:
        prometheus.start()
        wait_until(lambda: region.get_url(region.prometheus_url + "/-/ready") == 200, 30, "Prometheus to be back")


@contextlib.contextmanager
def silent(region: AnyRegion) -> Iterator[None]:
    """It takes connections and answers none."""
    prometheus = region.component("prometheus")
    prometheus.kill(signal.SIGSTOP)
    try:
        yield
    finally:
        prometheus.kill(signal.SIGCONT)


def drop(jobs: list[dict[str, Any]], label: str, pattern: str) -> None:
    """Leave targets of Triton out."""
    triton = next(job for job in jobs if job["job_name"] == "triton")
    triton["relabel_configs"].append({"action": "drop", "source_labels": [label], "regex": pattern})


@contextlib.contextmanager
def scraping(region: AnyRegion, config: dict[str, Any]) -> Iterator[None]:
    """Prometheus with another configuration."""
    path = region.prometheus_config
    usual = path.read_text()
    path.write_text(json.dumps(config))
    try:
        reload(region)
        yield
    finally:
        path.write_text(usual)
        reload(region)


def reload(region: AnyRegion) -> None:
    """Let Prometheus read its configuration again."""
    request = urllib.request.Request(f"{region.prometheus_url}/-/reload", method="POST")
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200


@contextlib.contextmanager
def fake_triton_metrics(region: AnyRegion, namespace: str, pods: list[str]) -> Iterator[str]:
    """A fake exporter that says NaN in the name of pods, which no Triton can be made to; its HOST:PORT."""
    labels = [f'model="filetype",version="1",namespace="{namespace}",pod="{pod}"' for pod in pods]
    page = "".join(
        f"nv_inference_pending_request_count{{{each}}} NaN\nnv_inference_request_success{{{each}}} 7\n"
        for each in labels
    )

    class FakeTritonMetrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: object) -> None:
            pass

    address = (region.address, free_port(region))
    server = ThreadingHTTPServer(address, FakeTritonMetrics)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        yield f"{address[0]}:{address[1]}"
    finally:
        server.shutdown()
        serving.join(10)
        server.server_close()


def measured(region: AnyRegion, service: Service) -> float:
    """Pods whose queue Prometheus knows as a number; NaN compares with nothing, so it isn't counted."""
    pods = f'{{namespace="{service.namespace}",pod=~"{names.deployment(service.name)}-.*"}}'
    return prometheus_value(region, f"count(nv_inference_pending_request_count{pods} >= 0)") or 0.0


@dataclass(frozen=True)
class Unmeasured:
    """What became of a service whose second replica nothing but its missing metrics kept."""

    message: str
    """Of MetricsStale, while True."""
    status: dict[str, Any]
    steps: list[int]

    def assert_not_reduced(self, reason: str, says: str) -> None:
        """The replicas stood, and the condition says why and what to ask Prometheus."""
        assert self.steps == [2]
        assert condition(self.status, "MetricsStale")["reason"] == reason
        assert says in self.message
        assert "Query: " in self.message
        assert condition(self.status, "Ready")["status"] == "True"
        assert self.status["scaling"]["decision"] == "Hold"


def lower(services: list[Service], says: str = "") -> list[Unmeasured]:
    """While metrics are broken: take away what keeps the second replicas, and look for longer than a hold.

    `says` is waited for: a Prometheus that ends refuses some queries in other words before nobody listens.
    """
    with contextlib.ExitStack() as watching:
        trails = [watching.enter_context(Trail(service)) for service in services]
        began = time.monotonic()
        for service in services:
            service.apply({"scaling.minReplicas": 1})
        try:
            messages = [service.wait_condition("MetricsStale", "True", says=says, limit_s=60) for service in services]
            time.sleep(max(2.0, 2 * HOLD_S - (time.monotonic() - began)))
            statuses = [service.status() for service in services]
        finally:
            for service in services:
                service.apply({"scaling.minReplicas": 2})
        return [
            Unmeasured(message, status, trail.steps)
            for message, status, trail in zip(messages, statuses, trails, strict=True)
        ]


def measured_and_wide(service: Service) -> Service:
    """Two replicas, both measured."""
    service.apply({"scaling.minReplicas": 2}).wait_ready(2)
    service.wait_condition("MetricsStale", "False", says="fresh")
    return service


@pytest.fixture(scope="module")
def looked_at() -> dict[str, Unmeasured]:
    """What was seen already, for the tests that share it."""
    return {}


@pytest.fixture
def unmeasured(running: dict[str, Service], looked_at: dict[str, Unmeasured]) -> dict[str, Unmeasured]:
    """Once, with one configuration of Prometheus: no pod of the first service, one of two, and NaN for the third."""
    if looked_at:
        return looked_at
    empty, half, nan = services = [measured_and_wide(running[name]) for name in ("empty", "half", "nan")]
    region = empty.region
    one = next(pod["metadata"]["name"] for pod in half.pods() if is_ready(pod))
    pods = [pod["metadata"]["name"] for pod in nan.pods() if is_ready(pod)]
    config = json.loads(region.prometheus_config.read_text())
    drop(config["scrape_configs"], "__meta_kubernetes_pod_name", f"empty-server-.*|nan-server-.*|{one}")
    with fake_triton_metrics(region, SCALING, pods) as target:
        fake = {"job_name": "fake-triton", "honor_labels": True, "static_configs": [{"targets": [target]}]}
        config["scrape_configs"].append(fake)
        with scraping(region, config):
            wait_until(
                lambda: [measured(region, service) for service in services] == [0, 1, 0], 40, "Prometheus to miss them"
            )
            time.sleep(2)  # a tick of the operator may have begun before
            results = lower(services)
    looked_at.update(zip(("empty", "half", "nan"), results, strict=True))
    return looked_at


def test_row_14_a_prometheus_without_our_series_reduces_nothing(unmeasured: dict[str, Unmeasured]) -> None:
    unmeasured["empty"].assert_not_reduced("MetricsMissing", "No ready replica has a sample")


def test_row_22_half_of_the_pods_missing_reduces_nothing(unmeasured: dict[str, Unmeasured]) -> None:
    unmeasured["half"].assert_not_reduced("MetricsPartial", "Some ready replicas have no sample")


def test_row_15_nan_reduces_nothing(unmeasured: dict[str, Unmeasured]) -> None:
    unmeasured["nan"].assert_not_reduced("MetricsNotFinite", "not finite")


# --- the story's end; what breaks Prometheus for all comes after it


def test_row_13_and_29_with_less_load_replicas_go_down_one_by_one_to_the_minimum(story: Story) -> None:
    down = story.fall.whole[len(story.up) - 1 :]
    assert down[-1] == 1
    assert all(earlier - later == 1 for earlier, later in pairwise(down))


def test_row_73_scale_down_under_load_and_lost_leaders_fail_no_request(story: Story) -> None:
    assert story.fall.result.total > 100
    assert story.fall.result.errors == {}


# --- a Prometheus that is no help


def test_row_17_a_prometheus_that_refuses_reduces_nothing(running: dict[str, Service]) -> None:
    service = measured_and_wide(running["empty"])
    with refused(service.region):
        (result,) = lower([service], "can't be reached")
    result.assert_not_reduced("MetricsMissing", "can't be reached")


def test_a_prometheus_that_hangs_reduces_nothing(running: dict[str, Service]) -> None:
    service = measured_and_wide(running["half"])
    with silent(service.region):
        (result,) = lower([service])
    result.assert_not_reduced("MetricsMissing", "answer")


def test_with_good_metrics_the_same_services_are_reduced(running: dict[str, Service]) -> None:
    service = measured_and_wide(running["nan"])
    service.apply({"scaling.minReplicas": 1})
    service.wait_replicas(lambda count: count == 1, "one", 60)
    assert service.events("ScaledDown")


# --- other writers of replicas


def test_a_persons_scale_holds_and_is_then_taken_back(running: dict[str, Service]) -> None:
    service = running["nan"].apply({"scaling.minReplicas": 1})
    service.wait_replicas(lambda count: count == 1, "one", 60)
    with Trail(service) as trail:
        deployment = names.deployment(service.name)
        service.region.kubectl("scale", "deployment", deployment, "-n", SCALING, "--replicas=2")
        scaled = time.monotonic()
        service.wait_condition("ScalingLimited", "True", says="changed replicas; this holds for scaleDown.hold")
        wait_until(lambda: service.events("ReplicasTakenBack"), 60, "the Event", 0.5)
        assert trail.wait(lambda count: count == 1, "one replica again") - scaled >= HOLD_S
    assert service.events("ReplicasSetByHand")


@pytest.mark.long  # tests/cluster shows the same without pods
def test_row_39_an_hpa_that_targets_us_is_named_and_not_fought(running: dict[str, Service]) -> None:
    service = running["rivaled"]
    message = service.wait_condition("ScalingLimited", "True", says="HorizontalPodAutoscaler rival")
    assert "stopped writing replicas" in message
    service.wait_replicas(lambda count: count == 2, "the HPA's two", 60)
    with Trail(service) as trail:
        time.sleep(1.5 * HOLD_S)
        assert trail.steps == [2]
    service.region.kubectl("delete", "hpa", "rival", "-n", SCALING)
    service.wait("its end to be seen", lambda s: condition(s, "ScalingLimited").get("reason") != "SecondScaler", 60)
