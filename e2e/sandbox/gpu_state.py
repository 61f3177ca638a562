"""What the fake GPUs are: a JSON file that tests write and the fake plugin and exporter read."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sandbox.content import locked, write_atomic

DEFAULT_USED_MIB = 2000


@dataclass(frozen=True)
class GpuState:
    """The node's GPUs. `used_mib` maps NAMESPACE/POD (or just POD) to the memory it holds, in MiB per GPU."""

    count: int = 8
    product: str = "NVIDIA-L4"
    memory_mib: int = 23034
    unhealthy: tuple[int, ...] = ()
    used_mib: dict[str, int] = field(default_factory=dict)
    default_used_mib: int = DEFAULT_USED_MIB

    def memory_of(self, namespace: str, pod: str) -> int:
        """MiB that this pod holds on each of its GPUs."""
        return self.used_mib.get(f"{namespace}/{pod}", self.used_mib.get(pod, self.default_used_mib))


def device_id(index: int) -> str:
    """The device's name; says that it is fake."""
    return f"GPU-fake-{index}"


def read(path: Path) -> GpuState:
    """The current state."""
    values = json.loads(path.read_text())
    return GpuState(**{**values, "unhealthy": tuple(values["unhealthy"])})


def write(path: Path, state: GpuState) -> None:
    """Replace the state."""
    write_atomic(path, json.dumps(asdict(state), indent=1) + "\n")


class Gpus:
    """The handle that tests hold; takes effect within half a second."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def state(self) -> GpuState:
        """What is set now."""
        return read(self.path)

    def change(self, **values: object) -> None:
        """Set some fields."""
        with locked(self.path.with_suffix(".lock")):
            write(self.path, GpuState(**{**asdict(self.state()), **values}))

    def set_count(self, count: int) -> None:
        """The number of GPUs on the node."""
        self.change(count=count)

    def set_healthy(self, index: int, healthy: bool) -> None:  # noqa: FBT001 (reads as a sentence where it's called)
        """Mark one GPU healthy or not."""
        others = set(self.state().unhealthy) - {index}
        self.change(unhealthy=tuple(sorted(others if healthy else others | {index})))

    def set_memory_used(self, pod: str, mib: int) -> None:
        """MiB that a pod (POD or NAMESPACE/POD) holds on each of its GPUs."""
        self.change(used_mib={**self.state().used_mib, pod: mib})

    def reset(self, count: int) -> None:
        """All healthy, this many, default memory."""
        self.change(count=count, unhealthy=(), used_mib={}, default_used_mib=DEFAULT_USED_MIB)
