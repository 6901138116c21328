"""The thread that renews a worker's leases, and leaves the run for an optimizer that was collected."""

import atexit
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc

from psclient.errors import Transient, from_rpc_error
from psclient.rpc.channel import suppress_errors
from psclient.rpc.shard_stream import ShardStream
from pscore.wire.v1 import parameter_server_pb2 as pb

log = logging.getLogger("psclient")

_LAST_JOB_SECONDS = 20.0
_ending: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()
"""Threads that are to end; until they have, they free tensors and channels."""

_SAME_BATCHES = (
    "worker %s began with the same batches in the same order as %d other live worker(s): they train the same samples, "
    "and together learn no more than one. Give each its own: torch.manual_seed(seed + psclient.worker_index()) before "
    "a loader that shuffles is made, DistributedSampler(dataset, num_replicas=WORKERS, rank=psclient.worker_index()), "
    "or psclient.ElasticSampler. Outside of torchrun, Slurm and Kubernetes, worker_index() needs a name that ends in a "
    "number: PSCLIENT_WORKER=trainer-3"
)


class LeaseThread:
    """Renews the leases at all shards, and tells the shards which versions it has pulled of one another.

    Renewals have connections of their own, so a model delays none. The thread keeps neither optimizer nor model alive.

    Attributes:
        renewal_seconds: time between two renewals.
        uploaded: share of the model that this worker has sent, or 0 if it uploads none; sent with each renewal.
        first_batches: fingerprint of this worker's first batches, or 0; sent with each renewal.
    """

    def __init__(self, shards: Sequence[ShardStream], identity: pb.WorkerIdentity) -> None:
        self.renewal_seconds = 5.0
        self.uploaded = 0.0
        self.first_batches = 0
        self.is_started = False
        self._shards, self._identity = tuple(shards), identity
        self._has_warned = False  # of workers with the same batches
        self._last_job: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._calls: list[tuple[ShardStream, Any]] = []
        self._thread = threading.Thread(target=self._run, name="psclient-lease", daemon=True)

    def start(self) -> None:
        """Begin to renew; harmless twice."""
        if not self.is_started:
            self.is_started = True
            self._thread.start()

    def stop(self) -> None:
        """Renew no longer, and wait for no answer."""
        self.hand_over(lambda: None)
        for _, call in self._calls:
            call.cancel()

    def hand_over(self, job: Callable[[], None]) -> None:
        """Renew no longer, and run a last job in this thread.

        A finalizer may call this at any point of any thread: the call waits for nothing and takes no lock.
        """
        _ending.add(self._thread)
        self._last_job.put(job)

    def join(self, seconds: float | None = None) -> None:
        """Wait for the thread's end, as long as a renewal that is under way may take, or ``seconds``."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2 * self.renewal_seconds + 1.0 if seconds is None else seconds)

    def _run(self) -> None:
        while True:
            try:
                seconds = min(1.0, self.renewal_seconds) if self.uploaded else self.renewal_seconds
                last_job = self._last_job.get(timeout=seconds)
            except queue.Empty:
                self._renew()
            else:
                last_job()
                return

    def _renew(self) -> None:
        request = pb.RenewLeaseRequest(
            identity=self._identity,
            uploaded=self.uploaded,
            first_batches=self.first_batches,
            shards=filter(None, (shard.history() for shard in self._shards)),
        )
        seconds = max(0.5, self.renewal_seconds)
        self._calls = start_all(
            self._shards, lambda shard: shard.lease_connection.stub.RenewLease.future(request, timeout=seconds)
        )
        for shard, call in self._calls:
            suppress_errors(partial(self._read, shard, call))

    def _read(self, shard: ShardStream, call: Any) -> None:
        try:
            answer: pb.RenewLeaseResponse = call.result()
        except grpc.RpcError as error:
            failure = from_rpc_error(error)
            if isinstance(failure, Transient) and failure.lost:
                shard.lease_connection.reconnect()
            raise
        shard.note_receipt(answer.received_bytes, installing=answer.installing)
        if answer.same_batches and not self._has_warned:
            self._has_warned = True
            log.warning(_SAME_BATCHES, self._identity.worker_id, answer.same_batches)


def start_all(shards: Sequence[ShardStream], start: Callable[[ShardStream], Any]) -> list[tuple[ShardStream, Any]]:
    """Begin a call at all shards at once: one that does not answer costs the others nothing."""
    calls: list[tuple[ShardStream, Any]] = []
    for shard in shards:
        suppress_errors(lambda shard=shard: calls.append((shard, start(shard))))  # type: ignore[misc]
    return calls


@atexit.register
def _join_ending() -> None:
    """Wait for threads that end: a thread that is unwound later, in a destructor of C++, aborts the process."""
    for thread in list(_ending):
        if thread.is_alive():
            thread.join(_LAST_JOB_SECONDS)
