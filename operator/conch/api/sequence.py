"""Sequence batching: requests that belong together reach one copy of a model. Pure; a part of the InferenceService."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from conch.api.batching import BatchSizes
from conch.api.fields import Between, ByName, Duration, Problem, Resource, Rule
from conch.api.tensor import FILE_WITH_DATA, DataType, FixedSize, Size, is_size
from conch.api.text import LogName, RelativePath, TensorName

_FLAG_TYPES: Final = ("INT32", "FP32", "BOOL")
_ID_TYPES: Final = ("UINT64", "INT64", "UINT32", "INT32", "STRING")
_PAIR: Final = 2


class SequenceControl(Resource):
    """A tensor by which Triton tells the model where in a sequence a request stands."""

    rules = (
        Rule(
            "dataType",
            "!has(self.dataType) || (self.kind == 'CorrelationID' ? "
            "self.dataType in ['UINT64', 'INT64', 'UINT32', 'INT32', 'STRING'] : "
            "self.dataType in ['INT32', 'FP32', 'BOOL'])",
            "must be INT32, FP32 or BOOL, or for kind CorrelationID UINT64, INT64, UINT32, INT32 or STRING",
            lambda control: (
                control.data_type is None
                or control.data_type in (_ID_TYPES if control.kind == "CorrelationID" else _FLAG_TYPES)
            ),
        ),
        Rule(
            "falseTrue",
            "!has(self.falseTrue) || self.falseTrue.size() == 0 || "
            "(self.falseTrue.size() == 2 && self.kind != 'CorrelationID')",
            "must be two numbers, for false and for true, and none for kind CorrelationID",
            lambda control: (
                not control.false_true or (len(control.false_true) == _PAIR and control.kind != "CorrelationID")
            ),
        ),
        Rule(
            "falseTrue",
            "!has(self.falseTrue) || (has(self.dataType) && self.dataType == 'FP32') || "
            "self.falseTrue.all(number, number == double(int(number)))",
            "must be whole numbers unless dataType is FP32; correct them or set dataType",
            lambda control: control.data_type == "FP32" or all(number.is_integer() for number in control.false_true),
        ),
        Rule(
            "falseTrue",
            "!has(self.falseTrue) || !has(self.dataType) || self.dataType != 'BOOL' || "
            "self.falseTrue.all(number, number == 0.0 || number == 1.0)",
            "must be 0 and 1 in either order with dataType BOOL; correct or remove them",
            lambda control: control.data_type != "BOOL" or all(number in {0, 1} for number in control.false_true),
        ),
    )

    tensor: TensorName = Field(description="The model's input that gets the control value.")
    kind: Literal["Start", "End", "Ready", "CorrelationID"] = Field(
        description="What the tensor says: the sequence's first request, its last one, whether the slot holds a "
        "request at all, or the sequence's ID."
    )
    data_type: DataType | None = Field(
        None,
        description="The tensor's data type: INT32, FP32 or BOOL, or for CorrelationID UINT64, INT64, UINT32, INT32 or "
        "STRING. Default: INT32, or UINT64 for CorrelationID.",
    )
    false_true: list[Annotated[float, Field(ge=-(2**31), le=2**31 - 1)]] = Field(
        [], max_length=_PAIR, description="The tensor's value for false, then for true. Default: 0 and 1."
    )


class InitialState(Resource):
    """What a state is before a sequence's first request."""

    rules = (FILE_WITH_DATA,)

    name: LogName = Field(description="A name for Triton's log.")
    data_type: DataType = Field(description="The data's type, the same as the state's.")
    dims: list[FixedSize] = Field(
        min_length=1, max_length=16, description="The data's shape without the batch dimension, every size known."
    )
    data: Literal["Zero", "File"] = Field("Zero", description="Zero, or the bytes of a file. Default: Zero.")
    file: RelativePath | None = Field(
        None, description="A file in the model's folder initial_state, in the tensor's raw bytes. Default: none."
    )


class SequenceState(Resource):
    """A tensor that Triton keeps between the requests of a sequence, so that the model needs no memory of its own."""

    rules = (
        Rule(
            "dims",
            "self.dims.all(size, size == -1 || size >= 1)",
            "must be sizes of 1 or more, or -1 for a size that varies; correct or remove the others",
            lambda state: all(is_size(size) for size in state.dims),
        ),
        Rule(
            "growableMemory",
            "!self.growableMemory || self.sameBuffer",
            "needs sameBuffer; set sameBuffer to true or remove growableMemory",
            lambda state: not state.growable_memory or state.same_buffer,
        ),
    )

    input_name: TensorName = Field(description="The model's input that gets the state.")
    output_name: TensorName = Field(description="The model's output that holds the next state.")
    data_type: DataType = Field(description="The state's data type.")
    dims: list[Size] = Field(
        min_length=1,
        max_length=16,
        description="The state's shape without the batch dimension; -1: a size that varies.",
    )
    initial: list[InitialState] = Field(
        [], max_length=1, description="The state before a sequence's first request, one at most. Default: not set."
    )
    same_buffer: bool = Field(
        False, description="True: the model reads and writes the state in one buffer. Default: false."
    )
    growable_memory: bool = Field(
        False, description="True: the state's memory grows with it, on a GPU; needs sameBuffer. Default: false."
    )


def _distinct_tensors(sequence: Sequence) -> Iterator[Problem]:
    """Controls and states each have a tensor of their own: two of them would write over each other."""
    seen: dict[str, str] = {}
    for index, control in enumerate(sequence.controls):
        if control.tensor in seen:
            words = f"is the tensor of {seen[control.tensor]} too; give each its own"
            yield Problem(("controls", index, "tensor"), words, control.tensor)
        seen.setdefault(control.tensor, f"controls[{index}]")
    outputs: dict[str, int] = {}
    for index, state in enumerate(sequence.states):
        if state.input_name in seen:
            words = f"is the tensor of {seen[state.input_name]} too; give each its own"
            yield Problem(("states", index, "inputName"), words, state.input_name)
        if state.output_name in outputs:
            words = f"is the output of states[{outputs[state.output_name]}] too; give each its own"
            yield Problem(("states", index, "outputName"), words, state.output_name)
        outputs.setdefault(state.output_name, index)
        for number, initial in enumerate(state.initial):
            place = ("states", index, "initial", number)
            if initial.data_type != state.data_type:
                yield Problem((*place, "dataType"), f"must be the state's, {state.data_type}", initial.data_type)
            if len(initial.dims) != len(state.dims) or any(
                wanted not in {-1, size} for wanted, size in zip(state.dims, initial.dims, strict=False)
            ):
                yield Problem((*place, "dims"), f"must fit the state's dims {state.dims}", initial.dims)


class Sequence(Resource):
    """Triton's sequence batching."""

    rules = (
        Rule(
            "minimumSlotUtilization",
            "!has(self.minimumSlotUtilization) || self.strategy == 'Direct'",
            "is of strategy Direct; set strategy: Direct or remove it",
            lambda sequence: sequence.minimum_slot_utilization is None or sequence.strategy == "Direct",
        ),
        Rule(
            "maxCandidates",
            "!has(self.maxCandidates) || self.strategy == 'Oldest'",
            "is of strategy Oldest; set strategy: Oldest or remove it",
            lambda sequence: sequence.max_candidates is None or sequence.strategy == "Oldest",
        ),
        Rule(
            "preferredSizes",
            "!has(self.preferredSizes) || self.preferredSizes.size() == 0 || self.strategy == 'Oldest'",
            "are of strategy Oldest; set strategy: Oldest or remove them",
            lambda sequence: not sequence.preferred_sizes or sequence.strategy == "Oldest",
        ),
        Rule(
            "preserveOrdering",
            "!self.preserveOrdering || self.strategy == 'Oldest'",
            "is of strategy Oldest; set strategy: Oldest or remove it",
            lambda sequence: not sequence.preserve_ordering or sequence.strategy == "Oldest",
        ),
    )
    checks: ClassVar[tuple[Callable[[Sequence], Iterator[Problem]], ...]] = (_distinct_tensors,)

    idle_timeout: Annotated[Duration, Between("1ms", "24h")] = Field(
        1.0,
        description="How long a sequence may send nothing before its slot goes to another one; 1ms to 24h. "
        "Default: 1s.",
    )
    strategy: Literal["Direct", "Oldest"] = Field(
        "Direct",
        description="Direct keeps a slot of the batch for each sequence; Oldest batches the oldest requests of many "
        "sequences. Default: Direct.",
    )
    max_queue_delay: Annotated[Duration, Between("0s", "1m")] = Field(
        0.0, description="How long a request may wait for others to batch with, up to 1m. Default: 0ms."
    )
    minimum_slot_utilization: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None,
        description="The share of slots that must hold a request before a batch goes ahead of maxQueueDelay, 0 to 1; "
        "strategy Direct. Default: 0.",
    )
    max_candidates: Annotated[int, Field(ge=1, le=65536)] | None = Field(
        None,
        description="How many sequences each copy of the model may have at once; strategy Oldest. Default: "
        "maxBatchSize, or 1.",
    )
    preferred_sizes: BatchSizes = Field(
        [], description="Batch sizes to prefer, each at most maxBatchSize; strategy Oldest. Default: none."
    )
    preserve_ordering: bool = Field(
        False,
        description="True: answers leave in the order in which their requests came; strategy Oldest. Default: false.",
    )
    iterative: bool = Field(
        False,
        description="True: a request may be executed several times, until the model says that it is done. "
        "Default: false.",
    )
    controls: Annotated[list[SequenceControl], ByName("kind")] = Field(
        [], max_length=4, description="Tensors that tell the model where a sequence stands. Default: none."
    )
    states: Annotated[list[SequenceState], ByName("inputName")] = Field(
        [], max_length=16, description="Tensors that Triton keeps between a sequence's requests. Default: none."
    )

    def filled_in(self) -> set[str]:
        """The model's inputs that Triton fills in itself, other than clients' requests."""
        return {control.tensor for control in self.controls} | {state.input_name for state in self.states}
