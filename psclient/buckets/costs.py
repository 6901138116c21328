"""Costs of a push, and its workload, tensor by tensor in the order in which gradients come."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Places = NDArray[np.int64] | int
Cuts = tuple[int, ...]
"""Where groups begin and end in backward order: ``0``, rising, up to the number of tensors."""


@dataclass(frozen=True)
class Costs:
    """Costs of groups; seconds, and seconds an item.

    ::

        t_s(group) = group + tensor·tensors + element·elements      selecting, encoding, handing over; one thread
        t_c(group) = message + byte·bytes                           until it is whole at the server; one link

    Opening a push costs ``lead`` and one message more; ``tail`` is from the last arrival to the answer. Several shards
    are behind the same network card, so all of them are one link.
    """

    lead: float = 0.0
    group: float = 0.0
    tensor: float = 0.0
    element: float = 0.0
    message: float = 0.0
    byte: float = 0.0
    tail: float = 0.0

    def select(self, tensors: Floats, elements: Floats) -> Floats:
        """Return ``t_s`` of groups of so many tensors and elements."""
        return self.group + self.tensor * tensors + self.element * elements

    def send(self, nbytes: Floats) -> Floats:
        """Return ``t_c`` of groups of so many message bytes; a group that sends nothing costs nothing."""
        return np.where(nbytes > 0, self.message + self.byte * nbytes, 0.0)

    def begin(self, free: Floats, before: Floats, ready: Floats) -> Floats:
        """Return when selecting can begin that is ``free`` then and has gradients at ``ready``, after those before."""
        return np.maximum(free, ready)


@dataclass(frozen=True)
class Workload:
    """A model's tensors, last first, ``[L]`` each.

    Attributes:
        ready: when each gradient and all before it are there, seconds after the first, rising.
        tensors: 1, or 0 for a tensor that has no gradient.
        elements: of each, 0 for one that has no gradient.
        nbytes: message bytes that each is expected to send.
    """

    ready: Floats
    tensors: Floats
    elements: Floats
    nbytes: Floats

    def __len__(self) -> int:
        return len(self.ready)

    @cached_property
    def _sums(self) -> tuple[Floats, ...]:
        """Sums of tensors, elements and bytes before each place, ``[L + 1]``."""
        return tuple(np.concatenate(([0.0], np.cumsum(x))) for x in (self.tensors, self.elements, self.nbytes))

    def group_costs(self, costs: Costs, starts: Places, ends: Places) -> tuple[Floats, Floats]:
        """Return ``t_s`` and ``t_c`` of the groups that begin at ``starts`` and end before ``ends``."""
        tensors, elements, nbytes = (sums[ends] - sums[starts] for sums in self._sums)
        return costs.select(tensors, elements), costs.send(nbytes)

    def joined(self, cuts: Sequence[int]) -> "Workload":
        """Return the same with every run of tensors between two cuts as one."""
        sums = (np.add.reduceat(each, cuts[:-1]) for each in (self.tensors, self.elements, self.nbytes))
        return Workload(self.ready[[cut - 1 for cut in cuts[1:]]], *sums)


class Timeline(NamedTuple):
    """When a group's last gradient is there, the group is handed to the transport, and whole at the server.

    Seconds after the first gradient; without overlap, after the beginning of the push.
    """

    ready: float
    selected: float
    arrived: float


class Prediction(NamedTuple):
    """When the groups of a plan would be done; ``exposed`` is seconds from the last gradient to the answer."""

    groups: list[Timeline]
    exposed: float


def predict(cuts: Sequence[int], workload: Workload, costs: Costs) -> Prediction:
    """Return when groups would be done that are selected one after the other, and sent one after the other."""
    select, send = workload.group_costs(costs, np.array(cuts[:-1]), np.array(cuts[1:]))
    groups: list[Timeline] = []
    selected = arrived = before = np.zeros(())
    for ready, selecting, sending in zip(workload.ready[[cut - 1 for cut in cuts[1:]]], select, send, strict=True):
        selected = costs.begin(selected, before, ready)
        if not groups:
            selected += costs.lead
            arrived = selected + costs.message
        selected += selecting
        arrived = max(arrived, selected) + sending
        before = ready
        groups.append(Timeline(float(ready), float(selected), float(arrived)))
    return Prediction(groups, float(arrived + costs.tail - before))
