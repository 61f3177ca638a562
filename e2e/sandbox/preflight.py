"""What the machine must offer, checked before anything starts; missing packages are installed when root."""

import os
import platform
import shutil

from sandbox.errors import SandboxError
from sandbox.progress import Say, checked, step

# command that proves it is there -> Debian package
PACKAGES = {
    "runc": "runc",
    "nft": "nftables",
    "ip": "iproute2",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "buildah": "buildah",
    "debootstrap": "debootstrap",
    "openssl": "openssl",
    "unshare": "util-linux",
    "mount": "mount",
}


def missing_packages() -> list[str]:
    """Debian packages whose command isn't on PATH."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return sorted({package for command, package in PACKAGES.items() if shutil.which(command, path=path) is None})


def prepare(tell: Say) -> None:
    """Refuse early, with the fix, what can't work; install what is missing."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        here = f"{platform.system()} on {platform.machine()}"
        message = f"the sandbox needs Linux on x86_64, this is {here}; use such a machine, a virtual one will do"
        raise SandboxError(message)
    missing = missing_packages()
    if os.geteuid() != 0:
        more = f" (also missing: apt-get install {' '.join(missing)})" if missing else ""
        message = f"the sandbox makes namespaces and mounts, so it must run as root; try sudo{more}"
        raise SandboxError(message)
    install_missing(tell)


def install_missing(tell: Say) -> None:
    """Install by apt-get what isn't there; refuse with the names where that can't be done."""
    missing = missing_packages()
    if not missing:
        return
    names = " ".join(missing)
    if shutil.which("apt-get") is None:
        message = f"missing on this machine: {names}; install them with your package manager (no apt-get here)"
        raise SandboxError(message)
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with step(f"installing {names}", tell):
        fix = f"install {names} by hand, then try again"
        checked(["apt-get", "-q", "update"], fix=fix, timeout_s=300, env=env)
        checked(["apt-get", "-qy", "install", "--no-install-recommends", *missing], fix=fix, timeout_s=900, env=env)
