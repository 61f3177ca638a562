"""One service, changed into one fault after another: each is named with model, cause and fix while the old pod answers.

The words of faults that can't happen here are in `tests/unit/test_failures.py` (those of accelerators above all) and in
`tests/unit/test_observation.py` (evictions); those of stores are in `e2e/test_sources.py`.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

import pytest

from conch import names
from services import NO_GPU, Background, Service, condition, restricted_namespace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clusters import Clusters
    from sandbox import AnyRegion

pytestmark = pytest.mark.sandbox

WORDS = f"t-words-{uuid.uuid4().hex[:6]}"
MODEL = "image://sandbox.local/models/filetype:1#/filetype"
WRONG = "sha256:" + "0" * 64
SEEN_LIMIT_S = 30.0
QUICK: dict[str, Any] = {**NO_GPU, "models[0].parameters.sandbox_compute_ms": "0", "scaling.maxReplicas": 1}
"""A small CPU service."""

FAULTS: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "bad model": (
        {"models[0].source.uri": f"{MODEL}/labels.txt"},
        "ModelLoadFailed",
        [
            'Model "filetype" can\'t be loaded',
            "isn't a valid ONNX model",
            "spec.models[0].source",
            "Protobuf parsing failed",
        ],
    ),
    "digest mismatch": (
        {"models[0].source.digest": WRONG},
        "FetchFailed",
        ['model "filetype"', f"not {WRONG}", "correct spec.models[0].source.digest"],
    ),
    "missing file": (
        {"models[0].source.uri": f"{MODEL}/nothing.onnx"},
        "FetchFailed",
        ['model "filetype"', "nothing.onnx"],
    ),
    "wrong file name": (
        {"models[0].file": "resnet.onnx"},
        "FetchFailed",
        ['model "filetype"', "resnet.onnx"],
    ),
    "wrong dims": (
        {"models[0].inputs[0].dims": [1024]},
        "ModelLoadFailed",
        [
            'Model "filetype" can\'t be loaded',
            "tensor bytes has the shape [-1,2048] in the model and [-1,1024] in the spec",
            "correct its dims in spec.models[0].inputs",
        ],
    ),
    "wrong data type": (
        {"models[0].inputs[0].dataType": "FP32"},
        "ModelLoadFailed",
        ["input bytes is TYPE_INT32 in one and TYPE_FP32 in the other", "dataType in spec.models[0].inputs"],
    ),
    "wrong tensor name": (
        {"models[0].outputs[0].name": "labels"},
        "ModelLoadFailed",
        ["the model has no output labels", "use its own names in spec.models[0].outputs: target_label. Triton"],
    ),
    "exhausted shared memory": (
        {"runtime.sharedMemory": "1Mi", "models[0].instances.count": 3},
        "OutOfSharedMemory",
        ['Model "filetype" can\'t be loaded', "shared memory is used up", "raise spec.runtime.sharedMemory"],
    ),
    "unknown backend": (
        {"models[0].format": "PyTorch", "models[0].file": "model.onnx"},
        "BackendMissing",
        ['Model "filetype" can\'t be loaded', "no backend pytorch", "spec.runtime.image"],
    ),
    "want of memory": (
        {"resources.memory": "32Mi", "runtime.sharedMemory": "16Mi"},
        "OutOfMemory",
        ["Container triton was killed for want of memory", "raise spec.resources.memory"],
    ),
    "image pull failure": (
        {"runtime.image": "sandbox.local/nothing:1"},
        "ImagePullFailed",
        ["The image sandbox.local/nothing:1 can't be pulled", "check spec.runtime.image"],
    ),
}


@pytest.fixture(scope="module")
def services(clusters: Clusters) -> Iterator[dict[str, Service]]:
    """The service that is broken, and one that asks for what its model can't give; applied at once."""
    region = clusters.region(nodes=True)
    restricted_namespace(region, WORDS)
    # Tensors without a maximum: Triton completes one for a model whose first dimension varies.
    drifting = {
        **QUICK,
        "models[0].maxBatchSize": 0,
        "models[0].inputs": None,
        "models[0].outputs": None,
        "models[0].batching": None,
        "models[0].queue": None,
    }
    yield {
        "words": Service(region, WORDS, "words", QUICK),
        "drift": Service(region, WORDS, "drift", drifting),
    }
    region.kubectl("delete", "namespace", WORDS, "--wait=false", "--ignore-not-found")


@pytest.fixture
def running(quick_operator: AnyRegion, services: dict[str, Service]) -> dict[str, Service]:
    """The same, applied."""
    if not quick_operator.get(names.SERVICE_PLURAL, "-n", WORDS)["items"]:
        for service in services.values():
            service.apply()
    return services


def test_each_fault_of_a_new_spec_is_named_with_model_cause_and_fix_while_the_old_pods_serve(
    running: dict[str, Service],
) -> None:
    service = running["words"].wait_ready()
    began = time.monotonic()
    with Background(service.url(), rate=5) as load:
        for fault, (fields, reason, words) in FAULTS.items():
            broken = Service(service.region, WORDS, "words", {**QUICK, **fields}).apply()

            def told(status: dict[str, Any], words: list[str] = words) -> bool:
                blocked = condition(status, "RolloutBlocked")
                return all(word in blocked.get("message", "") for word in words)

            status = broken.wait(f"the words of {fault}", told, SEEN_LIMIT_S)
            blocked = condition(status, "RolloutBlocked")
            print(f"{time.monotonic() - began:5.1f} s  {fault}: {blocked['message']}")
            assert (blocked["status"], blocked["reason"]) == ("True", reason)
            assert blocked["message"].startswith("The old pods serve on. ")
            assert condition(status, "Ready")["status"] == "True"
            assert condition(status, "Stalled")["status"] == "False"
            assert status["replicas"]["ready"] == 1
            assert service.infer().max() > 0.5
    assert load.result().errors == {}


def test_what_is_put_right_is_told_of_as_right_again(running: dict[str, Service]) -> None:
    service = running["words"].apply().wait_ready()
    status = service.wait("the models to be read", lambda found: "modelsRevision" in found, SEEN_LIMIT_S)
    assert condition(status, "RolloutBlocked")["status"] == "False"
    (model,) = status["models"]
    assert model == {"name": "filetype", "ready": True, "versions": ["1"], "maxBatchSize": 4}
    assert condition(status, "ModelConfigDrift")["reason"] == "ConfigAsWritten"


def test_row_81_what_triton_completed_otherwise_than_asked_is_told_with_what_to_write(
    running: dict[str, Service],
) -> None:
    service = running["drift"].wait_ready()
    message = service.wait_condition("ModelConfigDrift", "True", says="spec.models[0].maxBatchSize")
    print(message)
    assert "is 0 in the spec and 4 in the server: set it to 4" in message
    # It is no reason to refuse requests.
    assert condition(service.status(), "Ready")["status"] == "True"
    service.apply({"models[0].maxBatchSize": 4}).wait_ready()
    service.wait_condition("ModelConfigDrift", "False")
