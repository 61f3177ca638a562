"""The command `conch run`: the operator itself."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def run(
    kubeconfig: Annotated[
        str | None, typer.Option(help="A kubeconfig; default: its usual place, else the pod's ServiceAccount.")
    ] = None,
) -> None:
    """Run the operator. Settings come from CONCH_* variables."""
    import structlog
    from pydantic import ValidationError

    from conch.app import start
    from conch.config import Settings

    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    try:
        settings = Settings()
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            variable = "CONCH_" + "_".join(str(part) for part in fault["loc"]).upper()
            sys.stderr.write(f"{variable}: {fault['msg']}; it is {fault['input']!r}\n")
        raise typer.Exit(2) from None
    start(settings, kubeconfig)
