"""The records of a shard: each says how the state changes, and is written to the journal before it is applied.

A record is a message of ``proto/sparseps/journal/v1``. In the journal it has a kind, which is a number, and a body:
the messages of a push's stream, if it is a push, and then the record, each behind its length (uint32).
"""

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from google.protobuf.message import DecodeError, Message

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.dense import bytes_of
from pscore.wire.frames import Checksum, WireForm, chunks_without_values
from pscore.wire.messages import share_as
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.data_leases.dataset import Share
from psservice.state.stream_readers import read_all, read_push
from psservice.state.v1 import journal_pb2 as rec
from psservice.storage.journal_format import EMPTY, Body
from psservice.values import Identity

T = TypeVar("T")

Record = (
    rec.Pushed
    | rec.Averaged
    | rec.Joined
    | rec.Left
    | rec.Waited
    | rec.Forgot
    | rec.RunNamed
    | rec.Finished
    | rec.RoundClosed
    | rec.GroupDecided
    | rec.Known
    | rec.SamplesLeased
    | rec.Published
    | rec.Relayed
)

PUSHED, ROUND_CLOSED, PUBLISHED, RELAYED = 1, 6, 13, 14

KINDS: Mapping[int, type[Record]] = {
    PUSHED: rec.Pushed,
    2: rec.Averaged,
    3: rec.Joined,
    4: rec.Left,
    5: rec.Finished,
    ROUND_CLOSED: rec.RoundClosed,
    7: rec.GroupDecided,
    8: rec.Known,
    9: rec.Waited,
    10: rec.SamplesLeased,
    11: rec.Forgot,
    12: rec.RunNamed,
    PUBLISHED: rec.Published,
    RELAYED: rec.Relayed,
}
"""The message of each kind of record; docs/operate/durability.md explains each kind."""

_NUMBERS: Mapping[type[Message], int] = {message: number for number, message in KINDS.items()}
_LENGTH = struct.Struct("<I")


def kind_of(record: Record) -> int:
    """Return the number of a record's kind."""
    return _NUMBERS[type(record)]


def body_of(messages: Iterable[bytes], before: Body = EMPTY) -> Body:
    """Add messages to a body, each behind its length; nothing is copied."""
    parts: list[bytes] = []
    for message in messages:
        parts += (_LENGTH.pack(len(message)), message)
    return before.with_parts(*parts)


def read_record(kind: int, body: bytes) -> tuple[Record, list[bytes]]:
    """Return a record and the messages before it; raises ``ValueError`` if the body does not have that form."""
    *before, last = _messages_in(body)
    try:
        return KINDS[kind].FromString(last), before
    except DecodeError as error:
        raise ValueError(f"a record of kind {kind} cannot be read") from error


def messages_of(update: SparseSlice | None, span: Span, chunk_bytes: int) -> list[bytes]:
    """Write entries over a shard's span as the messages of a push, which :func:`read_update` reads."""
    header = pb.PushHeader(plan=[pb.Group(start=span.start, length=span.length)])
    messages, checksum = [pb.PushSparseRequest(header=header)], Checksum()
    if update is not None:
        data, nbytes = bytes_of(update.values), update.values.itemsize
        for chunk, first in chunks_without_values(update, WireForm(), chunk_bytes):
            chunk.values = bytes(data[nbytes * first : nbytes * (first + chunk.count)])
            checksum.add(chunk)
            messages.append(pb.PushSparseRequest(chunks=[chunk]))
    messages.append(pb.PushSparseRequest(commit=checksum.commit()))
    return [message.SerializeToString() for message in messages]


def read_update(messages: Sequence[bytes], span: Span, dtype: torch.dtype) -> SparseSlice | None:
    """Decode the entries of a push over a shard's span, fp32 or words; raises :class:`~pscore.wire.errors.Rejected`."""
    pushed = map(pb.PushSparseRequest.FromString, messages)
    _, entries, _ = read_all(read_push(lambda header: (span, dtype)), pushed)
    return entries


def _messages_in(body: bytes) -> list[bytes]:
    found, position = [], 0
    while position < len(body):
        start = position + _LENGTH.size
        if start > len(body):
            raise ValueError("a length is cut")
        position = start + _LENGTH.unpack_from(body, start - _LENGTH.size)[0]
        if position > len(body):
            raise ValueError("a message is cut")
        found.append(body[start:position])
    if not found:
        raise ValueError("the body is empty")
    return found


def worker_of(identity: Identity) -> rec.Worker:
    """Write an identity as records have it."""
    return rec.Worker(worker_id=identity.worker_id, incarnation=identity.incarnation)


def identity_of(worker: rec.Worker) -> Identity:
    """Read an identity."""
    return Identity(worker.worker_id, worker.incarnation)


def places_of(share: Share) -> list[rec.Places]:
    """Write places as records have them."""
    return share_as(rec.Places, share)


def history_of(known: pb.ShardHistory) -> rec.History:
    """Write a shard's history as records have it."""
    return _same_history(known, rec.History, rec.Origin)


def shard_history_of(history: rec.History) -> pb.ShardHistory:
    """Read a shard's history."""
    return _same_history(history, pb.ShardHistory, pb.ShardOrigin)


def _same_history(found: pb.ShardHistory | rec.History, history: Callable[..., T], origin: Callable[..., Any]) -> T:
    """Return a history as another message, which has fields of the same names."""
    return history(
        shard_index=found.shard_index,
        generation=found.generation,
        version=found.version,
        origins=[
            origin(generation=each.generation, version=each.version, checkpoint=each.checkpoint)
            for each in found.origins
        ],
        lost_versions=found.lost_versions,
    )
