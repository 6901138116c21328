"""A plan in words: which tensors travel together, and predicted beside measured times."""

from dataclasses import dataclass

from psclient.buckets.costs import Costs, Timeline

_UNKNOWN = (None, None, None)


@dataclass(frozen=True)
class PlannedGroup:
    """One group of a plan; ``names`` in the order of the layout, times as in :class:`BucketPlan`."""

    names: tuple[str, ...]
    elements: int
    predicted: Timeline | None
    measured: Timeline | None


@dataclass(frozen=True)
class BucketPlan:
    """The value of :attr:`optimizer.plan`; ``str(plan)`` is a table.

    Attributes:
        rule: that made it, as in the setting ``merge``; ``elements`` while another rule still measures.
        groups: in the order of sending.
        predicted_exposed: seconds from the last gradient to the answer; ``None`` before costs are measured.
        measured_exposed: median over the last steps with this plan; ``None`` before the first.
        steps: how many those are.
        costs: behind the prediction.
        planned: how many times a plan was made so far.
        planning_seconds: of making this plan.
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
        predicted, measured = _milliseconds(self.predicted_exposed, self.measured_exposed)
        count = len(self.groups)
        head = (
            f"{self.rule}: {count} group{'s' if count > 1 else ''}; after the last gradient {predicted} ms predicted, "
            f"{measured} ms measured (median of {self.steps} steps)"
        )
        rows: list[tuple[str, ...]] = [
            ("group", "tensors", "elements", "ready", "selected", "arrived", "selected", "arrived")
        ]
        for group in self.groups:
            name = f"{group.names[-1]} … {group.names[0]}" if len(group.names) > 1 else group.names[0]
            predicted_times, measured_times = group.predicted or _UNKNOWN, group.measured or _UNKNOWN
            ready = (group.predicted or measured_times)[0]
            times = _milliseconds(ready, *predicted_times[1:], *measured_times[1:])
            rows.append((name, str(len(group.names)), f"{group.elements:,}", *times))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        above = " " * (sum(widths[:4]) + 6)
        above += f"  {'predicted, ms':>{widths[4] + widths[5] + 2}}  {'measured, ms':>{widths[6] + widths[7] + 2}}"
        line = "  ".join([f"{{:<{widths[0]}}}", *(f"{{:>{width}}}" for width in widths[1:])])
        return "\n".join([head, above, *(line.format(*row) for row in rows)])


def _milliseconds(*moments: float | None) -> list[str]:
    return ["–" if seconds is None else f"{seconds * 1e3:.2f}" for seconds in moments]
