"""Section *short_way*: the overhead of steps and servers before and after, each beside its anchor in the same run."""

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import psutil

from benchmarks.harness.section import Plan, Section, Table
from benchmarks.short_way import rows
from benchmarks.short_way.checkout import Checkout, ProbeError
from benchmarks.short_way.rows import Found, Row

KEY, TITLE = "short_way", "The short way: overhead of a step and of a server"

_PROBE_SECONDS = 400.0
_BULK_COPIES = 8
"""Models that must fit into the free memory for an upload: the worker's, the server's peak, the download."""


@dataclass(slots=True)
class Measurement:
    """One program, run with this checkout and with the base in turn.

    Attributes:
        rows: what its figures are for.
        probe: module of ``benchmarks.short_way.probes``.
        arguments: of the program.
        anchor: arguments of a run of the same program that the figures are compared with; ``None`` for figures of the
            run itself. ``echo_bytes`` is filled in with the size of a reply.
        rounds: how often.
    """

    rows: Sequence[Row]
    probe: str
    arguments: dict[str, Any]
    anchor: dict[str, Any] | None = None
    rounds: int = 1
    before: list[dict[str, float]] = field(default_factory=list)
    after: list[dict[str, float]] = field(default_factory=list)
    anchors: list[dict[str, float]] = field(default_factory=list)


def run(plan: Plan) -> Section:
    """Run every probe with the base and with this checkout in turn; a probe that fails is a note."""
    section = Section(KEY, TITLE)
    measurements = measure_quick() if plan.quick else measure_full()
    with ExitStack() as stack:
        here = stack.enter_context(Checkout())
        base = stack.enter_context(Checkout(plan.base)) if plan.base else None
        for checkout in filter(None, (here, base)):
            plan.say("compiling loops")
            checkout.warm_up(_PROBE_SECONDS)
        for turn in range(max(each.rounds for each in measurements)):  # every row once before any is repeated
            for number, each in enumerate(measurements, start=1):
                if turn < each.rounds and plan.has_time():
                    plan.say(f"{number} of {len(measurements)}, {each.rows[0].text}, round {turn + 1}")
                    try:
                        _turn(each, here, base)
                    except ProbeError as error:
                        section.notes.append(f"{each.rows[0].text} failed: {error}")
    left_out = [each.rows[0].text for each in measurements if not each.after]
    lines = [(row.text, *found(row, each).cells(row)) for each in measurements for row in each.rows]
    heads = ("what", "before", "after", "anchor", "after/before", "to reach", "reached")
    section.tables.append(Table("Before, after and anchor of one run; in brackets: known of 7cc8f91", heads, lines))
    section.figures = {
        f"{each.probe} {each.arguments}": {"before": each.before, "after": each.after, "anchor": each.anchors}
        for each in measurements
    }
    section.notes += [
        f"Base: {plan.base or 'none (--base DIR)'}. Medians of the rounds; base, this checkout and anchor in turn.",
        "Copy: a copy of the model on one thread into memory that has been touched; the anchor's column has its "
        "milliseconds. A clone into new memory costs up to three times as much. Replies and 4-bit pushes are CPU time.",
        "The anchor of the calls is an echo of the same bytes over streams of grpc.aio that stay open. Generators are "
        "the same for all, have a connection a worker, and share the machine's cores with the server.",
        f"Uploaded: {next(e.arguments['size'] for e in measurements if e.probe == 'bulk'):,} parameters.",
    ]
    if left_out:
        section.notes.append("Not measured, as they failed or the section's time was over: " + "; ".join(left_out))
    return section


def _turn(each: Measurement, here: Checkout, base: Checkout | None) -> None:
    """Run a probe with this checkout, its anchor, and the base."""
    each.after.append(here.probe(each.probe, each.arguments, _PROBE_SECONDS))
    if each.anchor is not None:
        anchor = each.arguments | each.anchor
        if "echo_bytes" in anchor:
            anchor["echo_bytes"] = each.after[-1]["reply_bytes"]
        each.anchors.append(here.probe(each.probe, anchor, _PROBE_SECONDS))
    if base is not None:
        each.before.append(base.probe(each.probe, each.arguments, _PROBE_SECONDS))


def found(row: Row, each: Measurement) -> Found:
    """Return the medians of a row."""
    anchor = _median(row.anchor, each.anchors or each.after)
    return Found(_median(row.figure, each.before), _median(row.figure, each.after), anchor)


def _median(figure: str, runs: Sequence[dict[str, float]]) -> float | None:
    values = [found[figure] for found in runs if figure in found]
    return statistics.median(values) if values else None


def measure_quick() -> list[Measurement]:
    """Return what is measured with ``--quick``."""
    return _measurements("resnet18", rounds=1, seconds=1.0, steps=(8, 12), workers=100, upload=20_000_000, of_gloo=30)


def measure_full() -> list[Measurement]:
    """Return what is measured in full; the upload is smaller where memory is short."""
    upload = min(600_000_000, psutil.virtual_memory().available // (4 * _BULK_COPIES))
    return _measurements("resnet50", rounds=2, seconds=3.0, steps=(10, 15), workers=1000, upload=upload, of_gloo=100)


def _measurements(
    layout: str, *, rounds: int, seconds: float, steps: tuple[int, int], workers: int, upload: int, of_gloo: int
) -> list[Measurement]:
    calls = {"size": 100_000, "seconds": seconds}
    counted, warmup = steps
    stepping = {"layout": layout, "steps": counted, "warmup": warmup}
    echo = {"echo_bytes": 0}
    job = {"steps": of_gloo}
    quantised = {"density": 0.09, "value_type": "int4", "one_thread": True}
    connected = {"size": 8000, "workers": workers, "seconds": seconds, "limit": 2}
    small = {"layout": "small", "steps": 20, "warmup": 20, "one_thread": True}
    return [
        Measurement(rows.SERVER_CPU, "calls", {**calls, "workers": 1}, echo, rounds),
        Measurement(rows.RATE, "calls", {**calls, "workers": 8}, echo, rounds),
        Measurement(rows.REPLIES, "replies", {"layout": layout, "rounds": 3}),
        Measurement(rows.STEP, "steps", stepping, None, rounds),
        Measurement(rows.SMALL_STEP, "steps", small, None, rounds),
        Measurement(rows.TENSORS, "training", {**job, "gradients_given": True}),
        Measurement(rows.NETWORK, "training", {**job, "gradients_given": False}),
        Measurement(rows.CROWD, "calls", {**calls, "size": 8000, "workers": 180}),
        Measurement(rows.MANY_STEP, "steps", {"layout": "many", "steps": counted // 2, "warmup": warmup // 3}),
        Measurement(rows.INT4_STEP, "steps", stepping | quantised),
        Measurement(rows.BULK, "bulk", {"size": upload}),
        Measurement(rows.CONNECTED, "calls", connected),
    ]
