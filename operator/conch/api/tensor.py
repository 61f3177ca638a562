"""A model's inputs and outputs: names, data types, shapes. Pure; a part of the InferenceService."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from conch.api.fields import Problem, Resource, Rule
from conch.api.text import RelativePath, TensorName

VARIES: Final = -1
"""The size of a dimension that differs between requests."""

DataType = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "BF16", "FP32", "FP64", "STRING",
]  # fmt: skip
Size = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
FixedSize = Annotated[int, Field(ge=1, le=2**31 - 1)]
_SIZES_WORDS: Final = "must be sizes of 1 or more, or -1 for a size that varies; correct or remove the others"


FILE_WITH_DATA: Final = Rule(
    "file",
    "has(self.file) == (self.data == 'File')",
    "is required with data File, and for nothing else; set both or neither",
    lambda tensor: (tensor.file is not None) == (tensor.data == "File"),
)
"""Of a tensor whose content is said by `data` and `file`."""


def is_size(size: int) -> bool:
    """Whether a number is a dimension's size, or says that it varies."""
    return size == VARIES or size >= 1


def _reshape(tensor: Tensor) -> Iterator[Problem]:
    """Triton's `ValidateIOShape`: the elements between sizes that vary are as many before as after."""
    if tensor.reshape is None:
        return
    before, after = _runs(tensor.dims), _runs(tensor.reshape)
    if len(before) != len(after):
        words = "must have as many sizes of -1 as dims, in the same order; correct reshape or dims"
        yield Problem(("reshape",), words, tensor.reshape)
    elif before != after:
        words = (
            f"must hold as many elements as dims, between sizes of -1 too: {_products(after)} are not "
            f"{_products(before)}; correct reshape or dims"
        )
        yield Problem(("reshape",), words, tensor.reshape)


def _runs(sizes: Sequence[int]) -> list[int]:
    """The number of elements of each run of known sizes; one run more than sizes that vary."""
    runs = [1]
    for size in sizes:
        if size == VARIES:
            runs.append(1)
        else:
            runs[-1] = math.prod((runs[-1], size))
    return runs


def _products(runs: Sequence[int]) -> str:
    return " and ".join(f"{run:.3g}" if run >= 10**6 else str(run) for run in runs)


class Tensor(Resource):
    """One input or output of a model."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "dims",
            "self.dims.all(size, size == -1 || size >= 1)",
            _SIZES_WORDS,
            lambda tensor: all(is_size(size) for size in tensor.dims),
        ),
        Rule(
            "reshape",
            "!has(self.reshape) || self.reshape.all(size, size == -1 || size >= 1)",
            _SIZES_WORDS,
            lambda tensor: tensor.reshape is None or all(is_size(size) for size in tensor.reshape),
        ),
        Rule(
            "nonLinearFormat",
            "!self.nonLinearFormat || self.dims.size() == 3",
            "needs dims of 3 sizes; correct dims or remove it",
            lambda tensor: not tensor.non_linear_format or len(tensor.dims) == 3,  # noqa: PLR2004 - as in CEL
        ),
    )
    checks: ClassVar[tuple[Callable[[Tensor], Iterator[Problem]], ...]] = (_reshape,)

    name: TensorName = Field(description="The tensor's name in the model.")
    data_type: DataType = Field(description="Triton's data type without its TYPE_ prefix, such as FP32.")
    dims: list[Size] = Field(
        min_length=1,
        max_length=16,
        description="The shape without the batch dimension; -1 stands for a size that varies.",
    )
    reshape: list[Size] | None = Field(
        None,
        max_length=16,
        description="The shape that the model itself has, where it differs from what clients see in dims: as many "
        "elements, [] for none but the batch dimension. Default: as dims.",
    )
    shape_tensor: bool = Field(False, description="True: the tensor holds a shape; TensorRT only. Default: false.")
    non_linear_format: bool = Field(
        False,
        description="True: the engine keeps the tensor in a format that isn't linear; TensorRT only, with dims of 3 "
        "sizes. Default: false.",
    )


class InputTensor(Tensor):
    """One input of a model."""

    rules = (
        *Tensor.rules,
        Rule(
            "tensorFormat",
            "self.tensorFormat == 'None' || self.dims.size() == 3",
            "needs dims of 3 sizes; correct dims or remove tensorFormat",
            lambda tensor: tensor.tensor_format == "None" or len(tensor.dims) == 3,  # noqa: PLR2004 - as in CEL
        ),
    )

    optional: bool = Field(False, description="True: a request may come without it. Default: false.")
    ragged_batch: bool = Field(
        False,
        description="True: requests of different shapes form one batch, their elements one after another; the model "
        "must be made for it. Default: false.",
    )
    tensor_format: Literal["None", "NHWC", "NCHW"] = Field(
        "None",
        description="The order of an image's dims: NHWC (channels last) or NCHW. Default: None, which says none.",
    )


class OutputTensor(Tensor):
    """One output of a model."""

    label_file: RelativePath | None = Field(
        None,
        description="A file of the model's folder, beside the versions, that names one class a line for clients that "
        "ask for a classification. Default: none.",
    )
