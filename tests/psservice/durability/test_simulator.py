"""A shard's whole life in one thread: a virtual clock, a disk in memory, and crashes at any write or between two steps.

Each history follows from its seed alone. After each crash the shard recovers from the disk and goes on; every
acknowledged push must be in the parameters exactly once, bit for bit as a reference has them, and the one push that
was under way may be there or not. A third of the histories train in rounds, which two of three workers close.
"""

import logging
import os
import random
import secrets
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from pscore.model.sparse_slice import SparseSlice
from pscore.wire.errors import ErrorCode, Rejected
from psservice.observability.metrics import Metrics
from psservice.settings import ServerSettings
from psservice.shard.join import leave
from psservice.shard.lifecycle import end_leases, open_shard
from psservice.shard.rollback import roll_back
from psservice.storage.environment import Environment
from psservice.storage.files import StorageError
from psservice.values import Identity
from tests.psservice.durability.memory_disk import Crash, Handle, MemoryDisk
from tests.psservice.durability.test_recovery import send
from tests.psservice.service_makers import F32, bits, layout_of, segments_of
from tests.psservice.shard_makers import join, present, pull, upload

HISTORIES = int(os.environ.get("SIMULATOR_HISTORIES", "60"))
FIRST_SEED = int(os.environ.get("SIMULATOR_SEED", "0"))
LAYOUT = layout_of((40, F32), (8, F32))
LEASE_SECONDS, SNAPSHOT_SECONDS = 30.0, 100.0
STEPS, LIVES = 60, 12
MODES = ("always", "always", "interval", "never")


class BrokenPromiseError(AssertionError):
    """A promise was broken; the message has the seed and the last steps."""


class State(NamedTuple):
    """What a shard is to have: its version, its parameters, and the open round's sum and contributors."""

    version: int
    values: bytes
    total: bytes = b""
    contributors: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model):
        kept = model.export()
        names = kept.plain.get("round", {}).get("contributors", [])
        total = bits(kept.tensors["round.sum"]) if names else b""
        return cls(model.version, bits(model.current()), total, frozenset(names))

    def after(self, segment):
        """The next version."""
        return State(self.version + 1, bits(subtracted(self.values, segment)))

    def with_contribution(self, name, segment):
        total = subtracted(self.total or bytes(len(self.values)), segment, sign=1)
        return self._replace(total=bits(total), contributors=self.contributors | {name})

    def closed(self):
        mean = floats(self.total) / len(self.contributors)
        return State(self.version + 1, bits(floats(self.values) - mean))


def floats(data):
    return torch.frombuffer(bytearray(data), dtype=F32).clone()


def subtracted(data, segment, sign=-1):
    values = floats(data)
    offsets = slice(None) if segment.offsets is None else segment.offsets
    values[offsets] += sign * segment.values
    return values


class Worker:
    """One worker's side: its identity, and the push that it sends until there is an answer."""

    def __init__(self, name):
        self.identity, self.step = Identity(name, "life-1"), 0
        self.open = None  # (step, segment) of a push without an answer
        self.answered = None  # (step, segment, version) of the last push with one

    def begin_anew(self, life):
        self.identity = Identity(self.identity.worker_id, f"life-{life}")
        self.step, self.open, self.answered = 0, None, None


class Simulator:
    """One history.

    Attributes:
        state: the shard's now; ``None`` before there is a model.
        pending: what else it may have after a crash, since nobody was told of ``state`` or the next one is under way.
        past: every state of the present history.
    """

    def __init__(self, seed):
        self.seed, self.random, self.now = seed, random.Random(seed), 1000.0
        self.disk = MemoryDisk(self.random)
        self.environment = Environment(
            files=self.disk,
            monotonic=lambda: self.now,
            unix_seconds=lambda: self.now,
            random_bytes=self.random.randbytes,
            is_threaded=False,
        )
        self.fsync = self.random.choice(MODES)
        self.settings = ServerSettings(
            data_dir=Path("/data"),
            fsync=self.fsync,
            lease_seconds=LEASE_SECONDS,
            snapshot_seconds=SNAPSHOT_SECONDS,
            keep_snapshots=self.random.randint(1, 3),
            run_id="simulated",
        )
        self.workers = [Worker("anna"), Worker("bert"), Worker("cleo")]
        self.in_rounds = self.random.random() < 1 / 3
        self.state, self.pending, self.past, self.generation = None, [], [], 0
        self.engine, self.lives, self.trace = None, 0, []

    # Lives

    def run(self):
        try:
            self.start()
            for _ in range(STEPS):
                self.act()
            self.restart(power_cut=self.random.random() < 0.5)
        except BrokenPromiseError:
            raise
        except (Exception, Crash) as error:
            raise BrokenPromiseError(f"seed {self.seed}, {self.fsync}: {error!r} after {self.trace[-12:]}") from error

    def require(self, holds, what):
        if not holds:
            raise BrokenPromiseError(f"seed {self.seed}, {self.fsync}: {what} after {self.trace[-12:]}")

    def act(self):
        """One step, in which the process may die."""
        if self.random.random() < 0.2:
            self.disk.fuse = self.random.randint(0, 12)
        self.disk.full_share = 0.3 if self.random.random() < 0.1 else 0.0
        weights = {
            self.push: 12,
            self.repeat: 2,
            self.pull: 3,
            self.come_and_go: 1,
            self.wait: 3,
            self.snapshot: 1,
            self.roll_back: 0.7,
            self.stop: 0.5,
            self.kill: 1,
        }
        (step,) = self.random.choices(list(weights), list(weights.values()))
        self.trace.append(step.__name__)
        died = False
        try:
            step()
        except Crash:
            died = True
        except Rejected as error:
            self.trace.append(str(error.reason))
        if not died and not self.disk.dead and self.engine.model is not None:
            self.look()
        if died or self.disk.dead or self.engine.durability.is_broken or self.engine.apply_thread.failed:
            self.restart(power_cut=self.random.random() < 0.4)
        self.disk.fuse = None

    def restart(self, *, power_cut):
        self.trace.append("power cut" if power_cut else "killed")
        self.disk.full_share = 0.0
        self.disk.restart(power_cut=power_cut)
        self.start(power_cut=power_cut)

    def start(self, *, power_cut=False, recover="strict"):
        """Begin from the disk, at which the process may die too, and check what the shard begins with."""
        while True:
            self.disk.fuse = self.random.randint(0, 25) if self.random.random() < 0.2 else None
            try:
                self.engine = open_shard(
                    self.settings.model_copy(update={"recover": recover}),
                    torch.device("cpu"),
                    METRICS,
                    environment=self.environment,
                )
                break
            except StorageError as error:
                if self.disk.dead:
                    raise Crash from error
                # Sectors that a power cut has lost among others look like damage; nothing acknowledged may be in them.
                self.require(power_cut and recover == "strict", f"refused to start: {error}")
                self.trace.append(f"damage: {error}"[:230])
                recover = "last-good"
            except Crash:
                again = self.random.random() < 0.4
                power_cut |= again
                self.trace.append("power cut at the start" if again else "killed at the start")
                self.disk.restart(power_cut=again)
        self.disk.fuse = None
        self.check(power_cut)
        self.begin_with_a_model()

    def check(self, power_cut):
        model = self.engine.model
        if model is None:
            self.require(self.state is None, "the model is gone")
            self.pending = []
            return
        found = State.of(model)
        if found not in self.possible():
            expected = self.state and self.state.version
            self.require(power_cut and self.fsync != "always", f"version {found.version}, not {expected}")
            self.require(found in self.past, f"a version {found.version} that never was")
            self.require(model.generation != self.generation, "another history under the same generation")
        self.state = found
        self.past = [state for state in self.past if state.version <= found.version]
        self.past.append(found)
        self.pending, self.generation = [], model.generation

    def possible(self):
        """What the shard may have: a round may be closed at any time, by the death of the one that it waits for."""
        states = [state for state in (self.state, *self.pending) if state is not None]
        return [*states, *(state.closed() for state in states if state.contributors)]

    def begin_with_a_model(self):
        if self.engine.model is not None:
            return
        values = torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(self.seed))
        self.pending = [State(0, bits(values))]
        upload(self.engine, values, self.workers[0].identity, self.join(self.workers[0]).generation)
        self.acknowledged(self.pending[0])

    def join(self, worker):
        rounds = {"rounds": '{"quorum": 2, "seconds": 0, "start_workers": 1}'} if self.in_rounds else {}
        return join(self.engine, LAYOUT, worker.identity, method_settings=rounds)

    def acknowledged(self, promised):
        """Somebody was told of a state, whose round may be closed already."""
        found = State.of(self.engine.model)
        is_closed = bool(promised.contributors) and found == promised.closed()
        self.require(found == promised or is_closed, "not what was promised")
        self.state, self.pending, self.generation = found, [], present(self.engine)
        self.past += [promised, found]

    def look(self):
        """A step has changed something of which nobody was told."""
        found = State.of(self.engine.model)
        if self.state is not None and found != self.state:
            self.require(found in self.possible(), "a state from nowhere")
            self.pending.append(self.state)
            self.state = found
            self.past += [*self.pending, found]

    # Steps

    def joined(self, worker):
        """Let the shard give a worker a lease, where it has none."""
        if not self.engine.leases.is_live(worker.identity):
            self.join(worker)
            self.look()

    def push(self):
        """A push is sent until there is an answer; whatever was applied before a crash is a repeat."""
        worker = self.random.choice(self.workers)
        if worker.open is None:
            worker.step += 1
            worker.open = (worker.step, self.segment())
        self.joined(worker)
        step, segment = worker.open
        version = self.state.version
        was_applied = self.last_step(worker) == step
        if was_applied:
            promised = self.state
        elif self.in_rounds:
            promised = self.state.with_contribution(worker.identity.worker_id, segment)
        else:
            promised = self.state.after(segment)
        self.pending.append(promised)
        base = version if self.in_rounds else self.random.randint(max(0, version - 3), version)
        try:
            answer, repeated = send(self.engine, step, segment, worker.identity, base=base)
        except Rejected as error:
            if State.of(self.engine.model) == self.state and not self.disk.dead:  # no room for its record
                self.require(error.reason is ErrorCode.NOT_DURABLE, str(error))
                self.pending.pop()
            raise
        self.require(repeated == was_applied, f"repeated is {repeated}")
        if not was_applied:
            self.require(answer.version == version + 1, f"answered with version {answer.version}")
        self.acknowledged(promised)
        worker.answered, worker.open = (step, segment, answer.version), None

    def last_step(self, worker):
        return self.engine.state.pushes.find(worker.identity).step

    def segment(self):
        generator = torch.Generator().manual_seed(self.random.getrandbits(32))
        if self.random.random() < 0.1:
            return SparseSlice(self.engine.span, None, torch.randn(LAYOUT.size, generator=generator))
        count = self.random.randint(1, 12)
        offsets = torch.randperm(LAYOUT.size, generator=generator)[:count].sort().values
        return SparseSlice(self.engine.span, offsets, torch.randn(count, generator=generator))

    def repeat(self):
        """The repeat of an answered push gets the first answer, and changes nothing."""
        worker = self.random.choice(self.workers)
        if worker.answered is None or self.last_step(worker) != worker.answered[0]:
            return
        self.joined(worker)
        step, segment, version = worker.answered
        answer, repeated = send(self.engine, step, segment, worker.identity)
        self.require(repeated and answer.version == version, "a repeat was not recognised")

    def pull(self):
        worker = self.random.choice(self.workers)
        self.joined(worker)
        reply = pull(self.engine, worker.identity)
        self.look()  # a round that was due is closed first
        self.require(reply.version == self.state.version, f"pulled version {reply.version}")
        pulled = bits(torch.cat([each.values for each in segments_of(reply, self.engine.span)]))
        self.require(pulled == self.state.values, "pulled other values")
        self.pending = []

    def come_and_go(self):
        worker = self.random.choice(self.workers)
        leave(self.engine, worker.identity)
        if self.random.random() < 0.5:
            worker.begin_anew(len(self.trace))
        self.joined(worker)

    def wait(self):
        """Time passes: leases end, and snapshots are due."""
        self.now += self.random.choice((1.0, LEASE_SECONDS / 5, LEASE_SECONDS))
        for _ in range(8):  # the clock of leases counts a part of a long gap only
            self.now += self.random.choice((0.1, LEASE_SECONDS / 5))
            end_leases(self.engine)
        if self.fsync == "interval":
            force(self.engine)
        self.engine.durability.snapshot_if_due()

    def snapshot(self):
        try:
            self.engine.durability.take()
        except StorageError as error:
            self.trace.append(str(error)[:40])

    def roll_back(self):
        state = self.random.choice(self.past)
        promised = State(state.version, state.values)
        self.pending.append(promised)
        try:
            roll_back(self.engine, state.version, "")
        except Rejected:
            if not self.disk.dead:
                self.pending.pop()  # not kept any more
            raise
        self.past = [each for each in self.past if each.version <= state.version]
        self.acknowledged(promised)

    def stop(self):
        self.engine.close()
        if not self.disk.dead:
            self.restart(power_cut=False)

    def kill(self):
        raise Crash


METRICS = Metrics()


def force(shard):
    shard.durability.records.journal.force()


@pytest.fixture
def quiet(monkeypatch):
    """No log of a thousand recoveries, and the randomness of ids is the history's own."""
    logging.disable(logging.CRITICAL)
    monkeypatch.setattr(secrets, "randbits", lambda count: random.getrandbits(count))
    yield
    logging.disable(logging.NOTSET)


def simulate(count):
    """Simulate histories, from the first seed on."""
    for seed in range(FIRST_SEED, FIRST_SEED + count):
        random.seed(seed)
        Simulator(seed).run()


def test_every_acknowledged_push_survives_every_crash_once(quiet, capsys):
    began = time.monotonic()
    simulate(HISTORIES)
    rate = 60 * HISTORIES / (time.monotonic() - began)
    with capsys.disabled():
        print(f" {HISTORIES} histories, {rate:.0f} a minute ", end="")


@pytest.mark.parametrize(("where", "call"), [(Handle, "sync"), (MemoryDisk, "sync")])
def test_a_shard_that_syncs_nothing_of_a_kind_is_found_out(where, call, quiet, monkeypatch):
    monkeypatch.setattr(where, call, lambda *_: None)
    with pytest.raises(BrokenPromiseError):
        simulate(30)
