"""A run of the sandbox: one outer namespace with the link between regions, and the regions in it."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

from sandbox import binaries, cgroups, images, preflight, store
from sandbox.components import OUTER_ADDRESS, Layout, RegionSpec
from sandbox.content import digest, locked, tried, write_atomic
from sandbox.errors import SandboxError
from sandbox.namespaces import Control, enter, namespace_argv, network, wait_for
from sandbox.paths import OWNED, PACKAGE, cache_root, run_lock, run_root
from sandbox.progress import Say, checked, say
from sandbox.region import Region

__all__ = ["Sandbox", "SandboxError", "leftovers"]

MAX_REGIONS = 15


def region_specs(regions: Sequence[str | RegionSpec], template: RegionSpec) -> tuple[RegionSpec, ...]:
    """Names become specs with the next index; the rest comes from the template."""
    specs = []
    for index, region in enumerate(regions, start=1):
        spec = region if isinstance(region, RegionSpec) else replace(template, name=region, index=index)
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?", spec.name):
            message = f"region name {spec.name!r}: use up to 12 lower-case letters, digits and dashes, a letter first"
            raise SandboxError(message)
        specs.append(spec)
    taken = [spec.index for spec in specs]
    if not specs or len(set(taken)) != len(specs) or not all(1 <= index <= MAX_REGIONS for index in taken):
        message = f"regions need indices of their own between 1 and {MAX_REGIONS}, these have {taken}"
        raise SandboxError(message)
    return tuple(specs)


def guard_running(folder: Path) -> bool:
    """Whether this run has a guard: it holds a lock for as long as it lives."""
    try:
        handle = (folder / "guard.lock").open("r+")
    except FileNotFoundError:
        return False
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class Sandbox:
    """A running sandbox, whoever started it."""

    def __init__(self, run: str, specs: Sequence[RegionSpec], bin_dir: Path) -> None:
        self.run = run
        self.folder = run_root(run)
        self.outer = Control(self.folder / "keeper.sock")
        self.regions = tuple(
            Region(Layout(spec, self.folder / spec.name, bin_dir, cgroups.name(run))) for spec in specs
        )

    # --- finding and making one

    @classmethod
    def attach(cls, run: str = "default") -> "Sandbox":
        """The sandbox of a run that is up."""
        folder = run_root(run)
        try:
            saved = json.loads((folder / "run.json").read_text())
        except FileNotFoundError as error:
            message = f"no sandbox named {run!r}; start it with `python -m sandbox up`"
            raise SandboxError(message) from error
        specs = [RegionSpec(**values) for values in saved["regions"]]
        return cls(run, specs, Path(saved["bin_dir"]))

    @classmethod
    def up(
        cls,
        run: str = "default",
        regions: Sequence[str | RegionSpec] = ("local",),
        *,
        nodes: bool = True,
        gpus: int = 8,
        gpu_product: str = "NVIDIA-L4",
        owner: int | None = None,
        operator_image: bool = True,
        tell: Say = say,
    ) -> "Sandbox":
        """Start what isn't running; a second call changes nothing. With an owner (a pid), the run ends with it."""
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,30}", run):
            message = f"run name {run!r}: use up to 31 lower-case letters, digits and dashes"
            raise SandboxError(message)
        template = RegionSpec("template", nodes=nodes, gpus=gpus, gpu_product=gpu_product)
        specs = region_specs(regions, template)
        preflight.prepare(tell)
        bin_dir = binaries.ensure(tell)
        with_nodes = any(spec.nodes for spec in specs)
        stable = images.ensure_stable(tell) if with_nodes else []
        operator = images.ensure_operator(tell) if with_nodes and operator_image else None
        filled = store.template(stable, bin_dir, tell) if with_nodes else None
        started = time.monotonic()
        sandbox = cls(run, specs, bin_dir)
        with locked(run_lock(run)):
            if not sandbox.already_up(tell):
                try:
                    sandbox.start(filled, operator, owner, tell)
                except BaseException:
                    sandbox.stop()
                    raise
                tell(f"  sandbox {run!r} is up after {time.monotonic() - started:.1f} s")
            if operator:
                sandbox.load_everywhere(operator)
        return sandbox

    def load_everywhere(self, image: images.Image) -> None:
        """Import an image into every region with nodes that lacks this content."""
        with ThreadPoolExecutor(4) as pool:
            for result in [pool.submit(region.load, image) for region in self.regions if region.spec.nodes]:
                result.result()

    def already_up(self, tell: Say) -> bool:
        """Whether exactly this is running; what differs is an error with its fix."""
        if not guard_running(self.folder) or not (self.folder / "run.json").exists():
            return False
        saved = json.loads((self.folder / "run.json").read_text())
        if saved["regions"] != [asdict(region.spec) for region in self.regions]:
            names = ", ".join(entry["name"] for entry in saved["regions"])
            message = f"sandbox {self.run!r} runs with other settings (regions {names}); `python -m sandbox down` first"
            raise SandboxError(message)
        dead = [name for region in self.regions for name in region.down_components(tell)]
        if dead:
            message = f"not running: {', '.join(dead)}; `python -m sandbox down`, then up again"
            raise SandboxError(message)
        return True

    def start(self, template: Path | None, operator: images.Image | None, owner: int | None, tell: Say) -> None:
        """Guard, link, regions."""
        self.stop()
        sweep_dead()
        self.folder.mkdir(parents=True, exist_ok=True)
        if owner is not None:
            (self.folder / OWNED).touch()
        for region in self.regions:
            region.write_files()
        self.start_guard(owner)
        self.outer.wait_up(20)
        outer = self.outer.network_argv()
        self.ip(outer, "link", "add", "wan0", "type", "bridge")
        self.ip(outer, "addr", "add", f"{OUTER_ADDRESS}/24", "dev", "wan0")
        self.ip(outer, "link", "set", "wan0", "up")
        for region in self.regions:
            self.start_region_namespaces(region, outer)
        for region in self.regions:
            region.start_control_plane()
        with ThreadPoolExecutor(len(self.regions) + 1) as pool:
            work = [pool.submit(self.bring_up, region, template, operator) for region in self.regions]
            for result in work:
                result.result()
        bin_dir = self.regions[0].layout.bin_dir
        saved = {"regions": [asdict(region.spec) for region in self.regions], "bin_dir": str(bin_dir)}
        write_atomic(self.folder / "run.json", json.dumps(saved, indent=1) + "\n")
        tell(f"  regions: {', '.join(region.name for region in self.regions)}")

    def start_guard(self, owner: int | None) -> None:
        """The process outside that ends the run with its owner and cleans up."""
        descriptor = os.pidfd_open(owner) if owner is not None else -1
        argv = [sys.executable, "-m", "sandbox.guard", self.run, str(self.folder), str(descriptor)]
        path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
        with (self.folder / "guard.log").open("w") as log:
            # detached, and no child of the caller: the guard outlives who calls `up`, unless that is the owner
            subprocess.run(
                ["setsid", "--fork", *argv], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", check=True,
                timeout=20,
                pass_fds=[descriptor] if owner is not None else [],
                env={"PATH": path, "HOME": str(Path.home()), "PYTHONPATH": str(PACKAGE.parent)},
            )  # fmt: skip
        if owner is not None:
            os.close(descriptor)

    @staticmethod
    def ip(prefix: Sequence[str], *words: str) -> None:
        """An `ip` command in some network."""
        checked([*prefix, "ip", *words], fix="the kernel needs bridge and veth links", timeout_s=20)

    def start_region_namespaces(self, region: Region, outer: Sequence[str]) -> None:
        """Namespaces inside the outer ones, and the leg that joins them."""
        spec, folder = region.spec, region.layout.folder
        argv = namespace_argv(PACKAGE / "keeper.py", folder / "keeper.sock", "--region")
        env = {"PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin", "HOME": str(Path.home())}
        log = str(region.layout.log("keeper"))
        self.outer.ask(op="start", name=f"region-{spec.name}", argv=argv, env=env, log=log)
        region.control.wait_up(20)
        pid = str(region.control.pid())
        self.ip(outer, "link", "add", spec.link, "type", "veth", "peer", "name", "wan", "netns", pid)
        self.ip(outer, "link", "set", spec.link, "master", "wan0", "up")
        inside = region.control.network_argv()
        self.ip(inside, "addr", "add", f"{spec.address}/24", "dev", "wan")
        self.ip(inside, "link", "set", "wan", "up")
        # a process in the region's own network, not only a pod, needs a way to Services before they are translated
        self.ip(inside, "route", "add", spec.service_range, "via", OUTER_ADDRESS)
        for reached in (spec.pod_range, spec.service_range):
            self.ip(outer, "route", "add", reached, "via", spec.address)

    @staticmethod
    def bring_up(region: Region, template: Path | None, operator: images.Image | None) -> None:
        """One region from started API server to Ready node; the operator's image is imported meanwhile."""
        if not region.spec.nodes or template is None:
            region.finish_control_plane()
            return
        region.start_runtime(template)
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(region.load, operator) if operator else None
            region.finish_control_plane()
            region.start_node()
            region.wait_node()
            if loading:
                loading.result()

    # --- using one

    def region(self, name: str | None = None) -> Region:
        """A region by name; without one, the first."""
        for region in self.regions:
            if name is None or region.name == name:
                return region
        message = f"no region {name!r}; there are {', '.join(region.name for region in self.regions)}"
        raise SandboxError(message)

    def network_path(self) -> Path:
        """The outer network namespace, from which every region's pods, Services and API servers are reached."""
        return Path(f"/proc/{self.outer.pid()}/ns/net")

    def enter_network(self) -> None:
        """Move the calling thread there for good; call it before other threads start, which inherit it."""
        enter(self.network_path())

    def network(self) -> contextlib.AbstractContextManager[None]:
        """Be there for a while."""
        return network(self.network_path())

    def alive(self) -> bool:
        """Whether the run is up."""
        return guard_running(self.folder) and self.outer.alive()

    # --- ending one

    def stop(self) -> None:
        """End the run if it runs and remove what a killed one left; without the run's lock."""
        end(self.run)

    def down(self, *, keep_logs: bool = True) -> None:
        """End everything of this run and leave nothing but logs, or not even those."""
        with locked(run_lock(self.run)):
            self.stop()
        if not keep_logs:
            shutil.rmtree(self.folder, ignore_errors=True)
            run_lock(self.run).unlink(missing_ok=True)


def end(run: str) -> None:
    """End a run by name, whatever is left of it."""
    folder = run_root(run)
    if guard_running(folder):
        with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
            os.kill(int((folder / "guard.pid").read_text()), signal.SIGTERM)
        wait_for(
            lambda: not guard_running(folder), 40, f"the guard of {run!r} does not end; see {folder / 'guard.log'}"
        )
    if not cgroups.sweep(run):
        message = (
            f"control groups of {run!r} can't be removed: {cgroups.folders(run)}; a process in them can't be killed"
        )
        raise SandboxError(message)
    if folder.is_dir():
        for place in [folder, *(path for path in folder.iterdir() if path.is_dir())]:
            for stale in ("containerd", "ipam", "etcd", "prometheus"):
                shutil.rmtree(place / stale, ignore_errors=True)
            for stale in ("keeper.sock", "run.json", "guard.pid"):
                (place / stale).unlink(missing_ok=True)


def sweep_dead() -> None:
    """Remove the empty groups of runs whose guard was itself killed, and the folders of such runs that had an owner."""
    tops = [path for path in cgroups.folders() if path.parent in cgroups.hierarchies()]
    for run in {*runs(), *(path.name.removeprefix(cgroups.PREFIX) for path in tops)}:
        lock = run_lock(run)
        with tried(lock) as free:
            # a run that is just starting, or stopping, holds its lock
            if not free or guard_running(run_root(run)):
                continue
            # a run that this cache folder doesn't know is another cache folder's, and may be alive
            if not run_root(run).is_dir() and cgroups.processes(run):
                continue
            cgroups.sweep(run, 5)
            if (run_root(run) / OWNED).exists():
                shutil.rmtree(run_root(run), ignore_errors=True)
                lock.unlink(missing_ok=True)


def runs() -> list[str]:
    """Names of runs that left a folder."""
    root = cache_root() / "run"
    return sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


def host_links() -> list[str]:
    """Interfaces of the machine's own network whose name is one of the sandbox's."""
    said = subprocess.run(
        ["nsenter", "--net=/proc/1/ns/net", "ip", "-o", "link"],
        capture_output=True, text=True, timeout=20, check=False,
    ).stdout  # fmt: skip
    names = re.findall(r"^\d+: ([^:@]+)", said, re.MULTILINE)
    return [name for name in names if name in {"wan0", "cni0", "wan"} or re.match(r"v\d+-", name)]


def leftovers(run: str | None = None) -> list[str]:
    """What a run (or all) left here: processes, groups, mounts, interfaces, sockets, stores. Empty when clean."""
    found = [f"process {pid}: {command(pid)}" for pid in sorted(cgroups.processes(run))]
    found += [f"control group {path}" for path in cgroups.folders(run) if path.parent in cgroups.hierarchies()]
    root = str(run_root(run) if run else cache_root())
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    found += [f"mount {line.split()[4]}" for line in mounts if line.split()[4].startswith(root)]
    for name in [run] if run else runs():
        folder = run_root(name)
        if guard_running(folder):
            found.append(f"guard of {name}")
        if folder.is_dir():
            sockets = [*folder.glob("keeper.sock"), *folder.glob("*/keeper.sock")]
            found += [f"socket {path}" for path in sockets]
            found += [f"image store {path}" for path in folder.glob("*/containerd")]
    if run is None or not any(guard_running(run_root(name)) for name in runs()):
        found += [f"interface {name}" for name in host_links()]
    return found


def command(pid: int) -> str:
    """A process's command line, for people."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:160]
    except OSError:
        return "(gone)"


def run_key(*words: str) -> str:
    """A short name for a run that must not meet another's."""
    return "t-" + digest([], str(os.getpid()), str(time.time_ns()), *words)[:8]
