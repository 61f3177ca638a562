"""The Triton container."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.triton import server
from conch.triton.arguments import EXIT_TIMEOUT_S
from makers import SHA256, make_model, make_spec

TWO_MODELS = [make_model(name="a"), make_model(name="b")]


def test_one_model_is_asked_for_by_name_and_several_through_the_server() -> None:
    assert server.readiness_path(make_spec()) == "/v2/models/resnet50/ready"
    assert server.readiness_path(make_spec(models=TWO_MODELS)) == "/v2/health/ready"


@pytest.mark.parametrize(
    ("startup", "allowed_s"), [("1s", 60), ("20s", 60), ("60s", 180), ("2h", 21600), ("20.5s", 62), ("1s500ms", 60)]
)
def test_the_startup_probe_allows_three_times_the_usual_start(startup: str, allowed_s: int) -> None:
    probe = server.startup_probe(make_spec({"scaling.startup": startup}))
    assert probe["periodSeconds"] * probe["failureThreshold"] == allowed_s


@given(st.integers(1, 7200))
def test_no_start_within_the_stated_time_is_ever_cut(startup_s: int) -> None:
    probe = server.startup_probe(make_spec({"scaling.startup": f"{startup_s}s"}))
    assert probe["periodSeconds"] * probe["failureThreshold"] >= max(60, 3 * startup_s)


def test_r26_the_grace_period_outlasts_the_hook_and_tritons_own_time_out() -> None:
    assert server.GRACE_S == 65
    assert server.GRACE_S >= server.DRAIN_BOUND_S + EXIT_TIMEOUT_S + 5
    hook = server.container(make_spec(), "triton:1")["lifecycle"]["preStop"]["exec"]["command"]
    assert hook == ["python3", "-I", "/conch/drain.py", "--bound", "25", "--endpoint-removal", "5"]


def test_the_container_meets_the_restricted_pod_security_standard() -> None:
    context = server.container(make_spec(), "triton:1")["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] == 1000
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}


def test_memory_and_accelerators_are_limited_to_what_is_requested_and_cpu_is_not() -> None:
    spec = make_spec(resources={"cpu": "1500m", "memory": "2048Mi"}, accelerator={"count": 2})
    assert server.resources(spec) == {
        "requests": {"cpu": "1500m", "memory": "2Gi", "nvidia.com/gpu": "2"},
        "limits": {"memory": "2Gi", "nvidia.com/gpu": "2"},
    }


def test_a_service_on_the_cpu_asks_for_no_accelerator() -> None:
    assert server.resources(make_spec({"accelerator.count": 0})) == {
        "requests": {"cpu": "1", "memory": "4Gi"},
        "limits": {"memory": "4Gi"},
    }


def test_row_57_quantities_are_written_as_the_api_server_stores_them() -> None:
    spec = make_spec(resources={"cpu": "1000m", "memory": "0.5Gi"})
    assert server.resources(spec)["requests"] == {"cpu": "1", "memory": "512Mi", "nvidia.com/gpu": "1"}


def test_volumes_are_mounted_for_volume_sources_only_and_read_only_but_for_scratch() -> None:
    models = [
        make_model(name="a"),
        make_model(name="b", source={"uri": "https://host/b.onnx", "digest": SHA256}),
        make_model(name="c", source={"uri": "image://registry.example/c:1#/c"}),
    ]
    mounts = {
        mount["name"]: (mount["mountPath"], mount.get("readOnly", False))
        for mount in server.container(make_spec(models=models), "triton:1")["volumeMounts"]
    }
    assert mounts == {
        "models": ("/models", True),
        "tools": ("/conch", True),
        "shm": ("/dev/shm", False),
        "tmp": ("/tmp", False),
        "source-0": ("/sources/0", True),
        "source-2": ("/sources/2", True),
    }


def test_probes_state_every_value_that_the_api_server_would_fill_in() -> None:
    container = server.container(make_spec(), "triton:1")
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert set(container[name]) == {
            "httpGet", "periodSeconds", "timeoutSeconds", "failureThreshold", "successThreshold",
        }  # fmt: skip
        assert container[name]["httpGet"]["scheme"] == "HTTP"
    assert container["livenessProbe"]["httpGet"]["path"] == "/v2/health/live"
    assert container["readinessProbe"]["httpGet"]["path"] == "/v2/models/resnet50/ready"


def test_the_container_is_plain_data_with_the_given_image() -> None:
    container: dict[str, Any] = server.container(make_spec(), "triton:1", pull_policy="Never")
    assert json.loads(json.dumps(container)) == container
    assert (container["image"], container["imagePullPolicy"], container["command"]) == (
        "triton:1",
        "Never",
        ["tritonserver"],
    )
    assert [port["containerPort"] for port in container["ports"]] == [8000, 8001, 8002]
