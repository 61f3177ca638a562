"""Every setting of spec.runtime on the real server, as a plain process: what is taken, closed, cached and measured."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from conch.triton import arguments, metrics, modelconfig
from makers import make_model, make_spec
from operators import wait_until
from sandbox.triton_process import root_folder, triton

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conch.api.inferenceservice import InferenceServiceSpec

IMAGE = "nvcr.io/nvidia/tritonserver:24.10-py3"
OPTIONS = Path(__file__).parents[1] / "tests" / "unit" / "golden" / "tritonserver-2.51-options.txt"
UID = str(uuid.uuid4())
POD = {"CONCH_POD_UID": UID, "CONCH_POD_NAME": "vision-server-1", "CONCH_POD_NAMESPACE": "models"}
KEY = {"conch-closed": UID}
GRPC_KEY = {"triton-grpc-protocol-conch-closed": UID}
TENSOR = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
REQUEST = json.dumps({"inputs": [TENSOR]}).encode()
REGION = json.dumps({"key": "/none", "offset": 0, "byte_size": 4}).encode()
DOUBLE = """
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        inputs = (pb.get_input_tensor_by_name(request, "x").as_numpy() for request in requests)
        return [pb.InferenceResponse([pb.Tensor("y", values * 2)]) for values in inputs]
"""
MODEL = make_model(
    name="double", format="Python", maxBatchSize=8, batching={}, responseCache=True,
    inputs=[{"name": "x", "dataType": "FP32", "dims": [2]}], outputs=[{"name": "y", "dataType": "FP32", "dims": [2]}],
    instances={"kind": "CPU", "rateLimiter": {"resources": [{"name": "R1", "count": 1}]}},
)  # fmt: skip

CLOSED_OVER_HTTP = {
    "log settings": ("/v2/logging", None),
    "changed log settings": ("/v2/logging", b'{"log_verbose_level": 9}'),
    "trace settings": ("/v2/trace/setting", None),
    "a model's trace settings": ("/v2/models/double/trace/setting", None),
    "the repository": ("/v2/repository/index", b"{}"),
    "loading": ("/v2/repository/models/double/load", b"{}"),
    "unloading": ("/v2/repository/models/double/unload", b"{}"),
    "shared memory": ("/v2/systemsharedmemory/status", None),
    "registered shared memory": ("/v2/systemsharedmemory/region/a/register", REGION),
    "memory of an accelerator": ("/v2/cudasharedmemory/status", None),
}
CLOSED_OVER_GRPC: dict[str, Callable[..., Any]] = {
    "log settings": lambda client, **headers: client.get_log_settings(**headers),
    "changed log settings": lambda client, **headers: client.update_log_settings({"log_verbose_level": 9}, **headers),
    "trace settings": lambda client, **headers: client.get_trace_settings(**headers),
    "the repository": lambda client, **headers: client.get_model_repository_index(**headers),
    "loading": lambda client, **headers: client.load_model("double", **headers),
    "unloading": lambda client, **headers: client.unload_model("double", **headers),
    "shared memory": lambda client, **headers: client.get_system_shared_memory_status(**headers),
    "registered shared memory": lambda client, **headers: client.register_system_shared_memory(
        "a", "/none", 4, **headers
    ),
    "memory of an accelerator": lambda client, **headers: client.get_cuda_shared_memory_status(**headers),
}
OPEN = (
    "/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/double", "/v2/models/double/ready",
    "/v2/models/double/config", "/v2/models/double/stats",
)  # fmt: skip


@contextmanager
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """A server that takes whatever is posted to it: its address, and path and body of each request."""
    taken: list[tuple[str, bytes]] = []

    class Take(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing to say."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Take) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", taken
        finally:
            server.shutdown()
            thread.join()


def repository_of(spec: InferenceServiceSpec, folder: Path) -> Path:
    for model in spec.models:
        version = folder / model.name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(DOUBLE)
        (version.parent / "config.pbtxt").write_text(modelconfig.to_pbtxt(modelconfig.model_config(model, gpu=False)))
    return folder


@dataclass(frozen=True)
class Server:
    """A running server and its doors."""

    http: str
    grpc: str
    metrics_address: str
    log: Path

    def call(self, path: str, body: bytes | None = None, *, headers: dict[str, str] | None = None) -> tuple[int, str]:
        """Status and text of an answer; a request with a body is a POST."""
        request = urllib.request.Request(f"http://{self.http}{path}", data=body, headers=headers or {})
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")

    def metrics(self) -> dict[str, float]:
        """Each series of /metrics, with its labels as Triton writes them."""
        with urllib.request.urlopen(f"http://{self.metrics_address}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {series: float(value) for series, _, value in pairs}


@contextmanager
def serve(fields: dict[str, Any], folder: Path) -> Iterator[Server]:
    """The server of a spec, with the arguments of its pod but for the ports."""
    base = {"resources.memory": "16Gi", "runtime.responseCache": {"local": {"size": "64Mi"}}}
    spec = make_spec({**base, **fields}, models=[MODEL])
    grpc, metrics_port = free_ports(2)
    doors = [
        "--allow-grpc=true", "--grpc-address=127.0.0.1", f"--grpc-port={grpc}", f"--metrics-port={metrics_port}",
    ]  # fmt: skip
    own = {"--http-port", "--grpc-port", "--metrics-port", "--exit-timeout-secs"}
    given = [argument for argument in arguments.server_args(spec, IMAGE) if argument.partition("=")[0] not in own]
    options = [expanded(argument, POD) for argument in given] + doors
    with triton(repository_of(spec, folder), options, folder.with_name("log"), print) as process:
        server = Server(process.address, f"127.0.0.1:{grpc}", f"127.0.0.1:{metrics_port}", process.log)
        assert server.call("/v2/health/ready")[0] == 200, process.said()
        yield server


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def expanded(argument: str, environment: dict[str, str]) -> str:
    """An argument as the kubelet hands it on: `$(NAME)` by its value if there is one, `$$` as one `$`."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else environment.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([A-Za-z_][\w.-]*)\)", value, argument)


@pytest.fixture(scope="module")
def traces() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    with collector() as found:
        yield found


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory, traces: tuple[str, Any]) -> Iterator[Server]:
    """One server with every setting at once."""
    fields = {
        # On this machine no accelerator answers; the pools' options are taken all the same.
        "accelerator.count": 1,
        "runtime.rateLimiter": {"resources": [{"name": "R1", "count": 2}, {"name": "R2", "count": 3, "gpu": 0}]},
        "runtime.memoryPools": {"pinned": "1Mi", "cudaPerGPU": "1Mi", "statePerGPU": "1Gi"},
        "runtime.threads": {"http": 2, "modelLoad": 1, "bufferManager": 1, "grpcInferPool": 4},
        "runtime.logging": {"format": "Default", "verbose": 1, "info": True},
        "runtime.metrics": {"interval": "100ms", "summaries": True, "quantiles": [0.5, 0.9999], "histograms": True},
        "runtime.tracing": {"endpoint": traces[0], "rate": 1, "resource": {"service.name": "a b/c:d@e+f-1"}},
        "runtime.backends": [
            {"name": "python", "settings": {"shm-default-byte-size": "1048576", "shm-growth-byte-size": "1048576"}},
            {"name": "tensorrt", "settings": {"version-compatible": "true"}},
        ],
    }  # fmt: skip
    with serve(fields, tmp_path_factory.mktemp("everything") / "models") as server:
        yield server


@pytest.fixture(scope="module")
def client(everything: Server) -> Iterator[Any]:
    with triton_grpc.InferenceServerClient(everything.grpc) as found:
        yield found


def infer(server: Server) -> list[float]:
    status, text = server.call("/v2/models/double/infer", REQUEST)
    assert status == 200, text
    return list(json.loads(text)["outputs"][0]["data"])


def test_all_settings_at_once_are_accepted_and_the_model_answers(everything: Server) -> None:
    assert infer(everything) == [2, 4]
    assert json.loads(everything.call("/v2")[1])["version"] == "2.51.0"


def test_the_list_of_options_that_unit_tests_use_is_the_servers_own() -> None:
    command = ["chroot", str(root_folder(print)), "/opt/tritonserver/bin/tritonserver", "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    # An option's own line is indented by two spaces, what is said about it by a tab.
    found = set(re.findall(r"^  (--[a-z0-9-]+)", ended.stdout + ended.stderr, re.MULTILINE))
    assert found == set(OPTIONS.read_text().split())


@pytest.mark.parametrize("what", CLOSED_OVER_HTTP)
def test_what_changes_the_server_is_closed_over_http(everything: Server, what: str) -> None:
    path, body = CLOSED_OVER_HTTP[what]
    status, text = everything.call(path, body)
    assert (status, "This API is restricted" in text) == (403, True)
    assert everything.call(path, body, headers={"conch-closed": "guess"})[0] == 403
    assert "This API is restricted" not in everything.call(path, body, headers=KEY)[1]


@pytest.mark.parametrize("what", CLOSED_OVER_GRPC)
def test_what_changes_the_server_is_closed_over_grpc(client: Any, what: str) -> None:
    with pytest.raises(InferenceServerException, match="This protocol is restricted"):
        CLOSED_OVER_GRPC[what](client)
    try:
        CLOSED_OVER_GRPC[what](client, headers=GRPC_KEY)
    except InferenceServerException as error:
        assert "restricted" not in str(error)  # noqa: PT017 - it may fail for another reason, or not at all


@pytest.mark.parametrize("path", OPEN)
def test_what_is_read_stays_open(everything: Server, path: str) -> None:
    assert everything.call(path)[0] == 200


def test_no_key_stands_in_the_log(everything: Server) -> None:
    infer(everything)
    assert UID not in everything.log.read_text(errors="replace")


def test_a_repeated_request_is_a_hit_of_the_cache_in_the_metrics(everything: Server) -> None:
    labels = '{model="double",version="1"}'
    hits, misses = (f"{name}{labels}" for name in (metrics.CACHE_HITS, metrics.CACHE_MISSES))
    infer(everything)
    time.sleep(0.5)  # Triton counts after it has answered
    before = everything.metrics()[hits]
    infer(everything)
    wait_until(lambda: everything.metrics()[hits] == before + 1, 10, "a hit in the metrics")
    assert everything.metrics()[misses] >= 1


def test_summaries_with_the_chosen_quantiles_are_in_the_metrics(everything: Server) -> None:
    infer(everything)

    def summaries() -> list[str]:
        return [name for name in everything.metrics() if name.startswith("nv_inference_queue_summary_us{")]

    found = wait_until(summaries, 10, "summaries in the metrics")
    assert {name.partition('quantile="')[2].rstrip('"}') for name in found} == {"0.5", "0.9999"}


def test_traces_reach_the_collector_with_the_pods_name(
    everything: Server, traces: tuple[str, list[tuple[str, bytes]]]
) -> None:
    infer(everything)
    deadline = time.monotonic() + 20
    while not traces[1] and time.monotonic() < deadline:
        time.sleep(0.1)
    path, body = traces[1][0]
    assert path == "/v1/traces"
    for word in (b"k8s.pod.name", b"vision-server-1", b"k8s.namespace.name", b"a b/c:d@e+f-1"):
        assert word in body


def test_with_the_same_pod_allowed_only_shared_memory_is_open(tmp_path: Path) -> None:
    with serve({"accelerator.count": 0, "runtime.clientSharedMemory": "SamePod"}, tmp_path / "models") as server:
        for what, (path, body) in CLOSED_OVER_HTTP.items():
            closed = "This API is restricted" in server.call(path, body)[1]
            assert closed == ("memory" not in what), what
        assert infer(server) == [2, 4]
