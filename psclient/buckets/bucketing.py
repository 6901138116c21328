"""Which tensors travel together: plain rules by size, the exact plan, the paper's greedy.

Tensors are counted in backward order, and a group is a run of neighbours, because a group's tensors must lie side by
side in the layout (:class:`~pscore.model.layout.Span`).
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from psclient.buckets.costs import Costs, Cuts, Floats, Workload

Groups = tuple[range, ...]
"""Positions of each group's tensors in the layout, last group first as its gradients come first."""


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


def parts(elements: Floats, most: int) -> Cuts:
    """Return cuts of which there are about ``most`` at most: each tensor, or small neighbours together.

    Planning takes time that grows with the square of their number, and what is lost is a cut between two tensors that
    together are ``1/most`` of the model.
    """
    if len(elements) <= most:
        return tuple(range(len(elements) + 1))
    return cuts_of(by_size(elements[::-1].tolist(), int(elements.sum() / most) + 1))


def exact(workload: Workload, costs: Costs, *, shared: bool = False) -> Cuts:
    """Return the groups whose last arrival is the earliest possible under the costs, whatever functions these are.

    Dynamic programming over Pareto fronts: of all ways to cut the first ``j`` tensors, one that ends both selecting and
    sending no sooner than another need not be followed. For ``shared`` see :func:`~psclient.buckets.costs.predict`.
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
        arrived = np.maximum(np.where(first, moment + costs.message, sent), selected) + send
        if end == count:
            return fronts.cuts(int(arrived.argmin()), count)
        if not shared:  # to have selected before the next gradient is there gains nothing
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
        hopeful = np.append(np.flatnonzero(selected < selected[earliest]), earliest)
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


def greedy(workload: Workload, costs: Costs, *, shared: bool = False) -> Cuts:
    """Return the groups of the paper's algorithm (MGS-SGD, section IV): one pass, in backward order.

    The next tensor joins the group where waiting for it and selecting both together costs less time than one start-up
    saves. With ``shared`` this is the published condition; else with moments of a selection that runs beside backward.
    """
    ready: list[float] = [0.0, *workload.ready.tolist()]
    cuts = [0]
    selected = sent = 0.0  # of the groups that are complete

    def begins(start: int, end: int) -> float:
        """Return when the selection of a group begins."""
        moment = selected + ready[end] - ready[start] if shared else max(selected, ready[end])
        return moment + (0.0 if start else costs.lead)

    def cost(start: int, end: int) -> tuple[float, float]:
        select, send = workload.group_costs(costs, np.array([start]), end)
        return float(select[0]), float(send[0])

    for end in range(1, len(workload)):
        start = cuts[-1]
        moment = begins(start, end)
        select_group, send_group = cost(start, end)
        select_next, send_next = cost(end, end + 1)
        select_both, send_both = cost(start, end + 1)
        alone = moment + select_group
        free = max(sent if start else moment + costs.message, alone)
        together = begins(start, end + 1) + select_both
        if together - select_next - free >= send_group + send_next - send_both:
            cuts.append(end)
            selected, sent = alone, free + send_group
    return (*cuts, len(workload))
