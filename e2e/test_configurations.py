"""Every configuration that Conch generates for a backend that is here: the real Triton loads it and says it back."""

from __future__ import annotations

import json
import shutil
import urllib.error
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf.json_format import MessageToDict

from conch.triton.modelconfig import extra_files, file_name, from_pbtxt, model_config, required_versions, to_pbtxt
from makers import make_model, make_spec
from operators import wait_until
from sandbox.triton_process import TritonProcess, root_folder, triton

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

ECHO = '''
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """y is x; seen, how many requests came so far, and shape, what the model sees of x, where they are outputs."""

    def initialize(self, args):
        self.outputs = [one["name"] for one in json.loads(args["model_config"])["output"]]
        self.seen = 0

    def execute(self, requests):
        responses = []
        for request in requests:
            self.seen += 1
            x = pb_utils.get_input_tensor_by_name(request, "x")
            x = np.full((1, 3), -1, np.float32) if x is None else x.as_numpy()
            made = {
                "y": x,
                "seen": np.full((len(x), 1), self.seen, np.int32),
                "shape": np.array([x.shape], np.int32),
            }
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor(name, made[name]) for name in self.outputs]))
        return responses
'''
ADDING = '''
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """y is x and the state, and 100 more at the start of a sequence."""

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            total = pb_utils.get_input_tensor_by_name(request, "total_in").as_numpy() + x
            start = pb_utils.get_input_tensor_by_name(request, "start")
            first = 0 if start is None else start.as_numpy().reshape(-1)[0] * 100
            tensors = [pb_utils.Tensor("y", total + first), pb_utils.Tensor("total_out", total)]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
'''
FILLED_IN = '''
import numpy as np
import triton_python_backend_utils as pb_utils

TENSORS = {"x": (1, 1), "total_in": (1, 1), "start": (1, 1), "end": (1, 1), "ready": (1, 1), "id": (1, 1)}


class TritonPythonModel:
    """y is the number of requests so far that came with all of a sequence's tensors."""

    def initialize(self, args):
        self.seen = 0

    def execute(self, requests):
        responses = []
        for request in requests:
            found = {name: pb_utils.get_input_tensor_by_name(request, name) for name in TENSORS}
            whole = all(one is not None and one.as_numpy().shape == TENSORS[name] for name, one in found.items())
            self.seen += whole
            y = pb_utils.Tensor("y", np.array([[self.seen]], np.float32))
            responses.append(pb_utils.InferenceResponse([y]))
        return responses
'''
DOUBLING = '''
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """b is twice a."""

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("b", pb_utils.get_input_tensor_by_name(request, "a").as_numpy() * 2)]
            )
            for request in requests
        ]
'''


def tensor(name: str, *dims: int, kind: str = "FP32", **more: Any) -> dict[str, Any]:
    return {"name": name, "dataType": kind, "dims": list(dims) or [3], **more}


def echo(**more: Any) -> dict[str, Any]:
    """A Python model whose output is its input."""
    return {"format": "Python", "inputs": [tensor("x")], "outputs": [tensor("y")], **more}


def member(**more: Any) -> dict[str, Any]:
    return {"format": "Python", "inputs": [tensor("a")], "outputs": [tensor("b")], "maxBatchSize": 8, **more}


SUM = {
    "format": "Python",
    "maxBatchSize": 4,
    "inputs": [tensor("x", 1)],
    "outputs": [tensor("y", 1)],
}
CONTROLS = [
    {"tensor": "start", "kind": "Start", "dataType": "FP32"},
    {"tensor": "end", "kind": "End", "dataType": "BOOL", "falseTrue": [1, 0]},
    {"tensor": "ready", "kind": "Ready"},
    {"tensor": "id", "kind": "CorrelationID"},
]
TOTAL = {"inputName": "total_in", "outputName": "total_out", "dataType": "FP32", "dims": [1]}


@dataclass(frozen=True)
class Feature:
    """One model that uses a feature."""

    model: dict[str, Any]
    code: str = ECHO
    """Of a Python model."""
    versions: tuple[int, ...] = (1,)
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Beside the versions."""


FEATURES: dict[str, Feature] = {
    "plain": Feature(echo()),
    "onnx": Feature(make_model(format="ONNX")),
    "onnx-file": Feature(make_model(format="ONNX", file="other.onnx")),
    "auto-python": Feature({"format": "Auto", "inputs": [tensor("x")], "outputs": [tensor("y")]}),
    "batching": Feature(
        echo(
            maxBatchSize=8,
            batching={"preferredSizes": [4, 8], "maxQueueDelay": "5ms", "preserveOrdering": True},
            queue={"maxSize": 50, "timeout": "2s", "allowTimeoutOverride": True},
        )
    ),
    "priorities": Feature(
        echo(
            maxBatchSize=8,
            batching={"priorityLevels": 3, "defaultPriority": 2},
            queue={
                "maxSize": 50,
                "timeout": "1s",
                "timeoutAction": "Delay",
                "levels": [{"priority": 1, "maxSize": 20}, {"priority": 3, "timeout": "100ms", "maxSize": 9}],
            },
        )
    ),
    "default-priority": Feature(echo(maxBatchSize=8, batching={"priorityLevels": 2})),
    "sequence-direct": Feature(
        {
            **SUM,
            "sequence": {
                "idleTimeout": "5s",
                "maxQueueDelay": "1ms",
                "minimumSlotUtilization": 0.5,
                "controls": CONTROLS,
                "states": [{**TOTAL, "initial": [{"name": "zero", "dataType": "FP32", "dims": [1]}]}],
            },
        },
        ADDING,
    ),
    "sequence-oldest": Feature(
        {
            **SUM,
            "sequence": {
                "strategy": "Oldest",
                "maxCandidates": 6,
                "preferredSizes": [2, 4],
                "preserveOrdering": True,
                "maxQueueDelay": "1ms",
                "controls": [CONTROLS[0], {"tensor": "id", "kind": "CorrelationID", "dataType": "INT32"}],
                "states": [
                    {
                        **TOTAL,
                        "initial": [
                            {"name": "ten", "dataType": "FP32", "dims": [1], "data": "File", "file": "ten.bin"}
                        ],
                    }
                ],
            },
        },
        ADDING,
        files={"initial_state/ten.bin": b"\x00\x00\x20\x41"},
    ),
    "sequence-iterative": Feature(
        {
            **SUM,
            "sequence": {
                "strategy": "Oldest",
                "iterative": True,
                # A text as a sequence's ID is loaded; a request is then refused by 2.51 itself.
                "controls": [{"tensor": "id", "kind": "CorrelationID", "dataType": "STRING"}],
                "states": [{**TOTAL, "sameBuffer": True}],
            },
        },
        ADDING,
    ),
    "decoupled": Feature(echo(decoupled=True)),
    "warmup-given": Feature(
        echo(
            maxBatchSize=4,
            outputs=[tensor("y"), tensor("seen", 1, kind="INT32")],
            warmup=[
                {"name": "zero", "batchSize": 4, "inputs": [tensor("x")]},
                {"name": "random", "count": 3, "inputs": [tensor("x", data="Random")]},
                {"name": "file", "inputs": [tensor("x", data="File", file="first/x.bin")]},
            ],
        ),
        files={"warmup/first/x.bin": bytes(12)},
    ),
    "warmup-made": Feature(
        echo(
            inputs=[
                tensor("x", -1, 2),
                tensor("words", -1, kind="STRING"),
                tensor("extra", optional=True),
                tensor("flag", 1, kind="BOOL"),
            ],
            outputs=[tensor("y", -1, 2)],
            warmup=[{"name": "first"}],
        )
    ),
    "warmup-sequence": Feature(
        {
            **SUM,
            "sequence": {"controls": CONTROLS, "states": [TOTAL]},
            "warmup": [{"name": "a sample of a sequence", "batchSize": 2}],
        },
        FILLED_IN,
    ),
    "ragged-alone": Feature(echo(maxBatchSize=4, inputs=[tensor("x", raggedBatch=True)])),
    "response-cache": Feature(echo(responseCache=True, maxBatchSize=4, batching={})),
    "rate-limiter": Feature(
        echo(
            instances={
                "count": 2,
                "rateLimiter": {
                    "priority": 2,
                    "resources": [{"name": "lane", "count": 3}, {"name": "door", "global": True}],
                },
            }
        )
    ),
    "instance-groups": Feature(
        echo(instanceGroups=[{"name": "many", "count": 2}, {"name": "one", "kind": "Model"}])
    ),
    "versions-all": Feature(echo(versions={"policy": "All"}), versions=(1, 3)),
    "versions-some": Feature(echo(versions={"policy": "Specific", "numbers": [2, 5]}), versions=(1, 2, 5)),
    "versions-latest": Feature(echo(versions={"count": 2}), versions=(1, 2, 3)),
    "labels": Feature(echo(outputs=[tensor("y", labelFile="names/labels.txt")]),
                      files={"names/labels.txt": b"cat\ndog\nbird\n"}),
    "reshape": Feature(
        echo(
            maxBatchSize=4,
            inputs=[tensor("x", 6, reshape=[2, 3])],
            outputs=[tensor("y", 6, reshape=[2, 3]), tensor("shape", 3, kind="INT32")],
        )
    ),
    "reshape-to-nothing": Feature(
        echo(maxBatchSize=4, inputs=[tensor("x", 1, reshape=[])], outputs=[tensor("y", 1, reshape=[])])
    ),
    "reshape-varying": Feature(
        echo(inputs=[tensor("x", 2, 4, -1, 6, reshape=[8, -1, 1, 6])], outputs=[tensor("y", 8, -1, 1, 6)])
    ),
    "optional": Feature(echo(maxBatchSize=2, inputs=[tensor("x", optional=True), tensor("z", optional=True)])),
    "ragged": Feature(
        echo(
            maxBatchSize=4,
            inputs=[tensor("x", -1, raggedBatch=True)],
            outputs=[tensor("y", -1)],
            batching={},
            config={
                "batch_input": [
                    {
                        "kind": "BATCH_ACCUMULATED_ELEMENT_COUNT",
                        "target_name": ["ends"],
                        "data_type": "TYPE_FP32",
                        "source_input": ["x"],
                    }
                ],
                "batch_output": [
                    {"kind": "BATCH_SCATTER_WITH_INPUT_SHAPE", "target_name": ["y"], "source_input": ["x"]}
                ],
            },
        )
    ),
    "image": Feature(
        echo(inputs=[tensor("x", 4, 4, 3, tensorFormat="NHWC", kind="UINT8")],
             outputs=[tensor("y", 4, 4, 3, kind="UINT8")])
    ),
    "optimization": Feature(
        make_model(
            optimization={
                "tensorRT": {"precision": "FP16", "workspace": "2Gi", "engineCache": True, "parameters": {"k": "v"}},
                "openVINO": {},
                "graphLevel": 1,
                "pinnedMemory": {"input": False},
                "priority": "Max",
                "gatherKernelBufferThreshold": 100,
                "eagerBatching": True,
            }
        )
    ),
    "parameters": Feature(echo(parameters={"note": 'a } "b" {{ c }} \\ $(d) é 模型', "shared.memory": "1"})),
    "further": Feature(
        echo(
            config={
                "metric_tags": {"team": "vision"},
                "cc_model_filenames": {"8.0": "ampere.py"},
                "model_operations": {"op_library_filename": []},
            }
        )
    ),
    "pre": Feature(member(), DOUBLING),
    "post": Feature(member(maxBatchSize=16), DOUBLING),
    "ensemble": Feature(
        {
            "format": "Ensemble",
            "maxBatchSize": 8,
            "inputs": [tensor("start")],
            "outputs": [tensor("end")],
            "steps": [
                {"model": "post", "inputs": {"a": "middle"}, "outputs": {"b": "end"}},
                {"model": "pre", "version": 1, "inputs": {"a": "start"}, "outputs": {"b": "middle"}},
            ],
        }
    ),
    "nested": Feature(
        {
            "format": "Ensemble",
            "maxBatchSize": 4,
            "responseCache": True,
            "inputs": [tensor("start")],
            "outputs": [tensor("end")],
            "steps": [
                {"model": "ensemble", "inputs": {"start": "start"}, "outputs": {"end": "middle"}},
                {"model": "pre", "inputs": {"a": "middle"}, "outputs": {"b": "end"}},
            ],
        }
    ),
}  # fmt: skip

# What Conch refuses because Triton does: name → (config.pbtxt's rest, a part of Triton's own words).
REFUSED: dict[str, tuple[str, str]] = {
    "cache-and-decoupled": (
        "response_cache { enable: true } model_transaction_policy { decoupled: true }",
        "Response Cache does not currently support",
    ),
    "cache-and-sequence": (
        "response_cache { enable: true } sequence_batching { direct {} }",
        "Response Cache does not",
    ),
    "ordering-and-priorities": (
        "max_batch_size: 2 dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1 }",
        "Only one priority level is allowed",
    ),
    "ordering-and-delay": (
        (
            "max_batch_size: 2 dynamic_batching { preserve_ordering: true default_queue_policy "
            "{ timeout_action: DELAY default_timeout_microseconds: 5 } }"
        ),
        "can not have DELAY",
    ),
    "default-priority": (
        "max_batch_size: 2 dynamic_batching { priority_levels: 2 }",
        "default priority level must be in range",
    ),
    "preferred": ("max_batch_size: 2 dynamic_batching { preferred_batch_size: 4 }", "must be <= max batch size"),
    "reshape": (
        "input { name: 'x' data_type: TYPE_FP32 dims: [ 6 ] reshape { shape: [ 4 ] } }",
        "has different size for dims and reshape",
    ),
    "format": (
        "input { name: 'x' data_type: TYPE_FP32 dims: [ 6 ] format: FORMAT_NHWC }",
        "model input NHWC/NCHW require 3 dims",
    ),
    "shape-tensor": (
        "input { name: 'x' data_type: TYPE_FP32 dims: [ 6 ] is_shape_tensor: true }",
        "shape tensors are only supported for TensorRT",
    ),
    "profile": ("instance_group { kind: KIND_CPU profile: '1' }", "only supported for"),
    "two-controls": (
        (
            "sequence_batching { direct {} control_input { name: 's' control { kind: CONTROL_SEQUENCE_START "
            "int32_false_true: [ 0, 1 ] } control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } } }"
        ),
        "specifies multiple",
    ),
    "two-initial-states": (
        (
            "sequence_batching { direct {} state { input_name: 'i' output_name: 'o' data_type: TYPE_FP32 dims: 1 "
            "initial_state { name: 'a' data_type: TYPE_FP32 dims: 1 zero_data: true } "
            "initial_state { name: 'b' data_type: TYPE_FP32 dims: 1 zero_data: true } } }"
        ),
        "must contain exactly one or zero element",
    ),
    "batch-input": (
        "batch_input { kind: BATCH_ITEM_SHAPE target_name: 't' data_type: TYPE_INT64 source_input: 'x' }",
        "batch input data type must be TYPE_INT32 or TYPE_FP32",
    ),
}
# A resource that isn't listed has a count of 0 once any is.
LIMITS = ("--rate-limit-resource=lane:9", "--rate-limit-resource=door:1")
REFUSED_ENSEMBLES: dict[str, tuple[str, str]] = {
    "unused": (
        (
            "step { model_name: 'pre' input_map { key: 'a' value: 'start' } output_map { key: 'b' value: 'lost' } } "
            "step { model_name: 'pre' input_map { key: 'a' value: 'start' } output_map { key: 'b' value: 'end' } }"
        ),
        "'lost' is unused",
    ),
    "unknown": (
        (
            "step { model_name: 'pre' model_version: -1 input_map { key: 'a' value: 'start' } "
            "output_map { key: 'b' value: 'middle' } } "
            "step { model_name: 'pre' model_version: -1 input_map { key: 'a' value: 'nothing' } "
            "output_map { key: 'b' value: 'end' } }"
        ),
        "'nothing'",
    ),
    "twice": (
        (
            "step { model_name: 'pre' input_map { key: 'a' value: 'start' } output_map { key: 'b' value: 'end' } } "
            "step { model_name: 'post' input_map { key: 'a' value: 'start' } output_map { key: 'b' value: 'end' } }"
        ),
        "end",
    ),
    "missing-input": (
        (
            "step { model_name: 'optional' model_version: -1 input_map { key: 'q' value: 'start' } "
            "output_map { key: 'y' value: 'end' } }"
        ),
        "mapping to non-existing input",
    ),
    "ends-of-two-origins": (
        (
            "step { model_name: 'pre' model_version: -1 input_map { key: 'a' value: 'start' } "
            "output_map { key: 'b' value: 'end' } } "
            "step { model_name: 'decoupled' model_version: -1 input_map { key: 'x' value: 'start' } "
            "output_map { key: 'y' value: 'more' } } } output { name: 'more' data_type: TYPE_FP32 dims: 3"
        ),
        "receives inputs originated from different decoupled",
    ),
}


def write(folder: Path, config: str, feature: Feature, name: str) -> None:
    for version in feature.versions:
        place = folder / str(version)
        place.mkdir(parents=True)
        (place / name).write_text(feature.code)
    for path, data in feature.files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    folder.mkdir(exist_ok=True)
    (folder / "config.pbtxt").write_text(config)


@pytest.fixture(scope="module")
def messages() -> dict[str, Any]:
    """What Conch makes of each feature."""
    spec: dict[str, Any] = {"accelerator": {"count": 0}, "runtime": {"responseCache": {"local": {"size": "1Mi"}}}}
    members = {"ensemble": ["pre", "post"], "nested": ["pre", "post", "ensemble"]}
    found = {}
    for name, feature in FEATURES.items():
        models = [
            {"source": {"uri": "pvc://models/x"}, **FEATURES[one].model, "name": one}
            for one in [*members.get(name, []), name]
        ]
        for model in models:
            if model["format"] == "Ensemble":
                model.pop("source")
        parsed = make_spec(models=models, **spec).models[-1]
        assert set(extra_files(parsed)) == set(feature.files)
        assert set(required_versions(parsed)) <= set(feature.versions)
        found[name] = (model_config(parsed, gpu=False), file_name(parsed))
    return found


@pytest.fixture(scope="module")
def server(messages: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonProcess]:
    """One Triton with every model."""
    repository = tmp_path_factory.mktemp("repository")
    repository.chmod(0o755)
    onnx = root_folder(print) / "usr/local/lib/python3.11/dist-packages/onnxruntime/datasets/mul_1.onnx"
    for name, (message, file) in messages.items():
        feature, folder = FEATURES[name], repository / name
        if message.backend == "onnxruntime":
            write(folder, to_pbtxt(message), Feature({}, versions=()), file)
            (folder / "1").mkdir()
            shutil.copy(onnx, folder / "1" / file)
        else:
            write(folder, to_pbtxt(message), feature, file or "model.py")
    flags = ["--cache-config=local,size=1048576", "--rate-limit=execution_count", *LIMITS]
    with triton(repository, flags, tmp_path_factory.mktemp("log") / "triton.log", print) as running:
        yield running


@pytest.fixture(scope="module")
def refusing(messages: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonProcess]:
    """Another one with what it must not load; the rate limiter stays off, which 2.51 can't undo for such models."""
    repository = tmp_path_factory.mktemp("refused")
    repository.chmod(0o755)
    for name in ("pre", "post", "optional", "decoupled"):
        write(repository / name, to_pbtxt(messages[name][0]), FEATURES[name], "model.py")
    for name, (text, _) in REFUSED.items():
        write(repository / f"refused-{name}", f"backend: 'python' {text}", Feature({}), "model.py")
    ends = (
        "platform: 'ensemble' input { name: 'start' data_type: TYPE_FP32 dims: 3 } "
        "output { name: 'end' data_type: TYPE_FP32 dims: 3 } ensemble_scheduling { "
    )
    for name, (text, _) in REFUSED_ENSEMBLES.items():
        write(repository / f"refused-ensemble-{name}", f"{ends}{text} }}", Feature({}), "model.py")
    flags = ["--cache-config=local,size=1048576"]
    with triton(repository, flags, tmp_path_factory.mktemp("log") / "triton.log", print) as running:
        yield running


@pytest.fixture(scope="module")
def states(server: TritonProcess) -> dict[tuple[str, str], dict[str, str]]:
    """What Triton says of each model and version."""
    return {(one["name"], one.get("version", "")): one for one in server.post("/v2/repository/index", {})}


class RefusedByTriton(Exception):
    """Triton's answer to a request that it doesn't take."""


def infer(server: TritonProcess, model: str, *inputs: Any, **more: Any) -> dict[str, Any]:
    tensors = [
        {"name": name, "datatype": kind, "shape": list(shape), "data": data} for name, kind, shape, data in inputs
    ]
    try:
        answer = server.post(f"/v2/models/{model}/infer", {"inputs": tensors, **more})
    except urllib.error.HTTPError as error:
        raise RefusedByTriton(json.loads(error.read())["error"]) from None
    return {one["name"]: one["data"] for one in answer["outputs"]}


def held(wanted: Any, got: Any, place: str = "") -> list[str]:
    """Where what Conch wrote isn't what Triton has; numbers of 64 bits are texts in one of the two."""
    if isinstance(wanted, dict):
        return [
            line
            for key, part in wanted.items()
            for line in (held(part, got[key], f"{place}.{key}") if key in got else [f"{place}.{key} is missing"])
        ]
    if isinstance(wanted, list):
        if len(wanted) != len(got):
            return [f"{place} has {len(got)} entries"]
        pairs = enumerate(zip(wanted, got, strict=True))
        return [line for index, (one, other) in pairs for line in held(one, other, f"{place}[{index}]")]
    return [] if str(wanted) == str(got) or wanted == got else [f"{place} is {got!r}, not {wanted!r}"]


@pytest.mark.parametrize("name", FEATURES)
def test_triton_loads_the_configuration_and_says_back_everything_that_is_in_it(
    name: str, server: TritonProcess, states: dict[tuple[str, str], dict[str, str]], messages: dict[str, Any]
) -> None:
    loaded = {version: one for (model, version), one in states.items() if model == name}
    assert {one["state"] for one in loaded.values()} == {"READY"}, (loaded, server.said()[-3000:])
    assert server.get(f"/v2/models/{name}/ready") is None
    message, _ = messages[name]
    got = server.get(f"/v2/models/{name}/config")
    assert held(MessageToDict(message, preserving_proto_field_name=True), got) == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_conch_refuses_in_a_model_triton_refuses_too(name: str, refusing: TritonProcess) -> None:
    _, words = REFUSED[name]
    assert words in why(f"refused-{name}", refusing)


@pytest.mark.parametrize("name", REFUSED_ENSEMBLES)
def test_what_conch_refuses_in_an_ensemble_triton_refuses_too(name: str, refusing: TritonProcess) -> None:
    _, words = REFUSED_ENSEMBLES[name]
    assert words in why(f"refused-ensemble-{name}", refusing)


def why(model: str, server: TritonProcess) -> str:
    """Triton's reason, from its index or, for what never became a model, from its log."""
    found = [one for one in server.post("/v2/repository/index", {}) if one["name"] == model]
    assert all(one.get("state") != "READY" for one in found), found
    said = [line for line in server.said().splitlines() if model in line]
    return "\n".join([*(one.get("reason", "") for one in found), *said])


def test_an_ensemble_feeds_its_members_in_the_order_of_its_tensors(server: TritonProcess) -> None:
    assert infer(server, "ensemble", ("start", "FP32", (1, 3), [1, 2, 3]))["end"] == [4, 8, 12]
    assert infer(server, "nested", ("start", "FP32", (1, 3), [1, 2, 3]))["end"] == [8, 16, 24]


@pytest.mark.parametrize(("model", "initial"), [("sequence-direct", 0), ("sequence-oldest", 10)])
def test_a_sequence_has_its_controls_and_its_initial_state(model: str, initial: int, server: TritonProcess) -> None:
    got = []
    for number in range(3):
        parameters = {"sequence_id": 7, "sequence_start": number == 0, "sequence_end": number == 2}
        got += infer(server, model, ("x", "FP32", (1, 1), [number + 1]), parameters=parameters)["y"]
    # The Python backend of Triton 2.51 hands no state back, so that each request finds the initial one.
    assert got == [initial + 101, initial + 2, initial + 3]


def test_versions_are_served_as_the_policy_says(states: dict[tuple[str, str], dict[str, str]]) -> None:
    served = {
        name: {version for (model, version), one in states.items() if model == name and one["state"] == "READY"}
        for name in ("versions-all", "versions-some", "versions-latest")
    }
    assert served == {"versions-all": {"1", "3"}, "versions-some": {"2", "5"}, "versions-latest": {"2", "3"}}


def test_warm_up_requests_come_before_the_first_clients(server: TritonProcess) -> None:
    # Four at once in one batch, three alone, one from a file: requests of a batch are handed over one by one.
    assert infer(server, "warmup-given", ("x", "FP32", (1, 3), [1, 2, 3]))["seen"] == [4 + 3 + 1 + 1]


def test_a_warm_up_of_a_sequence_has_its_controls_and_states_too(server: TritonProcess) -> None:
    parameters = {"sequence_id": 7, "sequence_start": True, "sequence_end": True}
    assert infer(server, "warmup-sequence", ("x", "FP32", (1, 1), [1]), parameters=parameters)["y"] == [2 + 1]


def test_a_label_file_names_classes(server: TritonProcess) -> None:
    outputs = [{"name": "y", "parameters": {"classification": 1}}]
    answer = infer(server, "labels", ("x", "FP32", (3,), [0.1, 0.9, 0.2]), outputs=outputs)
    assert answer["y"][0].endswith(":1:dog")


def test_a_reshaped_tensor_has_the_clients_shape_outside_and_the_models_inside(server: TritonProcess) -> None:
    answer = infer(server, "reshape", ("x", "FP32", (1, 6), [1, 2, 3, 4, 5, 6]))
    assert answer["shape"] == [1, 2, 3]
    assert answer["y"] == [1, 2, 3, 4, 5, 6]


def test_an_optional_input_may_be_left_out_and_another_may_not(server: TritonProcess) -> None:
    assert infer(server, "optional", ("z", "FP32", (1, 3), [1, 2, 3]))["y"] == [-1, -1, -1]
    with pytest.raises(RefusedByTriton, match="expected 1 inputs but got 0"):
        infer(server, "plain")


def test_a_repeated_request_is_answered_from_the_cache(server: TritonProcess) -> None:
    for _ in range(3):
        infer(server, "response-cache", ("x", "FP32", (1, 3), [4, 5, 6]))

    def counted() -> bool:
        stats = server.get("/v2/models/response-cache/stats")["model_stats"][0]
        return (stats["inference_stats"]["cache_hit"]["count"], stats["execution_count"]) == (2, 1)

    wait_until(counted, 10, "two hits and one execution in the statistics")  # counted after the answer is sent


def test_a_request_has_the_priorities_that_the_spec_gives(server: TritonProcess) -> None:
    with pytest.raises(RefusedByTriton, match="priority"):
        infer(server, "plain", ("x", "FP32", (3,), [1, 2, 3]), parameters={"priority": -1})
    answer = infer(server, "priorities", ("x", "FP32", (1, 3), [1, 2, 3]), parameters={"priority": 1})
    assert answer["y"] == [1, 2, 3]


def test_the_configuration_reads_back_from_its_file(messages: dict[str, Any]) -> None:
    for message, _ in messages.values():
        assert from_pbtxt(to_pbtxt(message)) == message
