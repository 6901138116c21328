"""A push as messages, for the shard in this process and for raw workers alike."""

from collections.abc import Iterator, Sequence

import torch

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire import frames
from pscore.wire.codecs.values import CODEC_OF_DTYPE
from pscore.wire.v1 import parameter_server_pb2 as pb


def push_requests(
    identity: pb.WorkerIdentity,
    push: SparseSlice,
    groups: Sequence[Span],
    *,
    chunk_bytes: int,
    step: int = 0,
    generation: int = 0,
    base_version: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Iterator[pb.PushSparseRequest]:
    """Yield what a worker sends: header, the chunks of each group, commit. Numbers may be filled in later."""
    header = pb.PushHeader(
        identity=identity,
        step=step,
        generation=generation,
        base_version=base_version,
        samples=1,
        plan=[pb.Group(start=group.start, length=group.length) for group in groups],
    )
    yield pb.PushSparseRequest(header=header)
    checksum = frames.Checksum()
    form = frames.WireForm(value=CODEC_OF_DTYPE[dtype])
    for number, span in enumerate(groups):
        part = push.clip(span)
        if part is None:
            continue
        for chunk, _ in frames.encode(part, form, chunk_bytes=chunk_bytes, group=number):
            checksum.add(chunk)
            yield pb.PushSparseRequest(chunks=[chunk])
    yield pb.PushSparseRequest(commit=checksum.commit())
