"""Pictures of runs, from their metrics.jsonl: a figure of the server's model against the bytes that a worker moved."""

from collections.abc import Sequence
from pathlib import Path

from . import metrics
from .datafiles import MissingDataError


def draw(runs: Sequence[Path], path: Path, figure: str) -> Path:
    """Draw one line a run; return the path.

    Args:
        runs: their folders.
        path: of the picture.
        figure: a name in the tests of ``metrics.jsonl``.

    Raises:
        MissingDataError: a folder holds no such run.
    """
    from matplotlib.figure import Figure

    picture = Figure(figsize=(7, 4.5), layout="constrained")
    axes = picture.subplots()
    for run in runs:
        points = [(found["bytes"] / 1e6, found[figure]) for found in read(run) if figure in found]
        if not points:
            raise MissingDataError(f"{run / metrics.NAME} has no test with {figure}")
        axes.plot(*zip(*points, strict=True), marker=".", label=run.name)
        axes.annotate(f"{points[-1][1]:.3g}", points[-1], xytext=(4, 4), textcoords="offset points")
    axes.set(xlabel="MB pushed and pulled by worker 0", ylabel=f"{figure} of the server's model")
    if figure == "perplexity":
        axes.set_yscale("log")
        for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            axis("{x:g}")
    axes.margins(x=0.08)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    picture.savefig(path, dpi=120)
    return path


def read(run: Path) -> list[dict[str, float]]:
    """Return the tests of a run in their order, without lines that a kill has cut; raises :class:`MissingDataError`."""
    path = run / metrics.NAME
    if not path.is_file():
        raise MissingDataError(f"{path} is missing; give the folder of a run, as --out of that run said")
    return [line for line in metrics.read(run) if line.get("kind") == "test"]
