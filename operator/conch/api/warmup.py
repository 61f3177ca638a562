"""Requests that a model answers before it is ready. Pure; a part of the InferenceService."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from conch.api.fields import ByName, Resource
from conch.api.tensor import FILE_WITH_DATA, DataType, FixedSize
from conch.api.text import LogName, RelativePath, TensorName


class WarmupInput(Resource):
    """One input of a warm-up request."""

    rules = (FILE_WITH_DATA,)

    name: TensorName = Field(description="The input's name.")
    data_type: DataType = Field(description="The input's data type.")
    dims: list[FixedSize] = Field(
        min_length=1, max_length=16, description="The shape without the batch dimension, every size known."
    )
    data: Literal["Zero", "Random", "File"] = Field(
        "Zero",
        description="Zero (empty texts for STRING), Random (numbers only), or the bytes of a file. Default: Zero.",
    )
    file: RelativePath | None = Field(
        None, description="A file in the model's folder warmup, in the tensor's raw bytes. Default: none."
    )


class Warmup(Resource):
    """A warm-up request; the model is ready when all of them have been answered."""

    name: LogName = Field(description="The request's name in Triton's log.")
    batch_size: int = Field(
        1, ge=1, le=65536, description="How many such requests form one batch, at most maxBatchSize. Default: 1."
    )
    count: int = Field(1, ge=1, le=1000, description="How often the batch is executed. Default: 1.")
    inputs: Annotated[list[WarmupInput], ByName()] = Field(
        [],
        max_length=32,
        description="The request's inputs, those of a sequence's controls and states too. Default: the model's own "
        "inputs, which must be listed, with random numbers, empty texts, and 1 for sizes that vary; controls and "
        "states are zero.",
    )
