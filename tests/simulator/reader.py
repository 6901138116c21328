"""A simulated reader: follows cuts over calls that may be cut at any message, and never has a mixture."""

import asyncio

import torch

from pscore.model.digest import ModelDigest
from pscore.model.sparse_slice import SparseSlice
from pscore.wire import frames
from pscore.wire.codecs.names import READABLE_INDEX_CODECS
from pscore.wire.errors import ErrorCode
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.simulator.network import CutError, Link, RefusedError
from tests.simulator.witness import bits, floats, require

AGAIN = (
    ErrorCode.BUSY,
    ErrorCode.NOT_INITIALISED,
    ErrorCode.NO_SUCH_CUT,
    ErrorCode.DRAINING,
    ErrorCode.NOT_DURABLE,
    ErrorCode.NO_STANDBY,
)
WAIT_SECONDS = 5.0
LONGEST_NAP_SECONDS = 10.0


TYPES = {
    pb.DATA_TYPE_UNSPECIFIED: None,
    pb.DATA_TYPE_FLOAT16: torch.float16,
    pb.DATA_TYPE_BFLOAT16: torch.bfloat16,
}


class Reader:
    """Follows until the history is over and it has the last versions: as they are, or rounded to 16 bits."""

    def __init__(self, simulation, name, hosts):
        self.hosts, self.line, self.waits = hosts, None, (0.0, WAIT_SECONDS)
        self.simulation, self.name, self.random = simulation, name, simulation.random
        self.type = self.random.choice([*TYPES])
        self.layout = simulation.layout.viewed_in(TYPES[self.type])
        self.value_dtype = simulation.layout.value_dtype
        self.dtype = self.value_dtype if simulation.is_feed else TYPES[self.type] or torch.float32
        self.versions, self.values = [], None  # of the cut that it holds
        self.begun = {}  # the beginning of a transfer that was cut off, by shard: version and entries

    async def live(self):
        while not self._is_done():
            if self.random.random() < 0.05:  # its process dies
                self.versions, self.values, self.begun = [], None, {}
            await self.try_once()
            is_slow = self.random.random() < 0.15  # so that it lacks more versions than are kept
            await asyncio.sleep(LONGEST_NAP_SECONDS * self.random.random() if is_slow else self.random.random())

    async def try_once(self):
        """Ask for a newer cut, and fetch it; a call may be cut off."""
        try:
            await self._advance()
        except RefusedError as refusal:
            require(refusal.reason in AGAIN, f"{self.name} is refused: {refusal}")
        except (CutError, TimeoutError):
            pass

    def _is_done(self):
        simulation = self.simulation
        if not (simulation.is_over and all(host.is_up for host in (*simulation.hosts, *self.hosts))):
            return False
        models = [host.shard.model for host in simulation.hosts]
        if any(model is None for model in models):
            return True
        return [each[:2] for each in self.versions] == [(model.generation, model.version) for model in models]

    async def _advance(self):
        hosts = self.hosts
        known = [pb.ShardVersion(generation=each[0], version=each[1], digest=each[2]) for each in self.versions]
        request = pb.AwaitCutRequest(
            reader=self.name,
            known=known,
            wait_seconds=self.random.choice(self.waits),
            reader_type=self.type,
        )

        def told(raw):
            version = pb.AwaitCutResponse.FromString(raw).cut.shards[0]
            if version.generation == hosts[0].shard.model.generation:
                hosts[0].witness.told_of_version(hosts[0].shard, version.version)

        answer = await self._ask(hosts[0], "AwaitCut", request, pb.AwaitCutResponse, lambda message: message, told)
        found = [(each.generation, each.version, each.digest) for each in answer.cut.shards]
        require(len(found) == len(hosts), "a cut has other shards than the model")
        if found == self.versions:
            return
        parts = await asyncio.gather(*(self._read(host, found[host.index]) for host in hosts))
        if self.simulation.is_feed:
            self.simulation.publications.read(found, torch.cat(parts))
        self.versions, self.values = found, parts
        self.simulation.note(f"{self.name} has {[version for _, version, _ in found]}")

    async def _read(self, host, wanted):
        """Fetch a shard's part; return its values, which must be those that the shard had at this version."""
        span, index = self.simulation.spans[host.index], host.index
        held = [pb.HeldPart(end=span.end)]
        values = torch.zeros(span.length, dtype=self.value_dtype)
        before = self.versions[index] if self.versions else None
        if before is not None and before[0] == wanted[0] and before[1] <= wanted[1]:
            held = [pb.HeldPart(end=span.end, has_version=True, version=before[1])]
            values = self.values[index].clone()
        begun = self.begun.pop(index, None)
        if begun is not None and before is None and begun[0][0] == wanted[0] and begun[0][1] <= wanted[1]:
            end, values = begun[1], begun[2].clone()
            held.insert(0, pb.HeldPart(end=end, has_version=True, version=begun[0][1]))
        had = values.clone()
        request = pb.ReadCutRequest(
            version=pb.ShardVersion(generation=wanted[0], version=wanted[1], digest=wanted[2]),
            held=held,
            index_codecs=READABLE_INDEX_CODECS,
            reader_type=self.type,
            residues=before is not None and self.random.random() < 0.8,
        )

        def own(part, offsets):
            mine = had[part.start - span.start : part.end - span.start]
            return (mine if offsets is None else mine[torch.from_numpy(offsets)]).to(self.dtype)

        reader = frames.ChunkReader(span, own=own if request.residues else None, dtype=self.value_dtype)

        def take(message):
            for chunk in message.chunks:
                part = reader.read(chunk)
                where = torch.arange(part.span.length) if part.offsets is None else part.offsets
                values[where + (part.span.start - span.start)] = part.values
            if message.HasField("so_far") and before is None and begun is None:
                self.begun[index] = wanted, reader.position, values.clone()
            if message.HasField("commit"):
                reader.checksum.verify(message.commit)
                return message
            return None

        await self._ask(host, "ReadCut", request, pb.ReadCutResponse, take)
        self.begun.pop(index, None)
        digest = ModelDigest(self.layout)
        digest.add(SparseSlice(span, None, values))
        require(digest.value == wanted[2], f"{self.name} got values of another digest from shard {index}")
        if not self.simulation.in_groups:
            was = host.witness.values.get(wanted[:2])
            require(was is not None, f"a cut of version {wanted[1]}, which never was")
            right = was if self.simulation.is_feed else bits(floats(was).to(self.dtype).float())
            require(bits(values) == right, f"{self.name} got other values of version {wanted[1]}")
        return values

    async def _ask(self, host, rpc, request, kind, take, told=lambda raw: None):
        """Make a call; ``take`` returns the last of its messages, and ``told`` is called as each is sent."""
        link = Link(host, rpc, self.random, cut_share=self.simulation.cut_share, line=self.line)
        link.on_answer = told
        try:
            await link.send(request)
            await link.end()
            while True:
                message = await asyncio.wait_for(link.receive(kind), 30.0)
                if message is None:
                    raise CutError
                if (last := take(message)) is not None:
                    return last
        finally:
            link.cut()
