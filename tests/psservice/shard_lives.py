"""Lives of a shard over a disk in memory: each is compared, bit for bit, with a replay of its records."""

import math
import random
from contextlib import closing
from pathlib import Path

import torch

from psservice.durability.capture import capture
from psservice.observability.metrics import Metrics
from psservice.settings import ServerSettings
from psservice.shard.lifecycle import open_shard
from psservice.state.records import kind_of
from psservice.storage.environment import Environment
from tests.psservice.durability.memory_disk import MemoryDisk
from tests.psservice.service_makers import bits

METRICS = Metrics()


class Lives:
    """One shard, as long as it serves, without threads; :meth:`kill` compares it with its next life.

    ``kinds`` are those of the records that were written.
    """

    def __init__(self, **settings):
        self.now, self.kinds = 1000.0, set()
        self.disk = MemoryDisk(random.Random(1))
        self.environment = Environment(
            files=self.disk,
            monotonic=lambda: self.now,
            unix_seconds=lambda: self.now,
            random_bytes=random.Random(2).randbytes,
            is_threaded=False,
        )
        self.settings = ServerSettings(data_dir=Path("/data"), fsync="always", **settings)
        self.open()

    def open(self):
        self.shard = open_shard(self.settings, torch.device("cpu"), METRICS, environment=self.environment)
        real = self.shard.durability.records.append

        def append(record, messages):
            real(record, messages)
            self.kinds.add(kind_of(record))

        self.shard.durability.records.append = append

    def kill(self):
        """Die, apply the records from the disk, and be in the same state."""
        live = self.snapshot()
        self.disk.restart(power_cut=False)
        self.open()
        assert self.snapshot() == live

    def snapshot(self):
        """Return the state as a snapshot has it; ``None`` if there is no model yet."""
        if self.shard.model is None:
            return None
        copied = capture(self.shard, self.shard.state, 0, "", (0, 0))
        plain = copied.manifest.model_dump(exclude={"created_unix_seconds", "last_checkpoint"})
        for _, record in plain["pushes"]:
            if record["answer"]:
                record["answer"]["apply_nanoseconds"] = 0
        with closing(copied):
            return plain, {name: bits(each.read(0, math.prod(each.shape))) for name, each in copied.tensors.items()}
