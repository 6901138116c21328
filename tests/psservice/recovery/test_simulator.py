"""A shard's whole life in one thread: a virtual clock, a disk in memory, and crashes at any write or between two steps.

Each history follows from its seed alone. After each crash the shard recovers from the disk and goes on; every
acknowledged push must be in the parameters exactly once, bit for bit as a reference has them, and the one push that
was under way may be there or not.
"""

import logging
import os
import random
import secrets
import time
from pathlib import Path

import pytest
import torch

from pscore.model.segment import Segment
from pscore.wire.errors import ErrorCode, Rejected
from psservice.cluster.leases import Identity
from psservice.observability.metrics import Metrics
from psservice.settings import ServerSettings
from psservice.shard.shard import Engine
from psservice.storage.environment import Environment
from psservice.storage.files import StorageError
from psservice.storage.journal import Journal
from tests.psservice.engine_makers import join, present, pull, upload
from tests.psservice.recovery.memory_disk import Crash, Handle, MemoryDisk
from tests.psservice.recovery.test_recovery import send
from tests.psservice.service_makers import F32, bits, layout_of

SECONDS = float(os.environ.get("SIMULATOR_SECONDS", "20"))
FIRST_SEED = int(os.environ.get("SIMULATOR_SEED", "0"))
LAYOUT = layout_of((40, F32), (8, F32))
LEASE_SECONDS, SNAPSHOT_SECONDS = 30.0, 100.0
STEPS, LIVES = 60, 12
MODES = ("always", "always", "interval", "never")


class Broken(AssertionError):
    """A promise was broken; the message has the seed and the last steps."""


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
        state: (version, parameters) as far as acknowledged; ``None`` before there is a model.
        pending: what else the shard may be found with after a crash.
        past: parameters of every version of the present history.
    """

    def __init__(self, seed, rounds=False):
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
        self.state, self.pending, self.past, self.generation = None, None, {}, 0
        self.engine, self.lives, self.trace = None, 0, []

    # Lives

    def run(self):
        try:
            self.start()
            for _ in range(STEPS):
                self.act()
            self.restart(power_cut=self.random.random() < 0.5)
        except Broken:
            raise
        except (Exception, Crash) as error:
            raise Broken(f"seed {self.seed}, {self.fsync}: {error!r} after {self.trace[-12:]}") from error

    def require(self, holds, what):
        if not holds:
            raise Broken(f"seed {self.seed}, {self.fsync}: {what} after {self.trace[-12:]}")

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
        if died or self.disk.dead or self.engine.persistence.is_broken or self.engine.writer.failed:
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
                self.engine = Engine(
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
            self.pending = None
            return
        found = (model.version, bits(model.current()))
        if found == self.pending:
            self.state = found
            self.past = {version: kept for version, kept in self.past.items() if version < found[0]}
        elif found != self.state:
            self.require(
                power_cut and self.fsync != "always", f"version {found[0]}, not {self.state and self.state[0]}"
            )
            self.require(self.past.get(found[0]) == found[1], f"a version {found[0]} that never was")
            self.require(model.generation != self.generation, "another history under the same generation")
            self.past = {version: kept for version, kept in self.past.items() if version <= found[0]}
            self.state = found
        self.past[found[0]] = found[1]
        self.pending, self.generation = None, model.generation

    def begin_with_a_model(self):
        if self.engine.model is not None:
            return
        values = torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(self.seed))
        self.pending = (0, bits(values))
        who = self.workers[0].identity
        upload(self.engine, values, who, join(self.engine, LAYOUT, who).generation)
        self.acknowledged()

    def acknowledged(self):
        """The pending state is what was promised."""
        self.require(self.pending == (self.engine.model.version, bits(self.engine.model.current())), "another state")
        self.state, self.generation = self.pending, present(self.engine)
        self.past[self.state[0]] = self.state[1]
        self.pending = None

    # Steps

    def joined(self, worker):
        """Let the shard give a worker a lease, where it has none."""
        if not self.engine.membership.is_live(worker.identity):
            join(self.engine, LAYOUT, worker.identity)

    def push(self):
        """A push is sent until there is an answer; whatever was applied before a crash is a repeat."""
        worker = self.random.choice(self.workers)
        if worker.open is None:
            worker.step += 1
            worker.open = (worker.step, self.segment())
        self.joined(worker)
        step, segment = worker.open
        version, before = self.state
        theta = torch.frombuffer(bytearray(before), dtype=F32).clone()
        if segment.offsets is None:
            theta -= segment.values
        else:
            theta[segment.offsets] -= segment.values
        was_applied = self.last_step(worker) == step
        if not was_applied:
            self.pending = (version + 1, bits(theta))
        base = self.random.randint(max(0, version - 3), version)
        try:
            answer, repeated = send(self.engine, step, segment, worker.identity, base=base)
        except Rejected as error:
            # Refused behind the record: where only the disk has failed, the push is applied and not acknowledged.
            if error.reason is ErrorCode.NOT_DURABLE and self.engine.model.version == version and not self.disk.dead:
                self.pending = None
            raise
        self.require(repeated == was_applied, f"repeated is {repeated}")
        if not was_applied:
            self.require(answer.version == version + 1, f"answered with version {answer.version}")
            self.acknowledged()
        worker.answered, worker.open = (step, segment, answer.version), None

    def last_step(self, worker):
        return self.engine.membership.record(worker.identity).step

    def segment(self):
        generator = torch.Generator().manual_seed(self.random.getrandbits(32))
        if self.random.random() < 0.1:
            return Segment(self.engine.span, None, torch.randn(LAYOUT.size, generator=generator))
        count = self.random.randint(1, 12)
        offsets = torch.randperm(LAYOUT.size, generator=generator)[:count].sort().values
        return Segment(self.engine.span, offsets, torch.randn(count, generator=generator))

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
        self.require(reply.version == self.state[0], f"pulled version {reply.version}")
        self.require(bits(torch.cat([each.values for each in reply.segments])) == self.state[1], "pulled other values")

    def come_and_go(self):
        worker = self.random.choice(self.workers)
        self.engine.leave(worker.identity)
        if self.random.random() < 0.5:
            worker.begin_anew(len(self.trace))
        self.joined(worker)

    def wait(self):
        """Time passes: leases end, and snapshots are due."""
        self.now += self.random.choice((1.0, LEASE_SECONDS / 5, LEASE_SECONDS))
        for _ in range(8):  # the clock of leases counts a part of a long gap only
            self.now += self.random.choice((0.1, LEASE_SECONDS / 5))
            self.engine.end_leases()
        if self.fsync == "interval":
            force(self.engine)
        self.engine.persistence.snapshot_if_due(self.engine)

    def snapshot(self):
        try:
            self.engine.persistence.take(self.engine)
        except StorageError as error:
            self.trace.append(str(error)[:40])

    def roll_back(self):
        version = self.random.choice(sorted(self.past))
        self.pending = (version, self.past[version])
        try:
            self.engine.roll_back(version, "")
        except Rejected:
            if self.disk.dead:
                raise
            self.pending = None  # not kept any more
            raise
        self.past = {kept: values for kept, values in self.past.items() if kept <= version}
        self.acknowledged()

    def stop(self):
        self.engine.close()
        if not self.disk.dead:
            self.restart(power_cut=False)

    def kill(self):
        raise Crash


METRICS = Metrics()


def force(engine):
    engine.persistence._dir.journal.force()


@pytest.fixture
def quiet(monkeypatch):
    """No log of a thousand recoveries, and the randomness of ids is the history's own."""
    logging.disable(logging.CRITICAL)
    monkeypatch.setattr(secrets, "randbits", lambda count: random.getrandbits(count))
    yield
    logging.disable(logging.NOTSET)


def histories(seconds, first=FIRST_SEED):
    """Simulate histories for so long; return how many, and how many steps."""
    end, seed = time.monotonic() + seconds, first
    while time.monotonic() < end or seed == first:
        random.seed(seed)
        Simulator(seed).run()
        seed += 1
    return seed - first


def test_every_acknowledged_push_survives_every_crash_once(quiet, capsys):
    began = time.monotonic()
    count = histories(SECONDS)
    rate = 60 * count / (time.monotonic() - began)
    with capsys.disabled():
        print(f" {count} histories, {rate:.0f} a minute ", end="")
    assert count > 10
