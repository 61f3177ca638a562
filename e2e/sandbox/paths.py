"""Where the sandbox keeps things: a cache outside the tree, one folder per run."""

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
REPOSITORY = PACKAGE.parents[1]


OWNED = "owned"  # marks the folder of a run with an owner, worth nothing once the owner is gone


def cache_root() -> Path:
    """Binaries, image archives, image stores and runs; every part can be deleted while nothing runs."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "conch" / "sandbox"


def run_root(run: str) -> Path:
    """State of one run: logs, keys, kubeconfigs, sockets."""
    return cache_root() / "run" / run


def run_lock(run: str) -> Path:
    """Held while a run starts or stops."""
    return cache_root() / "run" / f"{run}.lock"
