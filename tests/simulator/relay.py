"""A simulated relay: shards with disks of their own, which follow the run's shards over calls that may be cut."""

import asyncio
from contextlib import nullcontext

from pscore.model.layout import ModelLayout
from pscore.reader.cut import Cut
from pscore.wire.errors import Rejected
from pscore.wire.layouts import pack_layout
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.relay.relay import Relay
from psservice.relay.source import question
from psservice.shard.following import follow
from tests.simulator.fleet import Host
from tests.simulator.network import CutError, Link, RefusedError
from tests.simulator.witness import bits, require

TURNS = 50  # a tenth of a second each, in which readers get a cut


class NotHereError(Exception):
    """What the source is asked for has to come over the network first."""

    def __init__(self, request):
        super().__init__("to be fetched")
        self.request = request


class Fetched:
    """A relay's source, without a thread: answers that have come, by their requests."""

    def __init__(self, layout: ModelLayout):
        self._layout, self.answers = layout, {}

    def await_cut(self, request):
        return pb.AwaitCutResponse(layout=pack_layout(self._layout))

    def read(self, transfer, cut, held, buffers):
        asked = transfer.asked(cut, held, buffers)
        messages = self.answers.pop(asked.request.SerializeToString(), None)
        if messages is None:
            raise NotHereError(asked.request)
        return asked.read(iter(messages))

    def close(self):
        pass


class SourceWitness:
    """Compares a relay's shard with what its counterpart has had at each version."""

    def __init__(self, counterpart):
        self._counterpart, self.restoring = counterpart, set()

    @property
    def values(self):
        return self._counterpart.witness.values

    def writing(self, shard, record):
        return nullcontext()

    def told_of_version(self, shard, version):
        pass

    def recovered(self, shard, *, may_lose):
        self.look(shard)

    def look(self, shard):
        model = shard.model
        if model is None or model.generation not in {generation for generation, _ in self.values}:
            return  # nobody may read it: it is of no cut of the source
        was = self.values.get((model.generation, model.version))
        require(was is not None, f"a relay has version {model.version}, which its source never had")
        require(bits(model.current()) == was, f"a relay has other values of version {model.version}")


class RelayHost(Host):
    """A shard of the relay."""

    def __init__(self, simulation, index):
        super().__init__(simulation, index, SourceWitness(simulation.hosts[index]))
        self.settings = self.settings.model_copy(update={"relay_of": "source:1"})

    @property
    def peers(self):
        return self.simulation.relays

    def start(self, *, power_cut=False):
        super().start(power_cut=power_cut)
        self.source = Fetched(self.simulation.layout)
        self.relay = Relay(self.shard, self.source)
        if not self.index:
            self.tasks.append(asyncio.ensure_future(self._guarded(self._lead())))

    async def _hear(self, news):
        """Do as shard 0 has told, with what has to come first."""
        await self._fetching(lambda: follow(self.shard, news))

    async def _fetching(self, act):
        while True:
            self.require_alive()
            try:
                return act()
            except NotHereError as needed:
                request = needed.request
            self.source.answers = {request.SerializeToString(): await self._fetch(request)}

    async def _fetch(self, request):
        link, messages = self._link("ReadCut", self.index), []
        try:
            await link.send(request)
            await link.end()
            while (message := await asyncio.wait_for(link.receive(pb.ReadCutResponse), 30.0)) is not None:
                messages.append(message.SerializeToString())
        finally:
            link.cut()
        return messages

    def _link(self, rpc, index):
        return Link(self.simulation.hosts[index], rpc, self.random, cut_share=self.simulation.cut_share)

    async def _lead(self):
        """What the thread of shard 0 does."""
        known = None
        while True:
            await asyncio.sleep(self.random.random())
            try:
                known = await self._follow_source(known)
            except (CutError, RefusedError, Rejected, TimeoutError):
                known = None

    async def _follow_source(self, known):
        source = self.simulation.hosts[0]
        link = self._link("AwaitCut", 0)

        def told(raw):
            version = pb.AwaitCutResponse.FromString(raw).cut.shards[0]
            if version.generation == source.shard.model.generation:
                source.witness.told_of_version(source.shard, version.version)

        link.on_answer = told
        try:
            await link.send(question(known, b"", pb.RUN_STATE_UNSPECIFIED, None, "relay", 5.0))
            await link.end()
            answer = await asyncio.wait_for(link.receive(pb.AwaitCutResponse), 30.0)
        finally:
            link.cut()
        if answer is None:
            raise CutError
        self.require_alive()
        cut = Cut.from_message(answer.cut)
        if cut != known:
            self.shard.relay_failures.clear()
            self.shard.relayed = cut
            self.shard.tell_shards()
            await self._fetching(lambda: self.shard.go_to(cut))
            while not self.relay.is_together():
                if self.relay.has_failed():
                    raise CutError
                await asyncio.sleep(0.1)
            for _ in range(TURNS):
                if self.relay.is_readable(cut):
                    break
                await asyncio.sleep(0.1)
        return cut
