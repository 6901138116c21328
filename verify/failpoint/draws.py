"""Faults of several kinds, one after another: each as often as its weight says, in a drawn order."""

import random
from collections.abc import Callable, Iterator, Sequence

Ways = Sequence[tuple[int, Callable[[], None]]]
"""Ways to do harm, each with its weight."""


def drawn(ways: Ways, rng: random.Random) -> Iterator[Callable[[], None]]:
    """Yield ways for ever."""
    while True:
        turn = [way for weight, way in ways for _ in range(weight)]
        rng.shuffle(turn)
        yield from turn
