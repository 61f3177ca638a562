"""The operator's settings as the offline commands use them: CONCH_* variables, as for `conch run`, or options."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from conch.config import Settings
    from conch.workload.offline import Surroundings

UNREADABLE = 2


def read_settings() -> Settings:
    """The settings; a wrong variable is told by its name and ends the command with exit code 2."""
    from pydantic import ValidationError

    from conch.config import Settings

    try:
        return Settings()
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            variable = "CONCH_" + "_".join(str(part) for part in fault["loc"]).upper()
            sys.stderr.write(f"{variable}: {fault['msg']}; it is {fault['input']!r}\n")
        raise typer.Exit(UNREADABLE) from None


def surroundings(
    *,
    fetch_image: str | None = None,
    triton_image: str | None = None,
    namespace: str = "default",
    with_pod_monitor: bool = False,
) -> Surroundings:
    """What a rendering takes from settings; an option wins over its variable."""
    from conch.triton.refusals import Allowed
    from conch.workload.deployment import Images
    from conch.workload.offline import Surroundings

    settings = read_settings()
    return Surroundings(
        Images(fetch_image or settings.fetch_image, triton_image or settings.triton_image, settings.image_pull_policy),
        prometheus_namespace=settings.prometheus_namespace,
        with_pod_monitor=with_pod_monitor,
        namespace=namespace,
        allowed=Allowed(settings.allow_python_models, settings.model_cache_host_paths),
    )
