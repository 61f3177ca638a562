"""config.pbtxt files in every style that Triton's documentation shows, restated, and what each becomes in a spec."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Style:
    """One configuration; `becomes` are fields of the model's spec, `differs` what can't be carried."""

    name: str
    text: str | None
    becomes: dict[str, Any]
    files: tuple[str, ...] = ("model.onnx",)
    beside: tuple[str, ...] = ()
    differs: tuple[str, ...] = field(default=())
    lacks: tuple[str, ...] = field(default=())
    """Fields that say no more than the default and so aren't written."""


PAIR = """
input [ { name: "x" data_type: TYPE_FP32 dims: [ 16 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 16 ] } ]
"""
X = {"name": "x", "dataType": "FP32", "dims": [16]}
Y = {"name": "y", "dataType": "FP32", "dims": [16]}

ACCELERATOR = "optimization.execution_accelerators.gpu_execution_accelerator[0]"

STYLES = [
    # --- the least, and what a configuration is made of
    Style("nothing but an ONNX file", None, {"format": "ONNX"}),
    Style("an empty file beside a plan", "", {"format": "TensorRT"}, ("model.plan",)),
    Style("a file of another name and no word of it", None, {"format": "ONNX", "file": "net.onnx"}, ("net.onnx",)),
    Style("OpenVINO's pair of files", None, {"format": "OpenVINO"}, ("model.bin", "model.xml")),
    Style("a TensorFlow folder", None, {"format": "TensorFlow"}, ("model.savedmodel",)),
    Style("files that say nothing", None, {"format": "Auto"}, ("weights", "notes.txt")),
    Style(
        "two inputs, one output, an old platform",
        'platform: "tensorrt_plan"\nmax_batch_size: 8\n'
        'input [\n  { name: "left" data_type: TYPE_FP32 dims: [ 16 ] },\n'
        '  { name: "right" data_type: TYPE_FP32 dims: [ 16 ] }\n]\n'
        'output [ { name: "sum" data_type: TYPE_FP32 dims: [ 16 ] } ]',
        {"format": "TensorRT", "maxBatchSize": 8,
         "inputs": [{"name": "left", "dataType": "FP32", "dims": [16]},
                    {"name": "right", "dataType": "FP32", "dims": [16]}]},
        ("model.plan",),
    ),
    Style(
        "repeated messages without brackets, commas and colons here and there, tabs, comments",
        'name: "model"  # as the folder\nbackend: "onnxruntime";\nmax_batch_size : 4,\n'
        "input {\n\tname: 'x', data_type: TYPE_FP32, dims: 16\n}\n"
        "output: { name: 'y' data_type: TYPE_FP32 dims: [16] }",
        {"format": "ONNX", "maxBatchSize": 4, "inputs": [X], "outputs": [Y]},
    ),
    Style("a name that isn't the folder's", 'name: "old"\nbackend: "onnxruntime"', {"format": "ONNX"},
          differs=("name",)),
    Style("PyTorch's names by position",
          'backend: "pytorch"\ninput [ { name: "INPUT__0" data_type: TYPE_INT64 dims: [ -1, 2 ] } ]\n'
          'output [ { name: "OUTPUT__0" data_type: TYPE_FP16 dims: [ -1 ] } ]\n'
          'parameters: { key: "DISABLE_OPTIMIZED_EXECUTION" value: { string_value: "true" } }',
          {"format": "PyTorch", "parameters": {"DISABLE_OPTIMIZED_EXECUTION": "true"},
           "outputs": [{"name": "OUTPUT__0", "dataType": "FP16", "dims": [-1]}]}, ("model.pt",)),
    Style("a platform of PyTorch",
          'platform: "pytorch_libtorch"\ninput { name: "x" data_type: TYPE_FP32 dims: 1 }\n'
          'output { name: "y" data_type: TYPE_FP32 dims: 1 }', {"format": "PyTorch"}, ("model.pt",)),
    Style("PyTorch's Python runtime, which finds its class by itself",
          'backend: "pytorch"\nruntime: "model.py"\ninput { name: "x" data_type: TYPE_FP32 dims: 1 }\n'
          'output { name: "y" data_type: TYPE_FP32 dims: 1 }',
          {"format": "PyTorch", "file": "model.py", "config": {"runtime": "model.py"}}, ("model.py",)),
    Style("a platform that no format stands for", 'platform: "torch_aoti"', {"format": "Auto"}, ("model.pt2",),
          differs=("platform",), lacks=("config",)),
    Style("a saved model", 'platform: "tensorflow_savedmodel"\nparameters { key: "TF_NUM_INTRA_THREADS" '
          'value { string_value: "2" } }', {"format": "TensorFlow"}, ("model.savedmodel",)),
    Style("a frozen graph, for which there is no format", 'platform: "tensorflow_graphdef"', {"format": "Auto"},
          ("model.graphdef",), differs=("platform",)),
    Style("OpenVINO", 'backend: "openvino"\ninstance_group [ { count: 2 kind: KIND_CPU } ]',
          {"format": "OpenVINO", "instances": {"count": 2}}, ("model.xml", "model.bin")),
    Style("Python with an environment of its own",
          'backend: "python"\n' + PAIR + 'instance_group [{ kind: KIND_CPU }]\nparameters: {\n'
          '  key: "EXECUTION_ENV_PATH",\n  value: {string_value: "$$TRITON_MODEL_DIRECTORY/env.tar.gz"}\n}\n'
          'parameters: { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value: {string_value:"no"}}',
          {"format": "Python", "instances": {"kind": "CPU"},
           "parameters": {"EXECUTION_ENV_PATH": "$$TRITON_MODEL_DIRECTORY/env.tar.gz",
                          "FORCE_CPU_ONLY_INPUT_TENSORS": "no"}}, ("model.py",)),
    Style("an environment from elsewhere on the machine", 'backend: "python"\nparameters: { key: "EXECUTION_ENV_PATH" '
          'value: { string_value: "/opt/env.tar.gz" } }', {"format": "Python"}, ("model.py",),
          differs=('parameters["EXECUTION_ENV_PATH"]',)),
    Style("DALI", 'backend: "dali"\nmax_batch_size: 256\ninput [ { name: "encoded" data_type: TYPE_UINT8 dims: '
          '[ -1 ] } ]\n'
          'output [ { name: "image" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] } ]\n'
          'parameters: [ { key: "num_threads" value: { string_value: "12" } } ]',
          {"format": "DALI", "maxBatchSize": 256, "parameters": {"num_threads": "12"}}, ("model.dali",)),
    Style("vLLM", 'backend: "vllm"\ninstance_group [\n  {\n    count: 1\n    kind: KIND_MODEL\n  }\n]',
          {"format": "vLLM"}, ("model.json",), lacks=("instances",)),
    Style("TensorRT-LLM in flight",
          'backend: "tensorrtllm"\nmax_batch_size: 64\nmodel_transaction_policy { decoupled: true }\n'
          "dynamic_batching { preferred_batch_size: [ 64 ] max_queue_delay_microseconds: 100 default_queue_policy: "
          "{ max_queue_size: 32 } }\n"
          'input [ { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true optional: true },\n'
          ' { name: "input_lengths" data_type: TYPE_INT32 dims: [ 1 ] reshape: { shape: [ ] } } ]\n'
          'output [ { name: "output_ids" data_type: TYPE_INT32 dims: [ -1, -1 ] } ]\n'
          "instance_group [ { count: 1 kind: KIND_CPU } ]\n"
          'parameters: { key: "gpt_model_type" value: { string_value: "inflight_fused_batching" } }\n'
          'parameters: { key: "executor_worker_path" value: { string_value: "/opt/tritonserver/backends/worker" } }',
          {"format": "TensorRTLLM", "decoupled": True, "queue": {"maxSize": 32},
           "batching": {"preferredSizes": [64], "maxQueueDelay": "0.1ms"},
           "inputs": [{"name": "input_ids", "dataType": "INT32", "dims": [-1], "optional": True, "raggedBatch": True},
                      {"name": "input_lengths", "dataType": "INT32", "dims": [1], "reshape": []}]},
          ("rank0.engine", "config.json")),
    Style("a backend that Conch has no format for",
          'backend: "fil"\nmax_batch_size: 32768\n' + PAIR + 'parameters [ { key: "model_type" value: { string_value: '
          '"xgboost_json" } } ]', {"format": "Auto", "maxBatchSize": 32768, "config": {"backend": "fil"}},
          ("xgboost.json",)),
    # --- tensors
    Style("reshape to nothing, and of sizes that vary",
          'backend: "onnxruntime"\nmax_batch_size: 4\n'
          'input [ { name: "a" data_type: TYPE_FP32 dims: [ 1 ] reshape: { shape: [ ] } },\n'
          '        { name: "b" data_type: TYPE_FP32 dims: [ 4, -1 ] reshape { shape: [ 2, 2, -1 ] } } ]',
          {"inputs": [{"name": "a", "dataType": "FP32", "dims": [1], "reshape": []},
                      {"name": "b", "dataType": "FP32", "dims": [4, -1], "reshape": [2, 2, -1]}]}),
    Style("an image's order, an optional input, labels",
          'backend: "onnxruntime"\ninput [ { name: "x" format: FORMAT_NHWC data_type: TYPE_UINT8 dims: [ 8, 8, 3 ] },\n'
          '{ name: "hint" data_type: TYPE_STRING dims: [ 1 ] optional: true } ]\n'
          'output [ { name: "y" data_type: TYPE_BF16 dims: [ 10 ] label_filename: "labels.txt" } ]',
          {"inputs": [{"name": "x", "dataType": "UINT8", "dims": [8, 8, 3], "tensorFormat": "NHWC"},
                      {"name": "hint", "dataType": "STRING", "dims": [1], "optional": True}],
           "outputs": [{"name": "y", "dataType": "BF16", "dims": [10], "labelFile": "labels.txt"}]},
          beside=("labels.txt",)),
    Style("a shape tensor", 'backend: "tensorrt"\nmax_batch_size: 8\ninput [ { name: "size" data_type: TYPE_INT32 '
          "dims: [ 2 ] is_shape_tensor: true } ]",
          {"inputs": [{"name": "size", "dataType": "INT32", "dims": [2], "shapeTensor": True}]}, ("model.plan",)),
    Style("ragged batches with their counts",
          'backend: "onnxruntime"\nmax_batch_size: 16\ndynamic_batching { }\n'
          'input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true } ]\n'
          'batch_input [ { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "index" data_type: TYPE_FP32 '
          'source_input: "x" } ]',
          {"batching": {}, "inputs": [{"name": "x", "dataType": "FP32", "dims": [-1], "raggedBatch": True}],
           "config": {"batch_input": [{"kind": "BATCH_ACCUMULATED_ELEMENT_COUNT", "target_name": ["index"],
                                       "data_type": "TYPE_FP32", "source_input": ["x"]}]}}),
    # --- scheduling
    Style("batching as it comes", 'backend: "onnxruntime"\nmax_batch_size: 8\ndynamic_batching { }',
          {"maxBatchSize": 8, "batching": {}}),
    Style("batching with priorities and a queue for each",
          'backend: "onnxruntime"\nmax_batch_size: 8\ndynamic_batching {\n  preferred_batch_size: [ 4, 8 ]\n'
          "  max_queue_delay_microseconds: 100\n  priority_levels: 2\n  default_priority_level: 1\n"
          "  default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 100000 "
          "allow_timeout_override: true max_queue_size: 128 }\n"
          "  priority_queue_policy { key: 2 value { timeout_action: REJECT max_queue_size: 16 } }\n}",
          {"batching": {"preferredSizes": [4, 8], "maxQueueDelay": "0.1ms", "priorityLevels": 2, "defaultPriority": 1},
           "queue": {"maxSize": 128, "timeout": "100ms", "timeoutAction": "Delay", "allowTimeoutOverride": True,
                     "levels": [{"priority": 2, "maxSize": 16}]}}),
    Style("answers in order", 'backend: "onnxruntime"\nmax_batch_size: 8\ndynamic_batching { preserve_ordering: true }',
          {"batching": {"preserveOrdering": True}}),
    Style("a preferred size beyond the largest batch", 'backend: "onnxruntime"\nmax_batch_size: 8\n'
          "dynamic_batching { preferred_batch_size: [ 4, 16 ] }", {"batching": {"preferredSizes": [4]}},
          differs=("dynamic_batching.preferred_batch_size",)),
    Style("a queue shorter than the autoscaler's target", 'backend: "onnxruntime"\nmax_batch_size: 1\n'
          "dynamic_batching { default_queue_policy { max_queue_size: 2 } }", {"queue": {"maxSize": 2}}),
    Style("sequences, direct, with all controls",
          'backend: "onnxruntime"\nmax_batch_size: 2\nsequence_batching {\n  max_sequence_idle_microseconds: 5000000\n'
          "  direct { max_queue_delay_microseconds: 2000 minimum_slot_utilization: 0.5 }\n  control_input [\n"
          '    { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] },\n'
          '    { name: "END" control [ { kind: CONTROL_SEQUENCE_END bool_false_true: [ false, true ] } ] },\n'
          '    { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } ] },\n'
          '    { name: "ID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } ] }\n  ]\n}',
          {"sequence": {"idleTimeout": "5s", "maxQueueDelay": "2ms", "minimumSlotUtilization": 0.5, "controls": [
              {"tensor": "START", "kind": "Start", "dataType": "FP32"},
              {"tensor": "END", "kind": "End", "dataType": "BOOL"},
              {"tensor": "READY", "kind": "Ready"},
              {"tensor": "ID", "kind": "CorrelationID", "dataType": "STRING"}]}}),
    Style("sequences, oldest first", 'backend: "python"\nmax_batch_size: 4\nsequence_batching { oldest {\n'
          "max_candidate_sequences: 8 preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 500 "
          "preserve_ordering: true } }",
          {"sequence": {"strategy": "Oldest", "maxQueueDelay": "0.5ms", "maxCandidates": 8, "preferredSizes": [2, 4],
                        "preserveOrdering": True}}, ("model.py",)),
    Style("a warm-up of a sequence, with what its batcher fills in for clients",
          'backend: "onnxruntime"\nmax_batch_size: 2\ninput { name: "x" data_type: TYPE_STRING dims: 1 }\n'
          'sequence_batching { control_input { name: "START" control { kind: CONTROL_SEQUENCE_START '
          "int32_false_true: [ 0, 1 ] } } }\n"
          'model_warmup { name: "a sequence sample" batch_size: 2\n'
          '  inputs { key: "x" value { data_type: TYPE_STRING dims: 1 random_data: true } }\n'
          '  inputs { key: "START" value { data_type: TYPE_INT32 dims: 1 zero_data: true } } }',
          {"sequence": {"controls": [{"tensor": "START", "kind": "Start"}]},
           "warmup": [{"name": "a sequence sample", "batchSize": 2, "inputs": [
               {"name": "START", "dataType": "INT32", "dims": [1]},
               {"name": "x", "dataType": "STRING", "dims": [1]}]}]}),
    Style("copies on the CPU without a number, of which Triton starts two for ONNX",
          'backend: "onnxruntime"\ninstance_group { kind: KIND_CPU }', {"instances": {"count": 2, "kind": "CPU"}}),
    Style("copies on the CPU without a number, of which there is one for Python",
          'backend: "python"\ninstance_group { kind: KIND_CPU }', {"instances": {"kind": "CPU"}}, ("model.py",)),
    Style("state that Triton keeps",
          'backend: "onnxruntime"\nsequence_batching {\n  state [ { input_name: "in_state" output_name: "out_state" '
          "data_type: TYPE_INT32 dims: [ -1 ] use_same_buffer_for_input_output: true\n"
          '    initial_state: { name: "initial state" data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } },\n'
          '  { input_name: "in_2" output_name: "out_2" data_type: TYPE_FP32 dims: [ 4 ]\n'
          '    initial_state: { name: "saved" data_type: TYPE_FP32 dims: [ 4 ] data_file: "start" } } ]\n}',
          {"sequence": {"states": [
              {"inputName": "in_state", "outputName": "out_state", "dataType": "INT32", "dims": [-1],
               "initial": [{"name": "initial state", "dataType": "INT32", "dims": [1]}], "sameBuffer": True},
              {"inputName": "in_2", "outputName": "out_2", "dataType": "FP32", "dims": [4],
               "initial": [{"name": "saved", "dataType": "FP32", "dims": [4], "data": "File", "file": "start"}]}]}},
          beside=("initial_state/start",)),
    Style("a request that is scheduled again and again", 'backend: "python"\nsequence_batching { '
          'iterative_sequence: true }\n'
          "model_transaction_policy { decoupled: true }", {"sequence": {"iterative": True}, "decoupled": True},
          ("model.py",)),
    Style("decoupled answers", 'backend: "python"\nmodel_transaction_policy { decoupled: True }', {"decoupled": True},
          ("model.py",)),
    # --- instances
    Style("groups on the first GPU, on two others, and on the CPU",
          'backend: "onnxruntime"\ninstance_group [\n  { count: 1 kind: KIND_GPU gpus: [ 0 ] },\n'
          '  { count: 2 kind: KIND_GPU gpus: [ 1, 2 ] name: "wide" passive: true },\n  { count: 4 kind: KIND_CPU }\n]',
          {"instanceGroups": [{"name": "model_0", "kind": "GPU", "gpus": [0]},
                              {"name": "wide", "count": 2, "kind": "GPU", "gpus": [1, 2], "passive": True},
                              {"name": "model_2", "count": 4, "kind": "CPU"}]}),
    Style("TensorRT's profiles", 'backend: "tensorrt"\ninstance_group [ { kind: KIND_GPU profile: [ "0", "2" ] } ]',
          {"instances": {"kind": "GPU", "profiles": ["0", "2"]}}, ("model.plan",)),
    Style("a host policy", 'backend: "onnxruntime"\ninstance_group [ { count: 2 kind: KIND_CPU host_policy: '
          '"numa_0" } ]',
          {"instances": {"count": 2, "kind": "CPU"}}, differs=("instance_group[0].host_policy",)),
    Style("the rate limiter",
          'backend: "onnxruntime"\ninstance_group [ { kind: KIND_GPU gpus: [ 0 ] rate_limiter {\n'
          '  resources [ { name: "R1" count: 4 }, { name: "R2" global: true count: 2 } ]\n  priority: 2 } } ]',
          {"instances": {"kind": "GPU", "gpus": [0], "rateLimiter": {"priority": 2, "resources": [
              {"name": "R1", "count": 4}, {"name": "R2", "count": 2, "global": True}]}}}),
    # --- speed
    Style("ONNX by TensorRT",
          'backend: "onnxruntime"\noptimization { execution_accelerators {\n  gpu_execution_accelerator : [ {\n'
          '    name : "tensorrt"\n    parameters { key: "precision_mode" value: "FP16" }\n'
          '    parameters { key: "max_workspace_size_bytes" value: "1073741824" }\n'
          '    parameters { key: "trt_max_partition_iterations" value: "10" } }]\n}}',
          {"optimization": {"tensorRT": {"precision": "FP16", "workspace": "1Gi",
                                         "parameters": {"trt_max_partition_iterations": "10"}}}}),
    Style("ONNX by TensorRT, engines kept somewhere",
          'backend: "onnxruntime"\noptimization { execution_accelerators { gpu_execution_accelerator { '
          'name: "tensorrt" '
          'parameters { key: "trt_engine_cache_enable" value: "True" } '
          'parameters { key: "trt_engine_cache_path" value: "/srv/engines" } } } }',
          {"optimization": {"tensorRT": {"engineCache": True}}},
          differs=(f'{ACCELERATOR}.parameters["trt_engine_cache_path"]',)),
    Style("ONNX by OpenVINO", 'backend: "onnxruntime"\noptimization { execution_accelerators { '
          'cpu_execution_accelerator : '
          '[ { name : "openvino" } ] } }', {"optimization": {"openVINO": {}}}),
    Style("TensorFlow in mixed precision",
          'platform: "tensorflow_savedmodel"\noptimization { execution_accelerators { gpu_execution_accelerator : [ { '
          'name : "auto_mixed_precision" } ] } }',
          {"config": {"optimization": {"execution_accelerators": {
              "gpu_execution_accelerator": [{"name": "auto_mixed_precision"}]}}}}, ("model.savedmodel",)),
    Style("ONNX' own options", 'backend: "onnxruntime"\noptimization { graph : { level : 1 } }\n'
          'parameters { key: "intra_op_thread_count" value: { string_value: "1" } }',
          {"optimization": {"graphLevel": 1}, "parameters": {"intra_op_thread_count": "1"}}),
    Style("CUDA graphs with a lower bound",
          'platform: "tensorrt_plan"\nmax_batch_size: 8\noptimization { priority: PRIORITY_MAX cuda { graphs: true '
          'busy_wait_events: true output_copy_stream: true graph_spec [ { batch_size: 8 input { key: "x" value { dim: '
          '[ 16 ] } } graph_lower_bound { batch_size: 4 input { key: "x" value { dim: [ 8 ] } } } } ] } }',
          {"optimization": {"priority": "Max", "cudaGraphs": {
              "busyWait": True, "outputCopyStream": True, "specs": [
                  {"batchSize": 8, "inputs": [{"name": "x", "dims": [16]}],
                   "lowerBound": {"batchSize": 4, "inputs": [{"name": "x", "dims": [8]}]}}]}}}, ("model.plan",)),
    Style("no pinned memory, a gather kernel, eager batches",
          'backend: "onnxruntime"\noptimization { input_pinned_memory { enable: false } output_pinned_memory { enable: '
          "true } gather_kernel_buffer_threshold: 4 eager_batching: true }",
          {"optimization": {"pinnedMemory": {"input": False}, "gatherKernelBufferThreshold": 4,
                            "eagerBatching": True}}),
    Style("warm-up with zeros, random numbers and a file",
          'backend: "onnxruntime"\nmax_batch_size: 8\nmodel_warmup [ { name: "first" batch_size: 8 count: 2\n'
          '  inputs { key: "a" value { data_type: TYPE_FP32 dims: [ 4 ] zero_data: true } }\n'
          '  inputs { key: "b" value { data_type: TYPE_INT64 dims: [ 1 ] random_data: true } }\n'
          '  inputs { key: "c" value { data_type: TYPE_STRING dims: [ 1 ] input_data_file: "text" } } } ]',
          {"warmup": [{"name": "first", "batchSize": 8, "count": 2, "inputs": [
              {"name": "a", "dataType": "FP32", "dims": [4]},
              {"name": "b", "dataType": "INT64", "dims": [1], "data": "Random"},
              {"name": "c", "dataType": "STRING", "dims": [1], "data": "File", "file": "text"}]}]},
          beside=("warmup/text",)),
    # --- the rest
    Style("the response cache", 'backend: "onnxruntime"\nresponse_cache { enable: True }', {"responseCache": True}),
    Style("the newest two versions", 'backend: "onnxruntime"\nversion_policy: { latest: { num_versions: 2}}',
          {"versions": {"count": 2}}),
    Style("all versions", 'backend: "onnxruntime"\nversion_policy: { all { }}', {"versions": {"policy": "All"}}),
    Style("certain versions", 'backend: "onnxruntime"\nversion_policy: { specific: { versions: [1,3]}}',
          {"versions": {"policy": "Specific", "numbers": [1, 3]}}),
    Style("a file of another name", 'backend: "onnxruntime"\ndefault_model_filename: "net.onnx"', {"file": "net.onnx"},
          ("net.onnx",)),
    Style("files by compute capability",
          'backend: "tensorrt"\ncc_model_filenames [ { key: "7.5" value: "t4.plan" }, { key: "8.9" value: '
                '"l4.plan" } ]',
          {"config": {"cc_model_filenames": {"7.5": "t4.plan", "8.9": "l4.plan"}}}, ("model.plan",)),
    Style("metrics' tags and buckets",
          'backend: "onnxruntime"\nmetric_tags { key: "team" value: "vision" }\nmodel_metrics { metric_control: [ { '
          'metric_identifier: { family: "nv_inference_first_response_histogram_ms" } '
          "histogram_options: { buckets: [ 1, 2, 4 ] } } ] }",
          {"config": {"metric_tags": {"team": "vision"}, "model_metrics": {"metric_control": [
              {"metric_identifier": {"family": "nv_inference_first_response_histogram_ms"},
               "histogram_options": {"buckets": [1.0, 2.0, 4.0]}}]}}}),
    Style("a checksum agent", 'backend: "onnxruntime"\nmodel_repository_agents { agents [ { name: "checksum", '
          'parameters { '
          'key: "MD5:1/model.onnx", value: "0123456789abcdef0123456789abcdef" } } ] }',
          {"config": {"model_repository_agents": {"agents": [
              {"name": "checksum", "parameters": {"MD5:1/model.onnx": "0123456789abcdef0123456789abcdef"}}]}}}),
    Style("an agent that changes the model", 'backend: "onnxruntime"\nmodel_repository_agents { agents [ { name: '
          '"decrypt" } ] }', {}, differs=("model_repository_agents",)),
    Style("operators of one's own", 'backend: "onnxruntime"\nmodel_operations { op_library_filename: '
          '[ "ops/libmy.so" ] }',
          {"config": {"model_operations": {"op_library_filename": ["ops/libmy.so"]}}}, beside=("ops/libmy.so",)),
    Style("a parameter of several lines", 'backend: "python"\nparameters { key: "prompt" value { string_value: '
          '"a\\nb" } }\n'
          'parameters { key: "kept" value { string_value: "c" } }', {"parameters": {"kept": "c"}}, ("model.py",),
          differs=('parameters["prompt"]',)),
]  # fmt: skip
