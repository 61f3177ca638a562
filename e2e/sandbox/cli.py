"""`python -m sandbox up | down | status | shell | logs`."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from sandbox.cluster_run import Sandbox, end, leftovers, runs
from sandbox.content import locked
from sandbox.errors import SandboxError
from sandbox.paths import run_lock, run_root
from sandbox.progress import say


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m sandbox", description="A local real Kubernetes, without Docker or GPUs."
    )
    top.add_argument("--run", default="default", help="name of the run (default: default)")
    verbs = top.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="start it; does nothing when it is up")
    up.add_argument("--regions", default="local", help="names, separated by commas (default: local)")
    up.add_argument("--no-nodes", action="store_true", help="control planes only: no kubelet, no pods")
    up.add_argument("--no-operator-image", action="store_true", help="don't build the operator's image")
    up.add_argument("--gpus", type=int, default=8, help="fake GPUs per node")
    up.add_argument("--gpu-product", default="NVIDIA-L4", help="their product label")
    up.add_argument("--owner", type=int, help="end everything when this process ends")
    down = verbs.add_parser("down", help="end it and leave nothing behind")
    down.add_argument("--all", action="store_true", help="every run, not only this one")
    verbs.add_parser("status", help="regions, components and nodes")
    shell = verbs.add_parser("shell", help="a shell in a region's network, with kubectl and KUBECONFIG")
    shell.add_argument("--region", help="default: the first")
    shell.add_argument("command", nargs=argparse.REMAINDER, help="a command instead of a shell")
    logs = verbs.add_parser("logs", help="a component's log")
    logs.add_argument("component", nargs="?", help="without one: the names")
    logs.add_argument("--region", help="default: the first")
    logs.add_argument("-f", "--follow", action="store_true")
    return top


def up(options: argparse.Namespace) -> int:
    """Start."""
    began = time.monotonic()
    sandbox = Sandbox.up(
        options.run, options.regions.split(","), nodes=not options.no_nodes, gpus=options.gpus,
        gpu_product=options.gpu_product, owner=options.owner, operator_image=not options.no_operator_image,
    )  # fmt: skip
    for region in sandbox.regions:
        say(f"{region.name}: {region.api_url}  KUBECONFIG={region.kubeconfig}")
    say(f"ready in {time.monotonic() - began:.1f} s; `python -m sandbox shell` opens a shell in its network")
    return 0


def down(options: argparse.Namespace) -> int:
    """End, and say what could not be removed."""
    for run in runs() if options.all else [options.run]:
        with locked(run_lock(run)):
            end(run)
    left = leftovers(None if options.all else options.run)
    for line in left:
        say(f"left over: {line}")
    return 1 if left else 0


def status(options: argparse.Namespace) -> int:
    """Show what runs."""
    sandbox = Sandbox.attach(options.run)
    if not sandbox.alive():
        say(f"sandbox {options.run!r} isn't running; start it with `python -m sandbox up`")
        return 1
    for region in sandbox.regions:
        sys.stdout.write(f"{region.name}  {region.api_url}  {region.kubeconfig}\n")
        for name, state in region.components().items():
            shown = "running" if state["running"] else f"ended with {state['status']}"
            sys.stdout.write(f"  {name:<26}{shown}\n")
        if region.spec.nodes:
            sys.stdout.write(region.kubectl("get", "nodes", "-o", "wide"))
            sys.stdout.write(f"  GPUs (fake) allocatable: {region.allocatable_gpus()}\n")
    return 0


def shell(options: argparse.Namespace) -> int:
    """A shell, or one command, in a region's network."""
    region = Sandbox.attach(options.run).region(options.region)
    words = [word for word in options.command if word != "--"] or [os.environ.get("SHELL", "/bin/sh")]
    environment = {**region.environment(), "PS1": f"({options.run}/{region.name}) \\w \\$ "}
    return subprocess.run([*region.control.network_argv(), *words], env=environment, check=False).returncode


def logs(options: argparse.Namespace) -> int:
    """A component's log, of a run that may be over."""
    folders = [
        path for path in sorted(run_root(options.run).glob("*/log")) if options.region in (None, path.parent.name)
    ]
    if not folders:
        message = f"run {options.run!r} has no logs{f' of region {options.region}' if options.region else ''}"
        raise SandboxError(message)
    log = folders[0] / f"{options.component}.log"
    if not log.exists():
        sys.stdout.write("\n".join(path.stem for path in sorted(folders[0].glob("*.log"))) + "\n")
        return 1 if options.component else 0
    return subprocess.run(["tail", "-n", "1000", *(["-F"] if options.follow else []), str(log)], check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; errors are sentences, not traces."""
    options = parser().parse_args(arguments)
    verbs = {"up": up, "down": down, "status": status, "shell": shell, "logs": logs}
    try:
        return verbs[options.verb](options)
    except SandboxError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
