"""Line charts and bars, with a palette whose colours differ for readers who see no red, no green or no blue too.

The palette has a contrast of 3:1 or more with white and with near black. In one plot no two series share a colour, and
none both marker and dash, so that colour is never the only difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

PALETTE = (
    "#1fa4a0",
    "#a80fff",
    "#d1734a",
    "#9b89d5",
    "#b53169",
    "#0c780d",
    "#d261fc",
    "#5f789e",
    "#843dd5",
    "#f3446c",
    "#6ba404",
    "#a62cb0",
)
"""Found by a search for the largest least distance (CIE 1976) of any two, with full sight and without each receptor."""

MARKERS = "os^vDPX*<>hp"
NEUTRAL = "#7a7a7a"
_DASHES = ("-", "--", "-.", ":")
_SIZE = (8.6, 4.2)
_DOTS_AN_INCH = 100


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawing.

    Attributes:
        key: of its file.
        title: its name for readers.
        caption: below it.
        figure: what is drawn.
    """

    key: str
    title: str
    caption: str
    figure: Figure

    def save(self, directory: Path) -> Path:
        """Write ``KEY.png``; return its path."""
        path = directory / f"{self.key}.png"
        FigureCanvasAgg(self.figure)
        self.figure.savefig(path, dpi=_DOTS_AN_INCH)
        return path


@dataclass(frozen=True, slots=True)
class Line:
    """One curve.

    Attributes:
        name: in the legend.
        points: (x, y), in order.
        dashed: whether the caption calls it so.
        marked: whether each point has a marker; else the dash tells curves apart.
    """

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    marked: bool = True


def style_of(number: int) -> tuple[str, str]:
    """Return colour and marker of a series by its number; more series than colours differ in the marker."""
    again, place = divmod(number, len(PALETTE))
    return PALETTE[place], MARKERS[(place + again) % len(MARKERS)]


def frame(count: int, width: float = 5.2, height: float = 4.8, *, share: bool = False) -> tuple[Figure, list[Axes]]:
    """Return a picture with places side by side, which may share their axes."""
    figure = Figure(figsize=(width * count + 0.4, height), layout="constrained")
    planes = list(figure.subplots(1, count, squeeze=False, sharex=share, sharey=share)[0])
    for plane in planes:
        plane.grid(alpha=0.3)
        plane.set_axisbelow(True)
        plane.spines[["top", "right"]].set_visible(False)
    return figure, planes


def legend(figure: Figure, plane: Axes, columns: int) -> Figure:
    """Put what the curves are below the picture."""
    handles, labels = plane.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
    return figure


def lines(
    key: str,
    title: str,
    caption: str,
    axes: tuple[str, str],
    curves: Sequence[Line],
    *,
    log_x: bool = False,
    log_y: bool = False,
) -> Plot:
    """Draw curves over one pair of axes."""
    if len(curves) > len(PALETTE):
        raise ValueError(f"{len(curves)} curves are too many for one plot: there are {len(PALETTE)} colours")
    figure, [plane] = frame(1, *_SIZE)
    plane.set_xlabel(axes[0])
    plane.set_ylabel(axes[1])
    for number, curve in enumerate(curves):
        if not curve.points:
            continue
        x, y = zip(*curve.points, strict=True)
        plane.plot(
            x,
            y,
            label=curve.name,
            color=PALETTE[number],
            linestyle="--" if curve.dashed else "-" if curve.marked else _DASHES[number % len(_DASHES)],
            marker=MARKERS[number] if curve.marked else "",
            markersize=4,
            linewidth=1.6,
        )
    if log_x:
        plane.set_xscale("log")
        values = sorted({x for curve in curves for x, _ in curve.points})  # ticks where the measurements are
        plane.set_xticks(values, labels=[_short(value) for value in values])
        plane.xaxis.set_minor_formatter(NullFormatter())
        plane.tick_params(axis="x", which="minor", length=0)
    if log_y:
        plane.set_yscale("log")
        plane.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        plane.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
        plane.yaxis.set_minor_formatter(NullFormatter())
    else:
        plane.set_ylim(bottom=0)
    figure.legend(loc="outside right upper", frameon=False)
    figure.suptitle(title, fontsize=11, x=0.01, horizontalalignment="left")
    return Plot(key, title, caption, figure)


def bars(
    key: str,
    title: str,
    caption: str,
    axis: str,
    values: Sequence[tuple[str, float]],
    *,
    percent: bool = False,
) -> Plot:
    """Draw one horizontal bar a value."""
    figure, [plane] = frame(1, _SIZE[0], 0.9 + 0.45 * len(values))
    names, lengths = zip(*values, strict=True)
    drawn = plane.barh(names, lengths, height=0.6, color=PALETTE[0])
    words = [f"{length:.0%}" if percent else _short(length) for length in lengths]
    plane.bar_label(drawn, labels=words, padding=3)
    plane.invert_yaxis()
    plane.margins(x=0.1)
    plane.set_xlabel(axis)
    return Plot(key, title, caption, figure)


def _short(value: float) -> str:
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g} {letter}"
    return f"{value:.3g}"
