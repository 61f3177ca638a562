"""Answers a number with that many responses: a decoupled model, as one that streams tokens is."""

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

MOST = 1000


class TritonPythonModel:
    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            start = int(pb_utils.get_input_tensor_by_name(request, "from").as_numpy().reshape(-1)[0])
            for number in range(min(start, MOST), 0, -1):
                answer = pb_utils.Tensor("number", np.array([number], np.int32))
                sender.send(pb_utils.InferenceResponse([answer]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
