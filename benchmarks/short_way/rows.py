"""The rows: what is measured, what it was at commit 7cc8f91, what is to be reached."""

from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class Target:
    """What is to be reached.

    Attributes:
        bound: from which side.
        value: in the row's unit, or in multiples of ``of``.
        of: what ``value`` is a multiple of.
    """

    bound: Literal["≤", "≥"]
    value: float
    of: Literal["", "anchor", "before"] = ""

    def text(self) -> str:
        """Write it."""
        return f"{self.bound} {self.value:g}" + (f" × {self.of}" if self.of else "")

    def reached(self, after: float, before: float | None, anchor: float | None) -> bool | None:
        """Tell whether ``after`` reaches it; ``None`` where what it is a multiple of is not known."""
        unit = {"": 1.0, "anchor": anchor, "before": before}[self.of]
        if unit is None:
            return None
        return after <= self.value * unit if self.bound == "≤" else after >= self.value * unit


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of a probe.

    Attributes:
        text: what it is, with its unit.
        figure: its name among the figures of the probe.
        target: what is to be reached.
        known: what it was at 7cc8f91, for a base that the probe cannot measure.
        anchor: figure of the probe, or of the anchor's own run, to compare with.
    """

    text: str
    figure: str
    target: Target
    known: float | None = None
    anchor: str = ""


class Found(NamedTuple):
    """Medians of a row; ``None`` where there is none."""

    before: float | None
    after: float | None
    anchor: float | None

    def cells(self, row: Row) -> tuple[str, ...]:
        """Write before, after, anchor, after over before, target and whether it is reached."""
        known = self.before is None and row.known is not None
        before = row.known if known else self.before
        reached = None if self.after is None else row.target.reached(self.after, before, self.anchor)
        gain = number(self.after / before) if before and self.after is not None and not known else ""
        return (
            f"({number(before)})" if known else number(before),
            number(self.after),
            number(self.anchor),
            f"×{gain}" if gain else "",
            row.target.text(),
            "" if reached is None else "yes" if reached else "no",
        )


def number(value: float | None) -> str:
    """Write three digits; nothing for ``None``."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def at_most(value: float, of: Literal["", "anchor", "before"] = "") -> Target:
    """Return a target from above."""
    return Target("≤", value, of)


def at_least(value: float, of: Literal["", "anchor", "before"] = "") -> Target:
    """Return a target from below."""
    return Target("≥", value, of)


SERVER_CPU = (Row("server CPU of a push and an exact pull, ms", "cpu_ms", at_most(3, "anchor"), 2.8, "cpu_ms"),)
RATE = (Row("8 workers: pushes with pulls a second", "rate", at_least(5, "before"), 350, "rate"),)
CROWD = (Row("180 workers, 8 k parameters: server CPU of a push and a pull, ms", "cpu_ms", at_most(1), 7.8),)
CONNECTED = (
    Row("idle workers: threads that more of them add", "threads_more", at_most(0)),
    Row("idle workers: KiB that each further one adds", "kib_a_worker", at_most(64)),
)
REPLIES = (
    Row("exact reply after 16 pushes of 1 %: build, copies", "exact_build", at_most(2), 10.5, "copy_ms"),
    Row("exact reply after 16 pushes of 1 %: encode, copies", "exact_encode", at_most(1.5), 5.7, "copy_ms"),
    Row("top-k reply after 16 pushes: select, copies", "topk_16", at_most(2.5), 7, "copy_ms"),
    Row("top-k reply after 1, 16, 4 … pushes: select, copies", "topk_varied", at_most(2.5), None, "copy_ms"),
    Row("9 % in 4 bits: decode and apply a push, copies", "int4_apply", at_most(3), None, "copy_ms"),
    Row("9 % in 4 bits: select and encode a top-k reply, copies", "int4_topk", at_most(5), None, "copy_ms"),
)
INT4_STEP = (
    Row("9 % in 4 bits: the worker's select and encode, copies", "select_encode_copies", at_most(6), None, "copy_ms"),
)
STEP = (
    Row("step(), ResNet-50, settled, no overlap: wall, copies", "wall_copies", at_most(7), 20, "copy_ms"),
    Row("  the same: CPU of worker and server, copies", "cpu_copies", at_most(7), None, "copy_ms"),
)
SMALL_STEP = (Row("step(), 62 tensors, 177 k elements: CPU of its thread, ms", "thread_cpu_ms", at_most(2), 13),)
MANY_STEP = (Row("step(), 5,000 tensors of 512 elements: wall, ms", "wall_ms", at_most(20), 1850),)
NETWORK = (
    Row("DGS 1 %, the bench's model: steps a second over gloo's", "dgs_rate", at_least(1.5), 0.68, "gloo_rate"),
    Row("ASGD, the bench's model: steps a second over gloo's", "asgd_rate", at_least(0.5), 0.21, "gloo_rate"),
    Row("  its server's CPU over gloo's", "asgd_cpu", at_most(2), 6.1, "gloo_cpu_ms"),
)
TENSORS = (
    Row("DGS 1 %, 38 tensors, gradients given: steps over gloo's", "dgs_rate", at_least(1.5), 0.35, "gloo_rate"),
    Row("ASGD, 38 tensors, gradients given: steps over gloo's", "asgd_rate", at_least(0.5), 0.11, "gloo_rate"),
    Row("  its server's CPU over gloo's", "asgd_cpu", at_most(2), None, "gloo_cpu_ms"),
)
BULK = (
    Row("first upload, MB/s", "upload", at_least(1000), 65, "copy"),
    Row("download, MB/s", "download", at_least(1000), 65, "copy"),
    Row("  the server's peak memory, models", "peak", at_most(2.1), 4.1),
)
