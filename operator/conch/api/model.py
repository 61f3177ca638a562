"""One model of a service: what it is, its tensors, and how Triton runs it. Pure; a part of the InferenceService."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from pydantic import Field

from conch.api.batching import Batching, Queue
from conch.api.combinations import check_model
from conch.api.ensemble import MAX_STEPS, Step
from conch.api.fields import Amount, ByName, Problem, Quantity, Resource, Rule
from conch.api.instances import InstanceGroup, Instances
from conch.api.optimization import Optimization
from conch.api.sequence import Sequence
from conch.api.source import ModelSource
from conch.api.tensor import InputTensor, OutputTensor
from conch.api.text import FileName, ModelName, Parameters
from conch.api.versions import Versions
from conch.api.warmup import Warmup
from conch.triton.backends import Format

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import core_schema

_MODEL_FOLDER: Final = "$$TRITON_MODEL_DIRECTORY/"
# The Python backend unpacks and runs what this parameter names: it must come with the (digested) model.
_EXECUTION_ENVIRONMENT: Final = "EXECUTION_ENV_PATH"


def _keeps_to_its_folder(path: str | None) -> bool:
    return path is None or (path.startswith(_MODEL_FOLDER) and ".." not in path)


_NOT_FOR_ENSEMBLES: Final = {
    # field: (CEL that it is unset, whether it is set)
    "source": ("!has(self.source)", lambda model: model.source is not None),
    "file": ("!has(self.file)", lambda model: model.file is not None),
    "batching": ("!has(self.batching)", lambda model: model.batching is not None),
    "queue": ("!has(self.queue)", lambda model: model.queue is not None),
    "sequence": ("!has(self.sequence)", lambda model: model.sequence is not None),
    "optimization": ("!has(self.optimization)", lambda model: model.optimization is not None),
    "warmup": ("(!has(self.warmup) || self.warmup.size() == 0)", lambda model: bool(model.warmup)),
    "decoupled": ("!self.decoupled", lambda model: model.decoupled),
    "acceleratorMemory": ("!has(self.acceleratorMemory)", lambda model: model.accelerator_memory is not None),
    "instanceGroups": (
        "(!has(self.instanceGroups) || self.instanceGroups.size() == 0)",
        lambda model: bool(model.instance_groups),
    ),
}
_INSTANCES_UNSET: Final = (
    "self.instances.count == 1 && !has(self.instances.kind) && !self.instances.passive && "
    "!has(self.instances.rateLimiter) && (!has(self.instances.gpus) || self.instances.gpus.size() == 0) && "
    "(!has(self.instances.profiles) || self.instances.profiles.size() == 0)"
)


def _unset_for_an_ensemble(field: str, cel: str, is_set: Callable[[Any], bool]) -> Rule:
    return Rule(
        field,
        f"self.format != 'Ensemble' || {cel}",
        "is not for an Ensemble, which only connects other models; remove it, or set it at the steps' models",
        lambda model: model.format != "Ensemble" or not is_set(model),
    )


def _tells_tensors(model: Model, *, field: str) -> bool:
    return model.format != "PyTorch" or bool(getattr(model, field))


class _FurtherFields:
    """The schema of `config`, made of Triton's message."""

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Late: only the CRD needs it, and reading a spec must not load the message's package."""
        del schema, handler
        from conch.triton import passthrough

        return passthrough.schema()


class Model(Resource):
    """One model of the service."""

    rules = (
        Rule(
            "source",
            "self.format == 'Ensemble' || has(self.source)",
            "is required; add it",
            lambda model: model.format == "Ensemble" or model.source is not None,
        ),
        Rule(
            "steps",
            "(has(self.steps) && self.steps.size() > 0) == (self.format == 'Ensemble')",
            "are required with format Ensemble, and for nothing else; add steps, or remove them",
            lambda model: bool(model.steps) == (model.format == "Ensemble"),
        ),
        *(_unset_for_an_ensemble(field, cel, is_set) for field, (cel, is_set) in _NOT_FOR_ENSEMBLES.items()),
        Rule(
            "file",
            "!has(self.file) || !(self.format in ['vLLM', 'TensorRTLLM'])",
            "can't be chosen for vLLM, which reads model.json, and for TensorRT-LLM; remove it",
            lambda model: model.file is None or model.format not in {"vLLM", "TensorRTLLM"},
        ),
        *(
            Rule(
                field,
                f"self.format != 'PyTorch' || (has(self.{field}) && self.{field}.size() > 0)",
                f"are required for PyTorch, whose models don't tell them; add {field} such as {{name: {name}, "
                "dataType: FP32, dims: [3]}",
                functools.partial(_tells_tensors, field=field),
            )
            # pytorch_backend, ModelState::AutoCompleteConfig: the file holds no names, types and shapes of tensors.
            for field, name in (("inputs", "INPUT__0"), ("outputs", "OUTPUT__0"))
        ),
        Rule(
            "instances",
            "!has(self.instanceGroups) || self.instanceGroups.size() == 0 || self.format == 'Ensemble' || "
            f"({_INSTANCES_UNSET})",
            "and instanceGroups exclude each other; move what instances says into a group",
            lambda model: not model.instance_groups or model.format == "Ensemble" or model.instances == Instances(),
        ),
        Rule(
            "instances",
            f"self.format != 'Ensemble' || ({_INSTANCES_UNSET})",
            "is not for an Ensemble, which only connects other models; set it at the steps' models",
            lambda model: model.format != "Ensemble" or model.instances == Instances(),
        ),
        Rule(
            "maxBatchSize",
            "!has(self.batching) || (has(self.maxBatchSize) && self.maxBatchSize >= 1)",
            "must be 1 or more with batching; set maxBatchSize or remove batching",
            lambda model: model.batching is None or (model.max_batch_size or 0) >= 1,
        ),
        Rule(
            "queue",
            "!has(self.queue) || has(self.batching)",
            "needs batching, which holds Triton's queue; add batching: {} and maxBatchSize, or remove queue",
            lambda model: model.queue is None or model.batching is not None,
        ),
        Rule(
            "batching.preferredSizes",
            "!has(self.batching) || !has(self.batching.preferredSizes) || !has(self.maxBatchSize) || "
            "self.maxBatchSize < 1 || self.batching.preferredSizes.all(size, size <= self.maxBatchSize)",
            "must each be at most maxBatchSize; lower them or raise maxBatchSize",
            lambda model: (
                model.batching is None
                or not model.max_batch_size
                or all(size <= model.max_batch_size for size in model.batching.preferred_sizes)
            ),
        ),
        Rule(
            "queue.levels",
            "!has(self.queue) || !has(self.queue.levels) || !has(self.batching) || self.queue.levels.all(level, "
            "has(self.batching.priorityLevels) && level.priority <= self.batching.priorityLevels)",
            "must each have a priority of at most batching.priorityLevels; raise that, or remove the level",
            lambda model: (
                model.queue is None
                or model.batching is None
                or all(level.priority <= (model.batching.priority_levels or 0) for level in model.queue.levels)
            ),
        ),
        Rule(
            "sequence",
            "!has(self.sequence) || !has(self.batching)",
            "and batching exclude each other; keep one of them",
            lambda model: model.sequence is None or model.batching is None,
        ),
        Rule(
            "sequence.preferredSizes",
            "!has(self.sequence) || !has(self.sequence.preferredSizes) || self.sequence.preferredSizes.all(size, "
            "has(self.maxBatchSize) && size <= self.maxBatchSize)",
            "must each be at most maxBatchSize; lower them or raise maxBatchSize",
            lambda model: (
                model.sequence is None
                or all(size <= (model.max_batch_size or 0) for size in model.sequence.preferred_sizes)
            ),
        ),
        Rule(
            "responseCache",
            "!self.responseCache || !self.decoupled",
            "doesn't work with decoupled, whose answers are many; remove one of them",
            lambda model: not model.response_cache or not model.decoupled,
        ),
        Rule(
            "responseCache",
            "!self.responseCache || !has(self.sequence)",
            "doesn't work with sequence, whose answers depend on earlier requests; remove one of them",
            lambda model: not model.response_cache or model.sequence is None,
        ),
        Rule(
            "optimization.tensorRT",
            "!has(self.optimization) || !has(self.optimization.tensorRT) || self.format == 'ONNX'",
            "is for format ONNX; remove it",
            lambda model: model.optimization is None or model.optimization.tensor_rt is None or model.format == "ONNX",
        ),
        Rule(
            "optimization.openVINO",
            "!has(self.optimization) || !has(self.optimization.openVINO) || self.format == 'ONNX'",
            "is for format ONNX; remove it, or use format OpenVINO for a model of its own",
            lambda model: model.optimization is None or model.optimization.open_vino is None or model.format == "ONNX",
        ),
        Rule(
            "optimization.cudaGraphs",
            "!has(self.optimization) || !has(self.optimization.cudaGraphs) || self.format in ['TensorRT', 'Auto']",
            "are for format TensorRT; remove them",
            lambda model: (
                model.optimization is None
                or model.optimization.cuda_graphs is None
                or model.format in {"TensorRT", "Auto"}
            ),
        ),
        Rule(
            "parameters",
            f"!has(self.parameters) || !('{_EXECUTION_ENVIRONMENT}' in self.parameters) || "
            f"(self.parameters['{_EXECUTION_ENVIRONMENT}'].startsWith({json.dumps(_MODEL_FOLDER)}) && "
            f"!self.parameters['{_EXECUTION_ENVIRONMENT}'].contains('..'))",
            f"must hold an {_EXECUTION_ENVIRONMENT} that begins with {_MODEL_FOLDER} and has no '..'; ship the "
            "environment with the model",
            lambda model: _keeps_to_its_folder(model.parameters.get(_EXECUTION_ENVIRONMENT)),
        ),
    )
    checks: ClassVar[tuple[Callable[[Model], Iterator[Problem]], ...]] = (check_model,)

    name: ModelName = Field(description="The name that clients use.")
    source: ModelSource | None = Field(
        None, description="Where the model comes from; required for every format but Ensemble. Default: none."
    )
    format: Format = Field(
        description="What kind of model it is. Auto lets Triton choose by the file's name: model.onnx, model.plan, "
        "model.pt, model.xml, model.py, or a folder model.savedmodel. TensorFlow needs a Triton release before 25.03; "
        "TFLite, vLLM and TensorRTLLM need an image of their own in runtime.image."
    )
    file: FileName | None = Field(
        None,
        description="The model's file, or its folder, in a version. Default: the format's, such as model.onnx, "
        "model.plan, model.pt, model.savedmodel, model.xml, model.py, model.dali, model.tflite.",
    )
    max_batch_size: int | None = Field(
        None,
        ge=0,
        le=65536,
        description="The largest batch that the model takes; 0: its tensors have no batch dimension. Triton can't tell "
        "0 from unset, and completes it for models that batch (ONNX with a first dimension that varies: 4). Default: "
        "what Triton finds in the model.",
    )
    inputs: Annotated[list[InputTensor], ByName()] = Field(
        [], max_length=64, description="The inputs. Default: what Triton finds in the model."
    )
    outputs: Annotated[list[OutputTensor], ByName()] = Field(
        [], max_length=64, description="The outputs. Default: what Triton finds in the model."
    )
    batching: Batching | None = Field(
        None, description="Dynamic batching; needs maxBatchSize of 1 or more. Default: off."
    )
    queue: Queue | None = Field(None, description="Limits of the model's queue; needs batching. Default: no limits.")
    sequence: Sequence | None = Field(
        None,
        description="Requests that belong together, such as an audio stream's, reach the same copy of the model; "
        "excludes batching. Default: off.",
    )
    instances: Instances = Field(Instances(), description="Copies of the model in one pod, all alike.")
    instance_groups: Annotated[list[InstanceGroup], ByName()] = Field(
        [],
        max_length=8,
        description="Copies of the model in one pod that differ, in the place of instances. Default: none.",
    )
    decoupled: bool = Field(
        False,
        description="True: the model may answer a request any number of times, as with streams of tokens; clients use "
        "gRPC streams. Default: false.",
    )
    response_cache: bool = Field(
        False,
        description="True: a request with inputs that were seen is answered from the cache; needs "
        "runtime.responseCache. Default: false.",
    )
    accelerator_memory: Annotated[Quantity, Amount("1Mi", "64Ti")] | None = Field(
        None,
        description="What one copy of the model takes of an accelerator's memory, in bytes; models that can't fit "
        "together are refused. Default: measured.",
    )
    warmup: Annotated[list[Warmup], ByName()] = Field(
        [],
        max_length=8,
        description="Requests that each copy of the model answers before it is ready, so that the first client doesn't "
        "wait for what is prepared on first use. Default: none.",
    )
    optimization: Optimization | None = Field(
        None, description="How the backend should run the model faster. Default: the backend's defaults."
    )
    versions: Versions = Field(Versions(), description="Which of the source's numbered versions are served.")
    steps: list[Step] = Field(
        [], max_length=MAX_STEPS, description="The steps of an Ensemble, in any order. Default: none."
    )
    parameters: Parameters = Field(
        {}, max_length=64, description="Parameters handed to the backend as they are. Default: none."
    )
    config: Annotated[
        dict[str, Any],
        _FurtherFields(),
    ] = Field(
        {},
        description="Further fields of Triton's ModelConfig, in its own names, such as {batch_input: [...]}; "
        "checked against the message. What the spec sets itself can't be set here too. Default: none.",
    )
