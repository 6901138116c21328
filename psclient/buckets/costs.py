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
    are behind the same network card, so all of them are one link. Groups in a row travel in one message until they have
    ``together`` bytes, and the opening travels with the first: a smaller group costs a share of a message.
    """

    lead: float = 0.0
    group: float = 0.0
    tensor: float = 0.0
    element: float = 0.0
    message: float = 0.0
    byte: float = 0.0
    tail: float = 0.0
    together: float = 0.0

    @property
    def opening(self) -> float:
        """The message of the opening, where it is one of its own."""
        return 0.0 if self.together else self.message

    def select(self, tensors: Floats, elements: Floats) -> Floats:
        """Return ``t_s`` of groups of so many tensors and elements."""
        return self.group + self.tensor * tensors + self.element * elements

    def send(self, nbytes: Floats) -> Floats:
        """Return ``t_c`` of groups of so many message bytes, each a message; one that sends nothing costs nothing."""
        return np.where(nbytes > 0, self.message + self.byte * nbytes, 0.0)

    def send_shared(self, nbytes: Floats) -> Floats:
        """Return ``t_c`` of groups of which small ones share a message, and so its start-up."""
        if not self.together:
            return self.send(nbytes)
        return self.send(nbytes) - self.message * np.clip(1 - nbytes / self.together, 0.0, 1.0) * (nbytes > 0)

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
        return costs.select(tensors, elements), costs.send_shared(nbytes)

    def group_bytes(self, starts: Places, ends: Places) -> Floats:
        """Return the message bytes of groups."""
        return np.asarray(self._sums[2][ends] - self._sums[2][starts])

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
    """Return when groups would be done that are selected one after the other, and sent one message after the other."""
    starts, ends = np.array(cuts[:-1]), np.array(cuts[1:])
    select, _ = workload.group_costs(costs, starts, ends)
    groups: list[Timeline] = []
    waiting: list[tuple[float, float]] = []  # groups of the next message: when ready, when selected
    selected = arrived = before = np.zeros(())
    pending = 0.0
    for end, selecting, nbytes in zip(cuts[1:], select, workload.group_bytes(starts, ends), strict=True):
        ready = workload.ready[end - 1]
        selected = costs.begin(selected, before, ready)
        if end == cuts[1]:
            selected += costs.lead
            arrived = selected + costs.opening
        selected += selecting
        before = ready
        pending += nbytes
        waiting.append((float(ready), float(selected)))
        if pending >= costs.together or end == cuts[-1]:
            arrived = max(arrived, selected) + float(costs.send(np.array(pending)))
            groups += [Timeline(*moments, float(arrived)) for moments in waiting]
            waiting, pending = [], 0.0
    return Prediction(groups, float(arrived + costs.tail - before))
