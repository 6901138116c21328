"""Groups of WAGMA-SGD, and the time that members wait (docs/guide/wagma.md, *One iteration*; Li et al., TPDS 2021)."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pscore.wire.errors import ErrorCode, Rejected

_MOST = 1 << 20
_GRACE_SHARE, _GRACE_JITTERS = 0.25, 2.0
_MEAN_WEIGHT, _JITTER_WEIGHT = 1 / 8, 1 / 4  # as in TCP's estimate of a round trip
_LONGEST_SAMPLE = 4.0  # in means: a worker that slept for a minute has not become slow


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """What the workers of a run agree on; ``size`` 0 is the power of two nearest ``√W`` (docs/guide/wagma.md)."""

    size: int = 0
    tau: int = 10
    late: str = "replace"

    @classmethod
    def parse(cls, settings: Mapping[str, str]) -> "GroupSettings | None":
        """Read the method settings (``BAD_REQUEST``); ``None`` if workers share one model."""
        if settings.get("update") != "average":
            return None
        try:
            read = cls(int(settings["group_size"]), int(settings["tau"]), settings["late"])
            if read.late not in ("paper", "replace"):
                raise ValueError(f"late must be 'paper' or 'replace', not {read.late!r}")
        except (KeyError, ValueError) as error:
            raise Rejected(ErrorCode.BAD_REQUEST, f"the settings of group averaging cannot be read: {error}") from error
        if read.size == 1 or not 0 <= read.size <= _MOST or not 0 <= read.tau <= _MOST:
            raise Rejected(ErrorCode.BAD_REQUEST, f"no groups of {read.size} with tau = {read.tau}")
        return read

    def is_global(self, iteration: int) -> bool:
        """Tell whether all live workers average, and wait for each other, at an iteration (counted from 0)."""
        return (iteration + 1) % (self.tau + 1) == 0

    def groups(self, workers: Sequence[str], iteration: int) -> list[tuple[str, ...]]:
        """Cut workers, sorted, into the groups of an iteration."""
        if self.is_global(iteration):
            return [tuple(workers)] if workers else []
        return cut(workers, self.size or default_size(len(workers)), iteration)


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
