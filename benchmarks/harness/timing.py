"""Repeated, interleaved timing: what is compared is measured in turn, so that a noisy machine hits all of it alike."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

Case = Callable[[int], Mapping[str, float] | None]
"""One thing to measure: takes the round, returns seconds by part, or ``None`` to be timed as a whole."""


@dataclass(frozen=True, slots=True)
class Stat:
    """Median and range of repetitions."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Stat":
        return cls(statistics.median(values), min(values), max(values), len(values))

    def plain(self) -> dict[str, float | int]:
        return {"median": self.median, "min": self.low, "max": self.high, "n": self.count}

    def milliseconds(self) -> str:
        """Write seconds as ``12.3 (11.0–15.2)``."""
        return f"{_short(self.median * 1e3)} ({_short(self.low * 1e3)}–{_short(self.high * 1e3)})"

    def ratio(self) -> str:
        """Write a ratio as ``×3.1 (2.9–4.0)``."""
        return f"×{_short(self.median)} ({_short(self.low)}–{_short(self.high)})"

    @property
    def spread(self) -> float:
        """Slowest over fastest: how noisy it was."""
        return self.high / self.low if self.low > 0 else float("inf")


Rounds = dict[str, list[float]]


def interleave(
    cases: Mapping[str, Case],
    rounds: int,
    *,
    warmup: int = 1,
    before_each: Callable[[], None] = lambda: None,
    tick: Callable[[], None] = lambda: None,
    has_time: Callable[[], bool] = lambda: True,
) -> Rounds:
    """Measure every case once a round, in an order that rotates, and return seconds by case, round by round.

    Args:
        cases: by name; parts that a case returns appear as ``name.part`` and, summed, as ``name``.
        rounds: how many count.
        warmup: rounds before those, thrown away.
        before_each: runs untimed before each case, to leave caches in the same state for all.
        tick: called after each round.
        has_time: where it says no, the rounds so far are enough; one that counts is always made.
    """
    names = list(cases)
    seconds: Rounds = {}
    for turn in range(warmup + rounds):
        if turn > warmup and not has_time():
            break
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            before_each()
            started = time.perf_counter()
            parts = cases[name](turn)
            whole = time.perf_counter() - started
            if turn < warmup:
                continue
            if parts is not None:
                whole = sum(parts.values())
                for part, value in parts.items():
                    seconds.setdefault(f"{name}.{part}", []).append(value)
            seconds.setdefault(name, []).append(whole)
        tick()
    return seconds


def ratio(rounds: Rounds, above: str, below: str) -> Stat:
    """Return the ratio of two cases, formed round by round: noise that lasts longer than a round cancels."""
    return Stat.of([a / b for a, b in zip(rounds[above], rounds[below], strict=True)])


class Stopwatch:
    """Times parts of a case."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of the body to a part."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - started

    def move(self, seconds: float, source: str, target: str) -> None:
        """Attribute some of one part's time to another."""
        self.parts[source] -= seconds
        self.parts[target] = self.parts.get(target, 0.0) + seconds


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
