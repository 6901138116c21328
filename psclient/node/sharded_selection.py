"""The selection from a model that ranks have in parts, as the leader's engine asks for it."""

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from psclient.compress.gradients import Gradients, Scale
from psclient.compress.groups import ParamGroups
from psclient.compress.host_table import Sent
from psclient.compress.residuals import Memories
from psclient.errors import ConfigurationError
from psclient.report import StepReport
from pscore.model.sparse_slice import SparseSlice

if TYPE_CHECKING:
    from psclient.node.sharded import Sharded


class ShardedSelection:
    """The selection from blocks on all ranks; see :class:`~psclient.engine.home.Selection`.

    Attributes:
        memories: of the leader's own blocks.
    """

    on_one_device = False

    def __init__(self, ranks: "Sharded", groups: ParamGroups, memories: Memories) -> None:
        self._ranks, self._groups, self.memories = ranks, groups, memories

    def compress(self, group: range, gradients: Gradients, scale: Scale, report: StepReport) -> Sent:
        """Have each rank select from its blocks of a group; after an error all has been restored."""
        values, factor, rank = self._values(), float(scale), self._ranks.rank
        slices, selected, faults = self._ranks.select(
            "compress", group, values, lambda: rank.compress(group, values, factor), scale=factor
        )
        if faults:
            self.restore(slices)
            raise faults[0]
        report.wanted_entries += sum(each.wanted for each in selected)
        report.selected_entries += sum(each.found for each in selected)
        entries: dict[int, int] = defaultdict(int)
        for each in selected:
            for position, part in each.entries:
                entries[position] += part.entries
        return Sent(slices, entries, is_finite=True)

    def take_residuals(self, group: range) -> list[SparseSlice]:
        """Take everything out of the residuals of a group, on all ranks."""
        values, rank = self._values(), self._ranks.rank
        slices, _, faults = self._ranks.select(
            "take residuals", group, values, lambda: rank.take_residuals(group, values)
        )
        if faults:
            self.restore(slices)
            raise faults[0]
        return slices

    def _values(self) -> list[dict[str, float]]:
        """Return the hyper-parameters of the push that are numbers, a mapping a group."""
        groups = [self._groups.values(number) for number in range(len(self._groups.all))]
        return [
            {name: float(value) for name, value in group.items() if isinstance(value, int | float | np.number)}
            for group in groups
        ]

    def abandon(self) -> None:
        """Restore the entries, on all ranks, of groups that :meth:`compress` was not asked for."""
        self._ranks.tell("abandon")
        self._ranks.rank.abandon()

    def restore(self, slices: Iterable[SparseSlice], *, at_once: bool = True) -> None:
        """Add entries that did not arrive to the residuals of the ranks whose blocks they lie in."""
        for piece in self._ranks.spread("restore", slices, at_once=at_once):
            self._ranks.rank.restore([piece], at_once=at_once)

    def fill_memories(self) -> None:
        """Have every memory that the method keeps of the leader's blocks; the others do so by themselves."""
        self._ranks.rank.fill_memories()

    def take_off_unsent(self) -> NoReturn:
        """Refuse: the leader has no other rank's residuals."""
        raise ConfigurationError("lookahead() is not for several ranks that are one worker")
