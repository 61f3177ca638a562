"""Spec → ModelConfig → config.pbtxt."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.api.inferenceservice import InvalidSpec, parse_service
from conch.triton.modelconfig import default_file_name, from_pbtxt, model_config, to_pbtxt
from invalid_services import HOSTILE_TEXTS, TEXT_FIELDS
from makers import SHA256, make_model, make_spec, set_field

GOLDEN = Path(__file__).parent / "golden"
INPUT = {"name": "input", "dataType": "FP32", "dims": [3, 224, 224]}
OUTPUT = {"name": "output", "dataType": "FP32", "dims": [1000]}

CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "onnx-minimal": (make_model(), True),
    "onnx-cpu": (make_model(), False),
    "onnx-full": (
        make_model(
            maxBatchSize=64,
            inputs=[INPUT, {"name": "mask", "dataType": "BOOL", "dims": [-1]}],
            outputs=[OUTPUT],
            batching={"preferredSizes": [8, 16, 32], "maxQueueDelay": "10ms"},
            queue={"maxSize": 256, "timeout": "500ms"},
            instances={"count": 2, "kind": "GPU"},
            parameters={"enable_mem_arena": "0", "execution_mode": "1"},
        ),
        True,
    ),
    "onnx-cpu-instances-beside-a-gpu": (make_model(instances={"count": 3, "kind": "CPU"}), True),
    "python-strings": (
        make_model(
            name="embed",
            format="Python",
            source={"uri": "https://models.example/embed/model.py", "digest": SHA256},
            inputs=[{"name": "text", "dataType": "STRING", "dims": [1]}],
            outputs=[{"name": "vector", "dataType": "BF16", "dims": [384]}],
            parameters={"EXECUTION_ENV_PATH": "$$TRITON_MODEL_DIRECTORY/env.tar.gz"},
        ),
        False,
    ),
    "python-batching-without-limits": (make_model(format="Python", maxBatchSize=1, batching={}), False),
    "onnx-queue-size-only": (make_model(maxBatchSize=4, batching={}, queue={"maxSize": 16}), True),
    "hostile-parameter": (
        make_model(parameters={"note": 'a" } backend: "evil" {{ x }} \\ $(y) \' é 模型 \u202e'}),
        True,
    ),
}


def render(model: dict[str, Any], *, gpu: bool) -> tuple[Any, str]:
    message = model_config(make_spec(models=[model]).models[0], gpu=gpu)
    return message, to_pbtxt(message)


@pytest.mark.parametrize("name", CASES)
def test_a_config_is_as_the_golden_file_and_reads_back_equal(name: str) -> None:
    model, gpu = CASES[name]
    message, text = render(model, gpu=gpu)
    golden = (GOLDEN / f"{name}.pbtxt").read_text(encoding="ascii")
    assert text == golden
    assert from_pbtxt(golden) == message


def test_each_golden_file_has_its_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*.pbtxt")} == set(CASES)


def test_the_text_doesnt_depend_on_the_order_of_parameters() -> None:
    keys = [f"key{number}" for number in range(20)]
    texts = {
        render(make_model(parameters=dict.fromkeys(order, "x")), gpu=False)[1] for order in (keys, list(reversed(keys)))
    }
    assert len(texts) == 1


def test_what_the_spec_leaves_out_stays_for_triton_to_complete() -> None:
    message, _ = render(make_model(), gpu=False)
    assert {field.name for field, _ in message.ListFields()} == {"name", "backend", "instance_group"}


@pytest.mark.parametrize(("model_format", "name"), [("ONNX", "model.onnx"), ("Python", "model.py")])
def test_each_format_has_its_file_name(model_format: Any, name: str) -> None:
    assert default_file_name(model_format) == name


@pytest.mark.parametrize(
    "data_type",
    ["BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "BF16", "FP32", "FP64",
     "STRING"],
)  # fmt: skip
def test_every_data_type_is_tritons(data_type: str) -> None:
    _, text = render(make_model(inputs=[{**INPUT, "dataType": data_type}]), gpu=False)
    assert f"data_type: TYPE_{data_type}\n" in text


printable = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=200)
tensor_names = st.from_regex(re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/\[\]-]{0,30}", re.ASCII), fullmatch=True)
sizes = st.just(-1) | st.integers(1, 2**31 - 1)
data_types = st.sampled_from(["BOOL", "INT32", "INT64", "FP16", "BF16", "FP32", "STRING"])
tensors = st.lists(
    st.fixed_dictionaries(
        {"name": tensor_names, "dataType": data_types, "dims": st.lists(sizes, min_size=1, max_size=16)}
    ),
    max_size=5,
    unique_by=lambda tensor: tensor["name"],
)
batched = st.integers(1, 65536).flatmap(
    lambda largest: st.fixed_dictionaries(
        {
            "maxBatchSize": st.just(largest),
            "batching": st.fixed_dictionaries(
                {},
                optional={
                    "preferredSizes": st.lists(st.integers(1, largest), max_size=16),
                    "maxQueueDelay": st.integers(0, 60_000).map(lambda number: f"{number}ms"),
                },
            ),
        },
        optional={
            "queue": st.fixed_dictionaries(
                {},
                optional={
                    "maxSize": st.integers(9, 1_000_000),
                    "timeout": st.integers(1, 86_400_000).map(lambda number: f"{number}ms"),
                },
            )
        },
    )
)
unbatched = st.fixed_dictionaries({}, optional={"maxBatchSize": st.integers(0, 65536)})
keys = st.from_regex(re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,60}", re.ASCII), fullmatch=True)
models = st.builds(
    lambda part, rest: make_model(**part, **rest),
    st.fixed_dictionaries(
        {
            "name": st.from_regex(
                re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,60}[A-Za-z0-9_-])?", re.ASCII), fullmatch=True
            )
        },
        optional={
            "format": st.sampled_from(["ONNX", "Python"]),
            "inputs": tensors,
            "outputs": tensors,
            "instances": st.fixed_dictionaries(
                {}, optional={"count": st.integers(1, 64), "kind": st.sampled_from(["GPU", "CPU"])}
            ),
            "parameters": st.dictionaries(keys.filter(lambda key: key != "EXECUTION_ENV_PATH"), printable, max_size=8),
        },
    ),
    batched | unbatched,
)


@given(models, st.booleans())
def test_any_accepted_model_gives_text_that_tritons_parser_reads_back_equal(model: dict[str, Any], gpu: bool) -> None:  # noqa: FBT001
    message, text = render(model, gpu=gpu)
    assert from_pbtxt(text) == message
    assert text.isascii()
    assert message.name == model["name"]
    assert {key: value.string_value for key, value in message.parameters.items()} == model.get("parameters", {})


@given(printable.filter(bool))
def test_a_hostile_parameter_never_leaves_its_quotes(value: str) -> None:
    message, text = render(make_model(parameters={"note": value}), gpu=False)
    plain, harmless = render(make_model(parameters={"note": "x"}), gpu=False)
    assert len(text.splitlines()) == len(harmless.splitlines())
    parsed = from_pbtxt(text)
    assert parsed.parameters["note"].string_value == value
    parsed.parameters["note"].string_value = "x"
    assert parsed == plain
    assert parsed.backend == message.backend == "onnxruntime"


@pytest.mark.parametrize("what", HOSTILE_TEXTS)
@pytest.mark.parametrize("path", [*TEXT_FIELDS, "spec.models[0].parameters.note"])
def test_a_hostile_text_is_refused_or_stays_quoted(path: str, what: str) -> None:
    service: dict[str, Any] = {
        "metadata": {"name": "vision"},
        "spec": {
            "models": [make_model(maxBatchSize=8, batching={}, queue={"maxSize": 99}, inputs=[dict(INPUT)])],
            "accelerator": {"products": ["NVIDIA-L4"]},
            "placement": {"tolerations": [{"key": "gpu"}]},
        },
    }
    set_field(service, path, HOSTILE_TEXTS[what])
    try:
        spec = parse_service(service)
    except InvalidSpec:
        return
    assert path.endswith("parameters.note")
    text = to_pbtxt(model_config(spec.models[0], gpu=True))
    assert from_pbtxt(text).backend == "onnxruntime"
    assert text.count("backend:") == text.count('backend: "onnxruntime"') + text.count('\\" } backend:')
