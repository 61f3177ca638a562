"""The accelerators of a pod: an extended resource or a claim (DRA). Pure; a part of the InferenceService."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from conch.api.fields import Amount, Matches, Quantity, Resource, Rule
from conch.api.text import LABEL_NAME, SUBDOMAIN, field_matches, full_match

DEFAULT_RESOURCE: Final = "nvidia.com/gpu"
_MIG: Final = r"[^/]+/mig-.*"
_SHARED: Final = r"[^/]+/.*[.]shared"
# The labels of GPU feature discovery: no other vendor's labeller writes memory as a number that can be compared.
_LABELLED: Final = r"nvidia[.]com/.*"
_LABELS_WORDS: Final = (
    "needs an nvidia.com resource, whose nodes GPU feature discovery labels; remove it, or say the node with "
    "placement.nodeSelector"
)


class Claim(Resource):
    """Accelerators by dynamic resource allocation (DRA): devices of a class, chosen by CEL expressions."""

    device_class: Annotated[
        str,
        Field(min_length=1, max_length=253),
        Matches(SUBDOMAIN, "must be the name of a DeviceClass such as gpu.nvidia.com or mig.nvidia.com"),
    ] = Field(description="The DeviceClass that the devices must be of, such as gpu.nvidia.com.")
    count: int = Field(1, ge=1, le=16, description="Devices per pod. Default: 1.")
    selectors: list[Annotated[str, Field(min_length=1, max_length=2048)]] = Field(
        [],
        max_length=8,
        description="CEL expressions over `device` that every device must meet, as in a ResourceClaim, such as "
        "device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('24Gi')) >= 0. Default: any device of the class.",
    )


class Accelerator(Resource):
    """The accelerators of one pod."""

    rules = (
        Rule(
            "count",
            f"self.count <= 1 || !{field_matches('resource', _MIG)}",
            "must be at most 1 with a MIG profile, because a process sees one MIG device only; use a larger profile, "
            "or raise scaling.minReplicas",
            lambda one: one.count <= 1 or not full_match(_MIG, one.resource),
        ),
        Rule(
            "count",
            f"self.count <= 1 || !{field_matches('resource', _SHARED)}",
            "must be at most 1 with a shared accelerator, because two shares may be of one device and give no more; "
            "use the whole nvidia.com/gpu, or raise scaling.minReplicas",
            lambda one: one.count <= 1 or not full_match(_SHARED, one.resource),
        ),
        Rule(
            "products",
            f"!has(self.products) || self.products.size() == 0 || {field_matches('resource', _LABELLED)}",
            _LABELS_WORDS,
            lambda one: not one.products or full_match(_LABELLED, one.resource),
        ),
        Rule(
            "memory",
            f"!has(self.memory) || {field_matches('resource', _LABELLED)}",
            _LABELS_WORDS,
            lambda one: one.memory is None or full_match(_LABELLED, one.resource),
        ),
        Rule(
            "computeCapability",
            f"!has(self.computeCapability) || {field_matches('resource', _LABELLED)}",
            _LABELS_WORDS,
            lambda one: one.compute_capability is None or full_match(_LABELLED, one.resource),
        ),
        Rule(
            "resource",
            f"!has(self.claim) || self.resource == '{DEFAULT_RESOURCE}'",
            "must be left out with claim, whose deviceClass says what is wanted; remove one of the two",
            lambda one: one.claim is None or one.resource == DEFAULT_RESOURCE,
        ),
        Rule(
            "count",
            "!has(self.claim) || self.count == 1",
            "must be left out with claim; write claim.count",
            lambda one: one.claim is None or one.count == 1,
        ),
        Rule(
            "products",
            "!has(self.claim) || !has(self.products) || self.products.size() == 0",
            "must be empty with claim, which looks at devices and not at node labels; write a selector such as "
            "device.attributes['gpu.nvidia.com'].productName == 'NVIDIA L4'",
            lambda one: one.claim is None or not one.products,
        ),
        Rule(
            "memory",
            "!has(self.claim) || !has(self.memory)",
            "must be left out with claim, since each driver names it otherwise; write a selector such as "
            "device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('24Gi')) >= 0",
            lambda one: one.claim is None or one.memory is None,
        ),
        Rule(
            "computeCapability",
            "!has(self.claim) || !has(self.computeCapability)",
            "must be left out with claim; write a selector such as "
            "device.attributes['gpu.nvidia.com'].cudaComputeCapability.compareTo(semver('8.0.0')) >= 0",
            lambda one: one.claim is None or one.compute_capability is None,
        ),
    )

    resource: Annotated[
        str,
        Field(max_length=253),
        Matches(
            f"{SUBDOMAIN}/{LABEL_NAME}",
            "must be an extended resource such as nvidia.com/gpu, nvidia.com/mig-1g.5gb or amd.com/gpu",
        ),
    ] = Field(
        DEFAULT_RESOURCE,
        description="The extended resource that the nodes offer: nvidia.com/gpu, a MIG profile such as "
        "nvidia.com/mig-1g.5gb, nvidia.com/gpu.shared, or another vendor's. Default: nvidia.com/gpu.",
    )
    count: int = Field(
        1,
        ge=0,
        le=16,
        description="Accelerators per pod; 0 serves on the CPU; at most 1 of MIG or shared. Several nvidia.com/gpu "
        "come from nodes whose labels say neither MIG slices nor sharing. Default: 1.",
    )
    products: list[
        Annotated[
            str,
            Field(max_length=63),
            Matches(LABEL_NAME, "must be a value of the node label nvidia.com/gpu.product, such as NVIDIA-L4"),
        ]
    ] = Field(
        [],
        max_length=16,
        description="Accept only nodes whose nvidia.com/gpu.product label is one of these. Default: any.",
    )
    memory: Annotated[Quantity, Amount("1Mi", "64Ti", " (m stands for thousandths, Mi for mebibytes)")] | None = Field(
        None,
        description="The least memory that an accelerator must have, in bytes. Nodes are chosen by the label "
        "nvidia.com/gpu.memory (of a MIG profile its own), in which a card sold with 24 GB has about 22.5Gi. "
        "Default: any.",
    )
    compute_capability: (
        Annotated[
            str,
            Field(max_length=20),
            Matches(r"[1-9][0-9]?[.][0-9]{1,2}", "must be a compute capability such as 8.0; put it in quotes"),
        ]
        | None
    ) = Field(
        None,
        description="The least CUDA compute capability that an accelerator must have, such as 8.0. Nodes are chosen by "
        "the labels nvidia.com/gpu.compute.major and .minor. Default: any.",
    )
    claim: Claim | None = Field(
        None,
        description="Accelerators by dynamic resource allocation instead of an extended resource; needs the API "
        "resource.k8s.io/v1 (Kubernetes 1.34 and later) and a DRA driver. Default: none.",
    )

    @property
    def devices(self) -> int:
        """Accelerators per pod, by whichever way they are asked for."""
        return self.count if self.claim is None else self.claim.count

    @property
    def noun(self) -> str:
        """What one of them is called in a message."""
        return self.resource if self.claim is None else f"device of class {self.claim.device_class}"

    @property
    def shared(self) -> bool:
        """Whether the resource's own name says that others use the same device."""
        return full_match(_SHARED, self.resource)
