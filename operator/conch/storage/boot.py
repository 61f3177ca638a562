"""Which boot of the node this is. Reads the kernel's name for it."""

import secrets
from pathlib import Path


def boot_name() -> str:
    """The same in one boot of the node; after a crash, files that were written in an earlier one may lack bytes.

    A random one where the kernel has none, so that nothing is taken on trust.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return secrets.token_hex(8)
