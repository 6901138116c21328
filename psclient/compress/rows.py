"""Updates carried out tensor by tensor: for small models, and for selectors of one tensor or a group.

:class:`pscore.selection.inputs.Memory` adds and selects in one pass over the memory.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from psclient.compress.choice import Choice
from psclient.compress.memories import Memories
from psclient.compress.method import Recurrence, State
from psclient.report import StepReport
from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.selection import SelectorState, entries_for
from pscore.selection.base import take_all
from pscore.selection.inputs import Joined, Memory
from pscore.selection.kernels.base import GradientUpdate, Taken


class Row(NamedTuple):
    """A tensor of a push: its place in the layout, its recurrence, and its density."""

    position: int
    span: Span
    recurrence: Recurrence
    density: float


class Residual(NamedTuple):
    """A residual from which entries are to be selected: fp32 ``[n]``, and what is added to it first."""

    row: Row
    memory: torch.Tensor
    added: GradientUpdate | None
    masked: torch.Tensor | None
    state: State

    def source(self) -> Memory:
        """Return the residual as the input of a selector."""
        return Memory(self.memory, self.added, self.row.recurrence.keep)


def compress(
    rows: Sequence[Row],
    gradients: Mapping[int, torch.Tensor],
    parameters: Sequence[torch.Tensor],
    clip: float,
    memories: Memories,
    choice: Choice,
    report: StepReport,
) -> dict[int, SparseSlice]:
    """Carry out and select from the updates of tensors on one device; return what each tensor sends, by position.

    The report counts ``Σ k`` and the selected entries; tensors that are sent whole do not count.
    """
    sent: dict[int, SparseSlice] = {}
    pools: dict[float, list[Residual]] = {}
    for row in rows:
        gradient = gradients[row.position].detach().reshape(-1)
        theta = parameters[row.position].detach().reshape(-1) if row.recurrence.decay else None
        added = _addition(row, gradient if clip == 1 else gradient.float() * clip, theta, memories)
        if row.recurrence.whole:
            sent[row.position] = SparseSlice(row.span, None, _whole(row, added, memories))
            continue
        residual = _residual(row, memories, added)
        if row.span.length < choice.dense_below:
            sent[row.position] = take_whole(residual)
        else:
            pools.setdefault(row.density, []).append(residual)
    for density, pool in pools.items():
        for part in [pool] if choice.over == "group" else [[residual] for residual in pool]:
            state = part[0].state.setdefault("recall", {})
            for residual, piece in zip(part, _pooled(part, state, density, choice, report), strict=True):
                sent[residual.row.position] = _finish(residual, piece)
    return sent


def held(row: Row, memories: Memories) -> SparseSlice:
    """Take everything out of a tensor's residual."""
    return take_whole(_residual(row, memories, None))


def take_whole(residual: Residual) -> SparseSlice:
    """Take every entry of a residual that is not zero; nothing is masked."""
    return _finish(residual._replace(masked=None), take_all(residual.source()))


def _addition(row: Row, gradient: torch.Tensor, theta: torch.Tensor | None, memories: Memories) -> GradientUpdate:
    """Return what is added to the residual; a kernel carries it out, but for forms of the momentum that none has."""
    scale, decay, factor, rate = (getattr(row.recurrence, name) for name in ("scale", "decay", "factor", "rate"))
    u = memories.of("momentum", row.position) if factor else None
    if rate == 1 and not row.recurrence.whole:
        return GradientUpdate(gradient, scale, theta, decay, u, factor)
    d = gradient.float() * scale
    if theta is not None:
        d = d + theta.float() * decay
    if u is not None:
        d = u.mul_(factor).add_(d)
    return GradientUpdate(d, rate)


def _whole(row: Row, added: GradientUpdate, memories: Memories) -> torch.Tensor:
    """Return all of a residual after the addition; it is empty then."""
    state, (retain, unit) = memories.state(row.position), (row.recurrence.retain, row.recurrence.unit)
    sent = added.gradient * added.scale
    if "residual" in state:
        sent += state.pop("residual").reshape(-1).to(sent.device) * retain
    return sent if unit == 1 else unit * sent


def _residual(row: Row, memories: Memories, added: GradientUpdate | None) -> Residual:
    residual = memories.of("residual", row.position)
    if row.recurrence.retain != 1 and added is not None:
        residual.mul_(row.recurrence.retain)
    masked = added.momentum if added is not None and row.recurrence.masks_momentum else None
    return Residual(row, residual, added, masked, memories.state(row.position))


def _pooled(
    pool: Sequence[Residual], state: SelectorState, density: float, choice: Choice, report: StepReport
) -> list[Taken]:
    """Select from some residuals as if they were one."""
    joined = Joined([residual.source() for residual in pool]) if len(pool) > 1 else None
    source = joined or pool[0].source()
    k = entries_for(source.numel, density)
    taken = choice.selector(source, k, state)
    report.wanted_entries += k
    report.selected_entries += taken.offsets.numel()
    return [taken] if joined is None else joined.split(taken)


def _finish(residual: Residual, taken: Taken) -> SparseSlice:
    if residual.masked is not None:
        residual.masked[taken.offsets] = 0
    unit = residual.row.recurrence.unit
    return SparseSlice(residual.row.span, taken.offsets, taken.values if unit == 1 else unit * taken.values)
