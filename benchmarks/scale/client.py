"""``python -m benchmarks.scale.client``: workers that think, push an encoded update to each shard, and pull.

Nothing is encoded and no reply is decoded here, and torch is not imported: what a real worker computes is a cost of its
own, and these share the machine with the server. It joins, prints ``ready``, begins at a line on stdin, stops at the
next one, and prints its steps as JSON: for each worker a list of :class:`Step`.
"""

import argparse
import json
import random
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import grpc

from benchmarks.harness.load_generator import read_frames
from benchmarks.workload.replay_worker import CALL_SECONDS, SERVICE
from pscore.wire.frames import FRAMING_BYTES
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub

THINK_SPREAD = 0.5
"""Think times are uniform within this share of their mean, either way; the model draws the same."""


class Step(NamedTuple):
    """One step of a worker; moments on the clock of ``time.monotonic``.

    Attributes:
        began: the pushes.
        pushed: answered by every shard.
        ended: pulled from every shard; ``pushed`` where this step pulled nothing.
        staleness: pushes of others that shard 0 had applied between this worker's last pull and its push.
        sent: message bytes of all shards.
        received: message bytes of all shards.
    """

    began: float
    pushed: float
    ended: float
    staleness: int
    sent: int
    received: int


class _Shard:
    """One worker's place at one shard."""

    def __init__(self, address: str, name: str, files: Sequence[Path]) -> None:
        self._channel = grpc.insecure_channel(address)
        self._push: grpc.StreamUnaryMultiCallable = self._channel.stream_unary(
            f"{SERVICE}/PushSparse", None, pb.PushSparseResponse.FromString
        )
        self._pull: grpc.UnaryStreamMultiCallable = self._channel.unary_stream(
            f"{SERVICE}/PullDiff", pb.PullDiffRequest.SerializeToString, None
        )
        self._stub = ParameterServerServiceStub(self._channel)
        self._updates = [read_frames(path) for path in files]
        request = pb.JoinRequest.FromString(self._updates[0][0])
        request.identity.worker_id, request.identity.incarnation = name, str(uuid.uuid4())
        joined: pb.JoinResponse = self._stub.Join(request, timeout=CALL_SECONDS)
        if joined.state != pb.JOIN_STATE_READY:
            raise RuntimeError("the server has no model")
        self._identity = request.identity
        self._identity.run_id = joined.run_id
        self._generation, self._version = joined.generation, joined.version
        self._acknowledged, self._image = 0, False

    def begin_push(self, step: int) -> tuple["grpc._CallFuture[pb.PushSparseResponse]", int]:
        """Send an update; return the call and its bytes."""
        _, header, *rest = self._updates[step % len(self._updates)]
        message = pb.PushSparseRequest.FromString(header)
        message.header.identity.CopyFrom(self._identity)
        message.header.step = step
        message.header.generation = self._generation
        message.header.base_version = self._version
        frames = [message.SerializeToString(), *rest]
        return self._push.future(iter(frames), timeout=CALL_SECONDS), sum(map(len, frames)) + FRAMING_BYTES * len(
            frames
        )

    def begin_pull(self) -> Iterator[bytes]:
        """Ask for what has changed."""
        request = pb.PullDiffRequest(
            identity=self._identity,
            generation=self._generation,
            has_base=True,
            base_version=self._version,
            acknowledged_reply=self._acknowledged,
            image=self._image,
        )
        replies: Iterator[bytes] = self._pull(request, timeout=CALL_SECONDS)
        return replies

    def end_pull(self, replies: Iterator[bytes]) -> int:
        """Take the reply in; return its bytes."""
        first = next(replies)
        header = pb.PullDiffResponse.FromString(first).header
        received = len(first) + FRAMING_BYTES + sum(len(message) + FRAMING_BYTES for message in replies)
        self._version, self._acknowledged, self._image = header.version, header.reply_number, header.image
        return received

    def leave(self) -> None:
        self._stub.Leave(pb.LeaveRequest(identity=self._identity), timeout=CALL_SECONDS)
        self._channel.close()


class Worker:
    """One worker of all shards.

    Args:
        addresses: of the shards, in order.
        name: of the worker.
        files: its updates, by shard; each as :func:`~benchmarks.harness.load_generator.write_frames` has written it.
        think: mean seconds between a pull and the next push.
        pushes: that it makes before it pulls.
    """

    def __init__(
        self, addresses: Sequence[str], name: str, files: Sequence[Sequence[Path]], think: float, pushes: int
    ) -> None:
        self._shards = [_Shard(address, name, of) for address, of in zip(addresses, files, strict=True)]
        self._think, self._pushes, self._random = think, pushes, random.Random(name)
        self.steps: list[Step] = []

    def run(self, stop: threading.Event) -> None:
        """Step until told to stop; the step under way is finished."""
        stop.wait(self._random.uniform(0, self._think))
        number = 0
        while not stop.is_set():
            stop.wait(self._think * self._random.uniform(1 - THINK_SPREAD, 1 + THINK_SPREAD))
            number += 1
            began = time.monotonic()
            calls = [shard.begin_push(number) for shard in self._shards]
            answers = [call.result() for call, _ in calls]
            pushed = time.monotonic()
            received = 0
            if number % self._pushes == 0:
                replies = [shard.begin_pull() for shard in self._shards]
                received = sum(shard.end_pull(reply) for shard, reply in zip(self._shards, replies, strict=True))
            sent = sum(nbytes for _, nbytes in calls)
            ended = time.monotonic() if received else pushed
            self.steps.append(Step(began, pushed, ended, answers[0].staleness, sent, received))

    def leave(self) -> None:
        for shard in self._shards:
            shard.leave()


def _run_between_lines(workers: Sequence[Worker]) -> None:
    """Print "ready", let all workers run from the next line of stdin to the one after it, and then leave."""
    stop = threading.Event()
    print("ready", flush=True)
    sys.stdin.readline()
    with ThreadPoolExecutor(len(workers)) as pool:
        running = [pool.submit(worker.run, stop) for worker in workers]
        sys.stdin.readline()
        stop.set()
    for future in running:
        future.result()
    for worker in workers:
        worker.leave()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.client")
    parser.add_argument("addresses", help="of the shards, with commas between")
    parser.add_argument("updates", type=Path, help="folder of NAME.SHARD.NUMBER files")
    parser.add_argument("names", nargs="+")
    parser.add_argument("--think", type=float, default=0.0, help="mean seconds before a push")
    parser.add_argument("--pushes", type=int, default=1, help="pushes to a pull")
    options = parser.parse_args()
    addresses = options.addresses.split(",")
    workers = []
    for name in options.names:
        files = [sorted(options.updates.glob(f"{name}.{shard}.*")) for shard in range(len(addresses))]
        workers.append(Worker(addresses, name, files, options.think, options.pushes))
    _run_between_lines(workers)
    print(json.dumps([worker.steps for worker in workers]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
