"""The Triton server of a service. Pure; a part of the InferenceService."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from conch.api.fields import Amount, Matches, Quantity, Resource


class Runtime(Resource):
    """The Triton server."""

    image: (
        Annotated[
            str,
            Field(max_length=512),
            Matches(
                r"[A-Za-z0-9][A-Za-z0-9._:/@-]*",
                "must be an image reference such as nvcr.io/nvidia/tritonserver:26.10-py3",
            ),
        ]
        | None
    ) = Field(
        None,
        description="The Triton image. Default: the operator's setting; a new operator version changes it only "
        "together with the next change of this spec.",
    )
    shared_memory: Annotated[Quantity, Amount("1Mi", "64Ti", " (m stands for thousandths, Mi for mebibytes)")] = Field(
        "256Mi",
        description="Size of /dev/shm, which Python models use, in bytes; counts towards memory. Default: 256Mi.",
    )
