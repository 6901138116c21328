"""What a campaign is told to do, and what came of it."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from verify.validate.cut_verdict import CutVerdict
from verify.validate.feed_verdict import FeedVerdict
from verify.validate.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Plan:
    """What a campaign does.

    Attributes:
        name: in the table.
        shards: server processes.
        fsync: when the journal is forced to the disk.
        kills: servers killed.
        workers: that push meanwhile.
        size: elements of the model.
        pause: mean seconds between two pushes of a worker.
        seed: of everything that is drawn.
        down_mode: how pulls are answered.
        readers: that follow the model meanwhile, and are killed.
        faults: of the servers, in a campaign of feeds; others come beside them.
        cuts: of the power.
    """

    name: str
    shards: int
    fsync: str
    kills: int
    workers: int
    size: int
    pause: float
    seed: int
    down_mode: str = "exact"
    readers: int = 0
    faults: int = 0
    cuts: int = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """One flipped bit.

    Attributes:
        place: of the bit, in words.
        strict: what the server did that was started with ``--recover strict``.
        last_good: likewise; empty where the first had nothing to refuse.
    """

    place: str
    strict: str
    last_good: str


@dataclass(slots=True)
class Result:
    """What came of it.

    Attributes:
        name: of the campaign.
        verdicts: of each shard.
        feeds: verdicts on feeds.
        cuts: verdicts on servers whose power was cut.
        faults: what was done, and how often.
        network: what connections went through.
        troubles: calls that failed and were made again, by why.
        trials: flipped bits, and what became of each.
        recovery_seconds: from each start of a server until it served.
        failures: workers that ended or hung, servers that did not start, errors that servers logged.
        generations: histories that a shard had; more than one is a loss.
        seconds: taken.
    """

    name: str
    verdicts: list[Verdict] = field(default_factory=list)
    feeds: list[FeedVerdict] = field(default_factory=list)
    cuts: list[CutVerdict] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    network: dict[str, int] = field(default_factory=dict)
    troubles: Counter[str] = field(default_factory=Counter)
    trials: list[Trial] = field(default_factory=list)
    recovery_seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    generations: int = 1
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether every promise was kept."""
        return (
            not self.failures
            and self.generations == 1
            and bool(self.verdicts or self.feeds or self.cuts)
            and all(verdict.good for verdict in self.verdicts)
            and all(verdict.good for verdict in self.feeds)
            and all(verdict.good for verdict in self.cuts)
        )

    def total(self, what: str) -> int:
        """Sum a figure of the verdicts."""
        return sum(int(getattr(verdict, what)) for verdict in self.verdicts)

    def as_plain(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        plain = {name: getattr(self, name) for name in (*self.__slots__, "good")}
        verdicts = [
            asdict(verdict) | {"bit_identical": verdict.bit_identical, "good": verdict.good}
            for verdict in self.verdicts
        ]
        feeds = [asdict(verdict) | {"good": verdict.good} for verdict in self.feeds]
        cuts = [asdict(verdict) | {"good": verdict.good} for verdict in self.cuts]
        trials = [{name: getattr(trial, name) for name in trial.__slots__} for trial in self.trials]
        return plain | {
            "verdicts": verdicts,
            "feeds": feeds,
            "cuts": cuts,
            "trials": trials,
            "faults": dict(self.faults),
            "troubles": dict(self.troubles),
        }
