"""What the test takes of this machine, and how all of it is given back.

Both stages run in mount and process namespaces, the pods in a network namespace as well: when the first process of
these is gone, so is every container, mount, bridge, firewall rule and sysctl, also after ``kill -9``. What remains is
one folder of the cache and empty cgroups, which are removed here.
"""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FAILED, SKIPPED = 1, 77
"""Exit statuses beside 0; 77 is how test programs of old say that they were skipped."""

_CGROUPS = "libpod_parent"
_REMOVE_SECONDS = 180.0
_POLL_SECONDS = 1.0  # asking podman is dear
_started = time.monotonic()


class TestFailedError(Exception):
    """A promise is not kept; the message says which."""

    __test__ = False


class SkippedError(Exception):
    """The test cannot run on this machine; the message says why."""


def say(text: str) -> None:
    """Print a line of progress with the seconds since the start of this process."""
    print(f"[{time.monotonic() - _started:6.1f} s] {text}", flush=True)


def cache() -> Path:
    """Return the folder that outlives a run."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "sparseps"


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll until a condition holds.

    Raises:
        TestFailedError: not in time.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TestFailedError(f"not within {seconds:.0f} s: {what}")
        time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    """Yield an empty folder for images and volumes, removed at the end; what a killed run has left is removed first.

    Raises:
        SkippedError: another run has it.
    """
    folder = cache() / "container-test"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (cache() / "container-test.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SkippedError("another container test is running on this machine") from None
        cgroups = _cgroups()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            yield folder
        finally:
            with contextlib.suppress(TestFailedError):  # the next run tries again
                wait_until(lambda: _removed(folder, cgroups), _REMOVE_SECONDS, f"{folder} is removed")


def namespaces(*, network: bool) -> list[str]:
    """Return the command before a command that is to run, and end, in namespaces of its own."""
    die_with_us = ["setpriv", "--pdeathsig", "KILL", "--"]
    own = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *(["--net"] if network else [])]
    return [*die_with_us, "unshare", *own, "--"]


def stage(module: str, *arguments: Path, network: bool) -> int:
    """Run a module of this package in namespaces; return its exit status. A stop of this process stops it."""
    words = [sys.executable, "-m", f"tools.container_test.{module}", *map(str, arguments)]
    command = [*namespaces(network=network), *words]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)  # Ctrl-C is for this process to heed
    try:
        return process.wait()
    finally:
        process.kill()  # and with it the namespaces
        process.wait()


def settle_in() -> None:
    """Inside new namespaces: hide the machine's run-time state behind empty file systems; bring loopback up."""
    names = Path("/etc/resolv.conf")
    resolver = (names.resolve(), names.read_bytes()) if names.exists() else None
    for folder in ("/run", "/dev/shm"):
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
    if resolver and not resolver[0].exists():  # it was in /run
        resolver[0].parent.mkdir(parents=True, exist_ok=True)
        resolver[0].write_bytes(resolver[1])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def _removed(folder: Path, kept_cgroups: set[Path]) -> bool:
    """Remove what is left; tell whether all of it is gone, as it is once the last process of the namespaces is."""
    shutil.rmtree(folder, ignore_errors=True)
    ours = _cgroups() - kept_cgroups
    for cgroup in sorted(ours, key=lambda path: len(path.parts), reverse=True):
        with contextlib.suppress(OSError):
            cgroup.rmdir()
    return not folder.exists() and not any(cgroup.exists() for cgroup in ours)


def _cgroups() -> set[Path]:
    """Return podman's cgroups, of either version of cgroups."""
    root = Path("/sys/fs/cgroup")
    tops = [*root.glob(_CGROUPS), *root.glob(f"*/{_CGROUPS}")]
    return {path for top in tops for path in (top, *top.rglob("*")) if path.is_dir()}
