"""The sections of the report: costs, the simulation against real runs, sweeps, and what saturates."""

from collections.abc import Callable, Mapping, Sequence

from benchmarks.harness.plots import Line, Plot, lines
from benchmarks.harness.section import Section, Table
from benchmarks.scale import sweeps
from benchmarks.scale.check import TARGET, Row
from benchmarks.scale.costs import Costs
from benchmarks.scale.engine import Points
from benchmarks.scale.sweeps import PUBLISHED, PUBLISHED_WORKERS, Found, Grid, Sweeper, base, on_images

UNITS: Mapping[str, tuple[str, str]] = {
    "decode": ("server: parse, decode, check and merge a push", "entry"),
    "apply": ("server: apply it (apply thread)", "entry"),
    "union_sort": ("server: what pushes have changed, by sorting", "entry of all pushes covered"),
    "union_mark": ("server: the same by marking", "entry of all pushes covered"),
    "union_scan": ("server: and by scanning the marks", "element"),
    "gather": ("server: read the values of a reply", "entry"),
    "copy": ("server: copy everything", "element"),
    "encode": ("server: write a sparse reply", "entry"),
    "encode_dense": ("server: write a dense reply", "element"),
    "select_all": ("server: select a top-k reply among all", "element"),
    "select_changed": ("server: and among what changed", "entry of all pushes covered"),
    "push_call": ("server: gRPC's part of a push", "byte"),
    "pull_call": ("server: gRPC's part of a pull", "byte"),
    "client_push": ("replaying client: a push", "byte"),
    "client_pull": ("replaying client: a pull", "byte"),
    "worker_select": ("real worker: accumulate, select, cut out", "element"),
    "worker_encode": ("real worker: write the push", "entry"),
    "worker_install": ("real worker: decode a reply and write it", "entry"),
}

_SHOWN = (1, 10, 100, 1000)  # workers that tables have rows for


def costs(found: Costs, points: Points) -> Section:
    """Tell what was measured: every line, and how well it fits."""
    rows = []
    for name, (what, unit) in UNITS.items():
        fitted, off, count = getattr(found, name), found.notes.get(name), len(points.get(name, ()))
        cells = (f"{fitted.fixed * 1e6:.0f}", f"{fitted.each * 1e9:.3g}", unit, str(count))
        rows.append((what, *cells, "" if off is None else f"{off:.0%}"))
    heads = ("work, seconds of one core", "fixed, µs", "each, ns", "for each", "points", "worst distance")
    section = Section(
        "costs", "What a push and a pull cost here", [Table("A fixed part, and one that grows", heads, rows)]
    )
    section.figures = {"costs": found.plain(), "points": points}
    shares = ", ".join(f"{name} {share:.0%}" for name, share in found.serial.items())
    novelty = zip(found.novelty.densities, found.novelty.values, strict=True)
    section.notes = [
        f"Serial share, which two threads of the process cannot do at once: {shares}.",
        f"A call in which nobody computes: {found.idle * 1e6:.0f} µs. A renewal of a lease: {found.renewal * 1e6:.0f} "
        f"µs. More CPU time if several works run at once: {found.crowding:.0%}. To hand the interpreter over to one "
        f"that waits: {found.handover * 1e6:.0f} µs. A server without a model: {found.server_bytes / 1e6:.0f} MB.",
        "Pushes of eight workers in training overlap: n of them change what n^a at random places would, with a = "
        f"{', '.join(f'{value:.2f} at {density:.1%}' for density, value in novelty)}.",
        "CPU times, so that other work on the machine changes them less than it changes a clock's.",
    ]
    return section


def check(rows: Sequence[Row]) -> Section:
    """Compare real runs with simulations; what misses the target has a mark."""
    shown = []
    for row in rows:
        real, found, errors = row.real, row.simulated, row.errors()
        shown.append(
            (
                row.case.name,
                str(row.workers),
                *(f"{real.rate:.1f}", f"{found.steps_per_second:.1f}", _error(errors["throughput"])),
                *(f"{real.staleness:.2f}", f"{found.staleness:.2f}", _error(errors["staleness"])),
                f"{(real.sent + real.received) / 1e3:.1f}",
                f"{(found.sent + found.received) / 1e3:.1f}",
                _error(errors["bytes"]),
                f"{(real.push_seconds + real.pull_seconds) * 1e3:.1f}",
                f"{(found.push_seconds + found.pull_seconds) * 1e3:.1f}",
            )
        )
    simulated = ("simulated", "off")
    heads = ("case", "clients", "steps/s real", *simulated, "staleness real", *simulated, "kB a step real", *simulated)
    title = f"Real runs on this machine and the simulation of the same; † is off by more than {TARGET:.0%}"
    section = Section("check", "The simulation against real runs")
    section.tables = [_summary(rows), Table(title, (*heads, "ms real", "simulated"), shown)]
    section.plots = [
        _check_plot(rows, "throughput", "Steps a second", lambda row: (row.real.rate, row.simulated.steps_per_second)),
        _check_plot(rows, "staleness", "Mean staleness", lambda row: (row.real.staleness, row.simulated.staleness)),
    ]
    section.figures = {"rows": [row.plain() for row in rows]}
    section.notes = [
        "A server (or two) and clients on this machine, which share its cores; clients replay encoded pushes, throw "
        "replies away, and think in between. Costs were measured with other model sizes, with one client (what several "
        "at once cost more: with two, four and 16), and without think time.",
        "Staleness is off relative to the real one, or to 1 if that is less.",
    ]
    return section


def sweep(sweeper: Sweeper, grid: Grid) -> Section:
    """Vary workers and shards at each density."""
    section = Section("sweeps", f"{sweeps.ELEMENTS:,} parameters, {min(grid.workers)} to {max(grid.workers):,} workers")
    points = []
    for density in grid.densities:
        curves, rows = [], []
        for free in (False, True):
            for count in grid.shards:
                along = sweeper.along(base(density, count), grid.workers, free=free)
                name = f"{count} shards{', bytes alone' if free else ''}"
                curves.append(Line(name, [(each.cluster.workers, each.speedup) for each in along], dashed=free))
                shown = [each for each in along if each.cluster.workers in _SHOWN and not free]
                rows += [_row(name, each, sweeper.costs.server_bytes) for each in shown]
                points += [each.plain() for each in along]
        curves.append(Line("ideal", [(count, count) for count in grid.workers], marked=False))
        key, caption = f"scale-speedup-{density:g}".replace("0.", "0"), "Dashed: hosts that cost nothing."
        section.plots.append(_speedups(key, f"Speed-up by shards, density {density:.1%}", caption, curves))
        section.tables.append(Table(f"By shards, density {density:.1%}", _HEADS, rows))
    section.figures = {"points": points}
    section.notes = [
        f"Servers at 25 Gbit/s, workers at 10, {sweeps.COMPUTE:g} s of compute a step. Costs are those of this "
        "machine's CPU, for workers too: selecting from 10⁹ parameters on a core is part of each step, and a GPU would "
        f"take far less. Servers have {sweeps.CORES} such cores, one interpreter, and 64 GiB for calls "
        "(`--memory-bytes`).",
        "GB a shard: parameters, ledger, an image for each worker that is answered top-k, calls in flight, the "
        "process.",
    ]
    return section


def bandwidth(sweeper: Sweeper, grid: Grid) -> Section:
    """Few workers of a model of images over slow and fast networks, against a worker that talks to nobody."""
    section = Section("bandwidth", f"ResNet-18 with {min(grid.few_workers)} to {max(grid.few_workers)} workers")
    rows, points = [], []
    for bits in grid.bandwidths:
        name = f"{bits / 1e6:g} Mbit/s"
        ways = {
            "dense": on_images(bits, 1.0, "exact"),
            "1 %, exact": on_images(bits, 0.01, "exact"),
            "1 %, top-k": on_images(bits, 0.01, "topk"),
            "1 %, top-k, overlap": on_images(bits, 0.01, "topk", overlap=True),
        }
        curves = []
        for way, cluster in ways.items():
            for free in (False, True):
                along = sweeper.along(cluster, grid.few_workers, free=free)
                speedups = [found.outcome.steps_per_second * sweeps.IMAGE_COMPUTE for found in along]
                words = f"{way}, bytes alone" if free else way
                curves.append(Line(words, list(zip(grid.few_workers, speedups, strict=True)), dashed=free))
                rows.append((name, words, *(f"{speedup:.2f}" for speedup in speedups)))
                points += [{"way": words, **found.plain()} for found in along]
        for way, published in PUBLISHED.get(bits, {}).items():
            curves.append(Line(f"{way}, published", list(zip(PUBLISHED_WORKERS, published, strict=True)), dashed=True))
        caption = "Dashed: bytes alone, and published."
        section.plots.append(_speedups(f"scale-bandwidth-{bits / 1e6:g}", f"Speed-up at {name}", caption, curves))
    heads = ("cards", "way", *(str(count) for count in grid.few_workers))
    section.tables.append(Table("Speed-up over one worker that talks to nobody", heads, rows))
    section.figures = {"points": points}
    section.notes = [
        f"{sweeps.IMAGE_ELEMENTS:,} parameters, {sweeps.IMAGE_COMPUTE:g} s of compute a step. Bytes alone: hosts that "
        "cost nothing, so that only networks do.",
        "Published: Yan et al., ICPP 2020. Read them as upper bounds: the code of that measurement answers with the "
        "worker's own push, and its ASGD sends float64.",
    ]
    return section


def saturate(sweeper: Sweeper, grid: Grid) -> Section:
    """Show what saturates first, and the shards that move it away."""
    most = max(grid.saturating_workers)
    heads = (
        "",
        "saturates first, at workers",
        f"efficient ({sweeps.EFFICIENT:.0%}) up to",
        f"shards that keep {most:,} efficient",
        "busiest there",
    )
    section = Section("saturation", "What saturates first, and how many shards move it")
    for density in grid.densities:
        rows = []
        for gigabits in grid.server_gigabits:
            for mode in ("auto", "topk"):
                cluster = base(density, 1, gigabits, mode)
                found = sweeps.saturation(sweeper, cluster, grid.saturating_shards, grid.saturating_workers)
                rows.append(
                    (
                        f"servers {gigabits} Gbit/s, replies {mode}",
                        f"{found.resource} at {found.workers}" if found.workers else "nothing",
                        str(found.most),
                        str(found.shards) if found.shards else f"more than {max(grid.saturating_shards)}",
                        "{} {:.0%}".format(*found.at_thousand),
                    )
                )
        section.tables.append(Table(f"One shard, density {density:.1%}", heads, rows))
    section.notes = [
        f"Saturated: used {sweeps.BUSY:.0%} of the time. Efficient: speed-up over workers of {sweeps.EFFICIENT:.0%}."
    ]
    return section


_HEADS = (
    *("", "workers", "pushes/s", "efficiency", "staleness (90 %)", "server Gbit/s in", "out"),
    *("worker Gbit/s up", "down", "busiest", "top-k", "GB a shard"),
)


def _row(name: str, found: Found, server_bytes: float) -> tuple[str, ...]:
    outcome = found.outcome
    return (
        name,
        str(found.cluster.workers),
        f"{outcome.steps_per_second:.3g}",
        f"{found.efficiency:.0%}",
        f"{outcome.staleness:.3g} ({outcome.staleness_90:.3g})",
        *(f"{bits / 1e9:.2g}" for bits in (*found.server_bits, *found.worker_bits)),
        "{} {:.0%}".format(*found.busiest),
        f"{outcome.topk:.0%}",
        f"{sweeps.memory(found.cluster, outcome, server_bytes) / 1e9:.3g}",
    )


def _speedups(key: str, title: str, caption: str, curves: Sequence[Line]) -> Plot:
    return lines(key, title, caption, ("workers", "times one worker"), curves, log_x=True, log_y=True)


def _check_plot(rows: Sequence[Row], key: str, title: str, values: Callable[[Row], tuple[float, float]]) -> Plot:
    curves = []
    for name in dict.fromkeys(row.case.name for row in rows):
        for number, kind in enumerate(("real", "simulated")):
            points = [(row.workers, max(0.1, values(row)[number])) for row in rows if row.case.name == name]
            curves.append(Line(f"{name}: {kind}", points, dashed=number == 1))
    caption = "Real runs (solid) and simulations of the same (dashed)."
    return lines(f"scale-check-{key}", title, caption, ("clients", title.lower()), curves, log_x=True, log_y=True)


def _summary(rows: Sequence[Row]) -> Table:
    """Count what is within the target."""
    shown = []
    for name in ("throughput", "staleness", "bytes"):
        errors = sorted(abs(row.errors()[name]) for row in rows)
        within = sum(error <= TARGET for error in errors)
        shown.append((name, f"{within} of {len(errors)}", f"{errors[len(errors) // 2]:.0%}", f"{errors[-1]:.0%}"))
    return Table("Relative errors of the simulation", ("figure", f"within {TARGET:.0%}", "median", "largest"), shown)


def _error(value: float) -> str:
    return f"{value:+.0%}" + (" †" if abs(value) > TARGET else "")
