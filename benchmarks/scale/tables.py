"""The tables of the report."""

from collections.abc import Mapping, Sequence

from benchmarks.harness.section import Table
from benchmarks.scale.check import TARGET, Row
from benchmarks.scale.costs import Costs
from benchmarks.scale.engine import Points
from benchmarks.scale.sweeps import EFFICIENT, Found, Saturation, memory

UNITS: Mapping[str, tuple[str, str]] = {
    "decode": ("server: parse, decode, check and merge a push", "entry"),
    "apply": ("server: apply it (apply thread)", "entry"),
    "journal": ("server: append it to the journal (apply thread)", "entry"),
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


def costs(found: Costs, points: Points) -> Table:
    """Show every line and how well it fits."""
    rows = []
    for name, (what, unit) in UNITS.items():
        fitted = getattr(found, name)
        off = found.notes.get(name)
        rows.append(
            (
                what,
                f"{fitted.fixed * 1e6:.0f}",
                f"{fitted.each * 1e9:.3g}",
                unit,
                str(len(points.get(name, ()))),
                "" if off is None else f"{off:.0%}",
            )
        )
    heads = ("work, seconds of one core", "fixed, µs", "each, ns", "for each", "points", "worst distance")
    return Table("What was measured: a fixed part and one that grows", heads, rows)


def validation(rows: Sequence[Row]) -> Table:
    """Show real and simulated runs side by side; what misses the target has a mark."""
    heads = (
        "case",
        "clients",
        "steps/s real",
        "simulated",
        "off",
        "staleness real",
        "simulated",
        "off",
        "kB a step real",
        "simulated",
        "off",
        "ms real",
        "simulated",
    )
    shown = []
    for row in rows:
        real, found, errors = row.real, row.simulated, row.errors()
        shown.append(
            (
                row.case.name,
                str(row.workers),
                f"{real.steps_per_second:.1f}",
                f"{found.steps_per_second:.1f}",
                _error(errors["throughput"]),
                f"{real.staleness:.2f}",
                f"{found.staleness:.2f}",
                _error(errors["staleness"]),
                f"{(real.sent + real.received) / 1e3:.1f}",
                f"{(found.sent + found.received) / 1e3:.1f}",
                _error(errors["bytes"]),
                f"{(real.push_seconds + real.pull_seconds) * 1e3:.1f}",
                f"{(found.push_seconds + found.pull_seconds) * 1e3:.1f}",
            )
        )
    return Table(
        f"Real runs on this machine and the simulation of the same; † is off by more than {TARGET:.0%}", heads, shown
    )


def summary(rows: Sequence[Row]) -> Table:
    """Count what is within the target."""
    shown = []
    for name in ("throughput", "staleness", "bytes"):
        errors = sorted(abs(row.errors()[name]) for row in rows)
        within = sum(error <= TARGET for error in errors)
        shown.append((name, f"{within} of {len(errors)}", f"{errors[len(errors) // 2]:.0%}", f"{errors[-1]:.0%}"))
    return Table("Relative errors of the simulation", ("figure", f"within {TARGET:.0%}", "median", "largest"), shown)


def points(title: str, found: Sequence[tuple[str, Found]], server_bytes: float) -> Table:
    heads = (
        "",
        "workers",
        "pushes/s",
        "efficiency",
        "staleness (90 %)",
        "server Gbit/s in",
        "out",
        "worker Gbit/s up",
        "down",
        "cores",
        "interpreter",
        "apply thread",
        "top-k",
        "GB a shard",
    )
    rows = []
    for name, point in found:
        outcome = point.outcome
        rows.append(
            (
                name,
                str(point.cluster.workers),
                f"{outcome.steps_per_second:.3g}",
                f"{point.efficiency:.0%}",
                f"{outcome.staleness:.3g} ({outcome.staleness_90:.3g})",
                *(f"{bits / 1e9:.2g}" for bits in point.server_bits),
                *(f"{bits / 1e9:.2g}" for bits in point.worker_bits),
                *(f"{outcome.used[name]:.0%}" for name in ("cores", "interpreter", "apply thread")),
                f"{outcome.topk:.0%}",
                f"{memory(point.cluster, outcome, server_bytes) / 1e9:.3g}",
            )
        )
    return Table(title, heads, rows)


def saturations(title: str, found: Sequence[tuple[str, Saturation]], most: int) -> Table:
    """Show what saturates first, and the shards that move it away."""
    rows = []
    for name, point in found:
        busiest, used = point.at_thousand
        rows.append(
            (
                name,
                str(point.cluster.shards),
                f"{point.resource} at {point.workers}" if point.workers else "nothing",
                str(point.most),
                str(point.shards) if point.shards else "more than 64",
                f"{busiest} {used:.0%}",
            )
        )
    heads = (
        "",
        "shards",
        "saturates first, at workers",
        f"efficient ({EFFICIENT:.0%}) up to",
        f"shards that keep {most:,} efficient",
        "busiest there",
    )
    return Table(title, heads, rows)


def against_each(found: Sequence[tuple[str, Found, Found]]) -> Table:
    """Show one shard that stands for all beside all of them."""
    rows = []
    for name, one, each in found:
        rows.append(
            (
                name,
                f"{one.outcome.steps_per_second:.4g}",
                f"{each.outcome.steps_per_second:.4g}",
                _error(one.outcome.steps_per_second / each.outcome.steps_per_second - 1),
                f"{one.outcome.staleness:.4g}",
                f"{each.outcome.staleness:.4g}",
                _error(one.outcome.staleness / each.outcome.staleness - 1),
            )
        )
    heads = ("cluster", "pushes/s, one for all", "each", "off", "staleness, one for all", "each", "off")
    return Table("One shard that stands for all, and every shard simulated", heads, rows)


def _error(value: float) -> str:
    return f"{value:+.0%}" + (" †" if abs(value) > TARGET else "")
