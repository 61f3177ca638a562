"""The arguments of tritonserver: one golden list of all settings, and what each setting adds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.api.inferenceservice import InvalidSpec
from conch.triton import arguments
from conch.triton.releases import Feature
from makers import make_model, make_spec

GOLDEN = Path(__file__).parent / "golden"
IMAGE = "nvcr.io/nvidia/tritonserver:24.10-py3"
NEWEST = "nvcr.io/nvidia/tritonserver:26.10-py3"
UNKNOWN = "registry.example/own:1"
HELP = GOLDEN / "tritonserver-2.51-options.txt"

EVERYTHING: dict[str, Any] = {
    "accelerator.count": 2,
    "resources.memory": "16Gi",
    "runtime.responseCache": {"local": {"size": "64Mi"}},
    "runtime.rateLimiter": {
        "resources": [{"name": "R1", "count": 2}, {"name": "R2", "count": 3, "gpu": 1}]
    },
    "runtime.memoryPools": {"pinned": "128Mi", "cudaPerGPU": "32Mi", "statePerGPU": "2Gi"},
    "runtime.threads": {"http": 16, "modelLoad": 2, "bufferManager": 1, "grpcInferPool": 64},
    "runtime.logging": {"format": "Default", "verbose": 1, "info": True},
    "runtime.metrics": {"interval": "500ms", "summaries": True, "quantiles": [0.5, 0.99]},
    "runtime.tracing": {
        "endpoint": "http://otel.monitoring:4318", "rate": 100, "resource": {"service.name": "vision", "team": "a b"}
    },
    "runtime.backends": [
        {"name": "python", "settings": {"shm-growth-byte-size": "1048576", "shm-default-byte-size": "2097152"}}
    ],
}  # fmt: skip
REDIS: dict[str, Any] = {
    "host": "redis.cache.svc", "port": 6380, "caRef": {"name": "redis-ca", "key": "root.pem"},
    "secretRef": {"name": "redis-auth"}, "database": 2, "timeout": "50ms", "connectTimeout": "2s", "poolSize": 8,
}  # fmt: skip


def args(fields: dict[str, Any] | None = None, image: str = IMAGE) -> list[str]:
    return arguments.server_args(make_spec(fields or {}), image)


@pytest.mark.parametrize(
    ("name", "fields", "image"),
    [
        ("default", {}, IMAGE),
        ("everything", EVERYTHING, IMAGE),
        ("redis", {"runtime.responseCache": {"redis": REDIS}}, IMAGE),
        (
            "newest",
            {
                "runtime.clientSharedMemory": "SamePod", "runtime.maxRequestSize": "1Gi",
                "runtime.threads": {"grpcInfer": 8}, "runtime.metrics": {"histograms": True},
            },
            NEWEST,
        ),
    ],
)  # fmt: skip
def test_the_arguments_are_those_of_the_golden_file(name: str, fields: dict[str, Any], image: str) -> None:
    assert args(fields, image) == (GOLDEN / f"arguments-{name}.txt").read_text().splitlines()


def test_every_option_that_is_used_with_24_10_is_one_of_that_release() -> None:
    known = set(HELP.read_text().split())
    used = {
        argument.partition("=")[0]
        for argument in [*args(EVERYTHING), *args({"runtime.responseCache": {"redis": REDIS}})]
    }
    assert used <= known
    assert not {feature.option for feature in Feature if feature is not Feature.HISTOGRAMS} & used


def test_the_documentation_says_of_every_option_when_and_why_it_is_given() -> None:
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    for golden in GOLDEN.glob("arguments-*.txt"):
        for option in {line.partition("=")[0] for line in golden.read_text().splitlines()}:
            assert f"`{option}" in page, option


def test_the_arguments_hold_no_text_of_the_models_or_the_image() -> None:
    other = make_spec(
        {"runtime.image": "evil/image:1", "accelerator.resource": "evil.com/gpu"},
        models=[make_model(name="evil", parameters={"k": "--model-control-mode=explicit"})],
    )
    assert arguments.server_args(make_spec(), UNKNOWN) == arguments.server_args(other, "evil/image:1")


def test_kubernetes_expands_nothing_but_what_the_environment_of_the_container_has() -> None:
    for fields in ({}, EVERYTHING, {"runtime.responseCache": {"redis": REDIS}}):
        named = {variable["name"] for variable in arguments.server_env(make_spec(fields))}
        found = set(re.findall(r"[$][(]([^)]*)[)]", " ".join(args(fields))))
        assert found <= named
        assert " ".join(args(fields)).count("$") == len(re.findall(r"[$][(]", " ".join(args(fields))))


@given(st.text(alphabet="ab$(){}\\,=", max_size=20))
def test_a_dollar_sign_of_a_user_would_stay_one(text: str) -> None:
    literal = arguments._literal(text)
    assert literal.replace("$$", "\0").count("$") == 0
    assert literal.replace("$$", "$") == text


@pytest.mark.parametrize(("memory", "closed"), [("Disabled", True), ("SamePod", False)])
def test_what_changes_the_server_is_closed_with_the_pods_own_uid(memory: str, *, closed: bool) -> None:
    apis = "model-repository,trace,logging" + (",shared-memory" if closed else "")
    found = args({"runtime.clientSharedMemory": memory})
    assert f"--http-restricted-api={apis}:conch-closed=$(CONCH_POD_UID)" in found
    assert f"--grpc-restricted-protocol={apis}:conch-closed=$(CONCH_POD_UID)" in found
    env = {variable["name"]: variable for variable in arguments.server_env(make_spec())}
    assert env["CONCH_POD_UID"]["valueFrom"]["fieldRef"] == {"apiVersion": "v1", "fieldPath": "metadata.uid"}


@pytest.mark.parametrize(
    ("image", "memory", "wanted"),
    [
        ("nvcr.io/nvidia/tritonserver:26.03-py3", "SamePod", []),
        ("nvcr.io/nvidia/tritonserver:26.04-py3", "SamePod", ["--allow-client-shm=true"]),
        ("nvcr.io/nvidia/tritonserver:26.04-py3", "Disabled", ["--allow-client-shm=false"]),
        (UNKNOWN, "SamePod", []),
    ],
)
def test_the_option_for_client_shared_memory_is_given_where_the_release_has_it(
    image: str, memory: str, wanted: list[str]
) -> None:
    found = args({"runtime.clientSharedMemory": memory}, image)
    assert [argument for argument in found if argument.startswith("--allow-client-shm")] == wanted


def test_an_option_that_the_user_asks_for_is_given_unless_the_release_surely_lacks_it() -> None:
    fields = {"runtime.maxRequestSize": "1Mi"}
    assert "--http-max-input-size=1048576" in args(fields, UNKNOWN)
    assert "--http-max-input-size=1048576" in args(fields, "nvcr.io/nvidia/tritonserver:25.06-py3")
    assert not any("max-input" in argument for argument in args(fields, "nvcr.io/nvidia/tritonserver:25.03-py3"))


@pytest.mark.parametrize(("count", "wanted"), [(0, "false"), (1, "true"), (4, "true")])
def test_gpu_metrics_are_read_where_there_is_a_gpu(count: int, wanted: str) -> None:
    assert f"--allow-gpu-metrics={wanted}" in args({"accelerator.count": count})


def test_pools_on_accelerators_are_for_each_accelerator_of_the_pod() -> None:
    fields = {"runtime.memoryPools": {"cudaPerGPU": "1Mi"}}
    for count in (1, 3):
        found = [argument for argument in args({**fields, "accelerator.count": count}) if "cuda" in argument]
        assert found == [f"--cuda-memory-pool-byte-size={device}:1048576" for device in range(count)]


def test_a_claims_devices_count_as_accelerators() -> None:
    fields = {
        "accelerator.claim": {"deviceClass": "gpu.nvidia.com", "count": 2}, "runtime.memoryPools": {"cudaPerGPU": "1Mi"}
    }  # fmt: skip
    assert "--cuda-memory-pool-byte-size=1:1048576" in args(fields)
    assert "--allow-gpu-metrics=true" in args(fields)


def test_pinned_memory_is_taken_where_there_is_an_accelerator_or_where_it_is_asked_for() -> None:
    assert "--pinned-memory-pool-byte-size=268435456" in args()
    assert "--pinned-memory-pool-byte-size=0" in args({"accelerator.count": 0})
    assert "--pinned-memory-pool-byte-size=1024" in args({"runtime.memoryPools.pinned": "1Ki"})


def test_the_rate_limiter_is_on_when_an_instance_names_resources_or_the_runtime_does() -> None:
    limited = {"models[0].instances": {"rateLimiter": {"resources": [{"name": "R1", "count": 1}]}}}
    assert not any("rate-limit" in argument for argument in args())
    assert "--rate-limit=execution_count" in args(limited)
    assert "--rate-limit=execution_count" in args({"runtime.rateLimiter": {}})


def test_the_password_of_redis_is_in_the_environment_and_nowhere_else() -> None:
    fields = {"runtime.responseCache": {"redis": REDIS}}
    env = {variable["name"]: variable["valueFrom"] for variable in arguments.server_env(make_spec(fields))}
    assert env["TRITONCACHE_REDIS_PASSWORD"]["secretKeyRef"] == {
        "name": "redis-auth", "key": "password", "optional": False
    }  # fmt: skip
    assert env["TRITONCACHE_REDIS_USERNAME"]["secretKeyRef"]["optional"] is True
    assert not any("password" in argument or "user" in argument for argument in args(fields))


def test_the_authorities_of_redis_are_mounted_where_the_argument_says() -> None:
    spec = make_spec({"runtime.responseCache": {"redis": REDIS}})
    (volume,), (mount,) = arguments.server_volumes(spec), arguments.server_mounts(spec)
    assert volume["configMap"]["items"] == [{"key": "root.pem", "path": "ca.crt"}]
    assert mount == {"name": volume["name"], "mountPath": "/etc/conch/redis", "readOnly": True}
    assert "--cache-config=redis,cacert=/etc/conch/redis/ca.crt" in arguments.server_args(spec, IMAGE)


@pytest.mark.parametrize(
    ("redis", "absent"),
    [
        ({"host": "redis", "tls": False}, ("tls_enabled", "cacert", "sni")),
        ({"host": "10.0.0.7"}, ("cacert", "sni")),
    ],
)
def test_redis_settings_that_dont_apply_are_left_out(redis: dict[str, Any], absent: tuple[str, ...]) -> None:
    found = " ".join(args({"runtime.responseCache": {"redis": redis}}))
    assert not [word for word in absent if word in found]
    assert arguments.server_volumes(make_spec({"runtime.responseCache": {"redis": redis}})) == []


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://otel:4318", "http://otel:4318/v1/traces"),
        ("http://otel:4318/", "http://otel:4318/v1/traces"),
        ("https://otel/otlp/v1/traces", "https://otel/otlp/v1/traces"),
    ],
)
def test_traces_go_to_the_endpoints_usual_path_unless_it_has_one(endpoint: str, url: str) -> None:
    assert f"--trace-config=opentelemetry,url={url}" in args({"runtime.tracing": {"endpoint": endpoint}})


def test_traces_name_the_pod_unless_the_user_names_it() -> None:
    found = args({"runtime.tracing": {"endpoint": "http://otel", "resource": {"k8s.pod.name": "mine"}}})
    assert "--trace-config=opentelemetry,resource=k8s.pod.name=mine" in found
    assert "--trace-config=opentelemetry,resource=k8s.namespace.name=$(CONCH_POD_NAMESPACE)" in found
    assert not any("trace-config" in argument for argument in args())


@pytest.mark.parametrize(
    ("fields", "ports"),
    [
        ({}, ()),
        ({"runtime.responseCache": {"redis": {"host": "r"}}}, (6379,)),
        ({"runtime.tracing": {"endpoint": "http://otel"}}, (80,)),
        (
            {
                "runtime.tracing": {"endpoint": "https://otel"},
                "runtime.responseCache": {"redis": {"host": "r", "port": 1}},
            },
            (1, 443),
        ),
        ({"runtime.tracing": {"endpoint": "http://otel:4318/x"}}, (4318,)),
    ],
)
def test_the_ports_that_triton_connects_to_are_known(fields: dict[str, Any], ports: tuple[int, ...]) -> None:
    assert arguments.server_ports(make_spec(fields)) == ports


TEXTS = st.one_of(
    st.text(max_size=12),
    st.text(alphabet="ab1._-:/,=$(){}@ \\\n\"'", max_size=20),
    st.sampled_from(["redis", "http://otel:4318", "a,b=c", "$(CONCH_POD_UID)", "$$(X)", "--log-info", "a\n--x"]),
)


@given(TEXTS, TEXTS, TEXTS, TEXTS)
def test_whatever_text_is_accepted_adds_no_argument_and_splits_none(host: str, key: str, value: str, url: str) -> None:
    fields = {
        "runtime.responseCache": {"redis": {"host": host}},
        "runtime.rateLimiter": {"resources": [{"name": key, "count": 1}]},
        "runtime.tracing": {"endpoint": url, "resource": {key: value}},
        "runtime.backends": [{"name": key, "settings": {key: value}}],
    }
    for field, given_value in fields.items():
        try:
            found = args({field: given_value})
        except InvalidSpec:
            continue
        assert all(argument.startswith("--") and argument.isprintable() for argument in found)
        added = set(found) - set(args())
        assert {argument for argument in added if "$" in argument} <= {
            "--trace-config=opentelemetry,resource=k8s.pod.name=$(CONCH_POD_NAME)",
            "--trace-config=opentelemetry,resource=k8s.namespace.name=$(CONCH_POD_NAMESPACE)",
        }
        for argument in found:
            option, _, rest = argument.partition("=")
            if option in {"--cache-config", "--backend-config"}:
                assert (rest.count(","), rest.count("=")) == (1, 1), argument
            if option == "--trace-config":
                assert rest.count(",") <= 1, argument
                assert rest.count("=") <= 2, argument
            if option == "--rate-limit-resource":
                assert rest.count(":") == 1, argument


@given(st.lists(st.floats(0.01, 0.9999), max_size=16, unique=True))
def test_a_quantiles_error_is_small_and_neither_is_written_with_an_exponent(quantiles: list[float]) -> None:
    for quantile in quantiles:
        name, _, error = arguments._quantile(quantile).partition(":")
        assert 0 < float(name) <= 1
        assert 0 < float(error) <= 0.1
        assert "e" not in name + error
