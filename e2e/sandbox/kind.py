"""The same handle over kind, through pytest-kind, where Docker exists. UNTESTED: written and reviewed, never run here.

GPUs: kind's node has none, so `nvidia.com/gpu` is patched into its status; no health switch, no DCGM exporter.
The control plane's processes are containers of kind's node and can't be stopped one by one.
"""

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sandbox import images
from sandbox.components import GPU_RESOURCE
from sandbox.errors import SandboxError
from sandbox.progress import Say, checked, say

FIX = "see `docker ps` and `kind get clusters`"


def require_docker() -> None:
    """Stop with a sentence where kind can't work."""
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True, timeout=30, check=False).returncode:
        message = (
            "--cluster=kind needs a running Docker engine, and there is none here; use --cluster=sandbox (as root)"
        )
        raise SandboxError(message)


class KindRegion:
    """What scenarios use of a Region, on a kind cluster."""

    def __init__(self, cluster: Any, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.node_name = f"{cluster.name}-control-plane"
        self.kubeconfig = Path(cluster.kubeconfig_path)
        self.api_url = str(self.get_config()["clusters"][0]["cluster"]["server"])
        self.prometheus_url = ""

    @classmethod
    def up(cls, name: str = "local") -> "KindRegion":
        """The one region of a kind cluster, made when it isn't there."""
        return KindSandbox.up(regions=(name,)).region()

    def get_config(self) -> dict[str, Any]:
        """The parsed kubeconfig."""
        found: dict[str, Any] = json.loads(self.kubectl("config", "view", "--raw", "-o", "json"))
        return found

    def kubectl(self, *arguments: str | Path, input: str | None = None, timeout_s: float = 60) -> str:  # noqa: A002
        """kubectl on the cluster; returns its standard output."""
        words = [self.cluster.kubectl_path, "--kubeconfig", self.kubeconfig, *arguments]
        return checked(words, fix=FIX, timeout_s=timeout_s, stdin=input)

    def get(self, *arguments: str) -> dict[str, Any]:
        """`kubectl get … -o json`, parsed."""
        found: dict[str, Any] = json.loads(self.kubectl("get", *arguments, "-o", "json"))
        return found

    def apply(
        self, what: Path | str | Mapping[str, Any] | Sequence[Mapping[str, Any]], *, namespace: str | None = None
    ) -> str:
        """Server-side apply of a file, a folder, or objects."""
        apply = ["apply", "--server-side", "--force-conflicts", *(["-n", namespace] if namespace else []), "-f"]
        if isinstance(what, str | Path):
            return self.kubectl(*apply, str(what))
        items = [what] if isinstance(what, Mapping) else list(what)
        return self.kubectl(*apply, "-", input=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))

    def component(self, name: str) -> Any:
        """Not on kind."""
        message = f"{name} can't be stopped on kind; run this scenario with --cluster=sandbox"
        raise SandboxError(message)


class KindSandbox:
    """What scenarios use of a Sandbox, on kind: one cluster per region."""

    def __init__(self, regions: Sequence[KindRegion]) -> None:
        self.regions = tuple(regions)

    @classmethod
    def up(
        cls, run: str = "conch", regions: Sequence[str] = ("local",), *, gpus: int = 8, tell: Say = say
    ) -> "KindSandbox":
        """Create what isn't there and load the images."""
        require_docker()
        from pytest_kind import KindCluster

        made = []
        needed = [*images.ensure_stable(tell), images.ensure_operator(tell)]
        for name in regions:
            cluster = KindCluster(f"{run}-{name}")
            cluster.create()
            region = KindRegion(cluster, name)
            for image in needed:
                if image is not None:
                    load = [cluster.kind_path, "load", "image-archive", "--name", cluster.name, image.archive]
                    checked(load, fix=FIX, timeout_s=300)
            patch = [{"op": "add", "path": f"/status/capacity/{GPU_RESOURCE.replace('/', '~1')}", "value": str(gpus)}]
            region.kubectl(
                "patch", "node", region.node_name, "--subresource=status", "--type=json", "-p", json.dumps(patch)
            )
            region.kubectl("label", "node", region.node_name, "--overwrite", "nvidia.com/gpu.product=NVIDIA-L4")
            made.append(region)
        return cls(made)

    def region(self, name: str | None = None) -> KindRegion:
        """A region by name; without one, the first."""
        return next(region for region in self.regions if name in (None, region.name))

    def enter_network(self) -> None:
        """kind's nodes are reached from the machine's own network."""

    def down(self, *, keep_logs: bool = True) -> None:
        """Delete the clusters."""
        del keep_logs
        for region in self.regions:
            region.cluster.delete()
