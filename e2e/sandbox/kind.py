"""The same handle over kind, through pytest-kind, where Docker exists. UNTESTED: no command of Docker or kind ran yet.

kind's node is a container of this machine: root enters its network namespace, so that a test reaches Services, pods and
Prometheus as it does in the sandbox. Prometheus, the fake GPU plugin and the fake DCGM exporter are pods there
(`observers.py`), which were run in the sandbox. kind's own CNI enforces NetworkPolicies, which the sandbox can't.
A run that is killed leaves its cluster: `kind get clusters`, `kind delete cluster --name NAME`.

Not there, and refused with a reason: control planes without nodes (those tests start the sandbox's), several regions,
networks between them, and stopping etcd, the API server, the controllers or kube-proxy one by one.
"""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from sandbox import binaries, images, observers, preflight
from sandbox.components import PROMETHEUS_PORT, RegionSpec, node_labels
from sandbox.content import write_atomic
from sandbox.errors import SandboxError
from sandbox.gpu_state import Gpus, GpuState
from sandbox.gpu_state import write as write_gpus
from sandbox.handle import AnyComponent, AnyRegion
from sandbox.images import Image
from sandbox.namespaces import wait_for
from sandbox.paths import cache_root, run_root
from sandbox.pod_component import PodComponent
from sandbox.progress import Say, checked, say, step

KIND_VERSION = "v0.33.0"
# Of that release's notes; image volumes are on by default since Kubernetes 1.35.
NODE_IMAGE = "kindest/node:v1.36.4@sha256:099e049362a1526b2db71494e1947aae99bd16290d7c895f2b7ea312e3cbfaed"
API_PORT = 6443
SERVICES_OF_THE_NODE = ("kubelet", "containerd")
FIX = "see `docker ps` and `kind get clusters`"


def require_docker(tell: Say) -> None:
    """Stop with a sentence where kind can't work.

    Raises:
        SandboxError: No Docker engine, or no right to enter its containers' networks.
    """
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True, timeout=30, check=False).returncode:
        message = (
            "--cluster=kind needs a running Docker engine, and there is none here; use --cluster=sandbox (as root)"
        )
        raise SandboxError(message)
    if os.geteuid() != 0:
        message = "--cluster=kind enters the network of kind's node, so it must run as root beside Docker; try sudo"
        raise SandboxError(message)
    preflight.install_missing(tell)


def cluster_config(spec: RegionSpec, place: observers.Place) -> dict[str, Any]:
    """kind's configuration: one node with the sandbox's labels, and this machine's folders under their own paths."""
    kubelet = {"kind": "KubeletConfiguration", "maxPods": 250, "nodeStatusUpdateFrequency": "2s"}
    mounts = [
        {"hostPath": str(path), "containerPath": str(path), "readOnly": read_only}
        for path, read_only in place.mounts.items()
    ]
    node = {
        "role": "control-plane",
        "labels": node_labels(spec),
        "extraMounts": mounts,
        "kubeadmConfigPatches": [json.dumps(kubelet)],
    }
    return {"apiVersion": "kind.x-k8s.io/v1alpha4", "kind": "Cluster", "nodes": [node]}


def inner_kubeconfig(text: str, address: str) -> str:
    """kind's kubeconfig with the node's own address: the published one exists in this machine's network only."""
    config = yaml.safe_load(text)
    for entry in config["clusters"]:
        entry["cluster"]["server"] = f"https://{address}:{API_PORT}"
    return json.dumps(config, indent=1)


def node_of(inspected: str) -> tuple[int, str]:
    """Pid and address of a container, of what `docker inspect` prints.

    Raises:
        SandboxError: It doesn't run, or has no IPv4 address.
    """
    (found,) = json.loads(inspected)
    networks = found["NetworkSettings"]["Networks"].values()
    addresses = [network["IPAddress"] for network in networks if network.get("IPAddress")]
    pid = int(found["State"]["Pid"])
    if not pid or not addresses:
        message = f"kind's node {found['Name'].lstrip('/')} isn't running, or has no IPv4 address; {FIX}"
        raise SandboxError(message)
    return pid, addresses[0]


class NodeService(AnyComponent):
    """A systemd unit of kind's node. systemd restarts what is killed; `stop` is final."""

    def __init__(self, region: "KindRegion", name: str) -> None:
        self.region = region
        self.name = name

    @property
    def running(self) -> bool:
        """Whether the unit is active."""
        words = ["docker", "exec", self.region.node_name, "systemctl", "is-active", "--quiet", self.name]
        return subprocess.run(words, capture_output=True, timeout=30, check=False).returncode == 0

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send any signal to the unit's main process."""
        name = signal.Signals(number).name
        self.region.docker_exec("systemctl", "kill", "--kill-whom=main", f"--signal={name}", self.name)

    def stop(self, limit_s: float = 15) -> None:
        """As systemd stops it."""
        self.region.docker_exec("systemctl", "stop", self.name, timeout_s=limit_s + 60)

    def start(self) -> None:
        """Start it."""
        self.region.docker_exec("systemctl", "start", self.name)

    def log(self) -> str:
        """The unit's journal."""
        return self.region.docker_exec("journalctl", "--no-pager", "--unit", self.name)


class KindRegion(AnyRegion):
    """A kind cluster of one node."""

    def __init__(self, cluster: Any, spec: RegionSpec, place: observers.Place) -> None:
        self.cluster = cluster
        self.place = place
        self.name = spec.name
        self.node_name = place.node
        pid, self.address = node_of(checked(["docker", "inspect", self.node_name], fix=FIX, timeout_s=30))
        self._network = Path(f"/proc/{pid}/ns/net")
        if not self._network.exists():
            message = (
                f"process {pid} of kind's node isn't on this machine: Docker's engine must run here, not elsewhere"
            )
            raise SandboxError(message)
        self.kubeconfig = place.folder / "kubeconfig"
        self.bin_dir = Path(cluster.kubectl_path).parent
        self.api_url = f"https://{self.address}:{API_PORT}"
        self.prometheus_url = ""  # once its Service has an address
        self.prometheus_config = place.folder / "prometheus.json"
        self.gpus = Gpus(place.folder / "gpus.json")
        self.gpu_count = spec.gpus

    # --- the handle

    def network_path(self) -> Path:
        """Of kind's node."""
        return self._network

    def docker_exec(self, *arguments: str | Path, timeout_s: float = 60) -> str:
        """A command in the node."""
        return checked(["docker", "exec", self.node_name, *arguments], fix=FIX, timeout_s=timeout_s)

    def ctr(self, *arguments: str | Path, timeout_s: float = 300) -> str:
        """The node's own containerd client."""
        return self.docker_exec("ctr", "-n", "k8s.io", *arguments, timeout_s=timeout_s)

    def component(self, name: str) -> AnyComponent:
        """An observer, the kubelet or containerd.

        Raises:
            SandboxError: What else there is can't be stopped alone here.
        """
        if name in SERVICES_OF_THE_NODE:
            return NodeService(self, name)
        manifest = observers.pods(self.place).get(name)
        if manifest is None:
            message = f"{name} can't be stopped alone on kind; run this scenario with --cluster=sandbox"
            raise SandboxError(message)
        return PodComponent(self, manifest)

    def load(self, image: Image) -> None:
        """Import an image unless this content is there."""
        marker = self.place.folder / "images" / image.reference.replace("/", "_")
        if marker.exists() and marker.read_text() == image.key:
            return
        load = [self.cluster.kind_path, "load", "image-archive", "--name", self.cluster.name, image.archive]
        checked(load, fix=FIX, timeout_s=600)
        write_atomic(marker, image.key)

    # --- coming up

    def write_kubeconfig(self) -> None:
        """The administrator's, for the region's network."""
        found = checked(
            [self.cluster.kind_path, "get", "kubeconfig", "--name", self.cluster.name], fix=FIX, timeout_s=60
        )
        write_atomic(self.kubeconfig, inner_kubeconfig(found, self.address), 0o600)

    def start_observers(self) -> None:
        """Prometheus and the fake GPUs, until the node offers these and the other is ready."""
        self.apply(observers.shared())
        for name in observers.pods(self.place):
            component = self.component(name)
            if not component.running:
                component.start()
        host = self.get("service", observers.PROMETHEUS, "-n", observers.NAMESPACE)["spec"]["clusterIP"]
        self.prometheus_url = f"http://{host}:{PROMETHEUS_PORT}"
        wait_for(self.node_ready, 120, f"node {self.node_name} isn't Ready with its GPUs; {FIX}", 0.5)
        ready = f"{self.prometheus_url}/-/ready"
        wait_for(lambda: self.get_url(ready) == 200, 60, "Prometheus isn't ready; see its pod in monitoring", 0.5)


def write_files(place: observers.Place, spec: RegionSpec) -> None:
    """What the node's mounts and the observers need before there is a node."""
    place.folder.mkdir(parents=True, exist_ok=True)
    write_atomic(place.folder / "prometheus.json", observers.prometheus_config(place))
    gpus = GpuState(count=spec.gpus, product=spec.gpu_product, memory_mib=spec.gpu_memory_mib)
    write_gpus(place.folder / "gpus.json", gpus)


def new_cluster(name: str, folder: Path) -> Any:
    """pytest-kind's cluster, with the programs of PATH where these are there, else downloaded into the cache."""
    from pytest_kind import cluster as pytest_kind

    # pytest loads its plugins before us, so the environment would be read too early
    pytest_kind.KIND_VERSION, pytest_kind.KUBECTL_VERSION = KIND_VERSION, binaries.KUBERNETES
    cache = cache_root() / f"kind-{KIND_VERSION}-{binaries.KUBERNETES}"
    cache.mkdir(parents=True, exist_ok=True)
    found = {word: Path(shutil.which(word) or cache / word) for word in ("kind", "kubectl")}
    made = pytest_kind.KindCluster(
        name, folder / "kind.kubeconfig", NODE_IMAGE, kind_path=found["kind"], kubectl_path=found["kubectl"]
    )
    made.ensure_kind()
    made.ensure_kubectl()
    return made


class KindSandbox:
    """What scenarios use of a Sandbox, on kind: one cluster, which is one region."""

    def __init__(self, run: str, regions: Sequence[KindRegion]) -> None:
        self.run = run
        self.regions = tuple(regions)

    @classmethod
    def up(cls, run: str = "conch", name: str = "local", *, gpus: int = 8, tell: Say = say) -> "KindSandbox":
        """Create what isn't there, load the images, start the observers."""
        require_docker(tell)
        spec = RegionSpec(name, gpus=gpus)
        cluster_name = f"{run}-{name}"
        folder = run_root(f"kind-{run}") / name
        place = observers.Place(f"{cluster_name}-control-plane", folder, binaries.ensure_tools(tell))
        write_files(place, spec)
        cluster = new_cluster(cluster_name, folder)
        config = folder / "kind.json"
        write_atomic(config, json.dumps(cluster_config(spec, place), indent=1))
        needed = [image for image in images.ensure_stable(tell) if image.reference != images.PAUSE]
        operator = images.ensure_operator(tell)
        listed = checked([cluster.kind_path, "get", "clusters"], fix=FIX, timeout_s=60)
        if cluster_name not in listed.split():
            shutil.rmtree(folder / "images", ignore_errors=True)  # a new node holds none of ours
        try:
            with step(f"kind cluster {cluster_name}", tell):
                cluster.create(config)
                region = KindRegion(cluster, spec, place)
                region.write_kubeconfig()
                for image in [*needed, *([operator] if operator else [])]:
                    region.load(image)
                region.start_observers()
        except BaseException:
            cluster.delete()
            raise
        return cls(run, [region])

    def region(self, name: str | None = None) -> KindRegion:
        """A region by name; without one, the first.

        Raises:
            SandboxError: There is none of that name.
        """
        for region in self.regions:
            if name in (None, region.name):
                return region
        message = f"no region {name!r} on kind; there is {', '.join(region.name for region in self.regions)}"
        raise SandboxError(message)

    def down(self, *, keep_logs: bool = True) -> None:
        """Delete the cluster and its files."""
        del keep_logs
        for region in self.regions:
            region.cluster.delete()
            shutil.rmtree(region.cluster.path, ignore_errors=True)
        shutil.rmtree(run_root(f"kind-{self.run}"), ignore_errors=True)
