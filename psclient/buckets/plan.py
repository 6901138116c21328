"""A plan to look at: which tensors travel together, and predicted beside measured times."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from psclient.buckets.costs import Costs
from psclient.buckets.workload import Moments


@dataclass(frozen=True)
class PlannedGroup:
    """One group of a plan.

    Attributes:
        names: its tensors, in the order of the layout.
        elements: all of them together.
        predicted: from the measured costs; ``None`` before there are any.
        measured: medians over the last steps with this plan; ``None`` before the first.
    """

    names: tuple[str, ...]
    elements: int
    predicted: Moments | None
    measured: Moments | None


@dataclass(frozen=True)
class Plan:
    """What :attr:`optimizer.plan` returns; ``str(plan)`` is a table, and :meth:`draw` a picture.

    Attributes:
        rule: what made it, as in the setting ``merge``; ``elements`` while another rule still measures.
        groups: in the order of sending.
        predicted_exposed: seconds from the last gradient to the answer; ``None`` before costs are measured.
        measured_exposed: median over the last steps with this plan; ``None`` before the first.
        steps: how many those are.
        costs: what it was predicted from.
        planned: how many times a plan was made so far.
        planning_seconds: what making this one took.
    """

    rule: str
    groups: tuple[PlannedGroup, ...]
    predicted_exposed: float | None
    measured_exposed: float | None
    steps: int
    costs: Costs | None
    planned: int
    planning_seconds: float

    def __str__(self) -> str:
        """Return a table: a line a group, predicted and measured milliseconds."""
        heads = ("group", "tensors", "elements", "ready", "selected", "arrived", "selected", "arrived")
        rows = [
            (
                f"{group.names[-1]} … {group.names[0]}" if len(group.names) > 1 else group.names[0],
                str(len(group.names)),
                f"{group.elements:,}",
                *_cells(group.predicted or group.measured)[:1],
                *_cells(group.predicted)[1:],
                *_cells(group.measured)[1:],
            )
            for group in self.groups
        ]
        widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
        above = sum(widths[:4]) + 3 * 2
        spans = widths[4] + widths[5] + 2, widths[6] + widths[7] + 2
        lines = [self._head(), " " * above + f"  {'predicted, ms':>{spans[0]}}  {'measured, ms':>{spans[1]}}"]
        lines += [_line(row, widths) for row in [heads, *rows]]
        return "\n".join(lines)

    def draw(self, path: str | Path) -> Path:
        """Draw when each group is computed, selected and sent, predicted above measured.

        Args:
            path: where to; its ending says how: ``.svg``, ``.png``, ``.pdf``.

        Returns:
            The path.

        Raises:
            ConfigurationError: matplotlib is not installed, or nothing has been measured yet.
        """
        from psclient.buckets.picture import draw

        return draw(self, Path(path))

    def _head(self) -> str:
        predicted, measured = (_milliseconds(each) for each in (self.predicted_exposed, self.measured_exposed))
        count = len(self.groups)
        return (
            f"{self.rule}: {count} group{'s' if count > 1 else ''}; after the last gradient {predicted} ms predicted, "
            f"{measured} ms measured (median of {self.steps} steps)"
        )


def _cells(moments: Moments | None) -> tuple[str, ...]:
    return ("–", "–", "–") if moments is None else tuple(_milliseconds(each) for each in moments)


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.2f}"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = zip(row, widths, strict=True)
    return "  ".join([f"{first[0]:<{first[1]}}", *(f"{cell:>{width}}" for cell, width in rest)])
