"""What of kind's cluster can be shown without Docker: rendered files, command lines, and who is refused and why."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from sandbox import AnyRegion, SandboxError, observers, prometheus
from sandbox.components import Layout, RegionSpec, kubelet, node_labels
from sandbox.images import Image
from sandbox.kind import KindRegion, KindSandbox, cluster_config, inner_kubeconfig, node_of, require_docker
from sandbox.paths import PACKAGE

if TYPE_CHECKING:
    from collections.abc import Callable

NODE = "run-local-control-plane"
SPEC = RegionSpec("local", gpus=4)
PLACE = observers.Place(NODE, Path("/cache/run/kind-run/local"), Path("/cache/bin-tools-1"))
KUBECONFIG = """
apiVersion: v1
kind: Config
clusters:
- name: kind-run-local
  cluster: {server: "https://127.0.0.1:40123", certificate-authority-data: QQ==}
users:
- name: kind-run-local
  user: {client-certificate-data: Qg==, client-key-data: Qw==}
"""


def inspected(pid: int, *addresses: str) -> str:
    """What `docker inspect` prints, as far as it is read."""
    networks = {f"net{number}": {"IPAddress": address} for number, address in enumerate(addresses)}
    found = {"Name": f"/{NODE}", "State": {"Pid": pid}, "NetworkSettings": {"Networks": networks}}
    return json.dumps([found])


# --- who is refused


def fake_program(folder: Path, name: str, script: str) -> Path:
    """A fake docker or kind, which notes how it was called."""
    path = folder / name
    path.write_text(f'#!/bin/sh\nprintf "%s\\n" "{name} $*" >> "{folder}/calls"\n{script}\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("script", [None, "exit 1"], ids=["no docker", "no engine"])
def test_without_docker_kind_says_so_and_what_to_use_instead(
    script: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script is not None:
        fake_program(tmp_path, "docker", script)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"needs a running Docker engine.*--cluster=sandbox"):
        require_docker(print)
    with pytest.raises(SandboxError, match=r"needs a running Docker engine"):
        KindSandbox.up("run", tell=print)


# --- what is rendered


def test_the_node_has_the_labels_of_the_sandboxs_node() -> None:
    (node,) = cluster_config(SPEC, PLACE)["nodes"]
    argument = next(word for word in kubelet(Layout(SPEC, Path("/r"), Path("/b"), "g")) if "--node-labels" in word)
    assert dict(pair.split("=") for pair in argument.partition("=")[2].split(",")) == node["labels"]
    assert all(isinstance(value, str) for value in node_labels(SPEC).values())


def test_kinds_configuration_is_of_its_version_and_patches_the_kubelet() -> None:
    config = cluster_config(SPEC, PLACE)
    assert (config["apiVersion"], config["kind"]) == ("kind.x-k8s.io/v1alpha4", "Cluster")
    (node,) = config["nodes"]
    assert set(node) == {"role", "labels", "extraMounts", "kubeadmConfigPatches"}
    (patch,) = map(yaml.safe_load, node["kubeadmConfigPatches"])
    assert patch["kind"] == "KubeletConfiguration"


def test_the_node_shows_this_machines_folders_under_the_same_paths() -> None:
    (node,) = cluster_config(SPEC, PLACE)["nodes"]
    assert all(mount["hostPath"] == mount["containerPath"] for mount in node["extraMounts"])
    writable = {mount["hostPath"] for mount in node["extraMounts"] if not mount["readOnly"]}
    assert writable == {str(PLACE.folder)}


def test_the_kubeconfig_names_the_nodes_own_address_and_keeps_the_rest() -> None:
    before, after = yaml.safe_load(KUBECONFIG), json.loads(inner_kubeconfig(KUBECONFIG, "172.18.0.2"))
    assert after["clusters"][0]["cluster"].pop("server") == "https://172.18.0.2:6443"
    del before["clusters"][0]["cluster"]["server"]
    assert after == before


def test_the_nodes_pid_and_address_are_read_from_docker() -> None:
    assert node_of(inspected(4711, "", "172.18.0.2")) == (4711, "172.18.0.2")


@pytest.mark.parametrize("text", [inspected(0, "172.18.0.2"), inspected(4711), inspected(4711, "")])
def test_a_node_that_does_not_run_or_has_no_address_is_named(text: str) -> None:
    with pytest.raises(SandboxError, match=NODE):
        node_of(text)


def test_the_observers_are_the_sandboxs_by_name() -> None:
    assert set(observers.pods(PLACE)) == {"prometheus", "fake-gpu-plugin", "fake-dcgm-exporter"}


def test_every_folder_of_an_observer_is_mounted_into_the_node_or_the_kubelets() -> None:
    for pod in observers.pods(PLACE).values():
        spec = pod["spec"]
        volumes = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume}
        (container,) = spec["containers"]
        for mount in container["volumeMounts"]:
            if mount["name"] in volumes:
                assert volumes[mount["name"]] == mount["mountPath"]
        ours = {Path(path) for path in volumes.values() if not path.startswith("/var/lib/kubelet/")}
        assert ours <= set(PLACE.mounts)
        read_only = {Path(mount["mountPath"]) for mount in container["volumeMounts"] if mount.get("readOnly")}
        assert {path for path in ours if PLACE.mounts[path]} <= read_only


def test_nothing_restarts_an_observer_and_each_is_on_the_node() -> None:
    for pod in observers.pods(PLACE).values():
        assert pod["spec"]["restartPolicy"] == "Never"
        assert pod["spec"]["nodeName"] == NODE
        assert pod["spec"]["containers"][0]["env"][0] == {"name": "PYTHONPATH", "value": str(PACKAGE.parent)}


def test_the_services_of_the_observers_select_their_pods_and_lead_to_their_ports() -> None:
    pods = observers.pods(PLACE)
    for item in observers.shared():
        if item["kind"] != "Service":
            continue
        pod = pods[item["metadata"]["name"]]
        assert item["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        (served,) = pod["spec"]["containers"][0]["ports"]
        assert [port["port"] for port in item["spec"]["ports"]] == [served["containerPort"]]


def without_places(config: str) -> Any:
    """Scrape configuration without how the API server and fixed targets are reached."""
    found = json.loads(config)
    for job in found["scrape_configs"]:
        for discovery in job.get("kubernetes_sd_configs", []):
            discovery.pop("kubeconfig_file", None)
        for target in job.get("static_configs", []):
            del target["targets"]
            target.pop("labels", None)
    return found


def test_prometheus_scrapes_the_same_as_in_the_sandbox() -> None:
    local = prometheus.local_config(Layout(SPEC, Path("/r"), Path("/b"), "g"))
    here = observers.prometheus_config(PLACE)
    assert without_places(here) == without_places(local)
    assert "kubeconfig_file" not in here


def test_prometheus_may_read_what_its_discovery_watches() -> None:
    (role,) = [item for item in observers.shared() if item["kind"] == "ClusterRole"]
    allowed = {resource for rule in role["rules"] for resource in rule["resources"]}
    assert allowed == {"pods", "services", "endpointslices"}
    assert all(set(rule["verbs"]) == {"get", "list", "watch"} for rule in role["rules"])


# --- command lines


@dataclass(frozen=True)
class FakeCluster:
    """What is used of pytest-kind's cluster."""

    name: str
    kind_path: Path
    kubectl_path: Path


Made = tuple[KindRegion, "Callable[[], list[str]]"]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """A region over fake programs, and what these were asked after the inspection."""
    answer = inspected(os.getpid(), "172.18.0.2")
    fake_program(tmp_path, "docker", f"[ \"$1\" != inspect ] || printf '%s' '{answer}'")
    kind = fake_program(tmp_path, "kind", f"cat <<'END'\n{KUBECONFIG}END")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    place = observers.Place(NODE, tmp_path / "local", tmp_path / "bin")
    region = KindRegion(FakeCluster("run-local", kind, tmp_path / "kubectl"), SPEC, place)

    def asked() -> list[str]:
        first, *rest = (tmp_path / "calls").read_text().splitlines()
        assert first == f"docker inspect {NODE}"
        return rest

    return region, asked


def test_a_kind_region_is_the_handle_that_scenarios_hold(made: Made) -> None:
    region: AnyRegion = made[0]
    assert region.api_url == "https://172.18.0.2:6443"
    assert region.gpu_count == SPEC.gpus
    assert region.network_argv() == ["nsenter", f"--net=/proc/{os.getpid()}/ns/net", "--"]
    missing = [name for name in AnyRegion.__annotations__ if not hasattr(region, name)]
    assert missing == []


def test_images_are_loaded_once_for_each_content(made: Made, tmp_path: Path) -> None:
    region, asked = made
    image = Image("sandbox.local/triton:1", "k1", tmp_path / "triton.tar")
    region.load(image)
    region.load(image)
    load = f"kind load image-archive --name run-local {tmp_path}/triton.tar"
    assert asked() == [load]
    region.load(Image(image.reference, "k2", image.archive))
    assert asked() == [load, load]


def test_the_nodes_own_containerd_is_asked(made: Made) -> None:
    region, asked = made
    region.ctr("tasks", "kill", "--signal", "SIGKILL", "abc")
    assert asked() == [f"docker exec {NODE} ctr -n k8s.io tasks kill --signal SIGKILL abc"]


def test_the_kubelet_is_stopped_started_and_signalled_by_systemd(made: Made) -> None:
    region, asked = made
    unit = region.component("kubelet")
    unit.stop()
    unit.start()
    unit.kill(signal.SIGSTOP)
    assert unit.running
    assert asked() == [
        f"docker exec {NODE} systemctl stop kubelet",
        f"docker exec {NODE} systemctl start kubelet",
        f"docker exec {NODE} systemctl kill --kill-whom=main --signal=SIGSTOP kubelet",
        f"docker exec {NODE} systemctl is-active --quiet kubelet",
    ]


@pytest.mark.parametrize("name", ["etcd", "kube-apiserver", "kube-controller-manager", "kube-proxy", "coredns"])
def test_what_can_not_be_stopped_alone_is_refused_by_name(made: Made, name: str) -> None:
    with pytest.raises(SandboxError, match=rf"{name} can't be stopped alone on kind.*--cluster=sandbox"):
        made[0].component(name)


def test_the_kubeconfig_is_written_for_its_owner_only(made: Made) -> None:
    region, asked = made
    region.write_kubeconfig()
    assert asked() == ["kind get kubeconfig --name run-local"]
    assert region.kubeconfig.stat().st_mode & 0o777 == 0o600
    assert json.loads(region.kubeconfig.read_text())["clusters"][0]["cluster"]["server"] == region.api_url


def test_an_engine_on_another_machine_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_program(tmp_path, "docker", f"printf '%s' '{inspected(2**22 + 1, '172.18.0.2')}'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxError, match="engine must run here"):
        KindRegion(FakeCluster("run-local", tmp_path / "kind", tmp_path / "kubectl"), SPEC, PLACE)
