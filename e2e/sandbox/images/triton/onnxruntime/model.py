"""Triton's ONNX backend on the onnxruntime wheel: serves the config.pbtxt that production uses.

One parameter is the sandbox's own: `sandbox_compute_ms` makes each batch take that long without using the CPU, as an
accelerator would, so that two cores hold many replicas of known capacity while outputs stay real.
"""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils

TRITON_TYPES = {
    "tensor(float)": "TYPE_FP32",
    "tensor(double)": "TYPE_FP64",
    "tensor(float16)": "TYPE_FP16",
    "tensor(int8)": "TYPE_INT8",
    "tensor(int16)": "TYPE_INT16",
    "tensor(int32)": "TYPE_INT32",
    "tensor(int64)": "TYPE_INT64",
    "tensor(uint8)": "TYPE_UINT8",
    "tensor(uint16)": "TYPE_UINT16",
    "tensor(uint32)": "TYPE_UINT32",
    "tensor(uint64)": "TYPE_UINT64",
    "tensor(bool)": "TYPE_BOOL",
    "tensor(string)": "TYPE_STRING",
}


def open_model(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def find_model_file(roots: list[str]) -> Path | None:
    for root in roots:
        path = Path(root)
        if path.is_file() and path.suffix == ".onnx":
            return path
        candidates = sorted(path.glob("model.onnx")) + sorted(path.glob("*/model.onnx")) if path.is_dir() else []
        if candidates:
            return candidates[-1]
    return None


def described(tensors: list[Any], *, batched: bool) -> list[dict[str, Any]]:
    return [
        {
            "name": tensor.name,
            "data_type": TRITON_TYPES.get(tensor.type, "TYPE_INVALID"),
            "dims": [size if isinstance(size, int) and size >= 0 else -1 for size in tensor.shape][
                1 if batched else 0 :
            ],
        }
        for tensor in tensors
    ]


def refusal(config: dict[str, Any], network: Any) -> str:
    """What the C++ backend would refuse in the configuration's tensors, in its words; empty: nothing."""
    batched = int(config.get("max_batch_size", 0)) > 0
    for kind, found in (("input", network.get_inputs()), ("output", network.get_outputs())):
        known = {tensor["name"]: tensor for tensor in described(found, batched=False)}
        for entry in config[kind]:
            name = entry["name"]
            if name not in known:
                return f"unexpected inference {kind} '{name}', allowed {kind}s are: {', '.join(sorted(known))}"
            wanted = known[name]["data_type"]
            if entry["data_type"] != wanted:
                return f"unexpected datatype {entry['data_type']} for inference {kind} '{name}', expecting {wanted}"
            dims = [int(size) for size in (entry.get("reshape") or {}).get("shape", entry["dims"])]
            model, full = known[name]["dims"], [-1, *dims] if batched else dims
            if len(model) != len(full) or any(a not in (-1, b) for a, b in zip(model, full, strict=True)):
                given = f"shape {shape(full)}"
                if batched:
                    given = (
                        "an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, "
                        f"making complete {given}"
                    )
                return (
                    f"model '{config['name']}', tensor '{name}': the model expects {len(model)} dimensions (shape "
                    f"{shape(model)}) but the model configuration specifies {len(full)} dimensions ({given})"
                )
    return ""


def shape(dims: list[int]) -> str:
    return f"[{','.join(map(str, dims))}]"


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Fill in what config.pbtxt leaves out from the ONNX file itself."""
        config = auto_complete_model_config.as_dict()
        if config["input"] and config["output"]:
            return auto_complete_model_config
        # the stub gets the model's folder on its command line; the interface offers no other way to it here
        words = Path("/proc/self/cmdline").read_bytes().decode(errors="replace").split("\0")
        folders = [folder for word in words if word.startswith("/") for folder in (word, str(Path(word).parent))]
        found = find_model_file([folder for folder in folders if not folder.startswith("/opt/")])
        if found is None:
            return auto_complete_model_config
        network = open_model(found)
        shapes = [tensor.shape for tensor in network.get_inputs() + network.get_outputs()]
        free_batch = all(shape and not isinstance(shape[0], int) for shape in shapes)
        if config["max_batch_size"] == 0 and free_batch and not config["input"] and not config["output"]:
            auto_complete_model_config.set_max_batch_size(4)
            auto_complete_model_config.set_dynamic_batching()
        batched = auto_complete_model_config.as_dict()["max_batch_size"] > 0
        if not config["input"]:
            for tensor in described(network.get_inputs(), batched=batched):
                auto_complete_model_config.add_input(tensor)
        if not config["output"]:
            for tensor in described(network.get_outputs(), batched=batched):
                auto_complete_model_config.add_output(tensor)
        return auto_complete_model_config

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        folder = Path(args["model_repository"]) / args["model_version"]
        path = folder / (config.get("default_model_filename") or "model.onnx")
        if not path.is_file():
            raise pb_utils.TritonModelException(f"{path} is missing; put the ONNX file there")
        self.network = open_model(path)
        wrong = refusal(config, self.network)
        if wrong:
            raise pb_utils.TritonModelException(wrong)
        self.batched = int(config.get("max_batch_size", 0)) > 0
        parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        self.compute_s = float(parameters.get("sandbox_compute_ms", 0)) / 1000
        self.strings = {tensor.name for tensor in self.network.get_inputs() if tensor.type == "tensor(string)"}
        self.outputs = [entry["name"] for entry in config["output"]]

    def read(self, request: Any) -> dict[str, Any]:
        feeds: dict[str, Any] = {}
        for tensor in self.network.get_inputs():
            given = pb_utils.get_input_tensor_by_name(request, tensor.name)
            if given is None:
                continue
            array = given.as_numpy()
            if tensor.name in self.strings:
                array = np.vectorize(lambda item: item.decode() if isinstance(item, bytes) else item, otypes=[object])(
                    array
                )
            feeds[tensor.name] = array
        return feeds

    def run(self, feeds: dict[str, Any]) -> list[Any]:
        began = time.monotonic()
        results = self.network.run(self.outputs, feeds)
        rest = self.compute_s - (time.monotonic() - began)
        if rest > 0:
            time.sleep(rest)
        return list(results)

    def respond(self, arrays: list[Any]) -> Any:
        tensors = [
            pb_utils.Tensor(name, array.astype(object) if array.dtype.kind in "OU" else array)
            for name, array in zip(self.outputs, arrays, strict=True)
        ]
        return pb_utils.InferenceResponse(output_tensors=tensors)

    def execute(self, requests: list[Any]) -> list[Any]:
        """One run per batch that Triton formed; requests whose shapes differ form batches of their own."""
        responses: list[Any] = [None] * len(requests)
        groups: dict[Any, list[tuple[int, dict[str, Any]]]] = {}
        for index, request in enumerate(requests):
            feeds = self.read(request)
            key = tuple((name, array.shape[1:]) for name, array in feeds.items()) if self.batched else index
            groups.setdefault(key, []).append((index, feeds))
        for members in groups.values():
            try:
                joined = members[0][1]
                if len(members) > 1:
                    joined = {name: np.concatenate([feeds[name] for _, feeds in members]) for name in joined}
                results = self.run(joined)
                if len(members) == 1:
                    responses[members[0][0]] = self.respond(results)
                    continue
                row = 0
                for index, feeds in members:
                    size = next(iter(feeds.values())).shape[0]
                    responses[index] = self.respond([array[row : row + size] for array in results])
                    row += size
            except Exception as error:  # noqa: BLE001 (a bad request must not take the server down)
                for index, _ in members:
                    responses[index] = pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
        return responses
