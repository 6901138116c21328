"""What a decoder may do with a chunk, whatever its bytes: refuse it in the protocol's words, or keep every promise."""

import tracemalloc
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire import frames
from pscore.wire.codecs import index_loops, rice
from pscore.wire.codecs.format import MAX_ENTRIES
from pscore.wire.codecs.index import INDEX_FORMATS
from pscore.wire.codecs.values import VALUE_FORMATS
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.pscore import rice_reference
from tests.pscore.loop_makers import FORMS, run_as

ANYWHERE = Span(0, 1 << 48)
"""A model beyond any, so that a decoder is asked and not the span."""

KINDS = frozenset({ErrorCode.BAD_CHUNK, ErrorCode.NON_FINITE, ErrorCode.UNKNOWN_CODEC})
"""The reasons that a decoder has."""

ONE_SPELLING = frozenset({pb.INDEX_CODEC_RAW32, pb.INDEX_CODEC_BITMAP})
"""Index codecs in which the same entries have the same bytes; so have they in the value codecs without bounds."""

INTERPRETED = SimpleNamespace(**vars(index_loops) | {"read_rice": index_loops.read_rice.plain})
_FEW, _SHORT = 100, 4096  # entries, bytes


def decode(chunk: pb.Chunk, within: Span = ANYWHERE) -> Rejected | None:
    """Decode; return the refusal, or ``None`` where the chunk was taken and is all that it should be."""
    segment = _segment_or_refusal(chunk, within)
    if isinstance(segment, Rejected):
        assert segment.reason in KINDS
        return segment
    assert within.start <= segment.span.start < segment.span.end <= within.end
    assert (segment.span.start, segment.span.length) == (chunk.start, chunk.length)
    values = segment.values.numpy()
    assert values.dtype == np.float32
    assert values.size == chunk.count <= min(chunk.length, MAX_ENTRIES)
    assert np.isfinite(values).all()
    value_format = VALUE_FORMATS[chunk.value_codec]
    if value_format.block == 1:
        assert value_format.encode(values)[0] == chunk.values
    if segment.offsets is None:
        assert chunk.count == chunk.length
        return None
    offsets = segment.offsets.numpy()
    assert offsets.dtype == np.int64
    assert offsets.size == chunk.count
    assert offsets[0] >= 0
    assert offsets[-1] < chunk.length
    assert (np.diff(offsets) > 0).all()
    if chunk.index_codec in ONE_SPELLING:
        assert INDEX_FORMATS[chunk.index_codec].encode(offsets, chunk.length) == chunk.indices
    return None


def most_memory(chunk: pb.Chunk) -> int:
    """Return the bytes that decoding may take at most: so many a byte that came, and so many an entry.

    A count that is above what a chunk may hold, or that the value bytes do not bear out, buys nothing.
    """
    value_format = VALUE_FORMATS.get(chunk.value_codec)
    borne_out = value_format is not None and chunk.count <= MAX_ENTRIES
    borne_out = borne_out and len(chunk.values) == value_format.size(chunk.count)
    return (64 << 10) + 40 * (len(chunk.indices) + len(chunk.values)) + (64 * chunk.count if borne_out else 0)


def decode_within_memory(chunk: pb.Chunk, within: Span = ANYWHERE) -> Rejected | None:
    """As :func:`decode`, and see that Python's memory stays within bounds meanwhile (tracing must be on).

    The least of three counts: a loop is loaded at its first use, and another thread may compile beside this one.
    """
    peak = most_memory(chunk) + 1
    for _ in range(3):
        if peak > most_memory(chunk):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            _segment_or_refusal(chunk, within)
            peak = tracemalloc.get_traced_memory()[1] - before
    assert peak <= most_memory(chunk), f"{peak} bytes for a chunk of {chunk.ByteSize()} bytes, {chunk.count} entries"
    return decode(chunk, within)


def decode_alike(chunk: pb.Chunk, within: Span = ANYWHERE) -> None:
    """See that compiled loops, for few codes the loops as Python (which checks every place), and numpy's Rice agree."""
    is_short = chunk.count <= _FEW and chunk.ByteSize() <= _SHORT
    outcomes = []
    for form in FORMS if is_short else ("dispatcher",):
        with run_as(form):
            outcomes.append(_outcome(_segment_or_refusal(chunk, within)))
    if chunk.index_codec == pb.INDEX_CODEC_RICE:
        for loops in (rice_reference, INTERPRETED) if is_short else (rice_reference,):
            with patch.object(rice, "loops", loops):
                outcomes.append(_outcome(_segment_or_refusal(chunk, within)))
    assert all(outcome == outcomes[0] for outcome in outcomes)


def _outcome(result: SparseSlice | Rejected) -> tuple[object, ...]:
    if isinstance(result, Rejected):
        return result.reason, result.detail
    offsets = None if result.offsets is None else result.offsets.numpy().tobytes()
    return result.span, offsets, result.values.numpy().tobytes()


def _segment_or_refusal(chunk: pb.Chunk, within: Span) -> SparseSlice | Rejected:
    try:
        return frames.decode(chunk, within)
    except Rejected as refusal:
        return refusal
