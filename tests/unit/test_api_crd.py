"""The CRD that is made of the models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from conch.api import crd
from conch.api.fields import VALIDATIONS, Resource
from conch.api.inferenceservice import InferenceServiceSpec, parse_service
from makers import make_service, make_spec

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
FILE = ROOT / "crds" / "conch.dev_inferenceservices.yaml"
VERSION: dict[str, Any] = crd.custom_resource_definition()["spec"]["versions"][0]
SCHEMA: dict[str, Any] = VERSION["schema"]["openAPIV3Schema"]


def parts(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from parts(part, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from parts(schema[key], f"{path}[]")


def written(model: type[Resource]) -> Iterator[type[Resource]]:
    yield model
    yield from Resource.__subclasses__()


def test_the_file_in_the_repository_is_fresh() -> None:
    assert FILE.read_text() == crd.to_yaml(), "run: python -m conch.api.crd > crds/conch.dev_inferenceservices.yaml"
    assert crd.main(["--check", str(FILE)]) == 0


def test_a_stale_file_is_reported_with_the_command_that_helps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = tmp_path / "crd.yaml"
    assert crd.main(["--check", str(stale)]) == 1
    stale.write_text("old")
    assert crd.main(["--check", str(stale)]) == 1
    assert "python -m conch.api.crd >" in capsys.readouterr().err


def test_printing_gives_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert crd.main([]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == crd.custom_resource_definition()


def test_row_62_the_crd_is_far_below_the_limit_of_an_annotation() -> None:
    assert len(FILE.read_bytes()) < 200 * 1024


def test_row_40_replicas_and_other_computed_values_are_never_in_the_spec() -> None:
    names = {path.rsplit(".", 1)[-1] for path, _ in parts(SCHEMA["properties"]["spec"])}
    assert "replicas" not in names
    assert VERSION["subresources"] == {"status": {}}


def test_row_57_every_default_of_the_models_stands_in_the_schema_and_no_other() -> None:
    spec = SCHEMA["properties"]["spec"]["properties"]
    defaulted = make_service()
    defaulted["spec"] |= {name: part["default"] for name, part in spec.items() if "default" in part}
    assert parse_service(defaulted) == make_spec()
    bare = make_spec().model_dump(mode="json", by_alias=True, exclude_none=True)
    for name, part in spec.items():
        for inner, value in part.get("default", {}).items() if isinstance(part.get("default"), dict) else ():
            assert bare[name][inner] == value or isinstance(value, dict)


def test_r16_every_list_map_and_text_is_bounded() -> None:
    for path, part in parts(SCHEMA["properties"]["spec"], "spec"):
        if part.get("type") == "array":
            assert "maxItems" in part, path
        if part.get("type") == "string":
            assert "maxLength" in part or "enum" in part, path
        if "additionalProperties" in part:
            assert "maxProperties" in part, path
        if part.get("type") in {"integer", "number"}:
            assert {"minimum", "maximum"} <= set(part), path
    for path, part in parts(SCHEMA["properties"]["status"], "status"):
        if part.get("type") == "array":
            assert "maxItems" in part, path
        if part.get("type") == "string":
            assert "maxLength" in part or "enum" in part, path


def test_every_field_is_described_and_says_its_default() -> None:
    for path, part in parts(SCHEMA):
        if path and not path.endswith("[]") and path != ".metadata":
            assert part.get("description", "").endswith("."), path
        if part.get("type") in {"string", "integer", "number", "boolean"} and "default" in part:
            assert "Default: " in part["description"], path


def test_lists_of_named_things_are_list_maps() -> None:
    keyed = {path for path, part in parts(SCHEMA) if part.get("x-kubernetes-list-type") == "map"}
    assert {".spec.models", ".spec.models[].inputs", ".spec.models[].outputs", ".status.conditions"} <= keyed
    conditions = SCHEMA["properties"]["status"]["properties"]["conditions"]
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]


def test_the_schema_is_structural() -> None:
    forbidden = {"$ref", "$defs", "anyOf", "title", "const", "x-kubernetes-preserve-unknown-fields"}
    for path, part in parts(SCHEMA):
        assert not forbidden & set(part), path
        assert part.get("additionalProperties", {}) is not False, path
        assert "type" in part or "x-kubernetes-int-or-string" in part, path


def test_row_14_unknown_is_a_value_of_its_own_in_the_status_and_never_in_the_spec() -> None:
    nullable = {path for path, part in parts(SCHEMA) if part.get("nullable")}
    assert {".status.scaling.waiting", ".status.gpus.free", ".status.scaling.terms[].replicas"} <= nullable
    assert not any(path.startswith(".spec") for path in nullable)


def test_every_rule_of_a_model_is_in_the_crd() -> None:
    in_crd = {rule["rule"] for _, part in parts(SCHEMA) for rule in part.get(VALIDATIONS, [])}
    in_models = {rule.cel for model in written(InferenceServiceSpec) for rule in model.rules}
    assert in_models <= in_crd
    assert len(in_models) >= 15


def test_a_rules_message_names_the_fix_in_one_line() -> None:
    for path, part in parts(SCHEMA):
        for rule in part.get(VALIDATIONS, []):
            assert "\n" not in rule["message"], path
            assert len(rule["message"]) <= 250, path


def test_the_columns_are_what_a_user_looks_for() -> None:
    columns = {column["name"]: column["jsonPath"] for column in VERSION["additionalPrinterColumns"]}
    assert columns == {
        "Ready": ".status.conditions[?(@.type=='Ready')].status",
        "Replicas": ".status.replicas.summary",
        "Waiting": ".status.scaling.waiting",
        "Reason": ".status.conditions[?(@.type=='Ready')].reason",
        "Age": ".metadata.creationTimestamp",
    }
    names = crd.custom_resource_definition()["spec"]["names"]
    assert (names["shortNames"], names["categories"]) == (["cisvc"], ["conch"])


@pytest.mark.parametrize("sample", sorted((ROOT / "manifests" / "samples").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_sample_is_valid(sample: Path) -> None:
    documents = [part for part in yaml.safe_load_all(sample.read_text()) if part and part["kind"] == "InferenceService"]
    assert documents
    for document in documents:
        parse_service(document)
