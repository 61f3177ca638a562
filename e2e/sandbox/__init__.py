"""A real Kubernetes in network, mount and pid namespaces of one Linux machine: no Docker, no GPU, no shell scripts."""

from sandbox.cluster_run import Sandbox, SandboxError, leftovers
from sandbox.handle import AnyRegion
from sandbox.region import Component, Region, RegionSpec

__all__ = ["AnyRegion", "Component", "Region", "RegionSpec", "Sandbox", "SandboxError", "leftovers"]
