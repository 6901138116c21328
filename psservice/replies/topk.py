"""Selecting from the difference between a shard and the image of a replica, among what changed if that is less.

After a selection no entry that was not sent differs by more than the smallest one that was: the tensor's *bound*. So
the next selection searches only the entries that the log of changes names, and those of the last reply that have not
become what they should: each was sent rounded, as a difference and as a sum at least. If enough of them exceed the
bound, the result is that of a full search. Otherwise that tensor is searched whole, and its bound
falls.

On the host the default selector is one call over all tensors (:func:`psservice.replies.reply_loops.select`). Another
selector chooses tensor by tensor, and a device from all tensors at once, from a copy of the difference: pushes may
change the parameters meanwhile, and a selection reads each element more than once.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pscore.model.layout import ModelLayout, Span
from pscore.selection import SelectFunction, entries_for
from pscore.selection.cuda import device_kernels
from pscore.selection.cuda.launches import TARGET, DeviceKernels
from pscore.selection.cuda.segments import CHANCE, DeviceSegments
from pscore.selection.rule import deviation
from pscore.wire.budget import FEWEST_BYTES, bits_of, density_of, element_bits, most_whole
from pscore.wire.codecs.values import VALUE_FORMATS
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.frames import WireForm
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.memory_budget import MemoryBudget
from psservice.model.changelog import ChangeLog, most_changed, union
from psservice.model.parameters import ModelShard
from psservice.replies import reply_loops

_WORTH_IT = 1 / 40
"""Changed entries over elements from which one search of everything is cheaper: it reads in order (measured)."""

_ROOM = 4
"""A tensor's room while it is selected from, as a multiple of ``k``: if a surplus fills it, the smallest go."""

_HITS = 256  # of ``k``, that a sample should have: its threshold then misses ``k`` by some percent
_LEAST_SHARE, _LARGEST_SHARE = 256, 16  # a sample takes one element in 16 to 256
_SAMPLED_FROM = 4096  # elements; smaller tensors are their own sample


class SelectedEntries(NamedTuple):
    """Entries on the host: int64 offsets, strictly increasing, and fp32 values."""

    offsets: torch.Tensor
    values: torch.Tensor


class Sent(NamedTuple):
    """Entries as they were selected, and the values that ``arrived`` in their place."""

    entries: SelectedEntries
    arrived: torch.Tensor


@dataclass(frozen=True, slots=True)
class TopKSettings:
    """How a top-k reply is made and travels.

    Attributes:
        density: share of a tensor's entries that is sent.
        dense_below: tensors with fewer elements are sent whole, within :meth:`.ModelLayout.whole_below`.
        value: value codec, by its number in the proto.
        chunk_bytes: largest payload of a chunk.
        memory: if it has no room for an image, no further worker is answered so.
        is_asked: whether the worker has named density and codec: it counts bytes.
    """

    density: float
    dense_below: int
    selector: SelectFunction | None
    value: int = pb.VALUE_CODEC_FP32
    chunk_bytes: int = 1 << 20
    memory: MemoryBudget = field(default_factory=lambda: MemoryBudget(sys.maxsize))
    is_asked: bool = False

    def asked(self, density: float, value: int) -> "TopKSettings":
        """Return the settings with what a worker asks for; raises :class:`Rejected` (``UNKNOWN_CODEC``)."""
        if not density:
            return self
        value = value or self.value
        if value not in VALUE_FORMATS:
            raise Rejected(ErrorCode.UNKNOWN_CODEC, f"value codec {value} is not known")
        return replace(self, density=density, value=value, is_asked=True)

    def form(self, form: WireForm) -> WireForm:
        """Return how a top-k reply is written if an exact one is written in ``form``."""
        rate = FEWEST_BYTES if self.is_asked else form.link_bytes_per_second
        return replace(form, value=self.value, link_bytes_per_second=rate)

    @property
    def limit(self) -> float | None:
        """The density of change from which an exact reply takes more bytes; ``None`` if no worker counts them."""
        return _as_large(self.density, self.value) if self.is_asked else None

    def entries(self, layout: ModelLayout, span: Span) -> Iterator[tuple[Span, int]]:
        """Yield each tensor's part of a span, and how many of its entries are sent."""
        share = element_bits(self.density, VALUE_FORMATS[self.value]) / 32 if self.is_asked else math.inf
        dense_below = layout.whole_below(self.dense_below, most_whole(layout.size, share))
        for _, common in layout.overlapping(span):
            yield common, common.length if common.length < dense_below else entries_for(common.length, self.density)


@lru_cache(maxsize=64)
def _as_large(density: float, value: int) -> float:
    """Return the density of an exact reply that takes as many bytes as a top-k reply; 1 if a dense one does."""
    bits, fp32 = element_bits(density, VALUE_FORMATS[value]), VALUE_FORMATS[pb.VALUE_CODEC_FP32]
    return density_of(bits, fp32) if bits < bits_of(fp32) else 1.0


class Table:
    """The tensors of a shard, one row each, and what a selection keeps of them; small neighbours share a row.

    Attributes:
        starts: int64, offsets within the shard; ``ends`` likewise.
        ks: int64, the entries that are sent; all of a row of small tensors.
        bounds: fp32, the magnitudes above which the last compiled selection left nothing behind.
        entries: the most that are sent.
        room: entries of memory that a compiled selection needs.
    """

    def __init__(self, model: ModelShard, settings: TopKSettings) -> None:
        rows: list[tuple[int, int, int]] = []
        for common, k in settings.entries(model.layout, model.span):
            start, end = common.start - model.span.start, common.end - model.span.start
            if rows and k == common.length and rows[-1][2] == rows[-1][1] - rows[-1][0]:
                start = rows.pop()[0]
                k = end - start
            rows.append((start, end, k))
        self.starts, self.ends, self.ks = np.array(rows, np.int64).reshape(-1, 3).T.copy()
        self.states: list[dict[str, Any]] = [{} for _ in rows]
        self.bounds = np.zeros(len(rows), np.float32)
        self._segments: DeviceSegments | None = None

        sizes = self.ends - self.starts
        self._rooms = np.where(self.ks < sizes, np.minimum(sizes, _ROOM * (self.ks + reply_loops.WORD)), sizes)
        sampled = np.maximum(sizes // _LEAST_SHARE, np.minimum(_HITS * sizes // self.ks, sizes // _LARGEST_SHARE))
        self._samples = np.where(sizes > _SAMPLED_FROM, sampled // reply_loops.LINE * reply_loops.LINE, sizes)
        self.entries = int((self.ks + deviation(self.ks, CHANCE)).sum()) + len(rows)  # sent at most
        self.room = self.entries + int(self._rooms.max(initial=0))

    def select(
        self, theta: torch.Tensor, image: torch.Tensor, among: torch.Tensor | None
    ) -> tuple[SelectedEntries, npt.NDArray[np.float32]]:
        """Select by one loop over all tensors; return the entries, and the bounds once these have been sent.

        ``among`` has offsets that cover every entry that may exceed its bound.
        """
        bounds = self.bounds.copy()
        offsets, values = np.empty(self.room, np.int64), np.empty(self.room, np.float32)
        candidates = np.empty(0, np.int64) if among is None else among.long().numpy()
        count = reply_loops.select.on(theta.numel())(
            theta.numpy(), image.numpy(), candidates, among is not None, self.starts, self.ends, self.ks,
            self._rooms, self._samples, bounds, offsets, values,
        )  # fmt: skip
        offsets.resize(count, refcheck=False)  # frees the rest, and copies nothing
        values.resize(count, refcheck=False)
        return SelectedEntries(torch.from_numpy(offsets), torch.from_numpy(values)), bounds

    def select_on_device(self, difference: torch.Tensor, kernels: DeviceKernels) -> SelectedEntries:
        """Select from a difference, which is used up, by one series of launches; return the entries on the host."""
        if not difference.numel():
            nothing = torch.empty(0, dtype=torch.int64, device="cpu")
            return SelectedEntries(nothing, nothing.float())
        if self._segments is None:
            self._segments = DeviceSegments(kernels, self.ends - self.starts, self.starts)
            self._segments.rows["searched"] = self.ks < self.ends - self.starts
            self._segments.want(self.ks)
        rows = self._segments.rows
        rows["memory"] = difference.data_ptr() + 4 * self.starts
        rows["aligned"] = rows["memory"] % 16 == 0
        parts = difference.tensor_split(self.ends[:-1].tolist())
        try:
            self._segments.launch(1.0, {row: self.states[row] for row in np.flatnonzero(rows["searched"]).tolist()})
            selected = self._segments.collect(parts, {})
        finally:
            self._segments.wait()
        return SelectedEntries(torch.from_numpy(selected.offsets), torch.from_numpy(selected.values))

    def left_of(self, sent: Sent, theta: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        """Return the offsets of sent entries at which what is left of the difference exceeds its tensor's bound."""
        (offsets, values), size = sent.entries, sent.arrived.numel()
        found = np.empty(size, np.int64)
        count = reply_loops.left_of.on(size)(
            theta.numpy(), image.numpy(), offsets.numpy(), values.numpy(), sent.arrived.numpy(), self.ends,
            self.bounds, found,
        )  # fmt: skip
        return torch.from_numpy(found[:count].copy())

    def select_by_tensor(self, difference: npt.NDArray[np.float32], selector: SelectFunction) -> SelectedEntries:
        """Let a selector choose in one tensor after the other; every entry that is not zero of those sent whole."""
        pieces = [np.empty(0, np.int64)]
        for start, end, k in zip(self.starts.tolist(), self.ends.tolist(), self.ks.tolist(), strict=True):
            part = difference[start:end]
            pieces.append((np.flatnonzero(part) if k == part.size else selector(part, k)) + start)
        offsets = np.concatenate(pieces)
        return SelectedEntries(torch.from_numpy(offsets), torch.from_numpy(difference[offsets]))


@dataclass(frozen=True, slots=True)
class Selected:
    """What a reply is made of.

    Attributes:
        version: is in the selection, and later changes perhaps too.
        taken: the selected entries; their offsets count from the span's start.
        seen: the change log, and its position before anything was read.
        bounds: of a compiled selection, those above which nothing is left behind once the entries have been sent.
    """

    version: int
    taken: SelectedEntries
    seen: tuple[ChangeLog, int]
    bounds: npt.NDArray[np.float32] | None


@dataclass(slots=True)
class DifferenceSelection:
    """The state of one worker's image from reply to reply.

    :meth:`select` changes nothing but hints. Only :meth:`commit`, when the reply has been made, counts the entries as
    sent: a reply that is refused in between loses nothing.
    """

    settings: TopKSettings
    """With which it was made: others need another selection."""
    _on_device: Callable[[torch.device], DeviceKernels | None] = device_kernels
    _table: Table | None = None
    _seen: tuple[ChangeLog, int] | None = None
    _sent: Sent | None = None

    def select(self, model: ModelShard, image: torch.Tensor) -> Selected:
        """Select from ``theta − image``. Each shard selects from its own part of a tensor that a border cuts."""
        log = model.changelog
        position, version = log.appended, model.version  # before anything is read
        table, bounds = self._table_of(model), None
        if self.settings.selector is not None:
            taken = table.select_by_tensor((model.theta - image).cpu().numpy(), self.settings.selector)
        elif (kernels := self._on_device(model.theta.device)) is not None:
            taken = table.select_on_device(model.theta - image, kernels)
        else:
            theta, image = model.theta.cpu(), image.cpu()
            taken, bounds = table.select(theta, image, self._among(model, theta, image))
        return Selected(version, taken, (log, position), bounds)

    def commit(self, selected: Selected, sent: Sent) -> None:
        """Count a selection as sent; the image has what arrived before the next selection.

        What is left of the difference is searched again.
        """
        self._seen = selected.seen
        if selected.bounds is not None:
            assert self._table is not None
            self._table.bounds = selected.bounds
        if sent.arrived.numel():
            self._sent = sent

    def nbytes(self, model: ModelShard) -> int:
        """Return the most bytes that a selection occupies, as a rule, with its result."""
        table = self._table_of(model)
        if model.theta.is_cpu and self.settings.selector is None:
            return 12 * table.room
        return 4 * model.span.length + 24 * table.entries

    def _table_of(self, model: ModelShard) -> Table:
        self._table = self._table or Table(model, self.settings)
        return self._table

    def _among(self, model: ModelShard, theta: torch.Tensor, image: torch.Tensor) -> torch.Tensor | None:
        """Return offsets that cover every entry that may exceed its bound; ``None``: search everything."""
        if self._seen is None or self._seen[0] is not model.changelog:
            return None
        changes, size = model.changelog.after(self._seen[1]), model.span.length
        most = most_changed(changes, size)
        if changes is None or most is None or most > _WORTH_IT * size:
            return None
        if self._sent is not None:
            changes.append(self._table_of(model).left_of(self._sent, theta, image))
        return union(changes, size)


def add_at(x: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> None:
    """``x[offsets] += values``; offsets int64, each once."""
    if x.is_cpu:
        reply_loops.add_at.on(offsets.numel())(x.numpy(), offsets.numpy(), values.numpy())
    elif offsets.device == x.device or (kernels := device_kernels(x.device)) is None:
        x[offsets.to(x.device)] += values.to(x.device)
    else:
        target = np.zeros(1, TARGET)
        target["address"] = target["master"] = x.data_ptr()
        kernels.scatter(target, np.array([offsets.numel()]), offsets.numpy(), values.numpy(), adds=True)
