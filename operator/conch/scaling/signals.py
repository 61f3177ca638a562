"""Prometheus → signals with a quality, for all services at once: a fixed number of queries a tick (I/O).

Quality is decided here, once. What leaves this module is finite or None.
"""

from __future__ import annotations

import asyncio
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import requests
from prometheus_api_client.exceptions import PrometheusApiClientException
from prometheus_api_client.prometheus_connect import PrometheusConnect
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError
from urllib3.util.retry import Retry

from conch.scaling.policy import Quality, QualityKind, Signals
from conch.triton.metrics import (
    DCGM_BLANK,
    DCGM_GPU_LABEL,
    DCGM_MEMORY_FREE,
    DCGM_MEMORY_USED,
    ENGINE_RUNNING,
    ENGINE_WAITING,
    MODEL_LABEL,
    TRITON_GPU_LABEL,
    TRITON_MEMORY_TOTAL,
    TRITON_MEMORY_USED,
    Labels,
    Query,
    engine_figure,
    promql,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from conch.api.inferenceservice import InferenceServiceSpec
    from conch.config import Settings
    from conch.triton.backends import Format, WaitingGauge

MAX_ANSWER_BYTES: Final = 256 * 2**20
MEMORY_EVERY_S: Final = 14.0
FORGET_S: Final = 86400.0
FORGOTTEN_PODS: Final = 1000
_PIECE_BYTES: Final = 2**16
DCGM_UNIT: Final = 2**20
"""Bytes of what DCGM's gauges of memory count."""

Pod = tuple[str, str]
"""Namespace and name."""
Figures = dict[Pod, dict[str, float]]
"""By pod and model, as Prometheus said it: not yet checked."""


@dataclass(frozen=True, slots=True)
class ReadyPod:
    """A live, ready pod, as Kubernetes shows it."""

    name: str
    ready_since: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How the figures of a service's models hang together.

    Triton counts a request to an ensemble once for the ensemble and once for each step, and an ensemble's time is its
    steps' time again. Its queue is its members': its own gauge stays 0 (both seen on tritonserver 2.51).
    """

    ensembles: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Each ensemble with the model of each of its steps."""
    engines: tuple[str, ...] = ()
    """Models whose backend queues inside itself; without its gauges nothing is known of their queue."""

    @classmethod
    def of(cls, spec: InferenceServiceSpec) -> Pipeline:
        """From the models of a spec."""
        return cls(
            tuple((model.name, tuple(step.model for step in model.steps)) for model in spec.models if model.steps),
            tuple(model.name for model in spec.models if model.format in ENGINE_WAITING),
        )

    def requests(self, ended: Mapping[str, float]) -> float:
        """Requests of clients among what ended at all models, by model."""
        by_steps: dict[str, float] = {}
        for ensemble, members in self.ensembles:
            for member in members:
                by_steps[member] = by_steps.get(member, 0.0) + ended.get(ensemble, 0.0)
        return sum(max(0.0, count - by_steps.get(model, 0.0)) for model, count in ended.items())

    def parts(self, figures: Mapping[str, float] | None) -> Mapping[str, float] | None:
        """The figures without the ensembles', which repeat their members'."""
        if figures is None or not self.ensembles:
            return figures
        whole = {ensemble for ensemble, _ in self.ensembles}
        return {model: value for model, value in figures.items() if model not in whole}


SINGLE_MODELS: Final = Pipeline()


@dataclass(frozen=True, slots=True)
class Samples:
    """One tick's answers of Prometheus."""

    waiting: Figures = field(default_factory=dict)
    stale: Mapping[Pod, float] = field(default_factory=dict)
    """Age of the queue's newest sample, where that is too old."""
    successes: Figures = field(default_factory=dict)
    failures: Figures = field(default_factory=dict)
    in_system: Figures = field(default_factory=dict)
    busy: Figures = field(default_factory=dict)
    engine_waiting: Figures = field(default_factory=dict)
    """Of backends that queue inside themselves, in their own words."""
    engine_running: Figures = field(default_factory=dict)
    memory: Mapping[Pod, float | None] = field(default_factory=dict)
    """Used share of each pod's fullest accelerator; None where the gauges are there and can't be believed."""
    memory_used: Mapping[Pod, float] = field(default_factory=dict)
    """Bytes used on each pod's fullest accelerator, where the gauges can be believed."""
    errors: Mapping[Query, str] = field(default_factory=dict)
    """Why a query has no answer."""
    last_seen: Mapping[Pod, float] = field(default_factory=dict)
    """When each pod's queue was last sampled, in seconds since the epoch, give or take the age that is stale."""
    configured: bool = True


class PrometheusSignals:
    """The queries of a tick, sent through prometheus-api-client from a bounded pool; `queries` counts what was sent."""

    def __init__(self, settings: Settings, *, clock: Callable[[], float] = time.time) -> None:
        self.queries = 0
        self.promql = promql(
            Labels(
                settings.prometheus_namespace_label,
                settings.prometheus_pod_label,
                settings.prometheus_cluster_label,
                settings.prometheus_cluster,
            ),
            settings.metrics_window_s,
            settings.metrics_stale_s,
        )
        self._namespace_label = settings.prometheus_namespace_label
        self._pod_label = settings.prometheus_pod_label
        self._timeout_s = settings.prometheus_timeout_s
        self._clock = clock
        self._memory_rows: list[dict[str, Any]] = []
        self._memory_at = -math.inf
        self._last_seen: dict[Pod, float] = {}
        self._in_flight: dict[Query, Future[list[dict[str, Any]]]] = {}
        self._pool = ThreadPoolExecutor(settings.prometheus_workers, thread_name_prefix="prometheus")
        self._session = requests.Session() if settings.prometheus_url else None
        self._prometheus = (
            _connect(settings.prometheus_url, self._session, settings.prometheus_timeout_s, settings.prometheus_workers)
            if settings.prometheus_url and self._session
            else None
        )

    async def read(self) -> Samples:
        """Ask everything at once; never raises and never takes much longer than the timeout."""
        if self._prometheus is None:
            return Samples(configured=False)
        now = self._clock()
        # Memory moves slowly and has the most series of all, so it is asked for in every third tick or so.
        due = [query for query in self.promql if query is not Query.MEMORY or now - self._memory_at >= MEMORY_EVERY_S]
        answers = dict(zip(due, await asyncio.gather(*map(self._ask, due)), strict=True))
        errors = {query: answer for query, answer in answers.items() if isinstance(answer, str)}
        rows = {query: answer for query, answer in answers.items() if not isinstance(answer, str)}
        if Query.MEMORY in answers:
            self._memory_rows = rows.get(Query.MEMORY, [])
            self._memory_at = -math.inf if Query.MEMORY in errors else now
        try:
            return self._samples(rows, errors)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            # Whatever answered is no Prometheus: nothing of it is believed.
            self._memory_rows, self._memory_at = [], -math.inf
            message = f"the answer can't be read ({type(error).__name__})"
            return Samples(errors=dict.fromkeys(self.promql, message), last_seen=dict(self._last_seen))

    def close(self) -> None:
        """Stop the pool and drop the connections; what is still in flight ends by its own timeout."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._session is not None:
            self._session.close()

    async def _ask(self, query: Query) -> list[dict[str, Any]] | str:
        earlier = self._in_flight.get(query)
        if earlier is not None and not earlier.done():
            return "Prometheus has not answered the last request yet"
        self.queries += 1
        future = self._in_flight[query] = self._pool.submit(self._query, self.promql[query])
        try:
            # The bound for the whole tick: queries queue for a worker, so each may use up the time of those before it.
            return await asyncio.wait_for(asyncio.wrap_future(future), 3 * self._timeout_s)
        except TimeoutError:
            return f"Prometheus did not answer within {self._timeout_s:g} s"
        except PrometheusApiClientException as error:
            return f"Prometheus refused the query: {str(error)[:200]}"
        except requests.Timeout:
            return f"Prometheus did not answer within {self._timeout_s:g} s"
        except requests.ConnectionError:
            return "Prometheus can't be reached"
        except (requests.RequestException, HTTPError, KeyError, TypeError, ValueError) as error:
            return f"the answer can't be read ({type(error).__name__})"

    def _query(self, text: str) -> list[dict[str, Any]]:
        assert self._prometheus is not None  # noqa: S101 - read() asks only then
        answer = self._prometheus.custom_query(text, params={"timeout": f"{self._timeout_s:g}s"})
        if not isinstance(answer, list):
            raise TypeError("not a vector")
        return answer

    def _samples(self, rows: Mapping[Query, list[dict[str, Any]]], errors: Mapping[Query, str]) -> Samples:
        waiting = self._figures(rows.get(Query.WAITING, []))
        stale = {pod: by[""] for pod, by in self._figures(rows.get(Query.AGE, []), None).items()}
        now = self._clock()
        self._last_seen.update(dict.fromkeys(waiting.keys() - stale.keys(), now))
        for pod, age_s in stale.items():
            self._last_seen[pod] = max(self._last_seen.get(pod, 0.0), now - age_s)
        if len(self._last_seen) > 2 * len(waiting) + FORGOTTEN_PODS:
            self._last_seen = {pod: at for pod, at in self._last_seen.items() if now - at < FORGET_S}
        fullest = self._memory(self._memory_rows)
        return Samples(
            waiting=waiting,
            stale=stale,
            successes=self._figures(rows.get(Query.SUCCESSES, [])),
            failures=self._figures(rows.get(Query.FAILURES, [])),
            in_system=self._figures(rows.get(Query.IN_SYSTEM, [])),
            busy=self._figures(rows.get(Query.BUSY, [])),
            engine_waiting=self._engine_figures(rows.get(Query.ENGINES, []), ENGINE_WAITING),
            engine_running=self._engine_figures(rows.get(Query.ENGINES, []), ENGINE_RUNNING),
            memory={pod: None if most is None else most[0] for pod, most in fullest.items()},
            memory_used={pod: most[1] for pod, most in fullest.items() if most is not None},
            errors=errors,
            last_seen=self._last_seen,
        )

    def _figures(self, rows: Sequence[Mapping[str, Any]], label: str | None = MODEL_LABEL) -> Figures:
        namespace, pod = self._namespace_label, self._pod_label
        figures: Figures = {}
        for row in rows:
            metric = row["metric"]
            key = metric.get(namespace), metric.get(pod)
            if key[0] is None or key[1] is None:
                continue  # a series of something else, or one whose labels don't join: not known rather than guessed
            model = "" if label is None else metric.get(label, "")
            value = float(row["value"][1])
            by_model = figures.get(key)
            if by_model is None:
                figures[key] = {model: value}
            else:
                # Two rows for one model can only be copies: the larger one, as `max by` would say.
                by_model[model] = max(value, by_model.get(model, value))
        return figures

    def _engine_figures(self, rows: Sequence[Mapping[str, Any]], gauges: Mapping[Format, WaitingGauge]) -> Figures:
        figures: Figures = {}
        for row in rows:
            metric = row["metric"]
            model = engine_figure(metric, gauges)
            namespace, pod = metric.get(self._namespace_label), metric.get(self._pod_label)
            if model is not None and namespace is not None and pod is not None:
                of_pod = figures.setdefault((namespace, pod), {})
                # Versions of one model each have an engine.
                value = float(row["value"][1])
                # Added to Triton's own figure, a negative one could look like a smaller queue.
                of_pod[model] = of_pod.get(model, 0.0) + (value if value >= 0 else math.nan)
        return figures

    def _memory(self, rows: Sequence[Mapping[str, Any]]) -> dict[Pod, tuple[float, float] | None]:
        namespace, pod = self._namespace_label, self._pod_label
        gauges: dict[Pod, dict[tuple[str, str], float]] = {}
        for row in rows:
            metric = row["metric"]
            if namespace in metric and pod in metric:
                gpu = metric.get(TRITON_GPU_LABEL) or metric.get(DCGM_GPU_LABEL) or ""
                of_pod = gauges.setdefault((metric[namespace], metric[pod]), {})
                of_pod[metric["__name__"], gpu] = float(row["value"][1])
        return {key: _most_memory(values) for key, values in gauges.items()}


def join(
    samples: Samples,
    namespace: str,
    pods: Sequence[ReadyPod],
    *,
    now: float,
    stale_s: float,
    memory: bool = True,
    pipeline: Pipeline = SINGLE_MODELS,
) -> Signals:
    """One service's signals: samples of its live, ready pods and of no other.

    Args:
        samples: the tick's answers.
        namespace: of the service.
        pods: its ready pods; a series of any other pod is a leftover and is not looked at.
        now: seconds since the epoch.
        stale_s: a queue sample older than this is not believed; a pod that became ready less than this ago need not
            have a sample yet.
        memory: whether accelerator memory matters for this service.
        pipeline: how its models' figures hang together.
    """
    errors, queue, flow, share, engines = samples.errors, _Tally(), _Tally(), _Tally(), pipeline.engines
    all_stale = Query.AGE in errors
    stale = False
    waiting: dict[str, float] = {}
    successes: dict[str, float] = {}
    ended: dict[str, float] = {}
    without_gauge, engines_known = False, Query.ENGINES not in errors or not engines
    in_system: dict[str, float] = {}
    busy: dict[str, float] = {}
    most_memory = 0.0
    for pod in pods:
        key = (namespace, pod.name)
        young = now - pod.ready_since < stale_s
        figures: Mapping[str, float] | None = samples.waiting.get(key)
        if figures is not None and (all_stale or key in samples.stale):
            figures, stale = None, True
        inside, at_work = samples.engine_waiting.get(key, {}), samples.engine_running.get(key, {})
        if figures is not None and not all(model in inside for model in engines):
            # Triton's own gauge says nothing of a queue inside the backend: unknown is not 0.
            figures, without_gauge = None, without_gauge or not young
        figures = _with_queues(pipeline.parts(figures), engines, inside)
        if queue.counts(figures, young=young):
            _add(waiting, figures)
        figures = samples.successes.get(key)
        failed = samples.failures.get(key)
        present = _of_engines(pipeline.parts(samples.in_system.get(key)), engines, at_work, inside)
        busily = _of_engines(pipeline.parts(samples.busy.get(key)), engines, at_work)
        if flow.counts(figures, failed, present, busily, young=young):
            _add(ended, figures)
            _add(ended, failed)
            _add(successes, pipeline.parts(figures))
            _add(in_system, present)
            _add(busy, busily)
            # Without the engine's own word on what it works on, its replicas may be full.
            engines_known = engines_known and all(model in at_work for model in engines)
        if memory:
            used = samples.memory.get(key, math.nan)
            share.wrong += used is None
            known = used is not None and not math.isnan(used)
            share.good += known
            share.missing += not known and not young
            most_memory = max(most_memory, used) if known and used is not None else most_memory
    detail = _error(samples, Query.WAITING, Query.AGE, *([Query.ENGINES] if engines else []))
    queue_quality = queue.quality(detail or (_NO_GAUGE if without_gauge else ""), stale=stale)
    if queue_quality.kind is not QualityKind.FRESH:
        newest = max((samples.last_seen.get((namespace, pod.name), -math.inf) for pod in pods), default=-math.inf)
        queue_quality = replace(queue_quality, age_s=None if newest == -math.inf else max(0.0, now - newest))
    flow_quality = flow.quality(_error(samples, Query.SUCCESSES, Query.FAILURES))
    answered = flow.good > 0 and Query.FAILURES not in errors
    memory_quality = share.quality(_error(samples, Query.MEMORY)) if memory else _UNUSED
    return Signals(
        queue=queue_quality,
        flow=flow_quality if answered else replace(flow_quality, kind=QualityKind.MISSING),
        memory=memory_quality,
        waiting=tuple(sorted(waiting.items())) if queue.good else None,
        successes=tuple(sorted(successes.items())) if flow.good else None,
        completions=pipeline.requests(ended) if answered else None,
        in_system=(
            tuple(sorted(in_system.items())) if flow.good and engines_known and Query.IN_SYSTEM not in errors else None
        ),
        busy=tuple(sorted(busy.items())) if flow.good and engines_known and Query.BUSY not in errors else None,
        memory_share=most_memory if memory and memory_quality.known and share.good else None,
        too_young=samples.configured and not queue.good and not queue.missing and not queue.wrong,
        configured=samples.configured,
    )


_NO_GAUGE: Final = (
    "the gauge of the model's own queue is missing; with format vLLM set its parameters.REPORT_CUSTOM_METRICS to "
    '"true" and leave disable_log_stats out of its model.json'
)


def _with_queues(
    figures: Mapping[str, float] | None, engines: Sequence[str], inside: Mapping[str, float]
) -> Mapping[str, float] | None:
    """What waits in Triton and, beyond it, inside the engines."""
    if figures is None or not engines:
        return figures
    return {**figures, **{model: figures.get(model, 0.0) + inside.get(model, 0.0) for model in engines}}


def _of_engines(
    figures: Mapping[str, float] | None, engines: Sequence[str], *parts: Mapping[str, float]
) -> Mapping[str, float] | None:
    """The engines' own figures in the place of Triton's, which hands a request over and sees no more of it."""
    if not engines:
        return figures
    return {**(figures or {}), **{model: sum(part.get(model, 0.0) for part in parts) for model in engines}}


_UNUSED: Final = Quality(QualityKind.FRESH)


@dataclass(slots=True)
class _Tally:
    """How many replicas have a good sample, a bad one, or none though they should."""

    good: int = 0
    wrong: int = 0
    missing: int = 0

    def counts(self, figures: Mapping[str, float] | None, *more: Mapping[str, float] | None, young: bool) -> bool:
        """Whether this replica's figures can be added up."""
        if figures is None:
            self.missing += not young
            return False
        for part in (figures, *more):
            if part is not None and not all(0 <= value < math.inf for value in part.values()):
                self.wrong += 1
                return False
        self.good += 1
        return True

    def quality(self, detail: str, *, stale: bool = False) -> Quality:
        """The verdict; what is negative, infinite or not a number outweighs all else."""
        expected = self.good + self.wrong + self.missing
        if self.wrong:
            kind = QualityKind.NON_FINITE
        elif not self.good:
            kind = QualityKind.STALE if stale else QualityKind.MISSING
        else:
            kind = QualityKind.PARTIAL if self.missing else QualityKind.FRESH
        return Quality(kind, self.good, expected, None, detail)


def _add(total: dict[str, float], figures: Mapping[str, float] | None) -> None:
    if figures is not None:
        for model, value in figures.items():
            total[model] = total.get(model, 0.0) + value


def _error(samples: Samples, *queries: Query) -> str:
    if not samples.configured:
        return "CONCH_PROMETHEUS_URL is not set"
    return next((samples.errors[query] for query in queries if query in samples.errors), "")


def _most_memory(gauges: Mapping[tuple[str, str], float]) -> tuple[float, float] | None:
    """Triton's own gauges, else DCGM's: the largest share and the most bytes in use; None if one can't be believed."""
    for used_name, other_name, other_is_total, unit in (
        (TRITON_MEMORY_USED, TRITON_MEMORY_TOTAL, True, 1),
        (DCGM_MEMORY_USED, DCGM_MEMORY_FREE, False, DCGM_UNIT),
    ):
        shares: list[float] = []
        most = 0.0
        for (name, gpu), used in gauges.items():
            if name != used_name:
                continue
            other = gauges.get((other_name, gpu), math.nan)
            total = other if other_is_total else used + other
            # A failed read is exported as 0, and DCGM writes a blank field as about 9.2e18. A server that is ready has
            # loaded its models, so it uses some memory.
            if not (0 < used < DCGM_BLANK and 0 < total < DCGM_BLANK and 0 <= other < DCGM_BLANK and used <= total):
                shares = []
                break
            shares.append(used / total)
            most = max(most, used * unit)
        if shares:
            return max(shares), most
    return None


class _Timed(HTTPAdapter):
    """Bounds a whole request in time and size; `requests` itself only bounds the silence between two bytes."""

    def __init__(self, timeout_s: float, connections: int) -> None:
        self._timeout_s = timeout_s
        super().__init__(pool_maxsize=connections)  # without retries: the next tick is one

    def send(  # noqa: PLR0917 - the signature is the library's
        self,
        request: requests.PreparedRequest,
        stream: bool = False,  # noqa: FBT001, FBT002
        timeout: float | tuple[float | None, float | None] | None = None,
        verify: bool | str = True,  # noqa: FBT001, FBT002
        cert: Any = None,
        proxies: Any = None,
    ) -> requests.Response:
        del stream, timeout
        deadline = time.monotonic() + self._timeout_s
        response = super().send(request, True, self._timeout_s, verify, cert, proxies)
        body = bytearray()
        while piece := response.raw.read1(_PIECE_BYTES, decode_content=True):
            body += piece
            if time.monotonic() > deadline or len(body) > MAX_ANSWER_BYTES:
                response.close()
                raise requests.ReadTimeout(f"no whole answer within {self._timeout_s:g} s", request=request)
        response.raw.release_conn()
        response._content = bytes(body)  # noqa: SLF001 - requests has no public way to hand over a body that was read
        response._content_consumed = True  # noqa: SLF001
        return response


def _connect(url: str, session: requests.Session, timeout_s: float, connections: int) -> Any:
    # Looking for proxies and .netrc at each request costs more than the request, and Prometheus is a neighbour.
    session.trust_env = False
    prometheus = PrometheusConnect(url=url.rstrip("/"), session=session, retry=Retry(total=0))
    # The constructor mounts an adapter of its own for this address; a later one of the same prefix takes its place.
    session.mount(url.rstrip("/"), _Timed(timeout_s, connections))
    return prometheus
