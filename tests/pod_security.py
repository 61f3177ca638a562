"""The `restricted` Pod Security Standard as published, as a list of what a pod breaks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

# `image` isn't in the published list, but the built-in admission admits it; copies in policy engines may not.
VOLUME_TYPES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip
SAFE_SYSCTLS = {
    "kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
}  # fmt: skip
SELINUX_TYPES = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}


def violations(pod: dict[str, Any]) -> list[str]:
    """What a pod's spec breaks, baseline rules included; empty: nothing."""
    return [*_of_pod(pod), *(fault for container in _containers(pod) for fault in _of_container(container, pod))]


def _containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        container
        for field in ("initContainers", "containers", "ephemeralContainers")
        for container in pod.get(field, [])
    ]


def _of_pod(pod: dict[str, Any]) -> Iterator[str]:
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(field):
            yield field
    for volume in pod.get("volumes", []):
        kinds = set(volume) - {"name"}
        if kinds - VOLUME_TYPES:
            yield f"volume {volume['name']}: {', '.join(sorted(kinds - VOLUME_TYPES))}"
    for sysctl in pod.get("securityContext", {}).get("sysctls", []):
        if sysctl["name"] not in SAFE_SYSCTLS:
            yield f"sysctl {sysctl['name']}"
    yield from _of_context(pod.get("securityContext", {}), "pod")


def _of_context(context: dict[str, Any], where: str) -> Iterator[str]:
    if context.get("runAsUser") == 0:
        yield f"{where}: runAsUser 0"
    if context.get("runAsNonRoot") is False:
        yield f"{where}: runAsNonRoot false"
    if context.get("windowsOptions", {}).get("hostProcess"):
        yield f"{where}: hostProcess"
    linux = context.get("seLinuxOptions", {})
    if linux.get("type", "") not in SELINUX_TYPES or linux.get("user") or linux.get("role"):
        yield f"{where}: seLinuxOptions"
    if context.get("appArmorProfile", {}).get("type", "RuntimeDefault") not in {"RuntimeDefault", "Localhost"}:
        yield f"{where}: appArmorProfile"
    if context.get("seccompProfile", {}).get("type", "RuntimeDefault") not in {"RuntimeDefault", "Localhost"}:
        yield f"{where}: seccompProfile"


def _of_container(container: dict[str, Any], pod: dict[str, Any]) -> Iterator[str]:
    name, own, shared = container["name"], container.get("securityContext", {}), pod.get("securityContext", {})
    yield from _of_context(own, name)
    if own.get("privileged"):
        yield f"{name}: privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield f"{name}: allowPrivilegeEscalation"
    if own.get("procMount", "Default") != "Default":
        yield f"{name}: procMount"
    capabilities = own.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", []):
        yield f"{name}: capabilities not dropped"
    if set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield f"{name}: capabilities added"
    if not own.get("runAsNonRoot", shared.get("runAsNonRoot")):
        yield f"{name}: runAsNonRoot"
    if own.get("seccompProfile", shared.get("seccompProfile")) is None:
        yield f"{name}: seccompProfile unset"
    if any(port.get("hostPort") for port in container.get("ports", [])):
        yield f"{name}: hostPort"
    handlers = [container.get(probe, {}) for probe in ("livenessProbe", "readinessProbe", "startupProbe")]
    handlers += list(container.get("lifecycle", {}).values())
    if any(handler.get(kind, {}).get("host") for handler in handlers for kind in ("httpGet", "tcpSocket")):
        yield f"{name}: a probe's host"
