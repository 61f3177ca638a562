"""Prometheus, the fake GPU plugin and the fake DCGM exporter as pods, for clusters whose node isn't ours. Pure.

The pods see the host's folders under the host's own paths, so that a test changes GPUs and scrape configuration in the
same files as where they are processes. They stay as they are left: nothing restarts them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox import images, prometheus
from sandbox.components import DCGM_PORT, PROMETHEUS_PORT
from sandbox.paths import PACKAGE

NAMESPACE = "monitoring"
PROMETHEUS, GPU_PLUGIN, EXPORTER = "prometheus", "fake-gpu-plugin", "fake-dcgm-exporter"
DEVICE_PLUGINS = Path("/var/lib/kubelet/device-plugins")
POD_RESOURCES = Path("/var/lib/kubelet/pod-resources")
DATA = Path("/prometheus")


@dataclass(frozen=True)
class Place:
    """Where a region's observers find their things, on the node as on this machine."""

    node: str
    folder: Path
    """Holds gpus.json and prometheus.json."""
    prometheus: Path
    """The folder of Prometheus' own binary, no link."""

    @property
    def mounts(self) -> dict[Path, bool]:
        """Folders of this machine that the node must show under the same paths → whether read-only."""
        return {self.folder: False, PACKAGE: True, self.prometheus: True}


def prometheus_config(place: Place) -> str:
    """As in the sandbox, but the API server and the exporter are found as pods find them."""
    return prometheus.config(
        {}, node=place.node, exporter=f"{EXPORTER}.{NAMESPACE}.svc:{DCGM_PORT}", own=f"localhost:{PROMETHEUS_PORT}"
    )


def shared() -> list[dict[str, Any]]:
    """Their namespace, Services, and what Prometheus may read."""
    meta = {"name": PROMETHEUS, "namespace": NAMESPACE}
    rules = [
        {"apiGroups": [""], "resources": ["pods", "services"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]},
    ]
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "sandbox-prometheus"}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": role["name"]},
            "rules": rules,
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
            "metadata": {"name": role["name"]}, "roleRef": role, "subjects": [{"kind": "ServiceAccount", **meta}],
        },
        service(PROMETHEUS, PROMETHEUS_PORT),
        service(EXPORTER, DCGM_PORT),
    ]  # fmt: skip


def service(name: str, port: int) -> dict[str, Any]:
    """http://NAME.monitoring.svc:PORT in front of the pod of that name."""
    ports = [{"name": "http", "port": port, "protocol": "TCP"}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"selector": {"app": name}, "ports": ports},
    }


def pods(place: Place) -> dict[str, dict[str, Any]]:
    """The three pods by name."""
    gpus = place.folder / "gpus.json"
    found = [
        pod(place, GPU_PLUGIN, python("sandbox.fake_gpu_plugin", gpus), {place.folder: False, DEVICE_PLUGINS: False}),
        pod(
            place, EXPORTER, python("sandbox.fake_dcgm_exporter", gpus, f"0.0.0.0:{DCGM_PORT}", place.node),
            {place.folder: False, POD_RESOURCES: True}, port=DCGM_PORT,
        ),
        pod(
            place, PROMETHEUS,
            [
                str(place.prometheus / "prometheus"), f"--config.file={place.folder / 'prometheus.json'}",
                f"--storage.tsdb.path={DATA}", "--storage.tsdb.retention.time=30m",
                f"--web.listen-address=0.0.0.0:{PROMETHEUS_PORT}", "--web.enable-lifecycle", "--log.level=warn",
            ],
            {place.folder: True, place.prometheus: True}, port=PROMETHEUS_PORT, account=PROMETHEUS,
        ),
    ]  # fmt: skip
    return {item["metadata"]["name"]: item for item in found}


def python(module: str, *arguments: str | Path) -> list[str]:
    """A module of this package by the image's Python."""
    return ["python3", "-m", module, *(str(word) for word in arguments)]


def pod(
    place: Place, name: str, command: list[str], folders: dict[Path, bool], *, port: int = 0, account: str = ""
) -> dict[str, Any]:
    """One pod on the region's node, as root: the kubelet's sockets are root's. `folders` → whether read-only."""
    folders = {PACKAGE: True, **folders}
    volumes = {path: f"host-{number}" for number, path in enumerate(folders)}
    container: dict[str, Any] = {
        "name": name,
        "image": images.TRITON,  # it has Python with gRPC, and is on every node
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "env": [{"name": "PYTHONPATH", "value": str(PACKAGE.parent)}, {"name": "PYTHONUNBUFFERED", "value": "1"}],
        "resources": {"requests": {"cpu": "20m"}},
        "securityContext": {"runAsUser": 0, "allowPrivilegeEscalation": False},
        "volumeMounts": [
            {"name": volumes[path], "mountPath": str(path), "readOnly": read_only}
            for path, read_only in folders.items()
        ],
    }
    container["volumeMounts"].append({"name": "data", "mountPath": str(DATA)})
    if port:
        container["ports"] = [{"name": "http", "containerPort": port}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"app": name}},
        "spec": {
            "nodeName": place.node,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            **({"serviceAccountName": account} if account else {"automountServiceAccountToken": False}),
            "tolerations": [{"operator": "Exists"}],
            "containers": [container],
            "volumes": [
                *(
                    {"name": volume, "hostPath": {"path": str(path), "type": "Directory"}}
                    for path, volume in volumes.items()
                ),
                {"name": "data", "emptyDir": {}},
            ],
        },
    }
