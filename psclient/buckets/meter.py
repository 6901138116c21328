"""Measures costs and workload of this worker and its link, step by step."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from statistics import median

import numpy as np

from psclient.buckets.costs import Costs, Floats, Workload
from psclient.buckets.trace import PushTiming, Trace

_REMEMBERED = 15  # observations of which the median counts
_REST_SECONDS = 0.02  # after which a link is not busy with a message before
_TELLING_BYTES = 1 << 16  # whose time on a slow link stands out from the noise of a busy machine
_GAIN = 0.15  # of a new observation in a moving average
_CLIP = 4.0  # times the usual error; a sample that is further off counts as if it were no further
_TRUSTED = 8  # samples until the usual error is known
_ERROR_GAIN = 0.05
_MEMORY_CALLS = 10.0  # of fade, after which a sample counts 1/e of what it did


class CostMeter:
    """Learns costs and workload from traces; begins with guesses that the first steps replace.

    ``elements`` are those of each tensor, in the order of the layout; ``traces`` counts the pushes learnt from.
    """

    def __init__(self, elements: Floats) -> None:
        self._elements = elements
        self._selecting = RecursiveLeastSquares((2e-4, 5e-5, 1e-9), (1e-2, 1e-2, 1e-7), 1e-3)
        self._sending = RecursiveLeastSquares((1e-4, 1e-8), (2e-2, 1e-6), 1e-3)
        self._leads: deque[float] = deque(maxlen=_REMEMBERED)
        self._tails: deque[float] = deque(maxlen=_REMEMBERED)
        self._trained, self._entries, self._ready = np.zeros((3, len(elements)))
        self._together = 0.0
        self.entry_bytes = 8.0
        self.traces = 0

    @property
    def costs(self) -> Costs:
        """The estimates of now."""
        lead, tail = (max(0.0, median(seen)) if seen else 0.0 for seen in (self._leads, self._tails))
        group, tensor, element = self._selecting.coefficients.tolist()
        message, byte = self._sending.coefficients.tolist()
        return Costs(lead, group, tensor, element, message, byte, tail, self._together)

    @property
    def workload(self) -> Workload:
        """The workload of the steps so far, last tensor first."""
        ready, trained = np.maximum.accumulate(self._ready[::-1]), self._trained
        elements, nbytes = trained * self._elements, trained * self._entries * self.entry_bytes
        return Workload(ready, trained[::-1], elements[::-1], nbytes[::-1])

    @property
    def backward_left(self) -> Floats:
        """Backward time that is ahead once each gradient is there, in the order of the layout; seconds."""
        return np.asarray(self._ready.max() - self._ready)

    def expect(self, entries: Mapping[int, int]) -> None:
        """Replace what tensors are expected to send, by position, where their density has changed."""
        self._entries[list(entries)] = list(entries.values())

    def learn(self, trace: Trace) -> None:
        """Learn from the times of a complete push."""
        self._selecting.fade()
        self._sending.fade()
        self._learn_workload(trace)
        self._learn_selecting(trace)
        timings = [timing for _, timing in trace.shards if timing.arrived]
        for timing in timings:
            self._learn_sending(timing)
            self._together = float(timing.together_bytes)
        costs = self.costs
        last = max(timing.header_arrival(costs) + max(timing.arrived) for timing in timings)
        self._tails.append(trace.answered - last)
        self.traces += 1

    def _learn_workload(self, trace: Trace) -> None:
        gain, first = _GAIN if self.traces else 1.0, trace.first_gradient
        self._trained, ready, entries = np.zeros((3, len(self._elements)))
        self._trained[list(trace.entries)] = 1
        ready[list(trace.ready)] = [moment - first for moment in trace.ready.values()]
        entries[list(trace.entries)] = list(trace.entries.values())
        self._ready += gain * (ready - self._ready)
        self._entries += gain * (entries - self._entries)
        if total := entries.sum():
            sent_bytes = sum(sum(timing.group_bytes) for _, timing in trace.shards)
            self.entry_bytes += gain * (sent_bytes / total - self.entry_bytes)

    def _learn_selecting(self, trace: Trace) -> None:
        """A group's work begins when its gradients are there and the group before it is done."""
        before = trace.begun
        self._leads.append(before - trace.opening)
        run = _Run(self._selecting)
        for number, done in sorted(trace.done.items(), key=lambda group: group[1]):
            ready = trace.group_ready(number)
            if ready > before:
                run.end()
            elements = [self._elements[position] for position in trace.groups[number] if position in trace.entries]
            run.add(1.0, len(elements), sum(elements), done - max(before, ready))
            before = done
        run.end()

    def _learn_sending(self, timing: PushTiming) -> None:
        """Learn from the arrivals of messages, as times since the arrival of the first, which has the header.

        A message that left before the one in front of it was there has waited for it: the time between the two arrivals
        is its ``message + byte·bytes``. One that left when the link had long come to rest met the same start-up as the
        first: it shows ``byte·bytes`` alone, where its bytes are others by enough to stand out from a machine's noise.
        Between the two, it may have waited or not, and nothing is learnt.
        """
        before, rest = 0.0, max(_REST_SECONDS, 2 * self.costs.message)
        run = _Run(self._sending)
        groups = sorted(zip(timing.left, timing.arrived, timing.group_bytes, strict=False))
        for left, message in groupby(groups, key=itemgetter(0)):  # its groups left at one moment
            if left <= 0:
                continue
            _, moments, sizes = zip(*message, strict=True)
            arrived, nbytes = max(moments), sum(sizes)
            if before >= left:
                run.add(1.0, nbytes, arrived - before)
            else:
                run.end()
                more = nbytes - timing.first_bytes
                if left - before > rest and abs(more) >= _TELLING_BYTES:
                    self._sending.observe((0.0, more), arrived - left)
            before = max(before, arrived)
        run.end()


class RecursiveLeastSquares:
    """Fits ``y ≈ coefficients · features``, coefficients ≥ 0, to samples of which recent ones count most.

    Large errors are clipped: times on a busy machine have a long tail. Forgetting is bounded: a direction that no
    sample shows keeps its estimate. Before the first sample coefficients are a ``guess`` that may be off by ``spread``;
    ``error`` of a usual sample, in units of ``y``, says how fast guesses are given up.
    """

    def __init__(self, guess: Sequence[float], spread: Sequence[float], error: float) -> None:
        self._scale = np.array(spread)  # coefficients are kept in these units, all alike
        self._theta = np.array(guess) / self._scale
        self._covariance = np.eye(len(self._scale))
        self._own, self._keep = error**2, 1 - 1 / _MEMORY_CALLS
        self._usual, self._samples = 0.0, 0

    @property
    def coefficients(self) -> Floats:
        """The estimate; where one would be negative it is 0, and the others are the best beside it."""
        theta, covariance = self._theta.copy(), self._covariance.copy()
        for _ in theta:
            lowest = int(theta.argmin())
            if theta[lowest] >= 0:
                break
            along = covariance[lowest] / covariance[lowest, lowest]
            theta = theta - along * theta[lowest]
            covariance = covariance - np.outer(along, covariance[lowest])
            theta[lowest] = 0.0
            covariance[lowest, lowest] = 1.0
        return np.asarray(np.maximum(theta, 0.0) * self._scale)

    def fade(self) -> None:
        """Let earlier samples count less: once a step, since steps differ in their number of samples."""
        self._covariance = self._covariance / self._keep
        if float(self._covariance.diagonal().max()) > 1.0:
            lengths, axes = np.linalg.eigh(self._covariance)
            self._covariance = (axes * np.minimum(lengths, 1.0)) @ axes.T

    def observe(self, features: Sequence[float] | Floats, value: float) -> None:
        """Learn from one sample."""
        phi = np.array(features) * self._scale
        along = self._covariance @ phi
        variance = float(phi @ along) + self._own
        error = value - float(phi @ self._theta)
        bound = _CLIP * self._usual if self._samples >= _TRUSTED else math.inf
        self._samples += 1
        self._usual += max(_ERROR_GAIN, 1 / self._samples) * (abs(error) - self._usual)
        self._theta = self._theta + along * (min(max(error, -bound), bound) / variance)
        gain = np.eye(len(phi)) - np.outer(along / variance, phi)
        self._covariance = gain @ self._covariance @ gain.T + np.outer(along, along) * (self._own / variance**2)


class _Run:
    """Groups that followed one another without a pause: one sample, since what one is late the next makes up for."""

    def __init__(self, fit: RecursiveLeastSquares) -> None:
        self._fit = fit
        self._sums = np.zeros(0)  # features, then seconds

    def add(self, *features_and_seconds: float) -> None:
        self._sums = np.array(features_and_seconds) + (self._sums if self._sums.size else 0.0)

    def end(self) -> None:
        if self._sums.size:
            self._fit.observe(self._sums[:-1], float(self._sums[-1]))
        self._sums = np.zeros(0)
