"""One region: a Kubernetes cluster in three namespaces of its own, and its components as processes there."""

import contextlib
import secrets
import shutil
import signal
import ssl
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sandbox import cgroups, components, pki, prometheus, store
from sandbox.components import PROMETHEUS_PORT, Layout, RegionSpec
from sandbox.content import write_atomic
from sandbox.errors import SandboxError
from sandbox.gpu_state import Gpus, GpuState
from sandbox.gpu_state import write as write_gpus
from sandbox.handle import SYSTEM_PATH, AnyComponent, AnyRegion
from sandbox.images import Image
from sandbox.namespaces import Control, wait_for
from sandbox.paths import PACKAGE
from sandbox.progress import Say, checked

CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager")
NODE = ("containerd", "kube-scheduler", "kubelet", "kube-proxy", "coredns")
OBSERVERS = ("fake-gpu-plugin", "fake-dcgm-exporter", "prometheus")

__all__ = ["Component", "Region", "RegionSpec"]


class Component(AnyComponent):
    """One process of a region: it stays as it is left, nothing restarts it."""

    def __init__(self, name: str, control: Control) -> None:
        self.name = name
        self.control = control

    def state(self) -> dict[str, Any]:
        """pid (inside the region), running, status, starts, log."""
        found = self.control.ask(op="list")["processes"].get(self.name)
        if found is None:
            message = f"{self.name} was never started in this region"
            raise SandboxError(message)
        return dict(found)

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return bool(self.state()["running"])

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send any signal: SIGSTOP and SIGCONT too."""
        self.control.ask(op="signal", name=self.name, signal=int(number))

    def log(self) -> str:
        """Everything that it has printed in this region's life."""
        return Path(self.state()["log"]).read_text()

    def start(self) -> None:
        """Start it again with the same arguments."""
        self.control.ask(op="start", name=self.name)


class Region(AnyRegion):
    """A region of processes in namespaces."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.spec = layout.spec
        self.name = layout.spec.name
        self.index = layout.spec.index
        self.address = layout.spec.address
        self.kubeconfig = layout.kubeconfig
        self.bin_dir = layout.bin_dir
        self.api_url = f"https://{layout.spec.address}:6443"
        self.prometheus_url = f"http://{layout.spec.address}:{PROMETHEUS_PORT}"
        self.node_name = layout.spec.node_name
        self.control = Control(layout.folder / "keeper.sock")
        self.prometheus_config = layout.folder / "prometheus.json"
        self.gpus = Gpus(layout.folder / "gpus.json")
        self.gpu_count = layout.spec.gpus

    # --- what tests call

    @property
    def token(self) -> str:
        """The administrator's bearer token."""
        return (self.layout.folder / "tokens.csv").read_text().split(",", 1)[0]

    def component(self, name: str) -> Component:
        """A process of the region by name: etcd, kube-apiserver, kubelet, prometheus, …"""
        return Component(name, self.control)

    def components(self) -> dict[str, dict[str, Any]]:
        """State of every component."""
        return dict(self.control.ask(op="list")["processes"])

    def network_path(self) -> Path:
        """Of the region's first process."""
        return Path(f"/proc/{self.control.pid()}/ns/net")

    def kubectl_argv(self) -> list[str]:
        """With a cache of its own, since the addresses of regions repeat from run to run."""
        return [self.layout.binary("kubectl"), f"--cache-dir={self.layout.folder / 'kubectl'}"]

    def run_inside(self, argv: Sequence[str | Path], *, timeout_s: float = 120) -> str:
        """A command in all of the region's namespaces (its mounts and processes too)."""
        words = [*self.control.inside_argv(), *(str(word) for word in argv)]
        return checked(words, fix=f"see {self.layout.folder / 'log'}", timeout_s=timeout_s)

    def ctr(self, *arguments: str | Path, timeout_s: float = 300) -> str:
        """containerd's client in the kubelet's namespace of images."""
        words = [self.layout.binary("ctr"), "-a", components.CONTAINERD_SOCKET, "-n", "k8s.io", *arguments]
        return self.run_inside(words, timeout_s=timeout_s)

    def load(self, image: Image) -> None:
        """Import an image unless this content is there."""
        marker = self.layout.folder / "images" / image.reference.replace("/", "_")
        if marker.exists() and marker.read_text() == image.key:
            return
        self.ctr("images", "import", image.archive)
        write_atomic(marker, image.key)

    # --- coming up

    def write_files(self) -> None:
        """Keys, kubeconfig and every component's configuration."""
        layout, spec, folder = self.layout, self.spec, self.layout.folder
        (folder / "log").mkdir(parents=True, exist_ok=True)
        pki.make(layout.pki, spec.address, spec.first_service_address)
        if not (folder / "tokens.csv").exists():
            write_atomic(folder / "tokens.csv", f'{secrets.token_hex(16)},admin,admin,"system:masters"\n', 0o600)
        text = components.kubeconfig(self.api_url, layout.pki / "ca.crt", self.token, spec.name)
        write_atomic(layout.kubeconfig, text, 0o600)
        for stale in ("etcd", "images", "prometheus", "pod-logs", "ipam"):
            shutil.rmtree(folder / stale, ignore_errors=True)
        (folder / "etcd").mkdir(mode=0o700)
        if not spec.nodes:
            return
        runc = shutil.which("runc", path=SYSTEM_PATH) or "runc"
        write_atomic(folder / "containerd.toml", components.containerd_config(layout, runc))
        write_atomic(folder / "cni" / "10-pods.conflist", components.cni_config(layout))
        write_atomic(folder / "kubelet.json", components.kubelet_config(layout))
        write_atomic(folder / "Corefile", components.corefile(layout))
        write_atomic(folder / "resolv.conf", f"nameserver {spec.address}\n")
        write_atomic(self.prometheus_config, prometheus.local_config(layout))
        write_gpus(
            folder / "gpus.json", GpuState(count=spec.gpus, product=spec.gpu_product, memory_mib=spec.gpu_memory_mib)
        )

    def start(self, name: str, argv: list[str]) -> None:
        """Start a component under its name."""
        env = {
            "PATH": f"{self.layout.bin_dir}:{SYSTEM_PATH}", "HOME": str(Path.home()), "LANG": "C.UTF-8",
            "PYTHONPATH": str(PACKAGE.parent),
        }  # fmt: skip
        self.control.ask(op="start", name=name, argv=argv, env=env, log=str(self.layout.log(name)))

    def get_url(self, url: str, timeout_s: float = 2) -> int:
        """HTTP status, 0 when nothing answers."""
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {self.token}"})
        context = (
            ssl.create_default_context(cafile=str(self.layout.pki / "ca.crt")) if url.startswith("https") else None
        )
        try:
            with self.network(), urllib.request.urlopen(request, timeout=timeout_s, context=context) as answer:
                return int(answer.status)
        except OSError as error:
            return int(getattr(error, "code", 0))

    def start_control_plane(self) -> None:
        """etcd and the API server; controllers follow once it answers."""
        self.start("etcd", components.etcd(self.layout))
        self.start("kube-apiserver", components.kube_apiserver(self.layout))

    def finish_control_plane(self) -> None:
        """Wait for the API server, then start what needs it."""
        self.wait_api()
        self.start("kube-controller-manager", components.kube_controller_manager(self.layout))

    def wait_api(self, limit_s: float = 90) -> None:
        """Until the API server is ready; fails early when it has died."""

        def ready() -> bool:
            state = self.component("kube-apiserver").state()
            if not state["running"]:
                message = f"kube-apiserver ended with {state['status']}; see {state['log']}"
                raise SandboxError(message)
            return self.get_url(self.api_url + "/readyz") == 200

        wait_for(ready, limit_s, f"kube-apiserver isn't ready; see {self.layout.log('kube-apiserver')}", 0.1)

    def start_runtime(self, template: Path) -> None:
        """The image store and containerd; needs no API server."""
        store.copy(template, self.layout.folder / "containerd")
        self.start("containerd", components.containerd(self.layout))
        log = self.layout.log("containerd")
        inside = Path(f"/proc/{self.control.pid()}/root{components.CONTAINERD_SOCKET}")
        wait_for(inside.exists, 30, f"containerd did not start; see {log}")

    def start_node(self) -> None:
        """Everything of a node that needs the API server, and the observers."""
        layout, python = self.layout, sys.executable
        for root in cgroups.hierarchies():
            with contextlib.suppress(OSError):
                (root / layout.cgroup / self.name).mkdir(parents=True, exist_ok=True)
        self.start("kubelet", components.kubelet(layout))
        self.start("kube-scheduler", components.kube_scheduler(layout))
        self.start("kube-proxy", components.kube_proxy(layout))
        self.start("coredns", components.coredns(layout))
        self.start("fake-gpu-plugin", components.fake_gpu_plugin(layout, python))
        self.start("prometheus", components.prometheus(layout))
        self.start("fake-dcgm-exporter", components.fake_dcgm_exporter(layout, python))
        self.apply(prometheus.local_service(layout))

    def wait_node(self, limit_s: float = 90) -> None:
        """Until the node is Ready and its GPUs are offered."""
        wait_for(self.node_ready, limit_s, f"node {self.node_name} isn't Ready; see {self.layout.log('kubelet')}", 0.2)

    def down_components(self, say: Say) -> list[str]:
        """Names of components that were started and run no more."""
        dead = [name for name, state in self.components().items() if not state["running"]]
        for name in dead:
            say(f"  {self.name}: {name} isn't running; see {self.layout.log(name)}")
        return dead
