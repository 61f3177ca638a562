"""Replicas follow the load on real Triton pods and a real Prometheus, and nothing unknown ever reduces them."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable
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
    restricted_namespace,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clusters import Clusters
    from load import Result
    from sandbox import Region

pytestmark = pytest.mark.sandbox

SCALING = f"t-scaling-{uuid.uuid4().hex[:6]}"
MOST = 4
HOLD_S = 5.0


@pytest.fixture(scope="module", autouse=True)
def _away(clusters: Clusters) -> Iterator[None]:
    yield
    clusters.region(nodes=True).kubectl("delete", "namespace", SCALING, "--wait=false", "--ignore-not-found")


# --- one load step, up and down, with the operator's leader lost on the way


@dataclass(frozen=True)
class Story:
    """What was seen from the load step until one replica was left."""

    up: list[int]
    """spec.replicas while the load was high, each change once."""
    whole: list[int]
    result: Result
    told: list[str]
    """Messages of the Events of steps up."""
    explained: str
    leaders: list[str]
    step_to_patch_s: float


STORIES: list[Story] = []


def replace_leader(region: Region, *, hard: bool) -> str:
    """End the leader, by SIGKILL to its process or by a graceful deletion; the new leader's name."""
    before = leader(region)
    if hard:
        kill_container(region, NAMESPACE, before, "operator")
    else:
        region.kubectl("delete", "pod", before, "-n", NAMESPACE, "--wait=false")
    wait_until(lambda: leader(region) not in {"", before}, 60, "another leader", 0.5)
    return leader(region)


@pytest.fixture
def story(quick_operator: Region) -> Story:
    """Played once: little load, more than one replica holds, more than three hold, little load again."""
    if STORIES:
        return STORIES[0]
    region = quick_operator
    restricted_namespace(region, SCALING)
    service = Service(region, SCALING, "steps", {**SLOW, "scaling.maxReplicas": MOST}).apply().wait_ready()
    leaders = [leader(region)]
    with Background(service.url(), rate=1) as load, Trail(service) as trail:
        time.sleep(2)
        began = time.monotonic()
        load.rate(1.6 * SLOW_CAPACITY)
        patched = trail.wait(lambda count: count > 1, "the first step up")
        wait_until(lambda: service.events("ScaledUp"), 20, "the Event of the first step", 0.5)
        leaders.append(replace_leader(region, hard=False))
        load.rate((MOST - 0.8) * SLOW_CAPACITY)
        trail.wait(lambda count: count == MOST, f"{MOST} replicas to be ordered", 90)
        leaders.append(replace_leader(region, hard=True))
        service.wait("all to be ready", lambda status: status.get("replicas", {}).get("ready") == MOST)
        # The new leader decides on this load for longer than a hold.
        time.sleep(2 * HOLD_S)
        up, explained = trail.steps, str(service.status()["scaling"]["message"])
        told = service.events("ScaledUp")
        load.rate(0.3 * SLOW_CAPACITY)
        trail.wait(lambda count: count == 1, "one replica to be left", 120)
        wait_until(lambda: len(service.pods()) == 1, 60, "the others to be gone", 0.5)
    STORIES.append(Story(up, trail.steps, load.result(), told, explained, leaders, patched - began))
    service.delete()
    return STORIES[0]


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


def test_row_13_and_29_with_less_load_replicas_go_down_one_by_one_to_the_minimum(story: Story) -> None:
    down = story.whole[len(story.up) - 1 :]
    assert down[-1] == 1
    assert all(earlier - later == 1 for earlier, later in pairwise(down))


def test_row_73_scale_down_under_load_and_lost_leaders_fail_no_request(story: Story) -> None:
    assert story.result.total > 100
    assert story.result.errors == {}


# --- metrics that can't be believed


@pytest.fixture
def wide(quick_operator: Region) -> Service:
    """A service that stands at two replicas by its minimum, and that no load keeps there."""
    region = quick_operator
    restricted_namespace(region, SCALING)
    service = Service(region, SCALING, "wide", {**SLOW, **NO_GPU, "scaling.minReplicas": 2}).apply().wait_ready(2)
    service.wait_condition("MetricsStale", "False", says="fresh")
    return service


Broken = Callable[["Region", Service], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def refused(region: Region, _: Service) -> Iterator[None]:
    """Nothing listens."""
    prometheus = region.component("prometheus")
    prometheus.stop()
    try:
        yield
    finally:
        prometheus.start()
        wait_until(lambda: region.get_url(region.prometheus_url + "/-/ready") == 200, 30, "Prometheus to be back")


@contextlib.contextmanager
def silent(region: Region, _: Service) -> Iterator[None]:
    """It takes connections and answers none."""
    prometheus = region.component("prometheus")
    prometheus.kill(signal.SIGSTOP)
    try:
        yield
    finally:
        prometheus.kill(signal.SIGCONT)


@contextlib.contextmanager
def scraping(region: Region, change: Callable[[list[dict[str, Any]]], None]) -> Iterator[None]:
    """Prometheus with other scrape jobs."""
    path = region.layout.folder / "prometheus.json"
    usual = path.read_text()
    config = json.loads(usual)
    change(config["scrape_configs"])
    path.write_text(json.dumps(config))
    reload(region)
    try:
        yield
    finally:
        path.write_text(usual)
        reload(region)


def reload(region: Region) -> None:
    """Let Prometheus read its configuration again."""
    request = urllib.request.Request(f"{region.prometheus_url}/-/reload", method="POST")
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200


def drop(jobs: list[dict[str, Any]], label: str, value: str) -> None:
    """Leave targets of Triton out."""
    triton = next(job for job in jobs if job["job_name"] == "triton")
    triton["relabel_configs"].append({"action": "drop", "source_labels": [label], "regex": value})


def empty(region: Region, service: Service) -> contextlib.AbstractContextManager[None]:
    """It answers, and knows no series of this namespace's pods."""
    return scraping(region, lambda jobs: drop(jobs, "__meta_kubernetes_namespace", service.namespace))


def half(region: Region, service: Service) -> contextlib.AbstractContextManager[None]:
    """One of two pods isn't scraped."""
    pod = next(pod["metadata"]["name"] for pod in service.pods() if is_ready(pod))
    return scraping(region, lambda jobs: drop(jobs, "__meta_kubernetes_pod_name", pod))


@contextlib.contextmanager
def not_a_number(region: Region, service: Service) -> Iterator[None]:
    """A fake exporter says NaN in the name of each pod; no Triton can be made to."""
    pods = [pod["metadata"]["name"] for pod in service.pods() if is_ready(pod)]
    labels = [f'model="filetype",version="1",namespace="{service.namespace}",pod="{pod}"' for pod in pods]
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

    port = free_port(region)
    server = ThreadingHTTPServer(("127.0.0.1", port), FakeTritonMetrics)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    fake = {
        "job_name": "fake-triton",
        "honor_labels": True,
        "static_configs": [{"targets": [f"127.0.0.1:{port}"]}],
    }

    def change(jobs: list[dict[str, Any]]) -> None:
        drop(jobs, "__meta_kubernetes_namespace", service.namespace)
        jobs.append(fake)

    try:
        with scraping(region, change):
            yield
    finally:
        server.shutdown()
        server.server_close()


def assert_never_reduced(service: Service, broken: Broken, reason: str, says: str) -> None:
    """Break the metrics, take away what keeps the second replica, and see that it stays for longer than a hold."""
    region = service.region
    with broken(region, service):
        try:
            with Trail(service) as trail:
                service.apply({"scaling.minReplicas": 1})
                message = service.wait_condition("MetricsStale", "True", says=says, limit_s=60)
                time.sleep(2 * HOLD_S)
                status = service.status()
                assert trail.steps == [2]
            assert "Query: " in message
            assert condition(status, "MetricsStale")["reason"] == reason
            assert condition(status, "Ready")["status"] == "True"
            assert status["scaling"]["decision"] == "Hold"
        finally:
            service.apply({"scaling.minReplicas": 2})


def test_row_17_a_prometheus_that_refuses_reduces_nothing(wide: Service) -> None:
    assert_never_reduced(wide, refused, "MetricsMissing", "can't be reached")


def test_a_prometheus_that_hangs_reduces_nothing(wide: Service) -> None:
    assert_never_reduced(wide, silent, "MetricsMissing", "answer")


def test_row_14_a_prometheus_without_our_series_reduces_nothing(wide: Service) -> None:
    assert_never_reduced(wide, empty, "MetricsMissing", "No ready replica has a sample")


def test_row_15_nan_reduces_nothing(wide: Service) -> None:
    assert_never_reduced(wide, not_a_number, "MetricsNotFinite", "not finite")


def test_row_22_half_of_the_pods_missing_reduces_nothing(wide: Service) -> None:
    assert_never_reduced(wide, half, "MetricsPartial", "Some ready replicas have no sample")


# --- other writers of replicas; these follow the metrics' tests, whose service they go on with


def test_with_good_metrics_the_same_service_is_reduced(wide: Service) -> None:
    wide.apply({"scaling.minReplicas": 1})
    wide.wait_replicas(lambda count: count == 1, "one", 60)
    assert wide.events("ScaledDown")


@pytest.fixture
def narrow(quick_operator: Region) -> Service:
    """The same at its minimum of one."""
    restricted_namespace(quick_operator, SCALING)
    service = Service(quick_operator, SCALING, "wide", {**SLOW, **NO_GPU}).apply()
    service.wait_replicas(lambda count: count == 1, "one", 60)
    return service


def test_a_persons_scale_holds_and_is_then_taken_back(narrow: Service) -> None:
    deployment = names.deployment(narrow.name)
    with Trail(narrow) as trail:
        narrow.region.kubectl("scale", "deployment", deployment, "-n", SCALING, "--replicas=2")
        scaled = time.monotonic()
        narrow.wait(
            "the person to be seen", lambda s: condition(s, "ScalingLimited").get("reason") == "PersonScaled", 30
        )
        wait_until(lambda: narrow.events("ReplicasTakenBack"), 60, "the Event", 0.5)
        assert trail.wait(lambda count: count == 1, "one replica again") - scaled >= HOLD_S
    assert narrow.events("ReplicasSetByHand")


def test_row_39_an_hpa_that_targets_us_is_named_and_not_fought(narrow: Service) -> None:
    deployment = names.deployment(narrow.name)
    hpa = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "rival", "namespace": SCALING},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": deployment},
            "minReplicas": 2,
            "maxReplicas": 2,
        },
    }
    with Trail(narrow) as trail:
        narrow.region.apply(hpa)
        message = narrow.wait_condition("ScalingLimited", "True", says="HorizontalPodAutoscaler rival")
        trail.wait(lambda count: count == 2, "the HPA's own value")
        time.sleep(2 * HOLD_S)
        assert trail.steps == [1, 2]
    assert "stopped writing replicas" in message
    narrow.region.kubectl("delete", "hpa", "rival", "-n", SCALING)
    narrow.wait("its end to be seen", lambda s: condition(s, "ScalingLimited").get("reason") != "SecondScaler", 60)
