"""The operator under test: installed as pods from manifests/, or run as a process under its own role."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from sandbox import AnyRegion, Region

ROOT = Path(__file__).resolve().parent.parent
NAMESPACE = "conch-system"
OPERATOR_IMAGE = "sandbox.local/conch:dev"
TRITON_IMAGE = "sandbox.local/triton:1"
START_LIMIT_S = 90.0
STOP_LIMIT_S = 30.0
QUICK_WINDOW_S = 8
QUICK_STALE_S = 10


T = TypeVar("T")


def wait_until(condition: Callable[[], T], limit_s: float, what: str, every_s: float = 0.2) -> T:
    """The first true value of a condition; TimeoutError says what was waited for."""
    deadline = time.monotonic() + limit_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {limit_s:g} s for {what}; the last answer was {value!r}")
        time.sleep(every_s)


def wait_reachable(url: str, limit_s: float = 20.0) -> None:
    """Until a Service's address takes connections: kube-proxy follows a pod's readiness by up to some seconds."""
    parts = urllib.parse.urlsplit(url)

    def answers() -> bool:
        try:
            socket.create_connection((parts.hostname or "", parts.port or 80), 2).close()
        except OSError:
            return False
        return True

    wait_until(answers, limit_s, f"{parts.netloc} to take connections", 0.1)


def manifest_objects() -> list[dict[str, Any]]:
    """manifests/operator.yaml with the sandbox's images."""
    text = (ROOT / "manifests" / "operator.yaml").read_text()
    objects: list[dict[str, Any]] = [item for item in yaml.safe_load_all(text) if item]
    for item in objects:
        if item["kind"] != "Deployment":
            continue
        container = item["spec"]["template"]["spec"]["containers"][0]
        container["image"] = OPERATOR_IMAGE
        values = {"CONCH_FETCH_IMAGE": OPERATOR_IMAGE, "CONCH_TRITON_IMAGE": TRITON_IMAGE}
        for variable in container["env"]:
            if variable["name"] in values:
                variable["value"] = values[variable["name"]]
    return objects


def apply_crds(region: AnyRegion) -> None:
    """The CRDs, established."""
    region.apply(ROOT / "crds")
    wait_established(region)


def wait_established(region: AnyRegion) -> None:
    """Until every CRD is served. (`kubectl wait --all` fails on a CRD that has no status yet.)"""

    def established() -> bool:
        return all(
            any(
                c["type"] == "Established" and c["status"] == "True"
                for c in item.get("status", {}).get("conditions") or ()
            )
            for item in region.get("crd")["items"]
        )

    wait_until(established, 30, "the CRDs to be established")


def install_operator(region: AnyRegion) -> None:
    """As a user installs it; returns when the replicas are available."""
    apply_crds(region)
    region.apply(manifest_objects())
    region.kubectl("-n", NAMESPACE, "rollout", "status", "deploy/conch-operator", "--timeout=120s", timeout_s=130)


def hurry_operator(region: AnyRegion) -> None:
    """Let the installed operator decide each second on short windows, under a short lease; returns when it runs."""
    settings = (
        "CONCH_TICK_S=1", f"CONCH_METRICS_WINDOW_S={QUICK_WINDOW_S}", f"CONCH_METRICS_STALE_S={QUICK_STALE_S}",
        "CONCH_LEASE_DURATION_S=8", "CONCH_LEASE_RENEW_DEADLINE_S=6", "CONCH_LEASE_RETRY_S=1",
    )  # fmt: skip
    region.kubectl("-n", NAMESPACE, "set", "env", "deployment/conch-operator", *settings)
    region.kubectl("-n", NAMESPACE, "rollout", "status", "deploy/conch-operator", "--timeout=120s", timeout_s=130)


def grant_own_role(region: Region) -> None:
    """Everything of the manifest but its pods: a process can then run under the operator's own ServiceAccount."""
    apply_crds(region)
    region.apply([item for item in manifest_objects() if item["kind"] not in {"Deployment", "PodDisruptionBudget"}])


def own_kubeconfig(region: Region, folder: Path, *, server: str | None = None) -> Path:
    """A kubeconfig with a token of the operator's ServiceAccount; `server` puts a proxy in between."""
    token = region.kubectl("-n", NAMESPACE, "create", "token", "conch-operator", "--duration=24h").strip()
    cluster: dict[str, Any] = {"server": server or region.api_url}
    if not server or server.startswith("https"):
        cluster["certificate-authority"] = str(region.layout.pki / "ca.crt")
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path = folder / f"kubeconfig-{len(list(folder.glob('kubeconfig-*')))}.json"
    path.write_text(json.dumps(config))
    path.chmod(0o600)
    return path


def free_port(region: AnyRegion) -> int:
    """A TCP port that nothing uses in the region's network."""
    with region.network(), socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class LocalOperator:
    """`conch run` as a process in the region's network."""

    def __init__(
        self,
        region: Region,
        folder: Path,
        *,
        identity: str = "operator-0",
        server: str | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.region = region
        self.identity = identity
        self.port = free_port(region)
        self.log = folder / f"{identity}-{self.port}.log"
        self._kubeconfig = own_kubeconfig(region, folder, server=server)
        self._settings = dict(settings or {})
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, wait: bool = True) -> None:
        """Start, and wait for /readyz unless told otherwise."""
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("CONCH_")},
            "CONCH_NAMESPACE": NAMESPACE,
            "CONCH_IDENTITY": self.identity,
            "CONCH_HTTP_ADDRESS": "127.0.0.1",
            "CONCH_HTTP_PORT": str(self.port),
            "CONCH_FETCH_IMAGE": OPERATOR_IMAGE,
            "CONCH_TRITON_IMAGE": TRITON_IMAGE,
            **self._settings,
        }
        conch = Path(sys.executable).parent / "conch"
        with self.log.open("ab") as log:
            self._process = self.region.popen(
                [conch, "run", "--kubeconfig", self._kubeconfig], env=environment, stdout=log, stderr=log
            )
        if wait:
            wait_until(self.ready, START_LIMIT_S, f"the operator to be ready; its log is {self.log}")

    @property
    def pid(self) -> int:
        """The process that `conch run` became."""
        assert self._process is not None, "the operator was not started"
        return self._process.pid

    def running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._process is None else self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Send it any signal."""
        os.kill(self.pid, number)

    def stop(self) -> int | None:
        """SIGTERM, and SIGKILL if that is not enough; the exit code."""
        process = self._process
        if process is None or process.poll() is not None:
            return self.exit_code()
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
            process.terminate()
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
        return process.wait(10)

    def get(self, path: str, timeout_s: float = 5.0) -> tuple[int, str]:
        """Status and body of the operator's own HTTP server; 0 when it doesn't answer."""
        try:
            with (
                self.region.network(),
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=timeout_s) as answer,
            ):
                return int(answer.status), answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def ready(self) -> bool:
        """Whether /readyz says so; a process that ended is an error with the end of its log."""
        if not self.running():
            raise RuntimeError(f"the operator ended with {self.exit_code()}: {self.log.read_text()[-2000:]}")
        return self.get("/readyz")[0] == 200

    def leads(self) -> bool:
        """Whether it holds the Lease."""
        return self.get("/readyz")[1].startswith("leader")

    def metrics(self) -> dict[str, float]:
        """/metrics as `name{labels}` → value."""
        _, text = self.get("/metrics")
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in lines}

    def writes(self) -> dict[str, float]:
        """What it asked the API server to change, by verb and kind."""
        return {
            name: value
            for name, value in self.metrics().items()
            if name.startswith("conch_api_requests_total") and 'verb="get"' not in name and 'verb="list"' not in name
        }

    def cpu_seconds(self) -> float:
        """User and system time of the process so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_mib(self) -> float:
        """Resident memory."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
        return 0.0


@contextlib.contextmanager
def local_operator(region: Region, folder: Path, **options: Any) -> Iterator[LocalOperator]:
    """An operator process for the length of a block."""
    operator = LocalOperator(region, folder, **options)
    operator.start()
    try:
        yield operator
    finally:
        operator.stop()
