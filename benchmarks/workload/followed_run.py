"""A run whose versions a benchmark knows bit for bit, and readers of 16 bits that count what comes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.workload.raw_worker import RawWorker
from benchmarks.workload.replay_worker import CALL_SECONDS
from psclient.rpc.local_server import LocalServer
from pscore.model.digest import ModelDigest
from pscore.model.layout import ModelLayout, Span, TensorSpec
from pscore.model.sparse_slice import SparseSlice
from pscore.net.proxies import NO_PROXY
from pscore.wire import frames
from pscore.wire.codecs.names import READABLE_INDEX_CODECS
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub

_CUT_SECONDS = 0.001  # so that every version that is asked for is a cut
_REST_SECONDS = 600.0  # of a lease that nobody renews


@dataclass(frozen=True, slots=True)
class Reply:
    """What a reader got: bytes on the wire, and entries."""

    nbytes: int
    entries: int


class FollowedRun:
    """A run of one tensor in fp32 on a server of its own; its reader has bfloat16.

    Attributes:
        values: of the newest version.
        version: its number.
    """

    def __init__(self, worker: RawWorker, stub: ParameterServerServiceStub, layout: ModelLayout) -> None:
        self._worker, self._stub, self._layout = worker, stub, layout
        self._narrow = layout.viewed_in(torch.bfloat16)
        self.values, self.version = torch.zeros(layout.size), 0
        self._cut = pb.Cut()

    def push(self, update: torch.Tensor) -> None:
        """Take an update from the values, as the server does, and make a cut of the new version."""
        self._worker.push(SparseSlice(Span(0, self._layout.size), None, update))
        self.values = self.values - update
        self.version += 1
        while not self._cut.shards or self._cut.shards[0].version != self.version:
            answer = self._stub.AwaitCut(
                pb.AwaitCutRequest(
                    reader="bench",
                    known=self._cut.shards,
                    wait_seconds=CALL_SECONDS,
                    reader_type=pb.DATA_TYPE_BFLOAT16,
                ),
                timeout=2 * CALL_SECONDS,
            )
            self._cut = answer.cut
        digest = ModelDigest(self._narrow)
        digest.add(SparseSlice(Span(0, self._layout.size), None, self.values))
        if digest.value != self._cut.shards[0].digest:
            raise RuntimeError(f"version {self.version} of the server has other values")

    def words(self) -> NDArray[np.uint16]:
        """Return the newest version as the reader has it."""
        return self.values.bfloat16().view(torch.uint16).numpy().copy()

    def read(self, held: int | None, *, residues: bool) -> Reply:
        """Fetch what a reader lacks that has another version, or none."""
        request = pb.ReadCutRequest(
            version=self._cut.shards[0],
            held=[pb.HeldPart(end=self._layout.size, has_version=held is not None, version=held or 0)],
            index_codecs=READABLE_INDEX_CODECS,
            reader_type=pb.DATA_TYPE_BFLOAT16,
            residues=residues and held is not None,
        )
        nbytes = entries = 0
        for message in self._stub.ReadCut(request, timeout=CALL_SECONDS):
            nbytes += frames.wire_bytes(message)
            entries += sum(chunk.count for chunk in message.chunks)
        return Reply(nbytes, entries)


@contextmanager
def followed_run(values: torch.Tensor) -> Iterator[FollowedRun]:
    """Begin a run with values ``[n]``, fp32, as version 1."""
    layout = ModelLayout((TensorSpec("weights", (values.numel(),), torch.float32),))
    with (
        LocalServer(down_mode="exact", cut_seconds=_CUT_SECONDS, lease_seconds=_REST_SECONDS) as server,
        RawWorker(server.addresses[0], layout, "trainer") as worker,
        grpc.insecure_channel(server.addresses[0], NO_PROXY) as channel,
    ):
        run = FollowedRun(worker, ParameterServerServiceStub(channel), layout)
        run.push(-values)
        yield run
