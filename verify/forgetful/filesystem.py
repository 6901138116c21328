"""The tree as a file system that any process uses: ``python -m verify.forgetful.filesystem DIRECTORY``.

The process mounts itself at the directory through FUSE and takes orders on its standard input, a line of JSON each;
it answers on its standard output, and tells there of a cut that comes by itself. It ends, and takes the mount away,
when its input ends. While the power is cut every call fails with ``EIO``.
"""

import ctypes
import errno
import json
import os
import random
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from verify.forgetful.tree import Directory, File, Kind, Node, Tree

_DETACH = 2  # of umount2(2)
_BLOCK_BYTES = 4096
_BLOCKS, _ROOM = 1 << 20, ("f_blocks", "f_bfree", "f_bavail")
_HELD_SHARE = 0.5  # of cuts during a sync: what is synced has just reached the disk


class Power:
    """The power of the file system, and who loses it too.

    The process that writes is killed with ``SIGKILL`` before its call returns: it never sees an error.

    Attributes:
        is_cut: whether every call fails.
    """

    def __init__(self, tree: Tree, rng: random.Random, tell: Callable[..., None]) -> None:
        self.tree, self._rng, self._tell = tree, rng, tell
        self.lock = threading.RLock()
        self.is_cut = False
        self._victim, self._left = 0, -1

    def arm(self, victim: int, after: int) -> None:
        """Cut at a later change, behind so many more, or at none if negative; ``victim`` dies with any cut."""
        with self.lock:
            self._victim, self._left = victim, after

    def change(self, what: str, node: Node | None = None) -> bool:
        """Count a change that is about to be made; return whether the power is cut at it.

        The change is then made all the same: what the disk keeps of it is drawn. Of a sync, whether it comes first.
        """
        if self.is_cut:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self._left < 0:
            return False
        self._left -= 1
        if self._left >= 0:
            return False
        if node is not None and self._rng.random() < _HELD_SHARE:
            self.tree.sync(node)
        self._cut(what)
        return True

    def cut_now(self) -> None:
        """Cut the power, unless it is cut."""
        with self.lock:
            if not self.is_cut:
                self._cut("any moment")

    def _cut(self, what: str) -> None:
        self._left, self.is_cut = -1, True
        if self._victim:
            with suppress(ProcessLookupError):
                os.kill(self._victim, signal.SIGKILL)
        self._tell(cut=what, at=time.monotonic())

    def come_back(self, kind: Kind) -> None:
        """Lose what the disk has not kept, and serve again."""
        with self.lock:
            self.tree.forget(self._rng)
            self.tree.kind = kind
            self.is_cut, self._victim, self._left = False, 0, -1


def _operations(power: Power, mounted: Callable[[], None]) -> Any:
    """Return the calls of the file system as the binding wants them; imports the binding, which looks for libfuse."""
    import mfusepy

    tree = power.tree

    class Operations(mfusepy.Operations):  # type: ignore[misc]  # without types
        use_ns = True

        def __init__(self) -> None:
            self._open: dict[int, Node] = {}
            self._handle = 0

        def init(self, path: str) -> None:
            mounted()

        def statfs(self, path: str) -> dict[str, int]:
            return {"f_bsize": _BLOCK_BYTES, "f_frsize": _BLOCK_BYTES, **dict.fromkeys(_ROOM, _BLOCKS)}

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            with power.lock:
                self._require_power()
                node = self._node(path, fh)
                size = len(node.data) if isinstance(node, File) else 0
                links = 2 if isinstance(node, Directory) else 1
                return {"st_ino": node.number, "st_mode": node.mode, "st_nlink": links, "st_size": size}

        def readdir(self, path: str, fh: int) -> list[tuple[str, dict[str, int], int]]:
            with power.lock:
                self._require_power()
                here = tree.directory(path)
                nodes: dict[str, Node] = {".": here, "..": here, **here.entries}
                return [(name, {"st_ino": each.number, "st_mode": each.mode}, 0) for name, each in nodes.items()]

        def mkdir(self, path: str, mode: int) -> int:
            with power.lock:
                is_cut = power.change(f"mkdir {path}")
                tree.make_directory(path, mode)
                return self._done(is_cut)

        def rmdir(self, path: str) -> int:
            with power.lock:
                is_cut = power.change(f"rmdir {path}")
                tree.remove_directory(path)
                return self._done(is_cut)

        def unlink(self, path: str) -> int:
            with power.lock:
                is_cut = power.change(f"unlink {path}")
                tree.unlink(path)
                return self._done(is_cut)

        def rename(self, old: str, new: str) -> int:
            with power.lock:
                is_cut = power.change(f"rename {old} to {new}")
                tree.rename(old, new)
                return self._done(is_cut)

        def create(self, path: str, mode: int, fi: int | None = None) -> int:
            with power.lock:
                is_cut = power.change(f"create {path}")
                handle = self._opened(tree.create(path, mode))
                self._done(is_cut)
                return handle

        def open(self, path: str, flags: int) -> int:
            with power.lock:
                self._require_power()
                file = tree.file(path)
                if flags & os.O_TRUNC and file.data:
                    is_cut = power.change(f"truncate {path}")
                    file.resize(0)
                    self._done(is_cut)
                return self._opened(file)

        def release(self, path: str, fh: int) -> int:
            with power.lock:
                self._open.pop(fh, None)
                return 0

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            with power.lock:
                self._require_power()
                node = self._node(path, fh)
                assert isinstance(node, File)
                return bytes(node.data[offset : offset + size])

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            with power.lock:
                is_cut = power.change(f"write {path}")
                node = self._node(path, fh)
                assert isinstance(node, File)
                node.write(offset, data)
                self._done(is_cut)
                return len(data)

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            with power.lock:
                is_cut = power.change(f"truncate {path}")
                node = self._node(path, fh)
                assert isinstance(node, File)
                node.resize(length)
                return self._done(is_cut)

        def fsync(self, path: str, datasync: int, fh: int) -> int:
            return self._sync(path, fh)

        def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
            return self._sync(path, None)

        def chmod(self, path: str, mode: int) -> int:
            with power.lock:
                self._require_power()
                node = tree.find(path)
                node.mode = stat.S_IFMT(node.mode) | stat.S_IMODE(mode)
                return 0

        def chown(self, path: str, uid: int, gid: int) -> int:
            return 0

        def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
            return 0

        def _sync(self, path: str, handle: int | None) -> int:
            with power.lock:
                node = self._node(path, handle)
                is_cut = power.change(f"sync {path}", node)
                if not is_cut:
                    tree.sync(node)
                return self._done(is_cut)

        def _opened(self, file: File) -> int:
            self._handle += 1
            self._open[self._handle] = file
            return self._handle

        def _node(self, path: str, handle: int | None) -> Node:
            return self._open[handle] if handle in self._open else tree.find(path)

        def _require_power(self) -> None:
            if power.is_cut:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        def _done(self, is_cut: bool) -> int:
            if is_cut:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return 0

    return Operations()


def why_not() -> str:
    """Return why no file system can be mounted here; empty if one can."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "there is no /dev/fuse, or no right to use it"
    if os.geteuid() != 0:
        return "mounting takes root"
    try:
        import mfusepy  # noqa: F401
    except ImportError:
        return "mfusepy is not installed (pip install 'sparseps[test]')"
    except (OSError, AttributeError) as error:
        return f"{error} (.ci/install-tools powercuts)"
    return ""


class _Server:
    """Serves the tree at a directory until its orders end."""

    def __init__(self, path: Path, seed: int) -> None:
        self._path = path
        self._power = Power(Tree(), random.Random(seed), self._tell)
        self._telling = threading.Lock()

    def run(self) -> None:
        """Mount and serve; to be called by the main thread. The mount stays over all cuts, since others may copy it."""
        import mfusepy

        threading.Thread(target=self._take_orders, daemon=True).start()
        mfusepy.FUSE(
            _operations(self._power, lambda: self._tell(mounted=True)),
            str(self._path),
            foreground=True,
            nothreads=True,
            use_ino=True,
            fsname="forgetful",
            entry_timeout=0,  # a cut changes names and sizes behind the kernel's back
            attr_timeout=0,
        )

    def _take_orders(self) -> None:
        for line in sys.stdin:
            order: dict[str, Any] = json.loads(line)
            what = order.pop("order")
            if what == "come back":
                self._power.come_back(**order)
            elif what == "arm":
                self._power.arm(**order)
            else:
                self._power.cut_now()
            self._tell(done=what)
        ctypes.CDLL(None).umount2(os.fsencode(self._path), _DETACH)
        os._exit(0)  # a copy of the mount in another namespace would keep libfuse going

    def _tell(self, **what: Any) -> None:
        with self._telling:
            print(json.dumps(what), flush=True)


def main() -> int:
    """Mount and serve; 1 if that cannot be done here."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for the campaign: this process ends with its input
    if why := why_not():
        print(json.dumps({"refused": why}), flush=True)
        return 1
    try:
        _Server(Path(sys.argv[1]), int(sys.argv[2])).run()
    except RuntimeError as error:
        print(json.dumps({"refused": f"libfuse ended with {error}"}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
