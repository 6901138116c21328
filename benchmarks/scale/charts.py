"""The plots: what they show, for the page as SVG and for the guide as PNG."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import plots
from benchmarks.harness.plots import Line
from benchmarks.harness.section import Plot
from benchmarks.scale.check import Row
from benchmarks.scale.sweeps import Found


@dataclass(frozen=True, slots=True)
class Chart:
    """One drawing.

    Attributes:
        key: of its file.
        title: above it.
        caption: below it.
        axes: what they are.
        curves: see there.
        log_y: whether the upright axis is logarithmic; the other one is.
    """

    key: str
    title: str
    caption: str
    axes: tuple[str, str]
    curves: Sequence[Line]
    log_y: bool = True

    def plot(self) -> Plot:
        return plots.lines(self.title, self.caption, self.axes, self.curves, log_x=True, log_y=self.log_y)

    def save(self, directory: Path) -> Path:
        """Write ``scale-KEY.png``; return its path."""
        path = directory / f"scale-{self.key}.png"
        plots.save_lines(path, self.title, self.axes, self.curves, log_x=True, log_y=self.log_y)
        return path


Series = Sequence[tuple[str, Sequence[Found]]]


def of(
    key: str,
    title: str,
    caption: str,
    axis: str,
    series: Series,
    value: Callable[[Found], float],
    *,
    dashed: Series = (),
    ideal: bool = False,
) -> Chart:
    """Draw something of each point over the number of workers; those of ``dashed`` stand behind."""
    curves = [
        Line(name, [(found.cluster.workers, value(found)) for found in along], dashed=is_dashed)
        for is_dashed, group in ((False, series), (True, dashed))
        for name, along in group
    ]
    if ideal:
        counts = [found.cluster.workers for found in series[0][1]]
        curves.append(Line("ideal", [(count, count) for count in counts], marked=False))
    return Chart(key, title, caption, ("workers", axis), curves)


def speedup(found: Found) -> float:
    """Return pushes a second over those of one worker."""
    return found.outcome.steps_per_second * found.alone


def staleness(found: Found) -> float:
    """Return the mean, and a tenth where there is none: the axis is logarithmic."""
    return max(0.1, found.outcome.staleness)


def gigabits_out(found: Found) -> float:
    return found.server_bits[1] / 1e9


def gigabits_in(found: Found) -> float:
    return found.server_bits[0] / 1e9


def checks(rows: Sequence[Row]) -> list[Chart]:
    """Draw real runs and simulations over each other."""
    names = list(dict.fromkeys(row.case.name for row in rows))

    def curves(real: Callable[[Row], float], simulated: Callable[[Row], float]) -> list[Line]:
        drawn = []
        for name in names:
            mine = [row for row in rows if row.case.name == name]
            drawn.append(Line(f"{name}: real", [(row.workers, real(row)) for row in mine]))
            points = [(row.workers, simulated(row)) for row in mine]
            drawn.append(Line(f"{name}: simulated", points, dashed=True))
        return drawn

    caption = "Real runs (solid) and simulations of the same (dashed)."
    return [
        Chart(
            "check-throughput",
            "Steps a second, real and simulated",
            caption,
            ("clients", "steps a second"),
            curves(lambda row: row.real.steps_per_second, lambda row: row.simulated.steps_per_second),
        ),
        Chart(
            "check-staleness",
            "Mean staleness, real and simulated",
            caption,
            ("clients", "versions"),
            curves(lambda row: max(0.1, row.real.staleness), lambda row: max(0.1, row.simulated.staleness)),
        ),
    ]
