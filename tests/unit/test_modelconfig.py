"""Spec → ModelConfig → config.pbtxt."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2 as pb

from conch.api.inferenceservice import InvalidSpec, parse_service
from conch.triton.backends import BACKENDS, Format, companions
from conch.triton.modelconfig import from_pbtxt, model_config, planned, to_pbtxt
from invalid_services import FREE_TEXT_FIELDS, HOSTILE_TEXTS, TEXT_FIELDS, parts_around
from makers import SHA256, make_model, make_service, make_spec, set_field
from random_specs import RandomSpec

if TYPE_CHECKING:
    from conch.api.model import Model

GOLDEN = Path(__file__).parent / "golden"
INPUT = {"name": "input", "dataType": "FP32", "dims": [3, 224, 224]}
OUTPUT = {"name": "output", "dataType": "FP32", "dims": [1000]}

CASES: dict[str, tuple[dict[str, Any], bool]] = {
    # Formats: what each needs, and nothing else.
    "onnx-minimal": (make_model(), True),
    "onnx-cpu": (make_model(), False),
    "onnx-file": (make_model(file="resnet.onnx"), True),
    "tensorrt": (make_model(format="TensorRT"), True),
    "pytorch": (make_model(format="PyTorch", inputs=[INPUT], outputs=[OUTPUT]), True),
    "tensorflow": (make_model(format="TensorFlow"), True),
    "tflite": (make_model(format="TFLite"), False),
    "openvino": (make_model(format="OpenVINO"), True),
    "python": (make_model(format="Python", file="serve.py"), False),
    "dali": (make_model(format="DALI", maxBatchSize=32), True),
    "vllm": (make_model(format="vLLM", decoupled=True), True),
    "vllm-without-metrics": (make_model(format="vLLM", parameters={"REPORT_CUSTOM_METRICS": "false"}), True),
    "tensorrtllm": (
        make_model(
            format="TensorRTLLM",
            decoupled=True,
            inputs=[
                {"name": "input_ids", "dataType": "INT32", "dims": [-1], "raggedBatch": True},
                {"name": "input_lengths", "dataType": "INT32", "dims": [1], "reshape": []},
                {"name": "end_id", "dataType": "INT32", "dims": [1], "reshape": [], "optional": True},
            ],
            outputs=[{"name": "output_ids", "dataType": "INT32", "dims": [-1, -1]}],
            maxBatchSize=64,
            batching={},
            parameters={"gpt_model_path": "/models/resnet50/1", "gpt_model_type": "inflight_fused_batching"},
        ),
        True,
    ),
    "auto": (make_model(format="Auto"), True),
    # Features.
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
    "tensors": (
        make_model(
            format="TensorRT",
            maxBatchSize=8,
            inputs=[
                {"name": "image", "dataType": "UINT8", "dims": [224, 224, 3], "tensorFormat": "NHWC"},
                {"name": "flat", "dataType": "FP16", "dims": [12], "reshape": [3, 4], "optional": True},
                {"name": "shape", "dataType": "INT32", "dims": [2], "shapeTensor": True},
                {"name": "scalar", "dataType": "FP32", "dims": [1], "reshape": []},
                {"name": "packed", "dataType": "FP16", "dims": [16, 8, 8], "nonLinearFormat": True},
            ],
            outputs=[
                {"name": "class", "dataType": "FP32", "dims": [1000], "labelFile": "labels/imagenet.txt"},
                {"name": "boxes", "dataType": "FP32", "dims": [-1, 4], "reshape": [-1, 2, 2]},
            ],
        ),
        True,
    ),
    "ragged": (
        make_model(
            maxBatchSize=16,
            batching={},
            inputs=[{"name": "x", "dataType": "FP32", "dims": [-1], "raggedBatch": True}],
            outputs=[{"name": "y", "dataType": "FP32", "dims": [-1]}],
            config={
                "batch_input": [
                    {
                        "kind": "BATCH_ACCUMULATED_ELEMENT_COUNT",
                        "target_name": ["ends"],
                        "data_type": "TYPE_FP32",
                        "source_input": ["x"],
                    }
                ]
            },
        ),
        True,
    ),
    "priorities": (
        make_model(
            maxBatchSize=8,
            batching={"priorityLevels": 3},
            queue={
                "maxSize": 100,
                "timeout": "1s",
                "timeoutAction": "Delay",
                "allowTimeoutOverride": True,
                "levels": [{"priority": 1, "maxSize": 20}, {"priority": 3, "timeout": "50ms"}],
            },
        ),
        True,
    ),
    "ordering": (make_model(maxBatchSize=8, batching={"preserveOrdering": True}), True),
    "instance-groups": (
        make_model(
            format="TensorRT",
            instanceGroups=[
                {"name": "first", "count": 2, "gpus": [0], "profiles": ["0", "2"]},
                {
                    "name": "rest",
                    "gpus": [0],
                    "passive": True,
                    "rateLimiter": {
                        "priority": 2,
                        "resources": [{"name": "lane", "count": 4}, {"name": "door", "global": True}],
                    },
                },
            ],
        ),
        True,
    ),
    "instances-by-the-model": (
        make_model(format="PyTorch", inputs=[INPUT], outputs=[OUTPUT], instances={"kind": "Model"}),
        True,
    ),
    "sequence-direct": (
        make_model(
            maxBatchSize=4,
            sequence={
                "idleTimeout": "30s",
                "maxQueueDelay": "5ms",
                "minimumSlotUtilization": 0.75,
                "controls": [
                    {"tensor": "START", "kind": "Start"},
                    {"tensor": "END", "kind": "End", "dataType": "FP32", "falseTrue": [-1, 1]},
                    {"tensor": "READY", "kind": "Ready", "dataType": "BOOL", "falseTrue": [1, 0]},
                    {"tensor": "ID", "kind": "CorrelationID"},
                ],
            },
        ),
        True,
    ),
    "sequence-oldest": (
        make_model(
            maxBatchSize=4,
            sequence={
                "strategy": "Oldest",
                "maxCandidates": 100,
                "preferredSizes": [2, 4],
                "preserveOrdering": True,
                "iterative": True,
                "controls": [{"tensor": "ID", "kind": "CorrelationID", "dataType": "STRING"}],
                "states": [
                    {
                        "inputName": "in",
                        "outputName": "out",
                        "dataType": "FP32",
                        "dims": [-1, 8],
                        "sameBuffer": True,
                        "growableMemory": True,
                        "initial": [{"name": "zero", "dataType": "FP32", "dims": [1, 8]}],
                    },
                    {
                        "inputName": "in2",
                        "outputName": "out2",
                        "dataType": "INT32",
                        "dims": [2],
                        "initial": [
                            {"name": "file", "dataType": "INT32", "dims": [2], "data": "File", "file": "first.bin"}
                        ],
                    },
                ],
            },
        ),
        True,
    ),
    "sequence-defaults": (make_model(sequence={"strategy": "Oldest"}), True),
    "response-cache": (make_model(responseCache=True), True),
    "warmup": (
        make_model(
            maxBatchSize=8,
            inputs=[
                INPUT,
                {"name": "text", "dataType": "STRING", "dims": [-1]},
                {"name": "extra", "dataType": "FP32", "dims": [1], "optional": True},
            ],
            warmup=[
                {"name": "made", "batchSize": 8, "count": 3},
                {
                    "name": "given",
                    "inputs": [
                        {"name": "input", "dataType": "FP32", "dims": [3, 224, 224], "data": "File", "file": "cat.bin"},
                        {"name": "text", "dataType": "STRING", "dims": [4]},
                        {"name": "extra", "dataType": "FP32", "dims": [1], "data": "Random"},
                    ],
                },
            ],
        ),
        True,
    ),
    "optimization-onnx": (
        make_model(
            optimization={
                "tensorRT": {
                    "precision": "BF16",
                    "workspace": "1.5Gi",
                    "engineCache": True,
                    "parameters": {"trt_builder_optimization_level": "5"},
                },
                "openVINO": {"parameters": {"num_streams": "2"}},
                "graphLevel": -1,
                "pinnedMemory": {"input": False, "output": False},
                "priority": "Max",
                "gatherKernelBufferThreshold": 8,
                "eagerBatching": True,
            }
        ),
        True,
    ),
    "optimization-tensorrt": (
        make_model(
            format="TensorRT",
            maxBatchSize=8,
            optimization={
                "cudaGraphs": {
                    "busyWait": True,
                    "outputCopyStream": True,
                    "specs": [
                        {
                            "batchSize": 8,
                            "inputs": [{"name": "x", "dims": [4, 4]}],
                            "lowerBound": {"batchSize": 2, "inputs": [{"name": "x", "dims": [2, 4]}]},
                        },
                        {"batchSize": 0},
                    ],
                },
                "priority": "Min",
            },
        ),
        True,
    ),
    "versions-all": (make_model(versions={"policy": "All"}), True),
    "versions-latest": (make_model(versions={"count": 3}), True),
    "versions-specific": (make_model(versions={"policy": "Specific", "numbers": [7, 2**53 - 1]}), True),
    "further-fields": (
        make_model(
            config={
                "metric_tags": {"team": "vision", "note": 'a" } x'},
                "cc_model_filenames": {"8.0": "ampere.plan"},
                "model_operations": {"op_library_filename": ["ops/libcustom.so"]},
                "model_repository_agents": {"agents": [{"name": "checksum", "parameters": {"MD5:1/model.onnx": "00"}}]},
                "model_metrics": {
                    "metric_control": [
                        {
                            "metric_identifier": {"family": "nv_inference_first_response_histogram_ms"},
                            "histogram_options": {"buckets": [1, 2.5, 100]},
                        }
                    ]
                },
                "optimization": {
                    "execution_accelerators": {
                        "gpu_execution_accelerator": [{"name": "cuda", "parameters": {"use_tf32": "1"}}]
                    }
                },
            }
        ),
        True,
    ),
}
# An ensemble is rendered among its members.
ENSEMBLE = {
    "name": "pipeline",
    "format": "Ensemble",
    "maxBatchSize": 8,
    "responseCache": True,
    "inputs": [{"name": "bytes", "dataType": "UINT8", "dims": [-1]}],
    "outputs": [{"name": "scores", "dataType": "FP32", "dims": [10]}],
    "steps": [
        {"model": "decode", "version": 3, "inputs": {"raw": "bytes"}, "outputs": {"image": "decoded"}},
        {"name": "classify", "model": "net", "inputs": {"x": "decoded"}, "outputs": {"y": "scores"}},
    ],
    "config": {"ensemble_scheduling": {"max_inflight_requests": 16}},
}


CACHE = {"responseCache": {"local": {"size": "64Mi"}}}


def parsed(model: dict[str, Any], *, gpu: bool = True) -> Model:
    return make_spec(models=[model], runtime=CACHE, accelerator={"count": int(gpu)}).models[0]


def render(model: dict[str, Any], *, gpu: bool) -> tuple[Any, str]:
    message = model_config(parsed(model, gpu=gpu), gpu=gpu)
    return message, to_pbtxt(message)


def pipeline() -> list[Model]:
    """The models of a service with an ensemble, which is the last one."""
    decode = make_model(
        name="decode",
        format="Python",
        maxBatchSize=8,
        inputs=[{"name": "raw", "dataType": "UINT8", "dims": [-1]}],
        outputs=[{"name": "image", "dataType": "FP32", "dims": [3, 4]}],
        versions={"policy": "Specific", "numbers": [3]},
    )
    net = make_model(
        name="net",
        maxBatchSize=16,
        inputs=[{"name": "x", "dataType": "FP32", "dims": [3, 4]}],
        outputs=[{"name": "y", "dataType": "FP32", "dims": [10]}],
    )
    return make_spec(models=[decode, net, ENSEMBLE], runtime=CACHE).models


@pytest.mark.parametrize("name", CASES)
def test_a_config_is_as_the_golden_file_and_reads_back_equal(name: str) -> None:
    model, gpu = CASES[name]
    message, text = render(model, gpu=gpu)
    golden = (GOLDEN / f"{name}.pbtxt").read_text(encoding="ascii")
    assert text == golden
    assert from_pbtxt(golden) == message


def test_each_golden_file_has_its_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*.pbtxt")} == {*CASES, "ensemble"}


def test_an_ensemble_is_as_the_golden_file_and_reads_back_equal() -> None:
    message = model_config(pipeline()[-1], gpu=True)
    golden = (GOLDEN / "ensemble.pbtxt").read_text(encoding="ascii")
    assert to_pbtxt(message) == golden
    assert from_pbtxt(golden) == message


def test_the_text_doesnt_depend_on_the_order_of_parameters() -> None:
    keys = [f"key{number}" for number in range(20)]
    texts = {
        render(make_model(parameters=dict.fromkeys(order, "x")), gpu=False)[1] for order in (keys, list(reversed(keys)))
    }
    assert len(texts) == 1


def test_what_the_spec_leaves_out_stays_for_triton_to_complete() -> None:
    message, _ = render(make_model(), gpu=False)
    assert {field.name for field, _ in message.ListFields()} == {"name", "backend", "instance_group"}


PLANS: dict[str, tuple[str | None, str]] = {
    "ONNX": ("model.onnx", "FileOrFolder"),
    "TensorRT": ("model.plan", "File"),
    "PyTorch": ("model.pt", "File"),
    "TensorFlow": ("model.savedmodel", "Folder"),
    "TFLite": ("model.tflite", "File"),
    "OpenVINO": ("model.xml", "File"),
    "Python": ("model.py", "File"),
    "DALI": ("model.dali", "File"),
    "vLLM": ("model.json", "File"),
    "TensorRTLLM": (None, "Anything"),
    "Auto": (None, "Anything"),
}


@pytest.mark.parametrize("model_format", PLANS)
def test_each_format_has_its_file_and_what_it_must_be(model_format: str) -> None:
    plan = planned(parsed(make_model(format=model_format, inputs=[INPUT], outputs=[OUTPUT])), gpu=True)
    assert (plan["file_name"], plan["expects"]) == PLANS[model_format]


def test_a_warm_up_that_is_made_fills_in_what_the_sequence_batcher_fills_in_for_clients() -> None:
    state = {"inputName": "state", "outputName": "next", "dataType": "FP16", "dims": [-1, 2]}
    controls = [
        {"tensor": "start", "kind": "Start"},
        {"tensor": "end", "kind": "End", "dataType": "BOOL"},
        {"tensor": "id", "kind": "CorrelationID"},
    ]
    model = make_model(inputs=[INPUT], warmup=[{"name": "made"}], sequence={"controls": controls, "states": [state]})
    (warmup,) = model_config(parsed(model), gpu=False).model_warmup
    made = {
        name: (pb.DataType.Name(entry.data_type), list(entry.dims), entry.WhichOneof("input_data_type"))
        for name, entry in warmup.inputs.items()
    }
    assert made == {
        "input": ("TYPE_FP32", [3, 224, 224], "random_data"),
        "start": ("TYPE_INT32", [1], "zero_data"),
        "end": ("TYPE_BOOL", [1], "zero_data"),
        "id": ("TYPE_UINT64", [1], "zero_data"),
        "state": ("TYPE_FP16", [1, 2], "zero_data"),
    }


def test_every_format_is_in_the_table_and_tells_its_companions() -> None:
    assert set(BACKENDS) == {*PLANS, "Ensemble"} == set(get_args(Format))
    assert companions("OpenVINO", "net.v2.xml") == ("net.v2.bin",)
    assert companions("ONNX", "model.onnx") == ()


def test_a_plan_names_the_file_the_versions_and_every_other_file_that_the_configuration_needs() -> None:
    model = make_model(
        file="net.onnx",
        versions={"policy": "Specific", "numbers": [2, 5]},
        outputs=[{**OUTPUT, "labelFile": "names.txt"}, {**OUTPUT, "name": "b", "labelFile": "names.txt"}],
        warmup=[
            {
                "name": "w",
                "inputs": [{"name": "x", "dataType": "FP32", "dims": [1], "data": "File", "file": "a/x.bin"}],
            }
        ],
        sequence={
            "states": [
                {
                    "inputName": "i",
                    "outputName": "o",
                    "dataType": "FP32",
                    "dims": [1],
                    "initial": [{"name": "n", "dataType": "FP32", "dims": [1], "data": "File", "file": "s.bin"}],
                }
            ]
        },
    )
    plan = planned(parsed(model), gpu=True)
    assert plan["file_name"] == "net.onnx"
    assert plan["versions"] == (2, 5)
    assert plan["extra_files"] == ("names.txt", "warmup/a/x.bin", "initial_state/s.bin")
    assert planned(parsed(make_model(format="Auto", file="x")), gpu=True)["expects"] == "FileOrFolder"
    assert planned(pipeline()[-1], gpu=True)["expects"] == "Nothing"


@pytest.mark.parametrize(
    "data_type",
    ["BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "BF16", "FP32", "FP64",
     "STRING"],
)  # fmt: skip
def test_every_data_type_is_tritons(data_type: str) -> None:
    _, text = render(make_model(inputs=[{**INPUT, "dataType": data_type}]), gpu=False)
    assert f"data_type: TYPE_{data_type}\n" in text


printable = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=200)
SPECS_A_SEED = 20
LINE = re.compile(r"(spec|metadata|kind|apiVersion)[^\n]*?: \S.*|and [0-9]+ more")


@settings(max_examples=1000, deadline=None)
@given(st.integers(0, 2**64 - 1))
def test_20_000_fuzzed_specs_are_a_clear_error_or_configurations_that_tritons_parser_accepts(seed: int) -> None:
    random = Random(seed)
    for _ in range(SPECS_A_SEED):
        service = RandomSpec(random).service()
        try:
            spec = parse_service(service)
        except InvalidSpec as error:
            for line in error.problems:
                assert LINE.fullmatch(line), line
                assert line.isprintable(), line
                assert len(line) <= 500, line
            continue
        for model in spec.models:
            message = model_config(model, gpu=spec.accelerator.devices > 0)
            text = to_pbtxt(message)
            assert from_pbtxt(text) == message
            assert text.isascii()
            assert text.replace("\n", "").isprintable()
            assert message.name == model.name
            assert message.backend == BACKENDS[model.format].backend


def test_of_the_fuzzed_specs_many_are_accepted_and_many_refused() -> None:
    counts: Counter[str] = Counter()
    for seed in range(400):
        try:
            parse_service(RandomSpec(Random(seed)).service())
            counts["accepted"] += 1
        except InvalidSpec:
            counts["refused"] += 1
    assert min(counts["accepted"], counts["refused"]) >= 80, counts


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
@pytest.mark.parametrize("path", [*TEXT_FIELDS, *sorted(FREE_TEXT_FIELDS)])
def test_a_hostile_text_is_refused_or_stays_quoted(path: str, what: str) -> None:
    service = make_service()
    for around, value in parts_around(path).items():
        set_field(service, around, value)
    parse_service(service)
    set_field(service, path, HOSTILE_TEXTS[what])
    try:
        spec = parse_service(service)
    except InvalidSpec:
        return
    assert path in FREE_TEXT_FIELDS
    text = to_pbtxt(model_config(spec.models[0], gpu=True))
    assert from_pbtxt(text).backend == "onnxruntime"
    assert text.count("backend:") == text.count('backend: "onnxruntime"') + text.count('\\" } backend:')
