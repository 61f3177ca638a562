"""The accelerators of a pod. Pure; a part of the InferenceService."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from conch.api.fields import Matches, Resource
from conch.api.text import LABEL_NAME, SUBDOMAIN


class Accelerator(Resource):
    """The accelerators of one pod."""

    resource: Annotated[
        str,
        Field(max_length=253),
        Matches(
            f"{SUBDOMAIN}/{LABEL_NAME}",
            "must be an extended resource such as nvidia.com/gpu or nvidia.com/mig-1g.5gb",
        ),
    ] = Field("nvidia.com/gpu", description="The extended resource that the nodes offer. Default: nvidia.com/gpu.")
    count: int = Field(1, ge=0, le=16, description="Accelerators per pod; 0 serves on the CPU. Default: 1.")
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
