"""A disk in memory that dies at any write, and then loses, cuts and reorders what was not synced."""

import errno
import io

import safetensors.torch

from psservice.storage import tensor_file
from psservice.storage.files import Files, Place

SECTOR = 32  # smaller than any real one, so that records of a small model cross the borders of several


class Crash(BaseException):
    """The process is dead; the disk raises this at every call until :meth:`MemoryDisk.restart`."""


class File:
    """Contents in the page cache, and what has reached the disk."""

    def __init__(self):
        self.data, self.durable = bytearray(), b""
        self.pending = []  # functions of a bytearray, since the last sync
        self.locked = False

    def sync(self):
        self.durable, self.pending = bytes(self.data), []

    def after_a_power_cut(self, random):
        kept, pending = bytearray(self.durable), self.pending
        if random.random() < 0.5 and not any(change.is_cut for change in pending):
            pending = [change for change in pending if random.random() < 0.7]
        else:
            pending = pending[: random.randint(0, len(pending))]
        for change in pending:
            change(kept)
        self.data, self.locked = kept, False
        self.sync()


class Write:
    """One sector, or less, of a write."""

    is_cut = False

    def __init__(self, offset, data):
        self.offset, self.data = offset, data

    def __call__(self, contents):
        contents.extend(bytes(max(0, self.offset - len(contents))))
        contents[self.offset : self.offset + len(self.data)] = self.data


class Cut:
    is_cut = True

    def __init__(self, size):
        self.size = size

    def __call__(self, contents):
        del contents[self.size :]


class Directory:
    """Entries by name; a change is a dict of names to nodes, or to ``None``."""

    def __init__(self):
        self.entries, self.durable, self.pending = {}, {}, []

    def change(self, change):
        self.pending.append(change)
        self._apply(self.entries, change)

    @staticmethod
    def _apply(entries, change):
        for name, node in change.items():
            entries.pop(name, None)
            if node is not None:
                entries[name] = node

    def sync(self):
        self.durable, self.pending = dict(self.entries), []

    def after_a_power_cut(self, random):
        kept = dict(self.durable)
        for change in self.pending:
            if random.random() < 0.5:
                self._apply(kept, change)
        self.entries = kept
        self.sync()
        for node in kept.values():
            node.after_a_power_cut(random)


class Handle:
    """Stands for :class:`psservice.storage.files.OpenFile`."""

    def __init__(self, disk, file):
        self._disk, self._file = disk, file

    def lock(self):
        self._disk.step("lock")
        if self._file.locked:
            raise BlockingIOError(errno.EAGAIN, "locked")
        self._file.locked = True

    def append(self, parts):
        self._disk.put(self._file, b"".join(parts))

    def overwrite(self, data):
        self._disk.step("overwrite")
        self._disk.change(self._file, Write(0, data))

    def cut(self, size):
        self._disk.step("cut")
        self._disk.change(self._file, Cut(size))

    def sync(self):
        self._disk.sync_node(self._file)

    def place(self):
        return Place(id(self._file))

    def close(self):
        self._file.locked = False


class MemoryDisk(Files):
    """The files of one machine.

    Attributes:
        fuse: calls that still succeed before the process dies; ``None`` for all.
        full_share: share of the writes that find no room, after a part of their bytes.
    """

    def __init__(self, random):
        self.random, self.root = random, Directory()
        self.fuse, self.dead, self.full_share, self.boots = None, False, 0.0, 1

    # Life and death

    def step(self, call):
        """Count one call; raise where the process dies before it is done, or is dead."""
        if self.fuse is not None:
            self.fuse -= 1
            self.dead |= self.fuse < 0
        if self.dead:
            raise Crash(call)

    def restart(self, *, power_cut):
        self.dead, self.fuse = False, None
        if power_cut:
            self.boots += 1
            self.root.after_a_power_cut(self.random)
        self._unlock(self.root)

    def _unlock(self, directory):
        for node in directory.entries.values():
            if isinstance(node, Directory):
                self._unlock(node)
            else:
                node.locked = False

    # Changes

    def change(self, file, change):
        file.pending.append(change)
        change(file.data)

    def put(self, file, data):
        """Write behind the end: all, or a part where the process dies or the disk is full."""
        full = self.random.random() < self.full_share
        try:
            self.step("append")
        except Crash:
            if self.fuse is not None and self.fuse == -1:
                self._append(file, data[: self.random.randint(0, len(data))])
            raise
        self._append(file, data[: self.random.randint(0, len(data) - 1)] if full and data else data)
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")

    def _append(self, file, data):
        while data:
            offset = len(file.data)
            size = SECTOR - offset % SECTOR
            self.change(file, Write(offset, data[:size]))
            data = data[size:]

    def sync_node(self, node):
        try:
            self.step("sync")
        except Crash:
            if self.fuse == -1 and self.random.random() < 0.5:
                node.sync()  # died behind it
            raise
        node.sync()

    # The interface

    def _find(self, path):
        node = self.root
        for name in path.parts[1:]:
            if not isinstance(node, Directory) or name not in node.entries:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
            node = node.entries[name]
        return node

    def _create(self, path):
        file = File()
        self._find(path.parent).change({path.name: file})
        return file

    def _has(self, path):
        try:
            self._find(path)
        except FileNotFoundError:
            return False
        return True

    def open_new(self, path):
        self.step("create")
        if self._has(path):
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        return Handle(self, self._create(path))

    def open_end(self, path):
        self.step("open")
        return Handle(self, self._find(path))

    def open_lock(self, path):
        self.step("create")
        return Handle(self, self._find(path) if self._has(path) else self._create(path))

    def open(self, path):
        if self.dead:
            raise Crash("open")
        return io.BytesIO(bytes(self._find(path).data))

    def list(self, directory):
        if self.dead:
            raise Crash("list")
        return sorted(self._find(directory).entries) if self._has(directory) else []

    def make_directory(self, path):
        self.step("mkdir")
        for at in [*reversed(path.parents), path][1:]:
            if not self._has(at):
                self._find(at.parent).change({at.name: Directory()})

    def write(self, path, data):
        self.step("create")
        self.put(self._create(path), data)

    def save_tensors(self, path, tensors):
        file = io.BytesIO()
        tensor_file.write(file, tensors)
        self.write(path, file.getvalue())

    def load_tensors(self, path):
        with self.open(path) as file:
            return safetensors.torch.load(file.read())

    def rename(self, path, to):
        self.step("rename")
        node = self._find(path)
        if self._has(to):
            raise FileExistsError(errno.EEXIST, "File exists", str(to))
        self._find(path.parent).change({path.name: None, to.name: node})

    def remove(self, path):
        self.step("remove")
        if self._has(path):
            self._find(path.parent).change({path.name: None})

    def remove_empty(self, directory):
        self.step("rmdir")
        if self._find(directory).entries:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(directory))
        self._find(directory.parent).change({directory.name: None})

    def cut(self, path, size):
        self.step("cut")
        self.change(self._find(path), Cut(size))

    def sync(self, path):
        self.sync_node(self._find(path))

    def place(self, path):
        return Place(id(self._find(path)))

    def boot_id(self):
        return f"boot-{self.boots}"
