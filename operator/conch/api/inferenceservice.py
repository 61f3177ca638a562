"""InferenceService: what a user writes and what Conch answers in its status. Pure; the source of its CRD."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field, ValidationError

from conch import names
from conch.api.fields import (
    RULE_ERROR,
    WIRE,
    Amount,
    Between,
    ByName,
    Duration,
    KeysMatch,
    Matches,
    Quantity,
    Resource,
    Rule,
    parse_quantity,
)

_LABEL_NAME: Final = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_SUBDOMAIN: Final = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?([.][a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
_LABEL_KEY: Final = f"({_SUBDOMAIN}/)?{_LABEL_NAME}"
_PATH: Final = r"(/[A-Za-z0-9._+=@~,-]+)+/?"
_PORT: Final = r"[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]"
_HOST: Final = rf"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:({_PORT}))?"
_DOTS: Final = r"(.*[/#])?[.][.]?(/.*)?"

_SCHEME: Final = r"(https|pvc|image)://.*"
_PVC: Final = rf"pvc://{_SUBDOMAIN}{_PATH}"
_IMAGE: Final = rf"image://[a-zA-Z0-9][a-zA-Z0-9._:/@-]*#({_PATH}|/)"
_HTTPS: Final = rf"https://{_HOST}(/[A-Za-z0-9._~!$&'()*+,;=:@%-]+)+"
_MODEL_FOLDER: Final = "$$TRITON_MODEL_DIRECTORY/"
# The Python backend unpacks and runs what this parameter names: it must come with the (digested) model.
_EXECUTION_ENVIRONMENT: Final = "EXECUTION_ENV_PATH"

ModelName = Annotated[
    str,
    Field(min_length=1, max_length=63),
    Matches(
        r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9_-])?",
        "must be letters, digits, '_', '.' and '-', begin with a letter or digit and not end with '.'",
    ),
]
# What tensor names of every framework fit in; no quotes, backslashes, braces or dollar signs.
TensorName = Annotated[
    str,
    Field(min_length=1, max_length=255),
    Matches(
        r"[A-Za-z0-9_][A-Za-z0-9_.:/\[\]-]*",
        "must be letters, digits and _ . : / [ ] -, and begin with a letter, digit or '_'",
    ),
]
LabelKey = Annotated[
    str,
    Field(max_length=317),
    Matches(f"({_LABEL_KEY})?", "must be a label key such as nvidia.com/gpu.product or pool"),
]
LabelValue = Annotated[
    str,
    Field(max_length=63),
    Matches(f"({_LABEL_NAME})?", "must be a label value: letters, digits, '-', '_' and '.', at most 63"),
]
ClassName = Annotated[
    str,
    Field(max_length=253),
    Matches(f"({_SUBDOMAIN})?", "must be a Kubernetes name: lower-case letters, digits, '-' and '.'"),
]

DataType = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "BF16", "FP32", "FP64", "STRING",
]  # fmt: skip
Format = Literal["ONNX", "Python"]


def _matches(field: str, pattern: str) -> str:
    return f"self.{field}.matches({json.dumps(f'^(?:{pattern})$')})"


def _full(pattern: str, value: str) -> bool:
    return re.fullmatch(pattern, value) is not None


class ModelSource(Resource):
    """Where a model comes from."""

    rules = (
        Rule(
            "uri",
            _matches("uri", _SCHEME),
            "scheme is not supported; use https, pvc or image",
            lambda source: _full(_SCHEME, source.uri),
            lambda source: f"scheme {shown(source.uri.partition(':')[0])} is not supported; use https, pvc or image",
        ),
        Rule(
            "uri",
            f"!self.uri.startsWith('pvc://') || {_matches('uri', _PVC)}",
            "must be pvc://CLAIM/PATH: the claim's name, then a path of letters, digits and . _ + = @ ~ , -",
            lambda source: not source.uri.startswith("pvc://") or _full(_PVC, source.uri),
        ),
        Rule(
            "uri",
            f"!self.uri.startsWith('image://') || {_matches('uri', _IMAGE)}",
            "must be image://REFERENCE#/PATH: an image reference, then the model's absolute path in the image",
            lambda source: not source.uri.startswith("image://") or _full(_IMAGE, source.uri),
        ),
        Rule(
            "uri",
            f"!self.uri.startsWith('https://') || {_matches('uri', _HTTPS)}",
            "must be https://HOST/PATH or https://HOST:PORT/PATH of a single file, without user, password, query or "
            "fragment",
            lambda source: not source.uri.startswith("https://") or _full(_HTTPS, source.uri),
        ),
        Rule(
            "uri",
            f"!{_matches('uri', _DOTS)}",
            "must not hold '.' or '..' as a part of the path; write the path that is meant",
            lambda source: not _full(_DOTS, source.uri),
        ),
        Rule(
            "digest",
            "!self.uri.startsWith('https://') || has(self.digest)",
            "is required for https; add digest: sha256:HEX, which sha256sum prints for the file",
            lambda source: not source.uri.startswith("https://") or source.digest is not None,
        ),
    )

    uri: str = Field(
        max_length=1024,
        description="Where the model is: pvc://CLAIM/PATH, image://REFERENCE#/PATH (an OCI image volume) or "
        "https://HOST/PATH (a single file, with a digest). A path names a model file, a directory that holds it, or a "
        "directory of numbered versions.",
    )
    digest: (
        Annotated[
            str,
            Field(max_length=80),
            Matches(
                "sha256:[0-9a-f]{64}", "must be sha256: and 64 lower-case hexadecimal digits, as sha256sum prints them"
            ),
        ]
        | None
    ) = Field(
        None,
        description="sha256:HEX of the file, or of the tree as `conch fetch` defines it. Verified before the model "
        "becomes visible to Triton. Required for https. Default: not verified.",
    )


class Tensor(Resource):
    """One input or output of a model."""

    rules = (
        Rule(
            "dims",
            "self.dims.all(size, size == -1 || size >= 1)",
            "must be sizes of 1 or more, or -1 for a size that varies; correct or remove the others",
            lambda tensor: all(size == -1 or size >= 1 for size in tensor.dims),
        ),
    )

    name: TensorName = Field(description="The tensor's name in the model.")
    data_type: DataType = Field(description="Triton's data type without its TYPE_ prefix, such as FP32.")
    dims: list[Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]] = Field(
        min_length=1,
        max_length=16,
        description="The shape without the batch dimension; -1 stands for a size that varies.",
    )


class Batching(Resource):
    """Triton's dynamic batching: requests that wait are answered together."""

    preferred_sizes: list[Annotated[int, Field(ge=1, le=65536)]] = Field(
        [], max_length=16, description="Batch sizes to prefer, each at most maxBatchSize. Default: none."
    )
    max_queue_delay: Annotated[Duration, Between("0s", "1m")] = Field(
        0.0, description="How long a request may wait for others to batch with, up to 1m. Default: 0ms."
    )


class QueuePolicy(Resource):
    """Limits of a model's queue inside Triton."""

    max_size: int | None = Field(
        None, ge=1, le=1_000_000, description="Requests that may wait; more are refused with 503. Default: no limit."
    )
    timeout: Annotated[Duration, Between("1ms", "24h")] | None = Field(
        None, description="A request that waited longer is refused; 1ms to 24h. Default: never."
    )


class Instances(Resource):
    """How many copies of a model run in one pod."""

    count: int = Field(1, ge=1, le=64, description="Copies of the model on each accelerator of the pod. Default: 1.")
    kind: Literal["GPU", "CPU"] | None = Field(
        None, description="Where the copies run. Default: GPU when accelerator.count is at least 1, else CPU."
    )


class Model(Resource):
    """One model of the service."""

    rules = (
        Rule(
            "maxBatchSize",
            "!has(self.batching) || (has(self.maxBatchSize) && self.maxBatchSize >= 1)",
            "must be 1 or more with batching; set maxBatchSize or remove batching",
            lambda model: model.batching is None or (model.max_batch_size or 0) >= 1,
        ),
        Rule(
            "queue",
            "!has(self.queue) || has(self.batching)",
            "needs batching, which holds Triton's queue; add batching: {} and maxBatchSize, or remove queue",
            lambda model: model.queue is None or model.batching is not None,
        ),
        Rule(
            "batching.preferredSizes",
            "!has(self.batching) || !has(self.batching.preferredSizes) || !has(self.maxBatchSize) || "
            "self.maxBatchSize < 1 || self.batching.preferredSizes.all(size, size <= self.maxBatchSize)",
            "must each be at most maxBatchSize; lower them or raise maxBatchSize",
            lambda model: (
                model.batching is None
                or not model.max_batch_size
                or all(size <= model.max_batch_size for size in model.batching.preferred_sizes)
            ),
        ),
        Rule(
            "parameters",
            f"!has(self.parameters) || !('{_EXECUTION_ENVIRONMENT}' in self.parameters) || "
            f"(self.parameters['{_EXECUTION_ENVIRONMENT}'].startsWith({json.dumps(_MODEL_FOLDER)}) && "
            f"!self.parameters['{_EXECUTION_ENVIRONMENT}'].contains('..'))",
            f"must hold an {_EXECUTION_ENVIRONMENT} that begins with {_MODEL_FOLDER} and has no '..'; ship the "
            "environment with the model",
            lambda model: _keeps_to_its_folder(model.parameters.get(_EXECUTION_ENVIRONMENT)),
        ),
    )

    name: ModelName = Field(description="The name that clients use.")
    source: ModelSource = Field(description="Where the model comes from.")
    format: Format = Field(description="What kind of model it is: ONNX or Python.")
    max_batch_size: int | None = Field(
        None,
        ge=0,
        le=65536,
        description="The largest batch that the model takes; 0: its tensors have no batch dimension. Default: what "
        "Triton finds in the model.",
    )
    inputs: Annotated[list[Tensor], ByName()] = Field(
        [], max_length=64, description="The inputs. Default: what Triton finds in the model."
    )
    outputs: Annotated[list[Tensor], ByName()] = Field(
        [], max_length=64, description="The outputs. Default: what Triton finds in the model."
    )
    batching: Batching | None = Field(
        None, description="Dynamic batching; needs maxBatchSize of 1 or more. Default: off."
    )
    queue: QueuePolicy | None = Field(
        None, description="Limits of the model's queue; needs batching. Default: no limits."
    )
    instances: Instances = Field(Instances(), description="Copies of the model in one pod.")
    parameters: Annotated[
        dict[
            str,
            Annotated[
                str,
                Field(max_length=1024),
                Matches(
                    r"[^\x00-\x1f\x7f-\x9f]*",
                    "must be a single line without control characters; remove tabs and line breaks",
                ),
            ],
        ],
        KeysMatch(
            r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,127}",
            "must have keys of letters, digits and _ . : / -, at most 128 characters; rename the key",
        ),
    ] = Field({}, max_length=64, description="Parameters handed to the backend as they are. Default: none.")


def _keeps_to_its_folder(path: str | None) -> bool:
    return path is None or (path.startswith(_MODEL_FOLDER) and ".." not in path)


class Runtime(Resource):
    """The Triton server."""

    image: (
        Annotated[
            str,
            Field(max_length=512),
            Matches(
                r"[A-Za-z0-9][A-Za-z0-9._:/@-]*",
                "must be an image reference such as nvcr.io/nvidia/tritonserver:26.10-py3",
            ),
        ]
        | None
    ) = Field(
        None,
        description="The Triton image. Default: the operator's setting; a new operator version changes it only "
        "together with the next change of this spec.",
    )
    shared_memory: Annotated[Quantity, Amount("1Mi", "64Ti", " (m stands for thousandths, Mi for mebibytes)")] = Field(
        "256Mi",
        description="Size of /dev/shm, which Python models use, in bytes; counts towards memory. Default: 256Mi.",
    )


class Accelerator(Resource):
    """The accelerators of one pod."""

    resource: Annotated[
        str,
        Field(max_length=253),
        Matches(
            f"{_SUBDOMAIN}/{_LABEL_NAME}",
            "must be an extended resource such as nvidia.com/gpu or nvidia.com/mig-1g.5gb",
        ),
    ] = Field("nvidia.com/gpu", description="The extended resource that the nodes offer. Default: nvidia.com/gpu.")
    count: int = Field(1, ge=0, le=16, description="Accelerators per pod; 0 serves on the CPU. Default: 1.")
    products: list[
        Annotated[
            str,
            Field(max_length=63),
            Matches(_LABEL_NAME, "must be a value of the node label nvidia.com/gpu.product, such as NVIDIA-L4"),
        ]
    ] = Field(
        [],
        max_length=16,
        description="Accept only nodes whose nvidia.com/gpu.product label is one of these. Default: any.",
    )


class Resources(Resource):
    """CPU and memory of the Triton container."""

    cpu: Annotated[Quantity, Amount("1m", "1k")] = Field(
        "1", description="CPU request, in cores; there is no CPU limit. Default: 1."
    )
    memory: Annotated[Quantity, Amount("1Mi", "64Ti", " (m stands for thousandths, Mi for mebibytes)")] = Field(
        "4Gi", description="Memory request and limit, in bytes, /dev/shm included. Default: 4Gi."
    )


class Toleration(Resource):
    """A taint that the pods tolerate, as in a Pod."""

    rules = (
        Rule(
            "value",
            "!has(self.value) || self.value == '' || self.operator == 'Equal'",
            "must be empty with operator Exists; remove it or use Equal",
            lambda toleration: not toleration.value or toleration.operator == "Equal",
        ),
        Rule(
            "key",
            "(has(self.key) && self.key != '') || self.operator == 'Exists'",
            "is required with operator Equal; set it, or use Exists to tolerate every taint",
            lambda toleration: bool(toleration.key) or toleration.operator == "Exists",
        ),
    )

    key: LabelKey = Field("", description="The taint's key; empty with Exists: every taint.")
    operator: Literal["Exists", "Equal"] = Field(
        "Equal", description="Equal compares the value, Exists doesn't. Default: Equal."
    )
    value: LabelValue = Field("", description="The taint's value.")
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = Field(
        "", description="The taint's effect. Default: every effect."
    )


class Placement(Resource):
    """Where the pods may run."""

    node_selector: Annotated[
        dict[str, LabelValue],
        KeysMatch(_LABEL_KEY, "must have label keys such as nvidia.com/gpu.product or pool; rename the key"),
    ] = Field({}, max_length=32, description="Labels that a node must have. Default: none.")
    tolerations: list[Toleration] = Field(
        [], max_length=32, description="Taints that the pods tolerate. Default: none."
    )
    topology_spread: Literal["Zone", "Node", "None"] = Field(
        "Zone", description="What the pods spread over, as far as there is room. Default: Zone."
    )
    priority_class_name: ClassName = Field("", description="The pods' PriorityClass. Default: the cluster's.")
    runtime_class_name: ClassName = Field("", description="The pods' RuntimeClass. Default: the cluster's.")


class QueueDepth(Resource):
    """Scaling on waiting requests."""

    target: float = Field(
        8,
        gt=0,
        le=1_000_000,
        description="Requests that may wait per model and ready replica; below every queue.maxSize. Default: 8.",
    )


class GpuMemory(Resource):
    """Scaling on accelerator memory."""

    max: int = Field(
        90,
        ge=1,
        le=100,
        description="Percent of accelerator memory above which a replica is added where memory grows with load, and "
        "that the survivors of a scale-down must stay below. Never read as idleness. Default: 90.",
    )


class Capacity(Resource):
    """What one replica serves."""

    per_replica: float | None = Field(
        None, gt=0, le=1_000_000_000, description="Requests per second within the objective. Default: unknown."
    )


class ScaleDown(Resource):
    """How replicas are taken away."""

    hold: Annotated[Duration, Between("1s", "24h")] = Field(
        300.0, description="How long fewer replicas must suffice before one goes, 1s to 24h. Default: 5m."
    )


class Scaling(Resource):
    """How many replicas there are."""

    rules = (
        Rule(
            "minReplicas",
            "self.minReplicas <= self.maxReplicas",
            "must be at most maxReplicas; lower minReplicas or raise maxReplicas",
            lambda scaling: scaling.min_replicas <= scaling.max_replicas,
        ),
    )

    mode: Literal["Automatic", "Advisory", "External"] = Field(
        "Automatic",
        description="Automatic writes replicas; Advisory only says in status what it would do; External leaves "
        "replicas to another scaler. Default: Automatic.",
    )
    min_replicas: int = Field(1, ge=1, le=1000, description="The fewest replicas, also without load. Default: 1.")
    max_replicas: int = Field(4, ge=1, le=1000, description="The most replicas. Default: 4.")
    queue_depth: QueueDepth = Field(QueueDepth(), description="Scaling on waiting requests.")
    gpu_memory: GpuMemory = Field(GpuMemory(), description="Scaling on accelerator memory.")
    capacity: Capacity = Field(Capacity(), description="What one replica serves.")
    startup: Annotated[Duration, Between("1s", "2h")] = Field(
        60.0,
        description="From ordering a replica to its readiness, image and model at hand, 1s to 2h. Sizes the startup "
        "probe. Default: 1m.",
    )
    scale_down: ScaleDown = Field(ScaleDown(), description="How replicas are taken away.")
    when_metrics_missing: Literal["Hold", "Floor"] = Field(
        "Hold",
        description="After 10 minutes without metrics: Hold keeps the replicas, Floor raises them to minReplicas "
        "and never lowers. Default: Hold.",
    )


class InferenceServiceSpec(Resource):
    """What a user wants."""

    rules = (
        Rule(
            "accelerator.count",
            "self.accelerator.count >= 1 || self.models.all(model, !has(model.instances) || "
            "!has(model.instances.kind) || model.instances.kind != 'GPU')",
            "must be 1 or more when a model has instances.kind GPU; raise it or use kind CPU",
            lambda spec: spec.accelerator.count >= 1 or all(model.instances.kind != "GPU" for model in spec.models),
        ),
        Rule(
            "runtime.sharedMemory",
            "quantity(string(self.runtime.sharedMemory)).isLessThan(quantity(string(self.resources.memory)))",
            "must be less than resources.memory, which it counts towards; lower it or raise the memory",
            lambda spec: _less(spec.runtime.shared_memory, spec.resources.memory),
        ),
        Rule(
            "scaling.queueDepth.target",
            "self.models.all(model, !has(model.queue) || !has(model.queue.maxSize) || "
            "self.scaling.queueDepth.target < double(model.queue.maxSize))",
            "must be below every model's queue.maxSize, or waiting requests can never reach it; lower the target or "
            "raise maxSize",
            lambda spec: all(
                model.queue is None
                or model.queue.max_size is None
                or spec.scaling.queue_depth.target < model.queue.max_size
                for model in spec.models
            ),
        ),
    )

    models: Annotated[list[Model], ByName()] = Field(
        min_length=1, max_length=16, description="The models that the service answers for, all in every pod."
    )
    runtime: Runtime = Field(Runtime(), description="The Triton server.")
    accelerator: Accelerator = Field(Accelerator(), description="The accelerators of one pod.")
    resources: Resources = Field(Resources(), description="CPU and memory of the Triton container.")
    placement: Placement = Field(Placement(), description="Where the pods may run.")
    scaling: Scaling = Field(Scaling(), description="How many replicas there are.")
    paused: bool = Field(
        False, description="True: Conch changes nothing of this service; what runs keeps running. Default: false."
    )


def _less(one: str, other: str) -> bool:
    return parse_quantity(one) < parse_quantity(other)


Text = Annotated[str, Field(max_length=1024)]
ShortText = Annotated[str, Field(max_length=253)]
Instant = Annotated[str, Field(max_length=40, json_schema_extra={"format": "date-time"})]


class ConditionStatus(Resource):
    """One condition, in kstatus' meaning."""

    type: ShortText = Field(description="What the condition is about, such as Ready.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    reason: ShortText = Field(description="Why, in one word for programs.")
    message: Text = Field("", description="Why, in a sentence, with the fix where there is one.")
    observed_generation: int | None = Field(None, description="The spec's generation that this is about.")
    last_transition_time: Instant = Field(description="When the status last changed.")


class ReplicasStatus(Resource):
    """Replicas as they are."""

    ready: int = Field(description="Replicas that answer requests.")
    wanted: int = Field(description="Replicas that are ordered.")
    summary: ShortText = Field(description="ready/wanted, such as 1/2.")


class WaitingReason(Resource):
    """Why pods wait for accelerators."""

    reason: ShortText = Field(description="Why, in one word.")
    message: Text = Field("", description="What the scheduler or the node says.")


class GpusStatus(Resource):
    """Accelerators asked for and free."""

    resource: ShortText = Field(description="The extended resource.")
    per_replica: int = Field(description="Accelerators per pod.")
    free: int | None = Field(None, description="Matching accelerators that nothing has requested; null: unknown.")
    waiting: list[WaitingReason] = Field([], max_length=16, description="Why pods wait; empty: none waits.")


class RolloutStatus(Resource):
    """How the last change is rolled out."""

    strategy: Literal["Surge", "Replace"] = Field(
        description="Surge starts a new pod before an old one stops; Replace stops one first."
    )
    reason: Text = Field(description="Why this way.")


class TermStatus(Resource):
    """One term of a scaling decision."""

    name: ShortText = Field(description="The term, such as queueDepth.")
    replicas: int | None = Field(None, description="The replicas that it asks for; null: unknown.")
    detail: Text = Field("", description="Its inputs, in words.")


class ScalingStatus(Resource):
    """The last scaling decision and its inputs."""

    decision: Literal["Up", "Down", "Hold"] | None = Field(None, description="What was decided.")
    replicas: int | None = Field(None, description="The replicas decided on.")
    term: ShortText | None = Field(None, description="The term that won.")
    rail: ShortText | None = Field(None, description="The rail that clipped it; absent: none.")
    message: Text | None = Field(None, description="The decision in a sentence.")
    terms: Annotated[list[TermStatus], ByName()] = Field([], max_length=16, description="What each term asks for.")
    waiting: float | None = Field(None, description="Requests waiting in all replicas; null: unknown.")
    quality: ShortText | None = Field(None, description="How good the metrics are, such as fresh or missing.")
    last_scale_up: Instant | None = Field(None, description="When replicas were last added.")
    last_scale_down: Instant | None = Field(None, description="When replicas were last taken away.")


class InferenceServiceStatus(Resource):
    """What Conch answers."""

    observed_generation: int | None = Field(None, description="The spec's generation that Conch has seen.")
    conditions: Annotated[
        list[ConditionStatus],
        Field(
            max_length=16,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ] = Field([], description="Ready, Reconciling and Stalled carry kstatus' meaning; the others say the rest.")
    replicas: ReplicasStatus | None = Field(None, description="Replicas as they are.")
    gpus: GpusStatus | None = Field(None, description="Accelerators asked for and free.")
    rollout: RolloutStatus | None = Field(None, description="How the last change is rolled out.")
    scaling: ScalingStatus | None = Field(None, description="The last scaling decision and its inputs.")


NAME_PATTERN: Final = r"[a-z]([a-z0-9-]*[a-z0-9])?"
NAME_CEL: Final = (
    f"self.metadata.name.size() <= {names.MAX_SERVICE_NAME} && "
    f"self.metadata.name.matches({json.dumps(f'^(?:{NAME_PATTERN})$')})"
)
NAME_MESSAGE: Final = (
    f"metadata.name must be at most {names.MAX_SERVICE_NAME} lower-case letters, digits and '-', begin with a letter "
    "and end with a letter or digit; rename the service"
)
"""The root's rule names its field itself: a fieldPath may not lead into metadata."""

_MAX_SHOWN: Final = 80
_MAX_PROBLEMS: Final = 50


class InvalidSpec(ValueError):
    """The resource can't be what the user wants; `problems` has one line for each finding, field and fix named."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


def parse_service(obj: Mapping[str, Any]) -> InferenceServiceSpec:
    """The spec of an InferenceService as a user or the API server has it; the same checks as the API server's.

    Raises:
        InvalidSpec: listing every problem as `spec.models[1].source.uri: … (got "…")`.
    """
    problems = _head_problems(obj)
    try:
        spec = InferenceServiceSpec.model_validate(
            _without_nulls(obj.get("spec", {})), by_alias=True, by_name=False, context={WIRE: True}
        )
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=True)
        problems += list(dict.fromkeys(_problem(finding) for finding in found[:_MAX_PROBLEMS]))
        more = error.error_count() - _MAX_PROBLEMS
        raise InvalidSpec(problems if more <= 0 else [*problems, f"and {more} more"]) from None
    if problems:
        raise InvalidSpec(problems)
    return spec


def shown(value: Any) -> str:
    """A value for a message: one line of JSON without control characters, at most 80 characters, no password."""
    text = json.dumps(value, ensure_ascii=True, default=str)
    text = re.sub(r"(://)[^/@\s]*@", r"\1…@", text)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"


def _head_problems(obj: Mapping[str, Any]) -> list[str]:
    problems = []
    for field, wanted in (("apiVersion", names.API_VERSION), ("kind", names.SERVICE_KIND)):
        # Entries of a LIST may come without both.
        if obj.get(field, wanted) != wanted:
            problems.append(f"{field}: must be {wanted} (got {shown(obj[field])})")
    metadata = obj.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if not isinstance(name, str) or len(name) > names.MAX_SERVICE_NAME or not _full(NAME_PATTERN, name):
        problems.append(f"metadata.name: {NAME_MESSAGE.removeprefix('metadata.name ')} (got {shown(name)})")
    return problems


def _without_nulls(value: Any) -> Any:
    """Drop null fields, as the API server does on create and update (server-side apply refuses some of them)."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    return value


def _problem(finding: Mapping[str, Any]) -> str:
    place = ["spec", *finding["loc"]]
    words = _words(finding, place)
    value = _plain(finding["input"])
    hidden = value is None or finding["type"] in {"missing", "extra_forbidden"}
    return f"{_path(place)}: {words}{'' if hidden else f' (got {shown(value)})'}"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)  # a whole number as its user wrote it
    return value.model_dump(mode="json", by_alias=True) if isinstance(value, BaseModel) else value


def _path(place: list[Any]) -> str:
    text = ""
    for part in place:
        if part == "[key]":
            continue
        if isinstance(part, int):
            text += f"[{part}]"
        elif _full(r"[A-Za-z][A-Za-z0-9]{0,62}", part):
            text += f".{part}"
        else:
            text += f"[{shown(part)}]"
    return text.removeprefix(".")


_LIMITS: Final = {
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "string_too_long": "must be at most {max_length} characters; shorten it",
    "string_too_short": "must not be empty; fill it in",
    "too_long": "must have at most {max_length} entries; remove some",
    "too_short": "must have at least {min_length} entry; add one",
    "int_type": "must be a whole number; write it without quotes",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "must be a smaller number",
    "float_type": "must be a number; write it without quotes",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false; write it without quotes",
    "string_type": "must be text; put it in quotes",
    "string_unicode": "must be valid Unicode text; remove the broken characters",
    "list_type": "must be a list; begin each entry with '- '",
    "dict_type": "must be a map of keys and values",
    "model_type": "must be an object with fields",
    "missing": "is required; add it",
}


@functools.cache
def _field_names() -> list[str]:
    """Every field name of the spec, for a hint at a misspelled one."""
    found, waiting = set(), [InferenceServiceSpec.model_json_schema(by_alias=True)]
    while waiting:
        part = waiting.pop()
        for key, value in part.items():
            if key == "properties":
                found.update(value)
            if isinstance(value, dict):
                waiting.append(value)
    return sorted(found)


def _words(finding: Mapping[str, Any], place: list[Any]) -> str:
    kind, context = finding["type"], finding.get("ctx", {})
    if kind == RULE_ERROR:
        return str(finding["msg"])
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        options = str(context["expected"]).replace("'', ", "").replace("'", "")
        return f"is not supported; use {options}"
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(str(place[-1])[:_MAX_SHOWN], _field_names(), n=1)
        return f"is not a field; {f'did you mean {near[0]}?' if near else 'remove it'}"
    return _LIMITS[kind].format(**context) if kind in _LIMITS else str(finding["msg"])
