"""The shards of a run: each a process with a disk of its own, which may die at any write and is started again."""

import asyncio
from dataclasses import replace
from pathlib import Path

import torch

from pscore.wire.errors import Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.observability.metrics import Metrics
from psservice.rpc.auth import Authenticator
from psservice.rpc.calls import handlers_of
from psservice.rpc.dispatcher import Dispatcher
from psservice.rpc.operators import OperatorCalls
from psservice.rpc.readers import ReaderCalls
from psservice.rpc.shards import ShardCalls, question_of
from psservice.rpc.standbys import StandbyCalls
from psservice.rpc.workers import WorkerCalls
from psservice.settings import ServerSettings
from psservice.shard.following import follow
from psservice.shard.lifecycle import end_leases, open_shard
from psservice.storage.environment import Environment
from psservice.storage.files import StorageError
from tests.psservice.durability.memory_disk import Crash, MemoryDisk
from tests.simulator.network import CutError, Link, RefusedError
from tests.simulator.standby import Standby
from tests.simulator.witness import require

METRICS = Metrics()
LEASE_SECONDS, SNAPSHOT_SECONDS = 10.0, 60.0


class HostDisk(MemoryDisk):
    """A disk that tells when its process dies, and whose next sync may fail."""

    def __init__(self, random, on_death):
        super().__init__(random)
        self._on_death, self.failing_syncs = on_death, 0

    def dies_with(self, on_death):
        """Tell somebody else from now on when the process dies."""
        self._on_death = on_death

    def step(self, call):
        try:
            super().step(call)
        except Crash:
            self._on_death()
            raise

    def sync_node(self, node):
        if self.failing_syncs and not self.dead:
            self.failing_syncs -= 1
            raise OSError(5, "Input/output error")
        super().sync_node(node)


class Host:
    """A shard's process, its disk, and what is known of it."""

    def __init__(self, simulation, index, witness):
        self.simulation, self.index, self.witness = simulation, index, witness
        self.random = simulation.random
        self.disk = HostDisk(self.random, self._dies)
        self.settings = ServerSettings(
            shard_index=index,
            num_shards=simulation.num_shards,
            coordinator="127.0.0.1:1" if index else "",
            data_dir=Path("/data"),
            lease_seconds=LEASE_SECONDS,
            snapshot_seconds=SNAPSHOT_SECONDS,
            keep_snapshots=self.random.randint(2, 4),
            replicate="ack" if simulation.has_standby else "behind",
            **simulation.server_options,
        )
        self.environment = Environment(
            files=self.disk,
            monotonic=simulation.loop.time,
            unix_seconds=simulation.loop.time,
            random_bytes=self.random.randbytes,
            is_threaded=False,
        )
        self.links, self.tasks, self.is_up = set(), [], False
        self._follows, self._parted_until = None, 0.0
        self.shard = self.service = self.standby = None

    @property
    def peers(self):
        """The shards of this one's run, shard 0 first."""
        return self.simulation.hosts

    def start(self, *, power_cut=False):
        """Begin from the disk; the process may die meanwhile, and is then started again."""
        recover = "strict"
        while True:
            try:
                settings = self.settings.model_copy(update={"recover": recover})
                self.shard = open_shard(settings, torch.device("cpu"), METRICS, environment=self.environment)
                break
            except StorageError as error:
                if not self.disk.dead:
                    # Sectors that a power cut has lost among others look like damage; nothing told of may be in them.
                    require(power_cut and recover == "strict", f"shard {self.index} does not start: {error}")
                    self.simulation.note(f"damage: {error}"[:200])
                    recover = "last-good"
                    continue
            except Crash:
                pass
            again = self.random.random() < 0.4
            power_cut |= again
            self.disk.restart(power_cut=again)
        self.disk.fuse, shard = None, self.shard
        self.witness.recovered(shard, may_lose=power_cut and self.settings.fsync != "always")
        append = shard.durability.records.append

        def watched(record, messages):
            with self.witness.writing(shard, record):
                append(record, messages)

        shard.durability.records.append = watched
        operators = OperatorCalls(shard, lambda: self.dispatcher.queued, lambda: None, lambda: None)
        calls = (WorkerCalls(shard), ReaderCalls(shard), ShardCalls(shard), StandbyCalls(shard), operators)
        handlers = {rpc: handler for each in calls for rpc, handler in handlers_of(each).items()}
        self.dispatcher = Dispatcher(handlers, Authenticator(None, None), shard)
        self.service, self.is_up = self.dispatcher.service, True
        shard.leases.waiters.serve_on(self.simulation.loop.call_soon_threadsafe)
        self.tasks = [asyncio.ensure_future(self._guarded(self._maintain()))]
        if self.index:
            self.tasks.append(asyncio.ensure_future(self._guarded(self._follow())))

    def kill(self, *, power_cut=False, seconds=0.0):
        """Let the process die; it is started again after so many seconds."""
        if not self.is_up:
            return
        self.is_up = False
        self.simulation.note(f"shard {self.index} {'loses power' if power_cut else 'dies'}")
        for task in self.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        for link in list(self.links):
            link.cut()
        self.disk.dead, self.disk.full_share, self.disk.failing_syncs = True, 0.0, 0
        self.simulation.start_task(self._start_again(power_cut, seconds))

    def stand_by(self):
        """Begin a standby on a new disk."""
        self.standby = Standby(self, HostDisk)

    def lose(self, *, seconds):
        """Let the host burn; its standby serves in its place after so many seconds, and another one stands by."""
        self.simulation.note(f"the host of shard {self.index} burns")
        standby = self.standby
        standby.end()
        self.disk.dead = True
        self.disk = standby.disk
        self.disk.dies_with(self._dies)
        self.environment = replace(self.environment, files=self.disk)
        self.kill(seconds=seconds)
        self.stand_by()

    def part(self, *, seconds):
        """Let shard 0 be out of this shard's reach for so many seconds."""
        self._parted_until = self.simulation.loop.time() + seconds
        if self._follows is not None:
            self._follows.cut()

    async def _start_again(self, power_cut, seconds):
        await asyncio.sleep(seconds)
        self.disk.restart(power_cut=power_cut)
        if self.simulation.is_rough and self.random.random() < 0.2:
            self.disk.fuse = self.random.randint(0, 25)
        self.start(power_cut=power_cut)

    def _dies(self):
        """Whatever ran when the disk died is dead with it; only the rest must be told."""
        if self.is_up:
            self.simulation.loop.call_soon(self._kill_at_once)

    def _kill_at_once(self):
        self.kill(power_cut=self.random.random() < 0.4, seconds=self.random.random() * 3)

    def require_alive(self):
        """Nothing that is dead sends an answer."""
        if self.disk.dead or not self.is_up:
            raise Crash("dead")

    def failed(self, error):
        """A call has ended with an error that is no refusal."""
        if not isinstance(error, (Crash, asyncio.CancelledError)):
            self.simulation.fail(error)

    async def _guarded(self, work):
        try:
            await work
        except (Crash, asyncio.CancelledError):
            pass
        except BaseException as error:
            self.simulation.fail(error)

    async def _maintain(self):
        """What threads do in a real process; and a process that can only be started again is."""
        while True:
            await asyncio.sleep(0.25 + self.random.random() / 4)
            self.require_alive()
            shard = self.shard
            try:
                end_leases(shard)
                if self.settings.fsync == "interval":
                    shard.durability.records.journal.force()
                shard.durability.snapshot_if_due()
                shard.cuts.keep_up()
            except (Rejected, StorageError) as refusal:
                self.simulation.note(f"maintenance: {refusal}"[:80])
            if shard.durability.is_broken or shard.apply_thread.failed:
                self.kill(seconds=0.5)
                return
            self.witness.look(shard)

    async def _follow(self):
        """The follower's thread, with the simulated network between the shards."""
        known = 0
        while True:
            await asyncio.sleep(max(0.0, self._parted_until - self.simulation.loop.time()))
            link = Link(self.peers[0], "FollowRun", self.random, cut_share=self.simulation.cut_share)
            self._follows = link
            try:
                question = question_of(self.shard, known)
                if question.cut and question.version.generation == self.shard.model.generation:
                    self.witness.told_of_version(self.shard, question.version.version)
                await link.send(question)
                await link.end()
                answer = await link.receive(pb.FollowRunResponse)
                self.require_alive()
                if answer is not None:
                    follow(self.shard, answer.news)
                    known = answer.fingerprint
                continue
            except (CutError, RefusedError, Rejected, TimeoutError):
                known = 0
            if self.shard.relaying is not None:
                self.shard.relaying.aim_at_nothing()
            await asyncio.sleep(0.2 + self.random.random())
