"""Bits flipped in journal and snapshots while a server is down: it refuses, or begins with what it can prove.

One server runs first, with snapshots and restarts at chosen moments, and every push is acknowledged. Each flip then has
a copy of its directory. Started with ``--recover strict`` a server may refuse, and names the file, or begin with
everything that was acknowledged; with ``--recover last-good`` it begins at a version that the reference knows, bit for
bit, and in a history of its own. So a flip may pass where nothing that was acknowledged rests on the file, or where the
same can be had from another.
"""

import random
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np

from pscore.wire.v1 import parameter_server_pb2 as pb
from verify.client import wire
from verify.client.caller import Caller
from verify.cluster.servers import Servers, StartFailedError
from verify.failpoint.copies import image
from verify.failpoint.damage import Flip, draw
from verify.model.reference import judge
from verify.plan import Plan, Result, Trial
from verify.traffic import book
from verify.traffic.pusher import Pusher
from verify.validate import server_readings

_STRETCH_STEPS = 25
_SNAPSHOTS = 3
_AT_ONCE = 2
_ONCE_MORE_SHARE = 1 / 3
_CALL_SECONDS = 30.0
_EPOCH_SHIFT = 32
_SETTINGS = {"snapshot_seconds": 3600, "keep_snapshots": _SNAPSHOTS, "lease_seconds": 120, "down_mode": "exact"}


@dataclass(slots=True)
class _Findings:
    """What one copy showed: the row of the table, models by version, and what is wrong."""

    trial: Trial | None = None
    seen: list[wire.Download] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Flips:
    """Runs the plan's load on one shard, and a trial for each place where a bit can be.

    Args:
        plan: its kills are not used: the server is killed twice.
        directory: not there yet.
        say: shows what is going on.
        most: trials, drawn from all; 0 for all.
    """

    def __init__(self, plan: Plan, directory: Path, say: Callable[[str], None], most: int = 0) -> None:
        self.plan, self.directory, self.say, self._most = plan, directory, say, most
        self.result = Result(plan.name)
        self._rng = random.Random(f"{plan.seed} {plan.name}")
        self._last: list[tuple[wire.Push, int]] = []
        self._initial = np.random.default_rng(plan.seed).normal(size=plan.size).astype(np.float32)

    def run(self) -> Result:
        started = time.monotonic()
        self.directory.mkdir(parents=True)
        servers = Servers(1, self.directory / "data", self.directory, fsync=self.plan.fsync, **_SETTINGS)
        books = [self.directory / f"worker-{number}.book" for number in range(self.plan.workers)]
        self.say("pushes, snapshots and restarts")
        with servers:
            wire.upload(servers.addresses, self._initial, str(uuid.UUID(int=self._rng.getrandbits(128))), _CALL_SECONDS)
            self._load(servers, books)
        self.result.failures += [f"server log: {line}" for line in servers.errors()[:5]]
        whole = self._begin_whole(servers)
        entries = [entry for path in books for entry in book.read(path)]
        self._last = _last_pushes(entries)
        flips = draw(servers.folder(0), self._rng)
        if self._most:
            flips = self._rng.sample(flips, min(self._most, len(flips)))
        seen: dict[int, set[str]] = defaultdict(set)
        self.say(f"{len(flips)} bits flipped")
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            trials = [
                pool.submit(self._try, servers, flip, whole, once_more=self._rng.random() < _ONCE_MORE_SHARE)
                for flip in flips
            ]
            for trial in trials:
                findings = trial.result()
                self.result.failures += findings.wrong
                self.result.faults["bits flipped"] += 1
                if findings.trial is not None:
                    self.result.trials.append(findings.trial)
                for found in findings.seen:
                    seen[found.version].add(wire.digest(found.values))
        self.result.troubles = Counter(entry.line["why"] for entry in entries if entry.line["kind"] == "trouble")
        self.result.verdicts = [judge(0, entries, self._initial, whole, seen)]
        self.result.seconds = time.monotonic() - started
        return self.result

    def _load(self, servers: Servers, paths: list[Path]) -> None:
        """Push, with snapshots between; kill, so that two segments are behind the last snapshot, and kill again."""
        with ExitStack() as stack:
            pushers = []
            for path in paths:
                kept = stack.enter_context(closing(book.Book(path)))
                rng = random.Random(self._rng.getrandbits(64))
                caller = stack.enter_context(closing(Caller(servers.addresses, self.plan.size, rng, kept.trouble)))
                pushers.append(Pusher(path.stem, kept, caller, rng, pause=0.0))

            def push() -> None:
                for _ in range(_STRETCH_STEPS):
                    for pusher in pushers:
                        pusher.step(threading.Event())

            for _ in range(_SNAPSHOTS - 1):
                push()
                _take_snapshot(servers.addresses[0])
            push()
            servers.kill(0)
            servers.start(0)
            servers.await_ready(0)
            push()
            servers.kill(0)
        self.result.faults["servers killed"] += 2

    def _begin_whole(self, servers: Servers) -> wire.Download:
        """Begin from a copy in which nothing is flipped; what it has is everything."""
        with closing(_copy(servers, self.directory / "whole")) as copy:
            copy.start(0, recover="strict")
            copy.await_ready(0)
            return wire.download(copy.addresses[0], _CALL_SECONDS)

    def _try(self, servers: Servers, flip: Flip, whole: wire.Download, *, once_more: bool) -> _Findings:
        findings = _Findings()
        directory = self.directory / f"flip-{flip.place.replace(' ', '-').replace(',', '')}"
        with closing(_copy(servers, directory)) as copy:
            flip.do(copy.folder(0))
            try:
                strict = self._begin_strict(copy, flip, whole, findings)
                last_good = "" if strict else self._begin_last_good(copy, whole, findings, once_more=once_more)
            except (StartFailedError, grpc.RpcError) as error:
                findings.wrong.append(str(error))
                return findings
            findings.trial = Trial(f"{flip.place} (byte {flip.byte}, bit {flip.bit})", strict or "refuses", last_good)
            findings.wrong = [f"{findings.trial.place}: {wrong}" for wrong in findings.wrong]
        return findings

    def _begin_strict(self, copy: Servers, flip: Flip, whole: wire.Download, findings: _Findings) -> str:
        """Begin with ``--recover strict``; return what it did, empty where it refused."""
        try:
            found = _begin(copy, "strict")
        except StartFailedError as error:
            if error.status is None:
                raise
            if not copy.has_said(str(flip.file)):
                findings.wrong.append(f"refused without naming {flip.file}")
            return ""
        findings.seen.append(found)
        if found.version != whole.version:
            findings.wrong.append(f"strict begins at version {found.version} of {whole.version}")
            return f"{found.version} of {whole.version}"
        self._check_rest(copy, whole, findings)
        return "has everything"

    def _check_rest(self, copy: Servers, whole: wire.Download, findings: _Findings) -> None:
        """Beside the model: the history, the samples, and what is remembered of pushes, for their repeats."""
        if findings.seen[-1].generation != whole.generation:
            findings.wrong.append("strict begins with everything, in another history")
        if (samples := server_readings.status(copy.addresses[0]).samples) != whole.version:
            findings.wrong.append(f"strict begins with {samples} samples, not {whole.version}")
        with closing(Caller(copy.addresses, self.plan.size, random.Random(0), lambda why: None)) as caller:
            for push, version in self._last:
                caller.join(0, push.worker, push.incarnation, push.run)
                answer = caller.settle(push)
                if (answer.version, answer.repeated_push) != (version, True):
                    findings.wrong.append(f"a repeat of version {version} is answered with version {answer.version}")

    def _begin_last_good(self, copy: Servers, whole: wire.Download, findings: _Findings, *, once_more: bool) -> str:
        """Begin with ``--recover last-good``, and perhaps once more as ever, from what that has left."""
        found = _begin(copy, "last-good")
        findings.seen.append(found)
        if found.version > whole.version:
            findings.wrong.append(f"last-good begins at version {found.version}, beyond {whole.version}")
        if found.generation >> _EPOCH_SHIFT != whole.generation >> _EPOCH_SHIFT:
            findings.wrong.append("last-good begins in another epoch")
        if found.generation == whole.generation and found.version != whole.version:
            findings.wrong.append(f"last-good begins at version {found.version} of {whole.version}, in the old history")
        if once_more:
            copy.kill(0)
            again = _begin(copy, "strict")
            findings.seen.append(again)
            if (again.version, again.generation) != (found.version, found.generation):
                findings.wrong.append(f"after last-good a restart begins at {again.version}, not at {found.version}")
        history = "the same" if found.generation == whole.generation else "a new"
        return f"{found.version} of {whole.version}, {history} history"


def _begin(copy: Servers, recover: str) -> wire.Download:
    copy.start(0, recover=recover)
    copy.await_ready(0)
    return wire.download(copy.addresses[0], _CALL_SECONDS)


def _last_pushes(entries: list[book.Entry]) -> list[tuple[wire.Push, int]]:
    """Return the last push of each worker, with the version that it was answered."""
    pushes = {entry.push.incarnation: entry.push for entry in entries if entry.push is not None}
    versions = {entry.name: entry.line["version"] for entry in entries if entry.line["kind"] == "answered"}
    return [(push, versions[push.incarnation, push.shard, push.step]) for push in pushes.values()]


def _copy(servers: Servers, directory: Path) -> Servers:
    """Return servers of an image of a data directory, not started."""
    image(servers.data_dir, directory / "data")
    return Servers(1, directory / "data", directory, **_SETTINGS)


def _take_snapshot(address: str) -> None:
    with closing(wire.Line(address)) as line:
        line.stub.TakeSnapshot(pb.TakeSnapshotRequest(), timeout=_CALL_SECONDS)
