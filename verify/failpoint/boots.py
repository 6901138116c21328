"""The id of the machine's start as a server reads it, so that a campaign can start the machine anew."""

import uuid
from pathlib import Path

_KERNELS = Path("/proc/sys/kernel/random/boot_id")


def keep(path: Path) -> None:
    """Let whoever reads this file find the start of the machine that the kernel tells."""
    path.write_text(_KERNELS.read_text())


def begin(path: Path) -> None:
    """Let whoever reads this file find another start of the machine than before."""
    path.write_text(f"{uuid.uuid4()}\n")


def install(path: Path) -> None:
    """Let this process's server read the id there, and not the kernel's."""
    from psservice.storage import files

    files._BOOT_ID = path
