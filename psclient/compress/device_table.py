"""The tensors of a group on a device as one table, which four launches update and select from."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from psclient.compress.gradients import Gradients, Scale
from psclient.compress.host_table import Choice, Filled, Places, Rule, Sent
from psclient.compress.residuals import Memories
from psclient.report import StepReport
from pscore.model.sparse_slice import SparseSlice
from pscore.selection.cuda.launches import DeviceKernels
from pscore.selection.cuda.segments import DeviceSegments

_ADDRESSES = ("memory", "momentum", "gradient", "parameters")


class DeviceTable(Filled):
    """Some tensors on one device; :meth:`launch` begins a step's selection, and :meth:`collect` ends it."""

    def __init__(self, places: Places, kernels: DeviceKernels) -> None:
        self._segments = DeviceSegments(kernels, places.sizes, places.starts - places.span.start)
        super().__init__(places, self._segments.rows)
        self._used: list[torch.Tensor] = []
        self._residuals: list[torch.Tensor] = []
        self._momenta: dict[int, torch.Tensor] = {}

    def launch(
        self,
        rules: Mapping[int, Rule],
        densities: Mapping[int, float],
        gradients: Gradients,
        parameters: Sequence[torch.Tensor],
        clip: Scale,
        memories: Memories,
        choice: Choice,
    ) -> None:
        """Begin to carry out the tensors' updates, and to select from them."""
        rows = self._rows
        if self._fill(rules, densities, choice.dense_below):
            self._segments.want(self._k)
            rows["masked"] = False if self._masked is None else self._masked
            if self._all_whole:
                rows["room"] = rows["start"]
        self._used = self._refer(gradients, parameters)
        with_momentum = np.flatnonzero(rows["factor"]).tolist()
        self._momenta = {row: memories.of("momentum", self._positions[row]) for row in with_momentum}
        rows["momentum"] = 0
        rows["momentum"][with_momentum] = [tensor.data_ptr() for tensor in self._momenta.values()]
        found = [
            memories.of("residual", position)
            if not self._all_whole or "residual" in memories.state(position)
            else None  # stays without one
            for position in self._positions
        ]
        self._residuals = [tensor for tensor in found if tensor is not None]
        rows["memory"] = [0 if tensor is None else tensor.data_ptr() for tensor in found]
        rows["aligned"] = np.bitwise_or.reduce([rows[name] for name in _ADDRESSES]) % 16 == 0
        states = memories.states_of(self._searched_positions)
        recalls = {row: state.setdefault("recall", {}) for row, state in zip(self._searched, states, strict=True)}
        self._segments.launch(clip, recalls, gradients.unsound)

    def abandon(self, memories: Memories, report: StepReport) -> list[SparseSlice]:
        """End what is under way, after an error; return what it has taken."""
        try:
            return self.collect(memories, report).slices if self._segments.is_under_way else []
        except Exception:  # the first error is the one to tell of
            self._segments.wait()
            return []

    def collect(self, memories: Memories, report: StepReport) -> Sent:
        """Wait for the entries, and return them on the host."""
        if self._all_whole:
            values = self._segments.whole().numpy()
            memories.clear("residual", self._positions)
            self._forget()
            return self._runs(values)
        masked = {row: tensor for row, tensor in self._momenta.items() if self._rows["masked"][row]}
        offsets, values, counts = self._segments.collect(self._residuals, masked)
        self._forget()
        piece, entries = self._entries(offsets, values, counts, memories, report)
        return Sent([piece], entries, bool(np.isfinite(piece.values.numpy()).all()))

    def _forget(self) -> None:
        """Let go of the tensors that the device no longer uses."""
        self._used, self._residuals, self._momenta = [], [], {}
