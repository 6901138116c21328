"""One campaign: servers killed at random points under the load of raw workers, then every push accounted for."""

import os
import random
import signal
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from chaos import book, wire
from chaos.crew import Crew
from chaos.network import Network
from chaos.pusher import Caller, settle_for
from chaos.reference import Verdict, judge
from chaos.servers import Servers
from chaos.torment import Torment
from pscore.v1 import parameter_server_pb2 as pb

LEASE_SECONDS = 2.0
_CALL_SECONDS = 30.0
_LEAVE_SECONDS = 150.0
_UP_SECONDS = 0.0, 5.0
_LOAD_FIRST_SHARE, _LOAD_SECONDS = 0.8, 6.0
_IN_RECOVERY_SHARE, _RECOVERY_SECONDS = 0.2, 3.0
_STALL_SHARE, _STALL_SECONDS = 0.15, 1.0
_MISFORTUNE_SECONDS = 0.8


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
    """

    name: str
    shards: int
    fsync: str
    kills: int
    workers: int
    size: int
    pause: float
    seed: int


@dataclass(slots=True)
class Result:
    """What came of it.

    Attributes:
        name: of the campaign.
        verdicts: of each shard.
        faults: what was done, and how often.
        network: what connections went through.
        troubles: calls that failed and were made again, by why.
        recovery_seconds: from each start of a server until it served.
        failures: workers that ended or hung, servers that did not start, errors that servers logged.
        generations: histories that a shard had; more than one is a loss.
        seconds: taken.
    """

    name: str
    verdicts: list[Verdict] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    network: dict[str, int] = field(default_factory=dict)
    troubles: Counter[str] = field(default_factory=Counter)
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
            and bool(self.verdicts)
            and all(verdict.good for verdict in self.verdicts)
        )

    def total(self, what: str) -> int:
        """Sum a figure of the verdicts."""
        return sum(int(getattr(verdict, what)) for verdict in self.verdicts)


class Campaign:
    """Runs a plan in a directory of its own.

    Args:
        plan: what to do.
        directory: not there yet; books, logs and data go there.
        say: shows what is going on.
        data_dir: of the servers, where it is not in ``directory``.
    """

    def __init__(self, plan: Plan, directory: Path, say: Callable[[str], None], data_dir: Path | None = None) -> None:
        """Prepare."""
        self.plan, self.directory, self.say = plan, directory, say
        self.result = Result(plan.name)
        self._rng = random.Random(f"{plan.seed} {plan.name}")
        self._seen: dict[int, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._generations: dict[int, set[int]] = defaultdict(set)
        self._data_dir = data_dir or directory / "data"
        self.expected_errors: tuple[str, ...] = ()
        self._initial = np.random.default_rng(plan.seed).normal(size=plan.size).astype(np.float32)
        self.servers: Servers
        self.crew: Crew

    def run(self) -> Result:
        """Do it all."""
        started, plan = time.monotonic(), self.plan
        self.directory.mkdir(parents=True)
        self.servers = Servers(
            plan.shards,
            self._data_dir,
            self.directory,
            fsync=plan.fsync,
            fsync_interval_seconds=0.2,
            down_mode="exact",
            lease_seconds=LEASE_SECONDS,
            snapshot_seconds=2,
            keep_snapshots=2,
            ledger_multiple=20,  # replies stay sparse differences, also across a restart
        )
        with ExitStack() as stack:
            servers = stack.enter_context(self.servers)
            wire.upload(servers.addresses, self._initial, self._uuid(), _CALL_SECONDS)
            network = stack.enter_context(Network(servers.ports, self._rng.getrandbits(32)))
            self.crew = Crew(
                network.addresses,
                self.directory,
                plan.workers,
                seed=self._rng.getrandbits(32),
                size=plan.size,
                pause=plan.pause,
            )
            stack.callback(self.crew.close)
            self.crew.start()
            self.await_load(0)
            torment = Torment(
                self.crew,
                network,
                servers,
                seed=self._rng.getrandbits(32),
                period=_MISFORTUNE_SECONDS,
                lease=LEASE_SECONDS,
            )
            with torment:
                self.strike()
            self.say("everybody settles and leaves")
            self.crew.leave(_LEAVE_SECONDS)
            self._settle_rest()
            self.kill(range(plan.shards))  # once more: what is there now must be on the disk
            self._judge()
            if any(servers.stop()):
                self.result.failures.append("a server did not end in order at SIGTERM")
        self.result.network = network.counts
        self.result.faults += torment.counts
        self.result.failures += self.crew.failures
        errors = [line for line in servers.errors() if not any(words in line for words in self.expected_errors)]
        self.result.failures += [f"server log: {line}" for line in errors[:5]]
        self.result.generations = max(map(len, self._generations.values()))
        self.result.seconds = time.monotonic() - started
        return self.result

    # Misfortune

    def strike(self) -> None:
        """Kill servers at random points."""
        plan = self.plan
        while (done := self.result.faults["servers killed"]) < plan.kills - plan.shards:
            self.say(f"{done} of {plan.kills} kills")
            if self._rng.random() < _LOAD_FIRST_SHARE:
                for shard in range(plan.shards):
                    self.await_load(shard)
            self.pause(*_UP_SECONDS)
            both = plan.shards > 1 and self._rng.random() < 0.25 and done + plan.shards <= plan.kills - plan.shards
            chosen = range(plan.shards) if both else [self._rng.randrange(plan.shards)]
            if self._rng.random() < _STALL_SHARE:
                self.stall(chosen[0])
            self.kill(chosen)

    def kill(self, chosen: "range | list[int]") -> None:
        """Kill shards and start them again, some of them once more before they are there."""
        for shard in chosen:
            self.servers.kill(shard)
            self.result.faults["servers killed"] += 1
        started = time.monotonic()
        for shard in chosen:
            self.servers.start(shard)
        room = self.plan.kills - self.plan.shards - self.result.faults["servers killed"]
        if room > 0 and self._rng.random() < _IN_RECOVERY_SHARE:
            self.pause(0.0, _RECOVERY_SECONDS)
            self.servers.kill(chosen[0])
            self.result.faults["servers killed"] += 1
            self.result.faults["of these, while they recovered"] += 1
            self.servers.start(chosen[0])
        for shard in chosen:
            self.servers.await_ready(shard)
        self.result.recovery_seconds.append(time.monotonic() - started)
        for shard in chosen:
            self.look(shard)

    def stall(self, shard: int) -> None:
        """Let a server stand still for a moment."""
        self.result.faults["servers stopped"] += 1
        os.kill(self.servers.pid(shard), signal.SIGSTOP)
        self.pause(0.0, _STALL_SECONDS)
        os.kill(self.servers.pid(shard), signal.SIGCONT)

    def await_load(self, shard: int) -> None:
        """Wait until pushes are under way again, or for long enough."""
        line = wire.Line(self.servers.addresses[shard])
        before, end = -1, time.monotonic() + _LOAD_SECONDS
        try:
            while time.monotonic() < end:
                version = line.stub.GetStatus(pb.GetStatusRequest(), timeout=_CALL_SECONDS).version
                if 0 <= before <= version - self.plan.workers:
                    return
                before = before if before >= 0 else version
                self.pause(0.05, 0.1)
        finally:
            line.close()

    def pause(self, least: float, most: float) -> None:
        """Let a drawn time pass: misfortune strikes at no particular moment."""
        threading.Event().wait(self._rng.uniform(least, most))

    # Accounts

    def look(self, shard: int) -> wire.Download:
        """Download a shard's model, and keep what it looked like at its version."""
        found = wire.download(self.servers.addresses[shard], _CALL_SECONDS)
        self._seen[shard][found.version].add(wire.digest(found.values))
        self._generations[shard].add(found.generation)
        return found

    def _settle_rest(self) -> None:
        """Resend what killed workers left in doubt and nobody took over, until it is answered."""
        books = self.crew.books()
        open_pushes = {
            (push.incarnation, push.shard, push.step): push for path in books for push in book.in_doubt(path)
        }
        for path in books:
            for entry in book.read(path):
                if entry.line["kind"] in ("answered", "refused"):
                    open_pushes.pop(entry.name, None)
        self.result.faults["doubts settled at the end"] += len(open_pushes)
        settled = book.Book(self.directory / "director.book")
        caller = Caller(self.servers.addresses, self.plan.size, self._rng, settled.trouble)
        for push in open_pushes.values():
            settle_for(caller, push, settled)
        caller.close()
        settled.close()

    def _judge(self) -> None:
        self.say("the reference replays")
        paths = [*self.crew.books(), self.directory / "director.book"]
        entries = [entry for path in paths for entry in book.read(path)]
        self.result.troubles = Counter(entry.line["why"] for entry in entries if entry.line["kind"] == "trouble")
        for shard in range(self.plan.shards):
            last = self.look(shard)
            part = self._initial[last.start : last.start + len(last.values)]
            self.result.verdicts.append(judge(shard, entries, part, last, self._seen[shard]))

    def _uuid(self) -> str:
        return str(uuid.UUID(int=self._rng.getrandbits(128)))


def as_plain(result: Result) -> dict[str, Any]:
    """Return a result as plain values, for JSON."""
    verdicts = [
        {name: getattr(verdict, name) for name in (*verdict.__slots__, "bit_identical", "good")}
        for verdict in result.verdicts
    ]
    plain = {name: getattr(result, name) for name in (*result.__slots__, "good")}
    return plain | {"verdicts": verdicts, "faults": dict(result.faults), "troubles": dict(result.troubles)}
