"""The command `conch fetch`, the init container of every Triton pod. Writes to the terminal; imports late."""

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from conch.storage.download import Log
    from conch.storage.fetch import MakeFetcher

_TERMINATION_LOG = Path("/dev/termination-log")
_TERMINATED = 128 + signal.SIGTERM


def fetch(
    plan: Annotated[Path, typer.Option(help="The plan, JSON.")],
    into: Annotated[Path, typer.Option(help="The model repository to fill.")],
    tools: Annotated[Path | None, typer.Option(help="Also put the drain script for Triton's preStop there.")] = None,
    ca_file: Annotated[Path | None, typer.Option(help="PEM file of further authorities to trust.")] = None,
    termination_log: Annotated[
        Path, typer.Option(help="Where the sentence that says what failed, or a summary, is left for the kubelet.")
    ] = _TERMINATION_LOG,
) -> None:
    """Fetch every model of a plan, verify it, and show the complete model repository.

    Exit codes: 0 done; 1 unexpected; 2 plan or arguments not valid; 3 source not found, forbidden or not trusted;
    4 digest differs; 5 layout wrong; 6 unreachable or stalled; 7 disk full; 143 terminated (a new run resumes).
    """
    # As process 1 of a container, a process without a handler ignores SIGTERM, and every deletion waits for the kill.
    signal.signal(signal.SIGTERM, _terminate)
    # Triton's container may run as another user than this one.
    os.umask(0o022)
    from conch.storage.errors import FetchError

    try:
        message = _carry_out(plan, into, tools, ca_file)
    except FetchError as error:
        _fail(str(error), error.exit_code, termination_log)
    except OSError as error:
        _fail(f"the model repository can't be built: {error}; check the pod's volumes", 1, termination_log)
    else:
        _leave(message.encode(), termination_log)


def _carry_out(plan_path: Path, into: Path, tools: Path | None, ca_file: Path | None) -> str:
    import time

    from conch.storage.fetch import carry_out, install_tools, read_plan, summary

    log = _stderr_log()
    plan = read_plan(plan_path)
    if tools is not None:
        install_tools(tools)
    outcome = carry_out(plan, into, _fetchers(ca_file, log), clock=time, log=log)
    log.info("complete", models=[model.name for model in plan.models])
    return summary(outcome)


def _fetchers(ca_file: Path | None, log: "Log") -> "MakeFetcher":
    import random
    import time

    from conch.storage.download import Patience
    from conch.storage.remote import Remote

    def make(stall_timeout_s: float) -> "Remote":
        patience = Patience(stall_timeout_s=stall_timeout_s)
        return Remote(patience, ca_file=ca_file, clock=time, jitter=random.random, log=log)

    return make


def _stderr_log() -> "Log":
    import structlog

    log: Log = structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.BoundLogger,
    )
    return log


def _fail(sentence: str, exit_code: int, termination_log: Path) -> None:
    from conch.storage.errors import termination_message

    message = termination_message(sentence)
    sys.stderr.write(f"conch fetch: {message.decode()}\n")
    _leave(message, termination_log)
    raise typer.Exit(exit_code)


def _leave(message: bytes, termination_log: Path) -> None:
    # Outside a container there is no such device, and a root user's run should leave no file in /dev.
    if termination_log != _TERMINATION_LOG or termination_log.exists():
        try:
            termination_log.write_bytes(message)
        except OSError as error:
            sys.stderr.write(f"conch fetch: {termination_log} can't be written ({error.strerror})\n")


def _terminate(_number: int, _frame: object) -> None:
    # At once, without waiting for threads that read from the network: whatever is on disk is made for being killed.
    sys.stderr.flush()
    os._exit(_TERMINATED)
