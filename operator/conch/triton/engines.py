"""Whether a TensorRT engine can run in an image and on a device: both are fixed when it is built. Pure, no imports.

Rules, with their sources in NVIDIA's documentation of TensorRT:
- An engine runs only with the very version that built it, "major, minor, patch, and build" (Support Policies).
- Built as version-compatible, it runs with later versions too, from 8.6 on; across major versions only 8 with 9 and 10,
  and 10 with 11 (Engine Compatibility; Support Matrix of 11.4). The plan then carries code, which Triton's backend
  loads only with its setting version-compatible (tensorrt_backend, README).
- It runs only on the compute capability that built it; built with hardware compatibility AmperePlus, on 8.0 and later;
  with SameComputeCapability on other devices of the same capability (HardwareCompatibilityLevel).
- Engines don't move between platforms (Support Matrix, Engine Portability).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

AMPERE: Final = (8, 0)
_FIRST_COMPATIBLE: Final = (8, 6)
_ACROSS_MAJORS: Final = frozenset({(8, 9), (8, 10), (10, 11)})

HardwareCompatibility = Literal["None", "AmperePlus", "SameComputeCapability"]


@dataclass(frozen=True)
class Engine:
    """What an engine was built with; None: not known, and then nothing is refused for it."""

    tensor_rt: str | None = None
    compute_capability: str | None = None
    platform: str | None = None
    version_compatible: bool = False
    hardware: HardwareCompatibility = "None"

    @property
    def exact_capability(self) -> tuple[int, int] | None:
        """The one compute capability that it runs on; None: more than one, or not known."""
        if self.compute_capability is None or self.hardware == "AmperePlus":
            return None
        return capability(self.compute_capability)

    @property
    def least_capability(self) -> tuple[int, int] | None:
        """The compute capability from which on it runs; None: one only, or not known."""
        return AMPERE if self.hardware == "AmperePlus" else None

    @property
    def architecture(self) -> str | None:
        """The node label kubernetes.io/arch that its platform means."""
        return None if self.platform is None else self.platform.rpartition("/")[2]


def capability(text: str) -> tuple[int, int]:
    """A compute capability such as 8.6 as two numbers; raises ValueError for anything else."""
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def version_problem(engine: Engine, image: str | None, *, backend_allows: bool = False) -> str | None:
    """Why the image's TensorRT can't run the engine, with both versions and the fix; None if it can or isn't known.

    Args:
        engine: what the engine was built with.
        image: the image's TensorRT version, with as many parts as are known, such as 10.5 or 10.5.0.18.
        backend_allows: whether Triton's tensorrt backend is set to load version-compatible engines.
    """
    built = engine.tensor_rt
    if built is None or image is None or _same(built, image):
        return None
    if not engine.version_compatible:
        return (
            f"the engine was built with TensorRT {built}, and the image has {image}: build it again with {image}, or "
            f"set spec.runtime.image to a release with TensorRT {built}"
        )
    if not _runs_later(_numbers(built), _numbers(image)):
        return (
            f"the engine was built version-compatible with TensorRT {built}, which {image} of the image can't run: "
            f"build it again with {image} or an earlier version of its major"
        )
    if not backend_allows:
        return (
            f"the engine was built with TensorRT {built} and the image has {image}; to run it as version-compatible, "
            "add to spec.runtime.backends: {name: tensorrt, settings: {version-compatible: 'true'}}"
        )
    return None


def device_problem(engine: Engine, device: tuple[int, int] | None) -> str | None:
    """Why a device of this compute capability can't run the engine; None if it can or isn't known."""
    if device is None:
        return None
    exact, least = engine.exact_capability, engine.least_capability
    has = f"{device[0]}.{device[1]}"
    if exact is not None and device != exact:
        return f"the engine was built for compute capability {exact[0]}.{exact[1]}, and the device has {has}"
    if least is not None and device < least:
        return f"the engine runs on compute capability {least[0]}.{least[1]} and later, and the device has {has}"
    return None


def _same(one: str, other: str) -> bool:
    """Whether two versions agree as far as both are known: 10.5 may be 10.5.0.18."""
    return all(first == second for first, second in zip(_numbers(one), _numbers(other), strict=False))


def _runs_later(built: tuple[int, ...], image: tuple[int, ...]) -> bool:
    if min(built[:2], image[:2]) < _FIRST_COMPATIBLE:
        return False
    if built[0] == image[0]:
        known = min(len(built), len(image))
        return built[:known] <= image[:known]
    return (built[0], image[0]) in _ACROSS_MAJORS


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
