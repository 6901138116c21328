"""The tensors of a group on the host as one table, whose updates one compiled call carries out and selects from."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from psclient.compress.buffer import WholeBuffer
from psclient.compress.choice import Choice
from psclient.compress.memories import Memories
from psclient.compress.method import Recurrence
from psclient.report import StepReport
from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice
from pscore.select import SelectorState
from pscore.select.base import TOLERANCE
from pscore.select.inputs import Memory
from pscore.select.kernels import segments
from pscore.select.kernels.base import Taken, ThresholdResult
from pscore.select.kernels.segments import KINDS, Integers, Passed, Reals
from pscore.select.warm import ROOM, correct, predict, warm

_COEFFICIENTS = ("scale", "decay", "factor", "retain", "rate", "unit", "keep", "nesterov")
_NOTHING = np.zeros(0, np.float32)


class Rule(NamedTuple):
    """A param group's recurrence and density in this step."""

    recurrence: Recurrence
    density: float


class Sent(NamedTuple):
    """What a group of tensors sends: one sparse slice of its span, or dense runs; and entries by position."""

    slices: list[SparseSlice]
    entries: dict[int, int]


class Table:
    """Some tensors on the host, by position, ascending; built once, and filled anew in each step.

    ``numbers`` are the tensors' param groups.
    """

    def __init__(self, layout: ModelLayout, positions: Sequence[int], numbers: Sequence[int], span: Span) -> None:
        self._positions, self._numbers, self._span = list(positions), np.array(numbers), span
        edges = np.array(layout.offsets)
        where = np.array(positions)
        self._sizes = edges[where + 1] - edges[where]
        self._rows: NDArray[Any] = np.zeros(len(positions), segments.ROW)
        self._rows["start"] = edges[where]
        self._pieces = segments.Pieces(self._sizes)

    def compress(
        self,
        rules: Mapping[int, Rule],
        densities: Mapping[int, float],
        gradients: Mapping[int, torch.Tensor],
        parameters: Sequence[torch.Tensor],
        clip: float,
        memories: Memories,
        buffer: WholeBuffer,
        choice: Choice,
        report: StepReport,
    ) -> Sent:
        """Carry out the tensors' updates, and select from them; ``densities`` of single tensors, by position."""
        rows, sizes, base = self._rows, self._sizes, self._span.start
        whole = self._fill(rules)
        used = self._refer(gradients, parameters)  # keeps copies alive
        all_whole = bool(whole.all())
        resting = _NOTHING
        if rows["factor"].any():
            memories.require("momentum", self._at(rows["factor"] != 0))
            resting = memories.flat("momentum")
        if all_whole:
            states = [memories.state(position) for position in self._positions]
            rows["has_residual"] = ["residual" in state for state in states]
            memories.require("residual", self._at(rows["has_residual"]))
            values = buffer.of(self._span)
            segments.update(
                rows, self._pieces, np.zeros_like(sizes), clip, memories.flat("residual"), resting, values, base
            )
            for state in states:
                state.pop("residual", None)
            return self._runs(values)
        memories.require("residual", self._positions)
        rows["whole"] = False
        by_group = {number: rule.density for number, rule in rules.items()}
        density = np.array([by_group[number] for number in self._numbers.tolist()])
        if densities:
            density = np.array([densities.get(n, rho) for n, rho in zip(self._positions, density, strict=True)])
        k = np.minimum(sizes, np.maximum(1, (density * sizes).astype(np.int64)))
        counted = (sizes >= choice.dense_below) & ~whole
        searched = counted & (k < sizes)
        rows["threshold"] = np.where(whole, -1, 0)
        rooms = np.where(searched, ROOM * k, sizes)
        recalls = {
            row: memories.state(self._positions[row]).setdefault("recall", {})
            for row in np.flatnonzero(searched).tolist()
        }
        for row, recall in recalls.items():
            rows["threshold"][row] = np.inf if _is_cold(recall) else recall["threshold"]
        residuals = memories.flat("residual")
        passed = segments.update(rows, self._pieces, rooms, clip, residuals, resting, _NOTHING, base)
        del used
        offsets, values, counts = self._corrected(passed, k, recalls, residuals)
        report.wanted_entries += int(k[counted].sum())
        report.selected_entries += int(counts[counted].sum())
        self._mask(rules, offsets, counts, counted, resting)
        unit = rows["unit"]
        if (unit != 1).any():
            values = values * (unit[0] if (unit == unit[0]).all() else np.repeat(unit, counts))
        for position in self._at(whole):
            memories.state(position).pop("residual")
        piece = SparseSlice(self._span, torch.from_numpy(offsets), torch.from_numpy(values))
        return Sent([piece], dict(zip(self._positions, counts.tolist(), strict=True)))

    def _at(self, rows: NDArray[np.bool_]) -> list[int]:
        return self._positions if rows.all() else [self._positions[row] for row in np.flatnonzero(rows).tolist()]

    def _fill(self, rules: Mapping[int, Rule]) -> NDArray[np.bool_]:
        """Set the rows' coefficients; return which tensors are sent whole."""
        whole = np.zeros(self._sizes.size, bool)
        for number, (recurrence, _) in rules.items():
            members = self._numbers == number
            for name in _COEFFICIENTS:
                self._rows[name][members] = getattr(recurrence, name)
            whole[members] = recurrence.whole
        self._rows["whole"] = whole
        return whole

    def _refer(self, gradients: Mapping[int, torch.Tensor], parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Set the addresses; return the tensors that must live as long as these."""
        rows = self._rows
        used = [_plain(gradients[position]) for position in self._positions]
        rows["gradient"] = [tensor.data_ptr() for tensor in used]
        rows["gradient_kind"] = [KINDS[tensor.dtype] for tensor in used]
        rows["parameters"] = 0
        decayed = np.flatnonzero(rows["decay"]).tolist()
        if decayed:
            found = [_plain(parameters[self._positions[row]]) for row in decayed]
            rows["parameters"][decayed] = [tensor.data_ptr() for tensor in found]
            rows["parameter_kind"][decayed] = [KINDS[tensor.dtype] for tensor in found]
            used += found
        return used

    def _corrected(
        self, passed: Passed, k: Integers, recalls: Mapping[int, SelectorState], residuals: Reals
    ) -> tuple[Integers, Reals, Integers]:
        """Correct the tensors whose number of entries misses ``k``; return offsets, values, and numbers of entries."""
        offsets, values, counts = passed.offsets, passed.values, passed.taken
        ends = np.cumsum(counts).tolist()
        pieces: list[tuple[Integers, Reals]] = []
        done = 0
        for row, recall in recalls.items():
            above, wanted = int(passed.above[row]), int(k[row])
            if not _is_cold(recall) and (1 - TOLERANCE) * wanted <= above <= (1 + TOLERANCE) * wanted:
                predict(recall, recall["threshold"], above, float(passed.excess[row]), wanted)
                continue
            low, high = ends[row] - int(counts[row]), ends[row]
            start, shift = int(self._rows["start"][row]), int(self._rows["start"][row]) - self._span.start
            residual = torch.from_numpy(residuals[start : start + int(self._sizes[row])])
            source = Memory(residual, None, float(self._rows["keep"][row]))
            if _is_cold(recall):
                taken = warm(source, wanted, recall)
            else:
                before = Taken(torch.from_numpy(offsets[low:high] - shift), torch.from_numpy(values[low:high]))
                result = ThresholdResult(before, above, float(passed.excess[row]))
                taken = correct(source, wanted, recall, recall["threshold"], result)
            pieces += [(offsets[done:low], values[done:low]), (taken.offsets.numpy() + shift, taken.values.numpy())]
            counts[row] = taken.offsets.numel()
            done = high
        if pieces:
            pieces.append((offsets[done:], values[done:]))
            offsets, values = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
        return offsets, values, counts

    def _mask(
        self,
        rules: Mapping[int, Rule],
        offsets: Integers,
        counts: Integers,
        counted: NDArray[np.bool_],
        momentum: Reals,
    ) -> None:
        """Clear the momentum where an entry was selected."""
        masking = [number for number, rule in rules.items() if rule.recurrence.masks_momentum]
        masked = counted & np.isin(self._numbers, masking) & (self._rows["factor"] != 0)
        if masked.any():
            momentum[offsets[np.repeat(masked, counts)] + self._span.start] = 0

    def _runs(self, values: Reals) -> Sent:
        """Return the tensors, which are all sent whole, as the longest dense runs."""
        starts, ends = self._rows["start"], self._rows["start"] + self._sizes
        gaps = np.flatnonzero(starts[1:] != ends[:-1])
        tensor, base = torch.from_numpy(values), self._span.start  # its slices keep the buffer's part alive
        slices = [
            SparseSlice(Span(low, high), None, tensor[low - base : high - base])
            for low, high in zip(
                starts[[0, *(gaps + 1).tolist()]].tolist(), ends[[*gaps.tolist(), -1]].tolist(), strict=True
            )
        ]
        return Sent(slices, dict(zip(self._positions, self._sizes.tolist(), strict=True)))


def _is_cold(recall: SelectorState) -> bool:
    """Tell whether there is no threshold to begin with: at first, and while the tensor is ranked."""
    return "threshold" not in recall or recall.get("ranked", 0) > 0


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that the loops can read: itself where its elements lie in order."""
    if not tensor.is_contiguous():
        tensor = tensor.detach().contiguous()
    return tensor if tensor.dtype in KINDS else tensor.detach().float()
