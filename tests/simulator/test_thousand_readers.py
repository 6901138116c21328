"""A thousand readers at another site, in virtual time: one copy of each version crosses the line to their relay.

The servers are real, and their calls, as in all of the simulator; processors cost nothing here, and a message near by
takes up to 50 ms. So this holds what crosses the line, and who waits for whom, and no machine's speed.
"""

import asyncio
import logging

import pytest
import torch

from pscore.model.layout import ModelLayout, TensorSpec
from tests.simulator.fleet import Host
from tests.simulator.network import Line
from tests.simulator.publisher import Publisher
from tests.simulator.reader import WAIT_SECONDS, Reader
from tests.simulator.relay import RelayHost
from tests.simulator.simulation import Simulation
from tests.simulator.witness import Witness

LAYOUT = ModelLayout((TensorSpec("w", (4000,), torch.int16),), word_bytes=2)
CHANGED = 400  # words of a version
RATE = 300.0  # bytes a second, so that a version takes seconds on the line
VERSIONS = 3


class SteadyReader(Reader):
    """Follows without rest, until the run is over."""

    def __init__(self, simulation, name, hosts, line):
        super().__init__(simulation, name, hosts)
        self.line, self.waits = line, (WAIT_SECONDS,)

    async def live(self):
        while not self.simulation.is_over:
            await self.try_once()


class SteadyPublisher(Publisher):
    """Publishes a version when it is told to."""

    def _train(self):
        words = self.words.clone()
        words[self.random.sample(range(words.numel()), CHANGED)] += 1
        self.words = words

    async def publish_next(self):
        self._train()
        await self._publish()


class Fleet(Simulation):
    """A feed and its readers beyond a line, with a relay of theirs or without.

    Attributes:
        last_seconds: from the beginning of a publication until the last reader has it, for each version.
        line_bytes: that crossed the line for each version; ``join_bytes`` for the first one.
    """

    def __init__(self, readers, *, with_relay):
        super().__init__(0, "feed")
        self.num_shards, self.layout = 1, LAYOUT
        self.spans, self.entries = LAYOUT.shard_spans(1), [{}]
        self.cut_share, self.is_rough, self.has_relay, self.has_standby = 0.0, False, with_relay, False
        self.count, self.line = readers, Line(self.loop, RATE)
        self.last_seconds, self.line_bytes, self.join_bytes = [], [], 0

    async def _run(self):
        self.main = asyncio.current_task()
        written = self.publications.written
        witness = Witness(self.entries[0].__getitem__, in_rounds=False, publishes=lambda *each: written(0, *each))
        self.hosts = [Host(self, 0, witness)]
        self.hosts[0].start()
        if self.has_relay:
            self.relays = [RelayHost(self, 0)]
            self.relays[0].start()
        publisher = SteadyPublisher(self, "publisher", 0)
        await publisher._publish()
        near, line = (self.relays, None) if self.has_relay else (self.hosts, self.line)
        readers = [SteadyReader(self, f"reader-{number}", near, line) for number in range(self.count)]
        tasks = [self.start_task(reader.live()) for reader in readers]
        await self._until_all_have(readers, publisher)
        self.join_bytes = self.line.nbytes
        for _ in range(VERSIONS):
            had, began = self.line.nbytes, self.loop.time()
            await publisher.publish_next()
            await self._until_all_have(readers, publisher)
            self.last_seconds.append(self.loop.time() - began)
            self.line_bytes.append(self.line.nbytes - had)
        self.is_over = True
        await asyncio.gather(*tasks)
        for host in (*self.hosts, *self.relays):
            host.witness.look(host.shard)
            host.kill()

    async def _until_all_have(self, readers, publisher):
        async with asyncio.timeout(600.0):
            while not all([each[:2] for each in reader.versions] == publisher.held for reader in readers):
                await asyncio.sleep(0.05)


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def measured(readers, *, with_relay):
    fleet = Fleet(readers, with_relay=with_relay)
    fleet.run()
    return fleet


@pytest.mark.parametrize("readers", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_one_copy_crosses_the_line_and_the_last_reader_is_no_later_than_two_hops(readers):
    one_hop, fleet = measured(1, with_relay=False), measured(readers, with_relay=True)
    assert fleet.join_bytes < 1.2 * one_hop.join_bytes
    assert max(fleet.line_bytes) < 1.2 * max(one_hop.line_bytes)
    assert max(fleet.last_seconds) < 2 * min(one_hop.last_seconds)


def test_without_a_relay_every_reader_has_a_copy_of_its_own():
    one_hop, fleet = measured(1, with_relay=False), measured(5, with_relay=False)
    assert min(fleet.line_bytes) > 4.5 * max(one_hop.line_bytes)
    assert min(fleet.last_seconds) > 4 * max(one_hop.last_seconds)
