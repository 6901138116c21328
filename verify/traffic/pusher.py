"""A worker in the raw protocol: pushes noise for ever, keeps book of it, and holds a replica by pulls.

It resends what is in doubt until it is answered; now and then it resends what has been answered, on a connection of
its own, sends a push twice at once, or throws a reply away and asks again. It runs as a process, ``python -m
verify.traffic.pusher``.
"""

import argparse
import os
import random
import signal
import sys
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np

from pscore.wire.v1 import parameter_server_pb2 as pb
from verify.client.caller import DEADLINE_SECONDS, Caller, LeaseLostError, RefusedError, settle_for, what_failed
from verify.client.replica import Replica
from verify.client.wire import Floats, Line, Offsets, Push, Reply, reason_of
from verify.traffic.book import Book, in_doubt, read

_REPEAT_SHARE, _TWICE_SHARE = 0.10, 0.05
_THROWN_AWAY_SHARE = 0.10
"""Of replies that came, and are asked for again as if they had been lost."""
_LAST_PULLS = 150
_PULL_SHARES = 0.04, 0.25, 0.5
"""How often a life pulls: one that does so rarely asks for what changed before a restart and before a snapshot."""
_INHERIT_SHARE = 0.6
"""How often a new life settles its predecessor's doubts itself, instead of leaving them to the end."""


class Pusher:
    """One life of a worker.

    Args:
        name: the worker's.
        book: this life's.
        caller: to the shards.
        rng: of everything that is drawn.
        pause: mean seconds between two pushes.
    """

    def __init__(self, name: str, book: Book, caller: Caller, rng: random.Random, pause: float) -> None:
        """Join every shard, the coordinator last."""
        self._name, self._book, self._caller, self._rng, self._pause = name, book, caller, rng, pause
        self._noise = np.random.default_rng(rng.getrandbits(64))
        self._incarnation = str(uuid.UUID(int=rng.getrandbits(128)))
        self._run, self._step = "", 0
        self._pull_share = rng.choice(_PULL_SHARES)
        self._shards = [Replica(i, self._incarnation) for i in range(len(caller.lines))]
        for shard in reversed(self._shards):
            joined = caller.join(shard.index, name, self._incarnation)
            self._run = joined.run_id
            status = caller.insist(
                shard.index, lambda line, timeout: line.stub.GetStatus(pb.GetStatusRequest(), timeout=timeout)
            )
            shard.begin(status.start, status.length, joined.generation)
            self._down_mode = joined.settings.down_mode

    @property
    def identity(self) -> pb.WorkerIdentity:
        return pb.WorkerIdentity(run_id=self._run, worker_id=self._name, incarnation=self._incarnation)

    def step(self, stop: threading.Event) -> None:
        """Push one part to every shard, and perhaps pull."""
        self._step += 1
        for shard in self._shards:
            self._push(shard)
            if self._rng.random() < self._pull_share:
                self._pull(shard)
        stop.wait(self._rng.uniform(0, 2 * self._pause))

    def leave(self) -> None:
        """Pull until the replica is the model, in auto mode until the server needs no image of it, and leave."""
        for shard in self._shards:
            for _ in range(_LAST_PULLS):
                reply = self._pull(shard)
                nothing_owed = reply.topk and not reply.values.any()
                if not reply.image or (nothing_owed and self._down_mode == pb.DOWN_MODE_TOPK):
                    break
            self._caller.leave(shard.index, self.identity)

    def _push(self, shard: Replica) -> None:
        offsets, values = self._draw(len(shard.values))
        push = Push(
            run=self._run,
            worker=self._name,
            incarnation=self._incarnation,
            shard=shard.index,
            step=self._step,
            generation=shard.generation,
            base=shard.version or 0,
            start=shard.start,
            length=len(shard.values),
            offsets=offsets,
            values=values,
        )
        self._book.sent(push)
        twice = self._rng.random() < _TWICE_SHARE
        rival = self._send_beside(push) if twice else None
        try:
            self._note(push, self._caller.settle(push))
            if rival is not None:
                self._note_rival(push, rival)
            if self._rng.random() < _REPEAT_SHARE:
                self._caller.lines[shard.index].renew()
                self._note(push, self._caller.settle(push))
        except RefusedError as error:
            self._book.refused(push, str(error))
        finally:
            if rival is not None:
                rival[0].close()

    def _send_beside(self, push: Push) -> "tuple[Line, Iterator[pb.PushSparseResponse]]":
        line = Line(self._caller.lines[push.shard].address)
        return line, line.stub.PushSparse(iter(push.messages()), timeout=DEADLINE_SECONDS)

    def _note_rival(self, push: Push, rival: "tuple[Line, Iterator[pb.PushSparseResponse]]") -> None:
        try:
            self._note(push, next(rival[1]))
        except grpc.RpcError as error:  # its twin was answered: nothing is in doubt
            self._book.trouble(reason_of(error) or what_failed(error))

    def _note(self, push: Push, answer: pb.PushSparseResponse) -> None:
        self._book.answered(push, answer.version, answer.staleness, repeated=answer.repeated_push)

    def _draw(self, length: int) -> tuple[Offsets | None, Floats]:
        """Draw a push: mostly few entries, at times thousands, all of them, none, or values at the edge of fp32."""
        kind, noise = self._rng.random(), self._noise
        if kind < 0.003:
            return None, noise.normal(0, 1e-3, length).astype(np.float32)
        if kind < 0.03:
            return np.empty(0, np.uint32), np.empty(0, np.float32)
        count = int(noise.integers(length // 8, length // 2)) if kind < 0.08 else int(noise.integers(1, 400))
        offsets = np.sort(noise.choice(length, min(count, length), replace=False)).astype(np.uint32)
        values = noise.normal(0, 1e-2, len(offsets)).astype(np.float32)
        if kind > 0.9:  # denormals, signed zeros, and magnitudes that swallow what was there
            values = np.where(noise.random(len(values)) < 0.3, values * np.float32(1e-38), values)
            values[noise.random(len(values)) < 0.2] = -0.0
            values[noise.random(len(values)) < 0.01] *= np.float32(1e6)
        return offsets, values.astype(np.float32)

    def _pull(self, shard: Replica) -> Reply:
        while True:
            try:
                return self._pull_once(shard)
            except LeaseLostError:
                self._book.trouble("LEASE_EXPIRED")
                self._caller.join(shard.index, self._name, self._incarnation, self._run)

    def _pull_once(self, shard: Replica) -> Reply:
        while True:
            reply = self._caller.insist(shard.index, lambda line, timeout: shard.ask(self.identity, line, timeout))
            thrown_away = self._rng.random() < _THROWN_AWAY_SHARE
            self._book.pulled(replace(reply, applied=not thrown_away))
            if not thrown_away:
                shard.apply(reply)
                return reply


def inherited(directory: Path, name: str, life: int) -> list[Push]:
    """Return what the life before this one left in doubt: the last one that got as far as to take over."""
    for before in range(life - 1, -1, -1):
        path = book_path(directory, name, before)
        if path.exists() and any(True for _ in read(path)):
            return in_doubt(path)
    return []


def book_path(directory: Path, name: str, life: int) -> Path:
    return directory / f"{name}-{life}.book"


def main() -> int:
    """Run one life; 0 when it was told to stop and left in order."""
    parser = argparse.ArgumentParser(prog="python -m verify.traffic.pusher")
    parser.add_argument("--addresses", required=True)
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--life", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--pause", type=float, required=True)
    options = parser.parse_args()
    stop, parent = threading.Event(), os.getppid()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    rng = random.Random(f"{options.seed} {options.name} {options.life}")
    doubts = inherited(options.books, options.name, options.life) if rng.random() < _INHERIT_SHARE else []
    book = Book(book_path(options.books, options.name, options.life))
    book.begun(doubts)
    caller = Caller(options.addresses.split(","), options.size, rng, book.trouble)
    for push in doubts:
        settle_for(caller, push, book)
    pusher = Pusher(options.name, book, caller, rng, options.pause)
    while not stop.is_set() and os.getppid() == parent:
        pusher.step(stop)
    pusher.leave()
    caller.close()
    book.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
