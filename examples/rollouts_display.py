"""The display of rollouts.py: the run as it goes, the table at its end, and the plot."""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rollouts_policy import CHANCE
from rollouts_process import Batch

_LINE_SECONDS = 3.0
MEAN_OF = 20
"""Steps, of rewards that are shown and checked: a single batch's scatters."""


class Step(NamedTuple):
    """A step of the trainer.

    Attributes:
        version: that it has published.
        reward: mean of the batch that it has learned from.
        lag: how many versions older the policy was that made the batch.
        nbytes: that the publisher has sent.
    """

    version: int
    reward: float
    lag: int
    nbytes: int


class Event(NamedTuple):
    """An event of a rollout process (``killed``, ``started``, ``joined``), and the newest version then."""

    name: str
    what: str
    version: int


@dataclass
class Reader:
    """The known state of a rollout process.

    Attributes:
        state: ``starting``, ``following`` or ``killed``.
        first: its first batch.
        last: its last batch.
        lags: of its batches, in versions, when the trainer has taken them.
        fetched: bytes a version that it has received, and the version of the batch that it then made.
    """

    state: str = "starting"
    first: Batch | None = None
    last: Batch | None = None
    lags: list[int] = field(default_factory=list)
    fetched: list[tuple[int, float]] = field(default_factory=list)

    def take(self, batch: Batch, lag: int) -> None:
        """Take a batch in."""
        before, self.first, self.last = self.last, self.first or batch, batch
        self.state = "following" if before is None else self.state
        self.lags.append(lag)
        if before is not None and batch.cuts > before.cuts:
            received = (batch.fetched_bytes - before.fetched_bytes) / (batch.cuts - before.cuts)
            self.fetched.append((batch.episodes.version, received))

    @property
    def bytes_per_version(self) -> float | None:
        """Mean over the versions after the first batch, for which the whole policy came; ``None`` if there are none."""
        return fmean(received for _, received in self.fetched) if self.fetched else None


@dataclass
class History:
    """The run so far.

    Attributes:
        dense_bytes: of a copy of the policy in bfloat16.
        steps: of the trainer.
        dropped: batches that were made by too old a policy.
        events: in their order.
        readers: the rollout processes, by name.
    """

    dense_bytes: int
    steps: list[Step] = field(default_factory=list)
    dropped: int = 0
    events: list[Event] = field(default_factory=list)
    readers: dict[str, Reader] = field(default_factory=dict)

    def reward(self, last: int | None = None) -> float:
        """Return the mean reward of the steps up to one of them; by default up to now."""
        return fmean(step.reward for step in self.steps[:last][-MEAN_OF:]) if self.steps else 0.0


class Display:
    """The run: a table that is kept up to date or, without a terminal, a line now and then and one for each event."""

    def __init__(self, history: History, steps: int, console: Console) -> None:
        self.history, self._steps = history, steps
        self._live = Live(get_renderable=self._table, console=console, refresh_per_second=8)
        self._is_live = sys.stdout.isatty()
        self._next_line, self._events_said = 0.0, 0

    def __enter__(self) -> "Display":
        if self._is_live:
            self._live.start()
        else:
            print("starting the server and the rollout processes", flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_live:
            self._live.stop()

    def update(self) -> None:
        """Print the news, if there is no terminal."""
        if self._is_live:
            return
        events = self.history.events[self._events_said :]
        self._events_said += len(events)
        for event in events:
            print(f"  {event.name} {event.what} at version {event.version}", flush=True)
        if self.history.steps and time.monotonic() > self._next_line:
            self._next_line = time.monotonic() + _LINE_SECONDS
            print(self._caption(), flush=True)

    def _caption(self) -> str:
        history = self.history
        if not history.steps:
            return "starting the server and the rollout processes"
        last = history.steps[-1]
        return (
            f"step {len(history.steps)} (at least {self._steps}): reward {history.reward():.2f} (chance: {CHANCE}), "
            f"version {last.version} published with {decimal(last.nbytes)} (dense: {decimal(history.dense_bytes)})"
        )

    def _table(self) -> Table:
        table = _table("process", "", "batches", "version", "lag", "received", "a version")
        table.title, table.caption = "Rollout processes", self._caption()
        for name, reader in self.history.readers.items():
            if reader.last is None:
                table.add_row(name, reader.state, *["–"] * 5)
                continue
            table.add_row(
                name,
                f"[red]{reader.state}[/]" if reader.state == "killed" else reader.state,
                f"{len(reader.lags)}",
                f"{reader.last.episodes.version}",
                f"{reader.lags[-1]}",
                decimal(reader.last.fetched_bytes),
                _size(reader.bytes_per_version),
            )
        return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for position, name in enumerate(columns):
        table.add_column(name, justify="left" if position < 2 else "right", no_wrap=True)
    return table


def _size(nbytes: float | None) -> str:
    return "–" if nbytes is None else decimal(int(nbytes))


def _share(nbytes: float | None, history: History) -> str:
    return "–" if nbytes is None else f"{nbytes / history.dense_bytes:.1%}"


def final_table(history: History) -> Table:
    """Return the work of each process: the trainer's bytes are sent, the others' are received."""
    table = _table("process", "", "began with", "batches", "lag", "versions", "a version", "of dense")
    for name, reader in history.readers.items():
        if reader.first is None or reader.last is None:
            continue
        table.add_row(
            name,
            reader.state,
            f"{reader.first.episodes.version}",
            f"{len(reader.lags)}",
            f"{fmean(reader.lags):.1f}",
            f"{reader.last.cuts}",
            _size(reader.bytes_per_version),
            _share(reader.bytes_per_version, history),
        )
    versions, published = history.steps[-1].version, fmean(step.nbytes for step in history.steps)
    row = ("trainer", "publishing", *["–"] * 3, f"{versions}", _size(published), _share(published, history))
    table.add_row(*row)
    return table


def plot(history: History, path: Path) -> None:
    """Draw rewards, lags and bytes against the version, with the events of the rollout processes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter

    figure, (rewards, lags, bytes_) = plt.subplots(
        3, figsize=(8, 8), sharex=True, layout="constrained", height_ratios=(3, 1, 2)
    )
    versions = [step.version for step in history.steps]
    rewards.plot(versions, [step.reward for step in history.steps], ".", color="tab:blue", alpha=0.25, markersize=4)
    smooth = [history.reward(last) for last in range(1, len(versions) + 1)]
    rewards.plot(versions, smooth, color="tab:blue", linewidth=2, label=f"mean of {MEAN_OF} batches")
    rewards.axhline(CHANCE, color="gray", linestyle=":", label="chance")
    rewards.set(ylim=(0, 1.02), ylabel="reward")
    rewards.set_title("Sorting digits, learned from the reward alone")

    lags.plot(versions, [step.lag for step in history.steps], ".", color="tab:purple", alpha=0.4, markersize=4)
    lags.set(ylabel="versions behind", ylim=(0, None))
    lags.set_title("How old the policy was that made the batch", fontsize="medium")

    bytes_.axhline(history.dense_bytes, color="gray", linestyle=":", label="dense copy")
    bytes_.plot(versions, [step.nbytes for step in history.steps], color="tab:orange", label="the trainer published")
    fetched = [each for reader in history.readers.values() for each in reader.fetched]
    bytes_.plot(*zip(*fetched, strict=True), ".", color="tab:green", alpha=0.3, markersize=4, label="a reader received")
    bytes_.set(yscale="log", ylabel="bytes a version", xlabel="version")
    bytes_.yaxis.set_major_formatter(FuncFormatter(lambda y, _: decimal(int(y))))

    for axes in (rewards, lags, bytes_):
        axes.grid(alpha=0.3)
        for event in history.events:
            axes.axvline(event.version, color="tab:red" if event.what == "killed" else "black", linestyle="--")
    for event in history.events:
        what = f"{event.name} {event.what}"
        rewards.annotate(what, (event.version, 0.02), rotation=90, ha="right", va="bottom", fontsize="small")
    rewards.legend(loc="lower right")
    bytes_.legend(loc="best")
    figure.savefig(path, dpi=150)
    plt.close(figure)
