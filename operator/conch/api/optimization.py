"""How a backend should run a model faster. Pure; a part of the InferenceService."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from conch.api.fields import Amount, ByName, Quantity, Resource, Rule
from conch.api.tensor import FixedSize
from conch.api.text import Parameters, TensorName

SPEC_PARAMETERS: Final = (
    "precision_mode", "max_workspace_size_bytes", "trt_engine_cache_enable", "trt_engine_cache_path",
)  # fmt: skip
LIBRARIES_PARAMETER: Final = "trt_extra_plugin_lib_paths"


class TensorRTAccelerator(Resource):
    """ONNX Runtime's TensorRT accelerator: the parts of the graph that TensorRT takes are compiled by it."""

    rules = (
        Rule(
            "parameters",
            "!has(self.parameters) || self.parameters.all(key, !(key in "
            f"[{', '.join(repr(key) for key in SPEC_PARAMETERS)}]))",
            f"must not repeat what precision, workspace and engineCache say ({', '.join(SPEC_PARAMETERS)}); set those",
            lambda accelerator: not set(SPEC_PARAMETERS) & set(accelerator.parameters),
        ),
        Rule(
            "parameters",
            f"!has(self.parameters) || !('{LIBRARIES_PARAMETER}' in self.parameters)",
            f"must not have {LIBRARIES_PARAMETER}, which loads code of any path; put the plug-ins into runtime.image",
            lambda accelerator: LIBRARIES_PARAMETER not in accelerator.parameters,
        ),
    )

    precision: Literal["FP32", "FP16", "INT8", "BF16"] = Field(
        "FP32", description="The precision that engines may compute in: FP32, FP16, INT8 or BF16. Default: FP32."
    )
    workspace: Annotated[Quantity, Amount("1Mi", "64Gi")] | None = Field(
        None, description="GPU memory that building an engine may take, in bytes. Default: ONNX Runtime's, 1Gi."
    )
    engine_cache: bool = Field(
        False,
        description="True: built engines are kept in the pod's temporary folder, so that a container that "
        "restarts finds them. Default: false.",
    )
    parameters: Parameters = Field(
        {}, max_length=32, description="Further parameters of the accelerator, as they are. Default: none."
    )


class OpenVINOAccelerator(Resource):
    """ONNX Runtime's OpenVINO accelerator for CPUs."""

    parameters: Parameters = Field(
        {}, max_length=32, description="Parameters of the accelerator, as they are. Default: none."
    )


class GraphInput(Resource):
    """The shape of an input in a CUDA graph."""

    name: TensorName = Field(description="The input's name.")
    dims: list[FixedSize] = Field(
        min_length=1, max_length=16, description="Its shape without the batch dimension, every size known."
    )


class GraphLowerBound(Resource):
    """The smallest request that a CUDA graph may answer."""

    batch_size: int = Field(1, ge=0, le=65536, description="The batch size. Default: 1.")
    inputs: Annotated[list[GraphInput], ByName()] = Field(
        [], max_length=16, description="The inputs' shapes. Default: the model's."
    )


class GraphSpec(GraphLowerBound):
    """One CUDA graph."""

    lower_bound: GraphLowerBound | None = Field(
        None, description="Answer requests from this size on with the graph too. Default: only its own size."
    )


class CudaGraphs(Resource):
    """CUDA graphs and other settings of CUDA; TensorRT only."""

    enabled: bool = Field(
        True, description="True: executions are captured as CUDA graphs, which launch faster. Default: true."
    )
    busy_wait: bool = Field(
        False,
        description="True: threads spin instead of sleeping while the GPU works: less latency, more CPU. "
        "Default: false.",
    )
    output_copy_stream: bool = Field(
        False, description="True: outputs are copied while the next execution computes. Default: false."
    )
    specs: list[GraphSpec] = Field(
        [], max_length=8, description="The graphs to capture. Default: those of the preferred batch sizes."
    )


class PinnedMemory(Resource):
    """Whether page-locked memory speeds up copies to and from the GPU."""

    input: bool = Field(True, description="Use it for inputs. Default: true.")
    output: bool = Field(True, description="Use it for outputs. Default: true.")


class Optimization(Resource):
    """How a backend should run the model faster."""

    tensor_rt: TensorRTAccelerator | None = Field(
        None,
        alias="tensorRT",
        description="Compile an ONNX model with TensorRT when it loads; format ONNX on GPUs. Default: off.",
    )
    open_vino: OpenVINOAccelerator | None = Field(
        None, alias="openVINO", description="Run an ONNX model with OpenVINO; format ONNX on CPUs. Default: off."
    )
    graph_level: int | None = Field(
        None,
        ge=-1,
        le=2,
        description="How far the backend optimizes the graph; for ONNX -1 is basic, 1 extended, 2 not at all. "
        "Default: the backend's.",
    )
    cuda_graphs: CudaGraphs | None = Field(None, description="CUDA graphs; TensorRT only. Default: off.")
    pinned_memory: PinnedMemory = Field(PinnedMemory(), description="Page-locked memory for copies to the GPU.")
    priority: Literal["Default", "Max", "Min"] = Field(
        "Default",
        description="The model's priority on a GPU that several models share; TensorRT and ONNX. Default: Default.",
    )
    gather_kernel_buffer_threshold: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="Gather inputs by a GPU kernel when a request has this many input buffers or more. Default: never.",
    )
    eager_batching: bool = Field(
        False, description="True: the next batch is prepared while the last one executes. Default: false."
    )
