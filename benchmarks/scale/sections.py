"""The sections of the report, from what was measured and simulated."""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.harness.plots import Line
from benchmarks.harness.section import Section, Table
from benchmarks.scale import charts, sweeps, tables
from benchmarks.scale.charts import Chart
from benchmarks.scale.check import Row
from benchmarks.scale.costs import Costs
from benchmarks.scale.engine import Points
from benchmarks.scale.published import PUBLISHED, PUBLISHED_WORKERS
from benchmarks.scale.sweeps import Found, Grid, Sweeper, as_shipped, base, networks, with_workers

_SHOWN = (1, 10, 100, 1000)  # workers that tables have rows for


def costs(found: Costs, points: Points) -> Section:
    """Tell what was measured."""
    section = Section("costs", "What a push and a pull cost here")
    section.tables.append(tables.costs(found, points))
    section.figures = {"costs": found.plain(), "points": points}
    shares = ", ".join(f"{name} {share:.0%}" for name, share in found.serial.items())
    section.notes += [
        f"Serial share, which two threads of the process cannot do at once: {shares}.",
        f"A call in which nobody computes: {found.idle * 1e6:.0f} µs. A renewal of a lease: {found.renewal * 1e6:.0f} "
        f"µs. More CPU time where several works run at once: {found.crowding:.0%}. To hand the interpreter over to one "
        f"that waits: {found.handover * 1e6:.0f} µs. A server without a model: "
        f"{found.server_bytes / 1e6:.0f} MB.",
        "Pushes of eight workers in training overlap: n of them change what n^a at random places would, with a = "
        + ", ".join(
            f"{value:.2f} at {density:.1%}"
            for density, value in zip(found.novelty.densities, found.novelty.values, strict=True)
        )
        + ".",
        "CPU times, so that other work on the machine changes them less than it changes a clock's.",
    ]
    return section


def check(rows: Sequence[Row]) -> tuple[Section, list[Chart]]:
    """Compare real runs with simulations."""
    section = Section("check", "The simulation against real runs")
    drawn = charts.checks(rows)
    section.tables += [tables.summary(rows), tables.validation(rows)]
    section.plots += [chart.plot() for chart in drawn]
    section.figures = {"rows": [row.plain() for row in rows]}
    section.notes += [
        "A server (or two) and clients on this machine, which share its cores; clients replay encoded pushes, throw "
        "replies away, and think in between. Costs were measured with other model sizes, with one client (what several "
        "at once cost more: with two, four and 16), and without think time.",
        "Staleness is off relative to the real one, or to 1 where that is less.",
    ]
    return section, drawn


def sweep(sweeper: Sweeper, grid: Grid) -> tuple[Section, list[Chart]]:
    """Vary one thing at a time."""
    section = Section("sweeps", f"{sweeps.ELEMENTS:,} parameters, {min(grid.workers)} to {max(grid.workers):,} workers")
    server_bytes = sweeper.costs.server_bytes
    drawn: list[Chart] = []
    everything: list[Found] = []
    for density in grid.densities:
        percent, key = f"{density:.1%}", f"{density:g}".replace(".", "")
        by_shards = [(f"{count} shards", sweeper.along(base(density, count), grid.workers)) for count in grid.shards]
        free = [
            (f"{count}, bytes alone", sweeper.along(base(density, count), grid.workers, free=True))
            for count in grid.shards
        ]
        where = f"Density {percent}, servers at 25 Gbit/s, workers at 10, {sweeps.COMPUTE:g} s of compute a step."
        alone = f"{where} Dashed: hosts that cost nothing, so that only networks do."
        drawn += [
            charts.of(
                f"speedup-{key}",
                f"Speedup by shards, density {percent}",
                alone,
                "times one worker",
                by_shards,
                charts.speedup,
                dashed=free,
                ideal=True,
            ),
            charts.of(
                f"staleness-{key}",
                f"Staleness by shards, density {percent}",
                where,
                "versions, mean",
                by_shards,
                charts.staleness,
            ),
            charts.of(
                f"out-{key}",
                f"What each server sends, density {percent}",
                where,
                "Gbit/s",
                by_shards,
                charts.gigabits_out,
            ),
        ]
        section.tables.append(_table(f"By shards, density {percent}", by_shards, server_bytes))
        everything += [found for _, along in [*by_shards, *free] for found in along]
    for title, key, series in _networks(sweeper, grid):
        free = [
            (f"{name}, bytes alone", [sweeper.at(found.cluster, free=True) for found in along])
            for name, along in series
        ]
        drawn.append(
            charts.of(
                key,
                title,
                "Density 0.1 %, 16 shards. Dashed: hosts that cost nothing.",
                "times one worker",
                series,
                charts.speedup,
                dashed=free,
                ideal=True,
            )
        )
        section.tables.append(_table(title, series, server_bytes))
        everything += [found for _, along in series for found in along]
    for title, key, series in _others(sweeper, grid):
        drawn.append(charts.of(key, title, "Density 0.1 %.", "times one worker", series, charts.speedup, ideal=True))
        section.tables.append(_table(title, series, server_bytes))
        everything += [found for _, along in series for found in along]
    section.tables.append(tables.against_each(_each(sweeper, grid)))
    section.plots += [chart.plot() for chart in drawn]
    section.figures = {"points": [found.plain() for found in everything]}
    section.notes += [
        "Costs are those of this machine's CPU, for workers too: selecting from 10⁹ parameters on a core is part of "
        "each step, and a GPU would take far less. Servers have 16 such cores and one interpreter.",
        "Servers have a thread for each worker (`--rpc-threads`; the default is 64) and 64 GiB for calls "
        "(`--inflight-bytes`); the row *default limits* has the default number of threads, and 1 GiB.",
        "GB a shard: parameters, ledger, an image for each worker that is answered top-k, calls in flight, the "
        "process.",
    ]
    return section, drawn


def bandwidth(sweeper: Sweeper, grid: Grid) -> tuple[Section, list[Chart]]:
    """Few workers of a model of images over slow and fast networks, against a worker that talks to nobody."""
    section = Section("bandwidth", f"ResNet-18 with {min(grid.few_workers)} to {max(grid.few_workers)} workers")
    drawn: list[Chart] = []
    rows, points = [], []
    for bits in grid.bandwidths:
        name = f"{bits / 1e6:g} Mbit/s"
        ways = {
            "dense": sweeps.on_images(bits, 1.0, "exact"),
            "1 %, exact": sweeps.on_images(bits, 0.01, "exact"),
            "1 %, top-k": sweeps.on_images(bits, 0.01, "topk"),
            "1 %, top-k, overlap": sweeps.on_images(bits, 0.01, "topk", overlap=True),
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
        axes = "workers", "times one worker alone"
        drawn.append(Chart(f"bandwidth-{bits / 1e6:g}", f"Speedup at {name}", "Dashed: see there.", axes, curves))
    heads = ("cards", "way", *(str(count) for count in grid.few_workers))
    section.tables.append(Table("Speedup over one worker that talks to nobody", heads, rows))
    section.plots += [chart.plot() for chart in drawn]
    section.figures = {"points": points}
    section.notes += [
        f"{sweeps.IMAGE_ELEMENTS:,} parameters, {sweeps.IMAGE_COMPUTE:g} s of compute a step. Bytes alone: hosts that "
        "cost nothing, so that only networks do.",
        "Published: Yan et al., ICPP 2020. Read them as upper bounds: the code of that measurement answers with the "
        "worker's own push, and its ASGD sends float64.",
    ]
    return section, drawn


def saturate(sweeper: Sweeper, grid: Grid) -> Section:
    section = Section("saturation", "What saturates first, and how many shards move it")
    for density in grid.densities:
        rows = []
        for gigabits in grid.server_gigabits:
            for mode in ("auto", "topk"):
                cluster = base(density, 1, down_mode=mode, **networks(gigabits, 10_000))
                name = f"servers {gigabits} Gbit/s, replies {mode}"
                rows.append(
                    (name, sweeps.saturation(sweeper, cluster, grid.saturating_shards, grid.saturating_workers))
                )
        section.tables.append(tables.saturations(f"Density {density:.1%}", rows, max(grid.saturating_workers)))
    section.notes += [
        f"Saturated: used {sweeps.BUSY:.0%} of the time. Efficient: speedup over workers of {sweeps.EFFICIENT:.0%}.",
    ]
    return section


def _table(title: str, series: charts.Series, server_bytes: float) -> Table:
    shown = [(name, found) for name, along in series for found in along if found.cluster.workers in _SHOWN]
    return tables.points(title, shown, server_bytes)


def _networks(sweeper: Sweeper, grid: Grid) -> list[tuple[str, str, charts.Series]]:
    servers = [
        (f"{gigabits} Gbit/s", sweeper.along(base(**networks(gigabits, 10_000)), grid.workers))
        for gigabits in grid.server_gigabits
    ]
    workers = [
        (f"{megabits} Mbit/s", sweeper.along(base(**networks(25, megabits)), grid.workers))
        for megabits in grid.worker_megabits
    ]
    return [
        ("Speedup by the servers' cards, workers at 10 Gbit/s", "server-cards", servers),
        ("Speedup by the workers' cards, servers at 25 Gbit/s", "worker-cards", workers),
    ]


def _others(sweeper: Sweeper, grid: Grid) -> list[tuple[str, str, charts.Series]]:
    computes = [(f"{seconds:g} s", sweeper.along(base(compute=seconds), grid.workers)) for seconds in grid.computes]
    modes = [
        ("auto", sweeper.along(base(), grid.workers)),
        ("exact", sweeper.along(base(down_mode="exact"), grid.workers)),
        ("top-k", sweeper.along(base(down_mode="topk"), grid.workers)),
        ("auto, overlap", sweeper.along(base(overlap=True), grid.workers)),
        ("auto, journal", sweeper.along(base(journal=True), grid.workers)),
        (
            "auto, default limits",
            [sweeper.at(as_shipped(found.cluster)) for found in sweeper.along(base(), grid.workers)],
        ),
    ]
    return [
        ("Speedup by compute time of a step, 16 shards", "compute", computes),
        ("Speedup by way of answering, overlap, journal and limits, 16 shards", "modes", modes),
    ]


def _each(sweeper: Sweeper, grid: Grid) -> list[tuple[str, Found, Found]]:
    compared = []
    for workers, shards, noise in grid.each_shard:
        cluster = with_workers(replace(base(shards=shards), noise=noise), workers)
        each = sweeper.at(replace(cluster, each_shard=True))
        name = f"{workers} workers, {shards} shards, works vary by ±{noise:.0%}"
        compared.append((name, sweeper.at(cluster), each))
    return compared
