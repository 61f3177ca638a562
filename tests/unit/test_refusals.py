"""What the operator's settings and the release in the image refuse."""

from __future__ import annotations

from typing import Any

import pytest

from conch.triton.refusals import Allowed, by_release, by_settings
from makers import make_model, make_spec

NVIDIA = "nvcr.io/nvidia/tritonserver"
PYTHON = make_model(name="a", format="Python")


@pytest.mark.parametrize(
    ("model", "field"),
    [
        ({"format": "Python"}, "format: Python runs Python code that comes with the model"),
        ({"format": "vLLM"}, "format: vLLM runs Python code"),
        ({"format": "Auto"}, "format: Auto may turn out to run Python code"),
        ({"format": "DALI", "file": "dali.py"}, "file: is Python code"),
        (
            {"parameters": {"EXECUTION_ENV_PATH": "$$TRITON_MODEL_DIRECTORY/env.tar.gz"}},
            "parameters.EXECUTION_ENV_PATH: brings a Python environment",
        ),
        ({"config": {"runtime": "model.py"}}, "config.runtime: may be code that comes with the model"),
        (
            {"config": {"model_operations": {"op_library_filename": ["ops/own.so"]}}},
            "config.model_operations: loads a library",
        ),
    ],
)
def test_code_that_comes_with_a_model_is_refused_where_the_operator_says_so(model: dict[str, Any], field: str) -> None:
    spec = make_spec(models=[make_model(name="plain"), make_model(name="other", **model)])
    (found,) = by_settings(spec, Allowed(python_models=False))
    assert found.startswith(f"spec.models[1].{field}")
    assert "CONCH_ALLOW_PYTHON_MODELS=false" in found
    assert by_settings(spec, Allowed()) == []


@pytest.mark.parametrize("plain", ["ONNX", "TensorRT", "PyTorch", "TensorFlow", "OpenVINO", "DALI", "TensorRTLLM"])
def test_a_format_without_code_is_allowed_everywhere(plain: str) -> None:
    tensors = [{"name": "x", "dataType": "FP32", "dims": [1]}]
    model = make_model(format=plain, inputs=tensors, outputs=tensors)
    assert by_settings(make_spec(models=[model]), Allowed(python_models=False)) == []


def test_a_plug_in_out_of_a_models_folder_is_code_too() -> None:
    def spec(path: str) -> Any:
        return make_spec({"runtime.backends": [{"name": "tensorrt", "settings": {"plugins": path}}]})

    assert by_settings(spec("/opt/plugins/a.so"), Allowed(python_models=False)) == []
    for path in ("/models/resnet50/1/a.so", "/sources/0/a.so"):
        (found,) = by_settings(spec(path), Allowed(python_models=False))
        assert found.startswith("spec.runtime.backends[0].settings.plugins: loads a library")


@pytest.mark.parametrize(
    ("fields", "image", "words"),
    [
        (
            {"runtime.metrics": {"histograms": True}}, f"{NVIDIA}:24.10-py3",
            "spec.runtime.metrics.histograms: needs Triton 24.11 or newer, and the image has 24.10",
        ),
        (
            {"runtime.threads": {"grpcInfer": 4}}, f"{NVIDIA}:25.03-py3",
            "spec.runtime.threads.grpcInfer: needs Triton 25.04 or newer",
        ),
        (
            {"runtime.maxRequestSize": "1Mi"}, f"{NVIDIA}:25.03-py3",
            "spec.runtime.maxRequestSize: needs Triton 25.06 or newer",
        ),
        ({}, f"{NVIDIA}:23.12-py3", "spec.runtime.image: has Triton 23.12, which may not be able to close"),
        ({}, f"{NVIDIA}:24.10-py3-sdk", "spec.runtime.image: holds clients and no server"),
        (
            {"models[0].format": "TensorFlow"}, f"{NVIDIA}:25.03-py3",
            "spec.models[0].format: TensorFlow is not in Triton's images from 25.03 on",
        ),
        (
            {"models[0].format": "vLLM"}, f"{NVIDIA}:25.03-py3",
            "use an image whose tag ends in -vllm-python-py3 in runtime.image",
        ),
        (
            {}, f"{NVIDIA}:25.03-vllm-python-py3",
            "spec.models[0].format: ONNX has no backend in this image",
        ),
        (
            {"runtime.release": "25.01"}, f"{NVIDIA}:24.10-py3",
            "spec.runtime.release: is 25.01, and the image's tag says 24.10",
        ),
    ],
)  # fmt: skip
def test_what_the_release_cant_do_is_refused_with_the_release_and_the_fix(
    fields: dict[str, Any], image: str, words: str
) -> None:
    (found,) = by_release(make_spec(fields), image)
    assert words in found
    assert image in found
    assert ";" in found
    assert len(found) <= 400


@pytest.mark.parametrize(
    ("fields", "image"),
    [
        ({}, f"{NVIDIA}:24.01-py3"),
        ({"runtime.metrics": {"histograms": True}}, "registry.example/own:1"),
        ({"runtime.metrics": {"histograms": True}}, f"{NVIDIA}:29.01-py3"),
        ({"models[0].format": "TensorFlow"}, "registry.example/tritonserver:25.03-py3"),
        ({"models[0].format": "TensorFlow"}, f"{NVIDIA}:25.02-py3"),
        ({"models[0].format": "TFLite"}, "registry.example/tritonserver:25.03-py3"),
        ({"models[0].format": "vLLM"}, f"{NVIDIA}:25.03-vllm-python-py3"),
        ({"models[0].format": "TensorRTLLM"}, f"{NVIDIA}:25.03-trtllm-python-py3"),
        ({"runtime.release": "25.01"}, f"{NVIDIA}@sha256:{'0' * 64}"),
    ],
)
def test_nothing_is_refused_for_what_is_unknown_or_there(fields: dict[str, Any], image: str) -> None:
    assert by_release(make_spec(fields), image) == []


@pytest.mark.parametrize(
    ("path", "allowed", "refused"),
    [
        ("/var/cache/conch", ("/var/cache/conch",), None),
        ("/var/cache/conch/big", ("/srv", "/var/cache/conch"), None),
        ("/var/cache/conchshell", ("/var/cache/conch",), "allowed: /var/cache/conch)"),
        ("/etc", ("/srv", "/var/cache/conch"), "allowed: /srv or /var/cache/conch)"),
        ("/etc", (), "allowed: nowhere)"),
    ],
)
def test_a_cache_on_the_nodes_lies_only_where_the_operator_says(
    path: str, allowed: tuple[str, ...], refused: str | None
) -> None:
    found = by_settings(make_spec(runtime={"modelCache": {"hostPath": path}}), Allowed(cache_host_paths=allowed))
    assert len(found) == (refused is not None)
    for words in found:
        assert words.startswith("spec.runtime.modelCache.hostPath: ")
        assert refused is not None
        assert refused in words
        assert "CONCH_MODEL_CACHE_HOST_PATHS" in words


def test_a_cache_on_a_claim_is_allowed_everywhere() -> None:
    assert by_settings(make_spec(runtime={"modelCache": {"claimName": "models"}}), Allowed()) == []
