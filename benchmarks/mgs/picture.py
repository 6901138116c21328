"""A plan as a picture: a row for what computes, what selects and what sends, a bar a group."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from psclient.buckets.costs import Timeline
from psclient.buckets.plan import BucketPlan
from psclient.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#1a7fc1", "#d55e00", "#0f9b6c", "#b8609a", "#85762f")
_ROWS = ("gradients", "select", "send")
_MILLISECONDS = 1e3


def draw(plan: BucketPlan, path: Path) -> Path:
    """Draw when each group is computed, selected and sent, predicted above measured; the path's ending is the format.

    Raises:
        ConfigurationError: matplotlib is not installed, or nothing has been measured yet.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError(
            "a picture of a plan needs matplotlib: pip install 'sparseps[quickstart]', or print(optimizer.plan)"
        ) from None
    known = {
        title: [moments for moments in found if moments is not None]
        for title, found in (
            ("predicted", [group.predicted for group in plan.groups]),
            ("measured", [group.measured for group in plan.groups]),
        )
    }
    shown = {title: moments for title, moments in known.items() if moments}
    if not shown:
        raise ConfigurationError("there is nothing to draw before the first measured steps; draw the plan later")
    figure = Figure(figsize=(9, 1 + 2 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    planes = figure.subplots(len(shown), sharex=True, squeeze=False)[:, 0]
    for plane, (title, moments) in zip(planes, shown.items(), strict=True):
        _timeline(plane, moments)
        plane.set_title(title, loc="left", fontsize=10)
    planes[-1].set_xlabel("ms after the first gradient")
    figure.suptitle(str(plan).partition("\n")[0], fontsize=10)
    figure.savefig(path)
    return path


def _timeline(plane: "Axes", moments: Sequence[Timeline]) -> None:
    """Draw each group from its beginning on a row to its end there."""
    begun = [0.0, 0.0, 0.0]
    for number, moment in enumerate(sorted(moments, key=lambda each: each.arrived)):
        colour = _COLOURS[number % len(_COLOURS)]
        ends = (moment.ready, moment.selected, moment.arrived)
        starts = [begun[0], *(max(free, came) for free, (came, _) in zip(begun[1:], pairwise(ends), strict=True))]
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            width = max(0.0, end - start) * _MILLISECONDS
            plane.barh(row, width, left=start * _MILLISECONDS, color=colour, edgecolor="white", linewidth=0.5)
            begun[row] = max(begun[row], end)
    last = max(moment.ready for moment in moments) * _MILLISECONDS
    plane.axvline(last, color="#7a7a7a", linestyle="--", linewidth=1)
    plane.text(last, -0.45, "last gradient ", fontsize=8, color="#7a7a7a", ha="right")
    plane.set_yticks(range(len(_ROWS)), labels=_ROWS)
    plane.invert_yaxis()
