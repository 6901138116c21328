"""Calls to shards, made again on another connection until they are answered, and a push settled for another life."""

import random
import time
from collections.abc import Callable
from typing import TypeVar

import grpc

from pscore.wire.v1 import parameter_server_pb2 as pb
from verify.client.wire import Line, Push, join_request, reason_of
from verify.traffic.book import Book

Result = TypeVar("Result")

DEADLINE_SECONDS, _LONGEST_DEADLINE_SECONDS = 3.0, 20.0
_AGAIN_SECONDS = 0.05, 0.3
_PATIENCE_SECONDS = 120.0
_TRY_AGAIN = frozenset({"", "BUSY", "DRAINING", "NOT_DURABLE", "WORKER_ALIVE"})
"""Reasons that time mends; empty where the call failed below the protocol."""
_OF_THE_NETWORK = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})


class LeaseLostError(Exception):
    """The shard does not know this worker (any more): join again."""


class RefusedError(Exception):
    """The shard refuses, and would again."""


class StuckError(Exception):
    """No answer in a time in which there must be one."""


class Caller:
    """Calls shards until they answer.

    Args:
        addresses: of the shards.
        size: elements of the model.
        rng: draws the pauses between attempts.
        trouble: told why each failed call did.
        patience: seconds in which every call must be answered.
    """

    def __init__(
        self,
        addresses: list[str],
        size: int,
        rng: random.Random,
        trouble: Callable[[str], None],
        patience: float = _PATIENCE_SECONDS,
    ) -> None:
        self.lines = [Line(address) for address in addresses]
        self._patience = patience
        self._size, self._rng, self._trouble = size, rng, trouble

    def insist(self, shard: int, call: Callable[[Line, float], Result]) -> Result:
        """Make a call, on a new connection each time it fails; raises where that cannot help."""
        line, deadline = self.lines[shard], DEADLINE_SECONDS
        end = time.monotonic() + self._patience
        while True:
            try:
                return call(line, deadline)
            except grpc.RpcError as error:
                reason = reason_of(error)
                if reason == "LEASE_EXPIRED":
                    raise LeaseLostError from error
                if reason not in _TRY_AGAIN:
                    raise RefusedError(f"{reason}: {error.details()}") from error
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    deadline = min(2 * deadline, _LONGEST_DEADLINE_SECONDS)
                self._trouble(reason or what_failed(error))
                if time.monotonic() > end:
                    raise StuckError(f"shard {shard} has not answered for {self._patience:.0f} s") from error
            line.renew()
            time.sleep(self._rng.uniform(*_AGAIN_SECONDS))  # between attempts, as any client waits

    def join(self, shard: int, worker: str, incarnation: str, run: str = "") -> pb.JoinResponse:
        request = join_request(worker, incarnation, run, self._size, shard, len(self.lines))
        return self.insist(shard, lambda line, timeout: line.stub.Join(request, timeout=timeout))

    def settle(self, push: Push) -> pb.PushSparseResponse:
        """Send a push until it is answered."""
        messages = push.messages()
        while True:
            try:
                return self.insist(
                    push.shard, lambda line, timeout: next(line.stub.PushSparse(iter(messages), timeout=timeout))
                )
            except LeaseLostError:
                self._trouble("LEASE_EXPIRED")
                self.join(push.shard, push.worker, push.incarnation, push.run)

    def leave(self, shard: int, identity: pb.WorkerIdentity) -> None:
        """Give a lease back."""
        request = pb.LeaveRequest(identity=identity)
        self.insist(shard, lambda line, timeout: line.stub.Leave(request, timeout=timeout))

    def close(self) -> None:
        for line in self.lines:
            line.close()


def what_failed(error: grpc.RpcError) -> str:
    """Name a failure of the connection; keep the words of any other."""
    code = error.code()
    return code.name if code in _OF_THE_NETWORK else f"{code.name}: {error.details()}"


def settle_for(caller: Caller, push: Push, book: Book) -> None:
    """Settle another life's push under its own identity, and leave in its name."""
    try:
        caller.join(push.shard, push.worker, push.incarnation, push.run)
        answer = caller.settle(push)
        book.answered(push, answer.version, answer.staleness, repeated=answer.repeated_push)
    except RefusedError as error:
        book.refused(push, str(error))
    caller.leave(push.shard, push.identity)
