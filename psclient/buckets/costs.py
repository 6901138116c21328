"""What selecting and sending cost on this worker and its link, measured step by step.

::

    t_s(group) = group + tensor·tensors + element·elements      selecting, encoding, handing over; one thread
    t_c(group) = message + byte·bytes                           until it is whole at the server; one link

The paper's ``t_s`` knows no tensors; here they cost something each, since each is selected from by itself. Several
shards are behind the same network card, so all of them are one link.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from psclient.buckets.rls import RecursiveLeastSquares
from psclient.buckets.trace import PushTiming, Trace
from psclient.buckets.workload import Floats, Workload

_REMEMBERED = 15
_REST = 0.02  # seconds after which a link is not busy with a message before
_GAIN = 0.15  # of a new observation in a moving average


@dataclass(frozen=True)
class Costs:
    """Measured costs; seconds, and seconds an item.

    Attributes:
        lead: opening a push.
        group: of selecting from a group, however small.
        tensor: of each tensor in it.
        element: of each element in it.
        message: start-up of a message on the link.
        byte: of each message byte on it.
        tail: from the last arrival to the answer: the commit, and applying.
    """

    lead: float
    group: float
    tensor: float
    element: float
    message: float
    byte: float
    tail: float

    @property
    def header(self) -> float:
        """What the message that opens a push occupies the link for."""
        return self.message

    def select(self, tensors: Floats, elements: Floats) -> Floats:
        """Return ``t_s``."""
        return self.group + self.tensor * tensors + self.element * elements

    def send(self, nbytes: Floats) -> Floats:
        """Return ``t_c``; a group that sends nothing costs nothing."""
        return np.where(nbytes > 0, self.message + self.byte * nbytes, 0.0)


class CostMeter:
    """Learns costs and workload from traces.

    Args:
        elements: of each tensor, in the order of the layout.

    Attributes:
        entry_bytes: message bytes an entry, about.
    """

    def __init__(self, elements: Floats) -> None:
        """Begin with guesses that the first steps replace."""
        self._elements = elements
        self._selecting = RecursiveLeastSquares((2e-4, 5e-5, 1e-9), (1e-2, 1e-2, 1e-7), 1e-3)
        self._sending = RecursiveLeastSquares((1e-4, 1e-8), (2e-2, 1e-6), 1e-3)
        self._lead, self._tail = _Recent(), _Recent()
        count = len(elements)
        self._trained = np.zeros(count)
        self._entries = np.zeros(count)
        self._ready = np.zeros(count)
        self.entry_bytes = 8.0
        self.traces = 0

    @property
    def costs(self) -> Costs:
        """As far as they are known."""
        group, tensor, element = (float(each) for each in self._selecting.coefficients)
        message, byte = (float(each) for each in self._sending.coefficients)
        return Costs(self._lead.value, group, tensor, element, message, byte, self._tail.value)

    @property
    def workload(self) -> Workload:
        """Of the steps so far, last tensor first."""
        trained = self._trained[::-1]
        ready = np.maximum.accumulate(self._ready[::-1])
        return Workload(
            ready, trained, trained * self._elements[::-1], trained * self._entries[::-1] * self.entry_bytes
        )

    @property
    def backward_left(self) -> Floats:
        """Backward time that is ahead once each gradient is there, in the order of the layout; seconds."""
        left: Floats = self._ready.max() - self._ready
        return left

    def expect(self, entries: Mapping[int, int]) -> None:
        """Replace what tensors are expected to send, by position, where their density has changed."""
        self._entries[list(entries)] = list(entries.values())

    def learn(self, trace: Trace) -> None:
        """Take the times of a complete push."""
        self._selecting.fade()
        self._sending.fade()
        self._learn_workload(trace)
        self._learn_selecting(trace)
        for _, timing in trace.shards:
            if timing.arrived:
                self._learn_sending(timing)
        self._tail.take(trace.answered - last_arrival(trace, self.costs.header))
        self.traces += 1

    def _learn_workload(self, trace: Trace) -> None:
        first = self.traces == 0
        trained = np.zeros(len(self._elements))
        trained[list(trace.elements)] = 1
        ready = np.zeros(len(self._elements))
        for position, moment in trace.ready.items():
            ready[position] = moment - trace.origin
        entries = np.zeros(len(self._elements))
        for position, count in trace.entries.items():
            entries[position] = count
        gain = 1.0 if first else _GAIN
        self._trained = trained
        self._ready += gain * (ready - self._ready)
        self._entries += gain * (entries - self._entries)
        total = sum(trace.entries.values())
        if total:
            moved = sum(sum(timing.group_bytes) for _, timing in trace.shards)
            self.entry_bytes += gain * (moved / total - self.entry_bytes)

    def _learn_selecting(self, trace: Trace) -> None:
        """A group's work begins when its gradients are there and the group before it is done."""
        before = 0.0
        run = _Run(self._selecting, 3)
        for number in sorted(trace.done, key=lambda number: trace.done[number]):
            ready = trace.group_ready(number)
            if not before:
                self._lead.take(trace.begun[number] - trace.opening)
                before = trace.begun[number]
            if ready > before:
                run.end()
            began, before = max(before, ready), trace.done[number]
            members = [trace.elements[position] for position in trace.groups[number] if position in trace.elements]
            run.add((1.0, len(members), sum(members)), before - began)
        run.end()

    def _learn_sending(self, timing: PushTiming) -> None:
        """Arrivals are counted from the header's, which had its own start-up; queued groups show the whole cost.

        A group that left before the one in front of it was there has waited for it: the time between the two arrivals
        is its ``message + byte·bytes``. One that left when the link had long come to rest met the same start-up as the
        header: it shows ``byte·bytes`` alone. Between the two, it may have waited or not, and nothing is learnt.
        """
        order = sorted(range(len(timing.left)), key=lambda place: timing.left[place])
        before, rest = 0.0, max(_REST, 2 * self.costs.message)
        run = _Run(self._sending, 2)
        for place in order:
            left, arrived, nbytes = timing.left[place], timing.arrived[place], timing.group_bytes[place]
            if left < 0:
                continue
            if before >= left:
                run.add((1.0, nbytes), arrived - before)
            else:
                run.end()
                if left - before > rest:
                    self._sending.observe((0.0, nbytes), arrived - left)
            before = max(before, arrived)
        run.end()


class _Run:
    """Groups that followed one another without a pause: one sample, since what one is late the next makes up for."""

    def __init__(self, fit: RecursiveLeastSquares, features: int) -> None:
        self._fit = fit
        self._features, self._seconds = np.zeros(features), 0.0

    def add(self, features: Sequence[float], seconds: float) -> None:
        self._features += features
        self._seconds += seconds

    def end(self) -> None:
        if self._features.any():
            self._fit.observe(self._features.tolist(), self._seconds)
        self._features, self._seconds = np.zeros(len(self._features)), 0.0


def last_arrival(trace: Trace, header: float) -> float:
    """Return when the last group was at its server, on this worker's clock, less the way of a message there."""
    return max(timing.opened + header + max(timing.arrived) for _, timing in trace.shards if timing.arrived)


class _Recent:
    """The median of the last observations."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def value(self) -> float:
        return max(0.0, median(self._values)) if self._values else 0.0

    def take(self, value: float) -> None:
        self._values.append(value)
