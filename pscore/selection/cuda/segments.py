"""Selects from all tensors of a device at once: the threshold of the last step, in four launches.

The rule is that of :mod:`pscore.selection.rule`, with the same state. If a tensor's number of entries is not accepted,
or no threshold is known, a search on the device finds one, for these tensors only; if equal magnitudes lie on both
sides of ``k`` they are ranked. Of a surplus the ``k`` largest entries stay taken, and one launch puts the rest back.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from pscore.selection.cuda.launches import ROW, TARGET, DeviceKernels, Found, Pending
from pscore.selection.exact import largest
from pscore.selection.rule import (
    RANKED_STEPS,
    ROOM,
    SMALL_SIZE,
    Integers,
    Reals,
    SelectorState,
    deviation,
    remember,
    threshold_of,
)

CHANCE = 2
"""Square roots of ``k`` by which a count may be off, whatever the size: a search costs launches, not passes."""


class Selected(NamedTuple):
    """Entries on the host, ascending: int64 offsets, fp32 values, and how many are of each row."""

    offsets: Integers
    values: Reals
    counts: Integers


class DeviceSegments:
    """Tensors of one device, one row each, that are updated and selected from together.

    ``rows`` are of :data:`~pscore.selection.cuda.launches.ROW`; addresses and coefficients are the caller's.
    ``starts``: where offsets in each tensor count from. Between :meth:`launch` and :meth:`collect` or :meth:`whole`,
    the tensors belong to the device.
    """

    def __init__(self, kernels: DeviceKernels, sizes: Integers, starts: Integers) -> None:
        self.rows = np.zeros(sizes.size, ROW)
        self._kernels, self._starts = kernels, starts
        self._pieces = kernels.pieces(sizes, starts)
        self.rows["length"] = sizes
        self.rows["piece"], self.rows["part"] = self._pieces.of_rows, self._pieces.parts_of_rows
        for name in ("scale", "retain", "rate", "unit"):
            self.rows[name] = 1
        self._pending: Pending | None = None
        self._states: dict[int, SelectorState] = {}

    def want(self, wanted: Integers) -> None:
        """Set how many entries are wanted of each row that is ``searched``; the others send all that they have."""
        rows, off = self.rows, deviation(wanted, CHANCE)
        searched, sizes = rows["searched"], rows["length"]
        rows["wanted"] = wanted
        rows["least"] = np.where(searched, np.ceil(wanted - off), 0)
        rows["most"] = np.where(searched, np.minimum(sizes, wanted + np.floor(off)), sizes)
        rows["fits"] = np.where(searched, np.minimum(sizes, ROOM * wanted), sizes)
        rows["room"] = np.cumsum(rows["fits"]) - rows["fits"]  # of tensors that are whole

    def launch(
        self, clip: float | torch.Tensor, states: Mapping[int, SelectorState], unsound: torch.Tensor | None = None
    ) -> None:
        """Begin to update and select; ``states`` of the rows that are searched. Nothing waits for the device.

        ``clip``, ``unsound``: as of :meth:`~pscore.selection.cuda.launches.DeviceKernels.launch`.
        """
        self._states = dict(states)
        searched = list(self._states)
        # A ranked tensor has no threshold.
        self.rows["threshold"][searched] = [threshold_of(state) for state in self._states.values()]
        self._pending = self._kernels.launch(self.rows, self._pieces, clip, unsound)

    @property
    def is_under_way(self) -> bool:
        """True between a launch and its end."""
        return self._pending is not None

    def wait(self) -> None:
        """Wait for what is under way, if anything is; after an error the tensors are the caller's again."""
        if self._pending is not None:
            self._pending.wait()
        self._pending = None

    def whole(self) -> torch.Tensor:
        """Wait for rows that are all ``whole``; return their values."""
        assert self._pending is not None
        values = self._pending.whole()
        self._pending = None
        return values

    def collect(self, memories: Sequence[torch.Tensor], momenta: Mapping[int, torch.Tensor]) -> Selected:
        """Wait for the launch, correct the rows whose number of entries is not accepted, and predict thresholds.

        ``memories`` of each row, ``momenta`` of those that are masked. After an error in a correction, such as a search
        without memory on the device, what had been taken is in the memories again; momenta stay cleared.
        """
        assert self._pending is not None
        found = self._pending.collect()
        self._pending = None
        self._predict(found, np.arange(len(self.rows)))
        parts = [(found.offsets, found.values)]
        try:
            found = self._keep_largest(found)
            parts[0] = found.offsets, found.values
            counts = found.taken.copy()
            if (counts < 0).any():
                self._correct(counts, parts, memories, momenta)
        except BaseException:
            for part in parts:
                self._put_back(*part)
            raise
        if len(parts) == 1:
            return Selected(found.offsets, found.values, counts)
        offsets, values = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        order = offsets.argsort(kind="stable")
        return Selected(offsets[order], values[order], counts)

    def _correct(
        self,
        counts: Integers,
        parts: list[tuple[Integers, Reals]],
        memories: Sequence[torch.Tensor],
        momenta: Mapping[int, torch.Tensor],
    ) -> None:
        """Select from the rows whose count is negative; add their entries to ``parts``."""
        again = np.array([row for row in np.flatnonzero(counts < 0).tolist() if "ranked" not in self._states[row]], int)
        if again.size:
            found = self._search(again)
            parts.append((found.offsets, found.values))
            self._predict(found, again)
            counts[again] = found.taken
        for row in np.flatnonzero(counts < 0).tolist():
            offsets, values = rank(memories[row], int(self.rows["wanted"][row]), float(self.rows["keep"][row]))
            found_values = values.cpu().numpy()
            parts.append((offsets.cpu().numpy() + self._starts[row], found_values))
            if row in momenta:
                momenta[row][offsets] = 0
            counts[row], state = offsets.numel(), self._states[row]
            is_small = memories[row].numel() <= SMALL_SIZE
            steps = int(state["ranked"]) - 1 if "ranked" in state else 0 if is_small else RANKED_STEPS
            least = np.abs(found_values).min(initial=np.inf)
            remember(state, float(np.nextafter(least, np.float32(0))) if offsets.numel() else math.inf, 0.0, steps)

    def _put_back(self, offsets: Integers, values: Reals) -> None:
        """Write entries, ascending, back to the memories that they were taken from."""
        targets = np.zeros(len(self.rows), TARGET)
        targets["address"], targets["shift"] = self.rows["memory"], -self._starts
        ends = np.searchsorted(offsets, self._starts + self.rows["length"])
        self._kernels.scatter(targets, ends - np.searchsorted(offsets, self._starts), offsets, values, adds=False)

    def _keep_largest(self, found: Found) -> Found:
        """Put back all but the ``k`` largest entries of each row that has a surplus; of equal ones the first stay.

        The momentum of a masked row, which a surplus leaves alone, becomes 0 if an entry stays taken.
        """
        rows, count = self.rows, len(self.rows)
        has_surplus = found.taken > rows["most"]
        if not has_surplus.any():
            return found
        taken = found.taken.clip(0)
        of, stays, ends = np.repeat(np.arange(count), taken), np.ones(found.values.size, bool), np.cumsum(taken)
        for row in np.flatnonzero(has_surplus).tolist():
            part = slice(ends[row] - taken[row], ends[row])
            stays[part] = False
            stays[part][largest(found.values[part], int(rows["wanted"][row]))] = True
        parts = np.flatnonzero(~stays), np.flatnonzero(stays & (has_surplus & rows["masked"])[of])
        targets = np.zeros(2 * count, TARGET)
        targets["address"] = np.concatenate([rows["memory"], rows["momentum"]])
        targets["shift"] = np.tile(-self._starts, 2)
        self._kernels.scatter(
            targets,
            np.concatenate([np.bincount(of[part], minlength=count) for part in parts]),
            found.offsets[np.concatenate(parts)],
            np.concatenate([found.values[parts[0]], np.zeros(parts[1].size, np.float32)]),
            adds=False,
        )
        kept = np.where(has_surplus, rows["wanted"], found.taken)
        return found._replace(offsets=found.offsets[stays], values=found.values[stays], taken=kept)

    def _search(self, numbers: Integers) -> Found:
        """Select from some rows, as they are now, at thresholds that are searched for on the device."""
        rows = self.rows[numbers]
        pieces = self._kernels.pieces(rows["length"], self._starts[numbers])
        rows["gradient"], rows["piece"], rows["part"] = 0, pieces.of_rows, pieces.parts_of_rows
        rows["threshold"], rows["fits"] = np.inf, rows["most"]
        return self._kernels.launch(rows, pieces, search=True).collect()

    def _predict(self, found: Found, numbers: Integers) -> None:
        """Set the next thresholds of those searched rows, among ``numbers``, whose entries were accepted."""
        from pscore.selection.host import rule_loops

        which = np.flatnonzero(self.rows["searched"][numbers] & (found.taken >= 0))
        states = [self._states[row] for row in numbers[which].tolist()]
        thresholds = np.array([threshold_of(state) for state in states])
        drifts = np.array([state.get("drift", 0.0) for state in states])
        rule_loops.predict(
            found.thresholds[which], thresholds, drifts, found.taken[which], found.excess[which],
            self.rows["wanted"][numbers[which]],
        )  # fmt: skip
        for state, threshold, drift in zip(states, thresholds.tolist(), drifts.tolist(), strict=True):
            remember(state, threshold, drift)


def rank(memory: torch.Tensor, k: int, keep: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the exact top-k out of a memory on its device, of equal ones the first, and no zero: offsets, values."""
    # A stable sort, because topk may choose any of equal elements.
    offsets = memory.abs().sort(descending=True, stable=True).indices[:k].sort().values
    offsets = offsets[memory[offsets] != 0]
    values = memory[offsets]
    memory[offsets] = keep * values
    return offsets, values
