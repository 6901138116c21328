"""How long each section may take, so that the whole stays short: two minutes quick, half an hour in full."""

from typing import NamedTuple

QUICK_SECONDS, FULL_SECONDS = 120.0, 1800.0


class Budget(NamedTuple):
    """Seconds of one section."""

    quick: float
    full: float


BUDGETS = {
    "wire": Budget(6, 40),
    "server": Budget(8, 120),
    "client": Budget(15, 120),
    "memory": Budget(13, 300),
    "growth": Budget(5, 120),
    "load": Budget(18, 300),
    "peers": Budget(20, 200),
    "network": Budget(20, 420),
}
"""By the key of the section. A section repeats, and goes on to further points, only while its time lasts."""


def seconds(key: str, *, quick: bool) -> float:
    """Return how long a section may take."""
    return BUDGETS[key].quick if quick else BUDGETS[key].full
