"""The release before this one, for a campaign to start: the wheel of the commit that a tracked file names."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_NAMED = Path(__file__).with_name("release-before")
_SECONDS = 300.0


class NoReleaseBeforeError(Exception):
    """The commit is not here, or no wheel can be built of it; the message says why."""


def commit() -> str:
    """Return the commit that stands for the release before this one."""
    (found,) = (line for line in _NAMED.read_text().splitlines() if line and not line.startswith("#"))
    return found


def require_history() -> None:
    """Raise :class:`NoReleaseBeforeError` if the repository does not have the commit."""
    _run("git", "-C", str(_ROOT), "cat-file", "-e", commit() + "^{commit}")


def install(directory: Path) -> Path:
    """Build the wheel, install it into ``directory``, and return the folder that has its packages; takes seconds.

    Raises :class:`NoReleaseBeforeError` if the commit is not here, or pip fails.
    """
    sources, archive, packages = directory / "sources", directory / "sources.tar", directory / "packages"
    _run("git", "-C", str(_ROOT), "archive", "--output", str(archive), commit())
    with tarfile.open(archive) as tar:
        tar.extractall(sources, filter="data")
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    wheels = ("--no-deps", "--no-build-isolation", "--wheel-dir", str(directory))
    _run(*pip, "wheel", *wheels, str(sources))
    (wheel,) = directory.glob("*.whl")
    _run(*pip, "install", "--no-deps", "--no-compile", "--target", str(packages), str(wheel))
    return packages


def python(packages: Path | None) -> list[str]:
    """Return the command of an interpreter that imports the packages of a folder; ``None``: this repository's."""
    return [sys.executable] if packages is None else [sys.executable, "-P"]


def environment(packages: Path | None) -> dict[str, str]:
    """Return the environment of :func:`python`'s interpreter; modules beside the packages come from this repository.

    Nothing has compiled loops in a folder, so they are compiled in haste.
    """
    if packages is None:
        return {**os.environ}
    return {**os.environ, "PYTHONPATH": f"{packages}:{_ROOT}", "NUMBA_OPT": "0"}


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoReleaseBeforeError(f"the release before this one is not tried: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise NoReleaseBeforeError(f"the release before this one is not tried: {' '.join(command[:4])}: {said}")
