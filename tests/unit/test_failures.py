"""What a server that can't start said → the model, the cause and the fix.

`logs/` holds the last 2 KiB that tritonserver 2.51 said when it was run with each fault, as the kubelet keeps them.
What needs an accelerator stands here, quoted from the issue that is named.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.api.conditions import MAX_MESSAGE, Reason
from conch.triton.failures import RULES, explain, sentence

LOGS = Path(__file__).parent / "logs"
NAMES = ["good", "bad", "m", "e", "fight"]


def said(name: str) -> str:
    return (LOGS / f"{name}.log").read_text()


@pytest.mark.parametrize(
    ("log", "model", "reason", "cause", "fix"),
    [
        ("bad-onnx", "bad", "ModelLoadFailed", "isn't a valid ONNX model", "spec.models[1].source"),
        ("missing-file", "m", "ModelLoadFailed", "file 1/model.py isn't there", "spec.models[2].file"),
        ("missing-file-onnx", "m", "ModelLoadFailed", "file 1/model.onnx isn't there", "spec.models[2].file"),
        ("no-version", "m", "ModelLoadFailed", "no version folder", "a folder 1"),
        ("version-name", "m", "ModelLoadFailed", "version folder v1 is not a number", "1, 2, and so on"),
        ("version-specific", "m", "ModelLoadFailed", "no version 7", "spec.models[2].versions.numbers"),
        ("syntax", "m", "ModelLoadFailed", "can't be parsed: invalid syntax (model.py, line 1)", "correct the file"),
        ("import", "m", "ModelLoadFailed", "needs the module torch", "EXECUTION_ENV_PATH"),
        ("raises", "m", "ModelLoadFailed", "RuntimeError: no weights here", "the pod's log"),
        ("exit", "m", "ModelLoadFailed", "SystemExit: 3", "the pod's log"),
        ("noclass", "m", "ModelLoadFailed", "no class TritonPythonModel", "add the class"),
        ("crash", "m", "ModelLoadFailed", "died without a word", "raise spec.resources.memory"),
        ("unknown-backend", "m", "BackendMissing", "no backend tensorrt", "spec.runtime.image"),
        ("kind-gpu", "m", "NoAcceleratorInPod", "finds no accelerator", "spec.accelerator.count"),
        ("bad-config", "m", "ModelLoadFailed", 'no field named "nonsense"', "newer release"),
        ("batchpref", "m", "ModelLoadFailed", "Triton refuses it", "check spec.models[2]"),
        ("batch-fight", "fight", "ModelLoadFailed", "batches of at most 1, not 16", "maxBatchSize to 1"),
        ("ens-missing", "e", "ModelLoadFailed", "models that aren't loaded: gone", "spec.models[3].steps"),
        ("ens-dims", "e", "ModelLoadFailed", "tensor x is [-1,5] in e and [-1,4] in m", "spec.models[3].steps"),
        ("warmup-file", "m", "ModelLoadFailed", "the file gone, which the spec names", "beside the model's versions"),
        ("labels", "m", "ModelLoadFailed", "the file gone.txt, which the spec names", "correct its name"),
        ("execenv", "m", "ModelLoadFailed", "the file env.tar.gz, which the spec names", "correct its name"),
        ("rate", "m", "ModelLoadFailed", "asks for 4 of the rate limiter's resource R1", "spec.runtime.rateLimiter"),
        ("clash", "m", "ModelLoadFailed", "names another model, other", "names of their own"),
        ("shm-64k", "m", "OutOfSharedMemory", "shared memory is used up", "raise spec.runtime.sharedMemory"),
        ("shm-1500k", "m", "OutOfSharedMemory", "shared memory is used up", "raise spec.runtime.sharedMemory"),
        ("port", None, "ServerFailed", "port 8000 is taken", "spec.runtime.image"),
        ("cache-badsize", None, "ServerFailed", "response cache can't be made", "responseCache.local.size"),
        ("redis", None, "BackendMissing", "no response cache of kind redis", "responseCache.local"),
        ("badarg", None, "ServerFailed", "doesn't know an option", "newer release"),
    ],
)
def test_what_the_real_server_said_names_model_cause_and_fix(
    log: str, model: str | None, reason: str, cause: str, fix: str
) -> None:
    failure = next(one for one in explain(said(log), NAMES, accelerator=False) if one.model == model)
    assert failure.reason == Reason(reason)
    assert cause in failure.cause
    assert fix in failure.fix
    assert "{" not in failure.cause + failure.fix
    message = sentence([failure])
    assert (f'Model "{model}"' if model else "Triton can't start") in message
    assert message.endswith(failure.said) or not failure.said


ENGINE = "E0802 1 logging.cc:43] {}\n"
LOADS = "E0802 22:16:01.000001 1 model_lifecycle.cc:597] failed to load 'm' version 1: {}\n"


@pytest.mark.parametrize(
    ("text", "reason", "cause"),
    [
        (  # triton-inference-server/server#2743
            ENGINE.format(
                "INVALID_CONFIG: The engine plan file is not compatible with this version of TensorRT, expecting "
                "library "
                "version 7.2.1 got 7.2.2, please rebuild."
            )
            + LOADS.format("Internal: unable to create TensorRT engine"),
            Reason.ENGINE_MISMATCH,
            "built with TensorRT 7.2.2, the server has 7.2.1",
        ),
        (  # HKUST-Aerial-Robotics/D2SLAM#52
            ENGINE.format(
                "1: [stdArchiveReader.cpp::StdArchiveReader::40] Error Code 1: Serialization (Serialization assertion "
                "stdVersionRead == serializationVersion failed.Version tag does not match. Note: Current Version: 213, "
                "Serialized Engine Version: 232)"
            )
            + LOADS.format("Internal: unable to load plan file to auto complete config: /models/m/1/model.plan"),
            Reason.ENGINE_MISMATCH,
            "(serialization 232) than the server's (213)",
        ),
        (  # NVIDIA/TensorRT#2176
            ENGINE.format(
                "6: The engine plan file is generated on an incompatible device, expecting compute 8.6 got compute "
                "7.5, "
                "please rebuild."
            )
            + LOADS.format("Internal: unable to create TensorRT engine"),
            Reason.ENGINE_MISMATCH,
            "for compute capability 7.5, the pod's accelerator has 8.6",
        ),
        (  # triton-inference-server/server#7056
            LOADS.format(
                "Internal: autofill failed for model 'm': configuration specified max-batch 16 but TensorRT engine "
                "only "
                "supports max-batch 1"
            ),
            Reason.MODEL_LOAD_FAILED,
            "batches of at most 1, not 16",
        ),
        (  # triton-inference-server/server#1105
            LOADS.format(
                "Invalid argument: unexpected configuration maximum batch size 64 for 'resnet50_trt_0_gpu0', model "
                "maximum "
                "is 1 as model does not contain an implicit batch dimension"
            ),
            Reason.MODEL_LOAD_FAILED,
            "batches of at most 1, not 64",
        ),
        (  # triton-inference-server/server#5834
            LOADS.format(
                "Invalid argument: model 'groot', tensor 'boxes': the model expects 2 dimensions (shape [91,4]) but "
                "the model "
                "configuration specifies 2 dimensions (shape [-1,-1])"
            ),
            Reason.MODEL_LOAD_FAILED,
            "tensor boxes has the shape [91,4] in the model and [-1,-1] in the spec",
        ),
        (  # triton-inference-server/server#4065
            LOADS.format(
                "Invalid argument: model 'm', tensor 'logits': the model expects 3 dimensions (shape [-1,256,25]) but "
                "the "
                "model configuration specifies 3 dimensions (an initial batch dimension because max_batch_size > 0 "
                "followed "
                "by the explicit tensor shape, making complete shape [-1,-1,25])"
            ),
            Reason.MODEL_LOAD_FAILED,
            "[-1,256,25] in the model and [-1,-1,25] in the spec",
        ),
        (  # triton-inference-server/tensorrtllm_backend#303
            LOADS.format(
                "Internal: unexpected error when creating modelInstanceState: [TensorRT-LLM][ERROR] CUDA runtime "
                "error in "
                "::cudaMallocAsync(ptr, n, mCudaStream->get()): out of memory (/app/tllmBuffers.h:112)"
            ),
            Reason.OUT_OF_ACCELERATOR_MEMORY,
            "too little free memory",
        ),
        (  # triton-inference-server/server#5661
            LOADS.format(
                "Internal: onnx: runtime error 6: Exception during initialization: bfc_arena.cc:368 void* "
                "onnxruntime::BFCArena::AllocateRawInternal(size_t, bool, onnxruntime::Stream*, bool, "
                "onnxruntime::WaitNotificationFn) Failed to allocate memory for requested buffer of size 268435456"
            ),
            Reason.OUT_OF_ACCELERATOR_MEMORY,
            "too little free memory",
        ),
        (  # triton-inference-server/server#7562
            LOADS.format(
                "Internal: ValueError: No available memory for the cache blocks. Try increasing "
                "`gpu_memory_utilization` "
                "when initializing the engine."
            ),
            Reason.OUT_OF_ACCELERATOR_MEMORY,
            "no memory left for the engine's cache",
        ),
        (  # triton-inference-server/server#2584
            LOADS.format(
                "Invalid argument: instance group m_1 of model m specifies invalid or unsupported gpu id 1. GPUs with "
                "at "
                "least the minimum required CUDA compute compatibility of 6.000000 are: 0"
            ),
            Reason.MODEL_LOAD_FAILED,
            "no accelerator 1",
        ),
    ],
)
def test_what_backends_with_an_accelerator_say_names_cause_and_values(text: str, reason: Reason, cause: str) -> None:
    (failure,) = explain(text, ["m"])
    assert (failure.model, failure.reason) == ("m", reason)
    assert cause in failure.cause


def test_a_driver_that_is_too_old_is_a_cause_with_an_accelerator_and_noise_without() -> None:
    noise = (
        '2026-12-01T03:18:07Z W 309 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory, pinned '
        "memory "
        'pool will not be available: CUDA driver version is insufficient for CUDA runtime version"\n'
    )
    (failure,) = explain(noise, ["m"], accelerator=True)
    assert failure.reason == Reason.DRIVER_TOO_OLD
    assert explain(noise, ["m"], accelerator=False) == ()


def test_the_container_runtimes_word_on_the_driver_names_the_version_that_is_needed() -> None:
    text = (
        "failed to create containerd task: nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.8, "
        "please update your driver to a newer version, or use an earlier cuda container: unknown"
    )
    (failure,) = explain(text, ["m"])
    assert failure.reason == Reason.DRIVER_TOO_OLD
    assert "needs cuda>=12.8" in failure.cause


def test_each_of_several_broken_models_is_named_in_the_order_of_the_spec() -> None:
    text = LOADS.replace("'m'", "'b'").format(
        "Internal: SyntaxError: invalid syntax (model.py, line 1)"
    ) + LOADS.replace("'m'", "'a'").format("Internal: ModuleNotFoundError: No module named 'torch'")
    found = explain(text, ["a", "b"])
    assert [failure.model for failure in found] == ["a", "b"]
    assert "torch" in found[0].cause
    assert "invalid syntax" in found[1].cause
    message = sentence(found)
    assert message.index('Model "a"') < message.index('Model "b"')


def test_one_models_trouble_does_not_explain_another_whose_words_are_unknown() -> None:
    text = LOADS.replace("'m'", "'a'").format("Internal: the moon is full") + LOADS.replace("'m'", "'b'").format(
        "Internal: ModuleNotFoundError: No module named 'torch'"
    )
    first, second = explain(text, ["a", "b"])
    assert (first.cause, first.said) == ("Triton refuses it", "Internal: the moon is full")
    assert "torch" in second.cause


def test_a_line_that_names_no_model_explains_the_one_that_broke_but_not_each_of_several() -> None:
    logger = "[TRT] The engine plan file is generated on an incompatible device, expecting compute 8.9 got compute 8.0"
    plan = "failed to load 'plan' version 1: Internal: unable to load plan file to auto complete config"
    words = "failed to load 'words' version 1: Internal: what no table knows"
    (lone,) = explain(f"{logger}\n{words}", ["plan", "words"])
    assert "compute capability 8.0" in lone.cause
    of_plan, of_words = explain(f"{logger}\n{plan}\n{words}", ["plan", "words"])
    assert "compute capability 8.0" in of_plan.cause
    assert of_words.cause == "Triton refuses it"


def test_r11_the_same_failure_in_two_pods_has_the_same_words() -> None:
    one = said("shm-1500k")
    other = one.replace("83d1537c-cd6e-4dfa-8f9f-9040c4e0ecf4", "11111111-cd6e-4dfa-8f9f-9040c4e0ecf4")
    assert one != other
    assert explain(one, NAMES) == explain(other.replace("03:19", "04:27").replace(" 7695 ", " 11 "), NAMES)
    torch = "Internal: OutOfMemoryError: CUDA out of memory. Tried to allocate {} MiB. GPU 0 has {} GiB free."
    first, second = (explain(LOADS.format(torch.format(*sizes)), ["m"]) for sizes in ((20, 1.5), (22, 1.25)))
    assert first == second
    assert first[0].reason == Reason.OUT_OF_ACCELERATOR_MEMORY
    # Triton unpacks environments and remote models into folders of a random name, as Python's tempfile makes them.
    for names in (
        ("python_env_aB3dE6", "python_env_zZ9zZ9"),
        ("folderAbCdEf", "folder123456"),
        ("tmpab_d3f9h", "tmp12345678"),
    ):
        first, second = (explain(LOADS.format(f"Internal: OSError: /tmp/{name}/0/lib: bad"), ["m"]) for name in names)
        assert first == second


def test_a_python_trace_is_no_part_of_what_is_told() -> None:
    text = (
        "\"failed to load 'm' version 1: Internal: TritonModelException: unexpected inference output 'labels', "
        'allowed outputs are: label\\n\\nAt:\\n  /models/m/1/model.py(135): initialize\\n"'
    )
    (failure,) = explain(text, ["m"])
    assert failure.fix == "use its own names in spec.models[0].outputs: label"
    assert "At:" not in sentence([failure])


def test_words_that_nobody_knows_explain_nothing() -> None:
    assert explain("", ["m"]) == ()
    assert explain("Segmentation fault (core dumped)", ["m"]) == ()


@given(
    text=st.text(max_size=3000),
    models=st.lists(st.text(min_size=1, max_size=20), max_size=4),
    accelerator=st.booleans(),
)
def test_whatever_is_said_the_words_are_one_line_and_end_in_time(
    text: str, models: list[str], *, accelerator: bool
) -> None:
    message = sentence(explain(text + "\nfailed to load 'x' version 1: " + text, models, accelerator=accelerator))
    assert "\n" not in message
    assert len(message) < 4 * MAX_MESSAGE


def test_every_rule_writes_only_what_its_pattern_finds() -> None:
    for rule in RULES:
        words = dict.fromkeys([*rule.pattern.groupindex, "field"], "x")
        assert (rule.cause + rule.fix).format_map(words)
        assert not rule.cause.endswith(".")
        assert not rule.fix.endswith(".")
