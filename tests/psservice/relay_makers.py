"""A relay without a network: a shard with a disk in memory, and a source that says what a test has it say."""

import torch

from pscore.model.buffers import pack
from pscore.model.digest import ModelDigest
from pscore.model.sparse_slice import SparseSlice
from pscore.reader.cut import Cut, ShardVersion
from pscore.reader.transfer import FetchedShard, digest_of_buffers
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.layouts import pack_layout
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.relay.relay import Relay
from psservice.relay.source import SourceError
from tests.psservice.shard_lives import Lives


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

    def replace(self, seed):
        """Have other values at the same version, as with WAGMA."""
        self.values[seed % self.values.numel()] = self.values[0]
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


class RelayHistory(Lives):
    """One shard of a relay of a source."""

    def __init__(self, source):
        self.source = source
        super().__init__(num_shards=source.shards, relay_of="source:1")

    def open(self):
        super().open()
        self.relay = Relay(self.shard, self.source)

    def fetch(self):
        """Stage the source's cut, and return it."""
        cut = self.source.cut()
        try:
            self.shard.relaying.aim(cut)
            self.relay.fetch(cut)
        except SourceError as error:
            raise Rejected(ErrorCode.BUSY, str(error)) from error
        return cut

    def publish(self, cut):
        """Publish a cut that is staged: the other shards have it."""
        for index in range(1, self.source.shards):
            self.shard.relaying.hear(index, [cut.name], "")
        self.relay.publish()

    def follow(self):
        """Go to the source's cut."""
        self.publish(self.fetch())

    def is_at(self, cut):
        """Tell whether the shard has its part of a cut, bit for bit."""
        model, part = self.shard.model, cut.shards[0]
        digest = ModelDigest(model.layout)
        digest.add(SparseSlice(model.span, None, model.theta))
        return ShardVersion(model.generation, model.version, digest.value) == part

    def lied_to(self):
        """Fetch from a source whose words are others than its digest says."""
        self.source.lies = True
        try:
            self.fetch()
        finally:
            self.source.lies = False
