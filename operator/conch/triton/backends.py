"""What Conch knows of Triton's backends: one row for each format of a model. Pure; imports nothing heavy.

Sources, read in the stored repositories and pages: file names and platforms are those of `AutoCompleteBackendFields` in
triton-inference-server/core `src/model_config_utils.cc` (and `constants.h`); what a version's folder holds is in
triton-inference-server/server `docs/user_guide/model_repository.md`; instance kinds are those of the backends' own
sample configurations; the gauges are cited at their rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Format = Literal[
    "ONNX", "TensorRT", "PyTorch", "TensorFlow", "TFLite", "OpenVINO", "Python", "DALI", "vLLM", "TensorRTLLM",
    "Ensemble", "Auto",
]  # fmt: skip
InstanceKind = Literal["GPU", "CPU", "Model"]
Expects = Literal["File", "Folder", "FileOrFolder", "Nothing", "Anything"]
"""What a version's folder must hold under the model's file name: Nothing for an ensemble, Anything where the backend
itself decides."""


@dataclass(frozen=True)
class WaitingGauge:
    """A metric by which a backend that queues inside itself says how many requests wait there."""

    metric: str
    model_label: str
    """The label that holds the model's name in Triton."""
    labels: tuple[tuple[str, str], ...] = ()
    """Further labels that tell waiting requests from others."""


@dataclass(frozen=True)
class Backend:
    """What a format needs of Triton, and of the model's folder."""

    backend: str
    """ModelConfig.backend; empty: Triton finds it by the file's name, or needs none."""
    platform: str = ""
    """ModelConfig.platform, where Triton wants it, or derives it only from the default file."""
    file: str = ""
    """The file that Triton looks for in a version's folder; empty: none of a fixed name."""
    expects: Expects = "File"
    companions: tuple[str, ...] = ()
    """Files that must lie beside it, derived from its name: `{stem}.bin` for model.xml is model.bin."""
    file_can_change: bool = True
    """Whether the backend reads default_model_filename."""
    instance_kind: InstanceKind | None = None
    """The kind of its instance groups where the backend wants a fixed one."""
    cpu: bool = True
    """Whether it can serve without an accelerator."""
    python: bool = False
    """Whether it runs Python that comes with the model."""
    waiting: WaitingGauge | None = None
    """How many requests wait inside the backend, besides Triton's own queue; None: it keeps no queue."""
    image: str = ""
    """What to know about images that hold it; empty: the full images of every release do."""
    removed_in: tuple[int, int] | None = None
    """The first Triton release, as (year, month), whose images lack it."""


BACKENDS: Final[dict[Format, Backend]] = {
    # The model may be a folder of that name, for weights in files of their own (onnxruntime_backend, LoadModel).
    "ONNX": Backend("onnxruntime", file="model.onnx", expects="FileOrFolder"),
    "TensorRT": Backend("tensorrt", "tensorrt_plan", "model.plan", cpu=False),
    "PyTorch": Backend("pytorch", "pytorch_libtorch", "model.pt"),
    "TensorFlow": Backend(
        "tensorflow",
        "tensorflow_savedmodel",
        "model.savedmodel",
        "Folder",
        image="Triton's images hold the TensorFlow backend up to release 25.02",
        # Release notes of Triton 2.56.0 (25.03), and triton-inference-server/server pull request 8068.
        removed_in=(25, 3),
    ),
    # No release of Triton has a backend for it: Arm's armnn_tflite_backend is built into an image of one's own.
    "TFLite": Backend(
        "armnn_tflite",
        file="model.tflite",
        instance_kind="CPU",
        image="no image of NVIDIA's serves TFLite; use one with Arm's armnn_tflite backend in runtime.image",
    ),
    # Instances on Intel's GPUs are the backend's own choice; to Triton they are on the CPU.
    "OpenVINO": Backend("openvino", file="model.xml", companions=("{stem}.bin",), instance_kind="CPU"),
    "Python": Backend("python", file="model.py", python=True),
    # A serialized pipeline; the backend also takes dali.py, which it runs (dali_backend README, autoserialization).
    "DALI": Backend("dali", file="model.dali"),
    "vLLM": Backend(
        "vllm",
        file="model.json",
        file_can_change=False,
        instance_kind="Model",
        cpu=False,
        # vllm_backend src/utils/metrics.py names the gauge; its labels are Triton's model name and version.
        waiting=WaitingGauge("vllm:num_requests_waiting", "model"),
        image="use an image whose tag ends in -vllm-python-py3 in runtime.image",
    ),
    "TensorRTLLM": Backend(
        "tensorrtllm",
        expects="Anything",
        file_can_change=False,
        # The backend places its engine on GPUs itself (tensorrtllm_backend, all_models/inflight_batcher_llm).
        instance_kind="CPU",
        cpu=False,
        # tensorrtllm_backend README, "Triton Metrics": HELP TRT LLM request metrics.
        waiting=WaitingGauge("nv_trt_llm_request_metrics", "model", (("request_type", "waiting"),)),
        image="use an image whose tag ends in -trtllm-python-py3 in runtime.image",
    ),
    "Ensemble": Backend("", "ensemble", expects="Nothing", file_can_change=False),
    # Triton looks for model.savedmodel, model.plan, model.onnx, model.xml, model.pt and model.py, in this order.
    "Auto": Backend("", expects="Anything"),
}

CONFIG_FIELDS_SINCE: Final[dict[str, tuple[int, int]]] = {
    # common pull request 126 of October 2024; the server of 24.10 doesn't know the field (seen).
    "model_metrics": (24, 11),
    # server pull request 8458 of October 2025.
    "ensemble_scheduling.max_inflight_requests": (25, 10),
}
"""Fields of `config` that older releases don't know, and the first release that may: a server that doesn't know a field
can't read the whole configuration."""

AUTO_FILES: Final = ("model.savedmodel", "model.plan", "model.onnx", "model.xml", "model.pt", "model.py")
"""The names by which Triton finds the backend of a model whose configuration names none."""


def default_file_name(model_format: Format) -> str:
    """The file that Triton looks for in a version's folder; empty when the format has none of a fixed name."""
    return BACKENDS[model_format].file


def companions(model_format: Format, file_name: str) -> tuple[str, ...]:
    """The files that must lie beside a model's file, such as model.bin beside model.xml."""
    stem = file_name.rpartition(".")[0] or file_name
    return tuple(name.format(stem=stem) for name in BACKENDS[model_format].companions)
