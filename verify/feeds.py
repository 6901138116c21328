"""A feed under misfortunes: whatever anybody sees of it is one model that was published as a whole.

A publisher process (:mod:`verify.traffic.publisher`) publishes models that are computed from seeds, and writes down
what it is about to publish, and what it was told. Followers write down what they hold. The judge
(:mod:`verify.model.publications`) shares no code with what is tested.
"""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psclient
from psclient.errors import ServerNotReadyError
from verify.client import wire
from verify.cluster.servers import Servers
from verify.cluster.waiting import until
from verify.failpoint.feed_followers import FeedFollowerFaults
from verify.failpoint.feed_publishers import FeedPublisherFaults
from verify.failpoint.feed_servers import EXPECTED_ERRORS, FeedServersFaults
from verify.failpoint.network import Network
from verify.failpoint.restarts import kill_and_start
from verify.failpoint.torment import Torment
from verify.model import words
from verify.model.publications import Download, Follower, Look, Part, Restore, Story, judge
from verify.plan import Plan, Result
from verify.traffic.notes import read_claims
from verify.traffic.publications import Told
from verify.traffic.publishers import PublisherFailedError, Publishers
from verify.traffic.readers import Readers
from verify.traffic.tensors import octets_of

LEASE_SECONDS = 2.0
_CALL_SECONDS, _DOWNLOAD_SECONDS = 30.0, 1.0
_MISFORTUNE_SECONDS = 1.2
_FIRST_SECONDS, _AHEAD_SECONDS, _ARRIVE_SECONDS = 60.0, 120.0, 90.0
_MOST_TRIES = 3


class Feeds:
    """Runs the plan's faults of servers; publishers and followers are struck meanwhile.

    Args:
        plan: what to do.
        directory: not there yet; books, logs and data go there.
        say: shows what is going on.
        layout: of the feed (:data:`verify.model.words.LAYOUTS`).
    """

    def __init__(self, plan: Plan, directory: Path, say: Callable[[str], None], layout: str) -> None:
        self.plan, self.directory, self.say, self._layout = plan, directory, say, layout
        self.result = Result(plan.name)
        self._rng = random.Random(f"{plan.seed} {plan.name}")
        self._looks: list[Look] = []
        self._downloads: list[Download] = []
        self.is_over = threading.Event()  # what servers are struck with; the rest ends then
        self.restores: list[Restore] = []
        self.servers: Servers
        self.readers: Readers
        self.publishers: Publishers

    def run(self) -> Result:
        started, plan, rng = time.monotonic(), self.plan, self._rng
        self.directory.mkdir(parents=True)
        self.servers = servers = Servers(
            plan.shards,
            self.directory / "data",
            self.directory,
            fsync=plan.fsync,
            fsync_interval_seconds=0.2,
            lease_seconds=LEASE_SECONDS,
            snapshot_seconds=2,
            keep_snapshots=4,
            cut_seconds=0.05,
        )
        with ExitStack() as stack:
            network = stack.enter_context(Network(servers.ports, rng.getrandbits(32)))
            servers.coordinator = network.addresses[0]
            stack.enter_context(servers)
            self.publishers = Publishers(network.addresses, self.directory, self._layout, rng.getrandbits(32))
            stack.callback(self.publishers.close)
            self.publishers.begin()
            self.readers = Readers(
                network.addresses, self.directory, plan.readers, self._options, seed=rng.getrandbits(32)
            )
            torment = Torment(
                self.readers,
                network,
                servers,
                seed=rng.getrandbits(32),
                period=_MISFORTUNE_SECONDS,
                lease=LEASE_SECONDS,
                who="followers",
            )
            with self.readers:
                try:
                    self.await_publications(1, _FIRST_SECONDS)
                    with torment:
                        self._strike()
                    self._settle()
                except PublisherFailedError as error:
                    self.result.failures.append(str(error))
            self._judge()
            if any(servers.stop()):
                self.result.failures.append("a server did not end in order at SIGTERM")
        self.result.network = network.counts
        self.result.faults += torment.counts
        self.result.failures += self.readers.failures
        if self.readers.has_said("on_cut has failed"):
            self.result.failures.append("a follower could not read its directory: see readers.log")
        errors = [line for line in servers.errors() if not any(words in line for words in EXPECTED_ERRORS)]
        self.result.failures += [f"server log: {line}" for line in errors[:5]]
        self.result.seconds = time.monotonic() - started
        return self.result

    def _strike(self) -> None:
        """Have servers, publisher and followers be struck at the same time, until the servers' faults are done."""
        with ThreadPoolExecutor() as threads:
            others = [
                threads.submit(kind(self, random.Random(self._rng.getrandbits(32))).strike)
                for kind in (FeedPublisherFaults, FeedFollowerFaults)
            ]
            try:
                FeedServersFaults(self, random.Random(self._rng.getrandbits(32))).strike()
            finally:
                self.is_over.set()
        for each in others:
            each.result()

    def _options(self, number: int) -> list[str]:
        return [f"--feed={self._layout}", *(["--allow-older"] if self._allows_older(number) else [])]

    @staticmethod
    def _allows_older(number: int) -> bool:
        return number % 4 > 1

    # What faults are made of

    def await_publications(self, count: int, seconds: float) -> bool:
        """Wait until publishers are told of so many more versions, or for long enough; tell which."""
        before = len(self._told())

        def is_told() -> bool:
            self.publishers.check()
            return len(self._told()) >= before + count

        return until(is_told, seconds)

    def pause(self, least: float, most: float) -> None:
        """Let a drawn time pass."""
        threading.Event().wait(self._rng.uniform(least, most))

    def note(self, what: str) -> None:
        """Write something down that explains the run."""
        with (self.directory / "director.log").open("a", encoding="utf-8") as file:
            file.write(f"{time.monotonic():.3f} {what}\n")

    def look(self) -> None:
        """Download the model, and read all shards; again while they are at several versions, for a few times."""
        self._download()
        for _ in range(_MOST_TRIES):
            begun = time.monotonic()
            parts = tuple(self._part(address) for address in self.servers.addresses)
            self._looks.append(Look(begun, time.monotonic(), parts))
            if len({part.version for part in parts}) == 1:
                return

    def _download(self) -> None:
        try:
            state = psclient.download(self.servers.addresses, patience_seconds=_DOWNLOAD_SECONDS)
        except ServerNotReadyError:
            self.result.faults["downloads refused: no version of all shards"] += 1
        else:
            digest = words.digest(octets_of(self._layout, state))
            self._downloads.append(Download(time.monotonic(), digest))

    @staticmethod
    def _part(address: str) -> Part:
        found = wire.download(address, _CALL_SECONDS)
        octets: words.Octets = found.values.view("u1")
        return Part(found.generation, found.version, found.start * found.values.itemsize, octets)

    def _told(self) -> list[tuple[Told, str]]:
        """Return every acknowledgement so far, in order, with the digest of its model."""
        published, _ = self.publishers.books()
        told = [(told, each.digest) for each in published.values() for told in each.told]
        return sorted(told, key=lambda one: one[0].at)

    # The end

    def _settle(self) -> None:
        """Let the feed get ahead of what anybody has, publish for the last time, and wait for all followers."""
        self.say("the publisher leaves, and followers come to its last version")

        def is_ahead() -> bool:
            told = [each for each, _ in self._told()]
            held = [claim.shards[0][1] for follower in self._followers() for life in follower.lives for claim in life]
            return bool(told) and told[-1].version > max([each.version for each in told[:-1]] + held, default=-1)

        if not until(is_ahead, _AHEAD_SECONDS):
            self.result.failures.append(f"the feed is not ahead {_AHEAD_SECONDS:.0f} s after the last fault")
        self.publishers.leave()
        told, digest = self._told()[-1]

        def has_arrived() -> bool:
            last = [follower.last for follower in self._followers()]
            return all(one is not None and (one.shards[0][1], one.digest) == (told.version, digest) for one in last)

        until(has_arrived, _ARRIVE_SECONDS)  # the judge finds out who is late
        self.look()
        kill_and_start(self.servers, self.result, range(self.plan.shards))  # what is there must be on the disk
        self.look()

    def _followers(self) -> list[Follower]:
        return [
            Follower(
                f"follower {number}",
                tuple(tuple(read_claims(path)) for path in self.readers.notes(number)),
                is_kept=self.readers.out(number) is not None,
                allows_older=self._allows_older(number),
            )
            for number in range(self.plan.readers)
        ]

    def _judge(self) -> None:
        self.say("the judge reads the books")
        published, self.result.troubles = self.publishers.books()
        story = Story(self._layout, published, self._followers(), self._looks, self._downloads, self.restores)
        self.result.feeds.append(judge(story))
