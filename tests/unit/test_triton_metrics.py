"""The queries, run by the real Prometheus engine over recorded series; the tool is skipped where it isn't built."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from conch.triton.metrics import Labels, Query, promql

if TYPE_CHECKING:
    from collections.abc import Mapping

BUILT = sorted((Path.home() / ".cache/conch/sandbox").glob("bin-*/promtool"))
PROMTOOL = shutil.which("promtool") or (str(BUILT[0]) if BUILT else None)
QUERIES = promql(Labels(), 30, 30)
A = 'namespace="ns", pod="a", model="m", version="1"'

real = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not built yet; the sandbox's build makes it")


def check(
    tmp_path: Path, series: Mapping[str, str], query: Query, at: str, expected: Mapping[str, float], **labels: str
) -> None:
    """Evaluate one query as Prometheus would; `promtool test rules` compares every sample and label."""
    text = promql(Labels(**labels), 30, 30)[query]
    rules = {
        "evaluation_interval": "5s",
        "tests": [
            {
                "interval": "5s",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [
                    {
                        "expr": text,
                        "eval_time": at,
                        "exp_samples": [{"labels": name, "value": value} for name, value in expected.items()],
                    }
                ],
            }
        ],
    }
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(rules))
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_queries_are_few_and_fixed() -> None:
    assert list(QUERIES) == list(Query)
    assert len(QUERIES) <= 8


@pytest.mark.parametrize("name", ["", "a-b", "1a", 'x"}', "a b"])
def test_a_label_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a Prometheus label name"):
        Labels(pod=name)


def test_the_cluster_value_is_quoted() -> None:
    assert Labels(cluster="cluster", cluster_value='a"} or vector(1) #\\').matcher == (
        '{cluster="a\\"} or vector(1) #\\\\"}'
    )


@real
def test_row_1_queue_depth_is_by_model_and_pod_and_not_divided_by_anything(tmp_path: Path) -> None:
    series = {
        'nv_inference_pending_request_count{namespace="ns", pod="a", model="m", version="1"}': "7x10",
        'nv_inference_pending_request_count{namespace="ns", pod="a", model="m", version="2"}': "2x10",
        'nv_inference_pending_request_count{namespace="ns", pod="a", model="n", version="1"}': "0x10",
        'nv_inference_pending_request_count{namespace="ns", pod="b", model="m", version="1"}': "5x10",
    }
    expected = {
        '{namespace="ns", pod="a", model="m"}': 9.0,
        '{namespace="ns", pod="a", model="n"}': 0.0,
        '{namespace="ns", pod="b", model="m"}': 5.0,
    }
    check(tmp_path, series, Query.WAITING, "30s", expected)


@real
@pytest.mark.parametrize("query", [Query.WAITING, Query.SUCCESSES])
def test_r18_copies_of_a_pair_of_prometheus_servers_count_once(tmp_path: Path, query: Query) -> None:
    series = {
        f'nv_inference_pending_request_count{{{A}, replica="{replica}"}}': "7x10" for replica in ("one", "two")
    } | {f'nv_inference_request_success{{{A}, replica="{replica}"}}': "0+10x10" for replica in ("one", "two")}
    expected = {'{namespace="ns", pod="a", model="m"}': 7.0 if query is Query.WAITING else 2.0}
    check(tmp_path, series, query, "45s", expected)


@real
def test_r18_age_comes_from_the_sample_and_only_where_it_is_stale(tmp_path: Path) -> None:
    series = {
        'nv_inference_pending_request_count{namespace="ns", pod="old", model="m", version="1"}': "7 _x20",
        'nv_inference_pending_request_count{namespace="ns", pod="new", model="m", version="1"}': "7x20",
    }
    check(tmp_path, series, Query.AGE, "60s", {'{namespace="ns", pod="old"}': 60.0})


@real
def test_r18_the_cluster_matcher_leaves_other_clusters_out(tmp_path: Path) -> None:
    series = {
        f'nv_inference_pending_request_count{{{A}, cluster="ours"}}': "7x10",
        f'nv_inference_pending_request_count{{{A}, cluster="theirs"}}': "90x10",
    }
    expected = {'{namespace="ns", pod="a", model="m"}': 7.0}
    check(tmp_path, series, Query.WAITING, "30s", expected, cluster="cluster", cluster_value="ours")


@real
def test_a_counter_that_restarts_with_its_pod_makes_no_negative_rate(tmp_path: Path) -> None:
    series = {f"nv_inference_request_success{{{A}}}": "1000 1010 1020 0 10 20 30 40"}
    check(tmp_path, series, Query.SUCCESSES, "35s", {'{namespace="ns", pod="a", model="m"}': 1.6})


@real
def test_a_target_that_was_just_found_has_no_rate(tmp_path: Path) -> None:
    series = {f"nv_inference_request_success{{{A}}}": "_ _ _ _ _ _ 5000"}
    check(tmp_path, series, Query.SUCCESSES, "30s", {})


@real
def test_failures_are_added_over_their_reasons(tmp_path: Path) -> None:
    series = {
        f'nv_inference_request_failure{{{A}, reason="REJECTED"}}': "0+5x10",
        f'nv_inference_request_failure{{{A}, reason="OTHER"}}': "0+10x10",
    }
    check(tmp_path, series, Query.FAILURES, "45s", {'{namespace="ns", pod="a", model="m"}': 3.0})


@real
def test_row_16_an_idle_server_is_neither_nan_nor_busy(tmp_path: Path) -> None:
    names = ["request_success", "exec_count", "request_duration_us", "compute_input_duration_us"]
    names += ["compute_infer_duration_us", "compute_output_duration_us"]
    series = {f"nv_inference_{name}{{{A}}}": "100x10" for name in names}
    for query in (Query.BUSY, Query.IN_SYSTEM):
        check(tmp_path, series, query, "45s", {})
    check(tmp_path, series, Query.SUCCESSES, "45s", {'{namespace="ns", pod="a", model="m"}': 0.0})


@real
def test_busy_counts_a_batchs_time_once_whatever_the_batch_and_the_clients_own_batches(tmp_path: Path) -> None:
    # 40 requests/s in 10 executions/s of 50 ms each: half an instance; each request adds the whole 50 ms.
    series = {
        f"nv_inference_request_success{{{A}}}": "0+200x10",
        f"nv_inference_exec_count{{{A}}}": "0+50x10",
        f"nv_inference_count{{{A}}}": "0+3200x10",
        f"nv_inference_compute_input_duration_us{{{A}}}": "0+1000000x10",
        f"nv_inference_compute_infer_duration_us{{{A}}}": "0+8000000x10",
        f"nv_inference_compute_output_duration_us{{{A}}}": "0+1000000x10",
    }
    check(tmp_path, series, Query.BUSY, "45s", {'{namespace="ns", pod="a", model="m"}': 0.5})


@real
def test_in_system_is_littles_law(tmp_path: Path) -> None:
    series = {f"nv_inference_request_duration_us{{{A}}}": "0+15000000x10"}
    check(tmp_path, series, Query.IN_SYSTEM, "45s", {'{namespace="ns", pod="a", model="m"}': 3.0})


@real
def test_memory_gauges_of_triton_and_dcgm_come_in_one_answer(tmp_path: Path) -> None:
    series = {
        'nv_gpu_memory_used_bytes{namespace="ns", pod="a", gpu_uuid="G", container="triton"}': "8e9x10",
        'nv_gpu_memory_total_bytes{namespace="ns", pod="a", gpu_uuid="G", container="triton"}': "24e9x10",
        'DCGM_FI_DEV_FB_USED{namespace="ns", pod="b", UUID="H"}': "9000x10",
        'DCGM_FI_DEV_FB_FREE{namespace="ns", pod="b", UUID="H"}': "1000x10",
    }
    expected = {
        'nv_gpu_memory_used_bytes{namespace="ns", pod="a", gpu_uuid="G"}': 8e9,
        'nv_gpu_memory_total_bytes{namespace="ns", pod="a", gpu_uuid="G"}': 24e9,
        'DCGM_FI_DEV_FB_USED{namespace="ns", pod="b", UUID="H"}': 9000.0,
        'DCGM_FI_DEV_FB_FREE{namespace="ns", pod="b", UUID="H"}': 1000.0,
    }
    check(tmp_path, series, Query.MEMORY, "30s", expected)


@real
def test_gauges_of_engines_come_by_metric_and_label_once(tmp_path: Path) -> None:
    llm = 'nv_trt_llm_request_metrics{{namespace="ns", pod="a", model="m", version="1", request_type="{0}"{1}}}'
    vllm = 'vllm:num_requests_{0}{{namespace="ns", pod="b", model="n", version="1"{1}}}'
    series = {
        llm.format("waiting", ""): "3x10",
        llm.format("waiting", ', prometheus="2"'): "3x10",
        llm.format("scheduled", ""): "8x10",
        llm.format("max", ""): "64x10",
        vllm.format("waiting", ""): "5x10",
        vllm.format("running", ""): "2x10",
        vllm.format("swapped", ""): "9x10",
    }
    expected = {
        llm.format("waiting", ""): 3.0,
        llm.format("scheduled", ""): 8.0,
        vllm.format("waiting", ""): 5.0,
        vllm.format("running", ""): 2.0,
    }
    check(tmp_path, series, Query.ENGINES, "40s", expected)
