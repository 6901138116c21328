"""What one step did: versions, staleness, bytes and where the time went."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

from psclient.errors import ConfigurationError
from pscore.telemetry import tracing
from pscore.units import human_bytes

PHASES = ("select", "encode", "send", "wait", "apply", "buffers")


@dataclass
class StepReport:
    """One ``step()``.

    Attributes:
        step: the worker's step.
        version: the coordinator's version afterwards.
        staleness: pushes of others between the replica and this push, on the worst shard; with overlap, known when
            the next step ends.
        push_bytes: message bytes sent in the push.
        pull_bytes: message bytes received in the pull.
        buffer_bytes: message bytes of an exchange of buffers, both ways.
        push_entries: entries sent.
        pull_entries: entries received.
        reply_mode: ``exact`` or ``topk``: the coordinator's.
        changed_density: what changed on the coordinator since the last pull, over its elements.
        refused: parts of the push that went back into the residual, as one that is too stale; with overlap, known when
            the next step ends.
        wanted_entries: entries that the density asks for, over the tensors that are selected from.
        selected_entries: entries that were selected from them.
        round_trip_seconds: from the commit of the push that the reply answers until that reply was whole; with
            overlap, most of it passes while the model computes, and ``wait`` is the rest.
        seconds: time by phase (:data:`PHASES`): select (accumulate, select, cut out), encode, send (hand to the
            transport), wait (for acknowledgement and reply), apply (decode and write the reply), buffers.
    """

    step: int
    version: int = 0
    staleness: int = 0
    push_bytes: int = 0
    pull_bytes: int = 0
    buffer_bytes: int = 0
    push_entries: int = 0
    pull_entries: int = 0
    reply_mode: str = ""
    changed_density: float = 0.0
    refused: int = 0
    wanted_entries: int = 0
    selected_entries: int = 0
    round_trip_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {1000 * seconds:.1f}" for name, seconds in self.seconds.items() if seconds)
        return (
            f"step {self.step}, version {self.version}, staleness {self.staleness}: "
            f"pushed {human_bytes(self.push_bytes)}, pulled {human_bytes(self.pull_bytes)} ({self.reply_mode or '–'}), "
            f"{f'{self.refused} refused, ' if self.refused else ''}"
            f"{1000 * sum(self.seconds.values()):.1f} ms{f' ({phases})' if phases else ''}"
        )

    def as_dict(self) -> dict[str, int | float | str]:
        """Return all fields as plain values, for a logger; ``seconds`` as ``select_seconds`` and so on."""
        plain = asdict(self)
        phases = plain.pop("seconds")
        return plain | {f"{name}_seconds": seconds for name, seconds in phases.items()}

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """See :mod:`psclient.engine.engine`: add the time of the body to a phase."""
        started = time.perf_counter()
        try:
            with nullcontext() if tracing.spans is None else tracing.span(phase):
                yield
        finally:
            self.seconds[phase] += time.perf_counter() - started

    def move(self, seconds: float, source: str, target: str) -> None:
        """See :mod:`psclient.engine.engine`: attribute some of one phase's time to another."""
        moved = min(seconds, self.seconds[source])
        self.seconds[source] -= moved
        self.seconds[target] += moved


@dataclass
class Totals:
    """Sums over all steps of an optimizer, the first download included.

    Attributes:
        push_bytes: message bytes sent in pushes.
        pull_bytes: message bytes received in pulls.
        buffer_bytes: message bytes of exchanges of buffers, both ways.
        push_entries: entries sent.
        pull_entries: entries received.
        samples: that the pushed gradients came from.
        upload_bytes: message bytes of whole models that this worker has uploaded; not part of ``push_bytes``.
        refused: parts of pushes that went back into the residual.
    """

    push_bytes: int = 0
    pull_bytes: int = 0
    buffer_bytes: int = 0
    push_entries: int = 0
    pull_entries: int = 0
    samples: int = 0
    upload_bytes: int = 0
    refused: int = 0

    def __str__(self) -> str:
        return (
            f"{self.samples:,} samples: pushed {human_bytes(self.push_bytes)}, pulled {human_bytes(self.pull_bytes)}, "
            f"buffers {human_bytes(self.buffer_bytes)}, uploaded {human_bytes(self.upload_bytes)}, "
            f"{self.refused:,} refused"
        )

    def as_dict(self) -> dict[str, int]:
        """Return all fields, for a logger."""
        return asdict(self)

    def add(self, report: StepReport) -> None:
        """See :mod:`psclient.engine.engine`: add one step."""
        for name in ("push_bytes", "pull_bytes", "buffer_bytes", "push_entries", "pull_entries"):
            setattr(self, name, getattr(self, name) + getattr(report, name))


def scalars(optimizer: Any) -> dict[str, float]:
    """Return the last step's report and the totals as flat numbers, for any logger.

    The names are ``psclient/push_bytes`` and so on for :class:`StepReport`, but for its ``reply_mode``, and
    ``psclient/total_push_bytes`` and so on for :class:`Totals`.

    Args:
        optimizer: one of this library's, or what ``accelerate``, Hugging Face's ``Trainer`` or Lightning has put around
            it.

    Raises:
        ConfigurationError: it trains without a server, so that there is nothing to report.
    """
    inner = optimizer
    while not hasattr(inner, "totals"):
        inner = getattr(inner, "optimizer", None)
        if inner is None:
            raise ConfigurationError(
                f"scalars() takes an optimizer that trains through a server, not {type(optimizer).__name__}: pass one "
                "of psclient's, or leave the call out"
            )
    step = {f"psclient/{name}": value for name, value in inner.report.as_dict().items() if not isinstance(value, str)}
    totals = {f"psclient/total_{name}": value for name, value in inner.totals.as_dict().items()}
    return {name: float(value) for name, value in (step | totals).items()}
