"""The classifier's 214 scores → the name of the likeliest type and its score. The names lie beside the versions."""

from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        folder = Path(args["model_repository"])
        self.names = np.array((folder / "labels.txt").read_text().split(), dtype=np.object_)

    def execute(self, requests: list[Any]) -> list[Any]:
        responses = []
        for request in requests:
            scores = pb_utils.get_input_tensor_by_name(request, "scores").as_numpy()
            best = scores.argmax(axis=1)
            label = pb_utils.Tensor("label", self.names[best].reshape(-1, 1))
            score = pb_utils.Tensor("score", scores.max(axis=1).reshape(-1, 1).astype(np.float32))
            responses.append(pb_utils.InferenceResponse([label, score]))
        return responses
