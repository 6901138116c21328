"""Launches the kernels of :mod:`pscore.selection.cuda.triton_kernels`, over all tensors of a device at once.

A selection is four launches in a side stream, between one copy to the device and one back (docs/internals/kernels.md).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pscore.selection.host import segments
from pscore.selection.host.segments import KINDS, numbered
from pscore.selection.host.threads import in_parallel, parts_of
from pscore.selection.rule import Integers, Reals

ROW = np.dtype(
    [
        *((name, "i8") for name in ("memory", "momentum", "length", "room", "piece", "part", "above")),
        *((name, "i8") for name in ("wanted", "least", "most", "fits")),
        *((name, segments.ROW[name]) for name in segments.ROW.names or ()),
        ("masked", "?"),
        ("aligned", "?"),
    ],
    align=True,
)
"""A tensor: the fields of :data:`pscore.selection.host.segments.ROW`, and more.

Addresses of ``memory`` (0: none) and ``momentum``; elements; ``room``, where a ``whole`` tensor starts in the output;
its first piece, and the first part of its pieces; ``above``, in which the device counts its marks from 0 on; entries
that are wanted; the least and the most that a search may find; how many fit: more are not accepted. ``masked``: the
momentum becomes 0 if one of at most ``most`` entries is taken. ``aligned``: all addresses are multiples of 16. All
elements of a ``whole`` tensor fit. A row without a gradient is selected from as it is."""

TARGET = np.dtype([("address", "i8"), ("master", "i8"), ("shift", "i8"), ("kind", "i8")])
"""Scatter target: parameter address, address of its fp32 master (the same if fp32), shift added to the entries'
offsets, and dtype as in :data:`~pscore.selection.host.segments.KINDS`."""

KINDS_BY_NAME = {str(dtype).removeprefix("torch."): kind for dtype, kind in KINDS.items()}

OUTPUT_BYTES = 6
"""Of an entry that may be taken: an fp32 value, and its place within the piece, int16."""

LINE = 32
"""Entries of a line of output: so many values, and then so many places. Any number of lines is one copy."""

LINE_BYTES = LINE * OUTPUT_BYTES

SCATTERED_BYTES = 64 << 20
"""Of entries that are copied to a device at once."""

_ENTRIES = 1024  # of a piece that is scattered
_TILE = 1024  # pieces of a part, and parts that are arranged together
_DIGITS = ((20, 2048), (10, 1024), (0, 1024))  # (place, values): of a magnitude's bits, the highest first


def available() -> bool:
    """Tell whether Triton is installed."""
    return find_spec("triton") is not None


class SideStream:
    """A stream of its own on CUDA; on any other device there is one order of work, and this does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Launch in this stream, after the work that the current stream has now; that stream goes on meanwhile.

        After an error nothing is under way: the caller may free what was launched for.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            try:
                yield
            except BaseException:
                self._stream.synchronize()
                raise

    def copy_to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Start copying a tensor of this stream to pinned memory; call it inside :meth:`entered`.

        Returns:
            The host tensor, and the event after which it is complete; ``None`` if it is.
        """
        if self._stream is None:
            return tensor.clone(), None
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return host, self._stream.record_event()


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays to a device in the current stream, all in one copy from pinned memory; int8 ``[bytes]`` each."""
    flat = [torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.int8)) for array in arrays]
    ends = np.cumsum([_aligned(each.numel()) for each in flat]).tolist()
    packed = torch.empty(ends[-1], dtype=torch.int8, device="cpu", pin_memory=device.type == "cuda")
    places = [slice(start, start + each.numel()) for start, each in zip([0, *ends], flat, strict=False)]
    for place, each in zip(places, flat, strict=True):
        packed[place] = each
    packed = packed.to(device, non_blocking=True)  # the allocator keeps the pinned memory until then
    return [packed[place] for place in places]


class Pieces:
    """The pieces of tensors of these sizes, none of which is 0, and where each starts among all ``starts``.

    Parts are of neighbouring pieces of a tensor, so that many programs add up a large one.
    """

    def __init__(self, sizes: Integers, starts: Integers, block: int, device: torch.device) -> None:
        counts = -(-sizes // block)
        self.of_rows, self.rows, first = numbered(counts)
        self.starts = starts[self.rows] + first * block
        self.parts_of_rows, of_parts, number = numbered(-(-counts // _TILE))
        self.parts = of_parts.size
        low = number * _TILE
        of_part = np.stack([of_parts, self.of_rows[of_parts] + low, np.minimum(_TILE, counts[of_parts] - low)], 1)
        pieces, parts = to_device([np.stack([self.rows, first * block], 1), of_part], device)
        self.table, self.part_table = pieces.view(torch.int64), parts.view(torch.int64)


class UnsoundError(ArithmeticError):
    """What was launched has found its input marked as unsound, and has changed nothing."""


class Found(NamedTuple):
    """What a selection has found.

    Attributes:
        offsets: int64, ascending, counted as the pieces' starts are.
        values: fp32, the memories' values before.
        taken: entries of each row; -1 if the number was not accepted, and nothing is taken.
        excess: what the magnitudes above the threshold exceed it by, summed, of each row.
        thresholds: of each row, as they were used.
    """

    offsets: Integers
    values: Reals
    taken: Integers
    excess: NDArray[np.float64]
    thresholds: NDArray[np.float64]


class Pending:
    """A selection, or a writing out, that is under way."""

    def __init__(self, stream: SideStream, packed: torch.Tensor, rows: int, pieces: Pieces, soon: int) -> None:
        """Start to copy the head of the output to the host, and its first bytes of entries; inside ``entered()``."""
        self._stream, self._rows, self._pieces = stream, rows, pieces
        end = _head_bytes(rows, pieces) + soon
        self._rest = packed[end:]
        self._host, self._copied = stream.copy_to_host(packed[:end])

    def wait(self) -> None:
        """Wait for this selection, and nothing that was launched after it."""
        if self._copied is not None:
            self._copied.synchronize()

    def whole(self) -> torch.Tensor:
        """Wait for tensors that are written out; return their values, fp32, one after the other."""
        return self._arrived()[-1].view(torch.float32)

    def collect(self) -> Found:
        """Wait for this selection; return the entries, on the host: for more than were expected a second copy."""
        *parts, lines = self._arrived()
        taken, thresholds, excess, counts = (part.numpy() for part in parts)
        accepted = taken >= 0
        ends = np.cumsum(np.where(accepted[self._pieces.rows], counts, 0))
        total = int(ends[-1])
        more = LINE_BYTES * -(-total // LINE) - lines.numel()
        if more > 0:
            with self._stream.entered():
                rest, self._copied = self._stream.copy_to_host(self._rest[:more])
            self.wait()
            lines = torch.cat([lines, rest])
        offsets, values = _listed(lines.numpy(), self._pieces.starts, ends)
        sums = np.add.reduceat(excess, self._pieces.parts_of_rows)
        return Found(offsets, values, taken.copy(), sums, thresholds.copy())

    def _arrived(self) -> list[torch.Tensor]:
        self.wait()
        unsound, _, *sections = _sections(self._host, self._rows, self._pieces)
        if unsound.numpy()[0]:
            raise UnsoundError
        return sections


def _listed(lines: NDArray[np.int8], starts: Integers, ends: Integers) -> tuple[Integers, Reals]:
    """Return the offsets and values of the entries in lines; each piece's entries end at its place in ``ends``."""
    from pscore.selection.cuda.collect_loops import collect

    total = int(ends[-1])
    offsets, values = np.empty(total, np.int64), np.empty(total, np.float32)
    table = lines.reshape(-1, LINE_BYTES)[: -(-total // LINE)]
    of_values, of_places = table.view(np.float32)[:, :LINE], table.view(np.int16)[:, 2 * LINE :]
    cuts = [len(table) * part // parts_of(total) for part in range(parts_of(total) + 1)]
    loop = collect.on(total)
    in_parallel(
        [slice(*cut) for cut in pairwise(cuts)],
        lambda part: loop(part.start, part.stop, starts, ends, of_values, of_places, offsets, values),
    )
    return offsets, values


def _head(rows: int, pieces: Pieces) -> list[tuple[torch.dtype, int]]:
    """Return dtype and size of what an output has before its entries.

    Whether the input is unsound, its factor, what :class:`Found` has of rows, excess of parts, and counts of pieces.
    """
    return [
        (torch.int32, 1),
        (torch.float32, 1),
        (torch.int64, rows),
        (torch.float64, rows),
        (torch.float64, pieces.parts),
        (torch.int32, pieces.rows.size),
    ]


def _head_bytes(rows: int, pieces: Pieces) -> int:
    return sum(_aligned(dtype.itemsize * count) for dtype, count in _head(rows, pieces))


def _sections(packed: torch.Tensor, rows: int, pieces: Pieces) -> list[torch.Tensor]:
    """Return the parts of an output: those of its head, and the bytes of its entries, as far as they are there."""
    sections, start = [], 0
    for dtype, count in _head(rows, pieces):
        size = dtype.itemsize * count
        sections.append(packed[start : start + size].view(dtype))
        start += _aligned(size)
    return [*sections, packed[start:]]


class DeviceKernels:
    """Launches the kernels on one device.

    Until a :class:`Pending` has been waited for, no other code may write or free the tensors of its rows, nor read
    those that are changed.

    Args:
        device: a CUDA device; under Triton's interpreter the CPU.
        block: elements of a piece; a power of two, at most 32768.
        part: elements of a piece that are updated together; a power of two.
    """

    def __init__(self, device: torch.device, *, block: int = 4096, part: int = 1024) -> None:
        from pscore.selection.cuda import triton_kernels

        self._kernels: Any = triton_kernels  # Triton's launchers have no types
        self._device, self._block, self._part = device, block, min(block, part)
        self._stream = SideStream(device)

    def pieces(self, sizes: Integers, starts: Integers) -> Pieces:
        """Cut tensors of these sizes, which start there, into pieces."""
        return Pieces(sizes, starts, self._block, self._device)

    def launch(
        self,
        rows: NDArray[Any],
        pieces: Pieces,
        clip: float | torch.Tensor = 1.0,
        unsound: torch.Tensor | None = None,
        *,
        search: bool = False,
    ) -> Pending:
        """Update the rows' tensors, and take what is above their thresholds, or write out those that are whole.

        With ``search`` the thresholds are found on the device first, so that the memories' entries are accepted as they
        are; not if equal magnitudes lie on both sides of what is accepted. ``clip``, which gradients are multiplied
        by, may be one number on the device. ``unsound``, int32 on the device: if
        it is not 0, nothing changes, and the result is :class:`UnsoundError`.
        """
        count, is_whole = pieces.rows.size, bool(rows["whole"].all())
        if is_whole:  # others may lie between them
            room = 4 * int(rows["room"][-1] + rows["fits"][-1])
        else:
            room = LINE_BYTES * -(-int(rows["fits"].sum()) // LINE)
        with self._stream.entered():
            (table,) = to_device([rows], self._device)
            packed = self._empty(_head_bytes(len(rows), pieces) + room, torch.int8)
            bad, by, taken, thresholds, sums, counts, entries = _sections(packed, len(rows), pieces)
            bad.fill_(0 if unsound is None else unsound)
            by.fill_(clip)
            whole = entries.view(torch.float32)
            excess, places = self._empty(count, torch.float32), self._empty(count, torch.int32)
            above, begins = self._empty(pieces.parts, torch.int32), self._empty(pieces.parts, torch.int64)
            mask = self._empty(count * self._block // 32, torch.int32)
            shape = {"BLOCK": self._block, "num_warps": 8, "enable_fp_fusion": False}
            tiles = {"TILE": _TILE, "num_warps": 8, "enable_fp_fusion": False}
            if search:
                state = torch.zeros(3 * len(rows), dtype=torch.int64, device=self._device)
                bins = torch.zeros(2048 * len(rows), dtype=torch.int64, device=self._device)
                for shift, size in _DIGITS:
                    digit = {"SHIFT": shift, "BINS": size}
                    self._kernels.histogram[(count,)](table, pieces.table, state, bins, **digit, **shape)
                    self._kernels.choose[(len(rows),)](table, state, bins, **digit, num_warps=8)
            self._kernels.update[(count,)](
                table, pieces.table, bad, by, counts, excess, mask, whole, PART=self._part, **shape
            )
            if is_whole:
                return Pending(self._stream, packed, len(rows), pieces, room)
            self._kernels.settle[(pieces.parts,)](
                table, pieces.part_table, counts, excess, places, above, sums, **tiles
            )
            self._kernels.arrange[(1,)](
                table, pieces.part_table, pieces.parts, above, begins, taken, thresholds, **tiles
            )
            self._kernels.emit[(count,)](
                table, pieces.table, counts, places, begins, taken, mask, entries, PART=self._part, TILE=_TILE, **shape
            )
            soon = LINE_BYTES * -(-int(rows["most"].sum()) // LINE)
            return Pending(self._stream, packed, len(rows), pieces, min(room, soon))

    def scatter(
        self, targets: NDArray[Any], counts: Integers, offsets: Integers | None, values: Reals, *, adds: bool
    ) -> None:
        """Write entries to tensors, or add them, in the current stream.

        Their bytes are copied to the device in parts of at most :data:`SCATTERED_BYTES`, of which no more than two are
        on their way: only for these the host waits, and no more memory is taken here or there, however many entries.

        Args:
            targets: of :data:`TARGET`.
            counts: of the entries that each target has; those of the first target come first.
            offsets: int64; ``None`` for 0, 1, 2 …
            values: fp32.
            adds: add in fp32 to the ``master``, which the tensor follows.
        """
        ends = np.cumsum(counts)
        most = max(1, SCATTERED_BYTES // (4 if offsets is None else 12))
        under_way: deque[torch.cuda.Event] = deque()
        for low in range(0, int(counts.sum()), most):
            if len(under_way) == 2:
                under_way.popleft().synchronize()
            high = low + most
            rows = np.flatnonzero((ends > low) & (ends - counts < high))
            inside = np.minimum(ends[rows], high) - np.maximum(ends[rows] - counts[rows], low)
            part = targets[rows]
            if offsets is None:
                part["shift"] += low  # entries are numbered from the part's first
            self._scatter(part, inside, None if offsets is None else offsets[low:high], values[low:high], adds)
            if self._device.type == "cuda":
                under_way.append(torch.cuda.current_stream(self._device).record_event())

    def _scatter(
        self, targets: NDArray[Any], counts: Integers, offsets: Integers | None, values: Reals, adds: bool
    ) -> None:
        _, rows, number = numbered(-(-counts // _ENTRIES))
        starts, first = np.cumsum(counts) - counts, number * _ENTRIES
        table = np.stack([rows, starts[rows] + first, np.minimum(_ENTRIES, counts[rows] - first)], 1)
        arrays = [targets, table, values] if offsets is None else [targets, table, values, offsets]
        sent, cut, numbers, *where = to_device(arrays, self._device)
        with torch.cuda.device_of(sent):  # type: ignore[no-untyped-call]
            self._kernels.scatter[(rows.size,)](
                sent, cut.view(torch.int64), where[0].view(torch.int64) if where else None, numbers.view(torch.float32),
                ADDS=adds, BLOCK=_ENTRIES, enable_fp_fusion=False,
            )  # fmt: skip

    def _empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=self._device)
