"""A model of the spec → Triton's ModelConfig message → config.pbtxt. Pure.

The text is printed by protobuf from Triton's own message, so no string of a user is ever pasted into it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from conch.api.model import Format, Model, Tensor

# Triton fills in the platform (onnxruntime_onnx) from the backend.
_BACKENDS: Final[dict[Format, str]] = {"ONNX": "onnxruntime", "Python": "python"}
_FILE_NAMES: Final[dict[Format, str]] = {"ONNX": "model.onnx", "Python": "model.py"}
_US: Final = 1_000_000


def default_file_name(model_format: Format) -> str:
    """The file that Triton looks for in a version's folder."""
    return _FILE_NAMES[model_format]


def model_config(model: Model, *, gpu: bool) -> Any:
    """The `inference.ModelConfig` message of a model; `gpu`: whether the pod has accelerators.

    What the spec leaves out stays unset, so that Triton completes it from the model.
    """
    config = model_config_pb2.ModelConfig(
        name=model.name,
        backend=_BACKENDS[model.format],
        max_batch_size=model.max_batch_size or 0,
        input=[model_config_pb2.ModelInput(**_tensor(tensor)) for tensor in model.inputs],
        output=[model_config_pb2.ModelOutput(**_tensor(tensor)) for tensor in model.outputs],
        instance_group=[_instance_group(model, gpu=gpu)],
    )
    if model.batching is not None:
        config.dynamic_batching.CopyFrom(_dynamic_batching(model))
    for key, value in model.parameters.items():
        config.parameters[key].string_value = value
    return config


def to_pbtxt(message: Any) -> str:
    """The message in protobuf's text format, the same text for the same message in every process."""
    # ASCII only: Triton's parser reads escapes everywhere, and an invisible character can't hide in the file.
    return str(text_format.MessageToString(message, as_utf8=False))


def from_pbtxt(text: str) -> Any:
    """The message of a config.pbtxt; raises `google.protobuf.text_format.ParseError`."""
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def _tensor(tensor: Tensor) -> dict[str, Any]:
    data_type = model_config_pb2.DataType.Value(f"TYPE_{tensor.data_type}")
    dims: Sequence[int] = tensor.dims
    return {"name": tensor.name, "data_type": data_type, "dims": dims}


def _instance_group(model: Model, *, gpu: bool) -> Any:
    # Never KIND_AUTO: on a node whose driver has failed it would serve on the CPU, far slower and unnoticed.
    kind = model.instances.kind or ("GPU" if gpu else "CPU")
    group = model_config_pb2.ModelInstanceGroup
    return group(count=model.instances.count, kind=group.Kind.Value(f"KIND_{kind}"))


def _dynamic_batching(model: Model) -> Any:
    batching = model_config_pb2.ModelDynamicBatching()
    if model.batching is not None:
        batching.preferred_batch_size.extend(model.batching.preferred_sizes)
        batching.max_queue_delay_microseconds = round(model.batching.max_queue_delay * _US)
    if model.queue is not None:
        policy = batching.default_queue_policy
        policy.max_queue_size = model.queue.max_size or 0
        # Requests that waited too long are refused at once: nobody waits for them any more.
        policy.timeout_action = model_config_pb2.ModelQueuePolicy.TimeoutAction.REJECT
        policy.default_timeout_microseconds = round((model.queue.timeout or 0) * _US)
    return batching
