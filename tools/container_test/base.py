"""Small Debians as base images, made without an image registry and kept in the cache."""

import hashlib
import subprocess
from pathlib import Path

from tools.container_test.machine import SkippedError, cache, say

_SUITE = "bookworm"
_PACKAGES = (
    *("base-files", "base-passwd", "bash", "ca-certificates", "coreutils", "dash", "findutils", "grep", "libc-bin"),
    *("libstdc++6", "passwd", "python3", "python3-venv", "sed", "tar"),
)
_FOR_BUILDING = ("binutils",)
_OPTIONS = (
    "--variant=extract",
    "--components=main",
    # A machine whose clock is not today's may still make a base for a test.
    '--aptopt=Acquire::Check-Valid-Until "false"',
    '--aptopt=Acquire::Check-Date "false"',
)
_LONGEST_SECONDS = 900


def make(*, for_building: bool) -> Path:
    """Return the tar archive of a base's files, made now or before.

    Args:
        for_building: the base of the stage that builds, which strips.

    Raises:
        SkippedError: Debian's packages cannot be had.
    """
    packages = (*_PACKAGES, *(_FOR_BUILDING if for_building else ()))
    recipe = hashlib.sha256(repr((_SUITE, packages, _OPTIONS)).encode()).hexdigest()[:12]
    archive = cache() / f"base-{_SUITE}-{recipe}.tar"
    if archive.exists():
        say(f"base image: {archive} (cached)")
        return archive
    say(f"base image: making {archive} with mmdebstrap")
    part = archive.with_suffix(".part.tar")
    command = ["mmdebstrap", *_OPTIONS, f"--include={','.join(packages)}", _SUITE, str(part)]
    try:
        made = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_SECONDS)
    except subprocess.TimeoutExpired:
        raise SkippedError(f"mmdebstrap took more than {_LONGEST_SECONDS} s") from None
    if made.returncode != 0:
        raise SkippedError("mmdebstrap failed: " + " / ".join(made.stderr.strip().splitlines()[-3:]))
    part.rename(archive)
    return archive
