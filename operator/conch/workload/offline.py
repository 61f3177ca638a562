"""What the operator makes of a resource, without a cluster: its children, the plan and each config.pbtxt. Pure.

`conch validate` and `conch render` go through here, so that what they say is what the operator does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from conch import names
from conch.api.inferenceservice import InvalidSpec, parse_service
from conch.storage.plan import Plan
from conch.triton import refusals
from conch.triton.releases import release_of
from conch.workload import fit
from conch.workload.deployment import SURGE_ON_CREATE, Images, server_image
from conch.workload.desired import desired_children

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from conch.api.inferenceservice import InferenceServiceSpec

MAX_PLAN_KIB: Final = 200
UNKNOWN_UID: Final = "00000000-0000-0000-0000-000000000000"
"""Stands for the uid that the API server gives the resource."""

Object = dict[str, Any]


@dataclass(frozen=True)
class Surroundings:
    """What a rendering takes from the operator's settings and from the cluster."""

    images: Images
    prometheus_namespace: str = "monitoring"
    with_pod_monitor: bool = False
    namespace: str = "default"
    """For a resource that names none."""
    allowed: refusals.Allowed = field(default_factory=refusals.Allowed)


@dataclass(frozen=True)
class Rendered:
    """Everything that the operator would write for one resource."""

    objects: list[Object]
    plan: Plan

    @property
    def configs(self) -> dict[str, str]:
        """config.pbtxt by model."""
        return {model.name: model.config for model in self.plan.models}


def render(service: Mapping[str, Any], around: Surroundings) -> Rendered:
    """The children of a resource as a user wrote it. Raises InvalidSpec for all that the operator would refuse."""
    spec = parse_service(service)
    refused = list(refusals_of(spec, around))
    if refused:
        raise InvalidSpec(refused)
    metadata = {"namespace": around.namespace, "uid": UNKNOWN_UID, **service["metadata"]}
    objects = desired_children(
        {**service, "metadata": metadata},
        spec,
        images=around.images,
        strategy=SURGE_ON_CREATE,
        live_deployment=None,
        prometheus_namespace=around.prometheus_namespace,
        with_pod_monitor=around.with_pod_monitor,
        allow_code=around.allowed.python_models,
    )
    check_plan_size(objects)
    return Rendered(objects, Plan.from_json(_plan_of(objects)))


def refusals_of(spec: InferenceServiceSpec, around: Surroundings) -> Iterator[str]:
    """Why the operator would make no pod of a valid spec, as far as its settings and the image tell."""
    image = server_image(spec, around.images, None)
    yield from refusals.by_settings(spec, around.allowed)
    yield from refusals.by_release(spec, image)
    engine = fit.fit(spec, fit.Surroundings(nodes=None, tensor_rt=release_of(image, spec.runtime.release).tensorrt))
    if engine.suits is False:
        yield engine.message


def check_plan_size(children: Iterable[Mapping[str, Any]]) -> None:
    """A pod's annotations may hold 256 KiB together; the API server's own error would not name the fields.

    Raises InvalidSpec.
    """
    size_kib = len(_plan_of(children).encode()) / 1024
    if size_kib > MAX_PLAN_KIB:
        problem = (
            f"spec.models: their configuration takes {size_kib:.0f} KiB; {MAX_PLAN_KIB} KiB fit into a pod: use fewer "
            "models, inputs, outputs or parameters in one service"
        )
        raise InvalidSpec([problem])


def _plan_of(children: Iterable[Mapping[str, Any]]) -> str:
    template = next(child for child in children if child["kind"] == "Deployment")["spec"]["template"]
    return str(template["metadata"].get("annotations", {}).get(names.PLAN_ANNOTATION, ""))
