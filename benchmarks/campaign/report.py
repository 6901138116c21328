"""Tables as Markdown, and numbers as a reader wants them."""

from collections.abc import Sequence
from typing import Any

from benchmarks.campaign.statistics import Difference, Spread
from benchmarks.campaign.tasks import Task
from benchmarks.harness.machine import sentences
from benchmarks.harness.section import Table


def markdown(facts: dict[str, Any], found: Sequence[Table], said: Sequence[str]) -> str:
    """Return tables, notes, and what they were measured on."""
    lines = []
    for table in found:
        lines += [f"**{table.title}**", "", _line(table.columns)]
        lines += [_line(("---", *["---:"] * (len(table.columns) - 1)))]
        lines += [*map(_line, table.rows), ""]
    lines += [*(f"* {note}" for note in said), *(f"* {sentence}" for sentence in sentences(facts))]
    return "\n".join(lines) + "\n"


def metric_words(task: Task) -> str:
    return "test accuracy, %" if task.higher_is_better else "test loss, nats a byte"


def score_words(task: Task, scores: Spread | None) -> str:
    if scores is None:
        return "–"
    return f"{_number(task, scores.mean)} ± {_number(task, scores.deviation)}"


def difference_words(task: Task, difference: Difference) -> str:
    if difference.mean is None:
        return f"diverged, {difference.verdict}"
    sign = "+" if difference.mean >= 0 else "−"
    error = "" if difference.error is None else f" ± {_number(task, difference.error)}"
    return f"{sign}{_number(task, abs(difference.mean))}{error}, {difference.verdict}"


def count_words(workers: int) -> str:
    return "one worker" if workers == 1 else f"{workers} workers"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(task: Task, value: float) -> str:
    return f"{100 * value:.2f}" if task.higher_is_better else f"{value:.3f}"
