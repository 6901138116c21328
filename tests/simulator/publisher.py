"""A simulated publisher of a feed: what docs/reference/protocol.md says (*Feeds*), as psclient.publisher does it."""

import asyncio
from typing import NamedTuple

import torch

from pscore.model.sparse_slice import SparseSlice
from pscore.wire.errors import ErrorCode
from pscore.wire.generation import epoch
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.simulator.fleet import LEASE_SECONDS
from tests.simulator.network import CutError, RefusedError
from tests.simulator.witness import bits, require
from tests.simulator.worker import AGAIN, JOIN_FIRST, DeathError, Worker

REJOIN = (*JOIN_FIRST, ErrorCode.STALE_GENERATION, ErrorCode.VERSION_IN_FUTURE)
MOST_JOINS = 20  # of one publication
STRANGE_WORDS = (0x0000, 0x7FC0, 0x7F81, 0xFFFF, 0x7C01, 0x8000, 0x7F80)  # NaN, infinities and zeros among them


class GivenUpError(Exception):
    """The publisher's patience is over: what became of its publication is not known."""


class Publications:
    """The words of versions: of those that may have been published, by epoch, and of those that somebody has seen."""

    def __init__(self):
        self._candidates, self._known, self._names = {}, {}, {}

    def begin(self, generation, version, words):
        """A publication may come to pass from now on."""
        self._candidates.setdefault((epoch(generation), version), set()).add(bits(words))

    def written(self, index, version, name):
        """A shard writes down that it publishes what a push has staged: the others what shard 0 has published."""
        names = self._names.setdefault(version, set())
        if not index:
            names.add(name)
        require(name in names, f"shard {index} publishes version {version} as another push has staged it")

    def told(self, generation, version, words):
        """The publisher is told that a version, of shard 0's generation, is published."""
        same = self._known.setdefault((generation, version), bits(words)) == bits(words)
        require(same, f"readers have other words of version {version} than the publisher was told of")

    def read(self, shards, words):
        """A reader has a whole cut."""
        generation, version = shards[0][:2]
        require(len({each[1] for each in shards}) == 1, f"a cut of versions {[each[1] for each in shards]}")
        whole = bits(words)
        is_one = whole in self._candidates.get((epoch(generation), version), ())
        require(is_one, f"a cut of version {version} is no publication")
        require(self._known.setdefault((generation, version), whole) == whole, f"version {version} has other words")


class _Prepared(NamedTuple):
    """A version that every shard has staged, which may or may not be published."""

    version: int
    words: torch.Tensor
    generations: list


class Publisher(Worker):
    """Publishes so many versions, and in the end one that nothing can take back.

    Attributes:
        words: that are published next.
        baseline: that the feed has, as far as the publisher knows.
        held: generation and version of each shard at which the feed has the baseline's words; ``None``: not known.
    """

    def __init__(self, simulation, name, steps):
        super().__init__(simulation, name, steps)
        self.words = self._drawn(simulation.layout.size)
        self.baseline = self.held = self.prepared = None
        self.has_joined = False

    def _drawn(self, count):
        draw = self.random
        words = [draw.choice(STRANGE_WORDS) if draw.random() < 0.3 else draw.randrange(1 << 16) for _ in range(count)]
        return torch.tensor(words, dtype=torch.int64).to(torch.int16)

    async def live(self):
        while True:
            try:
                while self.done < self.steps:
                    await self._take_step()
                await self._end()
                break
            except DeathError:
                pass
            except GivenUpError:
                self.simulation.note("the publisher gives up for now")
        await self._leave()

    def die(self):
        super().die()
        self.prepared, self.has_joined = None, False
        if self.random.random() < 0.5:
            self.baseline = self.held = None

    async def _take_step(self):
        await asyncio.sleep(self.random.choice((0.01, 0.2, 3 * self.random.random())))
        self._perhaps_die()
        self.done += 1
        self._train()
        await self._publish()

    def _perhaps_die(self, *, with_links=False):
        """Die now and then; ``with_links``: the other shards may not hear of shard 0 before the next life begins."""
        if self.simulation.is_rough and self.random.random() < 0.05:
            if with_links and self.random.random() < 0.5:
                seconds = LEASE_SECONDS + 8 * self.random.random()
                for host in self.simulation.hosts[1:]:
                    host.part(seconds=seconds)
            self._die()

    def _die(self):
        self.simulation.note("the publisher dies")
        self.die()
        raise DeathError

    def _perhaps_give_up(self):
        if self.simulation.is_rough and self.random.random() < 0.2:
            raise GivenUpError

    def _train(self):
        """Change some words, or none: most a little, as training does."""
        words, size = self.words.clone(), self.words.numel()
        count = self.random.choice((0, 1, 3, size // 4, size))
        places = torch.tensor(self.random.sample(range(size), count), dtype=int)
        words[places] += torch.tensor([self.random.choice((-2, -1, 1, 2)) for _ in places], dtype=torch.int16)
        if self.random.random() < 0.5:
            words[places[:3]] = self._drawn(len(places[:3]))
        self.words = words

    async def _end(self):
        """Publish another version if the troubles have taken the newest back."""
        while self.simulation.is_rough or not all(host.is_up for host in self.simulation.hosts):
            await asyncio.sleep(1.0)
        for host in self.simulation.hosts:
            host.disk.fuse = None
        is_told = self.has_joined and await self._settle() is None
        now = [place.host.witness.generation for place in self.places]
        is_newest = is_told and self.held is not None and [generation for generation, _ in self.held] == now
        if not is_newest or self.random.random() < 0.5:
            await self._publish()

    # Publishing

    @property
    def _life(self):
        return self.name, f"life-{self.life}"

    @property
    def _has_base(self):
        return all(place.base is not None for place in self.places)

    async def _publish(self):
        has_words = False  # whether the baseline has the words that are published
        if self.has_joined:
            await self._settle()
        else:
            has_words = await self._begin()
            if has_words and self._has_base:  # they were uploaded
                self._note([(place.generation, place.base) for place in self.places], self.baseline)
                return
        for _ in range(MOST_JOINS):
            if not has_words and not self._has_base:
                self.baseline, self.held, has_words = self.words, None, True
            refusals = await self._stage(None if not self._has_base else self.words != self.baseline)
            if not refusals and (refusal := await self._settle()) is None:
                return
            refusal = refusals[0] if refusals else refusal
            if refusal.reason is ErrorCode.TOO_STALE:
                for place in self.places:
                    place.base = None
            else:
                require(refusal.reason in REJOIN, f"a publication is refused: {refusal}")
            await self._join()
        require(False, "publications are refused again and again")

    async def _begin(self):
        """Join, and return whether the baseline has the words that are to be published."""
        held, is_known = self.held, self.held is not None
        if not is_known:
            self.baseline = self.words
        await self._join()
        self.has_joined = True
        if held is not None and [each[0] for each in held] == [place.generation for place in self.places]:
            for place, (_, version) in zip(self.places, held, strict=True):
                place.base = version
        return not is_known

    def _first_values(self):
        return self.baseline

    async def _upload(self, place, generation):
        self.simulation.publications.begin(generation, 0, self.baseline)
        answer = await super()._upload(place, generation)
        place.generation, place.base = generation, answer.version

    async def _stage(self, differs):
        """Stage the words that differ, or all of them, on every shard; return the refusals."""
        base, words = max(place.joined if place.base is None else place.base for place in self.places), self.words
        self.step += 1
        for place in self.places:
            span = self.simulation.spans[place.host.index]
            offsets = None if differs is None else differs[span.start : span.end].nonzero().view(-1)
            mine = words[span.start : span.end]
            entries = SparseSlice(span, offsets, mine if offsets is None else mine[offsets])
            self.simulation.entries[place.host.index][(*self._life, self.step)] = entries
        dies = self.simulation.is_rough and self.random.random() < 0.05
        some = self.random.sample(self.places, self.random.randrange(len(self.places))) if dies else self.places
        answers = await asyncio.gather(*(self._stage_on(place, base) for place in some), return_exceptions=True)
        if dies:
            self._die()
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, RefusedError):
                raise answer
        refusals = [answer for answer in answers if isinstance(answer, RefusedError)]
        if not refusals:
            versions = [answer.version for answer in answers]
            require(versions == [base + 1] * len(answers), f"version {base + 1} is staged as {versions}")
            self.prepared = _Prepared(base + 1, words, [place.generation for place in self.places])
        return refusals

    async def _stage_on(self, place, base):
        key = (*self._life, self.step)

        async def attempt(link):
            witness, shard = place.host.witness, place.host.shard
            link.on_answer = lambda raw: witness.told_of_push(shard, key)
            await link.send(*self._messages(place, self.step, base))
            await link.end()
            return await link.receive(pb.PushSparseResponse)

        return await self._answer(place, "PushSparse", attempt)

    async def _settle(self):
        """Publish what every shard has staged, if there is something; return the refusal, if there is one."""
        prepared, place = self.prepared, self.places[0]
        if prepared is None:
            return None
        generation, version = place.generation, prepared.version
        self._perhaps_die()
        self.simulation.publications.begin(generation, version, prepared.words)

        async def attempt(link):
            witness, shard = place.host.witness, place.host.shard
            link.on_answer = lambda raw: witness.told_of_version(shard, version)
            request = pb.PublishRequest(identity=self.identity, generation=generation, version=version)
            await link.send(request)
            await link.end()
            self._perhaps_die(with_links=True)
            return await link.receive(pb.PublishResponse)

        answer = await self._answer(place, "Publish", attempt)
        self.prepared = None
        if isinstance(answer, RefusedError):
            return answer
        require(answer.version == version, f"version {version} is published as {answer.version}")
        self._note([(each, version) for each in prepared.generations], prepared.words)
        return None

    def _note(self, held, words):
        for place, (generation, version) in zip(self.places, held, strict=True):
            place.begin_anew(generation)
            place.base = version
        self.baseline, self.held = words, held
        self.simulation.publications.told(*held[0], words)
        self.simulation.note(f"version {held[0][1]} is published")

    async def _answer(self, place, rpc, attempt):
        """Make an attempt until it is answered, or refused, and return that; raises :class:`GivenUpError`."""
        while True:
            link = self._link(place, rpc)
            try:
                answer = await asyncio.wait_for(attempt(link), 60.0)
                if answer is not None:
                    return answer
            except (CutError, TimeoutError):
                link.cut()
            except RefusedError as refusal:
                if refusal.reason not in AGAIN:
                    return refusal
                await asyncio.sleep(refusal.retry_seconds or 0.0)
            self._perhaps_give_up()
            await asyncio.sleep(0.05 + self.random.random() / 5)
