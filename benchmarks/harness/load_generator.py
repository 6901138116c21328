"""``python -m benchmarks.harness.load_generator``: workers that replay one encoded push as fast as the server takes it.

Nothing is encoded or decoded here and torch is not imported, so that a generator costs little of the machine that the
server shares with it: only the header, which names worker, step and base version, is written anew for each push.

It joins, prints ``ready``, begins at a line on stdin, stops at the next one (or at the end of stdin), and prints what
each push took as JSON.
"""

import argparse
import json
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import grpc

from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub

CALL_SECONDS = 120.0
_LENGTH_BYTES = 4
_PUSH = "/sparseps.v1.ParameterServerService/PushSparse"


def write_frames(path: Path, frames: Sequence[bytes]) -> None:
    """Write serialised messages, each after its length: a join request, a push header, and what follows the header."""
    with path.open("wb") as file:
        for frame in frames:
            file.write(len(frame).to_bytes(_LENGTH_BYTES, "little") + frame)


def read_frames(path: Path) -> list[bytes]:
    """Read them back."""
    data, at, frames = memoryview(path.read_bytes()), 0, []
    while at < len(data):
        end = at + _LENGTH_BYTES + int.from_bytes(data[at : at + _LENGTH_BYTES], "little")
        frames.append(bytes(data[at + _LENGTH_BYTES : end]))
        at = end
    return frames


class Replay:
    """One worker.

    Args:
        channel: to the server; workers of a process share it, as connections are not what is measured.
        name: of the worker.
        frames: as :func:`write_frames` takes them.
    """

    def __init__(self, channel: grpc.Channel, name: str, frames: Sequence[bytes]) -> None:
        """Join a run that has its model."""
        self._stub = ParameterServerServiceStub(channel)
        self._push: grpc.StreamUnaryMultiCallable = channel.stream_unary(_PUSH, None, pb.PushSparseResponse.FromString)
        request = pb.JoinRequest.FromString(frames[0])
        request.identity.worker_id, request.identity.incarnation = name, str(uuid.uuid4())
        joined: pb.JoinResponse = self._stub.Join(request, timeout=CALL_SECONDS)
        if joined.state != pb.JOIN_STATE_READY:
            raise RuntimeError("the server has no model")
        self._header = pb.PushSparseRequest.FromString(frames[1])
        request.identity.run_id = joined.run_id
        self._header.header.identity.CopyFrom(request.identity)
        self._header.header.generation = joined.generation
        self._header.header.base_version = joined.version
        self._rest = frames[2:]
        self.times: list[tuple[float, float]] = []

    def run(self, stop: threading.Event) -> None:
        """Push until told to stop; the push under way is finished."""
        while not stop.is_set():
            self._header.header.step += 1
            started = time.monotonic()
            answer = self._push(self._messages(), timeout=CALL_SECONDS)
            self.times.append((started, time.monotonic()))
            self._header.header.base_version = answer.version

    def leave(self) -> None:
        """End the lease."""
        self._stub.Leave(pb.LeaveRequest(identity=self._header.header.identity), timeout=CALL_SECONDS)

    def _messages(self) -> Iterator[bytes]:
        yield self._header.SerializeToString()
        yield from self._rest


class Runner(Protocol):
    """A worker that goes on until it is told to stop."""

    def run(self, stop: threading.Event) -> None:
        """Work until told to stop."""

    def leave(self) -> None:
        """End the lease."""


def run_between_lines(workers: Sequence[Runner]) -> None:
    """Say "ready", let all workers run from the next line of stdin to the one after it, and then leave."""
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
    """Generate load."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.harness.load_generator")
    parser.add_argument("address")
    parser.add_argument("frames", type=Path)
    parser.add_argument("names", nargs="+")
    options = parser.parse_args()
    frames = read_frames(options.frames)
    with grpc.insecure_channel(options.address) as channel:
        workers = [Replay(channel, name, frames) for name in options.names]
        run_between_lines(workers)
    print(json.dumps([worker.times for worker in workers]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
