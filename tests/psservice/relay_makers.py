"""A relay without a network: a shard with a disk in memory, and a source that says what a test has it say."""

import math
import random
from contextlib import closing
from pathlib import Path

import torch

from pscore.model.buffers import pack
from pscore.model.digest import ModelDigest
from pscore.model.sparse_slice import SparseSlice
from pscore.reader.cut import Cut, ShardVersion
from pscore.reader.transfer import FetchedShard, digest_of_buffers
from pscore.wire.layouts import pack_layout
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.durability.capture import capture
from psservice.observability.metrics import Metrics
from psservice.relay.relay import Relay
from psservice.relay.source import SourceError
from psservice.settings import ServerSettings
from psservice.shard.lifecycle import open_shard
from psservice.state.records import kind_of
from psservice.storage.environment import Environment
from tests.psservice.durability.memory_disk import MemoryDisk
from tests.psservice.service_makers import bits

METRICS = Metrics()


class MadeSource:
    """The first of ``shards`` shards of a source: what it has now, and differences from what it had."""

    def __init__(self, layout, values, shards=1):
        self.layout, self.shards = layout, shards
        self.span = layout.shard_spans(shards)[0]
        self.generation, self.version, self.run_id = 7, 3, "run"
        self.values = values[: self.span.length].clone()
        self.buffers = pack([torch.zeros(spec.shape, dtype=spec.dtype) for spec in layout.buffers])
        self.past = {}
        self.is_away = self.lies = False
        self.ahead = 1  # versions that the other shards are ahead
        self.whole_replies = 0
        self.note()

    def note(self):
        self.past[self.generation, self.version] = self.values.clone()

    def change(self, seed, most=20, jump=1):
        """Go on by some versions, in which some elements have changed."""
        generator = torch.Generator().manual_seed(seed)
        places = torch.randperm(self.span.length, generator=generator)[: seed % most]
        if self.values.is_floating_point():  # as the parameters' own data types have them
            self.values[places] = torch.randn(places.numel(), generator=generator).half().bfloat16().float()
        else:
            self.values[places] = self.values[places] ^ 5
        self.version += jump
        self.note()

    def go_back(self, seed):
        """Begin another generation at an older version."""
        self.generation += 1
        self.version = max(0, self.version - seed % 3)
        self.note()

    def cut(self):
        digest = ModelDigest(self.layout)
        digest.add(SparseSlice(self.span, None, self.values))
        mine = ShardVersion(self.generation, self.version, digest.value)
        others = tuple(
            ShardVersion(self.generation, self.version + self.ahead, bytes(16)) for _ in range(self.shards - 1)
        )
        return Cut(self.run_id, (mine, *others), digest_of_buffers(self.buffers) if self.buffers else b"")

    # What a relay asks

    def await_cut(self, request):
        if self.is_away:
            raise SourceError("away")
        return pb.AwaitCutResponse(
            cut=self.cut().to_message(),
            layout=None if request.fingerprint == self.layout.fingerprint else pack_layout(self.layout),
            run_state=pb.RUN_STATE_TRAINING,
        )

    def read(self, transfer, cut, held, buffers):
        if self.is_away:
            raise SourceError("away")
        asked = transfer.asked(cut, held, buffers)
        base = asked.base
        values = self.values.clone()
        if self.lies:
            values[values.numel() // 2] += 1
        if base is not None and (base.generation, base.version) in self.past:
            before = self.past[base.generation, base.version]
            places = (
                (before.view(torch.uint8).view(before.numel(), -1) != values.view(torch.uint8).view(values.numel(), -1))
                .any(1)
                .nonzero()
                .view(-1)
            )
            changes = [SparseSlice(self.span, places, values[places])] if places.numel() else []
        else:
            base, changes = None, [SparseSlice(self.span, None, values)]
            self.whole_replies += 1
        known = digest_of_buffers(buffers) == cut.buffers_digest if buffers else False
        return FetchedShard(asked.version, base, changes, b"" if known else self.buffers, 0, 0.0)

    def close(self):
        pass


class RelayHistory:
    """One shard of a relay, as long as it serves; :meth:`kill` compares it with the next life."""

    def __init__(self, source):
        self.source = source
        self.disk = MemoryDisk(random.Random(1))
        self.environment = Environment(
            files=self.disk, monotonic=lambda: 1000.0, random_bytes=random.Random(2).randbytes, is_threaded=False
        )
        self.settings = ServerSettings(
            data_dir=Path("/data"), fsync="always", num_shards=source.shards, relay_of="source:1"
        )
        self.kinds = set()
        self.open()

    def open(self):
        self.shard = open_shard(self.settings, torch.device("cpu"), METRICS, environment=self.environment)
        self.relay = Relay(self.shard, self.source)
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
        if self.shard.model is None:
            return None
        copied = capture(self.shard, self.shard.state, 0, "", (0, 0))
        plain = copied.manifest.model_dump(exclude={"created_unix_seconds", "last_checkpoint"})
        with closing(copied):
            return plain, {name: bits(each.read(0, math.prod(each.shape))) for name, each in copied.tensors.items()}

    def follow(self):
        """Go to the source's cut."""
        self.shard.go_to(self.source.cut())

    def is_at(self, cut):
        """Tell whether the shard has its part of a cut, bit for bit."""
        model, part = self.shard.model, cut.shards[0]
        digest = ModelDigest(model.layout)
        digest.add(SparseSlice(model.span, None, model.theta))
        return ShardVersion(model.generation, model.version, digest.value) == part

    def lied_to(self):
        """Follow a source whose words are others than its digest says."""
        self.source.lies = True
        try:
            self.follow()
        finally:
            self.source.lies = False
