"""What a section of the benchmarks hands to the report, and what it is given."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.plots import Plot
from pscore.model.layout import ModelLayout


@dataclass(frozen=True, slots=True)
class Plan:
    """How large and how long to measure.

    Attributes:
        quick: a smaller model and fewer repetitions.
        layout: the model.
        layout_name: what it is called in the report.
        density: share of a tensor's entries that a push selects.
        rounds: repetitions of what is fast.
        slow_rounds: repetitions of what takes seconds.
        seed: of every random number.
        say: shows what is going on.
        deadline: when the section's time is over, on the clock of ``time.monotonic``.
        base: root of another checkout to compare with.
        times: how often both are measured.
    """

    quick: bool
    layout: ModelLayout
    layout_name: str
    density: float
    rounds: int
    slow_rounds: int
    seed: int
    say: Callable[[str], None]
    deadline: float = math.inf
    base: Path | None = None
    times: int = 10

    @property
    def dense_bytes(self) -> int:
        """Bytes of the whole model in fp32: what a dense method moves each way."""
        return 4 * self.layout.size

    def has_time(self, seconds: float = 0.0) -> bool:
        """Tell whether that much of the section's time is left: nothing optional begins without."""
        return time.monotonic() + seconds < self.deadline


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under column heads."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(slots=True)
class Section:
    """A chapter of the report: tables and plots to read, figures to keep, notes that qualify them.

    Attributes:
        seconds: what it took.
    """

    key: str
    title: str
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
