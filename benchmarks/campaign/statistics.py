"""What seeds say: mean and spread, and differences of runs that share a seed."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Literal, NamedTuple

Verdict = Literal["better", "equal", "worse"]


class Spread(NamedTuple):
    """Mean and standard deviation; the latter is 0 for one value."""

    mean: float
    deviation: float


class Difference(NamedTuple):
    """By how much the subject is better than a rival.

    Attributes:
        mean: of the differences seed by seed; positive where the subject is better; ``None`` where training diverged.
        error: its standard error, ``s / sqrt(n)``; ``None`` likewise, and where there is one seed.
        seeds: that both have.
        verdict: worse or better by more than one standard error, or neither.
    """

    mean: float | None
    error: float | None
    seeds: tuple[int, ...]
    verdict: Verdict


def spread(values: Sequence[float]) -> Spread:
    """Return mean and standard deviation of at least one value."""
    return Spread(fmean(values), stdev(values) if len(values) > 1 else 0.0)


def compare(
    subject: Mapping[int, float | None], rival: Mapping[int, float | None], *, higher_is_better: bool
) -> Difference | None:
    """Compare two methods' scores by seed; ``None`` where they share no seed.

    Where a run diverged there is no difference to average: whoever diverged more often is worse.
    """
    seeds = tuple(sorted(subject.keys() & rival.keys()))
    if not seeds:
        return None
    pairs = [(subject[seed], rival[seed]) for seed in seeds]
    whole = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
    if len(whole) < len(pairs):
        lost = sum(ours is None for ours, _ in pairs) - sum(theirs is None for _, theirs in pairs)
        return Difference(None, None, seeds, "worse" if lost > 0 else "better" if lost < 0 else "equal")
    sign = 1 if higher_is_better else -1
    mean, deviation = spread([sign * (ours - theirs) for ours, theirs in whole])
    error = deviation / math.sqrt(len(seeds)) if len(seeds) > 1 else None
    if error is None:
        return Difference(mean, None, seeds, "equal")
    return Difference(mean, error, seeds, "worse" if mean < -error else "better" if mean > error else "equal")
