"""Line charts and bars as SVG that can stand inside a page: deterministic, and readable on light and dark ground.

Axes and text take the colour of the page's text. The palette has a contrast of 3:1 or more with white and with near
black, and any two of its colours differ for readers who see no red, no green or no blue too. In one plot no two series
share a colour, and none both marker and dash, so that colour is never the only difference.
"""

import io
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.harness.section import Plot

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


def style_of(number: int) -> tuple[str, str]:
    """Return colour and marker of a series by its number; more series than colours differ in the marker."""
    again, place = divmod(number, len(PALETTE))
    return PALETTE[place], MARKERS[(place + again) % len(MARKERS)]


NEUTRAL = "#7a7a7a"
_DASHES = ("-", "--", "-.", ":")
_TEXT = "#010203"  # stands for the page's own text colour until the SVG is written
_SIZE = (8.6, 4.2)
_DOTS_AN_INCH = 100


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


def lines(
    title: str, caption: str, axes: tuple[str, str], curves: Sequence[Line], *, log_x: bool = False, log_y: bool = False
) -> Plot:
    """Draw curves over one pair of axes."""
    with _style(title):
        figure = _curves(axes, curves, log_x=log_x, log_y=log_y)
        return Plot(title, caption, _svg(figure, title))


def save_lines(
    path: Path,
    title: str,
    axes: tuple[str, str],
    curves: Sequence[Line],
    *,
    log_x: bool = False,
    log_y: bool = False,
) -> None:
    """Write the same as a picture on white ground, its title above."""
    with _style(title):
        figure = _curves(axes, curves, log_x=log_x, log_y=log_y)
        figure.suptitle(title, fontsize=11, x=0.01, horizontalalignment="left")
        FigureCanvasAgg(figure)
        figure.savefig(path, dpi=_DOTS_AN_INCH, facecolor="white", transparent=False)


def bars(title: str, caption: str, axis: str, values: Sequence[tuple[str, float]]) -> Plot:
    """Draw one horizontal bar a value."""
    with _style(title):
        figure, plane = _frame((axis, ""))
        names, lengths = zip(*values, strict=True)
        drawn = plane.barh(names, lengths, height=0.6, color=PALETTE[0])
        plane.bar_label(drawn, labels=[_short(length) for length in lengths], padding=3, color=_TEXT)
        plane.invert_yaxis()
        plane.margins(x=0.1)
        figure.set_size_inches(_SIZE[0], 0.9 + 0.45 * len(values))
        return Plot(title, caption, _svg(figure, title))


def _curves(axes: tuple[str, str], curves: Sequence[Line], *, log_x: bool, log_y: bool) -> Figure:
    if len(curves) > len(PALETTE):
        raise ValueError(f"{len(curves)} curves are too many for one plot: there are {len(PALETTE)} colours")
    figure, plane = _frame(axes)
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
        _name_ticks(plane, sorted({x for curve in curves for x, _ in curve.points}))
    if log_y:
        plane.set_yscale("log")
        plane.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        plane.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
        plane.yaxis.set_minor_formatter(NullFormatter())
    else:
        plane.set_ylim(bottom=0)
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def _style(salt: str) -> AbstractContextManager[None]:
    """Set everything that a user's own matplotlibrc could change; ids depend on the salt alone."""
    return mpl.rc_context(
        {
            **mpl.rcParamsDefault,
            "backend": "svg",
            "svg.fonttype": "none",
            "svg.hashsalt": salt,
            "font.size": 10,
            "text.color": _TEXT,
            "axes.edgecolor": _TEXT,
            "axes.labelcolor": _TEXT,
            "xtick.color": _TEXT,
            "ytick.color": _TEXT,
            "grid.color": NEUTRAL,
            "grid.alpha": 0.25,
        }
    )


def _frame(axes: tuple[str, str]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE, layout="constrained")
    FigureCanvasSVG(figure)
    figure.patch.set_alpha(0)
    plane = figure.add_subplot()
    plane.patch.set_alpha(0)
    plane.set_xlabel(axes[0])
    plane.set_ylabel(axes[1])
    plane.grid(True)
    plane.spines[["top", "right"]].set_visible(False)
    return figure, plane


def _name_ticks(plane: Axes, values: Sequence[float]) -> None:
    """Put ticks of a logarithmic axis where the measurements are."""
    plane.set_xticks(values, labels=[_short(value) for value in values])
    plane.xaxis.set_minor_formatter(NullFormatter())
    plane.tick_params(axis="x", which="minor", length=0)


def _svg(figure: Figure, title: str) -> str:
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :].strip().replace(_TEXT, "currentColor")
    svg = re.sub(r'\s(xmlns(:\w+)?|version)="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    prefix = re.sub(r"\W+", "-", title.lower()).strip("-")  # several drawings share a page
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{_escaped(title)}"', 1)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


def _short(value: float) -> str:
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g} {letter}"
    return f"{value:.3g}"
