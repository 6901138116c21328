"""The search for a method's learning rate and momentum: the same number of trials for every method.

First the rate, with the method's first momentum; where the best rate is the smallest or largest tried, the next beyond
it is tried too, at most twice. Then its other momenta, at the best rate. Rates are effective ones, ``lr / (1 − m)``, so
that another momentum does not mean another length of step.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

RATE_FACTOR = 2.0
MOST_BEYOND = 2

Trial = Callable[[float, float], float | None]
"""Trains with an effective rate and a momentum and returns the loss; ``None`` where that diverged or failed."""


class Choice(NamedTuple):
    rate: float
    momentum: float


def search(trial: Trial, rates: tuple[float, ...], momenta: tuple[float, ...]) -> Choice:
    """Return the best that was tried; of equals the smaller rate, and the momentum named first.

    Args:
        trial: see :data:`Trial`.
        rates: effective rates to begin with, ascending.
        momenta: the first goes with the search for the rate.
    """
    losses = {rate: _loss(trial(rate, momenta[0])) for rate in rates}
    for _ in range(MOST_BEYOND):
        best = min(sorted(losses), key=losses.__getitem__)
        if best == min(losses):
            beyond = best / RATE_FACTOR
        elif best == max(losses):
            beyond = best * RATE_FACTOR
        else:
            break
        losses[beyond] = _loss(trial(beyond, momenta[0]))
    rate = min(sorted(losses), key=losses.__getitem__)
    found = {momenta[0]: losses[rate]} | {momentum: _loss(trial(rate, momentum)) for momentum in momenta[1:]}
    return Choice(rate, min(momenta, key=found.__getitem__))


def _loss(loss: float | None) -> float:
    return math.inf if loss is None else loss
