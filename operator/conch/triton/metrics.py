"""Names of the metrics of Triton and DCGM, and the fixed set of PromQL over them for all services at once. Pure.

Sources: triton-inference-server/core `src/metrics.cc` and server `docs/user_guide/metrics.md`; dcgm-exporter's default
counters. No text of a custom resource ever enters a query: only the operator's own settings do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from conch.triton.backends import BACKENDS, Format, WaitingGauge

if TYPE_CHECKING:
    from collections.abc import Mapping

PENDING: Final = "nv_inference_pending_request_count"
SUCCESS: Final = "nv_inference_request_success"
FAILURE: Final = "nv_inference_request_failure"
REQUEST_DURATION_US: Final = "nv_inference_request_duration_us"
EXECUTIONS: Final = "nv_inference_exec_count"
COMPUTE_DURATIONS_US: Final = (
    "nv_inference_compute_input_duration_us",
    "nv_inference_compute_infer_duration_us",
    "nv_inference_compute_output_duration_us",
)
# Per model, of those with a response cache; the hit rate is hits / (hits + misses).
CACHE_HITS: Final = "nv_cache_num_hits_per_model"
CACHE_MISSES: Final = "nv_cache_num_misses_per_model"
TRITON_MEMORY_USED: Final = "nv_gpu_memory_used_bytes"
TRITON_MEMORY_TOTAL: Final = "nv_gpu_memory_total_bytes"
DCGM_MEMORY_USED: Final = "DCGM_FI_DEV_FB_USED"
DCGM_MEMORY_FREE: Final = "DCGM_FI_DEV_FB_FREE"

MODEL_LABEL: Final = "model"
TRITON_GPU_LABEL: Final = "gpu_uuid"
DCGM_GPU_LABEL: Final = "UUID"

# Backends that queue inside themselves: Triton hands them every request at once, so its own gauge stays near 0 there.
ENGINE_WAITING: Final[dict[Format, WaitingGauge]] = {
    name: backend.waiting for name, backend in BACKENDS.items() if backend.waiting is not None
}
# What they work on: vllm_backend `src/utils/metrics.py`; tensorrtllm_backend README, "Triton Metrics".
ENGINE_RUNNING: Final[dict[Format, WaitingGauge]] = {
    "vLLM": WaitingGauge("vllm:num_requests_running", "model"),
    "TensorRTLLM": WaitingGauge("nv_trt_llm_request_metrics", "model", (("request_type", "scheduled"),)),
}
_ENGINE_GAUGES: Final = (*ENGINE_WAITING.values(), *ENGINE_RUNNING.values())

# DCGM writes a field that it can't read as a number of about 9.2e18.
DCGM_BLANK: Final = 2.0**62

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class Query(StrEnum):
    """The queries of a tick, by what they answer."""

    WAITING = "waiting"
    AGE = "age"
    SUCCESSES = "successes"
    FAILURES = "failures"
    IN_SYSTEM = "in-system"
    BUSY = "busy"
    MEMORY = "memory"
    ENGINES = "engines"


@dataclass(frozen=True)
class Labels:
    """How this Prometheus names things; every field comes from the operator's settings."""

    namespace: str = "namespace"
    pod: str = "pod"
    cluster: str = ""
    cluster_value: str = ""

    def __post_init__(self) -> None:
        for name in (self.namespace, self.pod, *([self.cluster] if self.cluster else [])):
            if not _LABEL.fullmatch(name):
                raise ValueError(f"{name!r} is not a Prometheus label name; use letters, digits and underscores")

    @property
    def matcher(self) -> str:
        """`{cluster="…"}`, or nothing when no cluster is set (R18)."""
        return f"{{{self._cluster_pair}}}" if self._cluster_pair else ""

    @property
    def _cluster_pair(self) -> str:
        if not self.cluster or not self.cluster_value:
            return ""
        value = self.cluster_value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'{self.cluster}="{value}"'

    def named(self, *metrics: str, **values: str) -> str:
        """A selector of several metrics at once; `values` are labels with a regular expression each."""
        pairs = [f'__name__=~"{"|".join(metrics)}"', *(f'{label}=~"{value}"' for label, value in values.items())]
        pairs += [self._cluster_pair] if self._cluster_pair else []
        return f"{{{','.join(pairs)}}}"


def promql(labels: Labels, window_s: int, stale_s: float) -> dict[Query, str]:
    """The tick's queries; their number does not depend on how many services there are.

    Every rate is taken per series, so a counter that restarts with its pod is seen before anything is added up.
    `max by` over the version removes the copies that a pair of Prometheus servers, or two monitors of one pod, make
    (R18). A division by nothing is defined in place: a server without requests is idle, not NaN.

    Three queries end in `!= 0`, which lets NaN through: next to a SUCCESSES result, an absent one is zero. Without
    that, idle services would make most of a tick's work.

    Args:
        labels: the label names and the cluster matcher.
        window_s: the window of each rate; a target found less than two scrapes ago has none, and so no result.
        stale_s: the age from which a sample is stale.

    Returns:
        WAITING: requests in the queue, by pod and model.
        AGE: seconds since the queue's newest sample, by pod; only where that is stale.
        SUCCESSES: requests/s that were answered, by pod and model.
        FAILURES: requests/s that ended otherwise, by pod and model; absent: none.
        IN_SYSTEM: requests between arrival and answer, mean (Little's law), by pod and model; absent: 0.
        BUSY: model instances at work, mean over the window, by pod and model; absent: 0.
        MEMORY: the raw gauges of Triton (bytes) and DCGM (MiB), by metric, pod and GPU.
        ENGINES: the gauges of backends that queue inside themselves, by metric, its own labels, pod, model and version.
    """
    by_pod = f"{labels.namespace}, {labels.pod}"
    by_model = f"{by_pod}, {MODEL_LABEL}"
    by_version = f"{by_model}, version"

    def rate(metric: str, by: str = by_version) -> str:
        return f"max by ({by}) (rate({metric}{labels.matcher}[{window_s}s]))"

    compute = " + ".join(rate(metric) for metric in COMPUTE_DURATIONS_US)
    # Each request of a batch adds the whole batch's time: times executions, over requests, leaves the executions' time.
    busy = f"({compute}) * {rate(EXECUTIONS)} / ({rate(SUCCESS)} > 0)"
    names, more = _engine_selector()
    engines = labels.named(*names, **more)
    by_engine = ", ".join(dict.fromkeys(["__name__", *by_version.split(", "), *more, *_ENGINE_MODEL_LABELS]))
    memory = labels.named(TRITON_MEMORY_USED, TRITON_MEMORY_TOTAL, DCGM_MEMORY_USED, DCGM_MEMORY_FREE)
    return {
        Query.WAITING: f"sum by ({by_model}) (max by ({by_version}) ({PENDING}{labels.matcher}))",
        # An instant result carries the time of the evaluation, so the sample's own time must be asked for (R18).
        Query.AGE: f"min by ({by_pod}) (time() - timestamp({PENDING}{labels.matcher})) > {stale_s:g}",
        Query.SUCCESSES: f"sum by ({by_model}) ({rate(SUCCESS)})",
        Query.FAILURES: f"sum by ({by_model}) ({rate(FAILURE, f'{by_version}, reason')}) != 0",
        Query.IN_SYSTEM: f"sum by ({by_model}) ({rate(REQUEST_DURATION_US)}) / 1e6 != 0",
        Query.BUSY: f"sum by ({by_model}) ({busy}) / 1e6 != 0",
        Query.MEMORY: f"max by (__name__, {by_pod}, {TRITON_GPU_LABEL}, {DCGM_GPU_LABEL}) ({memory})",
        Query.ENGINES: f"max by ({by_engine}) ({engines})",
    }


_ENGINE_MODEL_LABELS: Final = tuple(dict.fromkeys(gauge.model_label for gauge in _ENGINE_GAUGES))


def _engine_selector() -> tuple[list[str], dict[str, str]]:
    """The metrics of all engines, and for each of their labels the values that are wanted, or none of that label."""
    values: dict[str, list[str]] = {}
    for gauge in _ENGINE_GAUGES:
        for label, value in gauge.labels:
            values.setdefault(label, [""]).append(value)
    names = sorted({gauge.metric for gauge in _ENGINE_GAUGES})
    return names, {label: "|".join(dict.fromkeys(wanted)) for label, wanted in sorted(values.items())}


def engine_figure(metric: Mapping[str, str], gauges: Mapping[Format, WaitingGauge]) -> str | None:
    """The model that a row of ENGINES tells of, if it is one of these gauges'."""
    for gauge in gauges.values():
        if metric.get("__name__") == gauge.metric and all(metric.get(key) == value for key, value in gauge.labels):
            return metric.get(gauge.model_label)
    return None
