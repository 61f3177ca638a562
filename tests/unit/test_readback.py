"""What Triton says it has loaded against its config.pbtxt. `golden/loaded.json` holds tritonserver 2.51's own "
"answers."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.api.conditions import MAX_MESSAGE
from conch.triton.modelconfig import from_pbtxt, model_config
from conch.triton.readback import (
    Difference,
    Loaded,
    UnreadableAnswer,
    differences,
    parse_loaded,
    planned_configs,
    sentence,
)
from fake_server import make_loaded
from makers import make_model, make_spec

GOLDEN = Path(__file__).parent / "golden"
ANSWERS: dict[str, dict[str, Any]] = json.loads((GOLDEN / "loaded.json").read_text())
FEATURES: list[dict[str, Any]] = json.loads((GOLDEN / "loaded-features.json").read_text())

TENSORS = """
input [{name: "x" data_type: TYPE_FP32 dims: [4]}]
output [{name: "y" data_type: TYPE_FP32 dims: [4]}]
"""
PYTHON = f'backend: "python" max_batch_size: 8 instance_group [{{kind: KIND_CPU count: 1}}] {TENSORS}'
SPEC = make_spec({"accelerator.count": 0})
MODEL = SPEC.models[0]


def answer(name: str) -> Loaded:
    said = ANSWERS[name]
    return parse_loaded(json.dumps(said["config"]).encode(), json.dumps(said["metadata"]).encode())


def found(pbtxt: str, loaded: Loaded, model: Any = MODEL) -> list[Difference]:
    return differences(model, 0, from_pbtxt(pbtxt), loaded)


def told(pbtxt: str, loaded: Loaded, model: Any = MODEL) -> list[tuple[str, str, str]]:
    return [(one.field, one.wanted, one.loaded) for one in found(pbtxt, loaded, model)]


@pytest.mark.parametrize(
    ("name", "pbtxt"),
    [
        ("a", PYTHON),
        (
            "b",
            PYTHON + "dynamic_batching { max_queue_delay_microseconds: 1000 default_queue_policy { max_queue_size: 100 "
            "default_timeout_microseconds: 5000000 } }",
        ),
        (
            "e",
            'platform: "ensemble" max_batch_size: 8'
            + TENSORS
            + 'ensemble_scheduling { step [{ model_name: "a" model_version: -1 input_map { key: "x" value: "x" } '
            'output_map { key: "y" value: "t" } }, { model_name: "b" model_version: -1 input_map { key: "x" value: '
            '"t" } '
            'output_map { key: "y" value: "y" } }] }',
        ),
        ("auto", 'backend: "python" instance_group [{kind: KIND_CPU}]'),
        ("sig", 'backend: "onnxruntime" instance_group [{kind: KIND_CPU count: 2}]'),
        (
            "seq",
            PYTHON + "sequence_batching { max_sequence_idle_microseconds: 5000000 direct {} control_input [{ "
            'name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }] } '
            "version_policy { specific { versions: [1] } } optimization { input_pinned_memory { enable: false } "
            'priority: PRIORITY_MAX } model_warmup [{ name: "w" batch_size: 1 inputs { key: "x" value { '
            "data_type: TYPE_FP32 dims: [4] zero_data: true } } }] response_cache { enable: false }",
        ),
    ],
)
def test_what_the_real_server_completes_is_no_difference(name: str, pbtxt: str) -> None:
    assert found(pbtxt, answer(name)) == []


@pytest.mark.parametrize("seen", FEATURES, ids=[seen["model"]["name"] for seen in FEATURES])
def test_no_feature_of_the_spec_looks_different_once_the_real_server_has_loaded_it(seen: dict[str, Any]) -> None:
    fields = {
        "accelerator.count": 0,
        "models": [seen["model"]],
        "runtime.responseCache.local.size": "1Mi",
        "runtime.rateLimiter.resources": [{"name": "R1", "count": 4}],
    }
    model = make_spec(fields).models[0]
    loaded = parse_loaded(json.dumps(seen["config"]).encode(), json.dumps(seen["metadata"]).encode())
    assert differences(model, 0, model_config(model, gpu=False), loaded) == []


@pytest.mark.parametrize(
    ("pbtxt", "place", "wanted", "loaded"),
    [
        (PYTHON.replace("max_batch_size: 8", "max_batch_size: 16"), "maxBatchSize", "16", "8"),
        (PYTHON.replace("count: 1", "count: 3"), "instances.count", "3", "1"),
        (PYTHON.replace("KIND_CPU", "KIND_GPU"), "instances.kind", "GPU", "CPU"),
        (
            PYTHON.replace('"x" data_type: TYPE_FP32', '"x" data_type: TYPE_INT32'),
            "inputs[x].dataType",
            "INT32",
            "FP32",
        ),
        (PYTHON.replace("dims: [4]", "dims: [4, 2]", 1), "inputs[x].dims", "[4, 2]", "[4]"),
        (PYTHON.replace('"y"', '"label"'), "outputs[label]", "named", "absent"),
        (PYTHON + "dynamic_batching { }", "batching", "set", "not set"),
        (PYTHON + "version_policy { specific { versions: [1, 7] } }", "versions.numbers", "1, 7", "1"),
        (PYTHON + "model_transaction_policy { decoupled: true }", "decoupled", "true", "false"),
        (PYTHON + 'parameters { key: "k" value { string_value: "v" } }', "parameters[k]", "set", "not set"),
    ],
)
def test_row_81_a_value_that_the_server_changed_is_named_with_both_sides_and_what_to_write(
    pbtxt: str, place: str, wanted: str, loaded: str
) -> None:
    assert (f"spec.models[0].{place}", wanted, loaded) in told(pbtxt, answer("a"))
    assert all(one.fix for one in found(pbtxt, answer("a")))


def test_values_inside_batching_are_named_as_in_the_spec() -> None:
    pbtxt = PYTHON + (
        "dynamic_batching { preferred_batch_size: [4] max_queue_delay_microseconds: 2500 default_queue_policy { "
        "max_queue_size: 7 } }"
    )
    assert told(pbtxt, answer("b")) == [
        ("spec.models[0].batching.preferredSizes", "[4]", "[8]"),
        ("spec.models[0].batching.maxQueueDelay", "2.5ms", "1ms"),
        ("spec.models[0].queue.maxSize", "7", "100"),
    ]


def test_row_81_a_maximum_of_0_that_triton_completed_is_a_difference_and_a_missing_one_is_none() -> None:
    completed = make_loaded(from_pbtxt(PYTHON), max_batch_size=4)
    unset = PYTHON.replace("max_batch_size: 8", "")
    zero = make_spec({"models": [make_model(maxBatchSize=0)]}).models[0]
    assert told(unset, completed) == []
    assert told(unset, completed, zero) == [("spec.models[0].maxBatchSize", "0", "4")]


def test_row_81_batching_that_came_to_nothing_because_the_maximum_was_completed_to_1_is_told() -> None:
    completed = make_loaded(from_pbtxt(PYTHON), max_batch_size=1, dynamic_batching={})
    assert told(PYTHON.replace("max_batch_size: 8", ""), completed) == [("spec.models[0].maxBatchSize", "not set", "1")]
    # Asked for, it is what the user wants.
    assert told(PYTHON.replace("max_batch_size: 8", "max_batch_size: 1"), completed) == []


def test_an_input_that_a_listing_spec_leaves_out_is_told_unless_it_is_optional() -> None:
    more = {"name": "mask", "data_type": "TYPE_FP32", "dims": [4]}
    inputs = [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}, more]
    assert told(PYTHON, make_loaded(from_pbtxt(PYTHON), input=inputs)) == [
        ("spec.models[0].inputs", "without mask", "with them")
    ]
    optional = [inputs[0], {**more, "optional": True}]
    assert told(PYTHON, make_loaded(from_pbtxt(PYTHON), input=optional)) == []
    assert told('backend: "python"', make_loaded(from_pbtxt(PYTHON), input=inputs)) == []


def test_a_variable_that_the_server_replaced_is_no_difference() -> None:
    pbtxt = PYTHON + (
        'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "$$TRITON_MODEL_DIRECTORY/env.tar.gz" } }'
    )
    loaded = make_loaded(from_pbtxt(pbtxt), parameters={"EXECUTION_ENV_PATH": {"string_value": "/models/m/env.tar.gz"}})
    assert told(pbtxt, loaded) == []


def test_fields_of_a_newer_server_are_passed_over() -> None:
    assert told(PYTHON, make_loaded(from_pbtxt(PYTHON), invented_in_2030={"a": 1})) == []
    # A value of an enumeration, which protobuf passes on as its number.
    newer = [{"name": "x", "data_type": 77, "dims": [4]}]
    assert told(PYTHON, make_loaded(from_pbtxt(PYTHON), input=newer)) == [
        ("spec.models[0].inputs[x].dataType", "FP32", "77")
    ]


@pytest.mark.parametrize(
    ("config", "metadata"),
    [(b"", b"{}"), (b"[]", b"{}"), (b"{}", b"[]"), (b'{"max_batch_size": "many"}', b"{}"), (b"<html>", b"<html>")]
    + [
        (b"{}", b'{"versions": %s}' % said)
        for said in (b"7", b"[7]", b'["one"]', b'["\\ud800"]', b'["%s"]' % (b"1" * 20))
    ],
)
def test_an_answer_that_is_none_of_tritons_is_unreadable(config: bytes, metadata: bytes) -> None:
    with pytest.raises(UnreadableAnswer):
        parse_loaded(config, metadata)


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_whatever_answers_is_read_or_unreadable(config: bytes, metadata: bytes) -> None:
    with contextlib.suppress(UnreadableAnswer):
        parse_loaded(config, metadata)


def test_the_message_names_model_value_and_fix_and_ends_in_time() -> None:
    ones = found(PYTHON.replace("max_batch_size: 8", "max_batch_size: 16"), answer("a"))
    assert sentence([("resnet", ones), ("other", [])]) == (
        'Model "resnet": spec.models[0].maxBatchSize is 16 in the spec and 8 in the server: set it to 8, or build the '
        "model for batches of 16."
    )
    assert sentence([("resnet", [])]) == ""
    many = sentence([(f"m{i}", ones) for i in range(16)])
    assert many.endswith("More differs.")
    assert len(many) < MAX_MESSAGE


def test_the_plans_configurations_are_read_and_a_broken_plan_has_none() -> None:
    config = model_config(MODEL, gpu=False)
    plan = json.dumps({"models": [{"name": "resnet50", "config": str(config)}]})
    assert planned_configs(plan) == {"resnet50": config}
    for broken in ("", "{", "[]", '{"models": [{"name": "m"}]}', '{"models": [{"name": "m", "config": "{"}]}'):
        assert planned_configs(broken) == {}
