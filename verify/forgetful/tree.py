"""Files and directories of which a power cut leaves what was synced, and of the rest what a disk may have written.

A file's contents are durable with its ``fsync``, a name with the ``fsync`` of its directory. Of the rest two kinds of
file system keep:

* ``any``: of each sector any earlier content since the sync, and any subset of the changes of names. POSIX promises no
  more than that.
* ``journaled``: of each file a prefix of what was written, cut at a sector, and a prefix of all changes of names; any
  ``fsync`` makes all earlier changes of names durable. So do ext4 and XFS with files that grow.
"""

import errno
import os
import random
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

SECTOR_BYTES = 512
"""What a disk writes whole or not at all."""

Kind = Literal["any", "journaled"]


@dataclass(frozen=True, slots=True)
class _Write:
    """Bytes of one sector."""

    offset: int
    data: bytes

    def apply(self, contents: bytearray) -> None:
        if len(contents) < self.offset:
            contents.extend(bytes(self.offset - len(contents)))
        contents[self.offset : self.offset + len(self.data)] = self.data


@dataclass(frozen=True, slots=True)
class _Resize:
    """Another size; new bytes are zero."""

    size: int

    def apply(self, contents: bytearray) -> None:
        del contents[self.size :]
        contents.extend(bytes(self.size - len(contents)))


@dataclass(slots=True)
class Node:
    """A file or a directory.

    Attributes:
        number: of the inode.
        mode: type and permissions, as in ``st_mode``. They are durable at once.
    """

    number: int
    mode: int


@dataclass(slots=True)
class File(Node):
    """A file.

    Attributes:
        data: its contents, as every process sees them.
    """

    data: bytearray = field(default_factory=bytearray)
    _durable: bytearray = field(default_factory=bytearray)
    _pending: list[_Write | _Resize] = field(default_factory=list)

    def write(self, offset: int, data: bytes) -> None:
        position = 0
        while position < len(data):
            size = SECTOR_BYTES - (offset + position) % SECTOR_BYTES
            change = _Write(offset + position, data[position : position + size])
            change.apply(self.data)
            self._pending.append(change)
            position += size

    def resize(self, size: int) -> None:
        change = _Resize(size)
        change.apply(self.data)
        self._pending.append(change)

    def sync(self) -> None:
        """Make the contents durable."""
        for change in self._pending:
            change.apply(self._durable)
        self._pending.clear()

    def forget(self, rng: random.Random, kind: Kind) -> None:
        """Keep what was synced, and of the rest what a disk of this kind may have written."""
        for change in self._kept(rng, kind):
            change.apply(self._durable)
        self._pending.clear()
        self.data = bytearray(self._durable)

    def _kept(self, rng: random.Random, kind: Kind) -> list[_Write | _Resize]:
        pending = self._pending
        if kind == "journaled" or any(isinstance(change, _Resize) for change in pending):
            return pending[: _drawn(rng, len(pending))]
        by_sector: dict[int, list[_Write]] = {}
        for change in pending:
            assert isinstance(change, _Write)
            by_sector.setdefault(change.offset // SECTOR_BYTES, []).append(change)
        return [change for changes in by_sector.values() for change in changes[: _drawn(rng, len(changes))]]


def _drawn(rng: random.Random, count: int) -> int:
    """Draw how many of the first changes a disk has written: all and none are as likely as something between."""
    return rng.choice((0, count, rng.randint(0, count)))


@dataclass(slots=True)
class Directory(Node):
    """A directory.

    Attributes:
        entries: nodes by name, as every process sees them.
    """

    entries: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Renaming:
    """One change of names, by directory: each name has another node behind it, or none."""

    changes: tuple[tuple[Directory, Mapping[str, Node | None]], ...]

    def apply(self, entries: Literal["entries", "durable"]) -> None:
        for directory, changed in self.changes:
            names: dict[str, Node] = getattr(directory, entries)
            for name, node in changed.items():
                names.pop(name, None)
                if node is not None:
                    names[name] = node

    def is_of(self, directory: Directory) -> bool:
        return any(changed is directory for changed, _ in self.changes)


class Tree:
    """A file system in memory; each method raises ``OSError`` as its system call does. Not thread-safe.

    Attributes:
        kind: what a cut leaves. It may be another one after each cut, since everything is durable then.
    """

    def __init__(self, kind: Kind = "any") -> None:
        self.kind: Kind = kind
        self._numbers = count(1)
        self.root = Directory(next(self._numbers), stat.S_IFDIR | 0o755)
        self._pending: list[_Renaming] = []

    def find(self, path: str) -> Node:
        node: Node = self.root
        for name in _names(path):
            if not isinstance(node, Directory):
                raise _error(errno.ENOTDIR, path)
            if name not in node.entries:
                raise _error(errno.ENOENT, path)
            node = node.entries[name]
        return node

    def file(self, path: str) -> File:
        node = self.find(path)
        if not isinstance(node, File):
            raise _error(errno.EISDIR, path)
        return node

    def directory(self, path: str) -> Directory:
        node = self.find(path)
        if not isinstance(node, Directory):
            raise _error(errno.ENOTDIR, path)
        return node

    def create(self, path: str, mode: int) -> File:
        """Make an empty file; the name must be free."""
        file = File(next(self._numbers), stat.S_IFREG | stat.S_IMODE(mode))
        self._add(path, file)
        return file

    def make_directory(self, path: str, mode: int) -> None:
        self._add(path, Directory(next(self._numbers), stat.S_IFDIR | stat.S_IMODE(mode)))

    def unlink(self, path: str) -> None:
        self.file(path)
        parent, name = self._place(path)
        self._change((parent, {name: None}))

    def remove_directory(self, path: str) -> None:
        if self.directory(path).entries:
            raise _error(errno.ENOTEMPTY, path)
        parent, name = self._place(path)
        self._change((parent, {name: None}))

    def rename(self, path: str, to: str) -> None:
        """Give a node another name, at once; a file or an empty directory that has the name loses it."""
        node = self.find(path)
        (parent, name), (other, new) = self._place(path), self._place(to)
        replaced = other.entries.get(new)
        if replaced is node:
            return
        if isinstance(replaced, Directory) and not isinstance(node, Directory):
            raise _error(errno.EISDIR, to)
        if isinstance(node, Directory) and replaced is not None:
            if not isinstance(replaced, Directory):
                raise _error(errno.ENOTDIR, to)
            if replaced.entries:
                raise _error(errno.ENOTEMPTY, to)
        if parent is other:
            self._change((parent, {name: None, new: node}))
        else:
            self._change((parent, {name: None}), (other, {new: node}))

    def sync(self, node: Node) -> None:
        """Make a file's contents, or the names in a directory, durable."""
        if isinstance(node, File):
            node.sync()
        waiting: list[_Renaming] = []
        for renaming in self._pending:
            if self.kind == "journaled" or (isinstance(node, Directory) and renaming.is_of(node)):
                renaming.apply("durable")
            else:
                waiting.append(renaming)
        self._pending = waiting

    def forget(self, rng: random.Random) -> None:
        """Cut the power: keep what was synced, and of the rest what the disk may have written."""
        if self.kind == "journaled":
            kept = self._pending[: _drawn(rng, len(self._pending))]
        else:
            share = rng.choice((0.0, 0.3, 0.7, 1.0))
            kept = [renaming for renaming in self._pending if rng.random() < share]
        for renaming in kept:
            renaming.apply("durable")
        self._pending = []
        self._forget_below(self.root, rng, set())

    def _forget_below(self, directory: Directory, rng: random.Random, done: set[int]) -> None:
        directory.entries = dict(directory.durable)
        for node in directory.entries.values():
            if node.number in done:  # of two names of one rename between directories, both may be left
                continue
            done.add(node.number)
            if isinstance(node, Directory):
                self._forget_below(node, rng, done)
            elif isinstance(node, File):
                node.forget(rng, self.kind)

    def _add(self, path: str, node: Node) -> None:
        parent, name = self._place(path)
        if name in parent.entries:
            raise _error(errno.EEXIST, path)
        self._change((parent, {name: node}))

    def _place(self, path: str) -> tuple[Directory, str]:
        """Return the directory of a name, and the name."""
        above, _, name = path.rstrip("/").rpartition("/")
        if not name:
            raise _error(errno.EBUSY, path)
        return self.directory(above), name

    def _change(self, *changes: tuple[Directory, Mapping[str, Node | None]]) -> None:
        renaming = _Renaming(changes)
        renaming.apply("entries")
        self._pending.append(renaming)


def _names(path: str) -> Iterator[str]:
    return (name for name in path.split("/") if name)


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
