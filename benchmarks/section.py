"""What a section of the benchmarks hands to the report, and what it is given."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pscore.layout import ModelLayout


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
    """

    quick: bool
    layout: ModelLayout
    layout_name: str
    density: float
    rounds: int
    slow_rounds: int
    seed: int
    say: Callable[[str], None]

    @property
    def dense_bytes(self) -> int:
        """Bytes of the whole model in fp32: what a dense method moves each way."""
        return 4 * self.layout.size


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under column heads."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(slots=True)
class Section:
    """A chapter of the report: tables to read, figures to keep, notes that qualify both."""

    key: str
    title: str
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
