"""Image stores: images are unpacked once into a template, and each region starts on a hard-linked copy of it."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sandbox.content import digest, locked
from sandbox.errors import SandboxError
from sandbox.images import PRIVATE, Image
from sandbox.namespaces import wait_for
from sandbox.paths import cache_root
from sandbox.progress import Say, checked, step

FORMAT = "2"


def template_config(root: Path, state: Path) -> str:
    """containerd without the CRI plugin: only images are handled here."""
    return f"""version = 3
root = "{root}"
state = "{state}"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime"]
[grpc]
  address = "{state}/c.sock"
"""


def fill(root: Path, images: Sequence[Image], bin_dir: Path, tell: Say) -> None:
    """Import and unpack the images into a store of their own."""
    state = Path("/run") / f"conch-store-{os.getpid()}"
    config = root.with_suffix(".toml")
    log = root.with_suffix(".log")
    root.mkdir(parents=True)
    state.mkdir()
    config.write_text(template_config(root, state))
    server: subprocess.Popen[bytes] | None = None
    try:
        with log.open("wb") as output:
            argv = [*PRIVATE, str(bin_dir / "containerd"), "-c", str(config)]
            server = subprocess.Popen(argv, stdout=output, stderr=output)
        wait_for((state / "c.sock").exists, 30, f"containerd did not start; see {log}")
        ctr = [str(bin_dir / "ctr"), "-a", str(state / "c.sock"), "-n", "k8s.io"]
        wait_for(lambda: answers(ctr), 30, f"containerd does not answer; see {log}")
        for image in images:
            with step(f"unpacking {image.reference}", tell):
                # unpacking mounts; the mounts must be in the server's namespace, hence its own import service
                fix = f"delete {image.archive} and try again"
                checked([*ctr, "images", "import", "--local=false", image.archive], fix=fix, timeout_s=300)
    finally:
        if server is not None:
            server.kill()
            server.wait(20)
        shutil.rmtree(state, ignore_errors=True)
        config.unlink(missing_ok=True)


def answers(ctr: Sequence[str]) -> bool:
    """Whether containerd can be asked."""
    return subprocess.run([*ctr, "version"], capture_output=True, timeout=20, check=False).returncode == 0


def template(images: Sequence[Image], bin_dir: Path, tell: Say) -> Path:
    """The store that holds these images, made when the cache lacks it."""
    key = digest([], FORMAT, *[f"{image.reference} {image.key}" for image in images])
    root = cache_root() / "stores" / key
    with locked(cache_root() / "stores.lock"):
        if not root.is_dir():
            draft = root.with_name(root.name + "-new")
            shutil.rmtree(draft, ignore_errors=True)
            fill(draft, images, bin_dir, tell)
            draft.replace(root)
            draft.with_suffix(".log").unlink(missing_ok=True)
            for older in root.parent.iterdir():
                if older.is_dir() and older != root:
                    shutil.rmtree(older, ignore_errors=True)
    return root


def copy(source: Path, target: Path) -> None:
    """Hard links for content, which is never changed in place; real copies of the databases, which are."""
    shutil.rmtree(target, ignore_errors=True)
    fix = "the cache and its runs must lie on one file system; set XDG_CACHE_HOME to a folder where they do"
    checked(["cp", "-al", source, target], fix=fix, timeout_s=120)
    for database in list(target.glob("*/*.db")):
        draft = database.with_name(database.name + ".copy")
        shutil.copy2(database, draft)
        draft.replace(database)
    if not (target / "io.containerd.metadata.v1.bolt" / "meta.db").exists():
        message = f"{source} holds no image store; delete it and try again"
        raise SandboxError(message)
