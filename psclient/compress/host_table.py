"""The tensors of a group on the host as one table, whose updates one compiled call carries out and selects from."""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from psclient.compress.gradients import Gradients
from psclient.compress.method import Recurrence
from psclient.compress.residuals import TableMemories
from psclient.report import StepReport
from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.selection import SelectFunction
from pscore.selection.cuda import device_kernels
from pscore.selection.cuda.launches import DeviceKernels
from pscore.selection.host.segments import KINDS, NOTHING, HostSegments
from pscore.selection.rule import Integers, Reals


class WholeBuffer:
    """One fp32 array ``[size]`` that is used again and again: fresh memory of a model's size costs a pass of its own.

    A part to which a push or a reply still refers is never given out a second time; its span gets fresh memory then.
    May be called from several threads.
    """

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, threading.Lock()
        self._array: Reals | None = None
        self._lent: list[tuple[Span, weakref.ref[Reals]]] = []

    def of(self, span: Span) -> Reals:
        """Return the memory of a span of the layout, with any content."""
        with self._lock:
            if self._array is None:
                self._array = np.empty(self._size, np.float32)
            part = self._lend(self._array, span)
        return np.empty(span.length, np.float32) if part is None else part

    def idle(self, span: Span) -> torch.Tensor | None:
        """Return the memory of a span, fp32, if there is some that nothing refers to."""
        with self._lock:
            part = None if self._array is None else self._lend(self._array, span)
        return None if part is None else torch.from_numpy(part)

    def _lend(self, array: Reals, span: Span) -> Reals | None:
        self._lent = [lent for lent in self._lent if lent[1]() is not None]
        if any(each.intersect(span).length for each, _ in self._lent):
            return None
        part = array[span.start : span.end]
        self._lent.append((span, weakref.ref(part)))
        return part


@dataclass(frozen=True, slots=True)
class Choice:
    """How entries are chosen from each tensor.

    Attributes:
        selector: by a function of one tensor on the host; ``None`` for the rule of :mod:`pscore.selection.rule`.
        dense_below: tensors with fewer elements send every entry that is not zero.
        on_device: returns the kernels of a device, which carry out the rule; ``None`` if there are none.
        kept_in: dtype of residuals and momenta on the host, fp32 or bf16.
    """

    selector: SelectFunction | None
    dense_below: int
    on_device: Callable[[torch.device], DeviceKernels | None] = device_kernels
    kept_in: torch.dtype = torch.float32


_COEFFICIENTS = ("scale", "decay", "factor", "retain", "rate", "unit", "keep")


class Rule(NamedTuple):
    """A param group's recurrence and density in this step."""

    recurrence: Recurrence
    density: float


class Sent(NamedTuple):
    """What a group of tensors sends: a sparse slice of its span, or dense runs; and entries by position."""

    slices: list[SparseSlice]
    entries: dict[int, int]
    is_finite: bool


class Places(NamedTuple):
    """The tensors of a table, each int64 ``[m]``, or parts of them.

    Attributes:
        positions: in the layout, ascending.
        numbers: of the param groups.
        gradients: places among a step's gradients.
        starts: where each begins in the memories, ascending.
        sizes: elements in the table.
        elements: of the whole tensor, of which a density is a share.
        span: of the slices.
    """

    positions: Integers
    numbers: Integers
    gradients: Integers
    starts: Integers
    sizes: Integers
    elements: Integers
    span: Span


class Filled:
    """The rows of a table, of :data:`~pscore.selection.host.segments.ROW` or more; filled anew in each step.

    Attributes:
        span: of the slices, and of the memories in which each tensor starts somewhere.
    """

    def __init__(self, places: Places, rows: NDArray[Any]) -> None:
        self._positions: tuple[int, ...] = tuple(places.positions.tolist())
        self._numbers, self._places, self.span = places.numbers, places.gradients, places.span
        self._sizes, self._elements = places.sizes, places.elements
        self._rows = rows
        self._rows["start"] = places.starts - places.span.start
        self._filled_with: tuple[Mapping[int, Rule], Mapping[int, float], int] | None = None

    def _fill(self, rules: Mapping[int, Rule], densities: Mapping[int, float], dense_below: int) -> bool:
        """Set what depends on hyper-parameters, and hence seldom changes; return whether it has changed."""
        if self._filled_with == (rules, densities, dense_below):
            return False
        self._filled_with = rules, dict(densities), dense_below
        rows, sizes, density = self._rows, self._sizes, np.empty(len(self._positions))
        whole, masked = np.zeros((2, sizes.size), bool)
        for number, (recurrence, rho) in rules.items():
            members = self._numbers == number
            for name in _COEFFICIENTS:
                rows[name][members] = getattr(recurrence, name)
            whole[members], density[members] = recurrence.whole, rho
            masked[members] = recurrence.masks_momentum and recurrence.factor != 0
        if densities:
            density = np.array([densities.get(n, rho) for n, rho in zip(self._positions, density, strict=True)])
        self._all_whole, self._whole = bool(whole.all()), self._at(whole)
        self._with_momentum = self._at(rows["factor"] != 0)
        self._k = np.minimum(sizes, np.maximum(1, (density * self._elements).astype(np.int64)))
        self._counted = (self._elements >= dense_below) & ~whole
        self._masked = self._counted & masked if (self._counted & masked).any() else None
        rows["searched"] = self._counted & (self._k < sizes)
        rows["whole"] = self._all_whole
        rows["threshold"] = np.where(whole, -1, 0)  # -1: a tensor sent whole sends zeros as well
        self._searched, self._searched_positions = np.flatnonzero(rows["searched"]).tolist(), self._at(rows["searched"])
        unit = rows["unit"]
        self._unit = None if (unit == 1).all() else unit[:1] if (unit == unit[0]).all() else unit
        self._wanted = int(self._k[self._counted].sum())
        return True

    def _at(self, rows: NDArray[np.bool_]) -> tuple[int, ...]:
        return tuple(self._positions[row] for row in np.flatnonzero(rows).tolist())

    def _refer(self, gradients: Gradients, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Set the addresses; return the tensors that must live as long as these, beside the gradients."""
        rows, used = self._rows, []
        rows["gradient"], rows["gradient_kind"] = gradients.addresses[self._places], gradients.kinds[self._places]
        rows["gradient"][~self._reads(gradients)] = 0
        for row in np.flatnonzero(rows["gradient"] == 0).tolist():
            used.append(plain := self._plain(gradients[self._positions[row]]))
            rows["gradient"][row], rows["gradient_kind"][row] = plain.data_ptr(), KINDS[plain.dtype]
        rows["parameters"] = 0
        decayed = np.flatnonzero(rows["decay"]).tolist()
        if decayed:
            found = [self._plain(parameters[self._positions[row]]) for row in decayed]
            rows["parameters"][decayed] = [tensor.data_ptr() for tensor in found]
            rows["parameter_kind"][decayed] = [KINDS[tensor.dtype] for tensor in found]
            used += found
        return used

    def _reads(self, gradients: Gradients) -> NDArray[np.bool_]:
        """Tell which of these gradients can be read at their addresses."""
        return np.ones(self._places.size, bool)

    def _plain(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that can be read: itself if its elements lie in order."""
        if not tensor.is_contiguous():
            tensor = tensor.detach().contiguous()
        return tensor if tensor.dtype in KINDS else tensor.detach().float()

    def _entries(
        self, offsets: Integers | None, values: Reals, counts: Integers, memories: TableMemories, report: StepReport
    ) -> tuple[SparseSlice, dict[int, int]]:
        """Return entries, ascending, as a slice, and their numbers by position; tensors sent whole have no residual."""
        report.wanted_entries += self._wanted
        report.selected_entries += int(counts[self._counted].sum())
        if self._unit is not None:
            with np.errstate(over="ignore"):  # is noticed by the caller
                values = values * (self._unit if self._unit.size == 1 else np.repeat(self._unit, counts))
        memories.clear("residual", self._whole)
        where = None if offsets is None or values.size == self.span.length else torch.from_numpy(offsets)
        piece = SparseSlice(self.span, where, torch.from_numpy(values))
        return piece, dict(zip(self._positions, counts.tolist(), strict=True))

    def _runs(self, values: Reals) -> Sent:
        """Return the tensors, which are all sent whole, as the longest dense runs."""
        starts = self._rows["start"] + self.span.start
        ends = starts + self._sizes
        gaps = np.flatnonzero(starts[1:] != ends[:-1])
        tensor, base = torch.from_numpy(values), self.span.start  # its slices keep the buffer's part alive
        slices = [
            SparseSlice(Span(low, high), None, tensor[low - base : high - base])
            for low, high in zip(
                starts[[0, *(gaps + 1).tolist()]].tolist(), ends[[*gaps.tolist(), -1]].tolist(), strict=True
            )
        ]
        is_finite = all(bool(np.isfinite(each.values.numpy()).all()) for each in slices)
        return Sent(slices, dict(zip(self._positions, self._sizes.tolist(), strict=True)), is_finite)


class Table(Filled):
    """Some tensors whose memories are on the host; gradients and parameters elsewhere are copied there."""

    def __init__(self, places: Places) -> None:
        self._segments = HostSegments(places.sizes)
        super().__init__(places, self._segments.rows)

    def compress(
        self,
        rules: Mapping[int, Rule],
        densities: Mapping[int, float],
        gradients: Gradients,
        parameters: Sequence[torch.Tensor],
        clip: float,
        memories: TableMemories,
        buffer: WholeBuffer,
        choice: Choice,
        report: StepReport,
    ) -> Sent:
        """Carry out the tensors' updates, and select from them; ``densities`` of single tensors, by position."""
        if self._fill(rules, densities, choice.dense_below):
            self._segments.want(self._k)
        used = self._refer(gradients, parameters)
        momentum = NOTHING
        if self._with_momentum:
            memories.require("momentum", self._with_momentum)
            momentum = memories.flat("momentum", self.span)
        sent = self._write_out(clip, memories, momentum, buffer) if self._all_whole else None
        sent = sent or self._select(clip, memories, momentum, choice, report)
        del used  # what the rows refer to lives until here
        return sent

    def _write_out(self, clip: float, memories: TableMemories, momentum: Reals, buffer: WholeBuffer) -> Sent:
        """Update tensors that are all sent whole."""
        self._rows["has_residual"] = memories.has("residual", self._positions)
        memories.require("residual", self._at(self._rows["has_residual"]))
        values = buffer.of(self.span)
        self._segments.write_out(clip, memories.flat("residual", self.span), momentum, values)
        memories.clear("residual", self._positions)
        return self._runs(values)

    def _select(
        self, clip: float, memories: TableMemories, momentum: Reals, choice: Choice, report: StepReport
    ) -> Sent:
        """Update the tensors, and take entries."""
        memories.require("residual", self._positions)
        states = memories.states_of(self._searched_positions)
        recalls = {row: state.setdefault("recall", {}) for row, state in zip(self._searched, states, strict=True)}
        residuals = memories.flat("residual", self.span)
        offsets, values, counts, is_finite = self._segments.select(clip, residuals, momentum, recalls, choice.selector)
        if offsets is None and (values.size < self.span.length or self._masked is not None):
            offsets = np.arange(values.size)
        if self._masked is not None:
            assert offsets is not None
            momentum[offsets[np.repeat(self._masked, counts)]] = 0
        piece, entries = self._entries(offsets, values, counts, memories, report)
        return Sent([piece], entries, is_finite and bool(np.isfinite(piece.values.numpy()).all()))

    def _reads(self, gradients: Gradients) -> NDArray[np.bool_]:
        return gradients.on_host[self._places]

    def _plain(self, tensor: torch.Tensor) -> torch.Tensor:
        return super()._plain(tensor.detach().cpu())
