"""How long each section may take, so that the whole stays short: two minutes quick, half an hour in full.

Sections that run only where they are named have times of their own.
"""

from typing import NamedTuple

QUICK_SECONDS, FULL_SECONDS = 120.0, 1800.0


class Budget(NamedTuple):
    """Seconds of one section."""

    quick: float
    full: float


BUDGETS = {
    "selection": Budget(12, 190),
    "ldte": Budget(9, 80),
    "bytes": Budget(9, 60),
    "wire": Budget(6, 20),
    "server": Budget(8, 90),
    "memory": Budget(10, 100),
    "peers": Budget(13, 120),
    "accuracy": Budget(1, 315),
    "base": Budget(240, 3600),
}
"""By the key of the section. A section repeats, and goes on to further points, only while its time lasts."""


def seconds(key: str, *, quick: bool) -> float:
    """Return how long a section may take."""
    return BUDGETS[key].quick if quick else BUDGETS[key].full
