"""Tables and plots of the grid."""

from collections.abc import Sequence

from benchmarks.harness import plots
from benchmarks.harness.section import Plot, Table
from benchmarks.network.costs import Curve, Measured
from benchmarks.network.grid import COMPUTE, Spot, hidden
from benchmarks.network.published import PUBLISHED, PUBLISHED_WORKERS

_KIND = {True: "CPU and bytes", False: "bytes alone"}


def rate_name(rate: float) -> str:
    return f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"


def speedup_table(found: dict[Spot, float], rate: float, curves: Sequence[Curve], workers: Sequence[int]) -> Table:
    """One rate without delay: every curve, both kinds, and what was published."""

    def row(curve: Curve, full: bool) -> tuple[str, ...]:
        values = (found[Spot(curve, rate, 0.0, count, full)] for count in workers)
        return (f"model: {curve.name}", _KIND[full], *(f"{value:.2f}" for value in values))

    rows = [row(curve, full) for full in (True, False) for curve in curves]
    for method, values in PUBLISHED.get(rate, {}).items():
        by_workers = dict(zip(PUBLISHED_WORKERS, values, strict=True))
        rows.append((f"published: {method}", "GPU workers", *(f"{by_workers[count]:.2f}" for count in workers)))
    heads = ("curve", "costs", *_counts(workers))
    return Table(f"Speedup at {rate_name(rate)}, no delay, {COMPUTE * 1e3:.0f} ms of compute a step", heads, rows)


def speedup_plot(
    found: dict[Spot, float], rate: float, curves: Sequence[Curve], workers: Sequence[int], *, full: bool
) -> Plot:
    """One rate without delay, one kind."""
    drawn = [
        plots.Line(
            curve.name,
            [(count, found[Spot(curve, rate, 0.0, count, full)]) for count in workers],
            dashed=not curve.overlap,
        )
        for curve in curves
    ]
    for method, values in PUBLISHED.get(rate, {}).items():
        points = list(zip(PUBLISHED_WORKERS, values, strict=True))
        drawn.append(plots.Line(f"published: {method}", points, dashed=True))
    caption = f"Model in virtual time, {_KIND[full]}; {COMPUTE * 1e3:.0f} ms of compute a step; 1 is one machine alone."
    title = f"Speedup at {rate_name(rate)}, {_KIND[full]}"
    return plots.lines(title, caption, ("workers", "speedup"), drawn, log_x=True)


def delay_table(
    found: dict[Spot, float], rates: Sequence[float], delays: Sequence[float], curves: Sequence[Curve], workers: int
) -> Table:
    """What delay does to the largest fleet."""
    rows = [
        (
            f"model: {curve.name}",
            rate_name(rate),
            _KIND[full],
            *(f"{found[Spot(curve, rate, delay, workers, full)]:.2f}" for delay in delays),
        )
        for full in (True, False)
        for rate in rates
        for curve in curves
    ]
    heads = ("curve", "links", "costs", *(f"{delay * 1e3:.0f} ms" for delay in delays))
    return Table(f"Speedup of {workers} workers by delay, one way", heads, rows)


def hiding_table(measured: Measured, curves: Sequence[Curve], workers: Sequence[int]) -> tuple[Table, dict[str, float]]:
    """How much of the communication overlap hides."""
    rows, figures = [], {}
    for full in (True, False):
        for curve in curves:
            if not curve.overlap:
                continue
            costs = (measured.costs if full else measured.bytes_alone)(curve)
            shares = {count: hidden(costs, count) for count in workers}
            rows.append((f"model: {curve.name}", _KIND[full], *(f"{share:.0%}" for share in shares.values())))
            figures |= {f"{curve.name}, {count} workers, {_KIND[full]}": share for count, share in shares.items()}
    title = "Share of communication that overlap hides, 1 Gbit/s, 100 ms of compute a step"
    return Table(title, ("curve", "costs", *_counts(workers)), rows), figures


def costs_table(measured: Measured, curves: Sequence[Curve]) -> Table:
    rows = []
    for curve in curves:
        if curve.overlap:
            continue
        costs = measured.costs(curve)
        reply = costs.reply(1)
        times = (costs.select, costs.encode, costs.decode, costs.apply, reply.build, reply.encode, reply.install)
        rows.append(
            (
                curve.name,
                f"{costs.push_size / 1e6:.3g}",
                f"{reply.size / 1e6:.3g}",
                f"{costs.reply(16).size / 1e6:.3g}",
                *(f"{seconds * 1e3:.3g}" for seconds in times),
            )
        )
    heads = ("curve", "push MB", "reply MB", "after 16", "select", "encode", "decode", "apply")
    return Table(
        "What the model takes, measured in this run: megabytes, then milliseconds",
        (*heads, "build", "encode", "install"),
        rows,
    )


def _counts(workers: Sequence[int]) -> list[str]:
    return [f"{count} workers" if count > 1 else "1 worker" for count in workers]
