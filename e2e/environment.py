"""Set up the development environment: `install` makes .venv, `lock` writes the hashed requirement files anew.

Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
RUN_LOCK, DEV_LOCK = "operator/requirements.txt", "operator/requirements-dev.txt"
# The S3 server of the tests is a program of its own: its libraries exclude versions that the operator needs.
STORES_VENV, STORES_NEEDS, STORES_LOCK = VENV / "stores", "e2e/requirements-stores.in", "e2e/requirements-stores.txt"
SYSTEM_PACKAGES = {
    "docker-registry": ("docker-registry", "the tests of oci:// sources will fail"),
    "btrfs-progs": ("mkfs.btrfs", "the tests of caches on file systems that clone will be skipped"),
}
"""Debian's packages for the tests: each with a command of it, and what happens without."""
OLDEST = (3, 11)
INSTALL_LIMIT_S = 1800


def preflight() -> None:
    """Name what is missing and the fix; as root on Debian, install it."""
    if sys.version_info[:2] < OLDEST:
        found = sys.version.split()[0]
        sys.exit(f"python3 is {found}; Conch needs 3.11 or newer: install it and put it first in PATH.")
    if importlib.util.find_spec("ensurepip") is None:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            sys.exit("python3 has no ensurepip, so no venv can be made: install the package python3-venv.")
        run("apt-get", "update", "-q")
        run("apt-get", "install", "-y", "-q", "--no-install-recommends", "python3-venv")


def run(*argv: str) -> None:
    """Run a command in the repository; its failure ends this program with its status."""
    ended = subprocess.run(argv, cwd=ROOT, check=False, timeout=INSTALL_LIMIT_S)
    if ended.returncode:
        sys.exit(f"{' '.join(argv)} failed with status {ended.returncode}; its own message is above.")


def install() -> None:
    """Make .venv with exactly the locked packages, and Conch itself in editable form."""
    preflight()
    python = str(VENV / "bin" / "python")
    print("Installing the development environment into .venv (about a minute) …", flush=True)
    if not Path(python).exists():
        run(sys.executable, "-m", "venv", str(VENV))
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--progress-bar", "on")
    run(*pip, "--require-hashes", "-r", DEV_LOCK)
    run(*pip, "--no-deps", "--no-build-isolation", "--editable", ".")
    if not (STORES_VENV / "bin" / "python").exists():
        run(sys.executable, "-m", "venv", str(STORES_VENV))
    run(str(STORES_VENV / "bin" / "python"), *pip[1:], "--require-hashes", "-r", STORES_LOCK)
    install_system_packages()
    (VENV / "ready").touch()


def install_system_packages() -> None:
    """As root on Debian, install what the tests need besides; elsewhere say what they will miss."""
    missing = [name for name, (command, _) in SYSTEM_PACKAGES.items() if shutil.which(command) is None]
    if not missing:
        return
    if os.geteuid() == 0 and shutil.which("apt-get") is not None:
        run("apt-get", "update", "-q")
        run("apt-get", "install", "-y", "-q", "--no-install-recommends", *missing)
    else:
        for name in missing:
            print(f"{name} isn't installed: {SYSTEM_PACKAGES[name][1]} until it is.")


def lock() -> None:
    """Resolve into files what the image installs, what a developer needs besides, and the tests' servers."""
    compile_ = (
        str(VENV / "bin" / "pip-compile"), "--quiet", "--generate-hashes", "--allow-unsafe", "--strip-extras",
        "--no-emit-index-url", "--no-emit-trusted-host", "--no-emit-find-links", "--no-header",
    )  # fmt: skip
    run(*compile_, "pyproject.toml", "--output-file", RUN_LOCK)
    run(*compile_, STORES_NEEDS, "--output-file", STORES_LOCK)
    run(
        *compile_,
        "pyproject.toml",
        "--extra",
        "dev",
        "--extra",
        "plots",
        "--constraint",
        RUN_LOCK,
        "--output-file",
        DEV_LOCK,
    )


if __name__ == "__main__":
    commands = {"install": install, "lock": lock}
    if len(sys.argv) != 2 or sys.argv[1] not in commands:
        sys.exit(f"usage: python3 e2e/environment.py {' | '.join(commands)}")
    commands[sys.argv[1]]()
