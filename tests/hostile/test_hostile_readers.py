"""Readers of streams: no memory for what is only declared, nothing out of order, nothing beyond the length."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire import frames
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.tiers import examples

WITHIN = Span(100, 200)
many = settings(deadline=None, max_examples=examples(300))

LITTLE_MEMORY = """
import resource, sys
from pscore.wire import frames
from pscore.wire.codecs.index import decode_offsets
from pscore.model.layout import Span
from pscore.wire.errors import Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb

def refused(call):
    try:
        call()
    except Rejected:
        return
    raise SystemExit("not refused")

huge = Span(0, 1 << 48)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
for index_codec in range(7):
    for value_codec in range(7):
        for count in (1 << 28, (1 << 32) - 1):
            for length in (count, 1 << 40):
                refused(lambda: frames.decode(pb.Chunk(length=length, count=count, index_codec=index_codec,
                    value_codec=value_codec, indices=bytes(64), values=bytes(64)), huge))
        refused(lambda: decode_offsets(index_codec, bytes(64), (1 << 32) - 1, 1 << 40))
refused(lambda: frames.BytesReader(1 << 60, 12))
reader = frames.BytesReader(1 << 40, 1 << 40)
reader.read(pb.BytesChunk(offset=0, data=bytes(64)))
refused(reader.finish)
print("ok")
"""


@pytest.mark.long
@pytest.mark.executes_python
@pytest.mark.skipif(sys.platform != "linux", reason="limits its own address space, which needs Linux")
def test_a_huge_declared_length_allocates_nothing():
    done = subprocess.run(
        [sys.executable, "-c", LITTLE_MEMORY], capture_output=True, text=True, cwd=Path(__file__).resolve().parents[2]
    )
    assert done.stdout.strip() == "ok", done.stdout + done.stderr


@given(st.lists(st.tuples(st.integers(95, 205), st.integers(1, 30)), min_size=1, max_size=8))
@many
def test_chunks_that_overlap_or_go_back_are_refused(order):
    reader, end = frames.ChunkReader(WITHIN), WITHIN.start
    for start, length in order:
        chunk, _ = next(
            iter(frames.encode(SparseSlice(Span(start, start + length), None, torch.ones(length)), chunk_bytes=512))
        )
        if end <= start and start + length <= WITHIN.end:
            reader.read(chunk)
            end = start + length
        else:
            with pytest.raises(Rejected) as refused:
                reader.read(chunk)
            assert refused.value.reason is ErrorCode.BAD_CHUNK


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1) | st.integers(0, 20), st.binary(max_size=8)), max_size=6))
@many
def test_byte_pieces_come_whole_and_in_order_or_are_refused(pieces):
    reader, taken = frames.BytesReader(12, 12), b""
    for offset, data in pieces:
        fits = offset == len(taken) and data and len(taken) + len(data) <= 12
        if fits:
            reader.read(pb.BytesChunk(offset=offset, data=data))
            taken += data
        else:
            with pytest.raises(Rejected):
                reader.read(pb.BytesChunk(offset=offset, data=data))
    if len(taken) == 12:
        assert reader.finish() == taken
    else:
        with pytest.raises(Rejected, match="of 12 bytes"):
            reader.finish()
