"""What a wrong InferenceService is answered with, offline."""

from __future__ import annotations

from typing import Any

import pytest

from conch.api.inferenceservice import InvalidSpec, parse_service
from invalid_services import INVALID, Invalid
from makers import make_service


@pytest.mark.parametrize("case", INVALID, ids=lambda case: case.name)
def test_an_invalid_service_is_refused_with_the_field_and_the_fix(case: Invalid) -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse_service(case.service())
    lines = caught.value.problems
    assert any(all(words in line for words in case.says) for line in lines), lines


@pytest.mark.parametrize("case", INVALID, ids=lambda case: case.name)
def test_a_message_is_short_printable_and_one_line_a_problem(case: Invalid) -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse_service(case.service())
    for line in caught.value.problems:
        assert len(line) <= 400
        assert line.isprintable()
    assert str(caught.value) == "\n".join(caught.value.problems)


def test_the_table_is_as_long_as_promised_and_its_names_differ() -> None:
    assert len(INVALID) >= 60
    assert len({case.name for case in INVALID}) == len(INVALID)


def test_every_problem_is_listed_at_once() -> None:
    service = make_service(
        {
            "models[0].format": "Caffe",
            "models[0].source.uri": "ftp://host/x",
            "scaling.minReplicas": 9,
            "scaling.startup": "soon",
            "resources.cpu": "much",
        }
    )
    with pytest.raises(InvalidSpec) as caught:
        parse_service(service)
    assert {line.partition(":")[0] for line in caught.value.problems} == {
        "spec.models[0].format",
        "spec.models[0].source.uri",
        "spec.scaling.startup",
        "spec.resources.cpu",
    }


def test_two_rules_of_one_object_are_both_reported() -> None:
    service = make_service({"models[0].instances.kind": "GPU", "accelerator.count": 0, "runtime.sharedMemory": "8Gi"})
    with pytest.raises(InvalidSpec) as caught:
        parse_service(service)
    assert [line.partition(":")[0] for line in caught.value.problems] == [
        "spec.accelerator.count",
        "spec.runtime.sharedMemory",
    ]


def test_a_flood_of_problems_is_cut_and_counted() -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse_service(make_service({f"unknown{number}": 1 for number in range(5000)}))
    assert len(caught.value.problems) == 51
    assert caught.value.problems[-1] == "and 4950 more"


def test_a_password_in_a_uri_isnt_repeated() -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse_service(make_service({"models[0].source.uri": "https://me:hunter2@host/x"}))
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("spec", [None, [], "text", 7, {"models": [None]}, {"models": "x"}, {"models": [[]]}])
def test_nonsense_in_place_of_a_spec_is_an_invalid_spec(spec: Any) -> None:
    with pytest.raises(InvalidSpec, match="spec"):
        parse_service({"metadata": {"name": "x"}, "spec": spec})


@pytest.mark.parametrize("metadata", [None, {}, {"name": None}, {"name": 7}, "x"])
def test_a_service_without_a_name_is_an_invalid_spec(metadata: Any) -> None:
    with pytest.raises(InvalidSpec, match=r"metadata\.name"):
        parse_service({**make_service(), "metadata": metadata})


def test_another_kind_or_version_is_refused() -> None:
    with pytest.raises(InvalidSpec, match="kind: must be InferenceService"):
        parse_service({**make_service(), "kind": "Deployment"})
    with pytest.raises(InvalidSpec, match=r"apiVersion: must be conch\.dev/v1alpha1"):
        parse_service({**make_service(), "apiVersion": "conch.dev/v9"})


def test_an_entry_of_a_list_without_kind_and_version_is_taken() -> None:
    service = make_service()
    del service["kind"], service["apiVersion"]
    assert parse_service(service).models[0].name == "resnet50"


def test_a_null_field_counts_as_absent_as_at_the_api_server() -> None:
    service = make_service()
    service["spec"]["scaling"] = None
    service["spec"]["models"][0]["queue"] = None
    spec = parse_service(service)
    assert spec.scaling.max_replicas == 4
    assert spec.models[0].queue is None
