"""One model of a service: tensors, batching, queue, instances. Pure; a part of the InferenceService."""

from __future__ import annotations

import json
from typing import Annotated, Final, Literal

from pydantic import Field

from conch.api.fields import Between, ByName, Duration, KeysMatch, Matches, Resource, Rule
from conch.api.source import ModelSource
from conch.api.text import ModelName, TensorName

_MODEL_FOLDER: Final = "$$TRITON_MODEL_DIRECTORY/"
# The Python backend unpacks and runs what this parameter names: it must come with the (digested) model.
_EXECUTION_ENVIRONMENT: Final = "EXECUTION_ENV_PATH"

DataType = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "BF16", "FP32", "FP64", "STRING",
]  # fmt: skip
Format = Literal["ONNX", "Python"]


class Tensor(Resource):
    """One input or output of a model."""

    rules = (
        Rule(
            "dims",
            "self.dims.all(size, size == -1 || size >= 1)",
            "must be sizes of 1 or more, or -1 for a size that varies; correct or remove the others",
            lambda tensor: all(size == -1 or size >= 1 for size in tensor.dims),
        ),
    )

    name: TensorName = Field(description="The tensor's name in the model.")
    data_type: DataType = Field(description="Triton's data type without its TYPE_ prefix, such as FP32.")
    dims: list[Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]] = Field(
        min_length=1,
        max_length=16,
        description="The shape without the batch dimension; -1 stands for a size that varies.",
    )


class Batching(Resource):
    """Triton's dynamic batching: requests that wait are answered together."""

    preferred_sizes: list[Annotated[int, Field(ge=1, le=65536)]] = Field(
        [], max_length=16, description="Batch sizes to prefer, each at most maxBatchSize. Default: none."
    )
    max_queue_delay: Annotated[Duration, Between("0s", "1m")] = Field(
        0.0, description="How long a request may wait for others to batch with, up to 1m. Default: 0ms."
    )


class QueuePolicy(Resource):
    """Limits of a model's queue inside Triton."""

    max_size: int | None = Field(
        None, ge=1, le=1_000_000, description="Requests that may wait; more are refused with 503. Default: no limit."
    )
    timeout: Annotated[Duration, Between("1ms", "24h")] | None = Field(
        None, description="A request that waited longer is refused; 1ms to 24h. Default: never."
    )


class Instances(Resource):
    """How many copies of a model run in one pod."""

    count: int = Field(1, ge=1, le=64, description="Copies of the model on each accelerator of the pod. Default: 1.")
    kind: Literal["GPU", "CPU"] | None = Field(
        None, description="Where the copies run. Default: GPU when accelerator.count is at least 1, else CPU."
    )


class Model(Resource):
    """One model of the service."""

    rules = (
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
            "parameters",
            f"!has(self.parameters) || !('{_EXECUTION_ENVIRONMENT}' in self.parameters) || "
            f"(self.parameters['{_EXECUTION_ENVIRONMENT}'].startsWith({json.dumps(_MODEL_FOLDER)}) && "
            f"!self.parameters['{_EXECUTION_ENVIRONMENT}'].contains('..'))",
            f"must hold an {_EXECUTION_ENVIRONMENT} that begins with {_MODEL_FOLDER} and has no '..'; ship the "
            "environment with the model",
            lambda model: _keeps_to_its_folder(model.parameters.get(_EXECUTION_ENVIRONMENT)),
        ),
    )

    name: ModelName = Field(description="The name that clients use.")
    source: ModelSource = Field(description="Where the model comes from.")
    format: Format = Field(description="What kind of model it is: ONNX or Python.")
    max_batch_size: int | None = Field(
        None,
        ge=0,
        le=65536,
        description="The largest batch that the model takes; 0: its tensors have no batch dimension. Default: what "
        "Triton finds in the model.",
    )
    inputs: Annotated[list[Tensor], ByName()] = Field(
        [], max_length=64, description="The inputs. Default: what Triton finds in the model."
    )
    outputs: Annotated[list[Tensor], ByName()] = Field(
        [], max_length=64, description="The outputs. Default: what Triton finds in the model."
    )
    batching: Batching | None = Field(
        None, description="Dynamic batching; needs maxBatchSize of 1 or more. Default: off."
    )
    queue: QueuePolicy | None = Field(
        None, description="Limits of the model's queue; needs batching. Default: no limits."
    )
    instances: Instances = Field(Instances(), description="Copies of the model in one pod.")
    parameters: Annotated[
        dict[
            str,
            Annotated[
                str,
                Field(max_length=1024),
                Matches(
                    r"[^\x00-\x1f\x7f-\x9f]*",
                    "must be a single line without control characters; remove tabs and line breaks",
                ),
            ],
        ],
        KeysMatch(
            r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,127}",
            "must have keys of letters, digits and _ . : / -, at most 128 characters; rename the key",
        ),
    ] = Field({}, max_length=64, description="Parameters handed to the backend as they are. Default: none.")


def _keeps_to_its_folder(path: str | None) -> bool:
    return path is None or (path.startswith(_MODEL_FOLDER) and ".." not in path)
