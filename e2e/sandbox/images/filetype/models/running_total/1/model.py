"""The sum of all numbers that a sequence has sent so far: a model that needs every request of a sequence itself."""

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


def value(request: Any, name: str) -> Any:
    """The only number of a tensor."""
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)[0]


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        del args
        self.totals: dict[int, int] = {}

    def execute(self, requests: list[Any]) -> list[Any]:
        responses = []
        for request in requests:
            sequence = int(value(request, "sequence"))
            total = 0 if value(request, "start") else self.totals.get(sequence, 0)
            if value(request, "ready"):  # else the slot holds no request
                total += int(value(request, "number"))
            self.totals[sequence] = total
            if value(request, "end"):
                self.totals.pop(sequence)
            answer = pb_utils.Tensor("total", np.array([[total]], np.int32))
            responses.append(pb_utils.InferenceResponse([answer]))
        return responses
