"""`conch render`: what the operator would apply, as text."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import yaml
from typer.testing import CliRunner

from conch.cli.main import app
from conch.storage.plan import Plan
from conch.triton.modelconfig import from_pbtxt
from conch.workload.deployment import SURGE_ON_CREATE, Images
from conch.workload.desired import desired_children
from conch.workload.offline import UNKNOWN_UID
from makers import make_model, make_service, make_spec, stored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typer.testing import Result

TWO = [make_model(), make_model(name="other", format="Python")]


def render(service: dict[str, Any] | Sequence[dict[str, Any]], *arguments: str) -> Result:
    services = [service] if isinstance(service, dict) else service
    return CliRunner().invoke(app, ["render", "-", *arguments], input=yaml.safe_dump_all(services))


def test_the_objects_are_the_ones_that_the_operator_applies() -> None:
    images = Images("conch.example/conch:1", "triton.example/server:1")
    service = stored(make_service(), uid=UNKNOWN_UID)
    wanted = desired_children(
        service, make_spec(), images=images, strategy=SURGE_ON_CREATE, live_deployment=None,
        prometheus_namespace="monitoring", with_pod_monitor=True,
    )  # fmt: skip
    result = render(make_service(), "--pod-monitor", f"--fetch-image={images.fetch}", f"--triton-image={images.triton}")
    assert result.exit_code == 0
    assert list(yaml.safe_load_all(result.stdout)) == wanted


def test_images_come_from_the_settings_unless_an_option_says_otherwise(monkeypatch: Any) -> None:
    monkeypatch.setenv("CONCH_TRITON_IMAGE", "triton.example/from-settings:1")
    assert "image: triton.example/from-settings:1" in render(make_service()).stdout
    assert "image: triton.example/option:1" in render(make_service(), "--triton-image=triton.example/option:1").stdout


def test_the_config_of_a_single_model_is_the_file_as_it_is() -> None:
    result = render(make_service(), "--what=config")
    config = from_pbtxt(result.stdout)
    assert (config.name, config.backend) == ("resnet50", "onnxruntime")


def test_several_configs_are_told_apart_and_one_can_be_chosen() -> None:
    every = render(make_service(models=TWO), "--what=config").stdout
    assert [line for line in every.splitlines() if line.startswith("#")] == [
        "# resnet50/config.pbtxt", "# other/config.pbtxt",
    ]  # fmt: skip
    assert from_pbtxt(render(make_service(models=TWO), "--what=config", "--model=other").stdout).name == "other"
    missing = render(make_service(models=TWO), "--what=config", "--model=third")
    assert missing.exit_code == 2
    assert "--model third: no resource has it; use one of other, resnet50" in missing.stderr


def test_the_plan_is_the_one_in_the_pod_template() -> None:
    plan = yaml.safe_load(render(make_service(models=TWO), "--what=plan").stdout)
    assert [model.name for model in Plan.from_json(json.dumps(plan)).models] == ["resnet50", "other"]


def test_all_of_it_as_json_is_one_object() -> None:
    answer = json.loads(render(make_service(), "--what=all", "--output=json").stdout)
    assert answer.keys() == {"resource", "objects", "plan", "configs"}
    assert {item["kind"] for item in answer["objects"]} >= {"Deployment", "Service", "NetworkPolicy"}
    several = json.loads(render([make_service(), make_service(name="b")], "--what=config", "--output=json").stdout)
    assert [item["resource"] for item in several] == ["default/vision", "default/b"]


def test_a_resource_without_a_namespace_gets_the_one_of_the_option() -> None:
    service = make_service()
    del service["metadata"]["namespace"]
    spaces = {item["metadata"]["namespace"] for item in yaml.safe_load_all(render(service, "-n", "vision").stdout)}
    assert spaces == {"vision"}


def test_the_text_is_the_same_in_every_process() -> None:
    command = [sys.executable, "-m", "conch.cli.main", "render", "-", "--what=all"]
    text = yaml.safe_dump(make_service(models=TWO))
    said = {
        subprocess.run(
            command, input=text, capture_output=True, text=True, check=True, timeout=60, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1


def test_an_invalid_resource_is_told_as_by_validate_and_nothing_is_rendered() -> None:
    result = render([make_service(), make_service(name="b", paused="yes")])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "spec.paused: must be true or false" in result.stderr
    assert "<stdin>:" in result.stderr


def test_a_file_without_any_inference_service_is_an_error() -> None:
    result = render({"apiVersion": "v1", "kind": "ConfigMap"})
    assert result.exit_code == 1
    assert "no InferenceService of conch.dev/v1alpha1 was found" in result.stderr
