"""`conch import`: a folder as Triton serves it in, InferenceServices out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from typer.testing import CliRunner

from conch.api.inferenceservice import parse_service
from conch.cli.importing import readable, service_name
from conch.cli.main import app
from conch.triton.modelconfig import from_pbtxt
from conch.triton.normalform import normal_form
from makers import make_service

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

RESNET = """
platform: "onnxruntime_onnx"
max_batch_size: 8
input [ { name: "image" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] } ]
output [ { name: "scores" data_type: TYPE_FP32 dims: [ 1000 ] label_filename: "labels.txt" } ]
instance_group [ { kind: KIND_GPU count: 2 } ]
dynamic_batching { max_queue_delay_microseconds: 250 }
"""
DECODE = """
backend: "python"
max_batch_size: 8
input [ { name: "jpeg" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "image" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
CLASSIFY = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "jpeg" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "scores" data_type: TYPE_FP32 dims: [ 1000 ] } ]
ensemble_scheduling { step [
  { model_name: "decode" model_version: -1
    input_map { key: "jpeg" value: "jpeg" } output_map { key: "image" value: "i" } },
  { model_name: "resnet" model_version: -1
    input_map { key: "image" value: "i" } output_map { key: "scores" value: "scores" } }
] }
"""
CONFIGS = {"classify": CLASSIFY, "decode": DECODE, "resnet": RESNET}
FILES = ("classify/1/", "decode/1/model.py", "resnet/1/model.onnx", "resnet/labels.txt", "plain/2/model.plan")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """An ensemble, its two members, and a model that Triton completes by itself."""
    root = tmp_path / "My Models"
    for name in FILES:
        path = root / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text(name)
    for model, text in CONFIGS.items():
        (root / model / "config.pbtxt").write_text(text)
    return root


def conch(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def services(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.stderr
    return list(yaml.safe_load_all(result.stdout))


def test_a_repository_becomes_one_valid_service_that_renders_back(repository: Path) -> None:
    result = conch("import", repository, "--source-prefix=s3://bucket/models", "--strict")
    (service,) = services(result)
    assert service["metadata"] == {"name": "my-models"}
    assert conch("validate", "-", stdin=result.stdout).exit_code == 0
    answer = json.loads(conch("render", "-", "--what=config", "--output=json", stdin=result.stdout).stdout)
    formats = {model["name"]: model["format"] for model in service["spec"]["models"]}
    assert formats == {"classify": "Ensemble", "decode": "Python", "plain": "TensorRT", "resnet": "ONNX"}
    for name, text in CONFIGS.items():
        form = [
            normal_form(from_pbtxt(each), name, formats[name], gpu=True) for each in (text, answer["configs"][name])
        ]
        assert form[0] == form[1]


def test_sources_lie_under_the_prefix_and_an_ensemble_has_none(repository: Path) -> None:
    for prefix, uri in {
        "s3://bucket/models/": "s3://bucket/models/resnet",
        "pvc://claim": "pvc://claim/resnet",
        "gs://bucket/a": "gs://bucket/a/resnet",
        "image://registry.example/models:1": "image://registry.example/models:1#/resnet",
        "image://registry.example/models:1#/prod": "image://registry.example/models:1#/prod/resnet",
    }.items():
        (service,) = services(conch("import", repository, "--source-prefix", prefix))
        sources = {model["name"]: model.get("source") for model in service["spec"]["models"]}
        assert sources["resnet"] == {"uri": uri}
        assert sources["classify"] is None


def test_a_prefix_that_can_t_hold_folders_is_refused(repository: Path) -> None:
    for prefix in ("https://host/models", "oci://host/models:1", "/srv/models"):
        result = conch("import", repository, "--source-prefix", prefix)
        assert result.exit_code == 2
        assert "--source-prefix" in result.stderr
    assert conch("import", repository, "--source-prefix=s3://B").exit_code == 2


def test_each_model_can_have_a_service_of_its_own_but_an_ensemble_keeps_its_members(repository: Path) -> None:
    found = services(conch("import", repository, "--each", "-n", "vision"))
    assert {item["metadata"]["name"]: [model["name"] for model in item["spec"]["models"]] for item in found} == {
        "classify": ["classify", "decode", "resnet"], "plain": ["plain"],
    }  # fmt: skip
    assert {item["metadata"]["namespace"] for item in found} == {"vision"}


def test_one_model_can_be_chosen_and_brings_what_it_needs(repository: Path) -> None:
    (service,) = services(conch("import", repository, "--model=plain", "--name=one"))
    assert service["metadata"]["name"] == "one"
    assert [model["name"] for model in service["spec"]["models"]] == ["plain"]
    (service,) = services(conch("import", repository, "--model=classify"))
    assert len(service["spec"]["models"]) == 3
    unknown = conch("import", repository, "--model=other")
    assert unknown.exit_code == 2
    assert "--model other: is not there; use one of classify, decode, plain, resnet" in unknown.stderr


def test_digests_are_those_that_fetch_verifies(repository: Path) -> None:
    (service,) = services(conch("import", repository, "--digests"))
    for model in service["spec"]["models"]:
        if model["format"] != "Ensemble":
            printed = conch("digest", repository / model["name"]).stdout
            assert model["source"]["digest"] in printed


def test_differences_are_named_in_comments_and_fail_a_strict_run(repository: Path) -> None:
    config = repository / "resnet" / "config.pbtxt"
    config.write_text(RESNET.replace("count: 2", 'count: 2 host_policy: "numa"'))
    words = 'resnet: instance_group[0].host_policy: is "numa", becomes unset'
    loose, strict = conch("import", repository), conch("import", repository, "--strict")
    assert (loose.exit_code, strict.exit_code) == (0, 1)
    for result in (loose, strict):
        assert f"difference: {words}\n" in result.stderr
        assert f"# {words}\n" in result.stdout
        parse_service(yaml.safe_load(result.stdout))
    (answer,) = json.loads(conch("import", repository, "--output=json").stdout)
    assert answer["differences"][0]["field"] == "instance_group[0].host_policy"


def test_a_mistake_in_a_configuration_is_told_with_file_and_line(repository: Path) -> None:
    config = repository / "decode" / "config.pbtxt"
    config.write_text("max_batch_size: 8\ninputs [ ]\n")
    result = conch("import", repository)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"{config}:2:1: ")
    assert 'no field named "inputs"' in result.stderr
    config.write_bytes(b'backend: "python"\n# \xff\n')
    assert f"{config}:2: is not UTF-8 text" in conch("import", repository).stderr


def test_what_is_no_repository_is_told_apart(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, words in {
        tmp_path / "missing": "can't be read (No such file or directory)",
        tmp_path / "empty": "holds no model",
        repository / "resnet": "is a single model's folder; name the folder above it, and --model",
    }.items():
        result = conch("import", path)
        assert result.exit_code == 2
        assert words in result.stderr


def test_a_folder_that_is_no_model_is_left_out_and_told(repository: Path) -> None:
    (repository / "scripts").mkdir()
    (repository / "scripts" / "build.sh").touch()
    result = conch("import", repository)
    assert len(services(result)[0]["spec"]["models"]) == 4
    assert "note: scripts: holds neither config.pbtxt nor a numbered folder" in result.stderr


def test_a_configuration_of_another_name_is_read_where_there_is_one(repository: Path) -> None:
    (repository / "resnet" / "configs").mkdir()
    (repository / "resnet" / "configs" / "h100.pbtxt").write_text(RESNET.replace("count: 2", "count: 5"))
    (service,) = services(conch("import", repository, "--config-name=h100"))
    models = {model["name"]: model for model in service["spec"]["models"]}
    assert models["resnet"]["instances"]["count"] == 5
    assert models["decode"]["instances"] == {"kind": "CPU"}


def test_one_model_that_can_t_be_carried_does_not_keep_the_others_from_it(repository: Path) -> None:
    (repository / "_odd" / "1").mkdir(parents=True)
    (repository / "_odd" / "1" / "model.onnx").touch()
    result = conch("import", repository, "--each")
    assert len(services(result)) == 2
    assert "difference: _odd: no model can be carried" in result.stderr
    assert conch("import", repository, "--each", "--strict").exit_code == 1
    named = conch("import", repository, "--each", "--name=one")
    assert (named.exit_code, "--name one: is for one service, and these are 3" in named.stderr) == (2, True)


def test_a_repository_of_many_models_asks_for_each(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / "many" / f"m{number}" / "1").mkdir(parents=True)
        (tmp_path / "many" / f"m{number}" / "1" / "model.onnx").touch()
    result = conch("import", tmp_path / "many")
    assert result.exit_code == 2
    assert "add --each" in result.stderr
    assert len(services(conch("import", tmp_path / "many", "--each"))) == 20


def test_a_model_whose_backend_has_an_image_of_its_own_gets_that_image(tmp_path: Path) -> None:
    (tmp_path / "llm" / "chat" / "1").mkdir(parents=True)
    (tmp_path / "llm" / "chat" / "config.pbtxt").write_text('backend: "vllm" instance_group { kind: KIND_MODEL }')
    result = conch("import", tmp_path / "llm", "--strict")
    (service,) = services(result)
    assert service["spec"]["runtime"]["image"].endswith("-vllm-python-py3")
    assert conch("validate", "-", stdin=result.stdout).exit_code == 0


def test_a_model_that_no_usual_image_serves_is_imported_and_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "old" / "rank" / "1" / "model.savedmodel").mkdir(parents=True)
    result = conch("import", tmp_path / "old")
    assert services(result)
    assert "before it is applied: spec.models[0].format: TensorFlow is not in Triton's images" in result.stderr


def test_two_folders_whose_names_differ_in_little_get_names_of_their_own(tmp_path: Path) -> None:
    for name in ("a_b", "a-b", "A.b"):
        (tmp_path / "near" / name / "1").mkdir(parents=True)
        (tmp_path / "near" / name / "1" / "model.onnx").touch()
    found = services(conch("import", tmp_path / "near", "--each"))
    assert sorted(item["metadata"]["name"] for item in found) == ["a-b", "a-b-2", "a-b-3"]


def test_names_of_folders_become_names_of_services() -> None:
    assert service_name("My_Models v2") == "my-models-v2"
    assert service_name("2024") == "m-2024"
    assert len(service_name("x" * 100)) == 45


def test_the_yaml_is_short_and_says_the_same() -> None:
    service = make_service({"models[0].inputs": [{"name": "x", "dataType": "FP32", "dims": [1, 2]}], "paused": True})
    text = readable(service)
    assert yaml.safe_load(text) == service
    assert "- {name: x, dataType: FP32, dims: [1, 2]}" in text
