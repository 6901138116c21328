"""What a step has to send, tensor by tensor in the order in which gradients come, and the form of what that costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Cuts = tuple[int, ...]
"""Where groups begin and end in backward order: ``0``, rising, up to the number of tensors."""


class CostModel(Protocol):
    """What groups cost; seconds."""

    @property
    def lead(self) -> float:
        """Before the first group, for opening a push."""

    @property
    def header(self) -> float:
        """What the message that opens a push occupies the link for."""

    @property
    def tail(self) -> float:
        """From the last arrival to the answer."""

    def select(self, tensors: Floats, elements: Floats) -> Floats:
        """Return ``t_s``: selecting from and encoding groups of so many tensors and elements."""

    def send(self, nbytes: Floats) -> Floats:
        """Return ``t_c``: what groups of so many message bytes occupy the link for."""


@dataclass(frozen=True)
class Workload:
    """A model's tensors, last first.

    Attributes:
        ready: when each gradient and all before it are there, seconds after the first, rising, ``[L]``.
        tensors: 1, or 0 for a tensor that has no gradient, ``[L]``.
        elements: of each, 0 for one that has no gradient, ``[L]``.
        nbytes: message bytes that each is expected to send, ``[L]``.
    """

    ready: Floats
    tensors: Floats
    elements: Floats
    nbytes: Floats

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.ready)

    @cached_property
    def sums(self) -> tuple[Floats, Floats, Floats]:
        """Sums of tensors, elements and bytes before each place, ``[L + 1]``."""
        tensors, elements, nbytes = (
            np.concatenate(([0.0], np.cumsum(each))) for each in (self.tensors, self.elements, self.nbytes)
        )
        return tensors, elements, nbytes

    def group_costs(self, costs: CostModel, starts: NDArray[np.int64], end: int) -> tuple[Floats, Floats]:
        """Return ``t_s`` and ``t_c`` of the groups that begin at ``starts`` and end before ``end``."""
        tensors, elements, nbytes = self.sums
        return (
            costs.select(tensors[end] - tensors[starts], elements[end] - elements[starts]),
            costs.send(nbytes[end] - nbytes[starts]),
        )

    def joined(self, cuts: Sequence[int]) -> "Workload":
        """Return the same with every run of tensors between two cuts as one."""
        if len(cuts) == len(self) + 1:
            return self
        starts = list(cuts[:-1])
        sums = (np.add.reduceat(each, starts) for each in (self.tensors, self.elements, self.nbytes))
        return Workload(self.ready[[cut - 1 for cut in cuts[1:]]], *sums)


class Moments(NamedTuple):
    """Of one group, seconds after the first gradient; without overlap, after the beginning of the push.

    Attributes:
        ready: its last gradient is there.
        selected: it is selected, encoded, and handed to the transport.
        arrived: it is whole at the server.
    """

    ready: float
    selected: float
    arrived: float


@dataclass(frozen=True)
class Timeline:
    """When the groups of a plan are ready, selected and arrived: seconds after the first gradient, ``[groups]``.

    Attributes:
        exposed: seconds from the last gradient to the answer.
    """

    ready: Floats
    selected: Floats
    arrived: Floats
    exposed: float

    def moments(self, number: int) -> Moments:
        """Return those of one group."""
        return Moments(*(float(each[number]) for each in (self.ready, self.selected, self.arrived)))


def predict(cuts: Sequence[int], workload: Workload, costs: CostModel, *, shared: bool = False) -> Timeline:
    """Return when groups would be done.

    Selection takes one group after the other, each once its last gradient is there; the link takes one after the other
    too, each once it is selected.

    Args:
        cuts: the groups.
        workload: what is sent.
        costs: what that costs.
        shared: backward stands still while a group is selected, as where both share a stream; otherwise selection
            runs beside it.
    """
    ready, selected, arrived = np.zeros((3, len(cuts) - 1))
    chosen = sent = 0.0
    before = 0.0
    for number, (start, end) in enumerate(pairwise(cuts)):
        select, send = (float(each[0]) for each in workload.group_costs(costs, np.array([start]), end))
        moment = float(workload.ready[end - 1])
        opened = (chosen + moment - before if shared else max(chosen, moment)) + (0.0 if start else costs.lead)
        if start == 0:
            sent = opened + costs.header
        chosen = opened + select
        sent = max(sent, chosen) + send
        before = moment
        ready[number], selected[number], arrived[number] = moment, chosen, sent
    last = float(workload.ready[-1])
    return Timeline(ready, selected, arrived, float(arrived.max()) + costs.tail - last)
