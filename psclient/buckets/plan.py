"""A plan in words: which tensors travel together, and predicted beside measured times."""

from dataclasses import dataclass

from psclient.buckets.costs import Costs, Timeline


@dataclass(frozen=True)
class PlannedGroup:
    """One group of a plan; ``names`` in the order of the layout, times as in :class:`BucketPlan`."""

    names: tuple[str, ...]
    elements: int
    predicted: Timeline | None
    measured: Timeline | None


@dataclass(frozen=True)
class BucketPlan:
    """What :attr:`optimizer.plan` returns; ``str(plan)`` is a table.

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
        predicted, measured = (_milliseconds(each) for each in (self.predicted_exposed, self.measured_exposed))
        count = len(self.groups)
        head = (
            f"{self.rule}: {count} group{'s' if count > 1 else ''}; after the last gradient {predicted} ms predicted, "
            f"{measured} ms measured (median of {self.steps} steps)"
        )
        rows: list[tuple[str, ...]] = [
            ("group", "tensors", "elements", "ready", "selected", "arrived", "selected", "arrived")
        ]
        rows += [
            (
                f"{group.names[-1]} … {group.names[0]}" if len(group.names) > 1 else group.names[0],
                str(len(group.names)),
                f"{group.elements:,}",
                _cells(group.predicted or group.measured)[0],
                *_cells(group.predicted)[1:],
                *_cells(group.measured)[1:],
            )
            for group in self.groups
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        above = " " * (sum(widths[:4]) + 6)
        above += f"  {'predicted, ms':>{widths[4] + widths[5] + 2}}  {'measured, ms':>{widths[6] + widths[7] + 2}}"
        lines = [
            "  ".join([f"{row[0]:<{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ]
        return "\n".join([head, above, *lines])


def _cells(moments: Timeline | None) -> list[str]:
    return [_milliseconds(seconds) for seconds in moments or (None, None, None)]


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.2f}"
