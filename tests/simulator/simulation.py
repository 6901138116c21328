"""A run from its first join to its last leave, in virtual time: each history follows from its seed alone."""

import asyncio
import logging
import random
import secrets
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch

from pscore.model.layout import ModelLayout, TensorSpec
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.errors import ErrorCode
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.model import copies
from tests.psservice.service_makers import F32, layout_of
from tests.simulator.fleet import Host
from tests.simulator.network import CutError, Link, RefusedError, StuckError, VirtualLoop
from tests.simulator.publisher import Publications, Publisher
from tests.simulator.reader import Reader
from tests.simulator.relay import RelayHost
from tests.simulator.witness import BrokenPromiseError, Witness, require
from tests.simulator.worker import Worker

LAYOUT = layout_of((40, F32), (9, F32))
FEED = ModelLayout(
    (
        TensorSpec("half", (30,), torch.bfloat16),
        TensorSpec("wide", (3,), torch.int64),
        TensorSpec("scale", (), torch.float32),
        TensorSpec("steps", (5,), torch.int16),
    ),
    word_bytes=2,
)
NAMES = ("anna", "bert", "cleo")
READERS, RELAY_READER, LATE_READER = ("rita", "rolf"), "rosa", "ruth"
LONGEST_LATENESS_SECONDS = 120.0  # of a reader's first cut of a relay whose source is away
RELAY_SHARE = 0.3  # of the histories, in which a relay follows
STANDBY_SHARE = 0.3  # of the histories, in which each shard has a standby, and hosts burn
LONGEST_SECONDS = 3600.0  # of virtual time, which nothing but a wait without an end reaches
LONGEST_PARTING_SECONDS = 25.0  # longer than a lease
METHODS = {
    "asynchronous": {},
    "rounds": {"rounds": '{"quorum": 0, "seconds": 0, "start_workers": 1}'},
    "quorum": {"rounds": '{"quorum": 2, "seconds": 3, "start_workers": 1}'},
    "unequal": {"rounds": '{"quorum": 0, "seconds": 0, "start_workers": 1, "wait_factor": 1.5}'},
    "groups": {"update": "average", "group_size": "2", "tau": "2", "late": "replace"},
    "feed": {"update": "assign"},
}


class Simulation:
    """One history, of a method that the seed chooses if none is named."""

    def __init__(self, seed, method=None):
        self.seed, self.random = seed, random.Random(seed)
        self.loop = VirtualLoop()
        draw = self.random
        self.method = method or draw.choice(tuple(METHODS))
        self.method_settings, self.num_shards = METHODS[self.method], draw.choice((1, 1, 2, 3))
        self.in_rounds, self.in_groups = "rounds" in self.method_settings, self.method == "groups"
        self.is_feed, self.publications = self.method == "feed", Publications()
        self.layout = FEED if self.is_feed else LAYOUT
        self.spans = self.layout.shard_spans(self.num_shards)
        self.server_options = {
            "fsync": draw.choice(("always", "always", "interval", "never")),
            "down_mode": draw.choice(("exact", "exact", "auto", "topk")),
            "down_density": draw.choice((0.1, 0.5)),
            "down_dense_below": 0,
        }
        if self.method == "asynchronous" and draw.random() < 0.4:
            self.server_options["ssp_bound"] = draw.randint(1, 2)
        self.cut_share = draw.choice((0.0, 0.01, 0.05))
        self.is_rough, self.is_over, self.trace, self._error, self._tasks = True, False, [], None, set()
        self.start = self._grid(LAYOUT.size)
        self.entries = [{} for _ in self.spans]  # of each push, by shard, identity and step
        self.hosts, self.relays, self.source_is_away, self.line = [], [], False, None
        self.lost_disks = 0
        self.has_standby = random.Random(f"standby {seed}").random() < STANDBY_SHARE
        # Not with WAGMA, whose versions do not name values.
        self.has_relay = not self.in_groups and random.Random(f"relay {seed}").random() < RELAY_SHARE

    def _grid(self, count):
        """Numbers of which all sums are exact, so that they depend on no order."""
        return torch.tensor([self.random.randint(-64, 64) / 8 for _ in range(count)])

    def choose_entries(self, worker, index, step):
        """What a worker pushes to a shard in a step."""
        span = self.spans[index]
        if self.random.random() < 0.1:
            entries = SparseSlice(span, None, self._grid(span.length))
        else:
            count = self.random.randint(1, min(10, span.length))
            offsets = torch.tensor(sorted(self.random.sample(range(span.length), count)))
            entries = SparseSlice(span, offsets, self._grid(count))
        self.entries[index][worker.name, f"life-{worker.life}", step] = entries

    # Running

    def run(self):
        """Live through the history; raises :class:`BrokenPromiseError`."""
        asyncio.set_event_loop(self.loop)
        try:
            with self._fixed_randomness():
                self.loop.run_until_complete(self._run())
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            words = f"seed {self.seed}, {self.method}, {self.num_shards} shards, {self.server_options}: {error!r}"
            raise BrokenPromiseError(f"{words}; the last of it: {self.trace[-15:]}") from (self._error or error)
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0.0))
            asyncio.set_event_loop(None)
            self.loop.close()

    @contextmanager
    def _fixed_randomness(self):
        random.seed(self.seed)
        with (
            mock.patch.object(copies, "_SMALL", 1),  # so that the tensors are watched, as large ones are
            mock.patch.object(secrets, "randbits", self.random.getrandbits),
            mock.patch.object(secrets, "token_hex", lambda count: self.random.randbytes(count).hex()),
        ):
            yield

    async def _run(self):
        self.main = asyncio.current_task()
        for index in range(self.num_shards):
            publishes = partial(self.publications.written, index)
            entries_of = self.entries[index].__getitem__
            witness = Witness(entries_of, in_rounds=self.in_rounds, publishes=publishes)
            self.hosts.append(Host(self, index, witness))
        for host in self.hosts:
            host.start()
        if self.has_standby:
            for host in self.hosts:
                host.stand_by()
            self.start_task(self._burn_hosts(random.Random(f"burning {self.seed}")))
        if self.has_relay:
            self.relays = [RelayHost(self, index) for index in range(self.num_shards)]
            for relay in self.relays:
                relay.start()
        if self.is_feed:
            self.workers = [Publisher(self, "publisher", self.random.randint(5, 25))]
        else:
            self.workers = [Worker(self, name, self.random.randint(3, 7)) for name in NAMES]
        troubles = self.start_task(self._make_trouble())
        if self.has_relay:
            self.start_task(self._leave_relay_alone(random.Random(f"alone {self.seed}")))
        readers = [Reader(self, name, self.hosts) for name in READERS]
        readers += [Reader(self, RELAY_READER, self.relays)] if self.has_relay else []
        reading = [self.start_task(reader.live()) for reader in readers]
        try:
            async with asyncio.timeout(LONGEST_SECONDS):
                await asyncio.gather(*(worker.live() for worker in self.workers))
                troubles.cancel()
                self.is_rough, self.cut_share, self.is_over = False, 0.0, True
                while not all(host.is_up for host in (*self.hosts, *self.relays)):
                    await asyncio.sleep(1.0)
                await asyncio.gather(*reading)
        except asyncio.CancelledError:
            if self._error is None:
                raise
            raise self._error from None
        except TimeoutError:
            raise StuckError(f"not over after {LONGEST_SECONDS:.0f} s") from None
        if self.is_feed:
            for reader in readers:
                has_newest = [each[:2] for each in reader.versions] == self.workers[0].held
                require(has_newest, f"{reader.name} does not have the newest version")
        for host in (*self.hosts, *self.relays):
            host.witness.look(host.shard)
            host.kill()
        await asyncio.sleep(10.0)  # all are started again, and checked
        for host in (*self.hosts, *self.relays):
            require(host.is_up, "a shard does not start any more")
        if self._error is not None:
            raise self._error

    def start_task(self, work):
        """Run something beside the rest."""

        async def guarded():
            try:
                await work
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                self.fail(error)

        task = asyncio.ensure_future(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def fail(self, error):
        """End the history with an error."""
        if self._error is None:
            self._error = error
            self.main.cancel()

    def note(self, words):
        """Remember what has happened, for the message of an error."""
        self.trace.append(f"{self.loop.time():.1f} {words}")

    # Troubles

    async def _make_trouble(self):
        for _ in range(self.random.randint(2, 10)):
            await asyncio.sleep(self.random.random() * (6 if self.is_feed else 2))  # lives begin late
            host = self.random.choice([*self.hosts, *self.relays])
            (what,) = self.random.choices(
                (
                    self._kill,
                    self._burn,
                    self._fill,
                    self._fail_syncs,
                    self._cut,
                    self._part,
                    self._snapshot,
                    self._restore,
                ),
                (3, 3, 1, 1, 2, 2, 2, 1),
            )
            if host.is_up:
                await what(host)
        self.is_rough, self.cut_share = False, 0.0

    async def _burn_hosts(self, draw):
        """Let hosts burn, disk and all, and their standbys serve."""
        for _ in range(draw.randint(1, 3)):
            await asyncio.sleep(8 * draw.random())
            host = draw.choice(self.hosts)
            while not self.is_over and not (host.is_up and host.standby.has_everything_told):
                await asyncio.sleep(0.1 + draw.random() / 5)
            if self.is_over:
                return
            host.lose(seconds=2 * draw.random())
            self.lost_disks += 1

    async def _leave_relay_alone(self, draw):
        """Let the relay's shards die one after another while the source is away: a new reader gets a cut."""
        await asyncio.sleep(20 * draw.random())
        while not self._relay_has_a_cut():
            await asyncio.sleep(draw.random())
        self.note("the relay's source is away")
        self.source_is_away = True
        for host in self.relays:
            await asyncio.sleep(draw.choice((0.0, 0.2 * draw.random())))
            host.kill(seconds=2 * draw.random())
        reader, began = Reader(self, LATE_READER, self.relays), self.loop.time()
        while not reader.versions and not any(host.witness.may_have_lost for host in self.relays):
            require(
                self.loop.time() < began + LONGEST_LATENESS_SECONDS,
                f"{LATE_READER} gets no cut: the relay has {[host.shard.model.cuts_here() for host in self.relays]}",
            )
            await reader.try_once()
            await asyncio.sleep(draw.random())
        self.note("the relay's source is back")
        self.source_is_away = False

    def _relay_has_a_cut(self):
        return all(host.is_up and host.shard.model is not None for host in self.relays) and (
            self.relays[0].relay.is_together()
        )

    async def _kill(self, host):
        host.kill(power_cut=self.random.random() < 0.5, seconds=self.random.random() * 4)

    async def _burn(self, host):
        host.disk.fuse = self.random.randint(0, 15)

    async def _fill(self, host):
        self.note(f"the disk of shard {host.index} fills")
        host.disk.full_share = 0.4
        await asyncio.sleep(1.0)
        host.disk.full_share = 0.0

    async def _fail_syncs(self, host):
        self.note(f"a sync fails at shard {host.index}")
        host.disk.failing_syncs = self.random.randint(1, 2)

    async def _cut(self, host):
        self.note(f"the connections of shard {host.index} break")
        for link in list(host.links):
            if self.random.random() < 0.7:
                link.cut()

    async def _part(self, host):
        self.note(f"shard {host.index} does not reach shard 0")
        host.part(seconds=self.random.random() * LONGEST_PARTING_SECONDS)

    async def _ask(self, host, rpc, request, kind):
        link = Link(host, rpc, self.random, cut_share=self.cut_share)
        try:
            await link.send(request)
            await link.end()
            return await asyncio.wait_for(link.receive(kind), 30.0)
        except (CutError, TimeoutError):
            link.cut()
            return None

    async def _snapshot(self, host):
        try:
            await self._ask(host, "TakeSnapshot", pb.TakeSnapshotRequest(), pb.TakeSnapshotResponse)
        except RefusedError as refusal:
            known = (ErrorCode.NOT_DURABLE, ErrorCode.NOT_INITIALISED, ErrorCode.BUSY)
            require(refusal.reason in known, f"no snapshot: {refusal}")

    async def _restore(self, _):
        """Take all shards back to an older version, or none."""
        if not all(host.witness.states for host in self.hosts):
            return
        known, targets = [], {}  # shards of a feed may lack versions between others
        for host in self.hosts:
            known.append(sorted({state.version for state in host.witness.states}))
            targets[host] = known[-1][-min(len(known[-1]), self.random.randint(1, 4))]
        common = set.intersection(*map(set, known))
        if self.is_feed and common and self.random.random() < 0.7:
            target = max((version for version in common if version <= min(targets.values())), default=min(common))
            targets = dict.fromkeys(targets, target)
        for host, version in targets.items():
            host.witness.restoring.add(version)
        self.note(f"a restore to {[*targets.values()]}")
        tickets, publication = {}, ""  # of shard 0, to which all go back if it is one version
        is_one = len({*targets.values()}) == 1
        for host, version in targets.items():
            request = pb.RestoreModelRequest(version=version, step=pb.RESTORE_STEP_PREPARE, publication=publication)
            try:
                answer = await self._ask(host, "RestoreModel", request, pb.RestoreModelResponse)
            except RefusedError as refusal:
                self.note(f"refused: {refusal}"[:100])
                answer = None
            if answer is None:
                break
            tickets[host], publication = answer.ticket, answer.publication if is_one else ""
        is_ready = len(tickets) == len(self.hosts)
        step = pb.RESTORE_STEP_COMMIT if is_ready else pb.RESTORE_STEP_ABANDON
        for host, ticket in tickets.items():
            before = host.witness.generation
            request = pb.RestoreModelRequest(step=step, ticket=ticket)
            try:
                answer = await self._ask(host, "RestoreModel", request, pb.RestoreModelResponse)
            except RefusedError as refusal:  # it has died meanwhile, or cannot write
                self.note(f"refused: {refusal}"[:100])
                continue
            if answer is not None and host.is_up:
                host.witness.look(host.shard)
                has_turned = host.witness.generation != before
                require(has_turned or not is_ready, "a restore was committed, and nothing has changed")


def simulate(first, count, method=None):
    """Simulate histories, from the first seed on, of one method if it is named; return how many disks were lost."""
    logging.disable(logging.CRITICAL)
    lost_disks = 0
    try:
        for seed in range(first, first + count):
            simulation = Simulation(seed, method)
            simulation.run()
            lost_disks += simulation.lost_disks
        return lost_disks
    finally:
        logging.disable(logging.NOTSET)
