"""A simulated standby of one shard: it has a disk of its own, follows over calls that may be cut, and dies at writes.

When the shard's host burns, disk and all, the standby's disk is all that is left of the shard.
"""

import asyncio
from pathlib import Path

import torch

from pscore.wire.errors import ErrorCode
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.observability.metrics import Metrics
from psservice.shard.shard import Shard
from psservice.standby.compactor import Compactor
from psservice.standby.following import Following
from psservice.standby.primary import ReplicaAnswer
from psservice.storage.environment import Environment
from psservice.storage.files import StorageError
from psservice.storage.replica import Replica
from tests.psservice.durability.memory_disk import Crash
from tests.simulator.network import CutError, Link, RefusedError
from tests.simulator.witness import require

METRICS = Metrics()


class AnsweredPrimary:
    """A standby's primary, without a thread: the answer that has come to what is asked next."""

    def __init__(self):
        self.held, self.answer = None, None

    def ask(self, held):
        require(held == self.held, "the standby has something else than it has told")
        return self.answer

    def close(self):
        pass


class Standby:
    """The standby of a host, which is ready to lose everything."""

    def __init__(self, host, make_disk):
        self.host, self.simulation, self.random = host, host.simulation, host.random
        self.disk = make_disk(self.random, lambda: None)
        self.settings = host.settings.model_copy(
            update={"standby_of": "primary:1", "coordinator": "", "replicate": "behind", "data_dir": Path("/data")}
        )
        self.environment = Environment(
            files=self.disk,
            monotonic=self.simulation.loop.time,
            unix_seconds=self.simulation.loop.time,
            random_bytes=self.random.randbytes,
            is_threaded=False,
        )
        self.name, self.is_over = f"standby of {host.index}", False
        self.task = self.simulation.start_task(self._live())

    @property
    def has_everything_told(self):
        """Whether the standby has the model that its host has: all that was acknowledged since is here."""
        newest = self.replica.newest
        model = self.host.shard.model
        return newest is not None and model is not None and newest.manifest.generation == model.generation

    async def _live(self):
        while not self.is_over:
            try:
                self._begin()
                while not self.is_over:
                    await asyncio.sleep(self.random.choice((0.0, 0.02, self.random.random() / 5)))
                    if self.simulation.is_rough and self.random.random() < 0.01:
                        self.disk.fuse = self.random.randint(0, 15)
                    await self._follow_once()
                    self.compactor.advance()
            except Crash:
                self.simulation.note(f"{self.name} dies")
                await asyncio.sleep(self.random.random())
                self.disk.restart(power_cut=False)

    def _begin(self):
        while True:
            try:
                self.replica = Replica(self.settings, self.environment)
                break
            except StorageError as error:
                require(self.disk.dead, f"{self.name} does not start: {error}")
                self.disk.restart(power_cut=False)
        self.primary = AnsweredPrimary()
        self.following = Following(self.settings, self.environment, self.replica, self.primary)
        quiet = self.settings.model_copy(update={"data_dir": None, "standby_of": ""})
        shard = Shard(quiet, torch.device("cpu"), METRICS, lambda: None, lambda: None, self.environment)
        self.compactor = Compactor(shard, self.replica)

    async def _follow_once(self):
        held = self.replica.held
        link = Link(self.host, "Replicate", self.random, cut_share=self.simulation.cut_share)
        request = pb.ReplicateRequest(
            standby=self.name,
            segment=held.position.segment,
            mark=held.mark,
            offset=held.position.offset,
            generation=held.generation,
            wait_seconds=1.0,
        )
        try:
            await link.send(request)
            header = (await asyncio.wait_for(link.receive(pb.ReplicateResponse), 30.0)).header
            has_lost = held.generation and held.generation == self.host.witness.lost_of
            require(not has_lost, f"{self.name} follows a shard that has lost what it told of")
            size = header.journal_bytes or header.manifest_bytes + header.tensors_bytes
            data = []
            while sum(map(len, data)) < size:
                data.append((await asyncio.wait_for(link.receive(pb.ReplicateResponse), 30.0)).data)
        except RefusedError as refusal:
            if refusal.reason is ErrorCode.STANDBY_AHEAD:
                self.host.lose(seconds=2 * self.random.random())  # as an operator does who is told of it
            return
        except (CutError, TimeoutError, AttributeError):
            return
        finally:
            link.cut()
        if self.is_over:
            return
        self.primary.held, self.primary.answer = held, ReplicaAnswer(header, iter(data))
        require(self.following.follow_once() or self.disk.dead, f"{self.name}: {self.following.status().error}")
        if self.disk.dead:
            raise Crash("dead")

    def end(self):
        """End it, for its host to go on with its disk."""
        self.is_over = True
        self.disk.restart(power_cut=False)
