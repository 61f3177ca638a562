"""The Triton server of a service. Pure; a part of the InferenceService.

What stands here becomes arguments of tritonserver: no pattern lets through a `$`, which Kubernetes would expand, nor a
`,` or `=` where Triton would split the argument.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from conch.api.fields import Amount, Between, ByName, Distinct, Duration, KeysMatch, Matches, Quantity, Resource, Rule
from conch.api.source import ConfigMapKey, ObjectName, SecretReference
from conch.api.text import HOST, PATH

DEFAULT_REDIS_PORT: Final = 6379

_ARGUMENT_VALUE: Final = r"[A-Za-z0-9_.:/@+-]([A-Za-z0-9_.:/@+ -]*[A-Za-z0-9_.:/@+-])?"
# Names that an attribute of OpenTelemetry and a setting of a backend have.
_SETTING: Final = r"[A-Za-z][A-Za-z0-9_.-]{0,62}"
# Without what splits an argument of Triton.
_URL_PATH: Final = "(/[A-Za-z0-9._~-]+)*/?"
_HOST_NAME: Final = r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?"

Size = Annotated[Quantity, Amount("1Mi", "1Ti")]
PoolSize = Annotated[Quantity, Amount("0", "1Ti")]


class LocalCache(Resource):
    """A response cache in the memory of each pod."""

    size: Size = Field(
        description="Bytes of memory for cached responses in each pod, 1Mi to 1Ti; counts towards resources.memory."
    )


class RedisCache(Resource):
    """A response cache that all replicas share, in Redis; the image must hold Triton's redis cache plug-in."""

    rules = (
        Rule(
            "caRef",
            "!has(self.caRef) || self.tls",
            "needs tls; set tls: true or remove caRef",
            lambda redis: redis.ca_ref is None or redis.tls,
        ),
    )

    host: Annotated[
        str,
        Field(min_length=1, max_length=253),
        Matches(_HOST_NAME, "must be a host name or an IPv4 address, without scheme and port; set the port in port"),
    ] = Field(description="Host name or address of Redis, such as redis.cache.svc.")
    port: int = Field(DEFAULT_REDIS_PORT, ge=1, le=65535, description="Port of Redis. Default: 6379.")
    tls: bool = Field(
        True,
        description="Connect with TLS. False sends the password and every cached response in the clear. Default: true.",
    )
    ca_ref: ConfigMapKey | None = Field(
        None, description="Authorities to trust for Redis' certificate. Default: those of the image."
    )
    secret_ref: SecretReference | None = Field(
        None,
        description="A Secret whose keys username (may be absent) and password reach Triton as environment variables. "
        "Default: no authentication.",
    )
    database: int = Field(0, ge=0, le=1023, description="Number of the Redis database. Default: 0.")
    timeout: Annotated[Duration, Between("1ms", "10s")] = Field(
        0.1,
        description="How long a request waits for Redis before it is answered without the cache, 1ms to 10s. "
        "Default: 100ms.",
    )
    connect_timeout: Annotated[Duration, Between("1ms", "1m")] = Field(
        1.0, description="How long connecting may take, 1ms to 1m. Default: 1s."
    )
    pool_size: int = Field(4, ge=1, le=256, description="Connections to Redis that each pod keeps. Default: 4.")


class ResponseCache(Resource):
    """Where responses of models with responseCache are kept."""

    rules = (
        Rule(
            "local",
            "has(self.local) != has(self.redis)",
            "must be set, or redis, and not both; keep one of the two",
            lambda cache: (cache.local is None) != (cache.redis is None),
        ),
    )

    local: LocalCache | None = Field(None, description="A cache in each pod. Default: none.")
    redis: RedisCache | None = Field(None, description="A cache in Redis for all pods. Default: none.")


class RateLimiterResource(Resource):
    """How much there is of a resource that instances of models take while they run."""

    name: Annotated[
        str,
        Field(min_length=1, max_length=63),
        Matches(
            r"[A-Za-z0-9_][A-Za-z0-9_.-]*",
            "must be letters, digits, '_', '.' and '-', and begin with a letter, digit or '_'",
        ),
    ] = Field(description="The resource's name, as models name it; upper and lower case are the same.")
    count: int = Field(ge=1, le=1_000_000, description="How much there is of it.")
    gpu: int | None = Field(
        None,
        ge=0,
        le=15,
        description="The accelerator that has it, counted from 0; a global resource needs none. Default: each one.",
    )


class RateLimiter(Resource):
    """Triton's rate limiter: instances run when the resources that they name are free."""

    rules = (
        Rule(
            "resources",
            "!has(self.resources) || self.resources.all(one, self.resources.exists_one(other, "
            "one.name.lowerAscii() == other.name.lowerAscii() && "
            "(has(one.gpu) ? one.gpu : -1) == (has(other.gpu) ? other.gpu : -1)))",
            "must hold each name once for each gpu, in whatever case; remove the repeated entry",
            lambda limiter: (
                len({(entry.name.lower(), entry.gpu) for entry in limiter.resources}) == len(limiter.resources)
            ),
        ),
    )

    resources: list[RateLimiterResource] = Field(
        [],
        max_length=32,
        description="What there is of each resource. Default: as much as the instance that takes most of it needs.",
    )


class MemoryPools(Resource):
    """Memory that Triton takes at its start for moving tensors between host and accelerators."""

    pinned: PoolSize | None = Field(
        None,
        description="Bytes of pinned host memory in each pod, 0 to 1Ti; counts towards resources.memory. "
        "Default: 256Mi with an accelerator, 0 without.",
    )
    cuda_per_gpu: Annotated[PoolSize | None, Field(alias="cudaPerGPU")] = Field(
        None, description="Bytes of memory on each accelerator, 0 to 1Ti. Default: Triton's 64Mi."
    )
    state_per_gpu: Annotated[PoolSize | None, Field(alias="statePerGPU")] = Field(
        None,
        description="Address space on each accelerator for one sequence state with growableMemory, in bytes, 0 to 1Ti; "
        "no state grows beyond it. Default: Triton's 1Gi.",
    )


class Threads(Resource):
    """Threads and pools inside Triton."""

    http: int = Field(8, ge=1, le=256, description="Threads that serve HTTP. Default: 8.")
    model_load: int = Field(
        4, ge=1, le=64, description="Models that load at the same time at the start; one needs less memory. Default: 4."
    )
    buffer_manager: int = Field(
        0, ge=0, le=64, description="Threads that copy tensors of large batches; 0: the batch's own. Default: 0."
    )
    grpc_infer_pool: int = Field(
        8,
        ge=1,
        le=4096,
        description="Requests and responses of gRPC that stay allocated for reuse; raise it to the requests that are "
        "in flight at once. Default: 8.",
    )
    grpc_infer: int | None = Field(
        None,
        ge=2,
        le=128,
        description="Threads that take in requests of gRPC, 2 to 128; more help ensembles of fast models. Needs Triton "
        "25.04 or newer. Default: Triton's 2.",
    )


class Logging(Resource):
    """What Triton writes to its log."""

    format: Literal["ISO8601", "Default"] = Field(
        "ISO8601",
        description="ISO8601 begins lines with the full date, Default with Triton's short one. Default: ISO8601.",
    )
    verbose: int = Field(0, ge=0, le=9, description="Level of verbose lines, 0 (none) to 9; costs latency. Default: 0.")
    info: bool = Field(
        False,
        description="Also log information. A server that can't load a model then buries the reason, and the status "
        "shows less of it. Default: false.",
    )


Quantile = Annotated[float, Field(ge=0.01, le=0.9999)]


class Metrics(Resource):
    """What Triton measures for Prometheus."""

    rules = (
        Rule(
            "quantiles",
            "!has(self.quantiles) || self.quantiles.size() == 0 || self.summaries",
            "need summaries; set summaries: true or remove quantiles",
            lambda metrics: not metrics.quantiles or metrics.summaries,
        ),
    )

    interval: Annotated[Duration, Between("100ms", "1m")] = Field(
        2.0, description="How often figures of accelerators and memory are read, 100ms to 1m. Default: 2s."
    )
    summaries: bool = Field(
        False, description="Latency summaries of each model, with quantiles; costs CPU per request. Default: false."
    )
    quantiles: Annotated[list[Quantile], Distinct()] = Field(
        [],
        max_length=16,
        description="The summaries' quantiles, each 0.01 to 0.9999. Default: Triton's 0.5, 0.9, 0.95, 0.99 and 0.999.",
    )
    counters: bool = Field(
        True,
        description="Latency counters of each model; the autoscaler reads them, so false needs scaling.mode External. "
        "Default: true.",
    )
    histograms: bool = Field(
        False,
        description="Histograms of the time to the first response of decoupled models; needs Triton 24.11 or newer. "
        "Default: false.",
    )


class Tracing(Resource):
    """Traces of requests, sent with OpenTelemetry's protocol over HTTP."""

    endpoint: Annotated[
        str,
        Field(max_length=512),
        Matches(
            f"https?://{HOST}{_URL_PATH}",
            "must be http://HOST:PORT or https://HOST:PORT, with a path or without one (then /v1/traces), such as "
            "http://otel-collector.observability.svc:4318",
        ),
    ] = Field(description="The collector's address for OTLP over HTTP, such as http://otel-collector.monitoring:4318.")
    rate: int = Field(
        1000, ge=1, le=1_000_000_000, description="One of this many requests is traced; 1: all. Default: 1000."
    )
    resource: Annotated[
        dict[
            str,
            Annotated[
                str,
                Field(min_length=1, max_length=255),
                Matches(_ARGUMENT_VALUE, "must be letters, digits, inner spaces and _ . : / @ + -"),
            ],
        ],
        KeysMatch(
            _SETTING,
            "must have keys such as service.name: letters, digits, '_', '.' and '-', at most 63; rename the key",
        ),
    ] = Field(
        {},
        max_length=16,
        description="Attributes of the traces' resource, such as service.name, beside k8s.pod.name and "
        "k8s.namespace.name. Default: none.",
    )


class Backend(Resource):
    """Settings of one of Triton's backends, for all models that it runs."""

    rules = (
        Rule(
            "settings",
            "!('backend-directory' in self.settings)",
            "must not hold backend-directory, from which Triton would load other code; use an image with the backend",
            lambda backend: "backend-directory" not in backend.settings,
        ),
    )

    name: Annotated[
        str,
        Field(min_length=1, max_length=63),
        Matches(r"[a-z][a-z0-9_-]*", "must be a backend such as onnxruntime: lower-case letters, digits, '_' and '-'"),
    ] = Field(description="The backend's name, such as tensorrt, onnxruntime or python.")
    settings: Annotated[
        dict[
            str,
            Annotated[
                str,
                Field(min_length=1, max_length=255),
                Matches(_ARGUMENT_VALUE, "must be letters, digits, inner spaces and _ . : / @ + -"),
            ],
        ],
        KeysMatch(
            _SETTING,
            "must have keys such as default-max-batch-size: letters, digits, '_', '.' and '-', at most 63; rename the "
            "key",
        ),
    ] = Field(
        min_length=1, max_length=32, description="The backend's settings by name, such as default-max-batch-size."
    )


class ModelCache(Resource):
    """A cache of downloaded models that outlives pods, so that the next one on the node starts without a download."""

    rules = (
        Rule(
            "hostPath",
            "has(self.hostPath) != has(self.claimName)",
            "must be set, or claimName, and not both; keep one of the two",
            lambda cache: (cache.host_path is None) != (cache.claim_name is None),
        ),
        Rule(
            "hostPath",
            "!has(self.hostPath) || !self.hostPath.matches('(^|/)[.]{1,2}(/|$)')",
            "must not hold '.' or '..' as a part of the path; write it out",
            lambda cache: cache.host_path is None or not {".", ".."} & set(cache.host_path.split("/")),
        ),
    )

    host_path: Annotated[str, Field(max_length=255), Matches(PATH, "must be an absolute path on the nodes")] | None = (
        Field(
            None,
            description="A folder on each node that group 1000 can write; a missing one is made for root only, and not "
            "used. Default: none.",
        )
    )
    claim_name: ObjectName | None = Field(
        None, description="A PersistentVolumeClaim that all pods of the service can write. Default: none."
    )
    size: Annotated[Quantity, Amount("1Mi", "64Ti")] = Field(
        "100Gi",
        description="Bytes that the cache may hold, 1Mi to 64Ti; the models unused for longest go first. "
        "Default: 100Gi.",
    )


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
    release: (
        Annotated[
            str,
            Field(max_length=64),
            Matches(r"2[0-9][.](0[1-9]|1[0-2])", "must be a release of Triton such as 24.10: year and month"),
        ]
        | None
    ) = Field(
        None,
        description="The release of Triton in the image, such as 24.10, where the image's tag doesn't begin with it; "
        "what the release can't do is then refused before it costs a start. Default: the tag's; otherwise unknown.",
    )
    shared_memory: Annotated[Quantity, Amount("1Mi", "64Ti", " (m stands for thousandths, Mi for mebibytes)")] = Field(
        "256Mi",
        description="Size of /dev/shm, which Python models use, in bytes; counts towards memory. Default: 256Mi.",
    )
    service_account_name: ObjectName | None = Field(
        None,
        description="A ServiceAccount of yours that the pods run as, for workload identity. Its token isn't mounted. "
        "Default: one without any rights, made by Conch.",
    )
    response_cache: ResponseCache | None = Field(
        None, description="Where responses of models with responseCache are kept. Default: nowhere."
    )
    rate_limiter: RateLimiter | None = Field(
        None,
        description="What there is of the resources that instances name. Default: on when a model's instances have a "
        "rateLimiter, with as much as they need.",
    )
    memory_pools: MemoryPools = Field(MemoryPools(), description="Memory for moving tensors.")
    threads: Threads = Field(Threads(), description="Threads and pools inside Triton.")
    max_request_size: Annotated[Quantity, Amount("1Mi", "2047Mi")] | None = Field(
        None,
        description="The largest body of an HTTP request, in bytes, 1Mi to 2047Mi; larger ones are refused with 400. "
        "Needs Triton 25.06 or newer. Default: Triton's 64Mi there, else no limit.",
    )
    logging: Logging = Field(Logging(), description="What Triton writes to its log.")
    metrics: Metrics = Field(Metrics(), description="What Triton measures.")
    tracing: Tracing | None = Field(None, description="Traces of requests. Default: off.")
    client_shared_memory: Literal["Disabled", "SamePod"] = Field(
        "Disabled",
        description="SamePod lets every client that reaches the server register shared memory of the pod, so that "
        "side-cars added to it hand over tensors without copies. Whoever can send requests can then read and write "
        "what lies in the pod's /dev/shm. Default: Disabled.",
    )
    backends: Annotated[list[Backend], ByName()] = Field(
        [], max_length=16, description="Settings of Triton's backends. Default: none."
    )
    model_cache: ModelCache | None = Field(
        None, description="A cache of downloaded models on the nodes. Default: none: each pod downloads its own."
    )
