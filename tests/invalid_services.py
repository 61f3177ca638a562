"""Invalid InferenceServices, each with the words that name field and fix, and valid ones at the rules' edges."""

from __future__ import annotations

import copy
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
CLAIM = {"claim": {"deviceClass": "gpu.nvidia.com"}}
DIGEST_WORDS = "must be sha256: and 64 lower-case hexadecimal digits, as sha256sum prints them"
DIMS_WORDS = "must be sizes of 1 or more, or -1 for a size that varies"
PVC_WORDS = "must be pvc://CLAIM/PATH"
IMAGE_WORDS = "must be image://REFERENCE#/PATH"
S3_WORDS = "must be s3://BUCKET/KEY of an object"
OCI_WORDS = "must be oci://REGISTRY/REPOSITORY@sha256:HEX"
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


def source(name: str, field_name: str, value: Any, words: str, *, at: str = "", **others: Any) -> Invalid:
    patch = {f"{MODEL}.source.{key}": other for key, other in {**others, field_name: value}.items()}
    return Invalid(name, patch, (f"{MODEL}.source.{at or field_name}", words))


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
            (f"{MODEL}.source: Invalid value: is required; add it",)),
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
        "a field under its Triton name",
        {f"{MODEL}.dynamicBatching": {}},
        (f"{MODEL}.dynamicBatching: is not a field; did you mean batching and queue?",),
        ('unknown field "spec.models[0].dynamicBatching"',),
    ),
    Invalid(
        "the backend of a model",
        {f"{MODEL}.backend": "onnxruntime"},
        (f"{MODEL}.backend: is not a field; did you mean format?",),
        ('unknown field "spec.models[0].backend"',),
    ),
    Invalid(
        "a field that is indented too little",
        {"spec.preferredSizes": [4]},
        (
            "spec.preferredSizes: is not a field here",
            "did you mean spec.models.batching.preferredSizes or spec.models.sequence.preferredSizes?",
        ),
        ('unknown field "spec.preferredSizes"',),
    ),
    Invalid(
        "a field that is indented too far",
        {f"{MODEL}.batching": {"minReplicas": 2}},
        (f"{MODEL}.batching.minReplicas: is not a field here; did you mean spec.scaling.minReplicas?",),
        ('unknown field "spec.models[0].batching.minReplicas"',),
    ),
    Invalid(
        "a field that nothing is like",
        {f"{MODEL}.zzyzx": 2},
        (f"{MODEL}.zzyzx: is not a field; remove it",),
        ('unknown field "spec.models[0].zzyzx"',),
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
            (f"{MODEL}.format: is not supported; use ONNX, TensorRT, PyTorch",),
            (f'{MODEL}.format: Unsupported value: "Caffe": supported values: "ONNX", "TensorRT", "PyTorch"',)),
    Invalid("a format in lower case", {f"{MODEL}.format": "onnx"},
            (f"{MODEL}.format: is not supported; use ONNX", "did you mean ONNX?"),
            (f'{MODEL}.format: Unsupported value: "onnx"',)),
    Invalid(
        "a scheme that isn't supported",
        {f"{MODEL}.source.uri": "ftp://host/model.onnx"},
        (f'{MODEL}.source.uri: scheme "ftp" is not supported; use s3, gs, https, oci, pvc or image',),
        (f"{MODEL}.source.uri", "scheme is not supported; use s3, gs, https, oci, pvc or image"),
    ),
    Invalid(
        "a plain path",
        {f"{MODEL}.source.uri": "/models/resnet"},
        (f"{MODEL}.source.uri", "is not supported; use s3, gs, https, oci, pvc or image"),
        (f"{MODEL}.source.uri", "scheme is not supported; use s3, gs, https, oci, pvc or image"),
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
    uri("an object without a key", "s3://models", S3_WORDS),
    uri("a bucket in capitals", "s3://Models/resnet", S3_WORDS),
    uri("a key with a space", "s3://models/my model", S3_WORDS),
    uri("a key that climbs", "s3://models/../other/model", DOTS_WORDS),
    uri("a gs bucket of one letter", "gs://m/model", "must be gs://BUCKET/NAME"),
    uri("an artifact without tag and digest", "oci://registry.example/models", OCI_WORDS),
    uri("an artifact without a repository", f"oci://registry.example@{SHA256}", OCI_WORDS),
    uri("an artifact in capitals", f"oci://registry.example/Models@{SHA256}", OCI_WORDS),
    uri("an artifact by another digest", "oci://registry.example/models@md5:00", OCI_WORDS),
    Invalid("an artifact by tag without a digest", {f"{MODEL}.source.uri": "oci://registry.example/models:1"},
            (f"{MODEL}.source.digest", "is required for oci with a tag, which can be moved")),
    Invalid("an artifact with two digests",
            {f"{MODEL}.source.uri": f"oci://registry.example/models@{SHA256}",
             f"{MODEL}.source.digest": "sha256:" + "0" * 64},
            (f"{MODEL}.source.digest", "must be the one in the uri; remove one of them")),
    source("a secret for a volume", "secretRef", {"name": "keys"}, "is for s3, gs, https and oci; remove it"),
    source("a secret with a wrong name", "secretRef", {"name": "My Keys"}, "must be a Kubernetes name",
           at="secretRef.name", uri="s3://models/m"),
    source("an identity for a volume", "identity", "ServiceAccount", "is for s3 and gs without secretRef"),
    source("an identity beside a secret", "identity", "ServiceAccount", "is for s3 and gs without secretRef",
           uri="s3://models/m", secretRef={"name": "keys"}),
    Invalid("an unknown identity", {f"{MODEL}.source.identity": "Admin"},
            (f"{MODEL}.source.identity: is not supported; use Anonymous or ServiceAccount",),
            (f'{MODEL}.source.identity: Unsupported value: "Admin"',)),
    source("an endpoint for a volume", "endpoint", "https://minio.example", "is for s3 and gs; remove it"),
    source("an endpoint with a path", "endpoint", "https://minio.example/x", "must be https://HOST",
           uri="s3://models/m"),
    source("an endpoint with a password", "endpoint", "https://a:b@minio.example", "must be https://HOST",
           uri="s3://models/m"),
    source("an endpoint without TLS and without a digest", "endpoint", "http://minio.example:9000",
           "without TLS needs a digest", uri="s3://models/m"),
    source("a gs key sent without TLS", "endpoint", "http://gs.example", "without TLS needs a digest",
           uri="gs://models/m", digest=SHA256, secretRef={"name": "keys"}),
    source("a region for https", "region", "eu-west-1", "is for s3; remove it",
           uri="https://host/m.onnx", digest=SHA256),
    source("a region of two words", "region", "eu west", "must be a region such as", uri="s3://models/m"),
    source("authorities for a volume", "caRef", {"name": "ca"}, "is for s3, gs, https and oci; remove it"),
    source("authorities under a hidden key", "caRef", {"name": "ca", "key": "../x"}, "must be a key of a ConfigMap",
           at="caRef.key", uri="s3://models/m"),
    source("a proxy for a volume", "proxy", "http://proxy.example:3128", "is for s3, gs, https and oci; remove it"),
    source("a proxy with a password", "proxy", "http://a:b@proxy.example:3128", "must be http://HOST:PORT",
           uri="s3://models/m"),
    source("an engine of a made-up version", "engine", {"tensorRT": "ten"}, "must be a TensorRT version such as",
           at="engine.tensorRT"),
    source("an engine of a made-up GPU", "engine", {"computeCapability": "Ampere"},
           "must be a compute capability such as 8.6", at="engine.computeCapability"),
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
            (f"{MODEL}.instances.kind: is not supported; use GPU, CPU or Model",),
            (f'{MODEL}.instances.kind: Unsupported value: "TPU"',)),
]  # fmt: skip

ENSEMBLE: dict[str, Any] = {
    "name": "all",
    "format": "Ensemble",
    "inputs": [{"name": "raw", "dataType": "FP32", "dims": [3]}],
    "outputs": [{"name": "end", "dataType": "FP32", "dims": [3]}],
    "steps": [{"model": "resnet50", "inputs": {"input": "raw"}, "outputs": {"output": "end"}}],
}
SECOND = "spec.models[1]"


def ensemble(name: str, patch: dict[str, Any], *says: str, server: tuple[str, ...] = ()) -> Invalid:
    """A service with an ensemble after its member; paths are below the ensemble."""
    below = {f"{SECOND}.{path}": value for path, value in patch.items()}
    return Invalid(name, {SECOND: ENSEMBLE, **below}, says, server)


ENSEMBLE_WORDS = "is not for an Ensemble, which only connects other models"
INSTANCES = f"{MODEL}.instances"
SEQUENCE = f"{MODEL}.sequence"
STATE = {"inputName": "in", "outputName": "out", "dataType": "FP32", "dims": [2]}
WARMUP = {"name": "first", "inputs": [{**INPUT, "data": "Zero"}]}

MODELS = [
    Invalid("a model file with a path", {f"{MODEL}.file": "v1/model.onnx"},
            (f"{MODEL}.file", "must be a name of letters, digits and")),
    Invalid("a hidden model file", {f"{MODEL}.file": ".model.onnx"},
            (f"{MODEL}.file", "and not begin with a dot")),
    Invalid("a file for vLLM", {f"{MODEL}.format": "vLLM", f"{MODEL}.file": "engine.json"},
            (f"{MODEL}.file", "can't be chosen for vLLM, which reads model.json")),
    Invalid("PyTorch without inputs", {f"{MODEL}.format": "PyTorch", f"{MODEL}.outputs": [INPUT]},
            (f"{MODEL}.inputs", "are required for PyTorch, whose models don't tell them; add inputs such as {name:")),
    Invalid("PyTorch without outputs", {f"{MODEL}.format": "PyTorch", f"{MODEL}.inputs": [INPUT]},
            (f"{MODEL}.outputs", "are required for PyTorch", "add outputs such as {name: OUTPUT__0,")),
    Invalid("a reshape to 0", {f"{MODEL}.inputs": [{**INPUT, "reshape": [3, 0]}]},
            (f"{MODEL}.inputs[0].reshape", DIMS_WORDS)),
    Invalid("an image of two sizes", {f"{MODEL}.inputs": [{**INPUT, "tensorFormat": "NCHW"}]},
            (f"{MODEL}.inputs[0].tensorFormat", "needs dims of 3 sizes; correct dims or remove tensorFormat")),
    Invalid("a format that isn't linear, of one size", {f"{MODEL}.outputs": [{**INPUT, "nonLinearFormat": True}]},
            (f"{MODEL}.outputs[0].nonLinearFormat", "needs dims of 3 sizes")),
    Invalid("a label file outside the model", {f"{MODEL}.outputs": [{**INPUT, "labelFile": "../labels.txt"}]},
            (f"{MODEL}.outputs[0].labelFile", "must be a relative path of letters")),
    Invalid("an absolute label file", {f"{MODEL}.outputs": [{**INPUT, "labelFile": "/etc/passwd"}]},
            (f"{MODEL}.outputs[0].labelFile", "must be a relative path of letters")),
    Invalid("priorities without a highest number", {**BATCHED, f"{MODEL}.batching.defaultPriority": 1},
            (f"{MODEL}.batching.defaultPriority", "must be at most priorityLevels; lower it or set priorityLevels")),
    Invalid("a default priority below the lowest",
            {**BATCHED, f"{MODEL}.batching": {"priorityLevels": 2, "defaultPriority": 3}},
            (f"{MODEL}.batching.defaultPriority", "must be at most priorityLevels")),
    Invalid("33 priorities", {**BATCHED, f"{MODEL}.batching.priorityLevels": 33},
            (f"{MODEL}.batching.priorityLevels: must be at most 32",),
            (f"{MODEL}.batching.priorityLevels", "should be less than or equal to 32")),
    Invalid("order across priorities",
            {**BATCHED, f"{MODEL}.batching": {"priorityLevels": 2, "preserveOrdering": True}},
            (f"{MODEL}.batching.preserveOrdering", "can't be kept across priorities; set it to false")),
    Invalid("a queue's level without priorities", {**BATCHED, f"{MODEL}.queue": {"levels": [{"priority": 1}]}},
            (f"{MODEL}.queue.levels", "must each have a priority of at most batching.priorityLevels")),
    Invalid("a queue's level below the lowest priority",
            {**BATCHED, f"{MODEL}.batching.priorityLevels": 2, f"{MODEL}.queue": {"levels": [{"priority": 3}]}},
            (f"{MODEL}.queue.levels", "must each have a priority of at most batching.priorityLevels")),
    Invalid("a queue's level twice",
            {**BATCHED, f"{MODEL}.batching.priorityLevels": 2,
             f"{MODEL}.queue": {"levels": [{"priority": 1}, {"priority": 1}]}},
            (f"{MODEL}.queue.levels[1].priority: is used twice; give each entry a priority of its own",),
            (f"{MODEL}.queue.levels[1]: Duplicate value",)),
    Invalid("a delay without a time-out", {**BATCHED, f"{MODEL}.queue": {"timeoutAction": "Delay"}},
            (f"{MODEL}.queue.timeoutAction", "Delay needs a timeout; set timeout or allowTimeoutOverride")),
    Invalid("CPU instances with GPUs", {INSTANCES: {"kind": "CPU", "gpus": [0]}},
            (f"{INSTANCES}.gpus", "are for kind GPU; remove gpus or kind")),
    Invalid("a GPU twice", {INSTANCES: {"gpus": [0, 0]}}, (f"{INSTANCES}.gpus[1]: is listed twice; remove one",),
            (f"{INSTANCES}.gpus[1]: Duplicate value",)),
    Invalid("a GPU of the future", {INSTANCES: {"gpus": [16]}}, (f"{INSTANCES}.gpus[0]: must be at most 15",),
            (f"{INSTANCES}.gpus[0]", "should be less than or equal to 15")),
    Invalid("a profile by name", {f"{MODEL}.format": "TensorRT", INSTANCES: {"profiles": ["small"]}},
            (f"{INSTANCES}.profiles[0]", "must be the number of an optimization profile")),
    Invalid("instances and groups", {INSTANCES: {"count": 2}, f"{MODEL}.instanceGroups": [{"name": "a"}]},
            (INSTANCES, "and instanceGroups exclude each other; move what instances says into a group")),
    Invalid("GPU instances of a group without an accelerator",
            {f"{MODEL}.instanceGroups": [{"name": "a", "kind": "GPU"}], "spec.accelerator.count": 0},
            ("spec.accelerator.count", "must be 1 or more when a model has instances.kind GPU")),
    Invalid("two groups of one name", {f"{MODEL}.instanceGroups": [{"name": "a"}, {"name": "a"}]},
            (f"{MODEL}.instanceGroups[1].name: is used twice",), (f"{MODEL}.instanceGroups[1]: Duplicate value",)),
    Invalid("no priority under the rate limiter", {INSTANCES: {"rateLimiter": {"priority": 0}}},
            (f"{INSTANCES}.rateLimiter.priority: must be at least 1",),
            (f"{INSTANCES}.rateLimiter.priority", "should be greater than or equal to 1")),
    Invalid("a sequence and batching", {**BATCHED, SEQUENCE: {}},
            (SEQUENCE, "and batching exclude each other; keep one of them")),
    Invalid("oldest sequences with a slot's utilization",
            {SEQUENCE: {"strategy": "Oldest", "minimumSlotUtilization": 0.5}},
            (f"{SEQUENCE}.minimumSlotUtilization", "is of strategy Direct; set strategy: Direct or remove it")),
    Invalid("more than all slots", {SEQUENCE: {"minimumSlotUtilization": 1.5}},
            (f"{SEQUENCE}.minimumSlotUtilization: must be at most 1",),
            (f"{SEQUENCE}.minimumSlotUtilization", "should be less than or equal to 1")),
    Invalid("direct sequences with candidates", {SEQUENCE: {"maxCandidates": 4}},
            (f"{SEQUENCE}.maxCandidates", "is of strategy Oldest; set strategy: Oldest or remove it")),
    Invalid("direct sequences with preferred sizes", {f"{MODEL}.maxBatchSize": 4, SEQUENCE: {"preferredSizes": [2]}},
            (f"{SEQUENCE}.preferredSizes", "are of strategy Oldest; set strategy: Oldest or remove them")),
    Invalid("direct sequences in order", {SEQUENCE: {"preserveOrdering": True}},
            (f"{SEQUENCE}.preserveOrdering", "is of strategy Oldest; set strategy: Oldest or remove it")),
    Invalid("a sequence's preferred size above maxBatchSize",
            {f"{MODEL}.maxBatchSize": 4, SEQUENCE: {"strategy": "Oldest", "preferredSizes": [8]}},
            (f"{SEQUENCE}.preferredSizes", "must each be at most maxBatchSize")),
    Invalid("a control of another type",
            {SEQUENCE: {"controls": [{"tensor": "s", "kind": "Start", "dataType": "INT64"}]}},
            (f"{SEQUENCE}.controls[0].dataType", "must be INT32, FP32 or BOOL, or for kind CorrelationID UINT64")),
    Invalid("an ID of another type",
            {SEQUENCE: {"controls": [{"tensor": "s", "kind": "CorrelationID", "dataType": "FP32"}]}},
            (f"{SEQUENCE}.controls[0].dataType", "must be INT32, FP32 or BOOL, or for kind CorrelationID UINT64")),
    Invalid("a control without its other value",
            {SEQUENCE: {"controls": [{"tensor": "s", "kind": "Start", "falseTrue": [1]}]}},
            (f"{SEQUENCE}.controls[0].falseTrue", "must be two numbers, for false and for true")),
    Invalid("an ID that is false or true",
            {SEQUENCE: {"controls": [{"tensor": "s", "kind": "CorrelationID", "falseTrue": [0, 1]}]}},
            (f"{SEQUENCE}.controls[0].falseTrue", "and none for kind CorrelationID")),
    Invalid("a whole control of fractions",
            {SEQUENCE: {"controls": [{"tensor": "s", "kind": "Start", "falseTrue": [0, 0.5]}]}},
            (f"{SEQUENCE}.controls[0].falseTrue", "must be whole numbers unless dataType is FP32")),
    Invalid("a true of 2",
            {SEQUENCE: {"controls": [{"tensor": "s", "kind": "End", "dataType": "BOOL", "falseTrue": [0, 2]}]}},
            (f"{SEQUENCE}.controls[0].falseTrue", "must be 0 and 1 in either order with dataType BOOL")),
    Invalid("two starts",
            {SEQUENCE: {"controls": [{"tensor": "a", "kind": "Start"}, {"tensor": "b", "kind": "Start"}]}},
            (f"{SEQUENCE}.controls[1].kind: is used twice; give each entry a kind of its own",),
            (f"{SEQUENCE}.controls[1]: Duplicate value",)),
    Invalid("a state of size 0", {SEQUENCE: {"states": [{**STATE, "dims": [0]}]}},
            (f"{SEQUENCE}.states[0].dims", DIMS_WORDS)),
    Invalid("a state that grows alone", {SEQUENCE: {"states": [{**STATE, "growableMemory": True}]}},
            (f"{SEQUENCE}.states[0].growableMemory", "needs sameBuffer; set sameBuffer to true or remove")),
    Invalid("two beginnings of a state",
            {SEQUENCE: {"states": [{**STATE, "initial": [{"name": "a", "dataType": "FP32", "dims": [2]}] * 2}]}},
            (f"{SEQUENCE}.states[0].initial: must have at most 1 entries",),
            (f"{SEQUENCE}.states[0].initial: Too many",)),
    Invalid("a beginning from no file",
            {SEQUENCE: {"states": [{**STATE, "initial": [{"name": "a", "dataType": "FP32", "dims": [2],
                                                          "data": "File"}]}]}},
            (f"{SEQUENCE}.states[0].initial[0].file", "is required with data File, and for nothing else")),
    Invalid("a cache for many answers", {f"{MODEL}.responseCache": True, f"{MODEL}.decoupled": True,
                                         "spec.runtime.responseCache": {"local": {"size": "1Mi"}}},
            (f"{MODEL}.responseCache", "doesn't work with decoupled, whose answers are many")),
    Invalid("a cache for sequences", {f"{MODEL}.responseCache": True, SEQUENCE: {},
                                      "spec.runtime.responseCache": {"local": {"size": "1Mi"}}},
            (f"{MODEL}.responseCache", "doesn't work with sequence, whose answers depend on earlier requests")),
    Invalid("a cache that the server hasn't", {f"{MODEL}.responseCache": True},
            ("spec.runtime.responseCache", "is required when a model has responseCache; add responseCache: {local:")),
    Invalid("a model of no memory", {f"{MODEL}.acceleratorMemory": "0"},
            (f"{MODEL}.acceleratorMemory", "must be from 1Mi to 64Ti")),
    Invalid("a warm-up from no file", {f"{MODEL}.warmup": [{"name": "a", "inputs": [{**INPUT, "data": "File"}]}]},
            (f"{MODEL}.warmup[0].inputs[0].file", "is required with data File, and for nothing else")),
    Invalid("a warm-up of zeros from a file",
            {f"{MODEL}.warmup": [{"name": "a", "inputs": [{**INPUT, "file": "x.bin"}]}]},
            (f"{MODEL}.warmup[0].inputs[0].file", "is required with data File, and for nothing else")),
    Invalid("a warm-up file elsewhere",
            {f"{MODEL}.warmup": [{"name": "a", "inputs": [{**INPUT, "data": "File", "file": "../1/model.onnx"}]}]},
            (f"{MODEL}.warmup[0].inputs[0].file", "must be a relative path of letters")),
    Invalid("a warm-up of unknown size", {f"{MODEL}.warmup": [{"name": "a", "inputs": [{**INPUT, "dims": [-1]}]}]},
            (f"{MODEL}.warmup[0].inputs[0].dims[0]: must be at least 1",),
            (f"{MODEL}.warmup[0].inputs[0].dims[0]", "should be greater than or equal to 1")),
    Invalid("two warm-ups of one name", {f"{MODEL}.warmup": [WARMUP, WARMUP]},
            (f"{MODEL}.warmup[1].name: is used twice",), (f"{MODEL}.warmup[1]: Duplicate value",)),
    Invalid("TensorRT inside Python",
            {f"{MODEL}.format": "Python", f"{MODEL}.optimization": {"tensorRT": {}}},
            (f"{MODEL}.optimization.tensorRT", "is for format ONNX; remove it")),
    Invalid("OpenVINO inside OpenVINO",
            {f"{MODEL}.format": "OpenVINO", f"{MODEL}.optimization": {"openVINO": {}}},
            (f"{MODEL}.optimization.openVINO", "is for format ONNX; remove it, or use format OpenVINO")),
    Invalid("CUDA graphs of ONNX", {f"{MODEL}.optimization": {"cudaGraphs": {}}},
            (f"{MODEL}.optimization.cudaGraphs", "are for format TensorRT; remove them")),
    Invalid("a precision said twice",
            {f"{MODEL}.optimization": {"tensorRT": {"parameters": {"precision_mode": "FP16"}}}},
            (f"{MODEL}.optimization.tensorRT.parameters", "must not repeat what precision, workspace and engineCache")),
    Invalid("plug-ins of any path",
            {f"{MODEL}.optimization": {"tensorRT": {"parameters": {"trt_extra_plugin_lib_paths": "/x.so"}}}},
            (f"{MODEL}.optimization.tensorRT.parameters", "must not have trt_extra_plugin_lib_paths, which loads")),
    Invalid("a workspace of a kilobyte", {f"{MODEL}.optimization": {"tensorRT": {"workspace": "1k"}}},
            (f"{MODEL}.optimization.tensorRT.workspace", "must be from 1Mi to 64Gi")),
    Invalid("all versions, three of them", {f"{MODEL}.versions": {"policy": "All", "count": 3}},
            (f"{MODEL}.versions.count", "is of policy Latest; remove it or use Latest")),
    Invalid("specific versions without numbers", {f"{MODEL}.versions": {"policy": "Specific"}},
            (f"{MODEL}.versions.numbers", "are required with policy Specific, and for nothing else")),
    Invalid("the latest versions by number", {f"{MODEL}.versions": {"numbers": [1]}},
            (f"{MODEL}.versions.numbers", "are required with policy Specific, and for nothing else")),
    Invalid("version 0", {f"{MODEL}.versions": {"policy": "Specific", "numbers": [0]}},
            (f"{MODEL}.versions.numbers[0]: must be at least 1",),
            (f"{MODEL}.versions.numbers[0]", "should be greater than or equal to 1")),
    Invalid("a further field that is none", {f"{MODEL}.config": {"batch_inputs": []}},
            (f"{MODEL}.config.batch_inputs: is not a field of ModelConfig; did you mean batch_input?",),
            (f'unknown field "{MODEL}.config.batch_inputs"',)),
    Invalid("a further field that the spec has",
            {f"{MODEL}.config": {"dynamic_batching": {"preferred_batch_size": [1]}}},
            (f"{MODEL}.config.dynamic_batching: is what the model's batching and queue say in the spec",
             "set batching and queue instead"),
            (f'unknown field "{MODEL}.config.dynamic_batching"',)),
    Invalid("a further field of another type", {f"{MODEL}.config": {"metric_tags": {"a": 1}}},
            (f"{MODEL}.config.metric_tags.a: must be text; put it in quotes",),
            (f"{MODEL}.config.metric_tags.a", "must be of type string")),
    Invalid("steps of a model", {f"{MODEL}.steps": ENSEMBLE["steps"]},
            (f"{MODEL}.steps", "are required with format Ensemble, and for nothing else")),
    ensemble("an ensemble without steps", {"steps": None},
             f"{SECOND}.steps", "are required with format Ensemble, and for nothing else"),
    ensemble("an ensemble with a source", {"source": {"uri": "pvc://models/all"}}, f"{SECOND}.source", ENSEMBLE_WORDS),
    ensemble("an ensemble with instances", {"instances": {"count": 2}}, f"{SECOND}.instances", ENSEMBLE_WORDS),
    ensemble("an ensemble with batching", {"batching": {}, "maxBatchSize": 1}, f"{SECOND}.batching", ENSEMBLE_WORDS),
    ensemble("an ensemble with a sequence", {"sequence": {}}, f"{SECOND}.sequence", ENSEMBLE_WORDS),
    ensemble("an ensemble with a warm-up", {"warmup": [{"name": "a"}]}, f"{SECOND}.warmup", ENSEMBLE_WORDS),
    ensemble("an ensemble with a file", {"file": "model.onnx"}, f"{SECOND}.file", ENSEMBLE_WORDS),
    ensemble("a decoupled ensemble", {"decoupled": True}, f"{SECOND}.decoupled", ENSEMBLE_WORDS),
    ensemble("a step without tensors", {"steps[0].inputs": {}},
             f"{SECOND}.steps[0].inputs: must have at least 1 entry",
             server=(f"{SECOND}.steps[0].inputs", "should have at least 1 properties")),
    ensemble("a step without a model", {"steps[0].model": None}, f"{SECOND}.steps[0].model: is required",
             server=(f"{SECOND}.steps[0].model: Required value",)),
    ensemble("a step of version 0", {"steps[0].version": 0}, f"{SECOND}.steps[0].version: must be at least 1",
             server=(f"{SECOND}.steps[0].version", "should be greater than or equal to 1")),
    ensemble("33 steps", {"steps": ENSEMBLE["steps"] * 33}, f"{SECOND}.steps: must have at most 32 entries",
             server=(f"{SECOND}.steps: Too many",)),
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
    Invalid("two MIG devices", {"spec.accelerator": {"resource": "nvidia.com/mig-1g.5gb", "count": 2}},
            ("spec.accelerator.count", "must be at most 1 with a MIG profile", "a process sees one MIG device only")),
    Invalid("two shares of an accelerator", {"spec.accelerator": {"resource": "nvidia.com/gpu.shared", "count": 2}},
            ("spec.accelerator.count", "must be at most 1 with a shared accelerator")),
    Invalid("a product of another vendor",
            {"spec.accelerator": {"resource": "amd.com/gpu", "products": ["AMD-Instinct-MI300X"]}},
            ("spec.accelerator.products", "needs an nvidia.com resource", "placement.nodeSelector")),
    Invalid("memory of another vendor", {"spec.accelerator": {"resource": "habana.ai/gaudi", "memory": "80Gi"}},
            ("spec.accelerator.memory", "needs an nvidia.com resource", "placement.nodeSelector")),
    Invalid("a compute capability of another vendor",
            {"spec.accelerator": {"resource": "amd.com/gpu", "computeCapability": "8.0"}},
            ("spec.accelerator.computeCapability", "needs an nvidia.com resource", "placement.nodeSelector")),
    Invalid("no memory at all", {"spec.accelerator.memory": "0"},
            ("spec.accelerator.memory", "must be from 1Mi to 64Ti")),
    Invalid("a compute capability of one number", {"spec.accelerator.computeCapability": "8"},
            ("spec.accelerator.computeCapability", "must be a compute capability such as 8.0; put it in quotes")),
    bad_type("a compute capability without quotes", "spec.accelerator.computeCapability", 8.6,
             "must be text; put it in quotes"),
    Invalid("a claim and a resource", {"spec.accelerator": {**CLAIM, "resource": "nvidia.com/mig-1g.5gb"}},
            ("spec.accelerator.resource", "must be left out with claim")),
    Invalid("a claim and a count", {"spec.accelerator": {**CLAIM, "count": 2}},
            ("spec.accelerator.count", "must be left out with claim; write claim.count")),
    Invalid("a claim and no accelerator", {"spec.accelerator": {**CLAIM, "count": 0}},
            ("spec.accelerator.count", "must be left out with claim; write claim.count")),
    Invalid("a claim and products", {"spec.accelerator": {**CLAIM, "products": ["NVIDIA-L4"]}},
            ("spec.accelerator.products", "must be empty with claim", "write a selector")),
    Invalid("a claim and memory", {"spec.accelerator": {**CLAIM, "memory": "24Gi"}},
            ("spec.accelerator.memory", "must be left out with claim", "write a selector")),
    Invalid("a claim and a compute capability", {"spec.accelerator": {**CLAIM, "computeCapability": "8.0"}},
            ("spec.accelerator.computeCapability", "must be left out with claim", "write a selector")),
    Invalid("a claim without a class", {"spec.accelerator.claim": {}},
            ("spec.accelerator.claim.deviceClass: is required; add it",),
            ("spec.accelerator.claim.deviceClass: Required value",)),
    Invalid("a claim of no device", {"spec.accelerator.claim": {"deviceClass": "gpu.nvidia.com", "count": 0}},
            ("spec.accelerator.claim.count: must be at least 1",),
            ("spec.accelerator.claim.count", "should be greater than or equal to 1")),
    Invalid("nine selectors",
            {"spec.accelerator.claim": {"deviceClass": "gpu.nvidia.com", "selectors": ["true"] * 9}},
            ("spec.accelerator.claim.selectors: must have at most 8 entries",),
            ("spec.accelerator.claim.selectors: Too many",)),
    Invalid("an empty selector", {"spec.accelerator.claim": {"deviceClass": "gpu.nvidia.com", "selectors": [""]}},
            ("spec.accelerator.claim.selectors[0]: must not be empty",),
            ("spec.accelerator.claim.selectors[0]", "should be at least 1 chars long")),
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

RUNTIME = [
    Invalid("a release that is a version", {"spec.runtime.release": "2.51"},
            ("spec.runtime.release", "must be a release of Triton such as 24.10")),
    Invalid("a response cache of both kinds",
            {"spec.runtime.responseCache": {"local": {"size": "64Mi"}, "redis": {"host": "redis"}}},
            ("spec.runtime.responseCache.local", "must be set, or redis, and not both; keep one of the two")),
    Invalid("a response cache of no kind", {"spec.runtime.responseCache": {}},
            ("spec.runtime.responseCache.local", "must be set, or redis")),
    Invalid("a response cache as large as the memory", {"spec.runtime.responseCache": {"local": {"size": "3840Mi"}}},
            ("spec.runtime.responseCache.local.size", "must be less than resources.memory, together with")),
    Invalid("a response cache of a kilobyte", {"spec.runtime.responseCache": {"local": {"size": "1k"}}},
            ("spec.runtime.responseCache.local.size", "must be from 1Mi to 1Ti")),
    Invalid("Redis with its port in the host", {"spec.runtime.responseCache": {"redis": {"host": "redis:6379"}}},
            ("spec.runtime.responseCache.redis.host", "without scheme and port; set the port in port")),
    Invalid("Redis with further settings in the host",
            {"spec.runtime.responseCache": {"redis": {"host": "redis,password=x"}}},
            ("spec.runtime.responseCache.redis.host", "must be a host name")),
    Invalid("authorities without TLS",
            {"spec.runtime.responseCache": {"redis": {"host": "redis", "tls": False, "caRef": {"name": "ca"}}}},
            ("spec.runtime.responseCache.redis.caRef", "needs tls; set tls: true or remove caRef")),
    Invalid("Redis waited for too long", {"spec.runtime.responseCache": {"redis": {"host": "redis", "timeout": "11s"}}},
            ("spec.runtime.responseCache.redis.timeout", "must be from 1ms to 10s")),
    Invalid("a resource of the rate limiter with a colon",
            {"spec.runtime.rateLimiter": {"resources": [{"name": "R1:9", "count": 1}]}},
            ("spec.runtime.rateLimiter.resources[0].name", "must be letters, digits, '_', '.' and '-'")),
    Invalid("a resource of the rate limiter twice, in two cases",
            {"spec.runtime.rateLimiter": {"resources": [{"name": "R1", "count": 1}, {"name": "r1", "count": 2}]}},
            ("spec.runtime.rateLimiter.resources", "must hold each name once for each gpu")),
    Invalid("a pool that is no quantity", {"spec.runtime.memoryPools": {"pinned": "-1"}},
            ("spec.runtime.memoryPools.pinned", QUANTITY_WORDS), ("spec.runtime.memoryPools.pinned", "Invalid value")),
    Invalid("a pool of two tebibytes", {"spec.runtime.memoryPools": {"cudaPerGPU": "2Ti"}},
            ("spec.runtime.memoryPools.cudaPerGPU", "must be from 0 to 1Ti")),
    Invalid("pinned memory as large as the memory", {"spec.runtime.memoryPools": {"pinned": "3840Mi"}},
            ("spec.runtime.memoryPools.pinned", "must be less than resources.memory, together with")),
    Invalid("a pool on no accelerator",
            {"spec.runtime.memoryPools": {"cudaPerGPU": "1Mi"}, "spec.accelerator.count": 0},
            ("spec.runtime.memoryPools.cudaPerGPU", "needs an accelerator; remove it, or raise")),
    Invalid("states on no accelerator",
            {"spec.runtime.memoryPools": {"statePerGPU": "1Mi"}, "spec.accelerator.count": 0},
            ("spec.runtime.memoryPools.statePerGPU", "needs an accelerator; remove it, or raise")),
    Invalid("a resource of an accelerator that the pod hasn't",
            {"spec.runtime.rateLimiter": {"resources": [{"name": "R", "count": 1, "gpu": 1}]}},
            ("spec.runtime.rateLimiter.resources", "must each have a gpu below the number of the pod's accelerators")),
    Invalid("no HTTP threads", {"spec.runtime.threads": {"http": 0}},
            ("spec.runtime.threads.http: must be at least 1",),
            ("spec.runtime.threads.http", "should be greater than or equal to 1")),
    Invalid("a request of a kilobyte", {"spec.runtime.maxRequestSize": "1k"},
            ("spec.runtime.maxRequestSize", "must be from 1Mi to 2047Mi")),
    Invalid("an unknown log format", {"spec.runtime.logging": {"format": "JSON"}},
            ("spec.runtime.logging.format: is not supported; use ISO8601 or Default",),
            ('spec.runtime.logging.format: Unsupported value: "JSON"',)),
    Invalid("quantiles without summaries", {"spec.runtime.metrics": {"quantiles": [0.5]}},
            ("spec.runtime.metrics.quantiles", "need summaries; set summaries: true or remove quantiles")),
    Invalid("a quantile twice", {"spec.runtime.metrics": {"summaries": True, "quantiles": [0.5, 0.5]}},
            ("spec.runtime.metrics.quantiles[1]: is listed twice; remove one",),
            ("spec.runtime.metrics.quantiles[1]: Duplicate value",)),
    Invalid("a quantile in percent", {"spec.runtime.metrics": {"summaries": True, "quantiles": [99]}},
            ("spec.runtime.metrics.quantiles[0]: must be at most 0.9999",),
            # the server writes the bound without its fraction
            ("spec.runtime.metrics.quantiles[0]", "should be less than or equal to")),
    Invalid("metrics every millisecond", {"spec.runtime.metrics": {"interval": "1ms"}},
            ("spec.runtime.metrics.interval", "must be from 100ms to 1m")),
    Invalid("no counters for the autoscaler", {"spec.runtime.metrics": {"counters": False}},
            ("spec.runtime.metrics.counters", "must be true unless scaling.mode is External")),
    Invalid("traces to a host without a scheme", {"spec.runtime.tracing": {"endpoint": "otel:4318"}},
            ("spec.runtime.tracing.endpoint", "must be http://HOST:PORT or https://HOST:PORT")),
    Invalid("traces with a further setting in the endpoint",
            {"spec.runtime.tracing": {"endpoint": "http://otel/v1,level=TENSORS"}},
            ("spec.runtime.tracing.endpoint", "must be http://HOST:PORT")),
    Invalid("none of the requests is traced", {"spec.runtime.tracing": {"endpoint": "http://otel:4318", "rate": 0}},
            ("spec.runtime.tracing.rate: must be at least 1",),
            ("spec.runtime.tracing.rate", "should be greater than or equal to 1")),
    Invalid("an attribute with an equals sign",
            {"spec.runtime.tracing": {"endpoint": "http://otel:4318", "resource": {"team": "a=b"}}},
            ("spec.runtime.tracing.resource.team", "must be letters, digits, inner spaces and"),
            ("spec.runtime.tracing.resource[team]", "must be letters, digits, inner spaces and")),
    Invalid("an attribute's key with a comma",
            {"spec.runtime.tracing": {"endpoint": "http://otel:4318", "resource": {"a,b": "c"}}},
            ("spec.runtime.tracing.resource", "must have keys such as service.name")),
    Invalid("shared memory for everybody", {"spec.runtime.clientSharedMemory": "Enabled"},
            ("spec.runtime.clientSharedMemory: is not supported; use Disabled or SamePod",),
            ('spec.runtime.clientSharedMemory: Unsupported value: "Enabled"',)),
    Invalid("a backend in capitals", {"spec.runtime.backends": [{"name": "Python", "settings": {"a": "b"}}]},
            ("spec.runtime.backends[0].name", "must be a backend such as onnxruntime")),
    Invalid("a backend without settings", {"spec.runtime.backends": [{"name": "python", "settings": {}}]},
            ("spec.runtime.backends[0].settings: must have at least 1 entry",),
            ("spec.runtime.backends[0].settings", "should have at least 1 properties")),
    Invalid("a backend twice",
            {"spec.runtime.backends": [{"name": "python", "settings": {"a": "b"}}] * 2},
            ("spec.runtime.backends[1].name: is used twice",), ("spec.runtime.backends[1]: Duplicate value",)),
    Invalid("a backend's setting with a comma",
            {"spec.runtime.backends": [{"name": "tensorrt", "settings": {"plugins": "a.so,b=c"}}]},
            ("spec.runtime.backends[0].settings.plugins", "must be letters, digits, inner spaces and"),
            ("spec.runtime.backends[0].settings[plugins]", "must be letters, digits, inner spaces and")),
    Invalid("a backend's setting that Kubernetes would expand",
            {"spec.runtime.backends": [{"name": "tensorrt", "settings": {"plugins": "$(CONCH_POD_UID)"}}]},
            ("spec.runtime.backends[0].settings.plugins", "must be letters, digits, inner spaces and"),
            ("spec.runtime.backends[0].settings[plugins]", "must be letters, digits, inner spaces and")),
    Invalid("backends from elsewhere",
            {"spec.runtime.backends": [{"name": "python", "settings": {"backend-directory": "/models/m/1"}}]},
            ("spec.runtime.backends[0].settings", "must not hold backend-directory")),
    Invalid("a model cache of both kinds", {"spec.runtime.modelCache": {"hostPath": "/var/x", "claimName": "x"}},
            ("spec.runtime.modelCache.hostPath", "must be set, or claimName, and not both; keep one of the two")),
    Invalid("a model cache without a place", {"spec.runtime.modelCache": {"size": "1Gi"}},
            ("spec.runtime.modelCache.hostPath", "must be set, or claimName")),
    Invalid("a model cache that climbs", {"spec.runtime.modelCache": {"hostPath": "/var/../etc"}},
            ("spec.runtime.modelCache.hostPath", "must not hold '.' or '..' as a part of the path")),
    Invalid("a model cache in a relative folder", {"spec.runtime.modelCache": {"hostPath": "var/cache"}},
            ("spec.runtime.modelCache.hostPath", "must be an absolute path on the nodes")),
    Invalid("a model cache of nothing", {"spec.runtime.modelCache": {"hostPath": "/var/x", "size": "0"}},
            ("spec.runtime.modelCache.size", "must be from 1Mi to 64Ti")),
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
    f"{MODEL}.format": ("is not supported; use ONNX, TensorRT, PyTorch",),
    f"{MODEL}.source.uri": ("is not supported; use s3, gs, https, oci, pvc or image",),
    f"{MODEL}.source.digest": (DIGEST_WORDS,),
    f"{MODEL}.inputs[0].name": (TENSOR_NAME_WORDS,),
    f"{MODEL}.inputs[0].dataType": ("is not supported; use BOOL",),
    f"{MODEL}.instances.kind": ("is not supported; use GPU, CPU or Model",),
    f"{MODEL}.batching.maxQueueDelay": (DURATION_WORDS,),
    f"{MODEL}.queue.timeout": (DURATION_WORDS,),
    f"{MODEL}.queue.timeoutAction": ("is not supported; use Reject or Delay",),
    f"{MODEL}.file": ("must be a name of letters, digits and",),
    f"{MODEL}.outputs[0].labelFile": ("must be a relative path",),
    f"{MODEL}.instanceGroups[0].name": (MODEL_NAME_WORDS,),
    f"{MODEL}.instanceGroups[0].profiles[0]": ("must be the number of an optimization profile",),
    f"{MODEL}.sequence.idleTimeout": (DURATION_WORDS,),
    f"{MODEL}.sequence.controls[0].tensor": (TENSOR_NAME_WORDS,),
    f"{MODEL}.sequence.states[0].inputName": (TENSOR_NAME_WORDS,),
    f"{MODEL}.sequence.states[0].initial[0].file": ("must be a relative path",),
    f"{MODEL}.acceleratorMemory": (QUANTITY_WORDS,),
    f"{MODEL}.warmup[0].name": ("must be letters, digits, inner spaces and _ . , : / ( ) # + -",),
    f"{MODEL}.sequence.states[0].initial[0].name": ("must be letters, digits, inner spaces and",),
    f"{MODEL}.warmup[0].inputs[0].file": ("must be a relative path",),
    f"{MODEL}.optimization.tensorRT.workspace": (QUANTITY_WORDS,),
    f"{SECOND}.steps[0].name": (MODEL_NAME_WORDS,),
    f"{SECOND}.steps[0].model": (MODEL_NAME_WORDS,),
    f"{SECOND}.steps[0].inputs.input": (TENSOR_NAME_WORDS,),
    "spec.runtime.image": ("must be an image reference",),
    "spec.runtime.sharedMemory": (QUANTITY_WORDS,),
    "spec.runtime.release": ("must be a release of Triton",),
    "spec.runtime.serviceAccountName": ("must be a Kubernetes name",),
    "spec.runtime.responseCache.local.size": (QUANTITY_WORDS,),
    "spec.runtime.responseCache.redis.host": ("must be a host name",),
    "spec.runtime.responseCache.redis.timeout": (DURATION_WORDS,),
    "spec.runtime.responseCache.redis.secretRef.name": ("must be a Kubernetes name",),
    "spec.runtime.responseCache.redis.caRef.name": ("must be a Kubernetes name",),
    "spec.runtime.responseCache.redis.caRef.key": ("must be a key of a ConfigMap",),
    "spec.runtime.rateLimiter.resources[0].name": ("must be letters, digits, '_', '.' and '-'",),
    "spec.runtime.memoryPools.pinned": (QUANTITY_WORDS,),
    "spec.runtime.maxRequestSize": (QUANTITY_WORDS,),
    "spec.runtime.logging.format": ("is not supported; use ISO8601",),
    "spec.runtime.metrics.interval": (DURATION_WORDS,),
    "spec.runtime.tracing.endpoint": ("must be http://HOST:PORT",),
    "spec.runtime.tracing.resource.team": ("must be letters, digits, inner spaces and",),
    "spec.runtime.clientSharedMemory": ("is not supported; use Disabled",),
    "spec.runtime.backends[0].name": ("must be a backend",),
    "spec.runtime.backends[0].settings.plugins": ("must be letters, digits, inner spaces and",),
    "spec.runtime.modelCache.hostPath": ("must be an absolute path",),
    "spec.runtime.modelCache.claimName": ("must be a Kubernetes name",),
    "spec.runtime.modelCache.size": (QUANTITY_WORDS,),
    "spec.accelerator.resource": ("must be an extended resource",),
    "spec.accelerator.products[0]": ("must be a value of the node label",),
    "spec.accelerator.memory": (QUANTITY_WORDS,),
    "spec.accelerator.computeCapability": ("must be a compute capability",),
    "spec.accelerator.claim.deviceClass": ("must be the name of a DeviceClass",),
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
FREE_TEXT_FIELDS = {f"{MODEL}.parameters.note", f"{MODEL}.optimization.tensorRT.parameters.note"}
_REFUSED_FREE_TEXTS = ("a line break", "a final line break", "a control character", "an unprintable C1 character")


# What must stand around a field for the rest to be valid.
PARTS: dict[str, Any] = {
    f"{MODEL}.outputs": [dict(INPUT)],
    f"{MODEL}.instanceGroups": [{"name": "first"}],
    f"{MODEL}.sequence": {
        "controls": [{"tensor": "start", "kind": "Start"}],
        "states": [
            {**STATE, "initial": [{"name": "a", "dataType": "FP32", "dims": [2], "data": "File", "file": "x.bin"}]}
        ],
    },
    f"{MODEL}.warmup": [{"name": "first", "inputs": [{**INPUT, "data": "File", "file": "x.bin"}]}],
    f"{MODEL}.optimization": {"tensorRT": {}, "openVINO": {}},
    SECOND: ENSEMBLE,
    "spec.runtime.responseCache.redis": {"host": "redis", "secretRef": {"name": "s"}, "caRef": {"name": "c"}},
    "spec.runtime.rateLimiter": {"resources": [{"name": "R1", "count": 1}]},
    "spec.runtime.tracing": {"endpoint": "http://otel:4318", "resource": {"team": "vision"}},
    "spec.runtime.backends": [{"name": "tensorrt", "settings": {"plugins": "/opt/plugins/a.so"}}],
}


def parts_around(path: str) -> dict[str, Any]:
    """What must be set for a service to be valid around a field, by path."""
    service_parts: dict[str, Any] = {}
    if path.startswith(f"{MODEL}.inputs"):
        service_parts[f"{MODEL}.inputs"] = [dict(INPUT)]
    if path.startswith((f"{MODEL}.batching", f"{MODEL}.queue")):
        service_parts |= BATCHED
    if path.startswith("spec.placement.tolerations"):
        service_parts["spec.placement.tolerations"] = [{"key": "gpu", "value": "x"}]
    if path.startswith("spec.accelerator.products"):
        service_parts["spec.accelerator.products"] = ["NVIDIA-L4"]
    for start, parts in PARTS.items():
        if path.startswith(start):
            service_parts[start] = copy.deepcopy(parts)
    if path.endswith("profiles[0]"):
        service_parts |= {f"{MODEL}.format": "TensorRT", f"{MODEL}.instanceGroups[0].profiles": ["0"]}
    return service_parts


def _hostile(path: str, what: str, words: tuple[str, ...]) -> Invalid:
    service_parts = parts_around(path)
    text = HOSTILE_TEXTS[what]
    # An enumeration, a duration or a quantity answers with what is allowed; other texts with their length.
    limited = path == f"{MODEL}.source.uri" or not words[0].startswith("is not ")
    if what == "10,000 characters" and limited and path != "metadata.name":
        words = ("characters; shorten it",)
    # In what a CEL rule finds, the API server writes an entry of a map with its key in brackets.
    server_path = path if what == "10,000 characters" else re.sub(r"\.(pool|note|team|plugins)$", r"[\1]", path)
    return Invalid(f"{what} in {path}", {**service_parts, path: text}, (path, *words), (server_path,))


HOSTILE = [_hostile(path, what, words) for path, words in TEXT_FIELDS.items() for what in HOSTILE_TEXTS] + [
    _hostile(path, what, (LINE_WORDS,)) for path in sorted(FREE_TEXT_FIELDS) for what in _REFUSED_FREE_TEXTS
]

INVALID = [*SHAPES, *NAMES, *SOURCES, *TENSORS, *BATCHING, *MODELS, *PLACES, *RUNTIME, *SCALING, *PARAMETERS, *HOSTILE]

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
    "an object with a key's worth of fields": {
        f"{MODEL}.source": {
            "uri": "s3://my.models-2/a/resnet+v1=2.onnx",
            "secretRef": {"name": "keys"},
            "region": "eu-west-1",
            "endpoint": "http://minio.storage.svc:9000",
            "digest": SHA256,
            "caRef": {"name": "ca"},
            "proxy": "http://proxy.example:3128",
        }
    },
    "a prefix with the pod's own identity": {
        f"{MODEL}.source": {"uri": "gs://models_1/resnet/", "identity": "ServiceAccount"}
    },
    "an artifact by digest": {f"{MODEL}.source": {"uri": f"oci://registry.example:5000/a/b-c_d@{SHA256}"}},
    "an artifact by tag and digest": {f"{MODEL}.source": {"uri": "oci://registry.example/m:v1", "digest": SHA256}},
    "an artifact by digest, said twice": {
        f"{MODEL}.source": {"uri": f"oci://registry.example/m:v1@{SHA256}", "digest": SHA256}
    },
    "what an engine was built with": {
        f"{MODEL}.source.engine": {"tensorRT": "10.5.0.18", "computeCapability": "8.6", "platform": "linux/amd64"}
    },
    "a claim with dots, a path with a slash at its end": {f"{MODEL}.source.uri": "pvc://models.v2/a/b.c..d/"},
    "an image by digest, its whole root": {f"{MODEL}.source.uri": f"image://registry.example:5000/m@{SHA256}#/"},
    "every format": {
        "spec.models": [
            make_model(name="torch", format="PyTorch", inputs=[INPUT], outputs=[INPUT]),
            *(
                make_model(name=f"m{n}", format=one)
                for n, one in enumerate(
                    ["TensorRT", "TensorFlow", "TFLite", "OpenVINO", "Python", "DALI", "vLLM", "TensorRTLLM", "Auto"]
                )
            ),
        ]
    },
    "an ensemble": {SECOND: ENSEMBLE},
    "thirty-two steps": {
        SECOND: {
            **ENSEMBLE,
            "steps": [
                {
                    "model": "resnet50",
                    "inputs": {"input": "raw" if n == 0 else f"t{n}"},
                    "outputs": {"output": "end" if n == 31 else f"t{n + 1}"},
                }
                for n in range(32)
            ],
        }
    },
    "a reshape to nothing but the batch": {
        f"{MODEL}.maxBatchSize": 4,
        f"{MODEL}.inputs": [{**INPUT, "dims": [1], "reshape": []}],
    },
    "a reshape between sizes that vary": {
        f"{MODEL}.inputs": [{**INPUT, "dims": [2, 4, -1, 6], "reshape": [8, -1, 1, 6]}]
    },
    "a tensor in full": {
        f"{MODEL}.format": "TensorRT",
        f"{MODEL}.inputs": [
            {
                **INPUT,
                "dims": [3, 4, 4],
                "optional": True,
                "shapeTensor": True,
                "tensorFormat": "NCHW",
                "nonLinearFormat": True,
            }
        ],
        f"{MODEL}.outputs": [{**INPUT, "labelFile": "a/b-c.txt"}],
    },
    "32 priorities": {
        **BATCHED,
        f"{MODEL}.batching": {"priorityLevels": 32, "defaultPriority": 32},
        f"{MODEL}.queue": {"levels": [{"priority": 32, "timeout": "24h", "timeoutAction": "Delay"}]},
    },
    "one priority in order": {**BATCHED, f"{MODEL}.batching": {"priorityLevels": 1, "preserveOrdering": True}},
    "a delay for those who ask": {
        **BATCHED,
        f"{MODEL}.queue": {"timeoutAction": "Delay", "allowTimeoutOverride": True},
    },
    "groups of instances": {
        f"{MODEL}.format": "TensorRT",
        f"{MODEL}.instanceGroups": [
            {
                "name": "a",
                "gpus": [0],
                "profiles": ["0", "9999"],
                "rateLimiter": {"resources": [{"name": "lane", "count": 2, "global": True}]},
            },
            {"name": "b", "kind": "Model", "count": 64, "passive": True},
        ],
        "spec.runtime.rateLimiter": {"resources": [{"name": "LANE", "count": 2}]},
    },
    "sequences with everything": {
        f"{MODEL}.maxBatchSize": 4,
        SEQUENCE: {
            "strategy": "Oldest",
            "idleTimeout": "24h",
            "maxCandidates": 65536,
            "preferredSizes": [4],
            "preserveOrdering": True,
            "iterative": True,
            "controls": [
                {"tensor": "a", "kind": "Start", "dataType": "FP32", "falseTrue": [-0.5, 1]},
                {"tensor": "b", "kind": "End", "dataType": "BOOL", "falseTrue": [1, 0]},
                {"tensor": "c", "kind": "Ready"},
                {"tensor": "d", "kind": "CorrelationID", "dataType": "STRING"},
            ],
            "states": [
                {
                    **STATE,
                    "dims": [-1],
                    "sameBuffer": True,
                    "growableMemory": True,
                    "initial": [{"name": "i", "dataType": "FP32", "dims": [9], "data": "File", "file": "a/b"}],
                }
            ],
        },
    },
    "sequences in slots": {SEQUENCE: {"minimumSlotUtilization": 1, "maxQueueDelay": "1m"}},
    "warm-ups": {
        f"{MODEL}.maxBatchSize": 4,
        f"{MODEL}.warmup": [
            {**WARMUP, "batchSize": 4, "count": 1000},
            {"name": "b", "inputs": [{**INPUT, "data": "Random"}]},
        ],
    },
    "an optimization in full": {
        f"{MODEL}.optimization": {
            "tensorRT": {"precision": "INT8", "workspace": "64Gi", "engineCache": True, "parameters": {"a": "b"}},
            "openVINO": {"parameters": {"c": "d"}},
            "graphLevel": 2,
            "pinnedMemory": {"output": False},
            "priority": "Min",
            "gatherKernelBufferThreshold": 1,
            "eagerBatching": True,
        }
    },
    "CUDA graphs": {
        f"{MODEL}.format": "TensorRT",
        f"{MODEL}.optimization": {
            "cudaGraphs": {
                "specs": [{"batchSize": 4, "inputs": [{"name": "x", "dims": [2]}], "lowerBound": {"batchSize": 0}}]
            }
        },
    },
    "specific versions": {f"{MODEL}.versions": {"policy": "Specific", "numbers": [1, 2**53 - 1]}},
    "further fields": {
        f"{MODEL}.config": {
            "metric_tags": {"a": "b"},
            "cc_model_filenames": {"8.0": "ampere/model.onnx"},
            "model_repository_agents": {"agents": [{"name": "checksum"}]},
            "model_metrics": {
                "metric_control": [{"metric_identifier": {"family": "f"}, "histogram_options": {"buckets": [1, 2.5]}}]
            },
        }
    },
    "a cache, and a model that uses it": {
        f"{MODEL}.responseCache": True,
        "spec.runtime.responseCache": {"local": {"size": "1Mi"}},
    },
    "dims of -1": {f"{MODEL}.inputs": [{**INPUT, "dims": [-1, 1]}], f"{MODEL}.outputs": [INPUT]},
    "a preferred size of maxBatchSize": {**BATCHED, f"{MODEL}.batching.preferredSizes": [8]},
    "a batch of 0 without batching": {f"{MODEL}.maxBatchSize": 0},
    "a queue delay of 1m": {**BATCHED, f"{MODEL}.batching.maxQueueDelay": "1m"},
    "a queue time-out of 1.5ms": {**BATCHED, f"{MODEL}.queue": {"timeout": "1.5ms"}},
    "a target just below the queue": {**BATCHED, f"{MODEL}.queue": {"maxSize": 9}},
    "a target that is a fraction": {"spec.scaling.queueDepth.target": 0.5},
    "min equal to max": {"spec.scaling.minReplicas": 4},
    "CPU instances without an accelerator": {f"{MODEL}.instances.kind": "CPU", "spec.accelerator.count": 0},
    "sixteen accelerators of another vendor": {"spec.accelerator": {"resource": "amd.com/gpu", "count": 16}},
    "one MIG device": {"spec.accelerator": {"resource": "nvidia.com/mig-1g.5gb", "memory": "4Gi"}},
    "one share of an accelerator": {"spec.accelerator": {"resource": "nvidia.com/gpu.shared"}},
    "no MIG device": {
        f"{MODEL}.instances.kind": "CPU",
        "spec.accelerator": {"resource": "nvidia.com/mig-1g.5gb", "count": 0},
    },
    "an accelerator by everything that its node says": {
        "spec.accelerator": {"products": ["NVIDIA-L4"], "memory": "22Gi", "computeCapability": "8.9", "count": 2}
    },
    "devices of a class": {
        "spec.accelerator.claim": {
            "deviceClass": "gpu.nvidia.com",
            "count": 16,
            "selectors": ["device.attributes['gpu.nvidia.com'].productName == 'NVIDIA L4'", "a" * 2048],
        }
    },
    "no toleration of the usual taints": {"spec.placement.tolerateAcceleratorTaints": False},
    "numbers as quantities": {"spec.resources": {"cpu": 2, "memory": 2**30}},
    "shared memory just below the memory": {"spec.runtime.sharedMemory": "4095.9Mi"},
    "a cache just below the memory": {"spec.runtime.responseCache": {"local": {"size": "3839.9Mi"}}},
    "a cache in Redis, in full": {
        "spec.runtime.responseCache": {
            "redis": {
                "host": "10.0.0.7",
                "port": 65535,
                "secretRef": {"name": "redis.auth"},
                "caRef": {"name": "ca", "key": "a"},
                "database": 1,
                "timeout": "10s",
                "connectTimeout": "1m",
                "poolSize": 256,
            }
        }
    },
    "a rate limiter without resources": {"spec.runtime.rateLimiter": {}},
    "a resource for each gpu": {
        "spec.accelerator.count": 2,
        "spec.runtime.rateLimiter": {
            "resources": [
                {"name": "R", "count": 1},
                {"name": "r", "count": 2, "gpu": 0},
                {"name": "R", "count": 3, "gpu": 1},
            ]
        },
    },
    "pools of nothing": {"spec.runtime.memoryPools": {"pinned": 0, "cudaPerGPU": "0", "statePerGPU": "1Ti"}},
    "all settings of threads, log and metrics": {
        "spec.runtime.threads": {"http": 1, "modelLoad": 1, "bufferManager": 64, "grpcInferPool": 4096},
        "spec.runtime.logging": {"format": "Default", "verbose": 9, "info": True},
        "spec.runtime.metrics": {
            "interval": "100ms",
            "summaries": True,
            "quantiles": [0.01, 0.5, 0.9999],
            "histograms": True,
        },
    },
    "no counters with an autoscaler elsewhere": {
        "spec.runtime.metrics": {"counters": False},
        "spec.scaling.mode": "External",
    },
    "traces of all requests": {
        "spec.runtime.tracing": {
            "endpoint": "https://otel.example:4318/v1/traces",
            "rate": 1,
            "resource": {"service.name": "A b/c:d@e+f-1"},
        }
    },
    "a backend's paths": {
        "spec.runtime.backends": [
            {"name": "tensorrt", "settings": {"plugins": "/opt/a.so", "version-compatible": "true"}},
            {"name": "python", "settings": {"shm-default-byte-size": "1048576"}},
        ]
    },
    "a model cache on the nodes": {"spec.runtime.modelCache": {"hostPath": "/var/cache/a..b/"}},
    "a model cache on a claim": {"spec.runtime.modelCache": {"claimName": "models.v2", "size": "1Mi"}},
    "the rest of the runtime": {
        "spec.runtime.release": "24.10",
        "spec.runtime.serviceAccountName": "a.b",
        "spec.runtime.maxRequestSize": "2047Mi",
        "spec.runtime.clientSharedMemory": "SamePod",
        "spec.runtime.image": "registry.example:5000/triton@sha256:0",
    },
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
