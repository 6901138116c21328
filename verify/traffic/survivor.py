"""A worker that outlives its server: it pushes and pulls while the server answers, and sends again behind a cut."""

import random
import threading
import time
import uuid

import grpc
import numpy as np

from pscore.wire.v1 import parameter_server_pb2 as pb
from verify.client.replica import Replica
from verify.client.wire import Line, Offsets, Push, join_request, reason_of
from verify.model.timeline import Resent, Timeline

_CALL_SECONDS, _AGAIN_SECONDS, _MOST_SECONDS = 10.0, 0.02, 60.0
_MOST_ENTRIES, _DENSE_SHARE, _PULL_SHARE = 1500, 0.01, 0.1
_PAUSE_SECONDS = 0.01
_LEASE_LOST, _HISTORY_ENDED = "LEASE_EXPIRED", "STALE_GENERATION"
_TRY_AGAIN = frozenset({"", "BUSY", "DRAINING", "NOT_DURABLE", "WORKER_ALIVE"})


class SurvivorFailedError(Exception):
    """The server refuses what it must not refuse, or does not answer."""


class Survivor:
    """One worker of one shard; its calls are made by one thread at a time.

    Args:
        name: the worker's.
        size: elements of the model.
        rng: of everything that is drawn.
        timeline: is told of every push, answer and pulled model.
    """

    def __init__(self, name: str, size: int, rng: random.Random, timeline: Timeline) -> None:
        self._name, self._size, self._rng, self._timeline = name, size, rng, timeline
        self._noise = np.random.default_rng(rng.getrandbits(64))
        self._incarnation = str(uuid.UUID(int=rng.getrandbits(128)))
        self._run, self._step, self._base = "", 0, 0
        self._last: Push | None = None
        self._is_answered = True
        self._replica = Replica(0, self._incarnation)

    def begin(self, address: str) -> None:
        """Join the run, and push once."""
        line = Line(address)
        try:
            self._join(line)
            self._draw()
            while not self._push(line):
                time.sleep(_AGAIN_SECONDS)
        finally:
            line.close()

    def send_again(self, address: str, generation: int, version: int) -> Resent | None:
        """Send the last push again behind a cut, answered or not; ``None`` if there is none.

        ``generation`` and ``version`` are the server's.
        """
        line = Line(address)
        try:
            resent = self._resent(line)
        finally:
            line.close()
        if generation != self._replica.generation:
            self._replica = Replica(0, self._incarnation)
            self._replica.begin(0, self._size, generation)
            self._base = version
        return resent

    def live(self, address: str, stop: threading.Event) -> None:
        """Push and pull until told to stop: from the cut on no call comes through."""
        line = Line(address)
        try:
            while not stop.is_set():
                if self._is_answered:
                    self._draw()
                if not self._push(line):
                    stop.wait(_AGAIN_SECONDS)
                    continue
                if self._rng.random() < _PULL_SHARE:
                    self._pull(line)
                stop.wait(self._rng.uniform(0, 2 * _PAUSE_SECONDS))
        finally:
            line.close()

    @property
    def _identity(self) -> pb.WorkerIdentity:
        return pb.WorkerIdentity(run_id=self._run, worker_id=self._name, incarnation=self._incarnation)

    def _join(self, line: Line) -> None:
        request = join_request(self._name, self._incarnation, self._run, self._size, 0, 1)
        answer = line.stub.Join(request, timeout=_CALL_SECONDS)
        self._run = answer.run_id
        if not self._replica.generation:
            self._replica.begin(0, self._size, answer.generation)

    def _resent(self, line: Line) -> Resent | None:
        push, end = self._last, time.monotonic() + _MOST_SECONDS
        while push is not None:
            try:
                answer = next(line.stub.PushSparse(iter(push.messages()), timeout=_CALL_SECONDS))
            except grpc.RpcError as error:
                reason = reason_of(error)
                if reason == _HISTORY_ENDED:
                    self._is_answered = True  # there is nothing more to hear
                    return Resent(push, 0, False, time.monotonic())
                if reason == _LEASE_LOST:
                    self._join(line)
                elif reason not in _TRY_AGAIN or time.monotonic() > end:
                    raise SurvivorFailedError(
                        f"push {push.step} of {self._name}: {reason} {error.details()}"
                    ) from error
                time.sleep(_AGAIN_SECONDS)
                continue
            self._is_answered, self._base = True, answer.version
            return Resent(push, answer.version, answer.repeated_push, time.monotonic())
        return None

    def _draw(self) -> None:
        self._step += 1
        offsets: Offsets | None = None
        count = self._size
        if self._rng.random() >= _DENSE_SHARE:
            count = self._rng.randint(1, self._rng.choice((20, 200, _MOST_ENTRIES)))
            offsets = np.sort(self._noise.choice(self._size, count, replace=False)).astype(np.uint32)
        self._last = Push(
            run=self._run,
            worker=self._name,
            incarnation=self._incarnation,
            shard=0,
            step=self._step,
            generation=self._replica.generation,
            base=self._base,
            start=0,
            length=self._size,
            offsets=offsets,
            values=self._noise.normal(size=count).astype(np.float32),
        )
        self._is_answered = False
        self._timeline.sent()

    def _push(self, line: Line) -> bool:
        """Send the last push; return whether it was answered."""
        push = self._last
        assert push is not None
        try:
            answer = next(line.stub.PushSparse(iter(push.messages()), timeout=_CALL_SECONDS))
        except grpc.RpcError as error:
            self._after(line, error)
            return False
        self._timeline.answered(push, answer.version, time.monotonic())
        self._is_answered, self._base = True, answer.version
        return True

    def _pull(self, line: Line) -> None:
        try:
            reply = self._replica.ask(self._identity, line, _CALL_SECONDS)
        except grpc.RpcError as error:
            self._after(line, error)
            return
        self._replica.apply(reply)
        self._timeline.seen(reply.version, reply.digest, time.monotonic())
        self._base = max(self._base, reply.version)

    def _after(self, line: Line, error: grpc.RpcError) -> None:
        """Do what lets the next call through, if there is anything."""
        reason = reason_of(error)
        if reason == _LEASE_LOST:
            try:
                self._join(line)
            except grpc.RpcError as refused:
                self._after(line, refused)
        elif reason not in _TRY_AGAIN:
            raise SurvivorFailedError(f"{self._name}: {reason} {error.details()}") from error
