"""How long each section may take, so that the whole stays short: two minutes quick, half an hour in full."""

from typing import NamedTuple

QUICK_SECONDS, FULL_SECONDS = 120.0, 1800.0


class Budget(NamedTuple):
    """Seconds of one section."""

    quick: float
    full: float


BUDGETS = {
    "selection": Budget(13, 200),
    "bytes": Budget(10, 60),
    "wire": Budget(6, 20),
    "server": Budget(8, 90),
    "client": Budget(12, 80),
    "merging": Budget(16, 160),
    "memory": Budget(11, 110),
    "growth": Budget(5, 60),
    "load": Budget(11, 190),
    "peers": Budget(14, 130),
    "network": Budget(13, 350),
    "accuracy": Budget(1, 350),
}
"""By the key of the section. A section repeats, and goes on to further points, only while its time lasts."""


def seconds(key: str, *, quick: bool) -> float:
    """Return how long a section may take."""
    return BUDGETS[key].quick if quick else BUDGETS[key].full
