"""Which versions of a model are served. Pure; a part of the InferenceService."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from conch.api.fields import Distinct, Resource, Rule


class Versions(Resource):
    """Which of the source's numbered versions are served."""

    rules = (
        Rule(
            "count",
            "!has(self.count) || self.policy == 'Latest'",
            "is of policy Latest; remove it or use Latest",
            lambda versions: versions.count is None or versions.policy == "Latest",
        ),
        Rule(
            "numbers",
            "(has(self.numbers) && self.numbers.size() > 0) == (self.policy == 'Specific')",
            "are required with policy Specific, and for nothing else; add or remove them",
            lambda versions: bool(versions.numbers) == (versions.policy == "Specific"),
        ),
    )

    policy: Literal["Latest", "All", "Specific"] = Field(
        "Latest", description="Latest serves those of the highest numbers, Specific those listed. Default: Latest."
    )
    count: int | None = Field(None, ge=1, le=64, description="How many, with policy Latest. Default: 1.")
    # As far as JSON holds whole numbers exactly.
    numbers: Annotated[list[Annotated[int, Field(ge=1, le=2**53 - 1)]], Distinct()] = Field(
        [], max_length=64, description="The versions to serve, with policy Specific. Default: none."
    )
