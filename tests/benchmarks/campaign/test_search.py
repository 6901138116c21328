"""The search: as many trials for each method, and no best at an edge that nobody looked beyond."""

import math

import pytest

from benchmarks.campaign.search import RATE_FACTOR, search


class Trials:
    """A loss with one lowest point, and the trials that were asked for."""

    def __init__(self, rate, momentum=0.6):
        self.best = rate, momentum
        self.asked = []

    def __call__(self, rate, momentum):
        self.asked.append((rate, momentum))
        return abs(math.log(rate / self.best[0])) + abs(momentum - self.best[1])


def test_the_best_rate_then_the_best_momentum():
    trials = Trials(0.3, 0.9)
    assert search(trials, (0.1, 0.3, 1.0), (0.6, 0.3, 0.9)) == (0.3, 0.9)
    assert trials.asked == [(0.1, 0.6), (0.3, 0.6), (1.0, 0.6), (0.3, 0.3), (0.3, 0.9)]


@pytest.mark.parametrize(("best", "first"), [(10.0, 1.0), (0.01, 0.1)])
def test_an_edge_is_looked_beyond_twice(best, first):
    trials = Trials(best)
    rate, _ = search(trials, (0.1, 0.3, 1.0), (0.6,))
    assert rate == pytest.approx(first * RATE_FACTOR ** (2 if best > 1 else -2))
    assert len(trials.asked) == 5


def test_a_trial_that_diverges_is_worse_than_any_other():
    assert search(lambda rate, momentum: None if rate > 0.1 else 9.0, (0.1, 0.3), (0.6, 0.3)).rate <= 0.1


def test_where_all_diverge_the_smallest_rate_is_kept():
    assert search(lambda rate, momentum: None, (0.1, 0.3), (0.6,)).rate == pytest.approx(0.1 / RATE_FACTOR**2)
