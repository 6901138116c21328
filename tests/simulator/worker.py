"""A simulated worker: what docs/reference/writing-a-client.md says, over calls that may be cut at any message."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import torch

from pscore.model.sparse_slice import SparseSlice
from pscore.wire import frames
from pscore.wire.codecs.names import READABLE_INDEX_CODECS, READABLE_VALUE_CODECS
from pscore.wire.errors import ErrorCode
from pscore.wire.layouts import pack_layout
from pscore.wire.protocol import NEWEST_PROTOCOL
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.simulator.network import CutError, Link, RefusedError
from tests.simulator.witness import bits, floats, require

AGAIN = (
    ErrorCode.BUSY,
    ErrorCode.NOT_DURABLE,
    ErrorCode.NO_STANDBY,
    ErrorCode.TOO_FAR_AHEAD,
    ErrorCode.ROUND_OPEN,
    ErrorCode.DRAINING,
)
JOIN_FIRST = (ErrorCode.LEASE_EXPIRED, ErrorCode.NOT_INITIALISED, ErrorCode.RUN_MISMATCH)
PULL_FIRST = (ErrorCode.STALE_GENERATION, ErrorCode.VERSION_IN_FUTURE, ErrorCode.TOO_STALE)
WAIT_SECONDS = 5.0
MOST_PULLS = 200


class DeathError(Exception):
    """The worker's process has died."""


@dataclass
class Place:
    """A worker's state at one shard."""

    host: Any
    generation: int = 0
    base: int | None = None
    joined: int = 0  # version as of the last join
    acknowledged: int = 0
    is_image: bool = False
    replica: torch.Tensor | None = None
    links: dict = field(default_factory=dict)

    def begin_anew(self, generation):
        if generation != self.generation:
            self.generation, self.base, self.acknowledged, self.is_image = generation, None, 0, False


class Worker:
    """Trains for so many steps, and leaves."""

    def __init__(self, simulation, name, steps):
        self.simulation, self.name, self.steps = simulation, name, steps
        self.random, self.life, self.step, self.done = simulation.random, 1, 0, 0
        self.run_id = ""
        self.places = [Place(host) for host in simulation.hosts]
        self.is_over = False

    @property
    def identity(self):
        return pb.WorkerIdentity(run_id=self.run_id, worker_id=self.name, incarnation=f"life-{self.life}")

    async def live(self):
        """Train, and begin anew after each death."""
        while True:
            try:
                await self._join()
                while self.done < self.steps:
                    await self._take_step()
                await self._settle()
                break
            except DeathError:
                pass
        await self._leave()

    def die(self):
        """Nobody hears of this life any more."""
        self._cut()
        self.life, self.step, self.run_id = self.life + 1, 0, ""
        self.places = [Place(host) for host in self.simulation.hosts]

    def _cut(self):
        for place in self.places:
            for link in place.links.values():
                link.cut()
            place.links.clear()

    # Calls

    def _link(self, place, rpc):
        return Link(place.host, rpc, self.random, cut_share=self.simulation.cut_share)

    async def _call(self, place, rpc, requests, kind):
        """Make a call of one answer until there is one; raises :class:`RefusedError` if another time is no help."""
        while True:
            link = self._link(place, rpc)
            try:
                await link.send(*requests)
                await link.end()
                answer = await asyncio.wait_for(link.receive(kind), 60.0)
                if answer is not None:
                    return answer
            except (CutError, TimeoutError):
                link.cut()
            except RefusedError as refusal:
                if refusal.reason not in (*AGAIN, ErrorCode.WORKER_ALIVE):
                    raise
                await asyncio.sleep(refusal.retry_seconds or 0.0)
                if rpc == "UploadModel":
                    raise
            await asyncio.sleep(0.1 + self.random.random() / 2)

    # Joining

    async def _join(self):
        while True:
            try:
                if await self._join_once():
                    return
            except RefusedError as refusal:
                again = (*JOIN_FIRST, *AGAIN, ErrorCode.ALREADY_UPLOADED, ErrorCode.STALE_GENERATION)
                require(refusal.reason in again, f"{self.name} cannot join: {refusal}")
            await asyncio.sleep(0.2 + self.random.random() / 5)

    async def _join_once(self):
        seen, answers = max(place.generation for place in self.places), {}
        for place in reversed(self.places):
            has_replica = all(each.base is not None for each in self.places)
            request = pb.JoinRequest(
                identity=self.identity,
                protocol_version=NEWEST_PROTOCOL,
                method="dgs",
                method_settings=self.simulation.method_settings,
                layout=pack_layout(self.simulation.layout),
                shard_index=place.host.index,
                num_shards=len(self.places),
                generation_seen=seen if place.host.index == 0 else 0,
                has_replica=has_replica,
                wait_seconds=self.random.choice((0.0, WAIT_SECONDS)),
                index_codecs=READABLE_INDEX_CODECS,
                value_codecs=READABLE_VALUE_CODECS,
            )
            request.identity.run_id = ""  # whatever run there is
            answer = answers[place.host.index] = await self._call(place, "Join", [request], pb.JoinResponse)
            seen = max(seen, answer.generation if answer.state == pb.JOIN_STATE_READY else 0)
        first = answers[0]
        self.run_id, self.step = first.run_id, max(self.step, first.first_step - 1)
        if first.last_incarnation == self.identity.incarnation:
            self.step = max(self.step, first.last_step)
        ready = {index for index, answer in answers.items() if answer.state == pb.JOIN_STATE_READY}
        if first.state == pb.JOIN_STATE_UPLOAD:
            for place in reversed(self.places):
                index = place.host.index
                if index not in ready or answers[index].generation != first.generation:
                    await self._upload(place, first.generation)
            return False
        if first.state != pb.JOIN_STATE_READY:
            return False
        epochs = {answers[index].generation >> 32 for index in ready}
        if len(ready) < len(self.places) or len(epochs) > 1:
            return False
        for place in self.places:
            answer = answers[place.host.index]
            place.joined = answer.version
            place.begin_anew(answer.generation)
        return True

    def _first_values(self):
        """What this worker uploads if there is no model."""
        return self.simulation.start

    async def _upload(self, place, generation):
        span = self.simulation.spans[place.host.index]
        values = self._first_values()[span.start : span.end]
        checksum = frames.Checksum()
        header = pb.UploadHeader(identity=self.identity, generation=generation)
        messages = [pb.UploadModelRequest(header=header)]
        for chunk, _ in frames.encode(SparseSlice(span, None, values), chunk_bytes=128):
            checksum.add(chunk)
            messages.append(pb.UploadModelRequest(chunk=chunk))
        messages.append(pb.UploadModelRequest(commit=checksum.commit()))
        return await self._call(place, "UploadModel", messages, pb.UploadModelResponse)

    # Steps

    async def _take_step(self):
        await asyncio.sleep(self.random.choice((0.01, 0.2, self.random.random())))
        if self.simulation.is_rough and self.random.random() < 0.03:
            self.simulation.note(f"{self.name} dies")
            self.die()
            raise DeathError
        self.step += 1
        self.done += 1
        step = self.step
        for place in self.places:
            self.simulation.choose_entries(self, place.host.index, step)
        await asyncio.gather(*(self._push_and_pull(place, step) for place in self.places))

    async def _push_and_pull(self, place, step):
        answer = await self._push(place, step)
        if answer is not None and self.random.random() < 0.2:
            again = await self._push(place, step)
            same = again is None or (again.repeated_push and again.version == answer.version)
            may_be_lost = place.host.settings.fsync != "always"  # the answered one, by a loss of power
            require(same or may_be_lost, f"{self.name}'s push of step {step} was taken twice")
        await self._pull(place)

    async def _exchange(self, place, rpc, attempt, *, gives_up=()):
        """Make an attempt on an open stream, again until it succeeds; ``None`` if it is refused for such a reason."""
        while True:
            link = place.links.get(rpc)
            if link is None or link.is_cut or self.random.random() < 0.1:
                link = place.links[rpc] = self._link(place, rpc)
            try:
                return await asyncio.wait_for(attempt(link), 60.0)
            except (CutError, TimeoutError):
                pass
            except RefusedError as refusal:
                if refusal.reason in gives_up:
                    return None
                if refusal.reason in AGAIN:
                    await asyncio.sleep(refusal.retry_seconds or 0.0)
                elif refusal.reason in (*JOIN_FIRST, *PULL_FIRST):
                    await self._join_again(place)
                else:
                    raise
            link.cut()
            await asyncio.sleep(0.05 + self.random.random() / 5)

    async def _join_again(self, place):
        generation = place.generation
        await self._join()
        if place.generation != generation:
            place.base = None

    async def _push(self, place, step):
        """Push until there is an answer; ``None``: the push was refused, and its entries are lost to this shard."""
        key = (self.name, f"life-{self.life}", step)

        async def attempt(link):
            witness, shard = place.host.witness, place.host.shard
            link.on_answer = lambda raw: witness.told_of_push(shard, key)
            await link.send(*self._messages(place, step, place.base or 0))
            answer = await link.receive(pb.PushSparseResponse)
            if answer is None:
                raise CutError
            return answer

        gives_up = (*PULL_FIRST, ErrorCode.STEP_OUT_OF_ORDER)
        return await self._exchange(place, "PushSparse", attempt, gives_up=gives_up)

    def _messages(self, place, step, base_version):
        entries = self.simulation.entries[place.host.index][self.name, f"life-{self.life}", step]
        span = self.simulation.spans[place.host.index]
        header = pb.PushHeader(
            identity=self.identity,
            step=step,
            generation=place.generation,
            base_version=base_version,
            samples=1,
            plan=[pb.Group(start=span.start, length=span.length)],
            wait_seconds=self.random.choice((0.0, WAIT_SECONDS)),
        )
        messages, checksum = [pb.PushSparseRequest(header=header)], frames.Checksum()
        for chunk, _ in frames.encode(entries, chunk_bytes=self.random.choice((64, 4096))):
            checksum.add(chunk)
            messages.append(pb.PushSparseRequest(chunks=[chunk]))
        messages.append(pb.PushSparseRequest(commit=checksum.commit()))
        if self.random.random() < 0.5:  # all in one message
            whole = pb.PushSparseRequest()
            for message in messages:
                whole.MergeFrom(message)
            return [whole]
        return messages

    async def _pull(self, place):
        """Pull until there is a reply; check it against what the shard must have had; return its number of entries."""

        async def attempt(link):
            witness, shard, generation = place.host.witness, place.host.shard, place.generation

            def told(raw):
                message = pb.PullDiffResponse.FromString(raw)
                if message.HasField("header"):
                    witness.told_of_version(shard, message.header.version)

            link.on_answer = told
            request = pb.PullDiffRequest(
                identity=self.identity,
                generation=generation,
                has_base=place.base is not None,
                base_version=place.base or 0,
                acknowledged_reply=place.acknowledged,
                image=place.is_image,
                wait_seconds=self.random.choice((0.0, WAIT_SECONDS)),
            )
            await link.send(request)
            return self._apply(place, await self._receive(link), generation)

        return await self._exchange(place, "PullDiff", attempt)

    async def _receive(self, link):
        messages = []
        while True:
            message = await link.receive(pb.PullDiffResponse)
            if message is None:
                raise CutError
            messages.append(message)
            if message.HasField("commit"):
                return messages

    def _apply(self, place, messages, generation):
        header, span = messages[0].header, self.simulation.spans[place.host.index]
        reader = frames.ChunkReader(span)
        replica = torch.zeros(span.length) if place.base is None else place.replica
        for chunk in (chunk for message in messages for chunk in message.chunks):
            part = reader.read(chunk)
            where = torch.arange(part.span.length) if part.offsets is None else part.offsets
            where = where + (part.span.start - span.start)
            if header.mode == pb.REPLY_MODE_TOPK:
                replica[where] += part.values
            else:
                replica[where] = part.values
        place.replica, place.base = replica, header.version
        place.acknowledged, place.is_image = header.reply_number, header.image
        if header.mode == pb.REPLY_MODE_EXACT and not self.simulation.in_groups:
            known = place.host.witness.values.get((generation, header.version))
            require(known is not None, f"a reply of version {header.version}, which never was")
            require(bits(replica) == known, f"{self.name} pulled other values of version {header.version}")
        return sum(chunk.count for message in messages for chunk in message.chunks)

    async def _settle(self):
        """Pull until nothing comes any more, if nobody pushes any more: the replica is then the server's model."""
        others = [worker for worker in self.simulation.workers if worker is not self]
        if self.simulation.method != "asynchronous" or not all(worker.is_over for worker in others):
            return
        for place in self.places:
            for _ in range(MOST_PULLS):
                if not await self._pull(place):
                    break
            version, values = place.host.witness.states[-1][:2]
            is_same = torch.equal(place.replica, floats(values))
            require(is_same or version != place.base, f"{self.name} has other values when nothing is left to pull")

    async def _leave(self):
        self.is_over = True
        for place in self.places:
            request = pb.LeaveRequest(identity=self.identity)
            await self._call(place, "Leave", [request], pb.LeaveResponse)
        self._cut()
