"""What a service's models ask of one accelerator together: memory and compute capability. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from conch.api.fields import Problem, parse_quantity
from conch.triton.backends import BACKENDS
from conch.triton.engines import Engine, capability

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from conch.api.accelerator import Accelerator
    from conch.api.inferenceservice import InferenceServiceSpec
    from conch.api.instances import Instances
    from conch.api.model import Model

_MIG_SIZE: Final = re.compile(r"[^/]+/mig-[0-9]+g[.]([0-9]+)gb\b.*")
_GIB: Final = 2**30
_MIB: Final = 2**20


@dataclass(frozen=True)
class MemoryDemand:
    """What the models take on the accelerator that holds most of them, as far as they say it."""

    size: int
    """Bytes."""
    sum: str
    """The sum in words, such as `encoder 2 x 3Gi + decoder 1 x 20Gi = 26Gi`."""


def memory_demand(spec: InferenceServiceSpec) -> MemoryDemand | None:
    """The declared memory of all instances on one accelerator; None without an accelerator or a declaration.

    A model that doesn't say what it takes is left out: the sum is then the least that is needed.
    """
    fullest: MemoryDemand | None = None
    for device in range(spec.accelerator.devices):
        parts = [
            (model.name, copies, int(parse_quantity(model.accelerator_memory)), model.accelerator_memory)
            for model in spec.models
            if model.accelerator_memory is not None and (copies := _copies(model, device, spec.accelerator.devices))
        ]
        size = sum(copies * each for _, copies, each, _ in parts)
        if size and (fullest is None or size > fullest.size):
            terms = " + ".join(f"{name} {copies} x {text}" for name, copies, _, text in parts)
            fullest = MemoryDemand(size, f"{terms} = {size_text(size)}")
    return fullest


def instances(model: Model, devices: int) -> int:
    """How many instances of a model one replica holds; kind GPU stands on each of the accelerators that it names."""
    total = 0
    groups: Iterable[Instances] = model.instance_groups or [model.instances]
    for group in groups:
        kind = group.kind or BACKENDS[model.format].instance_kind or "GPU"
        total += group.count * ((len(group.gpus) or devices) if kind == "GPU" and devices else 1)
    return total


def _copies(model: Model, device: int, devices: int) -> int:
    """How many instances of a model surely stand on an accelerator."""
    groups: Iterable[Instances] = model.instance_groups or [model.instances]
    return sum(group.count for group in groups if _stands_on(model, group, device, devices))


def _stands_on(model: Model, group: Instances, device: int, devices: int) -> bool:
    backend = BACKENDS[model.format]
    kind = group.kind or backend.instance_kind or "GPU"
    if kind == "Model" or not (backend.cpu or kind == "GPU"):
        return devices == 1  # the backend places it itself: which accelerator it takes is known where there is one
    return kind == "GPU" and (not group.gpus or device in group.gpus)


def mig_size(accelerator: Accelerator) -> int | None:
    """The most memory in bytes that a MIG profile's name can mean; None for anything else."""
    match = _MIG_SIZE.fullmatch(accelerator.resource)
    return None if match is None else int(match[1]) * _GIB


def size_text(size: int) -> str:
    """Bytes for people: 512Mi, 26Gi, 22.5Gi."""
    if size < _GIB:
        return f"{size / _MIB:.0f}Mi"
    return f"{size / _GIB:.1f}".removesuffix(".0") + "Gi"


def check_memory(spec: InferenceServiceSpec) -> Iterator[Problem]:
    """What is visible in the spec alone: the models' sum against the accelerator's least memory or its MIG profile."""
    demand, accelerator = memory_demand(spec), spec.accelerator
    if demand is None:
        return
    if accelerator.memory is not None and demand.size > parse_quantity(accelerator.memory):
        yield Problem(
            ("accelerator", "memory"),
            f"is less than the models take on one accelerator, {demand.sum}; raise it, or lower the instances or "
            "acceleratorMemory of the models",
            accelerator.memory,
        )
    size = mig_size(accelerator)
    if size is not None and demand.size > size:
        yield Problem(
            ("accelerator", "resource"),
            f"holds at most {size_text(size)}, and the models take {demand.sum}; use a larger profile, or lower the "
            "instances or acceleratorMemory of the models",
            accelerator.resource,
        )


def engine_of(model: Model) -> Engine | None:
    """What the spec says of a model's TensorRT engine."""
    said = None if model.source is None else model.source.engine
    if said is None:
        return None
    return Engine(
        said.tensor_rt, said.compute_capability, said.platform, said.version_compatible, said.hardware_compatibility
    )


def engines(spec: InferenceServiceSpec) -> list[tuple[int, Engine]]:
    """The engines that the spec says something of, with the place of their models."""
    return [(index, engine) for index, model in enumerate(spec.models) if (engine := engine_of(model)) is not None]


def check_engines(spec: InferenceServiceSpec) -> Iterator[Problem]:
    """Engines that no accelerator can run together, or none with the capability that the spec asks for."""
    found = engines(spec)
    first = next(((index, engine) for index, engine in found if engine.exact_capability is not None), None)
    least = None if spec.accelerator.compute_capability is None else capability(spec.accelerator.compute_capability)
    for index, engine in found:
        place = ("models", index, "source", "engine", "computeCapability")
        exact = engine.exact_capability
        if first is None or exact is None:
            continue
        if exact != first[1].exact_capability:
            words = (
                f"differs from that of spec.models[{first[0]}], {first[1].compute_capability}, and no accelerator runs "
                "both; build the engines for one capability, or with hardware compatibility AmperePlus"
            )
            yield Problem(place, words, engine.compute_capability)
        elif least is not None and exact < least:
            words = (
                f"is below spec.accelerator.computeCapability, {spec.accelerator.compute_capability}, and the engine "
                "runs on its own only; remove that, or build the engine again"
            )
            yield Problem(place, words, engine.compute_capability)
    yield from _platforms(found)
    if first is None:
        return
    for index, engine in found:
        runs_on = first[1].exact_capability
        if engine.least_capability is not None and runs_on is not None and runs_on < engine.least_capability:
            words = (
                f"AmperePlus runs from 8.0 on, and the engine of spec.models[{first[0]}] on "
                f"{first[1].compute_capability} only; build the engines for one capability"
            )
            yield Problem(("models", index, "source", "engine", "hardwareCompatibility"), words, engine.hardware)


def _platforms(found: list[tuple[int, Engine]]) -> Iterator[Problem]:
    said = [(index, engine.platform) for index, engine in found if engine.platform is not None]
    for index, platform in said[1:]:
        if platform != said[0][1]:
            words = f"differs from that of spec.models[{said[0][0]}], {said[0][1]}; build the engines for one platform"
            yield Problem(("models", index, "source", "engine", "platform"), words, platform)
