"""What a call is charged for: its messages as they came, and what is decoded of them at its largest."""

from google.protobuf.message import Message

from pscore.model.layout import ModelLayout
from pscore.wire.v1 import parameter_server_pb2 as pb

_MESSAGE_BYTES = 3072  # of objects around a chunk: message, tensors, segment; 1.3 to 2.0 KB were measured
_GROUP_BYTES = 512  # of objects around a group of a plan
_SPARSE_ENTRY_BYTES = 12  # int64 offset, fp32 value
_DENSE_ENTRY_BYTES = 4

_ROOM_BYTES = 32 << 20  # for what does not grow with the model
_ELEMENT_BYTES = 48  # of a push of every element, as raw offsets and fp32 values: 40 are charged
_TENSOR_BYTES = 16 << 10  # each may be a group, and a chunk or a few, of its own


def largest_stream(layout: ModelLayout | None, elements: int) -> int:
    """Return more bytes than any valid push or upload of a shard occupies, however it is cut into groups."""
    if layout is None:
        return _ROOM_BYTES
    buffers = 4 * sum(spec.nbytes for spec in layout.buffers)
    return _ROOM_BYTES + _ELEMENT_BYTES * elements + _TENSOR_BYTES * len(layout.parameters) + buffers


def received_bytes(nbytes: int) -> int:
    """Return what a message occupies beside what is decoded of it: as it came, and as the journal writes it."""
    return _MESSAGE_BYTES + 2 * nbytes


def decoded_bytes(request: Message) -> int:
    """Return what is decoded of a message at its largest, and merged; only streams decode much.

    An upload's values go straight to their place, or through one fp32 copy.
    """
    nbytes = 0
    if isinstance(request, pb.PushSparseRequest):
        nbytes = _GROUP_BYTES * len(request.header.plan) + _MESSAGE_BYTES * max(0, len(request.chunks) - 1)
        for chunk in request.chunks:
            nbytes += _chunk_bytes(chunk, _SPARSE_ENTRY_BYTES)
    if isinstance(request, pb.UploadModelRequest | pb.ExchangeBuffersRequest):
        nbytes += 2 * len(request.buffers.data)
    if isinstance(request, pb.UploadModelRequest):
        nbytes += _chunk_bytes(request.chunk)
    return nbytes


def _chunk_bytes(chunk: pb.Chunk, merged_bytes: int = 0) -> int:
    entry_bytes = _DENSE_ENTRY_BYTES if chunk.index_codec == pb.INDEX_CODEC_DENSE else _SPARSE_ENTRY_BYTES
    return min(chunk.count, chunk.length) * (entry_bytes + merged_bytes)  # a false count is refused when decoded
