"""CPU and memory of a pod, and where it may run. Pure; a part of the InferenceService."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from conch.api.fields import Amount, KeysMatch, Quantity, Resource, Rule
from conch.api.text import LABEL_KEY, ClassName, LabelKey, LabelValue


class Resources(Resource):
    """CPU and memory of the Triton container."""

    cpu: Annotated[Quantity, Amount("1m", "1k")] = Field(
        "1", description="CPU request, in cores; there is no CPU limit. Default: 1."
    )
    memory: Annotated[Quantity, Amount("1Mi", "64Ti", " (m stands for thousandths, Mi for mebibytes)")] = Field(
        "4Gi", description="Memory request and limit, in bytes, /dev/shm included. Default: 4Gi."
    )


class Toleration(Resource):
    """A taint that the pods tolerate, as in a Pod."""

    rules = (
        Rule(
            "value",
            "!has(self.value) || self.value == '' || self.operator == 'Equal'",
            "must be empty with operator Exists; remove it or use Equal",
            lambda toleration: not toleration.value or toleration.operator == "Equal",
        ),
        Rule(
            "key",
            "(has(self.key) && self.key != '') || self.operator == 'Exists'",
            "is required with operator Equal; set it, or use Exists to tolerate every taint",
            lambda toleration: bool(toleration.key) or toleration.operator == "Exists",
        ),
    )

    key: LabelKey = Field("", description="The taint's key; empty with Exists: every taint.")
    operator: Literal["Exists", "Equal"] = Field(
        "Equal", description="Equal compares the value, Exists doesn't. Default: Equal."
    )
    value: LabelValue = Field("", description="The taint's value.")
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = Field(
        "", description="The taint's effect. Default: every effect."
    )


class Placement(Resource):
    """Where the pods may run."""

    node_selector: Annotated[
        dict[str, LabelValue],
        KeysMatch(LABEL_KEY, "must have label keys such as nvidia.com/gpu.product or pool; rename the key"),
    ] = Field({}, max_length=32, description="Labels that a node must have. Default: none.")
    tolerations: list[Toleration] = Field(
        [], max_length=32, description="Taints that the pods tolerate. Default: none."
    )
    tolerate_accelerator_taints: bool = Field(
        True,
        description="Tolerate the usual taints of nodes with accelerators: nvidia.com/gpu and the accelerator's own "
        "resource name, with effect NoSchedule; only with an accelerator. Default: true.",
    )
    topology_spread: Literal["Zone", "Node", "None"] = Field(
        "Zone", description="What the pods spread over, as far as there is room. Default: Zone."
    )
    priority_class_name: ClassName = Field("", description="The pods' PriorityClass. Default: the cluster's.")
    runtime_class_name: ClassName = Field("", description="The pods' RuntimeClass. Default: the cluster's.")
