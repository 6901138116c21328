"""A simulated relay: shards with disks of their own, which follow the run's shards over calls that may be cut."""

import asyncio
from contextlib import nullcontext, suppress

from pscore.model.layout import ModelLayout
from pscore.reader.cut import Cut
from pscore.wire.errors import Rejected
from pscore.wire.layouts import pack_layout
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.relay.relay import Relay
from psservice.relay.source import question
from tests.simulator.fleet import Host
from tests.simulator.network import CutError, Link, RefusedError
from tests.simulator.witness import bits, require

NOT_NOW = CutError, RefusedError, Rejected, TimeoutError
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
        self._counterpart, self.restoring, self.may_have_lost = counterpart, set(), False

    @property
    def values(self):
        return self._counterpart.witness.values

    def writing(self, shard, record):
        return nullcontext()

    def told_of_version(self, shard, version):
        pass

    def recovered(self, shard, *, may_lose):
        self.may_have_lost |= may_lose
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
        self.settings = self.settings.model_copy(update={"relay_of": "source:1", "replicate": "behind"})

    @property
    def peers(self):
        return self.simulation.relays

    def start(self, *, power_cut=False):
        super().start(power_cut=power_cut)
        self.source = Fetched(self.simulation.layout)
        self.relay = Relay(self.shard, self.source)
        work = self._keep_up() if self.index else self._lead()
        self.tasks.append(asyncio.ensure_future(self._guarded(work)))

    async def _stage(self, cut):
        while True:
            self.require_alive()
            try:
                return self.relay.fetch(cut)
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
        if self.simulation.source_is_away:
            raise CutError
        line, host = self.simulation.line, self.simulation.hosts[index]
        return Link(host, rpc, self.random, cut_share=self.simulation.cut_share, line=line)

    async def _lead(self):
        """What the thread of shard 0 does."""
        known = None
        while True:
            await asyncio.sleep(self.random.random())
            try:
                known = await self._follow_source(known)
            except NOT_NOW:
                known = None

    async def _keep_up(self):
        """What the thread of another shard does."""
        relaying = self.shard.relaying
        while True:
            await asyncio.sleep(self.random.random())
            cut = relaying.target
            if cut is None or self.relay.has_part(cut):
                continue
            with suppress(*NOT_NOW):
                await self._stage(cut)
            relaying.failed = "" if self.relay.has_part(cut) else cut.name
            if self._follows is not None:
                self._follows.cut()  # so that shard 0 is asked anew, and told

    async def _follow_source(self, known):
        self.require_alive()
        self.relay.publish()  # what was staged before
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
        relaying = self.shard.relaying
        if cut != known:
            relaying.aim(cut)
            self.shard.tell_shards()
            await self._stage(cut)
            while not relaying.others_have(cut.name):
                if relaying.some_failed(cut.name):
                    raise CutError
                await asyncio.sleep(0.1)
            self.require_alive()
            self.relay.publish()
            for _ in range(TURNS):
                if self.relay.is_readable(cut):
                    break
                await asyncio.sleep(0.1)
        return cut
