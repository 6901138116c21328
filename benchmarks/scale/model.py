"""Workers and shards in virtual time. docs/evidence/scale.md has the equations; what is not modelled stands there too.

Shards of one cluster are alike, and what a worker sends to one it sends to all at the same moment. So one shard may
stand for all of them: its share of a push, with the worker's card shared by as many parts as there are shards.
``Cluster.each_shard`` simulates every one of them instead; tests and the report compare the two.
"""

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from benchmarks.harness.load_generator import THINK_SPREAD
from benchmarks.scale.costs import Costs
from benchmarks.scale.events import Event, Link, Process, Simulator
from benchmarks.scale.fits import Line
from benchmarks.scale.replies import Replies, Reply
from pscore.wire.frames import DEFAULT_CHUNK_BYTES

RENEWAL_SECONDS = 5.0
"""Between two renewals of a worker's lease: a third of its life by default."""

_RENEWAL_TICK = 1.0
_SLACK = 1e-9  # of all places, for what floating point has lost
_ENTRY_BYTES = 24  # what the server charges an entry of a push with, decoded and merged, beside the message twice


@dataclass(frozen=True, slots=True)
class Cluster:
    """What is simulated.

    Attributes:
        elements: of the model.
        density: of a push, and of a top-k reply.
        workers: machines that train.
        shards: server machines.
        compute: mean seconds of a step beside communication, uniform within half of that.
        server_rate: bytes a second of a server's card, each way.
        worker_rate: likewise of a worker's.
        delay: seconds, one way.
        server_cores: of each server.
        down_mode: ``auto``, ``exact`` or ``topk``.
        overlap: whether a step's exchange runs beside the next step.
        inflight_bytes: that calls may occupy at a server.
        replay: on one machine with clients that replay what is encoded (:mod:`benchmarks.harness.load_generator`);
            ``server_cores`` are then all that there are, and ``client_processes`` share them with the servers.
        client_processes: see there.
        each_shard: whether every shard is simulated.
    """

    elements: int
    density: float
    workers: int
    shards: int = 1
    compute: float = 1.0
    server_rate: float = float("inf")
    worker_rate: float = float("inf")
    delay: float = 0.0
    server_cores: int = 16
    down_mode: str = "auto"
    overlap: bool = False
    inflight_bytes: float = 2.0**30
    replay: bool = False
    client_processes: int = 2
    each_shard: bool = False

    @property
    def part(self) -> float:
        """Elements of a shard."""
        return self.elements / self.shards


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it. A step is one of one worker, with all shards.

    Attributes:
        steps_per_second: of all workers.
        step_seconds: of one.
        staleness: mean versions that a shard has moved between a worker's pull and its push.
        staleness_90: 90th percentile.
        sent: bytes a step, up, to all shards.
        received: bytes a step, down.
        push_seconds: from the first byte until the last shard has applied its part.
        pull_seconds: from then until the last reply is installed.
        used: share of each resource of a server that is busy.
        topk: share of replies that were top-k.
    """

    steps_per_second: float
    step_seconds: float
    staleness: float
    staleness_90: float
    sent: float
    received: float
    push_seconds: float
    pull_seconds: float
    used: dict[str, float]
    topk: float


class Pool:
    """Places that are taken and given back, first come first served; one who asks for too much gets all of it."""

    def __init__(self, simulator: Simulator, places: float) -> None:
        self._simulator, self._places, self._free = simulator, places, places
        self._queue: deque[tuple[float, Event]] = deque()
        self._since = self._busy = 0.0

    def take(self, places: float = 1.0) -> Event:
        """Return the moment at which these places are ours."""
        event = Event()
        self._queue.append((min(places, self._places), event))
        self._serve()
        return event

    def give(self, places: float = 1.0) -> None:
        self._note()
        self._free += min(places, self._places)
        self._serve()

    def used(self) -> float:
        """Return the sum over time of the places taken."""
        self._note()
        return self._busy

    @property
    def places(self) -> float:
        """How many there are."""
        return self._places

    @property
    def is_free(self) -> bool:
        """Whether nobody has any of it, or waits."""
        return not self._queue and self._free >= self._places

    def _serve(self) -> None:
        while self._queue and self._queue[0][0] <= self._free + _SLACK * self._places:
            self._note()
            places, event = self._queue.popleft()
            self._free -= places
            if event.is_awaited:  # who goes on may give and take at once, and so may the next one, ever deeper
                self._simulator.call(0.0, event.fire)
            else:
                event.fire()

    def _note(self) -> None:
        self._busy += (self._places - self._free) * (self._simulator.now - self._since)
        self._since = self._simulator.now


@dataclass(slots=True)
class _Place:
    """What a shard knows of a worker, and the worker of the shard."""

    base: int = 0
    in_topk: bool = False
    calm: int = 0


class _Shard:
    def __init__(self, simulator: Simulator, cluster: Cluster, costs: Costs, cpu: Link) -> None:
        self.simulator, self.cluster, self.costs, self.cpu = simulator, cluster, costs, cpu
        cap = cluster.worker_rate / cluster.shards
        self.up, self.down = (Link(simulator, cluster.server_rate, cap) for _ in range(2))
        self.interpreter, self.apply_thread = Pool(simulator, 1), Pool(simulator, 1)
        self.room = Pool(simulator, cluster.inflight_bytes)
        self.version = 0
        self.places = [_Place() for _ in range(cluster.workers)]
        self.replies = Replies(costs, cluster.part, cluster.density, cluster.down_mode, random=cluster.replay)
        entries = cluster.part * cluster.density
        self.push_bytes = costs.push_frame + costs.sparse_bytes(entries, cluster.density)
        self._charge = 2 * self.push_bytes + _ENTRY_BYTES * entries
        serially, freely = costs.split(costs.decode, entries, "decode")
        self._push_serial = costs.push_call.fixed + serially
        self._push_free = costs.push_call.each * self.push_bytes + freely
        self._apply = costs.apply(entries)

    def exchange(
        self, worker: int, ready: Event, staleness: list[int], applied: list[float], replies: list[Reply]
    ) -> Process:
        """Take one part of a push, whose end is written when ``ready`` fires, and answer the pull behind it.

        The three lists get the push's staleness, the moment at which it was applied, and the reply.
        """
        simulator, costs, place = self.simulator, self.costs, self.places[worker]
        yield self.room.take(self._charge)
        arrival = self.up.transfer(self.push_bytes)
        ahead = max(0.0, 1 - DEFAULT_CHUNK_BYTES / self.push_bytes)
        if ahead:
            yield from self._work(ahead * self._push_serial, ahead * self._push_free)
        yield ready
        yield arrival
        if self.cluster.delay or costs.idle:
            yield simulator.wait(self.cluster.delay + costs.idle / 2)
        yield from self._work((1 - ahead) * self._push_serial, (1 - ahead) * self._push_free)
        yield self.apply_thread.take()
        yield self.cpu.transfer(self._factor() * self._apply)
        self.apply_thread.give()
        staleness.append(self.version - place.base)
        applied.append(simulator.now)
        self.version += 1
        self.room.give(self._charge)

        window = self.version - place.base
        reply = self.replies.after(window, place)
        yield from self._work(costs.pull_call.fixed + reply.build[0], reply.build[1])
        if not reply.topk:  # what was pushed meanwhile is in it too
            yield self.apply_thread.take()
            self.apply_thread.give()
            reply = self.replies.exact(self.version - place.base)
        place.base = self.version
        yield self.room.take(reply.charge)
        ahead = max(0.0, 1 - DEFAULT_CHUNK_BYTES / reply.size)
        serially, freely = reply.encode
        freely += costs.pull_call.each * reply.size
        yield from self._work((1 - ahead) * serially, (1 - ahead) * freely)
        departure = self.down.transfer(reply.size)
        if ahead:
            yield from self._work(ahead * serially, ahead * freely)
        yield departure
        self.room.give(reply.charge)
        if self.cluster.delay or costs.idle:
            yield simulator.wait(self.cluster.delay + costs.idle / 2)
        replies.append(reply)

    def renew(self) -> Process:
        """Renew everybody's lease, for ever."""
        each = self.costs.renewal * self.cluster.workers * _RENEWAL_TICK / RENEWAL_SECONDS
        while True:
            yield self.simulator.wait(_RENEWAL_TICK)
            yield from self._work(each, 0.0)

    def _work(self, serially: float, freely: float) -> Iterator[Event]:
        """Compute: with the interpreter's lock, then without."""
        factor = self._factor()
        if serially > 0:
            handover = 0.0 if self.interpreter.is_free else self.costs.handover
            yield self.interpreter.take()
            yield self.cpu.transfer(factor * serially + handover)
            self.interpreter.give()
        if freely > 0:
            yield self.cpu.transfer(factor * freely)

    def _factor(self) -> float:
        """Return how much longer a work takes now, by what runs beside it."""
        others = min(1.0, self.cpu.under_way / max(1, self.cluster.server_cores - 1))
        return 1 + self.costs.crowding * others


@dataclass(slots=True)
class _Record:
    """What is added up once the cluster runs evenly."""

    staleness: list[int] = field(default_factory=list)
    pushes: list[float] = field(default_factory=list)
    pulls: list[float] = field(default_factory=list)
    topk: int = 0
    replies: int = 0


class _Fleet:
    def __init__(self, cluster: Cluster, costs: Costs, seed: int) -> None:
        self.simulator, self.cluster, self.costs = Simulator(), cluster, costs
        self._draw = random.Random(seed)
        count = cluster.shards if cluster.each_shard else 1
        one = Link(self.simulator, cluster.server_cores, 1.0)
        self.cpus = [one] * count
        if not cluster.replay:
            self.cpus = [one, *(Link(self.simulator, cluster.server_cores, 1.0) for _ in range(count - 1))]
        self.shards = [_Shard(self.simulator, cluster, costs, cpu) for cpu in self.cpus]
        self._stand_for = cluster.shards / count  # shards that each simulated one stands for
        self._clients = [Pool(self.simulator, 1) for _ in range(cluster.client_processes)]
        self.steps = 0
        self.record = _Record()

    def train(self, worker: int) -> Process:
        wait, compute = self.simulator.wait, self.cluster.compute
        yield wait(self._draw.uniform(0, compute))
        exchange: Event | None = None
        while True:
            yield wait(compute * self._draw.uniform(1 - THINK_SPREAD, 1 + THINK_SPREAD))
            if exchange is not None:
                yield exchange
            begun = self.simulator.start(self._exchange(worker))
            if self.cluster.overlap:
                exchange = begun
            else:
                yield begun

    def _exchange(self, worker: int) -> Process:
        simulator, costs, elements = self.simulator, self.costs, self.cluster.elements
        record, staleness, began = self.record, list[int](), simulator.now
        size = self.shards[0].push_bytes * self.cluster.shards
        if self.cluster.replay:
            yield from self._client(worker, costs.client_push, size)
            ready = _past()
        else:
            entries = elements * self.cluster.density
            ready = simulator.wait(costs.worker_select(elements) + costs.worker_encode(entries))
        replies: list[Reply] = []
        applied: list[float] = []
        yield from self._all([shard.exchange(worker, ready, staleness, applied, replies) for shard in self.shards])
        pushed = max(applied)
        if self.cluster.replay:
            size = self._stand_for * sum(reply.size for reply in replies)
            yield from self._client(worker, costs.client_pull, size)
        else:
            install = costs.worker_install(self._stand_for * sum(reply.entries for reply in replies))
            if install > 0:
                yield simulator.wait(install)
        self.steps += 1
        record.staleness += staleness
        record.pushes.append(pushed - began)
        record.pulls.append(simulator.now - pushed)
        record.topk += sum(reply.topk for reply in replies)
        record.replies += len(replies)

    def _all(self, parts: Sequence[Process]) -> Iterator[Event]:
        if len(parts) == 1:
            yield from parts[0]
            return
        yield from [self.simulator.start(part) for part in parts]

    def _client(self, worker: int, cost: Line, size: float) -> Iterator[Event]:
        process = self._clients[worker % len(self._clients)]
        shards = self.cluster.shards
        yield process.take()
        yield self.cpus[0].transfer(shards * cost.fixed + cost.each * size)
        process.give()

    def state(self) -> np.ndarray:
        """Return what has been added up so far: bytes up and down, and the use of each resource."""
        shards = self.shards
        sums = [
            sum(shard.up.carried for shard in shards),
            sum(shard.down.carried for shard in shards),
            sum(cpu.carried for cpu in {id(cpu): cpu for cpu in self.cpus}.values()),
            sum(shard.interpreter.used() for shard in shards),
            sum(shard.apply_thread.used() for shard in shards),
            sum(shard.room.used() for shard in shards),
        ]
        return np.array([self.simulator.now, self.steps, *sums])


RESOURCES = ("card in", "card out", "cores", "interpreter", "apply thread", "memory of calls")
"""Of a server, as :attr:`Outcome.used` names them."""


def simulate(cluster: Cluster, costs: Costs, *, seed: int = 0, warm: int = 4, counted: int = 6) -> Outcome:
    """Let workers train until they run evenly, then count.

    Args:
        cluster: what is simulated.
        costs: of its parts.
        seed: of compute times and of where in a step each worker begins.
        warm: steps of each worker that are not counted.
        counted: steps of each worker that are, on average; at least 200 in all.
    """
    fleet = _Fleet(cluster, costs, seed)
    for worker in range(cluster.workers):
        fleet.simulator.start(fleet.train(worker))
    if costs.renewal and not cluster.replay:
        for shard in fleet.shards:
            fleet.simulator.start(shard.renew())
    first = cluster.workers * warm
    fleet.simulator.run(lambda: fleet.steps >= first)
    before, fleet.record = fleet.state(), _Record()
    last = first + max(200, cluster.workers * counted)
    fleet.simulator.run(lambda: fleet.steps >= last)
    return _outcome(fleet, cluster, before)


def _outcome(fleet: _Fleet, cluster: Cluster, before: np.ndarray) -> Outcome:
    seconds, steps, up, down, *busy = map(float, fleet.state() - before)
    servers, shard, record = len(fleet.shards), fleet.shards[0], fleet.record
    share = cluster.shards / servers
    hosts = 1 if cluster.replay else servers
    places = [hosts * cluster.server_cores, servers, servers, servers * shard.room.places]
    used = [up / servers / cluster.server_rate / seconds, down / servers / cluster.server_rate / seconds]
    used += [value / seconds / place for value, place in zip(busy, places, strict=True)]
    rate = steps / seconds
    return Outcome(
        steps_per_second=rate,
        step_seconds=cluster.workers / rate,
        staleness=fmean(record.staleness),
        staleness_90=float(np.percentile(record.staleness, 90)),
        sent=share * up / steps,
        received=share * down / steps,
        push_seconds=fmean(record.pushes),
        pull_seconds=fmean(record.pulls),
        used=dict(zip(RESOURCES, used, strict=True)),
        topk=record.topk / record.replies,
    )


def _past() -> Event:
    event = Event()
    event.fire()
    return event
