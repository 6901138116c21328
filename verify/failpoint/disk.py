"""A disk that can be filled: a small file system in memory, mounted where nobody else sees it."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import TracebackType

SIZE_BYTES = 48 << 20
_PIECE = 1 << 20
_CLONE_NEWNS = 0x00020000


class Disk:
    """A place for a data directory, full or not; a context manager that takes it down.

    The thread that makes it gets mounts of its own, which the processes that it starts share and nobody else sees; what
    is mounted goes with the last of them, however they end.

    Attributes:
        path: where it is.
        mounted: whether it is a file system of its own, which can be filled; mounting takes root.
    """

    def __init__(self, path: Path) -> None:
        """Mount it, or do without."""
        path.mkdir(parents=True)
        self.path = path
        self.mounted = shutil.which("mount") is not None and _mounts_of_our_own() and not _mount(path)

    def fill(self) -> None:
        with (self.path / "ballast").open("ab", buffering=0) as file:
            size = _PIECE
            while size:
                try:
                    if file.write(bytes(size)) < size:
                        size //= 2
                except OSError:
                    size //= 2

    def free(self) -> None:
        """Make room again."""
        (self.path / "ballast").unlink()

    def __enter__(self) -> "Disk":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.mounted:
            subprocess.run(["umount", str(self.path)], check=True)


def _mounts_of_our_own() -> bool:
    """Separate this thread's mounts from everybody's; ``False`` where that is not permitted."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        return False
    return not subprocess.call(["mount", "--make-rprivate", "/"], stderr=subprocess.DEVNULL)


def _mount(path: Path) -> int:
    options = ["-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "tmpfs", str(path)]
    return subprocess.call(["mount", *options], stderr=subprocess.DEVNULL)
