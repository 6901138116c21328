"""One campaign: a misfortune strikes servers under the load of raw workers, then every push is accounted for."""

import random
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import numpy as np

from verify.client import wire
from verify.client.caller import Caller, StuckError, settle_for
from verify.cluster.servers import Servers
from verify.failpoint.network import Network
from verify.failpoint.restarts import kill_and_start
from verify.failpoint.torment import Torment
from verify.model.reference import judge
from verify.plan import Plan, Result
from verify.traffic import book
from verify.traffic.crew import Crew
from verify.traffic.pusher import Pusher
from verify.traffic.readers import Readers, Reaper, run_options
from verify.validate import server_readings

LEASE_SECONDS = 2.0
SNAPSHOT_SECONDS = 2.0
CALL_SECONDS = 30.0
_LEAVE_SECONDS = 150.0
_LOAD_SECONDS = 6.0
_MISFORTUNE_SECONDS = 0.8
_DOWN_DENSITY, _EXACT_LIMIT = 0.05, 0.05


class Misfortune(Protocol):
    """What befalls the servers of a campaign.

    Attributes:
        expected_errors: words of the errors that a server is then expected to log.
    """

    expected_errors: tuple[str, ...]

    def strike(self, campaign: "Campaign") -> None:
        """Do it, while workers push; every server serves again when this returns."""


class Campaign:
    """Runs a plan in a directory of its own.

    Args:
        plan: what to do.
        directory: not there yet; books, logs and data go there.
        say: shows what is going on.
        misfortune: befalls the servers.
        data_dir: of the servers, where it is not in ``directory``.
    """

    def __init__(
        self,
        plan: Plan,
        directory: Path,
        say: Callable[[str], None],
        misfortune: Misfortune,
        data_dir: Path | None = None,
    ) -> None:
        self.plan, self.directory, self.say, self._misfortune = plan, directory, say, misfortune
        self.result = Result(plan.name)
        self.rng = random.Random(f"{plan.seed} {plan.name}")
        self._seen: dict[int, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._generations: dict[int, set[int]] = defaultdict(set)
        self._data_dir = data_dir or directory / "data"
        self._initial = np.random.default_rng(plan.seed).normal(size=plan.size).astype(np.float32)
        self._probes: list[Path] = []
        self.servers: Servers
        self.crew: Crew

    def run(self) -> Result:
        started, plan = time.monotonic(), self.plan
        self.directory.mkdir(parents=True)
        self.servers = Servers(
            plan.shards,
            self._data_dir,
            self.directory,
            fsync=plan.fsync,
            fsync_interval_seconds=0.2,
            down_mode=plan.down_mode,
            down_density=_DOWN_DENSITY,
            exact_limit=_EXACT_LIMIT,
            lease_seconds=LEASE_SECONDS,
            snapshot_seconds=SNAPSHOT_SECONDS,
            keep_snapshots=2,
            ledger_multiple=20,  # replies stay sparse differences, also across a restart
        )
        with ExitStack() as stack:
            servers = stack.enter_context(self.servers)
            wire.upload(servers.addresses, self._initial, self._uuid(), CALL_SECONDS)
            network = stack.enter_context(Network(servers.ports, self.rng.getrandbits(32)))
            self.crew = Crew(
                network.addresses,
                self.directory,
                plan.workers,
                seed=self.rng.getrandbits(32),
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
                seed=self.rng.getrandbits(32),
                period=_MISFORTUNE_SECONDS,
                lease=LEASE_SECONDS,
            )
            readers = Readers(
                network.addresses,
                self.directory,
                plan.readers,
                run_options(plan.size),
                seed=self.rng.getrandbits(32),
            )
            with readers, Reaper(readers, self.rng.getrandbits(32)), torment:
                self._misfortune.strike(self)
            self._take_from(readers)
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
        expected = self._misfortune.expected_errors
        errors = [line for line in servers.errors() if not any(words in line for words in expected)]
        self.result.failures += [f"server log: {line}" for line in errors[:5]]
        self.result.generations = max(map(len, self._generations.values()))
        self.result.seconds = time.monotonic() - started
        return self.result

    # What a misfortune is made of

    def kill(self, chosen: Sequence[int], again_after: float | None = None) -> None:
        """Kill shards and start them again; the first once more after some seconds, where it still recovers or not."""
        kill_and_start(self.servers, self.result, chosen, again_after)
        for shard in chosen:
            self.look(shard)

    def await_load(self, shard: int, seconds: float = _LOAD_SECONDS) -> bool:
        """Wait until pushes are under way again, or for long enough; tell which."""
        before, end = -1, time.monotonic() + seconds
        while time.monotonic() < end:
            version = server_readings.status(self.servers.addresses[shard]).version
            if 0 <= before <= version - self.plan.workers:
                return True
            before = before if before >= 0 else version
            self.pause(0.05, 0.1)
        return False

    def gets_through(self, seconds: float) -> bool:
        """Push once as another worker, not through the network, to every shard; tell whether it is acknowledged."""
        path = self.directory / f"probe-{len(self._probes)}.book"
        self._probes.append(path)
        kept = book.Book(path)
        caller = Caller(self.servers.addresses, self.plan.size, self.rng, kept.trouble, seconds)
        try:
            Pusher(path.stem, kept, caller, self.rng, 0.0).step(threading.Event())
        except StuckError:
            return False
        finally:
            caller.close()
            kept.close()
        return True

    def pause(self, least: float, most: float) -> None:
        """Let a drawn time pass: misfortune strikes at no particular moment."""
        threading.Event().wait(self.rng.uniform(least, most))

    # Accounts

    def look(self, shard: int) -> wire.Download:
        """Download a shard's model, and keep what it looked like at its version."""
        found = wire.download(self.servers.addresses[shard], CALL_SECONDS)
        self._seen[shard][found.version].add(wire.digest(found.values))
        self._generations[shard].add(found.generation)
        return found

    def _take_from(self, readers: Readers) -> None:
        """Keep what readers have held, to be compared at the version that they claimed."""
        seen = readers.seen()
        for shard, version, digest in seen:
            self._seen[shard][version].add(digest)
        self.result.faults += readers.counts
        self.result.faults["versions that readers held"] += len({line[:2] for line in seen})
        self.result.failures += readers.failures

    def _settle_rest(self) -> None:
        """Resend what killed workers left in doubt and nobody took over, until it is answered."""
        books = [*self.crew.books(), *self._probes]
        open_pushes = {
            (push.incarnation, push.shard, push.step): push for path in books for push in book.in_doubt(path)
        }
        for path in books:
            for entry in book.read(path):
                if entry.line["kind"] in ("answered", "refused"):
                    open_pushes.pop(entry.name, None)
        self.result.faults["doubts settled at the end"] += len(open_pushes)
        settled = book.Book(self.directory / "director.book")
        caller = Caller(self.servers.addresses, self.plan.size, self.rng, settled.trouble)
        for push in open_pushes.values():
            settle_for(caller, push, settled)
        caller.close()
        settled.close()

    def _judge(self) -> None:
        self.say("the reference replays")
        paths = [*self.crew.books(), *self._probes, self.directory / "director.book"]
        entries = [entry for path in paths for entry in book.read(path)]
        self.result.troubles = Counter(entry.line["why"] for entry in entries if entry.line["kind"] == "trouble")
        for shard in range(self.plan.shards):
            last = self.look(shard)
            part = self._initial[last.start : last.start + len(last.values)]
            self.result.verdicts.append(judge(shard, entries, part, last, self._seen[shard]))

    def _uuid(self) -> str:
        return str(uuid.UUID(int=self.rng.getrandbits(128)))
