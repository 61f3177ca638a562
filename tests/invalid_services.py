"""Invalid InferenceServices, each with the words that name field and fix, and valid ones at the rules' edges."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from makers import SHA256, make_model, make_service, set_field

LONG = "x" * 10_000


@dataclass(frozen=True)
class Invalid:
    """One invalid service: a valid one with fields replaced."""

    name: str
    patch: dict[str, Any]
    """Dotted path → value; None removes."""
    says: tuple[str, ...]
    """Parts of the offline message: the field's path, and the fix."""
    server_says: tuple[str, ...] = field(default=())
    """Parts of the API server's message; empty: the same."""

    @property
    def server(self) -> tuple[str, ...]:
        """What the API server's message holds."""
        return self.server_says or self.says

    def service(self) -> dict[str, Any]:
        """The invalid resource."""
        service = make_service()
        for path, value in self.patch.items():
            set_field(service, path, value)
        return service


MODEL = "spec.models[0]"
BATCHED = {f"{MODEL}.maxBatchSize": 8, f"{MODEL}.batching": {}}
INPUT = {"name": "input", "dataType": "FP32", "dims": [3]}
DIGEST_WORDS = "must be sha256: and 64 lower-case hexadecimal digits, as sha256sum prints them"
DIMS_WORDS = "must be sizes of 1 or more, or -1 for a size that varies"
PVC_WORDS = "must be pvc://CLAIM/PATH"
IMAGE_WORDS = "must be image://REFERENCE#/PATH"
HTTPS_WORDS = "must be https://HOST/PATH or https://HOST:PORT/PATH of a single file"
DOTS_WORDS = "must not hold '.' or '..' as a part of the path"
NAME_WORDS = "must be at most 45 lower-case letters, digits and '-', begin with a letter"
MODEL_NAME_WORDS = "must be letters, digits, '_', '.' and '-', begin with a letter or digit"
TENSOR_NAME_WORDS = "must be letters, digits and _ . : / [ ] -"
LINE_WORDS = "must be a single line without control characters"
KEY_WORDS = "must have keys of letters, digits and _ . : / -"
ENV_WORDS = "must hold an EXECUTION_ENV_PATH that begins with $$TRITON_MODEL_DIRECTORY/"
DURATION_WORDS = "is not a duration; write a number and a unit"
QUANTITY_WORDS = "is not a quantity; write a number with an optional suffix"


def uri(name: str, value: str, *words: str) -> Invalid:
    return Invalid(name, {f"{MODEL}.source.uri": value}, (f"{MODEL}.source.uri", *words))


def bad_type(name: str, path: str, value: Any, words: str) -> Invalid:
    return Invalid(name, {path: value}, (path, words), (path, "must be of type"))


def duration(path: str, value: Any) -> Invalid:
    return Invalid(f"{path} {value!r} is no duration", {path: value}, (path, DURATION_WORDS), (path, "Invalid value"))


def quantity(path: str, value: Any) -> Invalid:
    return Invalid(f"{path} {value!r} is no quantity", {path: value}, (path, QUANTITY_WORDS), (path, "Invalid value"))


SHAPES = [
    Invalid("no spec", {"spec": None}, ("spec.models: is required",), ("spec: Required value",)),
    Invalid("no models", {"spec.models": None}, ("spec.models: is required",), ("spec.models: Required value",)),
    Invalid(
        "an empty list of models",
        {"spec.models": []},
        ("spec.models: must have at least 1 entry; add one",),
        ("spec.models", "should have at least 1 items"),
    ),
    Invalid(
        "seventeen models",
        {"spec.models": [make_model(name=f"m{n}") for n in range(17)]},
        ("spec.models: must have at most 16 entries",),
        ("spec.models: Too many: 17: must have at most 16 items",),
    ),
    Invalid("two models of one name", {"spec.models[1]": make_model()}, ("spec.models[1].name: is used twice",),
            ("spec.models[1]: Duplicate value",)),
    Invalid("a model without a source", {f"{MODEL}.source": None}, (f"{MODEL}.source: is required; add it",),
            (f"{MODEL}.source: Required value",)),
    Invalid("a source without a uri", {f"{MODEL}.source": {}}, (f"{MODEL}.source.uri: is required; add it",),
            (f"{MODEL}.source.uri: Required value",)),
    Invalid("a model without a name", {f"{MODEL}.name": None}, (f"{MODEL}.name: is required; add it",),
            (f"{MODEL}.name: Required value",)),
    Invalid("a model without a format", {f"{MODEL}.format": None}, (f"{MODEL}.format: is required; add it",),
            (f"{MODEL}.format: Required value",)),
    Invalid(
        "a misspelled field",
        {f"{MODEL}.maxBatchsize": 8},
        (f"{MODEL}.maxBatchsize: is not a field; did you mean maxBatchSize?",),
        ('unknown field "spec.models[0].maxBatchsize"',),
    ),
    Invalid(
        "a field in snake case",
        {f"{MODEL}.max_batch_size": 8},
        ("max_batch_size", "did you mean maxBatchSize?"),
        ('unknown field "spec.models[0].max_batch_size"',),
    ),
    Invalid(
        "replicas in the spec",
        {"spec.replicas": 3},
        ("spec.replicas: is not a field",),
        ('unknown field "spec.replicas"',),
    ),
    bad_type("models is a map", "spec.models", {}, "must be a list"),
    bad_type("paused is text", "spec.paused", "yes", "must be true or false; write it without quotes"),
    bad_type("a number in quotes", "spec.scaling.minReplicas", "2", "must be a whole number; write it without quotes"),
    bad_type("a fraction of a replica", "spec.scaling.minReplicas", 1.5, "must be a whole number"),
    bad_type("a number as a name", f"{MODEL}.name", 7, "must be text; put it in quotes"),
    bad_type("runtime is a list", "spec.runtime", [], "must be an object with fields"),
    bad_type("parameters is a list", f"{MODEL}.parameters", [], "must be a map of keys and values"),
    bad_type("a number as a parameter", f"{MODEL}.parameters.threads", 4, "must be text; put it in quotes"),
]  # fmt: skip

NAMES = [
    Invalid("a service name of 46 characters", {"metadata.name": "a" * 46}, ("metadata.name", NAME_WORDS)),
    Invalid("a service name that begins with a digit", {"metadata.name": "7z"}, ("metadata.name", NAME_WORDS)),
    Invalid("a service name with a dot", {"metadata.name": "a.b"}, ("metadata.name", NAME_WORDS)),
    Invalid("a service name in capitals", {"metadata.name": "Vision"}, ("metadata.name", NAME_WORDS),
            ("metadata.name", "RFC 1123")),
    Invalid("an empty model name", {f"{MODEL}.name": ""}, (f"{MODEL}.name: must not be empty; fill it in",),
            (f"{MODEL}.name", "should be at least 1 chars long")),
    Invalid("a model name with a slash", {f"{MODEL}.name": "a/b"}, (f"{MODEL}.name", MODEL_NAME_WORDS)),
    Invalid("a model name of two dots", {f"{MODEL}.name": ".."}, (f"{MODEL}.name", MODEL_NAME_WORDS)),
    Invalid("a model name that begins with a dash", {f"{MODEL}.name": "-x"}, (f"{MODEL}.name", MODEL_NAME_WORDS)),
    Invalid("a model name that ends with a dot", {f"{MODEL}.name": "x."}, (f"{MODEL}.name", MODEL_NAME_WORDS)),
    Invalid("a model name with a space", {f"{MODEL}.name": "a b"}, (f"{MODEL}.name", MODEL_NAME_WORDS)),
    Invalid("a model name of 64 characters", {f"{MODEL}.name": "x" * 64},
            (f"{MODEL}.name: must be at most 63 characters; shorten it",), (f"{MODEL}.name: Too long",)),
    Invalid("a model name with an accent", {f"{MODEL}.name": "modèle"}, (f"{MODEL}.name", MODEL_NAME_WORDS)),
]  # fmt: skip

SOURCES = [
    Invalid("an unknown format", {f"{MODEL}.format": "Caffe"},
            (f"{MODEL}.format: is not supported; use ONNX or Python",),
            (f'{MODEL}.format: Unsupported value: "Caffe": supported values: "ONNX", "Python"',)),
    Invalid("a format in lower case", {f"{MODEL}.format": "onnx"}, (f"{MODEL}.format: is not supported",),
            (f'{MODEL}.format: Unsupported value: "onnx"',)),
    Invalid(
        "a scheme that isn't supported",
        {f"{MODEL}.source.uri": "ftp://host/model.onnx"},
        (f'{MODEL}.source.uri: scheme "ftp" is not supported; use https, pvc or image',),
        (f"{MODEL}.source.uri", "scheme is not supported; use https, pvc or image"),
    ),
    Invalid(
        "a plain path",
        {f"{MODEL}.source.uri": "/models/resnet"},
        (f"{MODEL}.source.uri", "is not supported; use https, pvc or image"),
        (f"{MODEL}.source.uri", "scheme is not supported; use https, pvc or image"),
    ),
    Invalid(
        "http without encryption",
        {f"{MODEL}.source.uri": "http://host/model.onnx", f"{MODEL}.source.digest": SHA256},
        (f'{MODEL}.source.uri: scheme "http" is not supported',),
        (f"{MODEL}.source.uri", "scheme is not supported"),
    ),
    uri("a claim without a path", "pvc://models", PVC_WORDS),
    uri("a claim in capitals", "pvc://Models/resnet", PVC_WORDS),
    uri("a path with a space", "pvc://models/my model", PVC_WORDS),
    uri("a path that climbs", "pvc://models/a/../../etc", DOTS_WORDS),
    uri("a path that ends in two dots", "pvc://models/a/..", DOTS_WORDS),
    uri("an image without a path", "image://registry.example/models:1", IMAGE_WORDS),
    uri("an image with a relative path", "image://registry.example/models:1#model", IMAGE_WORDS),
    uri("an image path that climbs", "image://registry.example/models:1#/../etc", DOTS_WORDS),
    uri("https without a path", "https://host", HTTPS_WORDS),
    uri("https to a folder", "https://host/models/", HTTPS_WORDS),
    uri("https with a password", "https://user:secret@host/model.onnx", HTTPS_WORDS),
    uri("https with a signature", "https://host/model.onnx?sig=abc", HTTPS_WORDS),
    uri("https with a port that can't be", "https://host:65536/model.onnx", HTTPS_WORDS),
    uri("https with a control character", "https://host/a\x00b", HTTPS_WORDS),
    Invalid("https without a digest", {f"{MODEL}.source.uri": "https://host/model.onnx"},
            (f"{MODEL}.source.digest", "is required for https; add digest: sha256:HEX")),
    Invalid("a digest that is too short", {f"{MODEL}.source.digest": "sha256:abc"},
            (f"{MODEL}.source.digest", DIGEST_WORDS)),
    Invalid("a digest that is one digit too long", {f"{MODEL}.source.digest": SHA256 + "0"},
            (f"{MODEL}.source.digest", DIGEST_WORDS)),
    Invalid("a digest in capitals", {f"{MODEL}.source.digest": SHA256.upper()},
            (f"{MODEL}.source.digest", DIGEST_WORDS)),
    Invalid("a digest of another kind", {f"{MODEL}.source.digest": "md5:" + "0" * 32},
            (f"{MODEL}.source.digest", DIGEST_WORDS)),
]  # fmt: skip

TENSORS = [
    Invalid("dims of -2", {f"{MODEL}.inputs": [{**INPUT, "dims": [-2]}]}, (f"{MODEL}.inputs[0].dims", DIMS_WORDS)),
    Invalid("dims of 0", {f"{MODEL}.outputs": [{**INPUT, "dims": [3, 0]}]}, (f"{MODEL}.outputs[0].dims", DIMS_WORDS)),
    Invalid("no dims", {f"{MODEL}.inputs": [{**INPUT, "dims": []}]}, (f"{MODEL}.inputs[0].dims: must have at least 1",),
            (f"{MODEL}.inputs[0].dims", "should have at least 1 items")),
    Invalid("seventeen dims", {f"{MODEL}.inputs": [{**INPUT, "dims": [1] * 17}]},
            (f"{MODEL}.inputs[0].dims: must have at most 16 entries",), (f"{MODEL}.inputs[0].dims: Too many",)),
    Invalid("dims beyond 31 bits", {f"{MODEL}.inputs": [{**INPUT, "dims": [2**31]}]},
            (f"{MODEL}.inputs[0].dims[0]: must be at most 2147483647",),
            (f"{MODEL}.inputs[0].dims[0]", "should be less than or equal to")),
    Invalid("a data type with its prefix", {f"{MODEL}.inputs": [{**INPUT, "dataType": "TYPE_FP32"}]},
            (f"{MODEL}.inputs[0].dataType: is not supported; use BOOL, UINT8",),
            (f'{MODEL}.inputs[0].dataType: Unsupported value: "TYPE_FP32"',)),
    Invalid("two inputs of one name", {f"{MODEL}.inputs": [INPUT, INPUT]}, (f"{MODEL}.inputs[1].name: is used twice",),
            (f"{MODEL}.inputs[1]: Duplicate value",)),
    Invalid("two outputs of one name", {f"{MODEL}.outputs": [INPUT, INPUT]},
            (f"{MODEL}.outputs[1].name: is used twice",), (f"{MODEL}.outputs[1]: Duplicate value",)),
    Invalid("a tensor name with a quote", {f"{MODEL}.inputs": [{**INPUT, "name": 'a"b'}]},
            (f"{MODEL}.inputs[0].name", TENSOR_NAME_WORDS)),
    Invalid("a tensor without a name", {f"{MODEL}.inputs": [{"dataType": "FP32", "dims": [1]}]},
            (f"{MODEL}.inputs[0].name: is required",), (f"{MODEL}.inputs[0].name: Required value",)),
]  # fmt: skip

BATCHING = [
    Invalid("batching without maxBatchSize", {f"{MODEL}.batching": {}},
            (f"{MODEL}.maxBatchSize", "must be 1 or more with batching; set maxBatchSize or remove batching")),
    Invalid("batching with maxBatchSize 0", {f"{MODEL}.batching": {}, f"{MODEL}.maxBatchSize": 0},
            (f"{MODEL}.maxBatchSize", "must be 1 or more with batching")),
    Invalid("a queue without batching", {f"{MODEL}.queue": {"maxSize": 100}, f"{MODEL}.maxBatchSize": 8},
            (f"{MODEL}.queue", "needs batching, which holds Triton's queue; add batching: {}")),
    Invalid("a preferred size above maxBatchSize", {**BATCHED, f"{MODEL}.batching.preferredSizes": [4, 16]},
            (f"{MODEL}.batching.preferredSizes", "must each be at most maxBatchSize; lower them or raise")),
    Invalid("a preferred size of 0", {**BATCHED, f"{MODEL}.batching.preferredSizes": [0]},
            (f"{MODEL}.batching.preferredSizes[0]: must be at least 1",),
            (f"{MODEL}.batching.preferredSizes[0]", "should be greater than or equal to 1")),
    Invalid("a negative batch", {f"{MODEL}.maxBatchSize": -1}, (f"{MODEL}.maxBatchSize: must be at least 0",),
            (f"{MODEL}.maxBatchSize", "should be greater than or equal to 0")),
    Invalid("a batch of 65,537", {f"{MODEL}.maxBatchSize": 65537}, (f"{MODEL}.maxBatchSize: must be at most 65536",),
            (f"{MODEL}.maxBatchSize", "should be less than or equal to 65536")),
    Invalid("a queue delay of 61 s", {**BATCHED, f"{MODEL}.batching.maxQueueDelay": "61s"},
            (f"{MODEL}.batching.maxQueueDelay", "must be from 0s to 1m")),
    Invalid("a queue time-out of nothing", {**BATCHED, f"{MODEL}.queue": {"timeout": "0s"}},
            (f"{MODEL}.queue.timeout", "must be from 1ms to 24h")),
    Invalid("a queue of 0", {**BATCHED, f"{MODEL}.queue": {"maxSize": 0}},
            (f"{MODEL}.queue.maxSize: must be at least 1",),
            (f"{MODEL}.queue.maxSize", "should be greater than or equal to 1")),
    Invalid("no instances", {f"{MODEL}.instances.count": 0}, (f"{MODEL}.instances.count: must be at least 1",),
            (f"{MODEL}.instances.count", "should be greater than or equal to 1")),
    Invalid("instances on a TPU", {f"{MODEL}.instances.kind": "TPU"},
            (f"{MODEL}.instances.kind: is not supported; use GPU or CPU",),
            (f'{MODEL}.instances.kind: Unsupported value: "TPU"',)),
]  # fmt: skip

PLACES = [
    Invalid("GPU instances without an accelerator",
            {f"{MODEL}.instances.kind": "GPU", "spec.accelerator.count": 0},
            ("spec.accelerator.count", "must be 1 or more when a model has instances.kind GPU")),
    Invalid("a negative number of accelerators", {"spec.accelerator.count": -1},
            ("spec.accelerator.count: must be at least 0",),
            ("spec.accelerator.count", "should be greater than or equal to 0")),
    Invalid("seventeen accelerators", {"spec.accelerator.count": 17}, ("spec.accelerator.count: must be at most 16",),
            ("spec.accelerator.count", "should be less than or equal to 16")),
    Invalid("an accelerator without a domain", {"spec.accelerator.resource": "gpu"},
            ("spec.accelerator.resource", "must be an extended resource such as nvidia.com/gpu")),
    Invalid("a product with a space", {"spec.accelerator.products": ["NVIDIA L4"]},
            ("spec.accelerator.products[0]", "must be a value of the node label nvidia.com/gpu.product")),
    Invalid("an image with a space", {"spec.runtime.image": "triton latest"},
            ("spec.runtime.image", "must be an image reference such as")),
    Invalid("an image that is an option", {"spec.runtime.image": "--privileged"},
            ("spec.runtime.image", "must be an image reference such as")),
    Invalid("shared memory as large as the memory", {"spec.runtime.sharedMemory": "4096Mi"},
            ("spec.runtime.sharedMemory", "must be less than resources.memory")),
    Invalid("shared memory of thousandths of a byte", {"spec.runtime.sharedMemory": "256m"},
            ("spec.runtime.sharedMemory", "must be from 1Mi to 64Ti (m stands for thousandths")),
    Invalid("no memory", {"spec.resources.memory": "0"}, ("spec.resources.memory", "must be from 1Mi to 64Ti")),
    Invalid("no memory, as a number", {"spec.resources.memory": 0},
            ("spec.resources.memory", "must be from 1Mi to 64Ti")),
    Invalid("no CPU", {"spec.resources.cpu": "0"}, ("spec.resources.cpu", "must be from 1m to 1k")),
    Invalid("negative CPU, as a number", {"spec.resources.cpu": -1}, ("spec.resources.cpu", QUANTITY_WORDS),
            ("spec.resources.cpu", "must be from 1m to 1k")),
    quantity("spec.resources.cpu", "-1"),
    quantity("spec.resources.memory", "4 GB"),
    quantity("spec.resources.memory", "4gi"),
    quantity("spec.resources.cpu", 0.5),
    Invalid("a node label that is no label", {"spec.placement.nodeSelector": {"a b": "x"}},
            ("spec.placement.nodeSelector", "must have label keys such as")),
    Invalid("a node label's value that is none", {"spec.placement.nodeSelector.pool": "a b"},
            ("spec.placement.nodeSelector.pool", "must be a label value"),
            ("spec.placement.nodeSelector[pool]", "must be a label value")),
    Invalid("a toleration of nothing", {"spec.placement.tolerations": [{"value": "x"}]},
            ("spec.placement.tolerations[0].key", "is required with operator Equal; set it, or use Exists")),
    Invalid("a toleration that exists with a value",
            {"spec.placement.tolerations": [{"key": "gpu", "operator": "Exists", "value": "x"}]},
            ("spec.placement.tolerations[0].value", "must be empty with operator Exists; remove it or use Equal")),
    Invalid("an unknown effect", {"spec.placement.tolerations": [{"key": "gpu", "effect": "Evict"}]},
            ("spec.placement.tolerations[0].effect: is not supported; use NoSchedule, PreferNoSchedule or NoExecute",),
            ('spec.placement.tolerations[0].effect: Unsupported value: "Evict"',)),
    Invalid("an unknown spread", {"spec.placement.topologySpread": "Rack"},
            ("spec.placement.topologySpread: is not supported; use Zone, Node or None",),
            ('spec.placement.topologySpread: Unsupported value: "Rack"',)),
    Invalid("a priority class in capitals", {"spec.placement.priorityClassName": "High"},
            ("spec.placement.priorityClassName", "must be a Kubernetes name")),
]  # fmt: skip

SCALING = [
    Invalid("min above max", {"spec.scaling.minReplicas": 5, "spec.scaling.maxReplicas": 4},
            ("spec.scaling.minReplicas", "must be at most maxReplicas; lower minReplicas or raise maxReplicas")),
    Invalid("min above the default max", {"spec.scaling.minReplicas": 5},
            ("spec.scaling.minReplicas", "must be at most maxReplicas")),
    Invalid("a minimum of 0", {"spec.scaling.minReplicas": 0}, ("spec.scaling.minReplicas: must be at least 1",),
            ("spec.scaling.minReplicas", "should be greater than or equal to 1")),
    Invalid("1,001 replicas", {"spec.scaling.maxReplicas": 1001}, ("spec.scaling.maxReplicas: must be at most 1000",),
            ("spec.scaling.maxReplicas", "should be less than or equal to 1000")),
    Invalid("a target of 0", {"spec.scaling.queueDepth.target": 0},
            ("spec.scaling.queueDepth.target: must be greater than 0",),
            ("spec.scaling.queueDepth.target", "should be greater than 0")),
    Invalid("a target that the queue can't reach", {**BATCHED, f"{MODEL}.queue": {"maxSize": 8}},
            ("spec.scaling.queueDepth.target", "must be below every model's queue.maxSize")),
    Invalid("a memory limit of 101 percent", {"spec.scaling.gpuMemory.max": 101},
            ("spec.scaling.gpuMemory.max: must be at most 100",),
            ("spec.scaling.gpuMemory.max", "should be less than or equal to 100")),
    Invalid("a negative capacity", {"spec.scaling.capacity.perReplica": -5},
            ("spec.scaling.capacity.perReplica: must be greater than 0",),
            ("spec.scaling.capacity.perReplica", "should be greater than 0")),
    Invalid("no hold", {"spec.scaling.scaleDown.hold": "0s"},
            ("spec.scaling.scaleDown.hold", "must be from 1s to 24h")),
    Invalid("a start-up of three hours", {"spec.scaling.startup": "3h"},
            ("spec.scaling.startup", "must be from 1s to 2h")),
    Invalid("an unknown mode", {"spec.scaling.mode": "Auto"},
            ("spec.scaling.mode: is not supported; use Automatic, Advisory or External",),
            ('spec.scaling.mode: Unsupported value: "Auto"',)),
    Invalid("zero when metrics are missing", {"spec.scaling.whenMetricsMissing": "Zero"},
            ("spec.scaling.whenMetricsMissing: is not supported; use Hold or Floor",),
            ('spec.scaling.whenMetricsMissing: Unsupported value: "Zero"',)),
    duration("spec.scaling.startup", "60"),
    duration("spec.scaling.startup", 60),
    duration("spec.scaling.scaleDown.hold", "-5m"),
    duration("spec.scaling.scaleDown.hold", "5 minutes"),
    duration("spec.scaling.scaleDown.hold", 5.5),
]  # fmt: skip

PARAMETERS = [
    Invalid("a parameter's key with a quote", {f"{MODEL}.parameters": {'a"b': "x"}},
            (f"{MODEL}.parameters", KEY_WORDS)),
    Invalid("a parameter's key of 129 characters", {f"{MODEL}.parameters": {"k" * 129: "x"}},
            (f"{MODEL}.parameters", KEY_WORDS)),
    Invalid("65 parameters", {f"{MODEL}.parameters": {f"k{n}": "x" for n in range(65)}},
            (f"{MODEL}.parameters: must have at most 64 entries",), (f"{MODEL}.parameters: Too many",)),
    Invalid("an environment from elsewhere", {f"{MODEL}.parameters": {"EXECUTION_ENV_PATH": "/tmp/env.tar.gz"}},
            (f"{MODEL}.parameters", ENV_WORDS)),
    Invalid("an environment that climbs out",
            {f"{MODEL}.parameters": {"EXECUTION_ENV_PATH": "$$TRITON_MODEL_DIRECTORY/../env.tar.gz"}},
            (f"{MODEL}.parameters", ENV_WORDS)),
]  # fmt: skip

# Every field that takes text: where it is, and what a hostile text is answered with.
TEXT_FIELDS: dict[str, tuple[str, ...]] = {
    f"{MODEL}.name": (MODEL_NAME_WORDS,),
    f"{MODEL}.format": ("is not supported; use ONNX or Python",),
    f"{MODEL}.source.uri": ("is not supported; use https, pvc or image",),
    f"{MODEL}.source.digest": (DIGEST_WORDS,),
    f"{MODEL}.inputs[0].name": (TENSOR_NAME_WORDS,),
    f"{MODEL}.inputs[0].dataType": ("is not supported; use BOOL",),
    f"{MODEL}.instances.kind": ("is not supported; use GPU or CPU",),
    f"{MODEL}.batching.maxQueueDelay": (DURATION_WORDS,),
    f"{MODEL}.queue.timeout": (DURATION_WORDS,),
    "spec.runtime.image": ("must be an image reference",),
    "spec.runtime.sharedMemory": (QUANTITY_WORDS,),
    "spec.accelerator.resource": ("must be an extended resource",),
    "spec.accelerator.products[0]": ("must be a value of the node label",),
    "spec.resources.cpu": (QUANTITY_WORDS,),
    "spec.resources.memory": (QUANTITY_WORDS,),
    "spec.placement.nodeSelector.pool": ("must be a label value",),
    "spec.placement.tolerations[0].key": ("must be a label key",),
    "spec.placement.tolerations[0].value": ("must be a label value",),
    "spec.placement.tolerations[0].operator": ("is not supported; use Exists or Equal",),
    "spec.placement.tolerations[0].effect": ("is not supported; use NoSchedule",),
    "spec.placement.topologySpread": ("is not supported; use Zone",),
    "spec.placement.priorityClassName": ("must be a Kubernetes name",),
    "spec.placement.runtimeClassName": ("must be a Kubernetes name",),
    "spec.scaling.mode": ("is not supported; use Automatic",),
    "spec.scaling.startup": (DURATION_WORDS,),
    "spec.scaling.scaleDown.hold": (DURATION_WORDS,),
    "spec.scaling.whenMetricsMissing": ("is not supported; use Hold",),
    "metadata.name": (NAME_WORDS,),
}

HOSTILE_TEXTS = {
    "10,000 characters": LONG,
    "a template": "{{ config }}",
    "a quote": 'a" } backend: "evil',
    "a line break": "a\nbackend: evil",
    "a final line break": "a\n",
    "a control character": "a\x1b[2Jb",
    "an unprintable C1 character": "a\x9bb",
    "a shell substitution": "$(reboot)",
}
# A parameter's value may be any printable line: it reaches Triton through protobuf's escaping only.
FREE_TEXT_FIELDS = {f"{MODEL}.parameters.note"}
_REFUSED_FREE_TEXTS = ("a line break", "a final line break", "a control character", "an unprintable C1 character")


def _hostile(path: str, what: str, words: tuple[str, ...]) -> Invalid:
    service_parts: dict[str, Any] = {}
    if path.startswith(f"{MODEL}.inputs"):
        service_parts[f"{MODEL}.inputs"] = [dict(INPUT)]
    if path.startswith((f"{MODEL}.batching", f"{MODEL}.queue")):
        service_parts |= BATCHED
    if path.startswith("spec.placement.tolerations"):
        service_parts["spec.placement.tolerations"] = [{"key": "gpu", "value": "x"}]
    if path.startswith("spec.accelerator.products"):
        service_parts["spec.accelerator.products"] = ["NVIDIA-L4"]
    text = HOSTILE_TEXTS[what]
    # An enumeration, a duration or a quantity answers with what is allowed; other texts with their length.
    limited = path == f"{MODEL}.source.uri" or not words[0].startswith("is not ")
    if what == "10,000 characters" and limited and path != "metadata.name":
        words = ("characters; shorten it",)
    # In what a CEL rule finds, the API server writes an entry of a map with its key in brackets.
    server_path = path if what == "10,000 characters" else re.sub(r"\.(pool|note)$", r"[\1]", path)
    return Invalid(f"{what} in {path}", {**service_parts, path: text}, (path, *words), (server_path,))


HOSTILE = [_hostile(path, what, words) for path, words in TEXT_FIELDS.items() for what in HOSTILE_TEXTS] + [
    _hostile(path, what, (LINE_WORDS,)) for path in sorted(FREE_TEXT_FIELDS) for what in _REFUSED_FREE_TEXTS
]

INVALID = [*SHAPES, *NAMES, *SOURCES, *TENSORS, *BATCHING, *PLACES, *SCALING, *PARAMETERS, *HOSTILE]

# Valid services just inside the rules: a rule that refuses everything would pass every test above.
VALID: dict[str, dict[str, Any]] = {
    "the least that is needed": {},
    "a service name of 45 characters": {"metadata.name": "a" * 45},
    "a model name of 63 characters": {f"{MODEL}.name": "x" * 63},
    "a model name with every kind of character": {f"{MODEL}.name": "1a.B_c-"},
    "sixteen models": {"spec.models": [make_model(name=f"m{n}") for n in range(16)]},
    "https with a port and a digest": {
        f"{MODEL}.source": {"uri": "https://host.example:65535/a/model.onnx", "digest": SHA256}
    },
    "a claim with dots, a path with a slash at its end": {f"{MODEL}.source.uri": "pvc://models.v2/a/b.c..d/"},
    "an image by digest, its whole root": {f"{MODEL}.source.uri": f"image://registry.example:5000/m@{SHA256}#/"},
    "dims of -1": {f"{MODEL}.inputs": [{**INPUT, "dims": [-1, 1]}], f"{MODEL}.outputs": [INPUT]},
    "a preferred size of maxBatchSize": {**BATCHED, f"{MODEL}.batching.preferredSizes": [8]},
    "a batch of 0 without batching": {f"{MODEL}.maxBatchSize": 0},
    "a queue delay of 1m": {**BATCHED, f"{MODEL}.batching.maxQueueDelay": "1m"},
    "a queue time-out of 1.5ms": {**BATCHED, f"{MODEL}.queue": {"timeout": "1.5ms"}},
    "a target just below the queue": {**BATCHED, f"{MODEL}.queue": {"maxSize": 9}},
    "a target that is a fraction": {"spec.scaling.queueDepth.target": 0.5},
    "min equal to max": {"spec.scaling.minReplicas": 4},
    "CPU instances without an accelerator": {f"{MODEL}.instances.kind": "CPU", "spec.accelerator.count": 0},
    "another accelerator": {"spec.accelerator": {"resource": "nvidia.com/mig-1g.5gb", "count": 16}},
    "numbers as quantities": {"spec.resources": {"cpu": 2, "memory": 2**30}},
    "shared memory just below the memory": {"spec.runtime.sharedMemory": "4095.9Mi"},
    "an hour and a half": {"spec.scaling.startup": "1h30m"},
    "a toleration of everything": {"spec.placement.tolerations": [{"operator": "Exists"}]},
    "a toleration of a label": {"spec.placement.tolerations": [{"key": "a.b/c", "effect": "NoExecute"}]},
    "a node label": {"spec.placement.nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-L4", "pool": ""}},
    "a parameter of any printable text": {f"{MODEL}.parameters": {"note": 'a } "b" {{ c }} \\ $(d) é 模型'}},
    "an environment with the model": {
        f"{MODEL}.parameters": {"EXECUTION_ENV_PATH": "$$TRITON_MODEL_DIRECTORY/env.tar.gz"}
    },
    "an empty capacity": {"spec.scaling": {"minReplicas": 2, "capacity": {}}},
}


def valid_service(name: str) -> dict[str, Any]:
    """The valid resource of that name."""
    service = make_service()
    for path, value in VALID[name].items():
        set_field(service, path, value)
    return service
