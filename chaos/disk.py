"""A disk that can be filled: a small file system in memory where one may be mounted, else a limit on file sizes."""

import contextlib
import resource
import shutil
import subprocess
from pathlib import Path
from types import TracebackType

SIZE_BYTES = 48 << 20
_PIECE = 1 << 20
_SMALL_FILE_BYTES = 4096
FULL = ("No space left on device", "File too large")
"""What the system says of a full disk, of either kind."""


class Disk:
    """A place for a data directory, full or not; a context manager that takes it down.

    Attributes:
        path: where it is.
        kind: how it is filled, in words.
    """

    def __init__(self, path: Path) -> None:
        """Mount it, or do without."""
        path.mkdir(parents=True)
        self.path = path
        self._mounted = shutil.which("mount") is not None and not subprocess.call(
            ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "tmpfs", str(path)], stderr=subprocess.DEVNULL
        )
        self.kind = (
            f"a file system of {SIZE_BYTES >> 20} MiB that is filled to the last byte"
            if self._mounted
            else f"no right to mount: files of the server limited to {_SMALL_FILE_BYTES} bytes"
        )

    def fill(self, pid: int) -> None:
        """Leave nothing, for the server with this process id."""
        if not self._mounted:
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (_SMALL_FILE_BYTES, hard))
            return
        with (self.path / "ballast").open("ab", buffering=0) as file:
            size = _PIECE
            while size:
                try:
                    if file.write(bytes(size)) < size:
                        size //= 2
                except OSError:
                    size //= 2

    def free(self, pid: int) -> None:
        """Make room again."""
        if self._mounted:
            (self.path / "ballast").unlink(missing_ok=True)
            return
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile, and its successor has no limit
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))

    @property
    def bars_a_start(self) -> bool:
        """Whether a server that is started meets the full disk too."""
        return self._mounted

    def __enter__(self) -> "Disk":
        """Return it, empty."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take it down."""
        if self._mounted:
            subprocess.run(["umount", str(self.path)], check=True)
