"""A directory of safetensors files that follows: whoever opens its index reads one whole version.

``model.safetensors.index.json`` names the files, as checkpoints of several files have it, and is replaced by a rename
once they are on the disk. No file changes under its name: a new version is a copy with the changed values written into
it, under another name. The files of the version before stay, for whoever reads them.
"""

import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from psclient.errors import ConfigurationError
from psclient.reader.sink import Sink, StagedCut, reader_dtype
from pscore.files import make_folder, put_in_place, sync
from pscore.model import modelfile
from pscore.model.buffers import pack
from pscore.model.digest import ModelDigest, total, words_of
from pscore.model.layout import WORDS, ModelLayout, Span, TensorSpec
from pscore.model.sparse_slice import SparseSlice, by_tensor
from pscore.reader.cut import Cut
from pscore.reader.transfer import digest_of_buffers

INDEX = "model.safetensors.index.json"
_LOCK = ".follow.lock"
_OURS = re.compile(r"\.?model-v\d+-[0-9a-f]{6}-(\d{5}-of-\d{5}|buffers)\.safetensors(\.tmp)?")
_KEY = "sparseps"  # of the index's metadata
_LARGEST_BYTES = 2 << 30  # of a file, unless one tensor is larger
_BLOCK = 1 << 22  # elements that are read at a time


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of one version: those of parameters, in layout order, and that of the buffers; empty for none."""

    names: tuple[str, ...]
    buffers: str = ""

    def all(self) -> set[str]:
        return {*self.names, self.buffers} - {""}


class DirectorySink(Sink):
    """Holds a cut in a directory, which is made if it is missing.

    Args:
        path: of the directory.
        dtype: in which the files have the run's fp32 parameters: float16 or bfloat16; ``None``: as the run.

    Raises:
        ConfigurationError: the directory cannot be made, has a model of another program, or another follower writes to
            it; or another ``dtype`` is named.
    """

    def __init__(self, path: str | Path, dtype: torch.dtype | None = None) -> None:
        self.path, self._dtype = Path(path), reader_dtype(dtype)
        self._lock = -1
        if not str(path):
            raise ConfigurationError("name a directory to follow with: the name is empty")
        try:
            self._index()
            self._make()
        except OSError as error:
            raise ConfigurationError(f"cannot follow with the directory {path}: {error}; name another") from error
        self._layout: ModelLayout | None = None
        self._groups: list[range] = []  # of positions of parameters, one a file
        self._held: Cut | None = None
        self._files = _Files(())
        self._staged: tuple[Cut, _Files] | None = None
        self._before: set[str] = set()  # files of the version before
        self._named: set[str] = set()  # files that the index names
        self._known_begins: dict[int, tuple[tuple[int, int, int], NDArray[np.int64]]] = {}  # of a group's last file

    def dtype(self, layout: ModelLayout | None) -> torch.dtype | None:
        """Return the type that the files have."""
        return self._dtype

    def open(self, layout: ModelLayout) -> Cut | None:
        """Read the directory; return the cut that the index names, if its files are whole."""
        self._make()
        self._layout, self._groups, self._known_begins = layout, _grouped(layout), {}
        self._held, self._files = self._found(layout)
        self._named = self._names_of_index()
        self._remove_others()
        return self._held

    def is_current(self) -> bool:
        """Tell whether the index is there; one that somebody has removed is written anew."""
        return self._held is None or (self.path / INDEX).exists()

    def buffers(self) -> bytes:
        """Return the buffers in their file."""
        return self._packed(self._files) if self._files.buffers else b""

    def read(self, entries: SparseSlice) -> SparseSlice:
        """Return the values in the files at the places of these entries."""
        layout = self._layout
        assert layout is not None
        values = torch.empty(entries.entries, dtype=layout.value_dtype, device="cpu")
        for name, group in zip(self._files.names, self._groups, strict=True):
            begins = self._begins(self.path / name, group)
            for dtype, words, first, last, where in self._parts(self.path / name, begins, group, entries, "r"):
                held = torch.from_numpy(np.array(words[where]))
                values[first:last] = held.view(dtype).float() if not layout.word_bytes else held.view(values.dtype)
        return SparseSlice(entries.span, entries.offsets, values)

    def tensors(self) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        """Yield all parameters and buffers of the files, each whole."""
        layout, files = self._layout, self._files
        assert layout is not None
        for name, group in zip(files.names, self._groups, strict=True):
            yield from self._loaded(name, [layout.parameters[position] for position in group])
        if files.buffers:
            yield from self._loaded(files.buffers, layout.buffers)

    def stage(self, staged: StagedCut) -> None:
        """Write the files of the new version, under new names."""
        layout = self._layout
        assert layout is not None
        number, count = f"v{staged.cut.version:012d}-{secrets.token_hex(3)}", len(self._groups)
        names = [*self._files.names] if not staged.is_whole else [""] * count
        buffers = self._files.buffers
        for index, group in enumerate(self._groups):
            span = Span(layout.offsets[group.start], layout.offsets[group.stop])
            changes = [part for change in staged.changes if (part := change.clip(span)) is not None]
            if not changes and names[index]:
                continue
            new = f"model-{number}-{index + 1:05d}-of-{count:05d}.safetensors"
            temporary = self.path / f".{new}.tmp"
            begins = None
            if names[index]:
                begins = self._begins(self.path / names[index], group)
                shutil.copyfile(self.path / names[index], temporary)
                for change in changes:
                    self._write(temporary, begins, group, change)
            else:
                tensors = {layout.parameters[position].name: _zeros(layout.parameters[position]) for position in group}
                for change in changes:
                    for position, part in by_tensor(layout, change):
                        tensor = tensors[layout.parameters[position].name]
                        if layout.word_bytes:
                            tensor = words_in(tensor, layout.value_dtype)
                        _fill(tensor, layout.offsets[position], part)
                modelfile.save(temporary, tensors, {"format": "pt"})
            put_in_place(temporary, self.path / new)
            if begins is not None:
                self._known_begins[group.start] = _identity(self.path / new), begins
            names[index] = new
        if staged.buffers is not None:
            buffers = f"model-{number}-buffers.safetensors"
            tensors = {spec.name: value for spec, value in zip(layout.buffers, staged.buffers, strict=True)}
            modelfile.save(self.path / f".{buffers}.tmp", tensors, {"format": "pt"})
            put_in_place(self.path / f".{buffers}.tmp", self.path / buffers)
        files = _Files(tuple(names), buffers)
        temporary = self.path / f".{INDEX}.tmp"
        temporary.write_text(json.dumps(self._described(staged.cut, files), separators=(",\n", ": ")), encoding="utf-8")
        sync(temporary)  # now, so that all shards' versions are committed at about the same time
        self._staged = staged.cut, files

    def commit(self) -> None:
        """Rename the index."""
        assert self._staged is not None
        put_in_place(self.path / f".{INDEX}.tmp", self.path / INDEX)
        self._before = self._files.all()
        self._held, self._files = self._staged
        self._named, self._staged = self._files.all(), None
        self._remove_others()

    def abort(self) -> None:
        """Remove what was written for the new version."""
        self._staged = None
        (self.path / f".{INDEX}.tmp").unlink(missing_ok=True)
        self._remove_others()

    def close(self) -> None:
        """Let another follower write to the directory."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _make(self) -> None:
        """Make the directory if it is not there, and lock it if its lock is not ours."""
        make_folder(self.path)
        if self._lock >= 0:
            try:
                if os.path.samestat(os.fstat(self._lock), (self.path / _LOCK).stat()):
                    return
            except FileNotFoundError:
                pass
            self.close()
        lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ConfigurationError(
                f"another follower writes to {self.path}: give each a directory of its own"
            ) from None
        self._lock = lock

    def _packed(self, files: _Files) -> bytes:
        """Read the file of the buffers."""
        assert self._layout is not None
        return pack(value for _, value in self._loaded(files.buffers, self._layout.buffers))

    def _loaded(self, name: str, specs: Sequence[TensorSpec]) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        """Yield tensors of a file."""
        try:
            with safe_open(self.path / name, "pt") as file:
                for spec in specs:
                    yield spec, file.get_tensor(spec.name)
        except SafetensorError as error:
            raise OSError(f"cannot read {self.path / name}: {error}") from error

    def _found(self, layout: ModelLayout) -> tuple[Cut | None, _Files]:
        """Return the cut in the directory and its files; no cut if it is of another model, or damaged."""
        nothing = None, _Files(())
        found = self._index()
        if found is None:
            return nothing
        try:
            self.last = cut = Cut.from_plain(found)
            files = _Files(tuple(map(str, found["files"])), str(found["buffers"]))
            if found["fingerprint"] != layout.fingerprint.hex():
                held = f"version {cut.version} of run {cut.run_id}, of another model or in another data type"
                raise ConfigurationError(f"{self.path} holds {held}: name another directory")
            if len(files.names) != len(self._groups) or not all(_OURS.fullmatch(name) for name in files.all()):
                return nothing
            is_whole = self._digest(layout, files, len(cut.shards)) == [shard.digest for shard in cut.shards]
            is_whole &= not files.buffers or digest_of_buffers(self._packed(files)) == cut.buffers_digest
        except ConfigurationError:
            raise
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return nothing
        return (cut, files) if is_whole else nothing

    def _index(self) -> dict[str, Any] | None:
        """Return what the index says of the cut; ``None`` without an index.

        Raises :class:`ConfigurationError` if the directory has a model of another program.
        """
        try:
            index = json.loads((self.path / INDEX).read_text(encoding="utf-8"))
        except FileNotFoundError:
            if (self.path / "model.safetensors").exists():
                raise ConfigurationError(
                    f"{self.path} holds a model.safetensors of another program: name another directory"
                ) from None
            return None
        except ValueError:
            index = None
        found = index.get("metadata", {}).get(_KEY) if isinstance(index, dict) else None
        if not isinstance(found, dict):
            raise ConfigurationError(f"{self.path / INDEX} is of another program: name another directory")
        return found

    def _names_of_index(self) -> set[str]:
        """Return the files that the index names, whole or not: others may read them."""
        try:
            index = json.loads((self.path / INDEX).read_text(encoding="utf-8"))
            return set(map(str, index["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return set()

    def _digest(self, layout: ModelLayout, files: _Files, shards: int) -> list[bytes]:
        before, self._files = self._files, files
        try:
            digests = []
            for span in layout.shard_spans(shards):
                digest = ModelDigest(layout)
                for start in range(span.start, span.end, _BLOCK):
                    part = Span(start, min(span.end, start + _BLOCK))
                    digest.add(
                        self.read(SparseSlice(part, None, torch.empty(part.length, dtype=torch.float32, device="cpu")))
                    )
                digests.append(digest.value)
            return digests
        finally:
            self._files = before

    def _described(self, cut: Cut, files: _Files) -> dict[str, Any]:
        """Return the index of a version."""
        layout = self._layout
        assert layout is not None
        specs = [
            (layout.parameters[n], name) for name, group in zip(files.names, self._groups, strict=True) for n in group
        ]
        specs += [(spec, files.buffers) for spec in layout.buffers if files.buffers]
        about = {
            "version": cut.version,
            "weight_version": cut.weight_version,
            "digest": total([shard.digest for shard in cut.shards]).hex(),
            **cut.to_plain(),
            "fingerprint": layout.fingerprint.hex(),
            "files": files.names,
            "buffers": files.buffers,
            "aliases": {alias: spec.name for spec in layout.parameters for alias in spec.aliases},
        }
        size = sum(spec.nbytes for spec, _ in specs)
        return {"metadata": {"total_size": size, _KEY: about}, "weight_map": {spec.name: name for spec, name in specs}}

    def _write(self, path: Path, begins: NDArray[np.int64], group: range, change: SparseSlice) -> None:
        for dtype, words, first, last, where in self._parts(path, begins, group, change, "r+"):
            values = change.values[first:last]
            words[where] = words_of(values if values.dtype in WORDS.values() else values.to(dtype)).astype(words.dtype)

    def _parts(
        self, path: Path, begins: NDArray[np.int64], group: range, entries: SparseSlice, mode: Any
    ) -> Iterator[tuple[torch.dtype, NDArray[Any], int, int, slice | NDArray[np.int64]]]:
        """Yield the words of a file in a data type, which entries lie there, and where.

        That is one tensor if all its elements follow one another, and else all neighbours of a data type.
        """
        layout = self._layout
        assert layout is not None
        common = entries.span.intersect(Span(layout.offsets[group.start], layout.offsets[group.stop]))
        if not common.length:
            return
        base, places = entries.span.start, layout.positions(common)
        edges = np.array(layout.offsets[places.start : places.stop + 1])
        cuts = edges.clip(common.start, common.end) - base
        offsets = None if entries.offsets is None else entries.offsets.numpy()
        bounds = cuts if offsets is None else np.searchsorted(offsets, cuts)
        raw, numbers = np.memmap(path, np.uint8, mode), np.flatnonzero(np.diff(bounds))
        for dtype, found in groupby(numbers.tolist(), lambda number: self._dtype_of(places.start + number)):
            width = layout.word_bytes or dtype.itemsize
            words = raw[: raw.size // width * width].view(f"u{width}")
            here = np.array([*found])
            shifts = begins[here + (places.start - group.start)] // width + base - edges[here]
            if offsets is None:
                for number, shift in zip(here.tolist(), shifts.tolist(), strict=True):
                    first, last = int(bounds[number]), int(bounds[number + 1])
                    yield dtype, words, first, last, slice(first + shift, last + shift)
            else:
                first, last = int(bounds[here[0]]), int(bounds[here[-1] + 1])
                yield dtype, words, first, last, offsets[first:last] + np.repeat(shifts, np.diff(bounds)[here])
        if mode != "r":
            raw.flush()

    def _dtype_of(self, position: int) -> torch.dtype:
        """Return in which data type the words of a parameter are read and written: in a feed that of its words."""
        assert self._layout is not None
        return self._layout.value_dtype if self._layout.word_bytes else self._layout.parameters[position].dtype

    def _begins(self, path: Path, group: range) -> NDArray[np.int64]:
        """Return where each tensor of a file begins, in bytes; raises ``OSError`` if one is not there whole."""
        layout, file = self._layout, _identity(path)
        assert layout is not None
        known = self._known_begins.get(group.start)
        if known is not None and known[0] == file:
            return known[1]
        try:
            header, data = _header(path)
        except ValueError as error:
            raise OSError(f"{path} is damaged: {error}") from error
        begins = np.empty(len(group), np.int64)
        for number, position in enumerate(group):
            spec = layout.parameters[position]
            begin, end = header.get(spec.name, {}).get("data_offsets", (0, 0))
            is_odd = (data + begin) % self._dtype_of(position).itemsize
            if end - begin != spec.nbytes or data + end > file[1] or is_odd:
                raise OSError(f"{path} is damaged: {spec.name} is not whole")
            begins[number] = data + begin
        self._known_begins[group.start] = file, begins
        return begins

    def _remove_others(self) -> None:
        """Remove what no version needs: that before stays, for whoever reads it."""
        kept = self._files.all() | self._before | self._named
        for found in self.path.iterdir():
            if _OURS.fullmatch(found.name) and found.name not in kept:
                found.unlink(missing_ok=True)


def _grouped(layout: ModelLayout) -> list[range]:
    """Return the positions of the parameters of each file."""
    groups, start, size = [], 0, 0
    for position, spec in enumerate(layout.parameters):
        if size and size + spec.nbytes > _LARGEST_BYTES:
            groups.append(range(start, position))
            start, size = position, 0
        size += spec.nbytes
    return [*groups, range(start, len(layout.parameters))]


def _zeros(spec: TensorSpec) -> torch.Tensor:
    octets = torch.zeros(spec.nbytes, dtype=torch.uint8, device="cpu")
    return octets.view(spec.dtype).view(spec.shape)


def _fill(tensor: torch.Tensor, start: int, change: SparseSlice) -> None:
    first = change.span.start - start
    where = slice(first, first + change.span.length) if change.offsets is None else change.offsets + first
    tensor.view(-1)[where] = change.values.to(tensor.dtype)


def words_in(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous tensor's memory as words, flat."""
    return tensor.detach().view(-1).view(dtype)


def _identity(path: Path) -> tuple[int, int, int]:
    """Return what is another if somebody has written to a file: its inode, size and time."""
    state = path.stat()
    return state.st_ino, state.st_size, state.st_mtime_ns


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and where its data begin."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(size)), 8 + size
