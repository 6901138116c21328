"""Groups of WAGMA-SGD, and the time that members wait (docs/guide/wagma.md, *One iteration*; Li et al., TPDS 2021)."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from psservice.model.training_mode import GroupSettings

_GRACE_SHARE, _GRACE_JITTERS = 0.25, 2.0
_MEAN_WEIGHT, _JITTER_WEIGHT = 1 / 8, 1 / 4  # as in TCP's estimate of a round trip
_LONGEST_SAMPLE = 4.0  # in means: a worker that slept for a minute has not become slow


def groups_of(settings: GroupSettings, workers: Sequence[str], iteration: int) -> list[tuple[str, ...]]:
    """Cut workers, sorted, into the groups of an iteration."""
    if settings.is_global(iteration):
        return [tuple(workers)] if workers else []
    return cut(workers, settings.size or default_size(len(workers)), iteration)


def default_size(workers: int) -> int:
    """Return the power of two nearest to ``√W``, and at least 2."""
    root = math.sqrt(workers)
    return min((1 << power for power in range(1, 11)), key=lambda size: abs(size - root))


def cut(workers: Sequence[str], size: int, iteration: int) -> list[tuple[str, ...]]:
    """Return the groups of an iteration over sorted workers: of ``size``, at least 2, if ``W`` is a multiple of it.

    Ranks are numbers of ``J`` digits in base 2, or in base ``size`` if that is no power of two. The digits are
    rotated, by as many an iteration as the members of a group differ in, and neighbours of the new order are a group.
    If ``W`` is no power of the base, the groups begin one rank later each iteration: each worker then meets others.
    """
    base, width = (size, 1) if size & (size - 1) else (2, size.bit_length() - 1)
    digits, count = width, len(workers)
    while base**digits < count:
        digits += 1
    low = base ** (iteration * width % digits)
    high = base**digits // low
    order = sorted(range(count), key=lambda rank: rank // low + rank % low * high)
    first = 0 if count == base**digits else iteration % max(1, count)
    order = order[first:] + order[:first]
    groups = -(-count // size)
    ends = [count * number // groups for number in range(groups + 1)]
    return [tuple(sorted(workers[rank] for rank in order[start:end])) for start, end in pairwise(ends)]


@dataclass(slots=True)
class StepTimes:
    """How long workers compute, from one average until the next push, and the grace that follows from that."""

    _times: dict[str, tuple[float, float]] = field(default_factory=dict)  # mean and jitter, seconds

    def saw(self, worker: str, seconds: float) -> None:
        """Add one step's time."""
        if worker not in self._times:
            self._times[worker] = seconds, 0.0
            return
        mean, jitter = self._times[worker]
        error = min(seconds, _LONGEST_SAMPLE * mean) - mean
        self._times[worker] = mean + _MEAN_WEIGHT * error, jitter + _JITTER_WEIGHT * (abs(error) - jitter)

    def forget(self, worker: str) -> None:
        """Drop a worker."""
        self._times.pop(worker, None)

    def grace_seconds(self, workers: Collection[str]) -> float:
        """Return how long the first of a group waits for the others: ``min(0.25·mean step, 2·jitter)``; 0 at first."""
        known = [self._times[worker] for worker in workers if worker in self._times]
        if not known:
            return 0.0
        mean = sum(mean for mean, _ in known) / len(known)
        jitter = sum(jitter for _, jitter in known) / len(known)
        return min(_GRACE_SHARE * mean, _GRACE_JITTERS * jitter)
