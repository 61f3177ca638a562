"""Ensembles: models that feed each other inside Triton. Pure; a part of the InferenceService."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from conch.api.fields import Pattern, Resource
from conch.api.text import TENSOR_NAME, TENSOR_NAME_WORDS, ModelName

# In the schema, not as CEL: maps inside lists inside lists would take the whole budget of rules.
_Tensor = Annotated[str, Field(min_length=1, max_length=255), Pattern(TENSOR_NAME, TENSOR_NAME_WORDS)]
TensorMap = Annotated[dict[str, _Tensor], Field(min_length=1, max_length=64)]
MAX_STEPS: Final = 32


class Step(Resource):
    """One step of an ensemble: a model of this service, and which tensors it reads and writes."""

    name: ModelName | None = Field(None, description="A name for messages. Default: the model's.")
    model: ModelName = Field(description="The model of this service that runs.")
    version: Annotated[int, Field(ge=1, le=2**53 - 1)] | None = Field(
        None, description="The model's version. Default: the latest that is served."
    )
    inputs: TensorMap = Field(
        description="The model's inputs, each with the tensor of the ensemble that it reads: {image: decoded}."
    )
    outputs: TensorMap = Field(
        description="The model's outputs that are used, each with the tensor of the ensemble that it makes; every "
        "tensor has one maker and at least one reader."
    )
