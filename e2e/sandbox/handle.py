"""The handle on a running region that scenarios, the demo and the benchmark hold, whatever the region is made of.

What is here needs two things only: kubectl, and the node's network, in which Services' and pods' addresses are reached.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sandbox.components import GPU_RESOURCE
from sandbox.errors import SandboxError
from sandbox.gpu_state import Gpus
from sandbox.images import Image
from sandbox.namespaces import network, wait_for

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class AnyComponent(ABC):
    """One part of a region, for fault tests."""

    name: str

    @property
    @abstractmethod
    def running(self) -> bool:
        """Whether its process is there."""

    @abstractmethod
    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send any signal: SIGSTOP and SIGCONT too."""

    @abstractmethod
    def start(self) -> None:
        """Start it again as it was."""

    @abstractmethod
    def log(self) -> str:
        """What it has printed since the region, or since it was last started."""

    def stop(self, limit_s: float = 15) -> None:
        """SIGTERM, then SIGKILL when that isn't enough; it stays down."""
        self.kill(signal.SIGTERM)
        try:
            wait_for(lambda: not self.running, limit_s, f"{self.name} ignores SIGTERM")
        except SandboxError:
            self.kill(signal.SIGKILL)
            wait_for(lambda: not self.running, 10, f"{self.name} can't be killed")


class AnyRegion(ABC):
    """A running region. Methods may be called from any network; commands enter the region's own."""

    name: str
    node_name: str
    """Of its one node."""
    address: str
    """The node's, as pods and the node itself reach it."""
    kubeconfig: Path
    """The administrator's; works in the region's network."""
    bin_dir: Path
    """Holds kubectl."""
    api_url: str
    prometheus_url: str
    """Reached in the region's network."""
    prometheus_config: Path
    """What Prometheus reads at its start and at a POST to /-/reload; may be rewritten in place."""
    gpus: Gpus
    gpu_count: int
    """The node's GPUs when none is broken or taken away."""

    # --- what differs

    @abstractmethod
    def network_path(self) -> Path:
        """The network namespace of the node, as this machine sees it."""

    @abstractmethod
    def component(self, name: str) -> AnyComponent:
        """A part by name: prometheus, fake-gpu-plugin, fake-dcgm-exporter, kubelet, …

        Raises:
            SandboxError: This kind of region can't stop that part alone.
        """

    @abstractmethod
    def ctr(self, *arguments: str | Path, timeout_s: float = 300) -> str:
        """containerd's client in the kubelet's namespace of images."""

    @abstractmethod
    def load(self, image: Image) -> None:
        """Import an image unless this content is there."""

    # --- commands

    def kubectl_argv(self) -> list[str]:
        """The words that a kubectl command begins with."""
        return [str(self.bin_dir / "kubectl")]

    def network_argv(self) -> list[str]:
        """Prefix that runs a command in the region's network; it becomes the command, so signals reach it."""
        return ["nsenter", f"--net={self.network_path()}", "--"]

    def environment(self) -> dict[str, str]:
        """This process's environment with KUBECONFIG and the region's kubectl first on PATH."""
        path = f"{self.bin_dir}:{os.environ.get('PATH', SYSTEM_PATH)}"
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig), "PATH": path}

    def popen(self, argv: Sequence[str | Path], **options: Any) -> "subprocess.Popen[Any]":
        """A process of the caller's in the region's network; it gets signals itself, and dies with its starter."""
        options.setdefault("env", self.environment())
        words = ["setpriv", "--pdeathsig", "KILL", *self.network_argv(), *(str(word) for word in argv)]
        return subprocess.Popen(words, **options)

    def run(
        self, argv: Sequence[str | Path], *, stdin: str | None = None, timeout_s: float = 60, check: bool = True
    ) -> "subprocess.CompletedProcess[str]":
        """A command in the region's network, with its output; an error names the command and what it printed."""
        words = [*self.network_argv(), *(str(word) for word in argv)]
        done = subprocess.run(
            words, input=stdin, capture_output=True, text=True, timeout=timeout_s, env=self.environment(), check=False
        )
        if check and done.returncode:
            message = (
                f"{self.name}: `{' '.join(str(word) for word in argv)[:300]}` failed: {done.stderr or done.stdout}"
            )
            raise SandboxError(message.strip())
        return done

    def kubectl(self, *arguments: str | Path, input: str | None = None, timeout_s: float = 60) -> str:  # noqa: A002
        """kubectl as the administrator; returns its standard output."""
        return self.run([*self.kubectl_argv(), *arguments], stdin=input, timeout_s=timeout_s).stdout

    def get(self, *arguments: str) -> dict[str, Any]:
        """`kubectl get … -o json`, parsed."""
        found: dict[str, Any] = json.loads(self.kubectl("get", *arguments, "-o", "json"))
        return found

    def apply(
        self, what: Path | str | Mapping[str, Any] | Sequence[Mapping[str, Any]], *, namespace: str | None = None
    ) -> str:
        """Server-side apply of a file, a folder, or objects."""
        scope = ["-n", namespace] if namespace else []
        apply = ["apply", "--server-side", "--force-conflicts", *scope, "-f"]
        if isinstance(what, str | Path):
            return self.kubectl(*apply, str(what))
        items = [what] if isinstance(what, Mapping) else list(what)
        listed = {"apiVersion": "v1", "kind": "List", "items": items}
        return self.kubectl(*apply, "-", input=json.dumps(listed))

    # --- network

    def network(self) -> contextlib.AbstractContextManager[None]:
        """Be in the region's network for a while."""
        return network(self.network_path())

    def get_url(self, url: str, timeout_s: float = 2) -> int:
        """HTTP status, 0 when nothing answers."""
        try:
            with self.network(), urllib.request.urlopen(url, timeout=timeout_s) as answer:
                return int(answer.status)
        except OSError as error:
            return int(getattr(error, "code", 0))

    # --- the node and its pods

    def allocatable_gpus(self) -> int:
        """GPUs that the scheduler may hand out now."""
        node = self.get("node", self.node_name)
        return int(node["status"].get("allocatable", {}).get(GPU_RESOURCE, 0))

    def node_ready(self) -> bool:
        """Whether the node is Ready with its GPUs."""
        done = self.run([*self.kubectl_argv(), "get", "node", self.node_name, "-o", "json"], check=False, timeout_s=20)
        if done.returncode:
            return False
        status = json.loads(done.stdout)["status"]
        conditions = {entry["type"]: entry["status"] for entry in status.get("conditions", [])}
        return conditions.get("Ready") == "True" and (
            int(status.get("allocatable", {}).get(GPU_RESOURCE, 0)) == self.gpu_count
        )

    def wait_pod_ready(self, pod: str, namespace: str = "default", limit_s: float = 90) -> dict[str, Any]:
        """Until a pod is Ready; the error shows why it isn't."""
        deadline = time.monotonic() + limit_s
        while True:
            found = self.get("pod", pod, "-n", namespace)
            conditions = {entry["type"]: entry["status"] for entry in found["status"].get("conditions", [])}
            if conditions.get("Ready") == "True":
                return found
            if time.monotonic() > deadline:
                more = self.kubectl("describe", "pod", pod, "-n", namespace)[-2500:]
                message = f"pod {namespace}/{pod} isn't Ready after {limit_s:.0f} s:\n{more}"
                raise SandboxError(message)
            time.sleep(0.2)
