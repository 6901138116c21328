"""What the pictures of all campaigns have in common."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks.campaign.tasks import Task

_DOTS_AN_INCH = 100


def frame(count: int) -> tuple[Figure, list[Axes]]:
    """Return a picture with places side by side."""
    figure = Figure(figsize=(5.2 * count + 0.4, 4.8), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def label(plane: Axes, task: Task) -> None:
    """Name a place after its task, and its upright axis after the task's metric."""
    plane.set_title(task.title, fontsize=10)
    plane.set_ylabel("test accuracy" if task.higher_is_better else "test loss, nats a byte (lower is better)")
    if task.higher_is_better:
        plane.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
    plane.grid(alpha=0.3)
    plane.spines[["top", "right"]].set_visible(False)


def legend(figure: Figure, plane: Axes, columns: int) -> Figure:
    """Put what the curves are below the picture."""
    handles, labels = plane.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Write a picture; return its path."""
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=_DOTS_AN_INCH)
    return path
