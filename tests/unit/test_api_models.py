"""What only the offline validation says of a model: sizes that must fit, Triton's message, the service around."""

from __future__ import annotations

from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2

from conch.api.inferenceservice import InvalidSpec, parse_service
from conch.triton import passthrough
from conch.triton.refusals import by_release
from invalid_services import BATCHED, MODEL, WARMUP, Invalid
from makers import make_service, make_spec, set_field

X = {"name": "x", "dataType": "FP32", "dims": [3]}
STATE = {"inputName": "in", "outputName": "out", "dataType": "FP32", "dims": [2]}
FIRST = {"name": "first", "dataType": "FP32", "dims": [2]}
CONFIG = f"{MODEL}.config"
LIMITED = {"spec.runtime.rateLimiter": {"resources": [{"name": "Lane", "count": 4}, {"name": "door", "count": 1}]}}


def model(name: str, patch: dict[str, Any], *says: str) -> Invalid:
    return Invalid(name, patch, says)


def config(name: str, value: Any, path: str, *says: str, **more: Any) -> Invalid:
    patch = {f"{MODEL}.{key}": part for key, part in more.items()}
    return Invalid(name, {**patch, CONFIG: value}, (f"{CONFIG}{path}", *says))


def entry(**fields: Any) -> dict[str, Any]:
    return {
        "kind": "BATCH_ELEMENT_COUNT",
        "target_name": ["n"],
        "data_type": "TYPE_FP32",
        "source_input": ["x"],
        **fields,
    }


CASES = [
    model("a reshape of fewer elements", {f"{MODEL}.inputs": [{**X, "dims": [6], "reshape": [2, 2]}]},
          f"{MODEL}.inputs[0].reshape: must hold as many elements as dims", "4 are not 6; correct reshape or dims",
          "(got [2, 2])"),
    model("a reshape with another size that varies", {f"{MODEL}.outputs": [{**X, "dims": [-1], "reshape": [-1, -1]}]},
          f"{MODEL}.outputs[0].reshape: must have as many sizes of -1 as dims"),
    model("a reshape that moves elements over a size that varies",
          {f"{MODEL}.inputs": [{**X, "dims": [2, -1, 3], "reshape": [3, -1, 2]}]},
          f"{MODEL}.inputs[0].reshape", "3 and 2 are not 2 and 3"),
    model("a reshape to nothing without a batch",
          {f"{MODEL}.maxBatchSize": 0, f"{MODEL}.inputs": [{**X, "dims": [1], "reshape": []}]},
          f"{MODEL}.inputs[0].reshape: must not be [] with maxBatchSize 0"),
    model("a shape tensor of ONNX", {f"{MODEL}.inputs": [{**X, "shapeTensor": True}]},
          f"{MODEL}.inputs[0].shapeTensor: is for format TensorRT; remove it"),
    model("a format that isn't linear of ONNX",
          {f"{MODEL}.outputs": [{**X, "dims": [1, 2, 3], "nonLinearFormat": True}]},
          f"{MODEL}.outputs[0].nonLinearFormat: is for format TensorRT; remove it"),
    model("a delay that breaks the order",
          {**BATCHED, f"{MODEL}.batching": {"preserveOrdering": True},
           f"{MODEL}.queue": {"timeout": "1s", "timeoutAction": "Delay"}},
          f"{MODEL}.queue.timeoutAction: Delay doesn't keep batching.preserveOrdering"),
    model("a delay of one priority that breaks the order",
          {**BATCHED, f"{MODEL}.batching": {"preserveOrdering": True, "priorityLevels": 1},
           f"{MODEL}.queue": {"levels": [{"priority": 1, "timeout": "1s", "timeoutAction": "Delay"}]}},
          f"{MODEL}.queue.levels[0].timeoutAction: Delay doesn't keep"),
    model("profiles of ONNX", {f"{MODEL}.instances": {"profiles": ["0"]}},
          f"{MODEL}.instances.profiles: are for format TensorRT; remove them"),
    model("profiles of ONNX in a group", {f"{MODEL}.instanceGroups": [{"name": "a", "profiles": ["0"]}]},
          f"{MODEL}.instanceGroups[0].profiles: are for format TensorRT"),
    model("a plan on the CPU", {f"{MODEL}.format": "TensorRT", f"{MODEL}.instances.kind": "CPU"},
          f"{MODEL}.instances.kind: must not be CPU, where a TensorRT model can't run"),
    model("OpenVINO on a GPU", {f"{MODEL}.format": "OpenVINO", f"{MODEL}.instances.kind": "GPU"},
          f"{MODEL}.instances.kind: must be CPU for format OpenVINO"),
    model("only passive instances", {f"{MODEL}.instanceGroups": [{"name": "a", "passive": True}]},
          f"{MODEL}.instanceGroups: must not all be passive"),
    model("a plan without an accelerator", {f"{MODEL}.format": "TensorRT", "spec.accelerator.count": 0},
          f"{MODEL}.format: TensorRT needs an accelerator; raise spec.accelerator.count"),
    model("a GPU that the pod hasn't", {f"{MODEL}.instances.gpus": [0, 1]},
          f"{MODEL}.instances.gpus[1]: must be below the pod's number of accelerators, 1", "(got 1)"),
    model("a resource that the server hasn't",
          {**LIMITED, f"{MODEL}.instances.rateLimiter": {"resources": [{"name": "lanes"}]}},
          f"{MODEL}.instances.rateLimiter.resources[0].name: must be one of spec.runtime.rateLimiter.resources",
          "door, lane"),
    model("more of a resource than there is",
          {**LIMITED, f"{MODEL}.instances.rateLimiter": {"resources": [{"name": "LANE", "count": 5}]}},
          f"{MODEL}.instances.rateLimiter.resources[0].count: must be at most 4"),
    model("two controls of one tensor",
          {f"{MODEL}.sequence.controls": [{"tensor": "a", "kind": "Start"}, {"tensor": "a", "kind": "End"}]},
          f"{MODEL}.sequence.controls[1].tensor: is the tensor of controls[0] too; give each its own"),
    model("a state in a control's tensor",
          {f"{MODEL}.sequence": {"controls": [{"tensor": "in", "kind": "Start"}], "states": [STATE]}},
          f"{MODEL}.sequence.states[0].inputName: is the tensor of controls[0] too"),
    model("two states of one output",
          {f"{MODEL}.sequence.states": [STATE, {**STATE, "inputName": "b"}]},
          f"{MODEL}.sequence.states[1].outputName: is the output of states[0] too"),
    model("a beginning of another type",
          {f"{MODEL}.sequence.states": [{**STATE, "initial": [{**FIRST, "dataType": "INT8"}]}]},
          f"{MODEL}.sequence.states[0].initial[0].dataType: must be the state's, FP32"),
    model("a beginning of another size", {f"{MODEL}.sequence.states": [{**STATE, "initial": [{**FIRST, "dims": [3]}]}]},
          f"{MODEL}.sequence.states[0].initial[0].dims: must fit the state's dims [2]"),
    model("a control among the inputs",
          {f"{MODEL}.inputs": [X], f"{MODEL}.sequence.controls": [{"tensor": "x", "kind": "Start"}]},
          f"{MODEL}.sequence.controls[0].tensor: must not stand under inputs (inputs[0]) too", "remove it there"),
    model("a state among the inputs",
          {f"{MODEL}.inputs": [{**X, "name": "in"}], f"{MODEL}.sequence.states": [STATE]},
          f"{MODEL}.sequence.states[0].inputName: must not stand under inputs (inputs[0]) too"),
    model("a state of another type than its output",
          {f"{MODEL}.outputs": [{**X, "name": "out", "dataType": "INT8"}], f"{MODEL}.sequence.states": [STATE]},
          f"{MODEL}.sequence.states[0].dataType: must be that of the output out, INT8"),
    model("a warm-up of more than a batch",
          {f"{MODEL}.maxBatchSize": 2, f"{MODEL}.warmup": [{**WARMUP, "batchSize": 3}]},
          f"{MODEL}.warmup[0].batchSize: must be at most maxBatchSize, 2"),
    model("a warm-up of a batch without batches", {f"{MODEL}.warmup": [{**WARMUP, "batchSize": 2}]},
          f"{MODEL}.warmup[0].batchSize: must be 1 without maxBatchSize"),
    model("a warm-up of what isn't known", {f"{MODEL}.warmup": [{"name": "a"}]},
          f"{MODEL}.warmup[0].inputs: are required where the model's own inputs aren't listed"),
    model("a warm-up of random texts", {f"{MODEL}.warmup[0]": None, f"{MODEL}.warmup": [
        {"name": "a", "inputs": [{**X, "dataType": "STRING", "data": "Random"}]}]},
          f"{MODEL}.warmup[0].inputs[0].data: Random makes no texts; use Zero or File"),
    model("a warm-up without one of the inputs",
          {f"{MODEL}.inputs": [X, {**X, "name": "y"}, {**X, "name": "z", "optional": True}],
           f"{MODEL}.warmup": [{"name": "a", "inputs": [X]}]},
          f"{MODEL}.warmup[0].inputs: lack the model's input y; add it"),
    model("a warm-up of an input that isn't there",
          {f"{MODEL}.inputs": [X], f"{MODEL}.warmup": [{"name": "a", "inputs": [X, {**X, "name": "y"}]}]},
          f"{MODEL}.warmup[0].inputs[1].name: is no input of the model, which has x"),
    model("a warm-up of a control that isn't there",
          {f"{MODEL}.inputs": [X], f"{MODEL}.sequence.controls": [{"tensor": "START", "kind": "Start"}],
           f"{MODEL}.warmup": [{"name": "a", "inputs": [X, {**X, "name": "STRAT"}]}]},
          f"{MODEL}.warmup[0].inputs[1].name: is no input of the model, which has START, x"),
    model("a warm-up of another shape and type",
          {f"{MODEL}.inputs": [X],
           f"{MODEL}.warmup": [{"name": "a", "inputs": [{**X, "dims": [4], "dataType": "INT8"}]}]},
          f"{MODEL}.warmup[0].inputs[0].dims: must fit the input's dims [3]"),
    config("an integer that is text", {"batch_input": [entry()], "optimization": {"cuda": {"graph_spec": [
        {"batch_size": "x"}]}}}, ".optimization.cuda.graph_spec[0].batch_size: must be an integer", '(got "x")'),
    config("a list's entry of another type", {"dynamic_batching": {"preferred_batch_size": [1, "x"]}},
           ".dynamic_batching.preferred_batch_size[1]: must be an integer", '(got "x")'),
    config("a fraction", {"dynamic_batching": {"preferred_batch_size": [1.5]}},
           ".dynamic_batching.preferred_batch_size[0]: must be an integer", "(got 1.5)"),
    config("beyond 31 bits", {"max_batch_size": 2**31}, ".max_batch_size: must be from -2147483648 to 2147483647"),
    config("below 0", {"model_warmup": [{"count": -1}]}, ".model_warmup[0].count: must be from 0 to 4294967295"),
    config("beyond 63 bits", {"input": [{"dims": [str(2**63)]}]}, ".input[0].dims[0]: must be from"),
    config("a truth in quotes", {"response_cache": {"enable": "true"}},
           ".response_cache.enable: must be true or false; write it without quotes"),
    config("a number for a text", {"metric_tags": {"a": 1}}, ".metric_tags.a: must be text; put it in quotes"),
    config("a text for a number", {"model_metrics": {"metric_control": [{"histogram_options": {"buckets": ["1"]}}]}},
           ".model_metrics.metric_control[0].histogram_options.buckets[0]: must be a number"),
    config("no number", {"model_metrics": {"metric_control": [{"histogram_options": {"buckets": [1e39]}}]}},
           ".model_metrics.metric_control[0].histogram_options.buckets[0]: must be a number from"),
    config("a line break", {"metric_tags": {"a": "x\ny"}}, ".metric_tags.a: must be a single line"),
    config("a line break in a key", {"metric_tags": {"a\nb": "x"}}, '.metric_tags["a\\nb"]: must be a single line'),
    config("half a character", {"metric_tags": {"a": "\ud800"}}, ".metric_tags.a: must be valid Unicode text"),
    config("1,025 characters", {"metric_tags": {"a": "x" * 1025}}, ".metric_tags.a: must be at most 1024 characters"),
    config("an option that isn't", {"batch_input": [entry(kind="BATCH_ITEM")]},
           ".batch_input[0].kind: must be one of BATCH_ELEMENT_COUNT", "did you mean BATCH_ITEM_SHAPE?"),
    config("an option by number", {"batch_input": [entry(kind=4)]}, ".batch_input[0].kind: must be one of"),
    config("no type", {"batch_input": [entry(data_type="TYPE_INVALID")]}, ".batch_input[0].data_type: must be one of"),
    config("a misspelled field inside", {"optimization": {"execution_accelerator": {}}},
           ".optimization.execution_accelerator: is not a field of ModelOptimizationPolicy",
           "did you mean execution_accelerators?"),
    config("a field like no other", {"zzz": 1}, ".zzz: is not a field of ModelConfig; remove it"),
    config("a map for a list", {"batch_input": {}}, ".batch_input: must be a list"),
    config("a list for a map", {"metric_tags": []}, ".metric_tags: must be a map of keys and values"),
    config("a text for a part", {"optimization": "fast"},
           ".optimization: must be a map of the fields of ModelOptimizationPolicy"),
    config("two of a choice", {"version_policy": {"latest": {}, "all": {}}},
           ".version_policy.all: excludes latest; keep one of them"),
    config("65 entries", {"metric_tags": {f"k{n}": "x" for n in range(65)}}, ".metric_tags: must have at most 64"),
    config("a list of 65 entries", {"batch_input": [entry()] * 65}, ".batch_input: must have at most 64 entries"),
    config("more than 16 KiB", {"metric_tags": {f"k{n}": "x" * 1000 for n in range(20)}},
           ": must be at most 16384 bytes as JSON, not"),
    config("what is no JSON", {"metric_tags": {"a": {1, 2}}}, ": must hold texts, numbers, true, false, lists and"),
    *(
        config(f"{path} again", value, f".{path}: is what the model's {field} ", f"; set {field} instead")
        for path, value, field in [
            ("name", {"name": "other"}, "name"),
            ("platform", {"platform": "ensemble"}, "format"),
            ("max_batch_size", {"max_batch_size": 3}, "maxBatchSize"),
            ("instance_group", {"instance_group": []}, "instances"),
            ("parameters", {"parameters": {"EXECUTION_ENV_PATH": {"string_value": "/tmp/env"}}}, "parameters"),
            ("response_cache", {"response_cache": {"enable": True}}, "responseCache"),
            ("sequence_batching", {"sequence_batching": {}}, "sequence"),
            ("ensemble_scheduling.step", {"ensemble_scheduling": {"step": []}}, "steps"),
            ("optimization.cuda", {"optimization": {"cuda": {"graphs": True}}}, "optimization.cudaGraphs"),
            ("model_warmup", {"model_warmup": [{"inputs": {"x": {"input_data_file": "../x"}}}]}, "warmup"),
        ]
    ),
    config("a backend that is a format", {"backend": "python"}, ".backend: is what format Python says"),
    config("a backend of another format", {"backend": "fil"}, ".backend: is for format Auto, as ONNX has a backend"),
    config("a backend by path", {"backend": "../fil"}, ".backend: must be a backend's name such as fil", format="Auto"),
    config("an operator library outside", {"model_operations": {"op_library_filename": ["a.so", "../b.so"]}},
           ".model_operations.op_library_filename[1]: must be a path in the model's folder", '(got "../b.so")'),
    config("an absolute operator library", {"model_operations": {"op_library_filename": ["/lib/b.so"]}},
           ".model_operations.op_library_filename[0]: must be a path in the model's folder"),
    config("a file for a GPU outside", {"cc_model_filenames": {"8.0": "../model.plan"}},
           '.cc_model_filenames["8.0"]: must be a path in the model\'s folder'),
    config("a file for no GPU", {"cc_model_filenames": {"ampere": "model.plan"}},
           ".cc_model_filenames.ampere: must have compute capabilities such as 8.0 as keys"),
    config("a library by path", {"runtime": "../libtriton_x.so"}, ".runtime: must be the name of a backend's library"),
    config("an agent that changes the model", {"model_repository_agents": {"agents": [{"name": "decrypt"}]}},
           ".model_repository_agents.agents[0].name: must be checksum", '(got "decrypt")'),
    config("plug-ins of any path", {"optimization": {"execution_accelerators": {"gpu_execution_accelerator": [
        {"name": "tensorrt", "parameters": {"trt_extra_plugin_lib_paths": "/x"}}]}}},
           ".optimization.execution_accelerators.gpu_execution_accelerator[0].parameters.trt_extra_plugin_lib_paths: "),
    config("TensorRT said twice", {"optimization": {"execution_accelerators": {"gpu_execution_accelerator": [
        {"name": "tensorrt"}]}}}, ".optimization.execution_accelerators.gpu_execution_accelerator: is what "
           "optimization.tensorRT says already; keep one of them", optimization={"tensorRT": {}}),
    config("OpenVINO said twice", {"optimization": {"execution_accelerators": {"cpu_execution_accelerator": [
        {"name": "openvino"}]}}}, ".optimization.execution_accelerators.cpu_execution_accelerator: is what "
           "optimization.openVINO says already", optimization={"openVINO": {}}),
    config("a batch's input of an input that isn't there", {"batch_input": [entry(source_input=["y"])]},
           ".batch_input[0].source_input[0]: must be one of the model's inputs", inputs=[X]),
    config("a batch's input of two inputs", {"batch_input": [entry(source_input=["x", "x"])]},
           ".batch_input[0].source_input: must name one input", inputs=[X]),
    config("a batch's input of another type", {"batch_input": [entry(data_type="TYPE_INT64")]},
           ".batch_input[0].data_type: must be TYPE_INT32 or TYPE_FP32", inputs=[X]),
    config("a batch's input into nothing", {"batch_input": [entry(target_name=[])]},
           ".batch_input[0].target_name: is required", inputs=[X]),
    config("a batch's output to an output that isn't there",
           {"batch_output": [{"target_name": ["y"], "kind": "BATCH_SCATTER_WITH_INPUT_SHAPE", "source_input": ["x"]}]},
           ".batch_output[0].target_name[0]: must be one of the model's outputs", inputs=[X],
           outputs=[{**X, "name": "z"}]),
    config("a metric without a name", {"model_metrics": {"metric_control": [{"histogram_options": {"buckets": [1]}}]}},
           ".model_metrics.metric_control[0].metric_identifier.family: is required"),
    config("a metric without buckets",
           {"model_metrics": {"metric_control": [{"metric_identifier": {"family": "f"}}]}},
           ".model_metrics.metric_control[0].histogram_options.buckets: are required"),
    config("an ensemble's limit of a model", {"ensemble_scheduling": {"max_inflight_requests": 3}},
           ".ensemble_scheduling: is for format Ensemble; remove it"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_combination_that_triton_would_refuse_is_named_with_its_fix(case: Invalid) -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse_service(case.service())
    lines = caught.value.problems
    assert any(all(words in line for words in case.says) for line in lines), lines
    for line in lines:
        assert len(line) <= 500
        assert line.isprintable()


@pytest.mark.parametrize(
    "patch",
    [
        # What isn't listed is found by Triton, and unknown here.
        {"models[0].config": {"batch_input": [entry()]}},
        {"models[0].format": "Auto", "models[0].config": {"backend": "My-backend_2"}},
        # Triton's TensorRT-LLM backend takes any kind; most configurations say CPU.
        {"models[0].format": "TensorRTLLM", "models[0].instances.kind": "GPU"},
        # The backend then sees each request's elements one after another, also of a client's own batch.
        {"models[0].inputs": [{**X, "raggedBatch": True}], "models[0].maxBatchSize": 4},
        {"models[0].inputs": [{**X, "raggedBatch": True}], "models[0].sequence": {}},
        {
            "models[0].inputs": [X],
            "models[0].sequence": {"controls": [{"tensor": "START", "kind": "Start"}], "states": [STATE]},
            "models[0].warmup": [
                {"name": "a sequence's sample", "inputs": [X, {**X, "name": "START"}, {**X, "name": "in"}]},
                {"name": "made"},
            ],
        }
        | {"models[0].warmup[0].name": "first sample (of 2)"},
    ],
)
def test_what_triton_takes_is_accepted(patch: dict[str, Any]) -> None:
    assert make_spec(patch).models


def test_the_cases_differ() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_a_flood_of_wrong_fields_is_cut() -> None:
    service = make_service()
    set_field(service, CONFIG, {f"typo{number}": 1 for number in range(500)})
    with pytest.raises(InvalidSpec) as caught:
        parse_service(service)
    assert len(caught.value.problems) == 20


def test_a_deeply_nested_value_is_a_finding_not_a_crash() -> None:
    deep: Any = {}
    for _ in range(300):
        deep = {"a": deep}
    service = make_service()
    set_field(service, CONFIG, {"optimization": deep})
    with pytest.raises(InvalidSpec, match="is not a field of ModelOptimizationPolicy"):
        parse_service(service)


def test_every_field_of_the_message_has_a_place() -> None:
    """A new release of the client may add fields: whoever raises it decides where they belong."""
    in_config = {
        "backend", "runtime", "batch_input", "batch_output", "optimization", "ensemble_scheduling",
        "cc_model_filenames", "metric_tags", "model_operations", "model_repository_agents", "model_metrics",
    }  # fmt: skip
    fields = set(model_config_pb2.ModelConfig.DESCRIPTOR.fields_by_name)
    owned = {path for path in passthrough.OWNED if "." not in path}
    assert fields == in_config | owned
    schema = passthrough.schema()["properties"]
    assert set(schema) == in_config
    assert set(schema["optimization"]["properties"]) == {"execution_accelerators"}
    assert set(schema["ensemble_scheduling"]["properties"]) == {"max_inflight_requests"}


def test_numbers_of_64_bits_may_be_texts_as_in_protobufs_json() -> None:
    service = make_service()
    set_field(service, CONFIG, {"dynamic_batching": {"max_queue_delay_microseconds": "9223372036854775807"}})
    with pytest.raises(InvalidSpec) as caught:
        parse_service(service)
    assert [line.partition(":")[0] for line in caught.value.problems] == [f"{CONFIG}.dynamic_batching"]


def test_a_resource_needs_no_declaration_where_none_is_declared() -> None:
    limiter = {"resources": [{"name": "lane", "count": 9}]}
    spec = make_spec({"models[0].instances": {"rateLimiter": limiter}})
    assert spec.models[0].instances.rate_limiter is not None


METRICS = {"metric_control": [{"metric_identifier": {"family": "f"}, "histogram_options": {"buckets": [1]}}]}


@pytest.mark.parametrize(("release", "lines"), [("24.10", 1), ("25.01", 0)])
def test_a_field_that_the_release_doesnt_know_is_named_before_the_server_fails_to_read_it(
    release: str, lines: int
) -> None:
    spec = make_spec({"models[0].config": {"model_metrics": METRICS}})
    said = by_release(spec, f"nvcr.io/nvidia/tritonserver:{release}-py3")
    assert len(said) == lines
    assert all(
        line.startswith("spec.models[0].config.model_metrics: needs Triton 24.11 or newer, and the image has 24.10")
        for line in said
    )


def test_unchecked_further_fields_are_refused() -> None:
    with pytest.raises(ValueError, match="is not a field of ModelConfig"):
        passthrough.further_fields({"typo": 1})
