"""A model of the spec → Triton's ModelConfig message → config.pbtxt. Pure.

The text is printed by protobuf from Triton's own message, so no string of a user is ever pasted into it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from conch.api.fields import parse_quantity
from conch.triton import passthrough
from conch.triton.backends import BACKENDS, default_file_name

if TYPE_CHECKING:
    from conch.api.batching import QueueLimits
    from conch.api.instances import Instances
    from conch.api.model import Model
    from conch.api.optimization import GraphLowerBound, GraphSpec, Optimization
    from conch.api.sequence import Sequence, SequenceControl, SequenceState
    from conch.api.tensor import Tensor
    from conch.api.versions import Versions
    from conch.api.warmup import Warmup

__all__ = [
    "default_file_name",
    "extra_files",
    "file_name",
    "from_pbtxt",
    "model_config",
    "planned",
    "required_versions",
    "to_pbtxt",
]

_US: Final = 1_000_000
# Writable in the pod and kept while the pod lives; ONNX Runtime makes the folder, one level of it.
_ENGINES: Final = "/tmp/engines-"  # noqa: S108 - the pod's own
# Without it the vLLM backend reports no queue, and nothing could be scaled by it (vllm_backend README).
_VLLM_METRICS: Final = "REPORT_CUSTOM_METRICS"
_CONTROLS: Final = {
    "Start": "CONTROL_SEQUENCE_START",
    "End": "CONTROL_SEQUENCE_END",
    "Ready": "CONTROL_SEQUENCE_READY",
    "CorrelationID": "CONTROL_SEQUENCE_CORRID",
}


def model_config(model: Model, *, gpu: bool) -> Any:
    """The `inference.ModelConfig` message of a model; `gpu`: whether the pod has accelerators.

    What the spec leaves out stays unset, so that Triton completes it from the model.
    """
    backend = BACKENDS[model.format]
    config = pb.ModelConfig(
        name=model.name,
        platform=backend.platform,
        backend=backend.backend,
        max_batch_size=model.max_batch_size or 0,
        input=[pb.ModelInput(**_tensor(tensor), **_input(tensor)) for tensor in model.inputs],
        output=[pb.ModelOutput(**_tensor(tensor), label_filename=tensor.label_file or "") for tensor in model.outputs],
        instance_group=_instance_groups(model, gpu=gpu),
        model_warmup=[_warmup(model, warmup) for warmup in model.warmup],
        default_model_filename=model.file or "",
    )
    if model.batching is not None:
        config.dynamic_batching.CopyFrom(_dynamic_batching(model))
    if model.sequence is not None:
        config.sequence_batching.CopyFrom(_sequence_batching(model.sequence, model.max_batch_size or 0))
    if model.steps:
        config.ensemble_scheduling.step.extend(
            pb.ModelEnsembling.Step(
                model_name=step.model, model_version=step.version or -1, input_map=step.inputs, output_map=step.outputs
            )
            for step in model.steps
        )
    if model.decoupled:
        config.model_transaction_policy.decoupled = True
    if model.response_cache:
        config.response_cache.enable = True
    if model.optimization is not None:
        config.optimization.CopyFrom(_optimization(model.optimization, model.name))
    _version_policy(config, model.versions)
    parameters = {_VLLM_METRICS: "true"} if model.format == "vLLM" else {}
    for key, value in {**parameters, **model.parameters}.items():
        config.parameters[key].string_value = value
    if model.config:
        config.MergeFrom(passthrough.further_fields(model.config))
    return config


def to_pbtxt(message: Any) -> str:
    """The message in protobuf's text format, the same text for the same message in every process."""
    # ASCII only: Triton's parser reads escapes everywhere, and an invisible character can't hide in the file.
    return str(text_format.MessageToString(message, as_utf8=False))


def from_pbtxt(text: str) -> Any:
    """The message of a config.pbtxt; raises `google.protobuf.text_format.ParseError`."""
    return text_format.Parse(text, pb.ModelConfig())


def file_name(model: Model) -> str:
    """The file or folder that a version must hold; empty when the backend looks for none of a fixed name."""
    return model.file or default_file_name(model.format)


def planned(model: Model, *, gpu: bool) -> dict[str, Any]:
    """What `conch fetch` must find and write for a model, as fields of its plan."""
    expects = BACKENDS[model.format].expects
    return {
        "file_name": file_name(model) or None,
        "expects": "FileOrFolder" if expects == "Anything" and model.file is not None else expects,
        "versions": required_versions(model),
        "extra_files": extra_files(model),
        "config": to_pbtxt(model_config(model, gpu=gpu)),
    }


def required_versions(model: Model) -> tuple[int, ...]:
    """The numbered versions that the source must hold, because the spec names them; empty: any."""
    return tuple(model.versions.numbers)


def extra_files(model: Model) -> tuple[str, ...]:
    """Files that the configuration names, relative to the model's folder: without them Triton doesn't load it."""
    files = [tensor.label_file for tensor in model.outputs]
    files += [f"warmup/{tensor.file}" for warmup in model.warmup for tensor in warmup.inputs if tensor.file]
    if model.sequence is not None:
        files += [
            f"initial_state/{initial.file}"
            for state in model.sequence.states
            for initial in state.initial
            if initial.file
        ]
    return tuple(dict.fromkeys(file for file in files if file))


def _tensor(tensor: Tensor) -> dict[str, Any]:
    values: dict[str, Any] = {
        "name": tensor.name,
        "data_type": _type(tensor.data_type),
        "dims": tensor.dims,
        "is_shape_tensor": tensor.shape_tensor,
        "is_non_linear_format_io": tensor.non_linear_format,
    }
    if tensor.reshape is not None:
        values["reshape"] = pb.ModelTensorReshape(shape=tensor.reshape)
    return values


def _input(tensor: Any) -> dict[str, Any]:
    return {
        "optional": tensor.optional,
        "allow_ragged_batch": tensor.ragged_batch,
        "format": pb.ModelInput.Format.Value(f"FORMAT_{tensor.tensor_format.upper()}"),
    }


def _type(name: str) -> int:
    return int(pb.DataType.Value(f"TYPE_{name}"))


def _instance_groups(model: Model, *, gpu: bool) -> list[Any]:
    if model.format == "Ensemble":
        return []  # its steps' models have them
    if model.instance_groups:
        return [_instance_group(model, group, name=group.name, gpu=gpu) for group in model.instance_groups]
    return [_instance_group(model, model.instances, name="", gpu=gpu)]


def _instance_group(model: Model, group: Instances, *, name: str, gpu: bool) -> Any:
    # Never KIND_AUTO: on a node whose driver has failed it would serve on the CPU, far slower and unnoticed.
    kind = group.kind or BACKENDS[model.format].instance_kind or ("GPU" if gpu else "CPU")
    message = pb.ModelInstanceGroup(
        name=name,
        count=group.count,
        kind=pb.ModelInstanceGroup.Kind.Value(f"KIND_{kind.upper()}"),
        gpus=group.gpus,
        profile=group.profiles,
        passive=group.passive,
    )
    if group.rate_limiter is not None:
        message.rate_limiter.priority = group.rate_limiter.priority
        for resource in group.rate_limiter.resources:
            entry = message.rate_limiter.resources.add(name=resource.name, count=resource.count)
            setattr(entry, "global", resource.shared)
    return message


def _dynamic_batching(model: Model) -> Any:
    batching = pb.ModelDynamicBatching()
    if model.batching is not None:
        batching.preferred_batch_size.extend(model.batching.preferred_sizes)
        batching.max_queue_delay_microseconds = round(model.batching.max_queue_delay * _US)
        batching.preserve_ordering = model.batching.preserve_ordering
        levels = model.batching.priority_levels
        if levels is not None:
            batching.priority_levels = levels
            batching.default_priority_level = model.batching.default_priority or levels
    if model.queue is not None:
        batching.default_queue_policy.CopyFrom(_queue_policy(model.queue))
        for level in model.queue.levels:
            batching.priority_queue_policy[level.priority].CopyFrom(_queue_policy(level))
    return batching


def _queue_policy(limits: QueueLimits) -> Any:
    return pb.ModelQueuePolicy(
        timeout_action=pb.ModelQueuePolicy.TimeoutAction.Value(limits.timeout_action.upper()),
        default_timeout_microseconds=round((limits.timeout or 0) * _US),
        allow_timeout_override=limits.allow_timeout_override,
        max_queue_size=limits.max_size or 0,
    )


def _sequence_batching(sequence: Sequence, max_batch_size: int) -> Any:
    message = pb.ModelSequenceBatching(
        max_sequence_idle_microseconds=round(sequence.idle_timeout * _US),
        iterative_sequence=sequence.iterative,
        control_input=[
            pb.ModelSequenceBatching.ControlInput(name=control.tensor, control=[_control(control)])
            for control in sequence.controls
        ],
        state=[_state(state) for state in sequence.states],
    )
    delay = round(sequence.max_queue_delay * _US)
    if sequence.strategy == "Oldest":
        message.oldest.max_candidate_sequences = sequence.max_candidates or max(max_batch_size, 1)
        message.oldest.preferred_batch_size.extend(sequence.preferred_sizes)
        message.oldest.max_queue_delay_microseconds = delay
        message.oldest.preserve_ordering = sequence.preserve_ordering
    else:
        message.direct.max_queue_delay_microseconds = delay
        message.direct.minimum_slot_utilization = sequence.minimum_slot_utilization or 0.0
    return message


def _control(control: SequenceControl) -> Any:
    message = pb.ModelSequenceBatching.Control(
        kind=pb.ModelSequenceBatching.Control.Kind.Value(_CONTROLS[control.kind])
    )
    if control.kind == "CorrelationID":
        message.data_type = _type(_control_type(control))
        return message
    pair = control.false_true or [0.0, 1.0]
    if control.data_type == "FP32":
        message.fp32_false_true.extend(pair)
    elif control.data_type == "BOOL":
        message.bool_false_true.extend(bool(number) for number in pair)
    else:
        message.int32_false_true.extend(int(number) for number in pair)
    return message


def _control_type(control: SequenceControl) -> str:
    return control.data_type or ("UINT64" if control.kind == "CorrelationID" else "INT32")


def _state(state: SequenceState) -> Any:
    message = pb.ModelSequenceBatching.State(
        input_name=state.input_name,
        output_name=state.output_name,
        data_type=_type(state.data_type),
        dims=state.dims,
        use_same_buffer_for_input_output=state.same_buffer,
        use_growable_memory=state.growable_memory,
    )
    for initial in state.initial:
        entry = message.initial_state.add(name=initial.name, data_type=_type(initial.data_type), dims=initial.dims)
        if initial.file is not None:
            entry.data_file = initial.file
        else:
            entry.zero_data = True
    return message


def _warmup(model: Model, warmup: Warmup) -> Any:
    message = pb.ModelWarmup(name=warmup.name, batch_size=warmup.batch_size, count=warmup.count)
    for tensor in warmup.inputs:
        entry = message.inputs[tensor.name]
        entry.data_type = _type(tensor.data_type)
        entry.dims.extend(tensor.dims)
        if tensor.file is not None:
            entry.input_data_file = tensor.file
        elif tensor.data == "Random":
            entry.random_data = True
        else:
            entry.zero_data = True
    if not warmup.inputs:
        for own in model.inputs:
            if not own.optional:
                _made(message, own.name, own.data_type, own.dims, random=own.data_type != "STRING")
        # The warm-up passes the sequence batcher by, which fills these in for clients' requests.
        for control in model.sequence.controls if model.sequence is not None else ():
            _made(message, control.tensor, _control_type(control), [1])
        for state in model.sequence.states if model.sequence is not None else ():
            _made(message, state.input_name, state.data_type, state.dims)
    return message


def _made(warmup: Any, name: str, data_type: str, dims: list[int], *, random: bool = False) -> None:
    entry = warmup.inputs[name]
    entry.data_type = _type(data_type)
    entry.dims.extend(max(size, 1) for size in dims)
    setattr(entry, "random_data" if random else "zero_data", True)


def _optimization(optimization: Optimization, model_name: str) -> Any:
    message = pb.ModelOptimizationPolicy(
        priority=pb.ModelOptimizationPolicy.ModelPriority.Value(f"PRIORITY_{optimization.priority.upper()}"),
        gather_kernel_buffer_threshold=optimization.gather_kernel_buffer_threshold or 0,
        eager_batching=optimization.eager_batching,
    )
    if optimization.graph_level is not None:
        message.graph.level = optimization.graph_level
    # Triton turns both on where they are unset; saying so would show as a difference for nothing.
    if not optimization.pinned_memory.input:
        message.input_pinned_memory.enable = False
        message.input_pinned_memory.SetInParent()
    if not optimization.pinned_memory.output:
        message.output_pinned_memory.enable = False
        message.output_pinned_memory.SetInParent()
    graphs = optimization.cuda_graphs
    if graphs is not None:
        message.cuda.graphs = graphs.enabled
        message.cuda.busy_wait_events = graphs.busy_wait
        message.cuda.output_copy_stream = graphs.output_copy_stream
        message.cuda.graph_spec.extend(_graph_spec(spec) for spec in graphs.specs)
    accelerators = message.execution_accelerators
    if optimization.tensor_rt is not None:
        tensor_rt = optimization.tensor_rt
        parameters: dict[str, str] = {"precision_mode": tensor_rt.precision}
        if tensor_rt.workspace is not None:
            parameters["max_workspace_size_bytes"] = str(int(parse_quantity(tensor_rt.workspace)))
        if tensor_rt.engine_cache:
            parameters |= {"trt_engine_cache_enable": "true", "trt_engine_cache_path": f"{_ENGINES}{model_name}"}
        accelerators.gpu_execution_accelerator.add(name="tensorrt", parameters={**tensor_rt.parameters, **parameters})
    if optimization.open_vino is not None:
        accelerators.cpu_execution_accelerator.add(name="openvino", parameters=optimization.open_vino.parameters)
    return message


def _graph_spec(spec: GraphSpec) -> Any:
    message = pb.ModelOptimizationPolicy.Cuda.GraphSpec(batch_size=spec.batch_size)
    _graph_inputs(message.input, spec)
    if spec.lower_bound is not None:
        message.graph_lower_bound.batch_size = spec.lower_bound.batch_size
        _graph_inputs(message.graph_lower_bound.input, spec.lower_bound)
        message.graph_lower_bound.SetInParent()
    return message


def _graph_inputs(entries: Any, bound: GraphLowerBound) -> None:
    for tensor in bound.inputs:
        entries[tensor.name].dim.extend(tensor.dims)


def _version_policy(config: Any, versions: Versions) -> None:
    if versions.policy == "All":
        config.version_policy.all.SetInParent()
    elif versions.policy == "Specific":
        config.version_policy.specific.versions.extend(versions.numbers)
    elif (versions.count or 1) > 1:
        # Triton's own default is the latest one.
        config.version_policy.latest.num_versions = versions.count
