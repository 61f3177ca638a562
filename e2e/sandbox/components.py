"""Command lines and configuration of a region's components. Pure: text in, text out."""

import json
from dataclasses import dataclass
from pathlib import Path

from sandbox import images

OUTER_ADDRESS = "10.80.0.254"
MAX_PODS = 250
GPU_RESOURCE = "nvidia.com/gpu"
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
DCGM_PORT = 9400
PROMETHEUS_PORT = 9090


@dataclass(frozen=True)
class RegionSpec:
    """What a region is made with. `index` (1 to 15) gives its addresses; without nodes it is a control plane only."""

    name: str
    index: int = 1
    nodes: bool = True
    gpus: int = 8
    gpu_product: str = "NVIDIA-L4"
    gpu_memory_mib: int = 23034

    @property
    def address(self) -> str:
        """The node's and the API server's address on the link between regions."""
        return f"10.80.0.{self.index}"

    @property
    def node_name(self) -> str:
        """The region's first node."""
        return f"{self.name}-0"

    @property
    def pod_range(self) -> str:
        """Addresses of the node's pods."""
        return f"10.64.{self.index}.0/24"

    @property
    def service_range(self) -> str:
        """Cluster addresses; a range of its own per region, so that the outer network can reach each of them."""
        return f"10.96.{self.index * 16}.0/20"

    @property
    def first_service_address(self) -> str:
        """What kubernetes.default.svc gets."""
        return f"10.96.{self.index * 16}.1"

    @property
    def link(self) -> str:
        """Name of the region's leg in the outer network; at most 15 characters as the kernel asks."""
        return f"v{self.index}-{self.name}"[:15]


@dataclass(frozen=True)
class Layout:
    """Where one region's files lie."""

    spec: RegionSpec
    folder: Path
    bin_dir: Path
    cgroup: str

    @property
    def pki(self) -> Path:
        """Keys and certificates."""
        return self.folder / "pki"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.folder / "kubeconfig"

    def log(self, name: str) -> Path:
        """A component's log."""
        return self.folder / "log" / f"{name}.log"

    def binary(self, name: str) -> str:
        """A built binary."""
        return str(self.bin_dir / name)


def kubeconfig(server: str, ca: Path, token: str, name: str) -> str:
    """An administrator's kubeconfig (JSON is YAML)."""
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": name,
            "clusters": [{"name": name, "cluster": {"server": server, "certificate-authority": str(ca)}}],
            "users": [{"name": "admin", "user": {"token": token}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": "admin", "namespace": "default"}}],
        },
        indent=1,
    )


def etcd(layout: Layout) -> list[str]:
    """One member; its data is worthless after the run, so nothing is synced to disk."""
    client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
    return [
        layout.binary("etcd"), f"--data-dir={layout.folder / 'etcd'}", f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}", "--unsafe-no-fsync", "--log-level=warn",
        "--quota-backend-bytes=4294967296",
    ]  # fmt: skip


def kube_apiserver(layout: Layout) -> list[str]:
    """With token and client-certificate users, RBAC, and what aggregated APIs need."""
    spec, pki = layout.spec, layout.pki
    return [
        layout.binary("kube-apiserver"), "--etcd-servers=http://127.0.0.1:2379", "--bind-address=0.0.0.0",
        f"--advertise-address={spec.address}", "--secure-port=6443",
        f"--tls-cert-file={pki / 'apiserver.crt'}", f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--client-ca-file={pki / 'ca.crt'}", f"--token-auth-file={layout.folder / 'tokens.csv'}",
        f"--requestheader-client-ca-file={pki / 'front-proxy-ca.crt'}",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User", "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={pki / 'front-proxy-client.crt'}",
        f"--proxy-client-key-file={pki / 'front-proxy-client.key'}", "--enable-aggregator-routing=true",
        "--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={pki / 'sa.pub'}",
        f"--service-account-signing-key-file={pki / 'sa.key'}", "--authorization-mode=RBAC",
        f"--service-cluster-ip-range={spec.service_range}", "--allow-privileged=true",
        "--kubelet-preferred-address-types=InternalIP", "--profiling=false",
    ]  # fmt: skip


def kube_controller_manager(layout: Layout) -> list[str]:
    """All controllers, each under its own service account; without nodes at default rates, as peers are measured."""
    pki = layout.pki
    rates = ["--kube-api-qps=200", "--kube-api-burst=400"] if layout.spec.nodes else []
    return [
        layout.binary("kube-controller-manager"), f"--kubeconfig={layout.kubeconfig}", "--bind-address=127.0.0.1",
        f"--cert-dir={layout.folder / 'kcm'}", f"--service-account-private-key-file={pki / 'sa.key'}",
        f"--root-ca-file={pki / 'ca.crt'}", f"--cluster-signing-cert-file={pki / 'ca.crt'}",
        f"--cluster-signing-key-file={pki / 'ca.key'}", "--use-service-account-credentials=true",
        "--leader-elect=false", *rates,
    ]  # fmt: skip


def kube_scheduler(layout: Layout) -> list[str]:
    """The default profile."""
    return [
        layout.binary("kube-scheduler"), f"--kubeconfig={layout.kubeconfig}", "--bind-address=127.0.0.1",
        f"--cert-dir={layout.folder / 'scheduler'}", "--leader-elect=false", "--kube-api-qps=200",
        "--kube-api-burst=400",
    ]  # fmt: skip


def containerd(layout: Layout) -> list[str]:
    """The container runtime with the CRI plugin."""
    return [layout.binary("containerd"), "-c", str(layout.folder / "containerd.toml")]


def containerd_config(layout: Layout, runc: str) -> str:
    """containerd's configuration, version 3."""
    return f"""version = 3
root = "{layout.folder / "containerd"}"
state = "/run/containerd/state"
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "{images.PAUSE}"
[plugins.'io.containerd.cri.v1.runtime']
  # lowering a score needs CAP_SYS_RESOURCE, which containers and small machines lack: runc would die of it
  restrict_oom_score_adj = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["{layout.bin_dir}"]
    conf_dir = "{layout.folder / "cni"}"
  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = "runc"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
        SystemdCgroup = false
        BinaryName = "{runc}"
"""


def cni_config(layout: Layout) -> str:
    """A bridge per node, addresses handed out by host-local, host ports by portmap."""
    bridge = {
        "type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": False, "hairpinMode": True,
        "ipam": {
            "type": "host-local", "dataDir": str(layout.folder / "ipam"),
            "ranges": [[{"subnet": layout.spec.pod_range}]], "routes": [{"dst": "0.0.0.0/0"}],
        },
    }  # fmt: skip
    plugins = [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}]
    return json.dumps({"cniVersion": "1.0.0", "name": "pods", "plugins": plugins}, indent=1)


def node_labels(spec: RegionSpec) -> dict[str, str]:
    """What NVIDIA's feature discovery and a cloud would set."""
    return {
        "nvidia.com/gpu.product": spec.gpu_product, "nvidia.com/gpu.memory": str(spec.gpu_memory_mib),
        "nvidia.com/gpu.count": str(spec.gpus), "topology.kubernetes.io/region": spec.name,
        "topology.kubernetes.io/zone": f"{spec.name}-a",
    }  # fmt: skip


def kubelet(layout: Layout) -> list[str]:
    """The node's kubelet, registering with the node's labels."""
    spec = layout.spec
    labels = node_labels(spec)
    return [
        layout.binary("kubelet"), f"--config={layout.folder / 'kubelet.json'}", f"--kubeconfig={layout.kubeconfig}",
        f"--hostname-override={spec.node_name}", f"--node-ip={spec.address}",
        "--node-labels=" + ",".join(f"{key}={value}" for key, value in labels.items()), "--v=1",
    ]  # fmt: skip


def kubelet_config(layout: Layout) -> str:
    """Plain control groups, no eviction by disk and no image removal: a test machine's disk isn't ours to judge."""
    spec = layout.spec
    never = ("memory.available", "nodefs.available", "nodefs.inodesFree", "imagefs.available", "imagefs.inodesFree")
    return json.dumps(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{layout.cgroup}/{spec.name}",
            "cgroupsPerQOS": True,
            "enforceNodeAllocatable": [],
            "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "failSwapOn": False,
            "evictionHard": dict.fromkeys(never, "0%"),
            "imageGCHighThresholdPercent": 100,
            "imageMaximumGCAge": "0s",
            "clusterDNS": [spec.address],
            "clusterDomain": "cluster.local",
            "resolvConf": str(layout.folder / "resolv.conf"),
            "localStorageCapacityIsolation": False,
            "nodeStatusUpdateFrequency": "2s",
            "maxPods": MAX_PODS,
            "kubeAPIQPS": 200,
            "kubeAPIBurst": 400,
            "volumePluginDir": str(layout.folder / "volumeplugins"),
            "podLogsDir": str(layout.folder / "pod-logs"),
            "serializeImagePulls": False,
        },
        indent=1,
    )


def kube_proxy(layout: Layout) -> list[str]:
    """Services by nftables; the conntrack limits are the machine's and stay as they are."""
    spec = layout.spec
    return [
        layout.binary("kube-proxy"), f"--kubeconfig={layout.kubeconfig}", "--proxy-mode=nftables",
        f"--hostname-override={spec.node_name}", f"--cluster-cidr={spec.pod_range}", "--conntrack-max-per-core=0",
        "--conntrack-min=0",
    ]  # fmt: skip


def coredns(layout: Layout) -> list[str]:
    """The region's DNS, as a process on the node's address."""
    return [layout.binary("coredns"), "-conf", str(layout.folder / "Corefile")]


def corefile(layout: Layout) -> str:
    """Cluster names only: nothing leaves the sandbox."""
    return f""".:53 {{
    bind {layout.spec.address}
    errors
    kubernetes cluster.local in-addr.arpa ip6.arpa {{
        kubeconfig {layout.kubeconfig}
        pods insecure
        ttl 2
    }}
    loop
}}
"""


def prometheus(layout: Layout) -> list[str]:
    """Prometheus 3 with minutes of data in the run's folder."""
    return [
        layout.binary("prometheus"), f"--config.file={layout.folder / 'prometheus.json'}",
        f"--storage.tsdb.path={layout.folder / 'prometheus'}", "--storage.tsdb.retention.time=30m",
        f"--web.listen-address={layout.spec.address}:{PROMETHEUS_PORT}", "--web.enable-lifecycle", "--log.level=warn",
    ]  # fmt: skip


def fake_gpu_plugin(layout: Layout, python: str) -> list[str]:
    """The fake GPU device plugin."""
    return [python, "-m", "sandbox.fake_gpu_plugin", str(layout.folder / "gpus.json")]


def fake_dcgm_exporter(layout: Layout, python: str) -> list[str]:
    """The fake DCGM exporter."""
    spec = layout.spec
    return [
        python, "-m", "sandbox.fake_dcgm_exporter", str(layout.folder / "gpus.json"),
        f"{spec.address}:{DCGM_PORT}", spec.node_name,
    ]  # fmt: skip
