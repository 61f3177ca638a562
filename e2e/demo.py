"""`make demo`: one InferenceService on a real cluster from apply to deletion, with load that one replica can't hold.

Tests play it too: `Play` from apply to deletion, `problems` for what didn't go as promised.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import yaml
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from conch import names
from load import Load, Result, fetch, infer_answer, infer_request, percentile
from operators import NAMESPACE as OPERATOR_NAMESPACE
from operators import install_operator, wait_reachable
from sandbox import Sandbox, SandboxError
from sandbox.kind import KindSandbox
from sandbox.paths import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from sandbox import AnyRegion
    from sandbox.progress import Say

SAMPLE: Final = REPOSITORY / "manifests" / "samples" / "filetype.yaml"
PAGE: Final = REPOSITORY / "build" / "demo.html"
NAMESPACE: Final = "demo"

LIMIT_S: Final = 240.0
READY_LIMIT_S: Final = 90.0
GONE_LIMIT_S: Final = 90.0
QUIET_S: Final = 6.0
STEP_S: Final = (25.0, 60.0)
SETTLED_S: Final = 3.0
SEED: Final = 11

# Shares of what one replica can serve. The step is above 1, yet low enough that what piles up while the first new
# replica starts stays below the model's queue.maxSize on a busy machine.
BASE_SHARE: Final = 0.1
STEP_SHARE: Final = 1.5

RECENT_S: Final = 5.0
POLL_S: Final = 1.0
LINE_EVERY_S: Final = 2.0

# What every cluster puts into a namespace by itself.
NOT_OURS: Final = frozenset({"serviceaccount/default", "configmap/kube-root-ca.crt"})

FILES: Final = {
    "operator/conch/names.py": "python",
    "e2e/sandbox/images/pause/pause.go": "go",
    "manifests/operator.yaml": "yaml",
    "pyproject.toml": "toml",
    "README.md": "markdown",
    "Dockerfile": "dockerfile",
    "e2e/demo.html.j2": None,
    "LICENSE": "txt",
}
"""Files of this repository and the type that the model must see in them; None: whatever it says."""


class DemoError(RuntimeError):
    """What didn't happen, in a sentence."""


# --- the model: https://github.com/google/magika, model standard_v3_3


BLOCK, SIDE, PADDING = 4096, 1024, 256


def features(content: bytes) -> npt.NDArray[np.int32]:
    """INT32[2048]: the first 1024 bytes after leading whitespace and the last 1024 before trailing; 256: no byte."""
    begin, end = content[:BLOCK].lstrip()[:SIDE], content[-BLOCK:].rstrip()[-SIDE:]
    found = np.full(2 * SIDE, PADDING, np.int32)
    found[: len(begin)] = np.frombuffer(begin, np.uint8)
    found[2 * SIDE - len(end) :] = np.frombuffer(end, np.uint8)
    return found


@dataclass(frozen=True)
class Prediction:
    """What the model says of a file."""

    path: str
    label: str
    probability: float
    expected: str | None


async def predict(url: str, labels: Sequence[str], paths: Mapping[str, str | None]) -> list[Prediction]:
    """Send files of this repository, one request each."""
    found = []
    for path, expected in paths.items():
        body, headers = infer_request(bytes=features((REPOSITORY / path).read_bytes())[np.newaxis])
        status, answered, content = await fetch(url, body, headers)
        if status != 200:
            raise DemoError(f"{path}: HTTP {status}: {content[:300].decode(errors='replace')}")
        scores = infer_answer(answered, content)["target_label"][0]
        best = int(scores.argmax())
        found.append(Prediction(path, labels[best], float(scores[best]), expected))
    return found


# --- the service


@dataclass(frozen=True)
class Service:
    """The sample, as far as the demonstration needs it."""

    name: str
    model: str
    model_path: str
    """Where the Triton container sees the model's folder."""
    capacity: float
    """Requests per second that one replica serves."""
    queue: int
    """Requests that may wait in one replica."""


def read_sample(path: Path = SAMPLE) -> Service:
    """Read the sample's capacity off its own figures."""
    manifest = yaml.safe_load(path.read_text())
    model = manifest["spec"]["models"][0]
    compute_s = float(model["parameters"]["sandbox_compute_ms"]) / 1000
    capacity = model["maxBatchSize"] * model.get("instances", {}).get("count", 1) / compute_s
    folder = f"/sources/0{model['source']['uri'].partition('#')[2]}"
    return Service(manifest["metadata"]["name"], model["name"], folder, capacity, model["queue"]["maxSize"])


def address(region: AnyRegion, service: Service, namespace: str) -> str:
    """The URL of the model as clients call it: through the Service."""
    host = region.get("service", names.clients_service(service.name), "-n", namespace)["spec"]["clusterIP"]
    return f"http://{host}:{names.HTTP_PORT}/v2/models/{service.model}/infer"


def read_labels(region: AnyRegion, service: Service, namespace: str) -> list[str]:
    """The types that the model knows, from the file beside it."""
    deployment = f"deployment/{names.deployment(service.name)}"
    command = ["exec", "-n", namespace, deployment, "-c", names.SERVER_CONTAINER, "--", "cat"]
    return region.kubectl(*command, f"{service.model_path}/labels.txt").split()


def kinds_to_look_for(region: AnyRegion) -> list[str]:
    """Every kind that a namespace can hold, Events aside: they outlive what they are about."""
    kinds = region.kubectl("api-resources", "--verbs=list", "--namespaced", "-o", "name").split()
    return [kind for kind in kinds if kind not in {"events", "events.events.k8s.io"}]


def leftovers(region: AnyRegion, namespace: str, kinds: Sequence[str]) -> list[str]:
    """Everything in a namespace that its creation didn't bring."""
    found = region.kubectl("get", ",".join(kinds), "-n", namespace, "-o", "name", "--ignore-not-found").split()
    return sorted(set(found) - NOT_OURS)


def operator_diagnosis(region: AnyRegion) -> str:
    """The operator's pods and its last words."""
    parts = []
    for command in (("get", "pods"), ("logs", "deployment/conch-operator", "--all-pods", "--tail=5")):
        with contextlib.suppress(SandboxError):
            parts.append(region.kubectl(*command, "-n", OPERATOR_NAMESPACE).rstrip())
    return "\n".join(parts)


def diagnosis(region: AnyRegion, namespace: str) -> str:
    """What a person would look at first."""
    conditions = "{range .items[*].status.conditions[*]}{.type}={.status} {.reason}: {.message}{'\\n'}{end}"
    events = "{range .items[-8:]}{.reason}: {.message}{'\\n'}{end}"
    scope = ("-n", namespace)
    parts = []
    for command in (
        ("get", "inferenceservices,pods", *scope, "-o", "wide"),
        ("get", "inferenceservices", *scope, "-o", f"jsonpath={conditions}"),
        ("get", "events", *scope, "--sort-by=.lastTimestamp", "-o", f"jsonpath={events}"),
    ):
        with contextlib.suppress(SandboxError):
            parts.append(region.kubectl(*command).rstrip())
    return "\n".join([*parts, operator_diagnosis(region)])


# --- watching


@dataclass(frozen=True)
class Sample:
    """One look at everything: seconds since the load's start, rates per second, latencies in seconds."""

    at_s: float = 0.0
    phase: str = ""
    arrivals: float = 0.0
    answered: float = 0.0
    failed: int = 0
    in_flight: int = 0
    p50_s: float | None = None
    p99_s: float | None = None
    waiting: float | None = None
    memory_mib: float | None = None
    memory_total_mib: float | None = None
    ready: int | None = None
    wanted: int | None = None
    pods: int | None = None
    decision: str = ""


@dataclass
class Watch:
    """Looks once a second at the load, Prometheus and the API server, and keeps the series."""

    region: AnyRegion
    namespace: str
    load: Load
    show: Callable[[Sample], None]
    phase: str = ""
    samples: list[Sample] = field(default_factory=list)
    decisions: list[tuple[float, str]] = field(default_factory=list)
    seen: Sample = field(default_factory=Sample)
    counted: tuple[int, int] = (0, 0)
    """Requests started and ended until the last look."""

    @property
    def last(self) -> Sample:
        """The last look."""
        return self.samples[-1] if self.samples else self.seen

    @property
    def alone(self) -> bool:
        """Whether one replica is all there is, the ones that were told to go included."""
        return (self.last.ready, self.last.wanted, self.last.pods) == (1, 1, 1)

    def held(self, capacity: float) -> bool:
        """Whether the replicas that were ordered are ready and what piled up before is answered."""
        last = self.last
        return (last.ready or 0) > 1 and last.ready == last.wanted and last.in_flight < capacity

    async def run(self) -> None:
        """Look until cancelled; what can't be read now keeps its last value."""
        due = self.load.loop.time()
        while True:
            # A kubectl costs a hundred times what the two other looks do.
            every_other = [self.look_at_cluster()] if len(self.samples) % 2 == 0 else []
            await asyncio.gather(self.look_at_metrics(), *every_other)
            self.add()
            self.show(self.last)
            due = max(due + POLL_S, self.load.loop.time())
            await asyncio.sleep(due - self.load.loop.time())

    def add(self) -> None:
        """One more sample."""
        recent, now = self.load.recently(RECENT_S), self.load.elapsed_s
        good = [record.latency_s for record in recent if record.error is None]
        previous = self.samples[-1] if self.samples else None
        gap = now - previous.at_s if previous else max(now, 0.001)
        sample = replace(
            self.seen,
            at_s=now,
            phase=self.phase,
            arrivals=(self.load.started - self.counted[0]) / gap,
            answered=(len(self.load.records) - self.counted[1]) / gap,
            failed=self.load.failed,
            in_flight=len(self.load.in_flight),
            p50_s=percentile(good, 0.5),
            p99_s=percentile(good, 0.99),
        )
        self.counted = (self.load.started, len(self.load.records))
        self.samples.append(sample)

    async def look_at_cluster(self) -> None:
        """Replicas, pods and the last decision."""
        try:
            listed = await asyncio.to_thread(self.region.get, f"{names.SERVICE_PLURAL},pods", "-n", self.namespace)
        except SandboxError:
            return
        found = [item for item in listed["items"] if item["kind"] == names.SERVICE_KIND]
        status: dict[str, Any] = found[0].get("status", {}) if found else {}
        replicas, scaling = status.get("replicas", {}), status.get("scaling", {})
        decision = scaling.get("message", "")
        if decision and (not self.decisions or self.decisions[-1][1] != decision):
            self.decisions.append((self.load.elapsed_s, decision))
        self.seen = replace(
            self.seen,
            ready=replicas.get("ready"),
            wanted=replicas.get("wanted"),
            pods=len(listed["items"]) - len(found),
            decision=decision,
        )

    async def look_at_metrics(self) -> None:
        """What Prometheus scraped from Triton and from the GPUs' exporter."""
        where = f'{{namespace="{self.namespace}"}}'
        used, free = f"DCGM_FI_DEV_FB_USED{where}", f"DCGM_FI_DEV_FB_FREE{where}"
        queries = (f"sum(nv_inference_pending_request_count{where})", f"sum({used})", f"sum({used} + {free})")
        waiting, memory, total = await asyncio.gather(*(self.query(query) for query in queries))
        self.seen = replace(self.seen, waiting=waiting, memory_mib=memory, memory_total_mib=total)

    async def query(self, promql: str) -> float | None:
        """One number; None when Prometheus doesn't say."""
        try:
            url = f"{self.region.prometheus_url}/api/v1/query?query={quote(promql)}"
            status, _, body = await fetch(url, timeout_s=2)
            found = json.loads(body)["data"]["result"] if status == 200 else []
            return float(found[0]["value"][1]) if found else None
        except (OSError, ValueError, KeyError):
            return None


# --- the play


@dataclass
class Outcome:
    """Everything that happened, for the summary, the page and the exit status."""

    capacity: float = 0.0
    step_rate: float = 0.0
    ready_s: float | None = None
    predictions: list[Prediction] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    decisions: list[tuple[float, str]] = field(default_factory=list)
    phases: list[tuple[str, float]] = field(default_factory=list)
    result: Result = field(default_factory=lambda: Result(()))
    gone_s: float | None = None
    left: list[str] = field(default_factory=list)
    total_s: float = 0.0
    broken: str | None = None
    """Why the play ended early."""

    @property
    def wanted_path(self) -> list[int]:
        """Replicas as they were ordered, such as 1, 4, 3, 2, 1."""
        return [count for count, _ in groupby(s.wanted for s in self.samples if s.wanted is not None)]

    @property
    def ready_path(self) -> list[int]:
        """Ready replicas, each change once."""
        return [count for count, _ in groupby(s.ready for s in self.samples if s.ready is not None)]

    def summary(self) -> dict[str, Any]:
        """Plain figures."""
        used = [s.memory_mib for s in self.samples if s.memory_mib is not None]
        waiting = [s.waiting for s in self.samples if s.waiting is not None]
        step_at = next((at for phase, at in self.phases if phase == STEP), None)
        ordered = next((s.at_s for s in self.samples if (s.wanted or 0) > 1), None)
        arrived = next((s.at_s for s in self.samples if (s.ready or 0) > 1), None)
        back = next(
            (later.at_s for earlier, later in reversed(list(pairwise(self.samples))) if earlier.wanted != later.wanted),
            None,
        )

        def after_step(at: float | None) -> float | None:
            return None if at is None or step_at is None else round(at - step_at, 1)

        return {
            "ok": not problems(self),
            "problems": problems(self),
            "seconds": round(self.total_s, 1),
            "ready_after_s": self.ready_s,
            "capacity_per_replica": self.capacity,
            "step_rate": self.step_rate,
            **self.result.summary(),
            "replicas_wanted": self.wanted_path,
            "replicas_ready": self.ready_path,
            "most_waiting": max(waiting, default=None),
            "most_gpu_memory_mib": max(used, default=None),
            "step_to_order_s": after_step(ordered),
            "step_to_second_ready_s": after_step(arrived),
            "last_change_s": after_step(back),
            "gone_after_s": self.gone_s,
            "left": self.left,
            "predictions": {p.path: [p.label, round(p.probability, 3)] for p in self.predictions},
        }


QUIET: Final = "quiet"
STEP: Final = "load step"
BACK: Final = "scaling back"


def problems(outcome: Outcome) -> list[str]:
    """What makes the demonstration a failure; empty: it showed what it promises."""
    found = [] if outcome.broken is None else [outcome.broken]
    for error, count in outcome.result.errors.items():
        found.append(f"{count} of {outcome.result.total} requests failed: {error}")
    wanted, ready = outcome.wanted_path, outcome.ready_path
    if wanted[:1] != [1] or wanted[-1:] != [1] or max(ready, default=0) < 2 or ready[-1:] != [1]:
        found.append(f"replicas did not go 1 → N → 1: ordered {wanted or 'none'}, ready {ready or 'none'}")
    found += [
        f"{p.path} was taken for {p.label}, not {p.expected}"
        for p in outcome.predictions
        if p.expected not in (None, p.label)
    ]
    if outcome.gone_s is None:
        found.append(f"left after deletion: {', '.join(outcome.left) or 'not looked at'}")
    return found


class Stage:
    """What the play tells while it runs; the defaults say nothing."""

    def say(self, text: str) -> None:
        """One line."""

    def predicted(self, predictions: Sequence[Prediction]) -> None:
        """The types of the files sent."""

    @contextlib.contextmanager
    def table(self) -> Iterator[Callable[[Sample], None]]:
        """A place for the series, and the function that shows the latest of it."""
        yield lambda _sample: None


@dataclass
class Play:
    """From apply to deletion, on a cluster that has the operator."""

    region: AnyRegion
    stage: Stage
    namespace: str = NAMESPACE
    sample: Path = SAMPLE
    limit_s: float = LIMIT_S
    outcome: Outcome = field(default_factory=Outcome)
    service: Service = field(init=False)

    def run(self) -> Outcome:
        """Play; what doesn't go as promised is in the outcome, see `problems`."""
        self.service = read_sample(self.sample)
        self.outcome.capacity = self.service.capacity
        self.outcome.step_rate = STEP_SHARE * self.service.capacity
        began = time.monotonic()
        with self.region.network():
            try:
                asyncio.run(self.perform())
            finally:
                self.delete()
                self.outcome.total_s = time.monotonic() - began
        return self.outcome

    async def kubectl(self, *arguments: str | Path, timeout_s: float = 60) -> str:
        """kubectl in the play's namespace, beside whatever else runs."""
        words = (*arguments, "-n", self.namespace)
        return await asyncio.to_thread(self.region.kubectl, *words, timeout_s=timeout_s)

    async def perform(self) -> None:
        """Everything but the deletion."""
        try:
            async with asyncio.timeout(self.limit_s):
                await self.under_load(await self.come_up())
        except TimeoutError:
            phase = self.outcome.phases[-1][0] if self.outcome.phases else "coming up"
            self.outcome.broken = f"not done after {self.limit_s:.0f} s, in the phase {phase!r}"
        except (DemoError, SandboxError, OSError) as error:
            self.outcome.broken = str(error)
        if self.outcome.broken:
            self.stage.say(await asyncio.to_thread(diagnosis, self.region, self.namespace))

    async def come_up(self) -> str:
        """One apply, until the service answers; then the files. Returns the model's URL."""
        began = time.monotonic()
        restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
        meta = {"name": self.namespace, "labels": restricted}
        await asyncio.to_thread(self.region.apply, {"apiVersion": "v1", "kind": "Namespace", "metadata": meta})
        self.stage.say(f"$ kubectl apply -n {self.namespace} -f {os.path.relpath(self.sample, REPOSITORY)}")
        await self.kubectl("apply", "-f", self.sample)
        await self.wait_ready(began + READY_LIMIT_S)
        self.outcome.ready_s = round(time.monotonic() - began, 1)
        self.stage.say(await self.kubectl("get", "cisvc"))
        url = await asyncio.to_thread(address, self.region, self.service, self.namespace)
        labels = await asyncio.to_thread(read_labels, self.region, self.service, self.namespace)
        wait_reachable(url)
        self.outcome.predictions = await predict(url, labels, FILES)
        self.stage.predicted(self.outcome.predictions)
        return url

    async def wait_ready(self, deadline: float) -> None:
        """Until the service says that it is Ready. In short waits: an interrupt must not sit out a long one."""
        kind = f"{names.SERVICE_PLURAL}.{names.GROUP}/{self.service.name}"
        while True:
            try:
                await self.kubectl("wait", kind, "--for=condition=Ready", "--timeout=5s")
            except SandboxError as error:
                if time.monotonic() > deadline:
                    raise DemoError(f"{self.service.name} is not Ready after {READY_LIMIT_S:.0f} s: {error}") from error
            else:
                return

    async def under_load(self, url: str) -> None:
        """Little load, a step that one replica can't hold, little load until one replica is left."""
        requests = [infer_request(bytes=features((REPOSITORY / path).read_bytes())[np.newaxis]) for path in FILES]
        bodies, headers = [body for body, _ in requests], requests[0][1]
        base = BASE_SHARE * self.service.capacity
        self.stage.say(
            f"one replica serves {self.service.capacity:.0f} requests/s; load: {base:.0f}/s, then "
            f"{self.outcome.step_rate:.0f}/s, then {base:.0f}/s (Poisson arrivals, one connection per request)"
        )
        load = Load(url, bodies, base, headers=headers, seed=SEED)
        try:
            with self.stage.table() as show:
                async with load:
                    watch = Watch(self.region, self.namespace, load, show)
                    self.outcome.samples, self.outcome.decisions = watch.samples, watch.decisions
                    watching = asyncio.create_task(watch.run())
                    try:
                        await self.phases(watch)
                        load.rate = 0
                        await load.drained()
                    finally:
                        watching.cancel()
                        await asyncio.wait([watching])
        finally:
            self.outcome.result = load.result()

    async def phases(self, watch: Watch) -> None:
        """The rates over time. Each phase ends with what it waits for; the play's own limit bounds them."""
        load = watch.load

        def enter(phase: str, share: float) -> None:
            watch.phase, load.rate = phase, share * self.service.capacity
            self.outcome.phases.append((phase, load.elapsed_s))

        enter(QUIET, BASE_SHARE)
        await asyncio.sleep(QUIET_S)
        enter(STEP, STEP_SHARE)
        began, (least, most) = load.elapsed_s, STEP_S
        while not watch.held(self.service.capacity) or load.elapsed_s - began < least:
            if load.elapsed_s - began > most:
                break
            await asyncio.sleep(POLL_S)
        if max(self.outcome.ready_path, default=0) < 2:
            raise DemoError(
                f"no second replica was ready after {most:.0f} s of {self.outcome.step_rate:.0f} requests/s"
            )
        enter(BACK, BASE_SHARE)
        alone_since: float | None = None
        while alone_since is None or load.elapsed_s - alone_since < SETTLED_S:
            await asyncio.sleep(POLL_S)
            alone_since = (alone_since or load.elapsed_s) if watch.alone else None

    def delete(self) -> None:
        """Delete the service and see that nothing of it stays; then the namespace, in the background."""
        kubectl, outcome, deleted = self.region.kubectl, self.outcome, time.monotonic()
        scope = ("-n", self.namespace, "--ignore-not-found", "--wait=false")
        try:
            self.stage.say(f"$ kubectl delete cisvc --all -n {self.namespace}")
            kubectl("delete", names.SERVICE_PLURAL, "--all", *scope)
            kinds = kinds_to_look_for(self.region)
            while outcome.gone_s is None and time.monotonic() - deleted < GONE_LIMIT_S:
                outcome.left = leftovers(self.region, self.namespace, kinds)
                if not outcome.left:
                    outcome.gone_s = round(time.monotonic() - deleted, 1)
                    break
                time.sleep(POLL_S)
            kubectl("delete", "namespace", self.namespace, "--ignore-not-found", "--wait=false")
        except SandboxError as error:
            outcome.broken = outcome.broken or str(error)


# --- on the terminal


BARS: Final = " ▁▂▃▄▅▆▇█"
WIDTH: Final = 45


def bars(values: Sequence[float | None], most: float | None) -> str:
    """A line of bars for the last values, from zero to the most there ever was."""
    top = len(BARS) - 1
    return "".join("·" if value is None else BARS[round(value / (most or 1.0) * top)] for value in values[-WIDTH:])


def seconds(value: float | None) -> str:
    """A latency for people."""
    if value is None:
        return "-"
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s"


def number(value: float | None, unit: str = "") -> str:
    """A figure for people."""
    return "-" if value is None else f"{value:.0f}{unit}"


def memory(sample: Sample) -> str:
    """GPU memory of all replicas."""
    if sample.memory_mib is None or not sample.memory_total_mib:
        return "-"
    return f"{sample.memory_mib / 1024:.1f} GiB ({100 * sample.memory_mib / sample.memory_total_mib:.0f} %)"


def line(sample: Sample) -> str:
    """A sample as one line."""
    return (
        f"{sample.at_s:5.0f} s  {sample.phase:<12}  arrivals {sample.arrivals:4.0f}/s  "
        f"waiting {number(sample.waiting):>4}  replicas {number(sample.ready)}/{number(sample.wanted)}  "
        f"GPU memory {memory(sample)}  p99 {seconds(sample.p99_s):>7}  failed {sample.failed}  {sample.decision}"
    )


class Terminal(Stage):
    """A live table on a terminal, lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, text: str) -> None:
        """One line, or what a command printed."""
        self.console.print(Text(text.rstrip()), soft_wrap=True)

    def predicted(self, predictions: Sequence[Prediction]) -> None:
        """Files and their types."""
        if not self.console.is_terminal:
            for each in predictions:
                self.say(f"  {each.path:<36} {each.label} ({each.probability:.2f})")
            return
        table = Table("file", "predicted type", "probability", title="Real files, real model")
        for each in predictions:
            table.add_row(each.path, each.label, f"{each.probability:.2f}")
        self.console.print(table)

    @contextlib.contextmanager
    def table(self) -> Iterator[Callable[[Sample], None]]:
        """The live table."""
        samples: list[Sample] = []
        if not self.console.is_terminal:
            due = [0.0]

            def print_line(sample: Sample) -> None:
                if sample.at_s >= due[0]:
                    due[0] = sample.at_s + LINE_EVERY_S - POLL_S / 2
                    self.say(line(sample))

            yield print_line
            return
        with Live(console=self.console, auto_refresh=False) as live:

            def redraw(sample: Sample) -> None:
                samples.append(sample)
                live.update(picture(samples), refresh=True)

            yield redraw


def picture(samples: Sequence[Sample]) -> Group:
    """The live table: what is now, the last minute, the most so far."""
    last = samples[-1]
    table = Table(title=f"{last.at_s:.0f} s · {last.phase}", title_justify="left")
    for heading, justify in (("", "left"), ("now", "right"), ("lately", "left"), ("most", "right")):
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]

    def row(title: str, now: str, values: Sequence[float | None], show: Callable[[float | None], str]) -> None:
        most = max((value for value in values if value is not None), default=None)
        table.add_row(title, now, bars(values, most), show(most))

    row("arrivals/s", number(last.arrivals), [s.arrivals for s in samples], number)
    row("waiting", number(last.waiting), [s.waiting for s in samples], number)
    row("replicas ready", f"{number(last.ready)} of {number(last.wanted)}", [s.ready for s in samples], number)
    used = [None if s.memory_mib is None else s.memory_mib / 1024 for s in samples]
    row("GPU memory", memory(last), used, lambda value: number(value, " GiB"))
    row("p99 of 5 s", seconds(last.p99_s), [s.p99_s for s in samples], seconds)
    row("failed", str(last.failed), [float(s.failed) for s in samples], number)
    return Group(table, Text(f"last decision: {last.decision or '-'}"))


def tell_summary(stage: Stage, outcome: Outcome) -> None:
    """The numbers, in a few lines."""
    figures = outcome.summary()
    stage.say("")
    stage.say(
        f"{figures['requests']} requests, {figures['failed']} failed; p50 {seconds(figures['p50_s'])}, "
        f"p99 {seconds(figures['p99_s'])}; most waiting {number(figures['most_waiting'])}"
    )
    wanted, ready = (" → ".join(map(str, path)) for path in (outcome.wanted_path, outcome.ready_path))
    stage.say(
        f"replicas ordered {wanted}, ready {ready}; after the step began, the first was ordered at "
        f"{number(figures['step_to_order_s'])} s and ready at {number(figures['step_to_second_ready_s'])} s"
    )
    stage.say(
        f"Ready {number(outcome.ready_s)} s after apply; everything gone {number(outcome.gone_s)} s after deletion; "
        f"{outcome.total_s:.0f} s in all"
    )
    for problem in figures["problems"]:
        stage.say(f"FAILED: {problem}")


# --- from the command line


@contextlib.contextmanager
def cluster(options: argparse.Namespace, tell: Say) -> Iterator[AnyRegion]:
    """The cluster, which ends with this process; one that was up already is left up."""
    if options.cluster == "kind":
        made = KindSandbox.up(tell=tell)
        try:
            yield made.region()
        finally:
            tell("taking the cluster down")
            made.down()
        return
    running = attached(options.run)
    if running is not None:
        tell(f"sandbox {options.run!r} is up already and stays up")
        yield running.region()
        return
    started = Sandbox.up(options.run, owner=os.getpid(), tell=tell)
    try:
        yield started.region()
    finally:
        tell("taking the cluster down")
        started.down()


def attached(run: str) -> Sandbox | None:
    """The sandbox of a run, if it is up."""
    try:
        running = Sandbox.attach(run)
    except SandboxError:
        return None
    return running if running.alive() else None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m demo", description="The main job, end to end, on a real cluster.")
    top.add_argument("--cluster", choices=["sandbox", "kind"], default="sandbox")
    top.add_argument("--run", default="demo", help="name of the sandbox's run (default: demo)")
    top.add_argument("--page", type=Path, default=PAGE, help="where the page is written (default: build/demo.html)")
    top.add_argument("--json", action="store_true", help="print a summary for programs; all else goes to stderr")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """0: everything that the demonstration promises was seen."""
    options = parser().parse_args(arguments)
    console = Console(stderr=options.json, highlight=False)
    stage = Terminal(console)
    # A program started in the background of a script has SIGINT ignored, and could not clean up.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        with cluster(options, stage.say) as region:
            stage.say("installing the operator: crds/, manifests/operator.yaml")
            began = time.monotonic()
            try:
                install_operator(region)
            except SandboxError:
                stage.say(operator_diagnosis(region))
                raise
            stage.say(f"the operator is available after {time.monotonic() - began:.1f} s")
            outcome = Play(region, stage).run()
        import demo_page  # matplotlib takes a second to load

        demo_page.write(options.page, outcome)
        tell_summary(stage, outcome)
        stage.say(f"plots: {os.path.relpath(options.page)}")
    except (DemoError, SandboxError) as error:
        stage.say(f"FAILED: {error}")
        return 1
    except KeyboardInterrupt:
        stage.say("interrupted; cleaned up")
        return 130
    if options.json:
        print(json.dumps(outcome.summary()))
    return 1 if problems(outcome) else 0


if __name__ == "__main__":
    sys.exit(main())
