"""The arguments of tritonserver and the environment that they name, from the spec. Pure.

tritonserver is started without a shell, but Kubernetes expands `$(NAME)` in arguments, and Triton splits some at commas
and equals signs. Text of a user reaches only values that the API's patterns keep free of all three, and `_literal`
guards the first once more.

Options are given also where they repeat Triton's default, so that a new release's default changes nothing unseen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from conch import names
from conch.api.fields import parse_quantity
from conch.triton.releases import Feature, release_of

if TYPE_CHECKING:
    from conch.api.inferenceservice import InferenceServiceSpec
    from conch.api.runtime import LocalCache, RedisCache
    from conch.triton.releases import ServerImage

MODELS_PATH: Final = "/models"
EXIT_TIMEOUT_S: Final = 30
"""The longest that Triton itself waits after SIGTERM; an idle kept-alive connection makes it wait to the end."""

KEY_HEADER: Final = "conch-closed"
"""The header, over gRPC behind `triton-grpc-protocol-`, that a request to a closed API must carry."""
POD_UID: Final = "CONCH_POD_UID"
POD_NAME: Final = "CONCH_POD_NAME"
POD_NAMESPACE: Final = "CONCH_POD_NAMESPACE"
CLOSED_APIS: Final = ("model-repository", "trace", "logging")
"""Triton's names of what no client needs. Statistics and the models' configuration stay open: they are read."""
SHARED_MEMORY_API: Final = "shared-memory"

REDIS_AUTHORITIES_PATH: Final = "/etc/conch/redis"
REDIS_AUTHORITIES_VOLUME: Final = "redis-authorities"
_AUTHORITIES_FILE: Final = "ca.crt"

DEFAULT_PINNED_BYTES: Final = 256 * 2**20
TRACES_PATH: Final = "/v1/traces"


def server_args(spec: InferenceServiceSpec, image: str) -> list[str]:
    """Arguments of tritonserver for the Triton that the image holds."""
    server = release_of(image, spec.runtime.release)
    return [
        *_repository(spec),
        *_doors(spec, server),
        *_closed(spec),
        *_shared_memory(spec, server),
        *_metrics(spec),
        *_logging(spec),
        *_threads(spec, server),
        *_memory(spec),
        *_cache(spec),
        *_rate_limiter(spec),
        *_tracing(spec),
        *_backends(spec),
    ]


def server_env(spec: InferenceServiceSpec) -> list[dict[str, Any]]:
    """Environment that the arguments and Triton's plug-ins read, as the API server stores it."""
    env = [_from_field(POD_UID, "metadata.uid")]
    if spec.runtime.tracing is not None:
        env += [_from_field(POD_NAME, "metadata.name"), _from_field(POD_NAMESPACE, "metadata.namespace")]
    redis = redis_cache(spec)
    if redis is not None and redis.secret_ref is not None:
        # Arguments show in `kubectl get pod`; the plug-in reads these two instead.
        secret = redis.secret_ref.name
        env += [
            _from_secret("TRITONCACHE_REDIS_USERNAME", secret, "username", optional=True),
            _from_secret("TRITONCACHE_REDIS_PASSWORD", secret, "password", optional=False),
        ]
    return env


def server_volumes(spec: InferenceServiceSpec) -> list[dict[str, Any]]:
    """Volumes that only the arguments need: the authorities of Redis' certificate."""
    redis = redis_cache(spec)
    if redis is None or redis.ca_ref is None:
        return []
    items = [{"key": redis.ca_ref.key, "path": _AUTHORITIES_FILE}]
    source = {"name": redis.ca_ref.name, "items": items, "defaultMode": 0o444}
    return [{"name": REDIS_AUTHORITIES_VOLUME, "configMap": source}]


def server_mounts(spec: InferenceServiceSpec) -> list[dict[str, Any]]:
    """Where Triton's container has `server_volumes`."""
    return [
        {"name": volume["name"], "mountPath": REDIS_AUTHORITIES_PATH, "readOnly": True}
        for volume in server_volumes(spec)
    ]


def server_ports(spec: InferenceServiceSpec) -> tuple[int, ...]:
    """TCP ports that Triton itself connects to: Redis and the traces' collector."""
    redis, tracing = redis_cache(spec), spec.runtime.tracing
    ports = [] if redis is None else [redis.port]
    if tracing is not None:
        parts = urlsplit(tracing.endpoint)
        ports.append(parts.port or (443 if parts.scheme == "https" else 80))
    return tuple(sorted(set(ports)))


def redis_cache(spec: InferenceServiceSpec) -> RedisCache | None:
    """The response cache in Redis, if that is the one."""
    return None if spec.runtime.response_cache is None else spec.runtime.response_cache.redis


def _repository(spec: InferenceServiceSpec) -> list[str]:
    return [
        f"--model-repository={MODELS_PATH}",
        # The repository is complete before the start; no client may load code into the server later.
        "--model-control-mode=none",
        # A pod that can't load a model ends with Triton's words instead of serving without it.
        "--exit-on-error=true",
        # /v2/health/ready then speaks for all models.
        "--strict-readiness=true",
        f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
        # Each model that loads has its weights twice for a moment; fewer at once need less memory.
        f"--model-load-thread-count={spec.runtime.threads.model_load}",
    ]


def _doors(spec: InferenceServiceSpec, server: ServerImage) -> list[str]:
    size = spec.runtime.max_request_size
    return [
        f"--http-port={names.HTTP_PORT}",
        f"--grpc-port={names.GRPC_PORT}",
        f"--metrics-port={names.METRICS_PORT}",
        # Two more doors; an environment variable in the image can open the second one.
        "--allow-sagemaker=false",
        "--allow-vertex-ai=false",
        # Clients behind a load balancer keep idle connections open with pings; by default Triton ends a connection
        # that pings more often than every 5 minutes, which clients see as failed requests.
        "--grpc-keepalive-permit-without-calls=true",
        "--grpc-http2-min-recv-ping-interval-without-data=10000",
        *(
            []
            if size is None or server.has(Feature.HTTP_MAX_INPUT_SIZE) is False
            else [_bytes(Feature.HTTP_MAX_INPUT_SIZE.option, size)]
        ),
    ]


def _closed(spec: InferenceServiceSpec) -> list[str]:
    """Close what changes the server, with a key that no client has: the pod's own uid.

    The kubelet fills it in through the downward API, so it is another one in each pod, stands in no manifest and needs
    no Secret. Who may read the namespace's pods can learn it; these APIs are closed to whoever can send requests.
    """
    open_memory = spec.runtime.client_shared_memory == "SamePod"
    apis = ",".join(CLOSED_APIS if open_memory else (*CLOSED_APIS, SHARED_MEMORY_API))
    restricted = f"{apis}:{KEY_HEADER}=$({POD_UID})"
    return [f"--http-restricted-api={restricted}", f"--grpc-restricted-protocol={restricted}"]


def _shared_memory(spec: InferenceServiceSpec, server: ServerImage) -> list[str]:
    if not server.has(Feature.CLIENT_SHM):
        return []
    return [f"{Feature.CLIENT_SHM.option}={_flag(spec.runtime.client_shared_memory == 'SamePod')}"]


def _metrics(spec: InferenceServiceSpec) -> list[str]:
    metrics = spec.runtime.metrics
    options = [
        "--allow-metrics=true",
        # Without an accelerator Triton would warn at each poll that it finds none.
        f"--allow-gpu-metrics={_flag(spec.accelerator.devices > 0)}",
        # These are the whole node's figures, not the pod's: they would only mislead.
        "--allow-cpu-metrics=false",
        # Shorter than a scrape's interval, or GPU memory would be older than the scrape says.
        f"--metrics-interval-ms={round(metrics.interval * 1000)}",
        # The autoscaler reads time at work from these.
        f"--metrics-config=counter_latencies={_flag(metrics.counters)}",
        # A third of the throughput in issue 8561 of triton-inference-server/server: only when wanted.
        f"--metrics-config=summary_latencies={_flag(metrics.summaries)}",
    ]
    if metrics.quantiles:
        options.append(f"--metrics-config=summary_quantiles={','.join(map(_quantile, metrics.quantiles))}")
    if metrics.histograms:
        options.append(f"{Feature.HISTOGRAMS.option}=true")
    return options


def _logging(spec: InferenceServiceSpec) -> list[str]:
    logging = spec.runtime.logging
    return [
        # A server that ends prints kilobytes of tables of its options at the level of information, after the error that
        # ended it: the kubelet keeps the last 2 KiB, and the cause would be lost to the status.
        f"--log-info={_flag(logging.info)}",
        f"--log-verbose={logging.verbose}",
        # Full dates, so that lines of several pods sort together.
        f"--log-format={'ISO8601' if logging.format == 'ISO8601' else 'default'}",
    ]


def _threads(spec: InferenceServiceSpec, server: ServerImage) -> list[str]:
    threads = spec.runtime.threads
    options = [
        f"--http-thread-count={threads.http}",
        f"--grpc-infer-allocation-pool-size={threads.grpc_infer_pool}",
        f"--buffer-manager-thread-count={threads.buffer_manager}",
    ]
    if threads.grpc_infer is not None and server.has(Feature.GRPC_INFER_THREADS) is not False:
        options.append(f"{Feature.GRPC_INFER_THREADS.option}={threads.grpc_infer}")
    return options


def _memory(spec: InferenceServiceSpec) -> list[str]:
    pools, devices = spec.runtime.memory_pools, spec.accelerator.devices
    # Without an accelerator a pool only brings an error about CUDA into the log.
    pinned = str(DEFAULT_PINNED_BYTES if devices else 0) if pools.pinned is None else pools.pinned
    options = [_bytes("--pinned-memory-pool-byte-size", pinned)]
    for option, size in (
        ("--cuda-memory-pool-byte-size", pools.cuda_per_gpu),
        ("--cuda-virtual-address-size", pools.state_per_gpu),
    ):
        # A container sees its own accelerators only, numbered from 0.
        options += [] if size is None else [_bytes(f"{option}={device}:", size) for device in range(devices)]
    return options


def _cache(spec: InferenceServiceSpec) -> list[str]:
    cache = spec.runtime.response_cache
    if cache is None:
        return []
    if cache.local is not None:
        return _local_cache(cache.local)
    return [] if cache.redis is None else _redis_cache(cache.redis)


def _local_cache(local: LocalCache) -> list[str]:
    return [_bytes("--cache-config=local,size", local.size)]


def _redis_cache(redis: RedisCache) -> list[str]:
    """Options of triton-inference-server/redis_cache; user and password come by environment."""
    timeout_ms, connect_ms = round(redis.timeout * 1000), round(redis.connect_timeout * 1000)
    settings: dict[str, str | int] = {
        "host": _literal(redis.host),
        "port": redis.port,
        "db": redis.database,
        # The plug-in's own defaults wait for ever: a Redis that hangs would hang every request.
        "connect_timeout": connect_ms,
        "socket_timeout": timeout_ms,
        "wait_timeout": timeout_ms,
        "pool_size": redis.pool_size,
    }
    if redis.tls:
        settings["tls_enabled"] = "true"
        if redis.ca_ref is not None:
            settings["cacert"] = f"{REDIS_AUTHORITIES_PATH}/{_AUTHORITIES_FILE}"
        if any(letter.isalpha() for letter in redis.host):
            # Managed services choose the certificate by name; an address must not be sent as one.
            settings["sni"] = _literal(redis.host)
    return [f"--cache-config=redis,{key}={value}" for key, value in settings.items()]


def _rate_limiter(spec: InferenceServiceSpec) -> list[str]:
    limiter = spec.runtime.rate_limiter
    if limiter is None and not _limited(spec):
        return []
    options = ["--rate-limit=execution_count"]
    for resource in [] if limiter is None else limiter.resources:
        device = "" if resource.gpu is None else f":{resource.gpu}"
        options.append(f"--rate-limit-resource={_literal(resource.name)}:{resource.count}{device}")
    return options


def _limited(spec: InferenceServiceSpec) -> bool:
    """Whether instances name resources, which Triton would ignore with its rate limiter off."""
    return any(
        group.rate_limiter is not None for model in spec.models for group in (model.instances, *model.instance_groups)
    )


def _tracing(spec: InferenceServiceSpec) -> list[str]:
    tracing = spec.runtime.tracing
    if tracing is None:
        return []
    scheme, _, rest = tracing.endpoint.rstrip("/").partition("://")
    url = f"{scheme}://{rest}{'' if '/' in rest else TRACES_PATH}"
    resource = {
        "k8s.pod.name": f"$({POD_NAME})",
        "k8s.namespace.name": f"$({POD_NAMESPACE})",
        **{key: _literal(value) for key, value in tracing.resource.items()},
    }
    return [
        # Triton's other mode writes files, which fill the pod's disk.
        "--trace-config=mode=opentelemetry",
        # Timestamps only: the other level would send the tensors themselves to the collector.
        "--trace-config=level=TIMESTAMPS",
        f"--trace-config=rate={tracing.rate}",
        "--trace-config=count=-1",
        f"--trace-config=opentelemetry,url={_literal(url)}",
        *(f"--trace-config=opentelemetry,resource={key}={resource[key]}" for key in sorted(resource)),
    ]


def _backends(spec: InferenceServiceSpec) -> list[str]:
    return [
        f"--backend-config={_literal(backend.name)},{_literal(key)}={_literal(backend.settings[key])}"
        for backend in spec.runtime.backends
        for key in sorted(backend.settings)
    ]


def _literal(text: str) -> str:
    """Text as it is: Kubernetes makes one `$` of two, and expands what stands behind a single one."""
    return text.replace("$", "$$")


def _flag(value: bool) -> str:  # noqa: FBT001 - the value itself
    return str(value).lower()


def _bytes(option: str, size: str) -> str:
    """An option with a quantity's bytes, rounded down; `option` may end in the separator itself."""
    return f"{option}{'' if option.endswith(':') else '='}{int(parse_quantity(size))}"


def _quantile(quantile: float) -> str:
    """`0.99:0.001`: Triton wants the error that each may have; a tenth of what lies above keeps neighbours apart."""
    return f"{quantile!r}:{(1 - quantile) / 10:.6f}".rstrip("0")


def _from_field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def _from_secret(name: str, secret: str, key: str, *, optional: bool) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key, "optional": optional}}}
