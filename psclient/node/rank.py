"""One rank of a sharded worker: it works on its own blocks, when the leader asks for it."""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from isal.isal_zlib import crc32

from psclient.compress.gradients import Gradients, finite, norms
from psclient.compress.groups import ParamGroups
from psclient.compress.host_table import Choice
from psclient.compress.method import Method, State
from psclient.compress.residuals import RESIDUAL_TYPES
from psclient.compress.selector import Grouping, Selector
from psclient.model.part import Part
from psclient.model.replica import DIGEST_BLOCK, Replica
from psclient.model.requirements import local_of
from psclient.report import StepReport
from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.selection import SELECTORS
from pscore.wire.dense import bytes_of


@dataclass
class Selected:
    """A rank's selection: a parameter's position and entries, as :meth:`Part.outgoing` has them.

    ``wanted`` and ``found`` count entries, as a :class:`StepReport` does.
    """

    entries: list[tuple[int, SparseSlice]] = field(default_factory=list)
    wanted: int = 0
    found: int = 0


class Rank:
    """One rank's blocks: their values, gradients, selection and residuals.

    Args:
        part: the blocks.
        groups: the optimizer's param groups.

    Attributes:
        values: the blocks' values, in the layout of the blocks.
        speaks: of each parameter whether this rank's block is the one that counts, and not another rank's equal one.
    """

    def __init__(self, part: Part, groups: Sequence[Mapping[str, Any]]) -> None:
        self.part = part
        self.values = Replica(part.own.layout, part.own.parameters)
        self.speaks = [False] * len(part.blocks)
        self._groups = ParamGroups(part.groups(groups))
        self._states: MutableMapping[torch.Tensor, State] = {}
        self._selector: Selector | None = None
        self._gradients = Gradients({})
        self._method: Method | None = None

    # Selection

    def prepare(
        self, method: Method, states: MutableMapping[torch.Tensor, State], selector: str, dense_below: int, kept_in: str
    ) -> None:
        """Be ready to select: ``states`` are the optimizer's, by parameter; others are names of settings."""
        self._method = method
        self.take_states(states)
        choice = Choice(SELECTORS[selector], dense_below, kept_in=RESIDUAL_TYPES[kept_in])
        grouping = Grouping(self.part.own.layout, 1)
        self._selector = Selector(method, self.part.own, self._states, self._groups, choice, grouping)

    @property
    def selector(self) -> Selector:
        """The selector of this rank's blocks; known behind :meth:`prepare`."""
        assert self._selector is not None
        return self._selector

    def take_states(self, states: MutableMapping[torch.Tensor, State]) -> None:
        """Use these states, of the parameters that are trained."""
        self._states = {
            alias: states.setdefault(parameter, {})
            for parameter, alias in zip(self.part.whole.parameters, self.part.own.parameters, strict=True)
            if alias in self._groups
        }
        if self._selector is not None:
            self._selector.memories.states = self._states

    def take_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Use these param groups, the optimizer's."""
        self._groups.assign(self.part.groups(groups))

    def gather(self, copied: Sequence[int]) -> dict[str, Any]:
        """Take the gradients that are there.

        Returns:
            ``trained``: how many blocks could have a gradient; ``missing``: the positions of those that have none;
            ``norms``: of each gradient at a position in ``copied``, ``[position, L2 norm]``.

        Raises:
            NonFiniteGradientError: one is not finite.
            ConfigurationError: one does not lie as its parameter does.
        """
        trained = self._groups.trained(self.part.own.parameters)
        self.part.check_gradients(trained)
        self._gradients = finite(self.part.own, self.part.gradients(trained))
        there = [n for n in copied if n in self._gradients]
        found = norms([self._gradients[n] for n in there]).tolist() if there else []
        return {
            "trained": len(trained),
            "missing": [n for n in trained if n not in self._gradients],
            "norms": list(zip(there, found, strict=True)),
        }

    def norms(self) -> torch.Tensor:
        """Return the L2 norms of the gradients' blocks that count, fp32 ``[m]`` on the host."""
        return norms([each for n, each in self._gradients.items() if self.speaks[n]]).cpu()

    def compress(self, group: range, values: Sequence[Mapping[str, float]], scale: float) -> Selected:
        """Select from a group of tensors at these hyper-parameters; see :meth:`Selector.compress`."""
        self._groups.assume(values)
        report = StepReport(0)
        sent = self.selector.compress(group, self._gradients, scale, report)
        return Selected(self._outgoing(sent.slices), report.wanted_entries, report.selected_entries)

    def take_residuals(self, group: range, values: Sequence[Mapping[str, float]]) -> Selected:
        """Take everything out of the residuals of a group."""
        self._groups.assume(values)
        return Selected(self._outgoing(self.selector.take_residuals(group)))

    def _outgoing(self, slices: Iterable[SparseSlice]) -> list[tuple[int, SparseSlice]]:
        return [each for each in self.part.outgoing(slices) if self.speaks[each[0]]]

    def abandon(self) -> None:
        """Restore the entries of groups that :meth:`compress` was not asked for."""
        self.selector.abandon()

    def restore(self, segments: Iterable[SparseSlice], *, at_once: bool) -> None:
        """Add entries of the whole layout to the residuals again, as far as they are this rank's."""
        self.selector.restore(self.part.incoming(segments), at_once=at_once)

    def fill_memories(self) -> None:
        """Have every memory that the method keeps, of blocks without elements too: all ranks save the same names."""
        self.selector.fill_memories()
        assert self._method is not None
        kept_in = self.selector.memories.dtype
        for alias, number in zip(
            self.part.own.parameters, self._groups.numbers_of(self.part.own.parameters).tolist(), strict=True
        ):
            if number < 0 or alias.numel():
                continue
            recurrence = self._method.recurrence({**self._groups.all[number], "lr": 1.0})
            for name, is_kept in (("residual", not recurrence.whole), ("momentum", recurrence.factor)):
                if is_kept:
                    self._states[alias].setdefault(name, torch.zeros(0, dtype=kept_in, device=alias.device))

    # Values

    def write(self, segments: Iterable[SparseSlice], *, adds: bool) -> None:
        """Write entries of the whole layout, or add them, as far as they are this rank's."""
        mine = self.part.incoming(segments)
        if adds:
            self.values.add(mine)
        else:
            self.values.write(mine)

    def open_fp32(self, span: Span) -> None:
        """See :meth:`Replica.open_fp32`; the span is of the whole layout."""
        for position, _ in self.part.whole.layout.overlapping(span):
            self.values.open_fp32(self.part.local_span(position, span))

    def read(self, span: Span) -> torch.Tensor:
        """Return the values in a span of the whole layout that this rank speaks for, fp32 on the host, ascending."""
        found = []
        for position, _ in self.part.whole.layout.overlapping(span):
            if self.speaks[position]:
                found += [each.values for each in self.values.read(self.part.local_span(position, span))]
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.float32, device="cpu")

    def checksums(self) -> list[tuple[int, int, int]]:
        """Return the checksum of each block of :meth:`Replica.digest` that this rank has whole.

        Each is (a parameter's position, the number of the block in it, the checksum).
        """
        found = []
        for position, (block, alias) in enumerate(zip(self.part.blocks, self.part.own.parameters, strict=True)):
            first = block.first
            if not self.speaks[position] or first is None:
                continue
            flat, size = alias.detach().reshape(-1), block.spec.numel
            for number in range(first // DIGEST_BLOCK, -(-size // DIGEST_BLOCK)):
                start, end = number * DIGEST_BLOCK, min(size, (number + 1) * DIGEST_BLOCK)
                if first <= start and end <= first + block.numel:
                    found.append((position, number, crc32(bytes_of(flat[start - first : end - first]))))
        return found

    def not_finite(self) -> int:
        """Return the position of the first block with a value that is not finite; −1 if there is none."""
        return self.part.whole.layout.position(self.values.not_finite())


def octets_in(tensor: torch.Tensor, mine: range) -> torch.Tensor:
    """Return the bytes of neighbouring elements of a rank's block of any dtype, uint8 ``[n, itemsize]``."""
    flat = local_of(tensor).detach().reshape(-1)[mine.start : mine.stop].cpu().contiguous()
    return flat.view(torch.uint8).reshape(len(mine), tensor.dtype.itemsize)


def joined_offsets(selected: Selected) -> tuple[np.ndarray[Any, np.dtype[np.int64]], torch.Tensor]:
    """Return the offsets, int64, and the values, fp32, of all entries of a rank, one parameter behind the other."""
    offsets = [each.offsets.numpy() for _, each in selected.entries if each.offsets is not None]
    values = [each.values for _, each in selected.entries]
    return (
        np.concatenate([np.empty(0, np.int64), *offsets]),
        torch.cat(values) if values else torch.zeros(0, dtype=torch.float32, device="cpu"),
    )
