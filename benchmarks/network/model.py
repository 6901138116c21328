"""Steps of workers and a server over a network, in virtual time.

What is modelled: every host has a card of the same rate, each way on its own; what is under way at the server's card
shares it equally; each way takes a delay. A push goes out in groups, each encoded while the one before is on its way
and decoded on arrival, on a core of the server; one thread applies pushes, one after the other. The pull is asked for
with the push, and answered once that is applied: its reply is built and encoded on a core of the server, and goes out
in as many pieces. What is not: TCP's slow start and losses, and headers below the message.

Without overlap: compute, push, wait for the reply, install, next. With overlap: groups leave while the backward pass
goes on, and the pull of a step runs beside the next step, at whose end it is installed: one step staler.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import numpy as np

from benchmarks.network.events import Cores, Event, Link, Process, Simulator

_WARM_STEPS, _COUNTED_STEPS = 12, 31  # a worker
BACKWARD = 2 / 3
"""Of the compute time: the backward pass does twice the work of the forward pass."""


@dataclass(frozen=True, slots=True)
class Network:
    """A network.

    Attributes:
        bytes_per_second: of every card, each way.
        delay: one way, seconds.
    """

    bytes_per_second: float = float("inf")
    delay: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplyCosts:
    """One answer to a pull.

    Attributes:
        density: of the union of what changed since the worker's last pull: where this was measured.
        size: bytes.
        build: seconds of a server's core.
        encode: seconds of a server's core.
        install: seconds of the worker, to decode and write it.
    """

    density: float
    size: float = 0.0
    build: float = 0.0
    encode: float = 0.0
    install: float = 0.0


@dataclass(frozen=True)
class Costs:
    """What one step costs, network apart; every time in seconds.

    Attributes:
        push_size: bytes of a push.
        select: to accumulate and select, on the worker.
        encode: to write the push, on the worker.
        decode: to read and check it, on a core of the server.
        apply: of the apply thread.
        call: of a push and its pull, whatever they carry.
        density: of one push, which says how the union grows with the pushes that a reply covers.
        replies: at one or more densities of the union, ascending; between them they are interpolated.
        groups: pieces of a push and of a reply.
        server_cores: that decode, build and encode.
    """

    push_size: float = 0.0
    select: float = 0.0
    encode: float = 0.0
    decode: float = 0.0
    apply: float = 0.0
    call: float = 0.0
    density: float = 1.0
    replies: Sequence[ReplyCosts] = (ReplyCosts(1.0),)
    groups: int = 1
    server_cores: int = 1

    def reply(self, pushes: int) -> ReplyCosts:
        """Return what a reply costs that covers this many pushes."""
        if pushes not in self._known:
            density = 1 - (1 - self.density) ** pushes
            at = [reply.density for reply in self.replies]
            fields = ("size", "build", "encode", "install")
            values = {
                name: float(np.interp(density, at, [getattr(reply, name) for reply in self.replies])) for name in fields
            }
            self._known[pushes] = ReplyCosts(density, **values)
        return self._known[pushes]

    @cached_property
    def _known(self) -> dict[int, ReplyCosts]:
        return {}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it, once it runs evenly.

    Attributes:
        steps_per_second: of all workers together.
        step_seconds: of one worker's step.
        up: bytes a step, to the server.
        down: bytes a step, from it.
    """

    steps_per_second: float
    step_seconds: float
    up: float
    down: float


def simulate(
    costs: Costs,
    network: Network,
    workers: int,
    compute: float,
    *,
    overlap: bool,
    jitter: float = 0.0,
    draws: int = 3,
) -> Outcome:
    """Let workers train until they run evenly, then count.

    Which part of a step a worker is at when another one needs the link hardly changes by itself. So workers begin at
    random moments of a step, and draws of them are averaged.

    Args:
        costs: of a step.
        network: between all hosts.
        workers: how many, each on a host of its own.
        compute: seconds of a step's forward and backward pass.
        overlap: of communication and compute.
        jitter: share by which the compute time of a step is longer or shorter at most.
        draws: how many.
    """
    alone = _run(costs, network, [0.0], compute, overlap, _Chance(0.0, 0))
    if workers == 1:
        return alone
    outcomes = []
    for seed in range(draws):
        chance = _Chance(jitter, seed)
        starts = [chance.draw.uniform(0, alone.step_seconds) for _ in range(workers)]
        outcomes.append(_run(costs, network, starts, compute, overlap, chance))
    return Outcome(*(fmean(getattr(outcome, name) for outcome in outcomes) for name in Outcome.__slots__))


class _Chance:
    """Compute times that vary: every second one is off by as much as the one before, the other way: the mean holds."""

    def __init__(self, jitter: float, seed: int) -> None:
        self.draw = random.Random(seed)
        self._jitter, self._owed = jitter, 0.0

    def compute(self, seconds: float) -> float:
        off = self._owed or self._jitter * self.draw.uniform(-1, 1)
        self._owed = 0.0 if self._owed else -off
        return seconds * (1 + off)


def _run(
    costs: Costs, network: Network, starts: Sequence[float], compute: float, overlap: bool, chance: _Chance
) -> Outcome:
    fleet, workers = _Fleet(costs, network, compute, chance), len(starts)
    ends: list[list[float]] = [[] for _ in starts]
    for start, moments in zip(starts, ends, strict=True):
        fleet.simulator.start(fleet.train(start, moments, overlap=overlap))
    warm, up, down = fleet.reach(workers * _WARM_STEPS)
    steps, more_up, more_down = fleet.reach(workers * (_WARM_STEPS + _COUNTED_STEPS))
    return Outcome(
        sum(1 / mean_step(moments[_WARM_STEPS // 2 :]) for moments in ends),
        fmean(mean_step(moments[_WARM_STEPS // 2 :]) for moments in ends),
        (more_up - up) / (steps - warm),
        (more_down - down) / (steps - warm),
    )


def mean_step(ends: Sequence[float]) -> float:
    """Return the mean time of a step from the moments at which steps ended."""
    return (ends[-1] - ends[0]) / (len(ends) - 1)


class _Fleet:
    def __init__(self, costs: Costs, network: Network, compute: float, chance: _Chance) -> None:
        self.simulator = Simulator()
        rate = network.bytes_per_second
        self._up = Link(self.simulator, rate, rate)
        self._down = Link(self.simulator, rate, rate)
        self._cores = Cores(self.simulator, costs.server_cores)
        self._apply_thread = Cores(self.simulator, 1)
        self._costs, self._delay, self._compute = costs, network.delay, compute
        self._chance = chance
        self._version = self._steps = 0

    def reach(self, steps: int) -> tuple[int, float, float]:
        """Go on until that many steps are done; return them, and the bytes that have gone up and down."""
        self.simulator.run(lambda: self._steps >= steps)
        return self._steps, self._up.carried, self._down.carried

    def train(self, start: float, ends: list[float], *, overlap: bool) -> Process:
        """One worker, for ever; notes when its steps end."""
        wait, worker = self.simulator.wait, _Worker()
        exchange: Event | None = None
        yield wait(start)
        while True:
            compute = self._chance.compute(self._compute)
            if not overlap:
                yield wait(compute)
                yield self.simulator.start(self._exchange(worker, 0.0))
                yield wait(worker.reply.install)
            else:
                backward = BACKWARD * compute
                yield wait(compute - backward)
                begun = self.simulator.start(self._exchange(worker, backward))
                yield wait(backward)
                if exchange is not None:
                    yield exchange
                    yield wait(worker.reply.install)
                exchange = begun
            ends.append(self.simulator.now)
            self._steps += 1

    def _exchange(self, worker: "_Worker", backward: float) -> Process:
        """A push whose groups become ready evenly over ``backward``, then its pull."""
        costs, simulator = self._costs, self.simulator
        ready = [simulator.wait(backward * (group + 1) / costs.groups) for group in range(costs.groups)]
        sent, decoded = _past(), []
        for event in ready:
            yield event
            yield simulator.wait((costs.select + costs.encode) / costs.groups)
            before, sent = sent, Event()
            decoded.append(simulator.start(self._send_group(before, sent)))
        yield from decoded
        yield self._apply_thread.work(costs.apply)
        self._version += 1
        yield simulator.wait(costs.call)
        worker.reply = reply = costs.reply(self._version - worker.base)
        worker.base = self._version
        yield self._cores.work(reply.build)
        arrived, received = _past(), []
        for _ in range(costs.groups):
            yield self._cores.work(reply.encode / costs.groups)
            before, arrived = arrived, Event()
            received.append(simulator.start(self._send_piece(before, arrived, reply.size / costs.groups)))
        yield from received

    def _send_group(self, after: Event, sent: Event) -> Process:
        costs = self._costs
        yield after
        yield self._up.transfer(costs.push_size / costs.groups)
        sent.fire()
        yield self.simulator.wait(self._delay)
        yield self._cores.work(costs.decode / costs.groups)

    def _send_piece(self, after: Event, sent: Event, size: float) -> Process:
        yield after
        yield self._down.transfer(size)
        sent.fire()
        yield self.simulator.wait(self._delay)


@dataclass(slots=True)
class _Worker:
    """The version that a worker has asked for last, and what the answer costs."""

    base: int = 0
    reply: ReplyCosts = ReplyCosts(0.0)


def _past() -> Event:
    """Return something that has happened."""
    event = Event()
    event.fire()
    return event
