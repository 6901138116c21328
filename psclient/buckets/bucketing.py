"""Which tensors travel together: plain rules by size, the exact plan, the paper's greedy.

Tensors are counted in backward order, and a group is a run of neighbours, because a group's tensors must lie side by
side in the layout (:class:`~pscore.model.layout.Span`).
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from psclient.buckets.costs import Costs, Cuts, Floats, Workload

Groups = tuple[range, ...]
"""Positions of each group's tensors in the layout, last group first as its gradients come first."""


def by_size(sizes: Sequence[float], least: float) -> Groups:
    """Merge neighbours, last first, until a group has this size; sizes in the order of the layout."""
    groups: list[range] = []
    end, size = len(sizes), 0.0
    for position in reversed(range(len(sizes))):
        size += sizes[position]
        if size >= least or position == 0:
            groups.append(range(position, end))
            end, size = position, 0.0
    return tuple(groups)


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

    The time of planning grows with the square of their number; lost is a cut between two tensors that together are
    ``1/most`` of the model.
    """
    least = elements.sum() / most if len(elements) > most else 0.0
    return cuts_of(by_size(elements[::-1].tolist(), least))


def exact(workload: Workload, costs: Costs) -> Cuts:
    """Return the groups whose last arrival is the earliest possible under the costs, whatever functions these are.

    Dynamic programming over Pareto fronts: of all ways to cut the first ``j`` tensors, one that ends both selecting and
    sending no sooner than another need not be followed.
    """
    ready = np.concatenate(([0.0], workload.ready, workload.ready[-1:]))
    # States at a cut, by number: the cut, when selection goes on and sending ends there, and the state before.
    starts = parents = np.zeros(1, dtype=np.int64)
    free = costs.begin(np.zeros(1), ready[0], ready[1])
    sent = np.zeros(1)
    for end in range(1, len(workload) + 1):
        select, send = workload.group_costs(costs, starts, end)
        first = starts == 0
        opened = costs.begin(free, ready[starts + 1], ready[end]) + first * costs.lead
        selected = opened + select
        arrived = np.maximum(np.where(first, opened + costs.opening, sent), selected) + send
        selected = costs.begin(selected, ready[end], ready[end + 1])  # to end before the next gradient gains nothing
        front = _pareto_front(selected, arrived)
        starts = np.concatenate((starts, np.full(front.size, end)))
        free = np.concatenate((free, selected[front]))
        sent = np.concatenate((sent, arrived[front]))
        parents = np.concatenate((parents, front))
    cuts, state = [len(workload)], len(starts) - 1  # the state of the last front that arrives first
    while cuts[0]:
        state = int(parents[state])
        cuts.insert(0, int(starts[state]))
    return tuple(cuts)


def _pareto_front(selected: Floats, arrived: Floats) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the states that no other one beats in both times; ``selected`` rises and ``arrived`` falls."""
    earliest = int(arrived.argmin())
    hopeful = np.append(np.flatnonzero(selected < selected[earliest]), earliest)
    order = hopeful[np.lexsort((arrived[hopeful], selected[hopeful]))]
    best = np.minimum.accumulate(arrived[order])
    return order[np.concatenate(([True], arrived[order][1:] < best[:-1]))]


def greedy(workload: Workload, costs: Costs) -> Cuts:
    """Return the groups of the paper's algorithm (MGS-SGD, section IV): one pass, in backward order.

    The next tensor joins the group where waiting for it and selecting both together costs less time than one start-up
    saves; moments are those of the selection as the costs have it.
    """
    ready = np.concatenate(([0.0], workload.ready))
    cuts = [0]
    selected = sent = np.zeros(())  # of the groups that are complete
    for end in range(1, len(workload)):
        start = cuts[-1]
        lead = 0.0 if start else costs.lead
        opened, opened_both = (costs.begin(selected, ready[start], ready[last]) + lead for last in (end, end + 1))
        select_group, send_group = workload.group_costs(costs, start, end)
        select_next, send_next = workload.group_costs(costs, end, end + 1)
        select_both, send_both = workload.group_costs(costs, start, end + 1)
        alone = opened + select_group
        link_free = max(sent if start else opened + costs.opening, alone)
        if opened_both + select_both - select_next - link_free >= send_group + send_next - send_both:
            cuts.append(end)
            selected, sent = alone, link_free + send_group
    return (*cuts, len(workload))
