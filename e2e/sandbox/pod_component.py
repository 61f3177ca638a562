"""A part of a region that is a pod which nothing restarts, under the same switches as a process."""

import signal
from collections.abc import Mapping
from typing import Any

from sandbox.handle import AnyComponent, AnyRegion
from sandbox.namespaces import wait_for


class PodComponent(AnyComponent):
    """One pod with one container, of a given manifest."""

    def __init__(self, region: AnyRegion, manifest: Mapping[str, Any]) -> None:
        self.region = region
        self.manifest = manifest
        self.name = manifest["metadata"]["name"]
        self.namespace = manifest["metadata"]["namespace"]

    def status(self) -> dict[str, Any]:
        """Of the container; empty when there is none."""
        words = ("pod", self.name, "-n", self.namespace, "--ignore-not-found")
        if not self.region.kubectl("get", *words, "-o", "name").strip():
            return {}
        found = self.region.get(*words[:-1])["status"].get("containerStatuses") or [{}]
        return dict(found[0])

    @property
    def running(self) -> bool:
        """Whether the container runs, as the kubelet last saw it."""
        return "running" in self.status().get("state", {})

    def kill(self, number: int = signal.SIGKILL) -> None:
        """To the container's first process, past the kubelet: no grace period, no deletion."""
        identifier = str(self.status().get("containerID", "")).rpartition("/")[2]
        self.region.ctr("tasks", "kill", "--signal", signal.Signals(number).name, identifier)

    def start(self, limit_s: float = 60) -> None:
        """Anew, in place of what is left of it."""
        self.region.kubectl(
            "delete", "pod", self.name, "-n", self.namespace, "--ignore-not-found", "--grace-period=1", "--wait"
        )
        self.region.apply(self.manifest)
        wait_for(lambda: self.running, limit_s, f"pod {self.namespace}/{self.name} doesn't run", 0.2)

    def log(self) -> str:
        """Of its present container."""
        return self.region.kubectl("logs", self.name, "-n", self.namespace)
