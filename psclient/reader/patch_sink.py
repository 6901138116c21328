"""A receiver of patches: an engine that takes changes of tensors by name, and cannot undo them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from psclient.errors import ConfigurationError
from psclient.reader.directory_sink import DirectorySink
from psclient.reader.sink import Sink, StagedCut, reader_dtype
from pscore.model.layout import ModelLayout, TensorSpec
from pscore.model.modelfile import in_own_dtype
from pscore.model.sparse_slice import SparseSlice, by_tensor
from pscore.reader.cut import Cut


@dataclass(frozen=True, slots=True)
class Patch:
    """New values of a tensor, as vLLM's ``CheckpointWeightPatch`` has them.

    Attributes:
        name: of the tensor in the run.
        shape, dtype: of the whole tensor.
        values: ``[k]`` in that dtype, on the host; all of them in the tensor's shape if there are no indices.
        indices: int64 ``[k]``, strictly ascending, in the flat tensor; ``None``: every element.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor
    indices: torch.Tensor | None


class PatchReceiver(Protocol):
    """What takes patches. It is called from the follower's thread."""

    def stage(self, cut: Cut, patches: Sequence[Patch]) -> None:
        """Get everything ready that can fail, without a change that anybody sees."""

    def commit(self, cut: Cut) -> None:
        """Apply what is staged. If this raises, the model counts as poisoned until all of it has been sent again."""

    def abort(self) -> None:
        """Drop what is staged, if anything is."""


class PatchSink(Sink):
    """Hands patches to a receiver. What that holds cannot be read, and a commit that fails half-way cannot be undone.

    With a directory the follower keeps a copy of the model there, one version with the receiver's: what is read is read
    from it, and a receiver that does not hold its version (a new one, or one that is poisoned) gets all tensors from
    it, checked by their digest. Without one, or if the files are damaged, the whole model comes from the server, and
    differences are checked by their checksum alone.

    Args:
        receiver: of the patches.
        dtype: in which it takes the run's fp32 parameters: float16 or bfloat16; ``None``: as the run has them.
        directory: of the copy; made and written as a :class:`DirectorySink` does it, and for others to read too.

    Raises:
        ConfigurationError: the receiver has not all three methods, or the directory or ``dtype`` cannot be used.
    """

    def __init__(
        self, receiver: PatchReceiver, dtype: torch.dtype | None = None, directory: str | Path | None = None
    ) -> None:
        if not all(hasattr(receiver, name) for name in ("stage", "commit", "abort")):
            raise ConfigurationError(
                f"what follows must have stage, commit and abort, or be a DirectorySink, not {type(receiver).__name__};"
                " a module follows with psclient.follow(server, module)"
            )
        self._receiver, self._dtype = receiver, reader_dtype(dtype)
        self._copy = DirectorySink(directory, dtype) if directory is not None else None
        self._held: Cut | None = None  # by the receiver
        self._cut: Cut | None = None
        self._fingerprint = b""

    def dtype(self, layout: ModelLayout | None) -> torch.dtype | None:
        """Return the data type that was asked for."""
        return self._dtype

    def open(self, layout: ModelLayout) -> Cut | None:
        """Return the cut that the receiver holds; with a directory, see to it that it is that of the directory."""
        wide = next((spec for spec in layout.parameters if spec.dtype.itemsize > (layout.word_bytes or 8)), None)
        if wide is not None and self._copy is None:
            raise ConfigurationError(
                f"{wide.describe()} has elements of several words of this feed, of which some change alone: name a "
                "directory, from which the others are read (psclient.PatchSink(engine, directory=...))"
            )
        if layout.fingerprint != self._fingerprint:
            self._fingerprint, self._held = layout.fingerprint, None
        if self._copy is None:
            return self._held
        found, self.last = self._copy.open(layout), self._copy.last
        if found is not None and found != self._held:
            self._restore(self._copy, found)
        return found

    def is_current(self) -> bool:
        """Tell whether the directory is there; a receiver keeps its model."""
        return self._copy is None or self._copy.is_current()

    def read(self, entries: SparseSlice) -> SparseSlice | None:
        """Return the values in the directory; nothing without one."""
        return self._copy.read(entries) if self._copy is not None else None

    def buffers(self) -> bytes:
        """Return the directory's buffers; nothing without one, so that they come with each version."""
        return self._copy.buffers() if self._copy is not None else b""

    def stage(self, staged: StagedCut) -> None:
        """Stage the patches of all tensors that change, buffers among them."""
        if self._copy is not None:
            self._copy.stage(staged)
        self._cut = staged.cut
        buffers = zip(staged.layout.buffers, staged.buffers or (), strict=False)
        self._receiver.stage(
            staged.cut, [*patches_of(staged.layout, staged.changes, self.read), *(_whole(*each) for each in buffers)]
        )

    def commit(self) -> None:
        """Commit the directory, and then have the patches applied: if that fails, the directory has what is needed."""
        cut, self._cut = self._cut, None
        assert cut is not None
        if self._copy is not None:
            try:
                self._copy.commit()
            except BaseException:
                self._receiver.abort()
                raise
        self._apply(cut)

    def abort(self) -> None:
        """Have them dropped."""
        self._cut = None
        self._receiver.abort()
        if self._copy is not None:
            self._copy.abort()

    def close(self) -> None:
        """Let another follower write to the directory; the receiver keeps its model."""
        if self._copy is not None:
            self._copy.close()

    def _apply(self, cut: Cut) -> None:
        self._held = None  # a mixture, until it is done
        self._receiver.commit(cut)
        self._held = cut

    def _restore(self, copy: DirectorySink, cut: Cut) -> None:
        """Hand the receiver all that the directory holds."""
        try:
            self._receiver.stage(cut, [_whole(*each) for each in copy.tensors()])
        except BaseException:
            self._receiver.abort()
            raise
        self._apply(cut)


def _whole(spec: TensorSpec, value: torch.Tensor) -> Patch:
    return Patch(spec.name, spec.shape, spec.dtype, value, None)


def patches_of(
    layout: ModelLayout,
    changes: Sequence[SparseSlice],
    read: Callable[[SparseSlice], SparseSlice | None] = lambda entries: None,
) -> Iterator[Patch]:
    """Yield the patches of entries in ascending order, one a tensor; a tensor of which all is there has no indices.

    ``read`` returns what is held, for elements of a feed of which not all words are there.
    """
    found: dict[int, list[SparseSlice]] = {}
    for change in changes:
        for position, part in by_tensor(layout, change):
            found.setdefault(position, []).append(part)
    for position, parts in found.items():
        spec, start = layout.parameters[position], layout.offsets[position]
        values, places = _joined(start, parts)
        if values.numel() == layout.length(spec):
            yield _whole(spec, in_own_dtype(layout, spec, values).view(spec.shape))
            continue
        words = spec.dtype.itemsize // layout.word_bytes if layout.word_bytes else 1
        if words > 1:
            places = torch.unique(places // words)
            whole = (places[:, None] * words + torch.arange(words, dtype=torch.int64, device="cpu")).view(-1)
            held = read(SparseSlice(layout.span(position), whole, torch.empty_like(whole)))
            assert held is not None
            for part in parts:
                _put(held.values, whole, part, start)
            values = held.values
        yield Patch(spec.name, spec.shape, spec.dtype, in_own_dtype(layout, spec, values), places)


def _put(values: torch.Tensor, places: torch.Tensor, part: SparseSlice, start: int) -> None:
    """Put entries of a tensor that begins at ``start`` into the values at places of it, among which theirs are."""
    mine, found = _joined(start, [part])
    values[torch.searchsorted(places, found)] = mine


def _joined(start: int, parts: Sequence[SparseSlice]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of entries, and their places in the tensor that begins at ``start``."""
    values = torch.cat([part.values for part in parts])
    indices = [
        torch.arange(part.span.length, dtype=torch.int64, device="cpu") if part.offsets is None else part.offsets
        for part in parts
    ]
    flat = torch.cat([each + (part.span.start - start) for each, part in zip(indices, parts, strict=True)])
    return values, flat
