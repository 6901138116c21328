"""Power cuts: a server's disk forgets what was not synced, the server dies with it, and the next one is judged.

The data directory is on a file system of :mod:`verify.forgetful`. A cut comes at a change of that file system that is
drawn beforehand: under load, at a checkpoint, while the server starts, or after it was told to stop. The file system
kills the server before the call returns, so the server never sees an error. It then starts on what is left, in
another boot of the machine, and must keep the promise of its ``--fsync``:

* ``always``: each acknowledged push, and each version that a worker was given, is there once;
* ``interval``: so is what is older than the period;
* ``never``: what is there is a prefix of the history;
* in each mode: the model is the replay of exactly the pushes that it claims; nothing is gone from a history that goes
  on, nor after a stop; behind a stop the history goes on, unless the next start is cut; named checkpoints are there.

A start that refuses names the damage, and goes on with ``--recover last-good``, without losing more. On a journaled
file system only a server with ``never`` may refuse.
"""

import math
import random
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from verify.client import wire
from verify.cluster.servers import Servers, StartFailedError
from verify.failpoint import boots
from verify.forgetful.disk import Cut, ForgetfulDisk
from verify.forgetful.tree import Kind
from verify.model.timeline import Promise, Timeline
from verify.plan import Plan, Result
from verify.traffic.checkpoint_keeper import CheckpointKeeper
from verify.traffic.survivor import Survivor, SurvivorFailedError

_KINDS: tuple[Kind, ...] = ("any", "journaled")
PERIOD_SECONDS = 0.2
_SLACK_SECONDS = 2.0  # for the thread that syncs, on a busy machine
_SNAPSHOT_SECONDS = 0.4
_CALL_SECONDS = 30.0
_STOP_SHARE, _CHECKPOINT_SHARE, _START_SHARE = 0.06, 0.3, 0.25
_CHANGES, _CHECKPOINT_CHANGES, _START_CHANGES = 250, 30, 40  # within which a cut comes
_MOST_SECONDS = 2.0
_STOP_SECONDS = 30.0


class PowerCuts:
    """Cuts the power as often as the plan says, and judges the server behind each cut.

    Args:
        plan: what to do.
        directory: not there yet; logs and the mount go there.
        say: shows what is going on.
    """

    def __init__(self, plan: Plan, directory: Path, say: Callable[[str], None]) -> None:
        self.plan, self.directory, self.say = plan, directory, say
        self.result = Result(plan.name)
        self._rng = random.Random(f"{plan.seed} {plan.name}")
        self._initial = np.random.default_rng(plan.seed).normal(size=plan.size).astype(np.float32)
        self._timeline = Timeline(self._initial)
        self._keeper = CheckpointKeeper(random.Random(self._rng.getrandbits(32)), self._timeline)
        self._kinds: list[Kind] = ["any"]  # of each life of the disk since the server served last
        self._cuts = 0
        self._disk: ForgetfulDisk
        self._servers: Servers

    def run(self) -> Result:
        started, plan, rng = time.monotonic(), self.plan, self._rng
        self.directory.mkdir(parents=True)
        with ExitStack() as stack:
            self._disk = stack.enter_context(ForgetfulDisk(self.directory / "disk", rng.getrandbits(32)))
            self._servers = Servers(
                1,
                self._disk.path / "data",
                self.directory,
                fsync=plan.fsync,
                fsync_interval_seconds=PERIOD_SECONDS,
                snapshot_seconds=_SNAPSHOT_SECONDS,
                journal_bytes=1 << 20,
                keep_snapshots=2,
                down_mode="exact",
                lease_seconds=5,
            )
            stack.callback(self._servers.close)
            self._servers.start(0)
            self._servers.await_ready(0)
            wire.upload(self._servers.addresses, self._initial, self._uuid(), _CALL_SECONDS)
            self._timeline.generation = wire.download(self._address, _CALL_SECONDS).generation
            workers = [
                Survivor(f"worker-{number}", plan.size, random.Random(rng.getrandbits(32)), self._timeline)
                for number in range(plan.workers)
            ]
            for worker in workers:
                worker.begin(self._address)
            try:
                while self._cuts < plan.cuts and self._timeline.verdict.kept:
                    self.say(f"{self._cuts} of {plan.cuts} cuts")
                    self._cut_and_start(workers)
            except SurvivorFailedError as error:
                self.result.failures.append(str(error))
            self._servers.kill(0)
        self._timeline.verdict.cuts = self._cuts
        self.result.cuts.append(self._timeline.verdict)
        self.result.seconds = time.monotonic() - started
        return self.result

    @property
    def _address(self) -> str:
        return self._servers.addresses[0]

    def _cut_and_start(self, workers: list[Survivor]) -> None:
        """Let workers push until the power is cut, start the server on what is left, and judge it."""
        stopped = self._rng.random() < _STOP_SHARE
        cut = self._stop_and_cut(workers) if stopped else self._cut_under_load(workers)
        self._note(cut, "after a stop" if stopped else "under load")
        began = time.monotonic()
        was_cut = self._start()
        self.result.recovery_seconds.append(time.monotonic() - began)
        last = wire.download(self._address, _CALL_SECONDS)
        resent = [worker.send_again(self._address, last.generation, last.version) for worker in workers]
        allowed = {"always": 0.0, "interval": PERIOD_SECONDS + _SLACK_SECONDS, "never": math.inf}[self.plan.fsync]
        promise = Promise(cut.at, 0.0 if stopped else allowed)
        if stopped and not was_cut and last.generation != self._timeline.generation:
            self._timeline.verdict.say("a server that was stopped has begun a new history")
        self._timeline.found(last, [each for each in resent if each is not None], promise)
        self._keeper.check(self._address)

    def _cut_under_load(self, workers: list[Survivor]) -> Cut:
        at_checkpoint = self._rng.random() < _CHECKPOINT_SHARE
        pid, stop, once = self._servers.pid(0), threading.Event(), threading.Event()
        in_checkpoint = self._rng.randrange(_CHECKPOINT_CHANGES)

        def before_checkpoint() -> None:
            if at_checkpoint and not once.is_set():
                once.set()
                self._disk.arm(pid, in_checkpoint)

        self._disk.arm(pid, -1 if at_checkpoint else self._rng.randrange(_CHANGES))
        with ThreadPoolExecutor() as threads:
            lives = [threads.submit(worker.live, self._address, stop) for worker in workers]
            lives.append(threads.submit(self._keeper.keep, self._address, stop, before_checkpoint))
            try:
                cut = self._disk.await_cut(_MOST_SECONDS)
            finally:
                stop.set()
                self._servers.kill(0)
            for life in lives:
                life.result()
        return cut

    def _stop_and_cut(self, workers: list[Survivor]) -> Cut:
        stop = threading.Event()
        with ThreadPoolExecutor() as threads:
            lives = [threads.submit(worker.live, self._address, stop) for worker in workers]
            threading.Event().wait(self._rng.uniform(0.0, 0.5))
            status = self._servers.terminate(0, _STOP_SECONDS)
            stop.set()
            for life in lives:
                life.result()
        if status != 0:
            self.result.failures.append(f"a server ended with status {status} at SIGTERM")
        self._servers.kill(0)
        return self._disk.cut()

    def _start(self) -> bool:
        """Start the server, through more cuts perhaps, until it serves; return whether there were any."""
        was_cut = False
        while True:
            kind: Kind = self._rng.choice(_KINDS)
            boots.begin(self._servers.boot)
            self._disk.come_back(kind)
            said = self._servers.log_path.stat().st_size
            self._servers.start(0)
            is_cut = self._cuts + 1 < self.plan.cuts and self._rng.random() < _START_SHARE
            if is_cut:
                self._disk.arm(self._servers.pid(0), self._rng.randrange(_START_CHANGES))
            refused: StartFailedError | None = None
            try:
                self._servers.await_ready(0)
            except StartFailedError as error:
                refused = error
            cut = self._disk.disarm() if is_cut else None
            if cut is not None:
                self._servers.kill(0)
                self._note(cut, "during a start")
                self._kinds.append(kind)
                was_cut = True
                continue
            if refused is not None:
                self._go_back(refused, said)
            self._kinds = [kind]
            return was_cut

    def _go_back(self, error: StartFailedError, said: int) -> None:
        """Start with ``--recover last-good``, if the server may refuse and has named what is damaged."""
        reason = self._servers.log_path.read_bytes()[said:].decode(errors="replace")
        if self.plan.fsync != "never" and "any" not in self._kinds:
            raise StartFailedError(f"a start was refused: {reason}", error.status) from error
        if error.status != 1 or str(self._disk.path) not in reason:
            raise StartFailedError(f"a start ended with {error.status} and named no file: {reason}") from error
        self._timeline.verdict.refused += 1
        self._servers.start(0, recover="last-good")
        self._servers.await_ready(0)

    def _note(self, cut: Cut, when: str) -> None:
        self._cuts += 1
        self.result.faults["power cuts"] += 1
        self.result.faults[f"of these, {when}"] += 1
        what = cut.at_what.split(" ")[0]
        self.result.faults[f"cuts: at {what}"] += 1

    def _uuid(self) -> str:
        return str(uuid.UUID(int=self._rng.getrandbits(128)))
