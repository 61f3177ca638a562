"""Prometheus → signals with a quality, for all services at once: a fixed number of queries a tick (I/O).

Quality is decided here, once. What leaves this module is finite or None.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import requests
from prometheus_api_client.exceptions import PrometheusApiClientException
from prometheus_api_client.prometheus_connect import PrometheusConnect
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError
from urllib3.util.retry import Retry

from conch.scaling.policy import MIN_COVERAGE, PerModel, Quality, QualityKind, Signals
from conch.triton.metrics import (
    DCGM_BLANK,
    DCGM_GPU_LABEL,
    DCGM_MEMORY_FREE,
    DCGM_MEMORY_USED,
    MODEL_LABEL,
    TRITON_GPU_LABEL,
    TRITON_MEMORY_TOTAL,
    TRITON_MEMORY_USED,
    Labels,
    Query,
    promql,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from conch.config import Settings

MAX_ANSWER_BYTES: Final = 256 * 2**20
_PIECE_BYTES: Final = 2**16

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
class Samples:
    """One tick's answers of Prometheus."""

    waiting: Figures = field(default_factory=dict)
    ages: Mapping[Pod, float] = field(default_factory=dict)
    successes: Figures = field(default_factory=dict)
    failures: Figures = field(default_factory=dict)
    in_system: Figures = field(default_factory=dict)
    busy: Figures = field(default_factory=dict)
    memory: Mapping[Pod, float | None] = field(default_factory=dict)
    """Used share of each pod's fullest accelerator; None where the gauges are there and can't be believed."""
    errors: Mapping[Query, str] = field(default_factory=dict)
    """Why a query has no answer."""
    last_seen: Mapping[Pod, float] = field(default_factory=dict)
    """When each pod's queue was last sampled, in seconds since the epoch."""
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
        )
        self._namespace_label = settings.prometheus_namespace_label
        self._pod_label = settings.prometheus_pod_label
        self._timeout_s = settings.prometheus_timeout_s
        self._clock = clock
        self._last_seen: dict[Pod, float] = {}
        self._in_flight: dict[Query, Future[list[dict[str, Any]]]] = {}
        self._pool = ThreadPoolExecutor(settings.prometheus_workers, thread_name_prefix="prometheus")
        self._prometheus = (
            _connect(settings.prometheus_url, settings.prometheus_timeout_s, settings.prometheus_workers)
            if settings.prometheus_url
            else None
        )

    async def read(self) -> Samples:
        """Ask everything at once; never raises and never takes much longer than the timeout."""
        if self._prometheus is None:
            return Samples(configured=False)
        answers = await asyncio.gather(*(self._ask(query) for query in self.promql))
        by_query = dict(zip(self.promql, answers, strict=True))
        rows = {query: answer for query, answer in by_query.items() if not isinstance(answer, str)}
        errors = {query: answer for query, answer in by_query.items() if isinstance(answer, str)}
        try:
            return self._samples(rows, errors)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            # Whatever answered is no Prometheus: nothing of it is believed.
            message = f"the answer can't be read ({type(error).__name__})"
            return Samples(errors=dict.fromkeys(self.promql, message), last_seen=dict(self._last_seen))

    def close(self) -> None:
        """Stop the pool; what is still in flight ends by its own timeout."""
        self._pool.shutdown(wait=False, cancel_futures=True)

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
        ages = {pod: next(iter(by.values())) for pod, by in self._figures(rows.get(Query.AGE, []), None).items()}
        now = self._clock()
        for pod, age_s in ages.items():
            if math.isfinite(age_s):
                self._last_seen[pod] = max(self._last_seen.get(pod, 0.0), now - age_s)
        # A day is long enough to tell people when a series ended; what is older only costs memory.
        self._last_seen = {pod: at for pod, at in self._last_seen.items() if now - at < 86400}  # noqa: PLR2004
        return Samples(
            waiting=self._figures(rows.get(Query.WAITING, [])),
            ages=ages,
            successes=self._figures(rows.get(Query.SUCCESSES, [])),
            failures=self._figures(rows.get(Query.FAILURES, [])),
            in_system=self._figures(rows.get(Query.IN_SYSTEM, [])),
            busy=self._figures(rows.get(Query.BUSY, [])),
            memory=self._memory(rows.get(Query.MEMORY, [])),
            errors=errors,
            last_seen=self._last_seen,
        )

    def _figures(self, rows: Sequence[Mapping[str, Any]], label: str | None = MODEL_LABEL) -> Figures:
        namespace, pod = self._namespace_label, self._pod_label
        figures: Figures = defaultdict(dict)
        for row in rows:
            metric = row["metric"]
            if namespace not in metric or pod not in metric:
                continue  # a series of something else, or one whose labels don't join: not known rather than guessed
            by_model = figures[metric[namespace], metric[pod]]
            model = metric.get(label, "") if label is not None else ""
            value = float(row["value"][1])
            # Two rows for one model can only be copies: the larger one, as `max by` would say.
            by_model[model] = value if model not in by_model else max(value, by_model[model])
        return figures

    def _memory(self, rows: Sequence[Mapping[str, Any]]) -> dict[Pod, float | None]:
        namespace, pod = self._namespace_label, self._pod_label
        gauges: dict[Pod, dict[tuple[str, str], float]] = defaultdict(dict)
        for row in rows:
            metric = row["metric"]
            if namespace in metric and pod in metric:
                gpu = metric.get(TRITON_GPU_LABEL) or metric.get(DCGM_GPU_LABEL) or ""
                gauges[metric[namespace], metric[pod]][metric["__name__"], gpu] = float(row["value"][1])
        return {key: _memory_share(values) for key, values in gauges.items()}


def join(
    samples: Samples, namespace: str, pods: Sequence[ReadyPod], *, now: float, stale_s: float, memory: bool = True
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
    """
    keys = [(namespace, pod.name) for pod in pods]
    young = {(namespace, pod.name) for pod in pods if now - pod.ready_since < stale_s}
    queue, waiting = _queue(samples, keys, young, now, stale_s)
    flow = _flow(samples, keys, young)
    completions = _combined(samples.successes, samples.failures, flow.pods) if flow.pods else None
    known = [samples.memory.get(key) for key in keys]
    shares = [share for share in known if share is not None]
    memory_quality = _memory_quality(samples, keys, len(shares), len(keys) - len(young)) if memory else _UNUSED
    return Signals(
        queue=queue,
        flow=flow.quality,
        memory=memory_quality,
        waiting=waiting,
        successes=_summed(samples.successes, flow.pods) if flow.pods else None,
        completions=completions,
        in_system=_summed_or_none(samples.in_system, flow.pods),
        busy=_summed_or_none(samples.busy, flow.pods),
        memory_share=max(shares) if memory and memory_quality.known and shares else None,
        awaited=samples.configured and waiting is None and len(young) == len(keys),
        configured=samples.configured,
    )


_UNUSED: Final = Quality(QualityKind.FRESH)


@dataclass(frozen=True, slots=True)
class _Flow:
    quality: Quality
    pods: list[Pod]


def _queue(
    samples: Samples, keys: Sequence[Pod], young: set[Pod], now: float, stale_s: float
) -> tuple[Quality, PerModel | None]:
    good: list[Pod] = []
    stale = wrong = False
    for key in keys:
        by_model = samples.waiting.get(key)
        if by_model is None:
            continue
        age_s = samples.ages.get(key)
        if age_s is None or not age_s <= stale_s:
            stale = True
        elif _believable(by_model):
            good.append(key)
        else:
            wrong = True
    kind = _kind(len(good), len([key for key in keys if key in good or key not in young]))
    if kind is QualityKind.MISSING and stale:
        kind = QualityKind.STALE
    if wrong:
        kind = QualityKind.NON_FINITE
    newest = max((at for at in map(samples.last_seen.get, keys) if at is not None), default=None)
    quality = Quality(
        kind,
        len(good),
        len([key for key in keys if key in good or key not in young]),
        None if newest is None or kind is QualityKind.FRESH else max(0.0, now - newest),
        _error(samples, Query.WAITING, Query.AGE),
    )
    return quality, _summed(samples.waiting, good) if good else None


def _flow(samples: Samples, keys: Sequence[Pod], young: set[Pod]) -> _Flow:
    """Coverage of the rates: a target that was just found has none, and that is missing, not zero."""
    if Query.FAILURES in samples.errors:
        return _Flow(Quality(QualityKind.MISSING, 0, len(keys), None, samples.errors[Query.FAILURES]), [])
    good: list[Pod] = []
    wrong = False
    for key in keys:
        by_model = samples.successes.get(key)
        if by_model is None:
            continue
        parts = (by_model, samples.failures.get(key, {}), samples.in_system.get(key, {}), samples.busy.get(key, {}))
        if all(map(_believable, parts)):
            good.append(key)
        else:
            wrong = True
    expected = len([key for key in keys if key in good or key not in young])
    kind = QualityKind.NON_FINITE if wrong else _kind(len(good), expected)
    return _Flow(Quality(kind, len(good), expected, None, _error(samples, Query.SUCCESSES)), good)


def _memory_quality(samples: Samples, keys: Sequence[Pod], known: int, expected: int) -> Quality:
    kind = _kind(known, max(known, expected))
    if kind is not QualityKind.FRESH and any(key in samples.memory and samples.memory[key] is None for key in keys):
        kind = QualityKind.NON_FINITE if known < MIN_COVERAGE * max(known, expected) else QualityKind.PARTIAL
    return Quality(kind, known, max(known, expected), None, _error(samples, Query.MEMORY))


def _kind(covered: int, expected: int) -> QualityKind:
    if covered == 0:
        return QualityKind.MISSING
    return QualityKind.FRESH if covered >= expected else QualityKind.PARTIAL


def _error(samples: Samples, *queries: Query) -> str:
    if not samples.configured:
        return "CONCH_PROMETHEUS_URL is not set"
    return next((samples.errors[query] for query in queries if query in samples.errors), "")


def _believable(by_model: Mapping[str, float]) -> bool:
    return all(0 <= value < math.inf for value in by_model.values())


def _summed(figures: Figures, pods: Sequence[Pod]) -> PerModel:
    total: dict[str, float] = {}
    for pod in pods:
        for model, value in figures[pod].items():
            total[model] = total.get(model, 0.0) + value
    return tuple(sorted(total.items()))


def _summed_or_none(figures: Figures, pods: Sequence[Pod]) -> PerModel | None:
    """None unless every pod has the figure: a sum that leaves one out would look like a lighter load."""
    return _summed(figures, pods) if pods and all(pod in figures for pod in pods) else None


def _combined(successes: Figures, failures: Figures, pods: Sequence[Pod]) -> float:
    return sum(sum(successes[pod].values()) + sum(failures.get(pod, {}).values()) for pod in pods)


def _memory_share(gauges: Mapping[tuple[str, str], float]) -> float | None:
    """Triton's own gauges, else DCGM's; the fullest accelerator; None if any of them can't be believed."""
    for used_name, other_name, other_is_total in (
        (TRITON_MEMORY_USED, TRITON_MEMORY_TOTAL, True),
        (DCGM_MEMORY_USED, DCGM_MEMORY_FREE, False),
    ):
        shares: list[float] = []
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
        if shares:
            return max(shares)
    return None


class _Timed(HTTPAdapter):
    """Bounds a whole request in time and size; `requests` itself only bounds the silence between two bytes."""

    def __init__(self, timeout_s: float, connections: int) -> None:
        self._timeout_s = timeout_s
        super().__init__(pool_maxsize=connections, max_retries=Retry(total=0))

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


def _connect(url: str, timeout_s: float, connections: int) -> Any:
    session = requests.Session()
    # Looking for proxies and .netrc at each request costs more than the request, and Prometheus is a neighbour.
    session.trust_env = False
    prometheus = PrometheusConnect(url=url.rstrip("/"), session=session, retry=Retry(total=0))
    # The constructor mounts an adapter of its own for this address; a later one of the same prefix takes its place.
    session.mount(url.rstrip("/"), _Timed(timeout_s, connections))
    return prometheus
