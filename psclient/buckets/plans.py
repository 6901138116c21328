"""Which tensors travel together: the exact plan, the paper's greedy, and plain rules by size.

Tensors are counted in backward order, and a group is a run of neighbours, because a group's tensors must lie side by
side in the layout (:class:`~pscore.model.layout.Span`).
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from psclient.buckets.workload import CostModel, Cuts, Floats, Workload

Groups = tuple[range, ...]
"""Positions of each group's tensors in the layout, last group first as its gradients come first."""


def exact(workload: Workload, costs: CostModel, *, shared: bool = False) -> Cuts:
    """Return the groups whose last arrival is the earliest possible under the costs.

    Dynamic programming over Pareto fronts: of all ways to cut the first ``j`` tensors, one that ends both selecting and
    sending no sooner than another need not be followed. ``t_s`` and ``t_c`` may be any functions.

    Args:
        workload: what is sent.
        costs: what that costs.
        shared: see :func:`~psclient.buckets.workload.predict`.
    """
    count = len(workload)
    ready = np.concatenate(([0.0], workload.ready))
    fronts = _Fronts()
    for end in range(1, count + 1):
        starts, chosen, sent = fronts.starts, fronts.chosen, fronts.sent
        select, send = workload.group_costs(costs, starts, end)
        first = starts == 0
        moment = chosen + (ready[end] - ready[starts]) if shared else np.maximum(chosen, ready[end])
        moment = moment + first * costs.lead
        selected = moment + select
        arrived = np.maximum(np.where(first, moment + costs.header, sent), selected) + send
        if end == count:
            return fronts.cuts(int(arrived.argmin()), count)
        if not shared:  # who has selected before the next gradient is there gains nothing by it
            selected = np.maximum(selected, ready[end + 1])
        fronts.extend(end, selected, arrived)
    return (0,)


class _Fronts:
    """States ``(selected until, sent until)`` at each cut, and from which state each came."""

    def __init__(self) -> None:
        self.starts: NDArray[np.int64] = np.zeros(1, dtype=np.int64)
        self.chosen: Floats = np.zeros(1)
        self.sent: Floats = np.zeros(1)
        self._parents: NDArray[np.int64] = np.zeros(1, dtype=np.int64)

    def extend(self, end: int, selected: Floats, arrived: Floats) -> None:
        """Keep the Pareto front of the states at a cut."""
        earliest = int(arrived.argmin())
        hopeful = np.flatnonzero(selected < selected[earliest])
        hopeful = np.append(hopeful, earliest)
        order = hopeful[np.lexsort((arrived[hopeful], selected[hopeful]))]
        best = np.minimum.accumulate(arrived[order])
        kept = order[np.concatenate(([True], arrived[order][1:] < best[:-1]))]
        self.starts = np.concatenate((self.starts, np.full(kept.size, end)))
        self.chosen = np.concatenate((self.chosen, selected[kept]))
        self.sent = np.concatenate((self.sent, arrived[kept]))
        self._parents = np.concatenate((self._parents, kept))

    def cuts(self, state: int, end: int) -> Cuts:
        """Follow a state back to the beginning."""
        found = [end]
        while self.starts[state]:
            found.append(int(self.starts[state]))
            state = int(self._parents[state])
        return (0, *reversed(found))


def greedy(workload: Workload, costs: CostModel, *, shared: bool = False) -> Cuts:
    """Return the groups of the paper's algorithm (MGS-SGD, section IV): one look at each neighbour, in backward order.

    The next tensor joins the group where waiting for it and selecting both together costs less time than one start-up
    saves. With ``shared`` this is the published condition; where selection runs beside backward, its moments are those
    of that.
    """
    cuts = [0]
    selected = sent = 0.0  # of the groups that are complete
    for end in range(1, len(workload)):
        start = cuts[-1]
        moment = _moment(workload, costs, selected, start, end, shared=shared)
        (select_group, select_next), (send_group, send_next) = _pair(workload, costs, start, end)
        (select_both,), (send_both,) = workload.group_costs(costs, np.array([start]), end + 1)
        alone = moment + select_group
        begins = max(sent if start else moment + costs.header, alone)
        together = _moment(workload, costs, selected, start, end + 1, shared=shared) + select_both
        if together - alone - select_next - (begins - alone) >= send_group + send_next - send_both:
            cuts.append(end)
            selected, sent = alone, begins + send_group
    return (*cuts, len(workload))


def _moment(workload: Workload, costs: CostModel, selected: float, start: int, end: int, *, shared: bool) -> float:
    """Return when the selection of a group begins."""
    ready = float(workload.ready[end - 1])
    before = float(workload.ready[start - 1]) if start else 0.0
    return (selected + ready - before if shared else max(selected, ready)) + (0.0 if start else costs.lead)


def _pair(workload: Workload, costs: CostModel, start: int, end: int) -> tuple[Floats, Floats]:
    """Return ``t_s`` and ``t_c`` of the group up to ``end`` and of the tensor that follows."""
    group = workload.group_costs(costs, np.array([start]), end)
    following = workload.group_costs(costs, np.array([end]), end + 1)
    return np.concatenate((group[0], following[0])), np.concatenate((group[1], following[1]))


def by_size(sizes: Sequence[float], least: int) -> Groups:
    """Merge neighbours, last first, until a group has this size; sizes in the order of the layout."""
    groups: list[range] = []
    end, size = len(sizes), 0.0
    for position in reversed(range(len(sizes))):
        size += sizes[position]
        if size >= least or position == 0:
            groups.append(range(position, end))
            end, size = position, 0.0
    return tuple(groups)


def parts(elements: Floats, most: int) -> Cuts:
    """Return cuts of which there are about ``most`` at most: each tensor, or small neighbours together.

    Planning takes time that grows with the square of their number, and what is lost is a cut between two tensors that
    together are ``1/most`` of the model.
    """
    if len(elements) <= most:
        return tuple(range(len(elements) + 1))
    return cuts_of(by_size(elements[::-1].tolist(), int(elements.sum() / most) + 1))


def layers(count: int) -> Groups:
    """Make every tensor a group of its own."""
    return tuple(range(position, position + 1) for position in reversed(range(count)))


def groups_of(cuts: Sequence[int]) -> Groups:
    """Return positions in the layout from places in backward order."""
    count = cuts[-1]
    return tuple(range(count - end, count - start) for start, end in pairwise(cuts))


def cuts_of(groups: Sequence[range]) -> Cuts:
    """Return places in backward order from positions in the layout."""
    count = groups[0].stop
    return (0, *(count - group.start for group in groups))
