"""The model against real runs on a scaled-down network."""

from collections.abc import Sequence

from benchmarks.harness.children import ChildFailedError
from benchmarks.harness.section import Plan, Section, Table
from benchmarks.network import costs
from benchmarks.network.costs import Curve, Measured
from benchmarks.network.figures import rate_name
from benchmarks.network.grid import JITTER
from benchmarks.network.lab import Lab, LabError, unavailable
from benchmarks.network.model import Network, simulate
from benchmarks.network.real import Point, layout_of, step_seconds
from psclient.errors import SparsepsError

_SIZE = 1_168_000  # a tenth of ResNet-18's
_WORST_CALIBRATION = 0.15
_POINT_SECONDS = 40.0
_DENSE, _EXACT, _TOPK = Curve("fp32", "dense"), Curve("fp16", "exact"), Curve("fp16", "topk")
_PLAIN, _OVERLAPPED = Curve("int8", "topk"), Curve("int8", "topk", overlap=True)

EXPERIMENTS = {
    # A tenth of the model on a tenth of the rate: what 11.7 M parameters are on 100 Mbit/s.
    10e6: [Point(curve, workers, 0.330, 8) for curve in (_EXACT, _TOPK) for workers in (1, 2, 4)],
    # A tenth of the time too, as dense steps are long: everything ten times as fast, the same experiment.
    100e6: [
        *(Point(_DENSE, workers, 0.033, 8) for workers in (1, 2, 4)),
        # 11.7 M parameters on 1 Gbit/s with 100 ms of compute: how much overlap hides.
        *(Point(curve, workers, 0.100, 30) for workers in (1, 2) for curve in (_PLAIN, _OVERLAPPED)),
    ],
}
"""By bits a second of every link."""


def check(plan: Plan, section: Section) -> None:
    """Add a table of measured and predicted steps to a section, or say why there is none."""
    reason = "the quick benchmark leaves it out" if plan.quick else unavailable()
    if reason:
        section.notes.append(f"No real run checks the model here: {reason}.")
        return
    layout = layout_of(_SIZE)
    plan.say("costs of the small model")
    measured = costs.measure(layout, plan.density, plan.seed, quick=False)
    rows: list[tuple[str, ...]] = []
    for rate, points in EXPERIMENTS.items():
        try:
            with Lab(1 + max(point.workers for point in points), rate) as lab:
                found = min(lab.calibrate(1, 0, 1.5), lab.calibrate(0, 1, 1.5))
                section.figures[f"calibration of {rate_name(rate)}"] = found
                if abs(found / rate - 1) > _WORST_CALIBRATION:
                    rows.append((f"{rate_name(rate)}: not measurable here, TCP got {rate_name(found)}", *[""] * 6))
                    continue
                rows += _measure(plan, section, lab, rate, found, points, measured)
        except LabError as error:
            section.notes.append(f"No network of {rate_name(rate)} could be made here: {error}.")
    heads = ("real run", "links", "TCP got", "workers", "step, s", "model says", "model / real")
    title = f"The model against real processes: {_SIZE:,} parameters, no delay, compute asleep"
    section.tables.append(Table(title, heads, rows))
    section.notes.append(
        "Real runs: a psservice process and real workers in network namespaces, each card shaped by tc (tbf) both ways "
        "and calibrated with plain TCP in the same run, without added delay; the compute time is slept. The small "
        "model's costs are measured by themselves; all hosts share this machine's cores, which the model does not know."
    )


def _measure(
    plan: Plan, section: Section, lab: Lab, rate: float, found: float, points: Sequence[Point], measured: Measured
) -> list[tuple[str, ...]]:
    rows = []
    for point in points:
        row = (point.curve.name, rate_name(rate), rate_name(round(found, -5)), str(point.workers))
        if not plan.has_time(_POINT_SECONDS):
            rows.append((*row, "no time left", "", ""))
            continue
        plan.say(f"real: {point.curve.name}, {point.workers} workers, {rate_name(rate)}")
        try:
            real = step_seconds(lab, point, measured.layout, measured.density, plan.seed)
        except (ChildFailedError, SparsepsError) as error:
            rows.append((*row, "failed", "", ""))
            section.notes.append(f"{point.curve.name}, {point.workers} workers failed: {error}")
            continue
        predicted = simulate(
            measured.costs(point.curve),
            Network(found / 8),
            point.workers,
            point.compute,
            overlap=point.curve.overlap,
            jitter=JITTER,
        ).step_seconds
        rows.append((*row, f"{real:.3f}", f"{predicted:.3f}", f"{predicted / real:.2f}"))
        section.figures[f"real: {point.curve.name}, {point.workers} workers, {rate_name(rate)}"] = {
            "step_seconds": real,
            "predicted_seconds": predicted,
            "tcp_bits_per_second": found,
        }
    return rows
