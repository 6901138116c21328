"""The test vectors in the documents are what the code writes and reads, so that other clients can rely on them."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from pscore.model.layout import ModelLayout, Span, TensorSpec
from pscore.model.sparse_slice import SparseSlice
from pscore.wire import frames
from pscore.wire.codecs.index import INDEX_FORMATS, decode_offsets
from pscore.wire.codecs.names import INDEX_CODECS, VALUE_CODECS
from pscore.wire.codecs.values import VALUE_FORMATS, decode_values
from pscore.wire.v1 import parameter_server_pb2 as pb

DOCUMENTS = Path(__file__).parents[3] / "docs" / "reference"
VECTORS = (DOCUMENTS / "writing-a-client.md").read_text().partition("## Test vectors")[2]
ROWS = dict(re.findall(r"^\| `?([^`|]+?)`? \| (.+) \|$", VECTORS, re.MULTILINE))
LAYOUT = ModelLayout(
    (
        TensorSpec("weight", (2, 3), torch.float32),
        TensorSpec("scale", (3,), torch.bfloat16),
        TensorSpec("bias", (), torch.float32),
    ),
    (TensorSpec("mean", (3,), torch.float32), TensorSpec("count", (), torch.int64)),
)
OFFSETS, LENGTH = np.array([1, 4, 5, 13], dtype=np.int64), 14
VALUES = np.array([1.0, -2.0, 0.5, 3.0, -0.1], dtype=np.float32)


def shown(data: bytes) -> str:
    return f"`{data.hex(' ')}`"


def told(name: str) -> bytes:
    """Return the first byte string in a row of the page."""
    return bytes.fromhex(ROWS[name].partition("`")[2].partition("`")[0])


def test_the_layout():
    spans = LAYOUT.shard_spans(3)
    assert ROWS["elements"] == str(LAYOUT.size)
    assert ROWS["ranges of three shards"] == ", ".join(f"[{span.start}, {span.end})" for span in spans)
    assert ROWS["fingerprint"] == f"`{LAYOUT.fingerprint.hex()}`"


@pytest.mark.parametrize("name", INDEX_CODECS)
def test_an_index_codec(name):
    codec = INDEX_CODECS[name]
    row = f"INDEX_CODEC_{name.upper()}"
    assert pb.IndexCodec.Value(row) == codec
    assert ROWS[row] == shown(INDEX_FORMATS[codec].encode(OFFSETS, LENGTH))
    assert decode_offsets(codec, told(row), OFFSETS.size, LENGTH).tolist() == OFFSETS.tolist()


@pytest.mark.parametrize("name", VALUE_CODECS)
def test_a_value_codec(name):
    codec = VALUE_CODECS[name]
    row = f"VALUE_CODEC_{name.upper()}"
    assert pb.ValueCodec.Value(row) == codec
    data, decoded = VALUE_FORMATS[codec].encode(VALUES)
    assert ROWS[row] == f"{shown(data)} | {', '.join(str(value) for value in decoded)}"
    assert decode_values(codec, told(row), VALUES.size).tobytes() == decoded.tobytes()


def push_chunks() -> list[pb.Chunk]:
    """Return two chunks of one push: sparse and quantised, dense and exact."""
    sparse = SparseSlice(Span(100, 100 + LENGTH), torch.from_numpy(OFFSETS), torch.from_numpy(VALUES[:4]))
    dense = SparseSlice(Span(120, 120 + VALUES.size), None, torch.from_numpy(VALUES))
    form = frames.WireForm(value=pb.VALUE_CODEC_INT8, index=pb.INDEX_CODEC_RICE)
    encoded = [*frames.encode(sparse, form, chunk_bytes=1 << 16), *frames.encode(dense, chunk_bytes=1 << 16)]
    return [each.chunk for each in encoded]


def test_a_push():
    checksum = frames.Checksum()
    for number, chunk in enumerate(push_chunks(), 1):
        checksum.add(chunk)
        indices = shown(chunk.indices) if chunk.indices else "none"
        span = f"{chunk.start}, {chunk.length}, {chunk.count}"
        assert ROWS[f"chunk {number}"] == f"{span} | {indices} | {shown(chunk.values)}"
    commit = checksum.commit()
    assert ROWS["commit"] == f"{commit.chunks}, {commit.entries}, {commit.crc32} | |"


def test_a_message():
    request = pb.PushSparseRequest(chunks=[push_chunks()[0]])
    assert pb.PushSparseRequest.FromString(told("chunk 1 as a message")) == request
    assert ROWS["chunk 1 as a message"] == f"| {shown(request.SerializeToString())} |"


def test_the_example_of_a_rice_code_with_an_escape():
    offsets = np.cumsum(np.array([0, 5, 3, 2, 1_000_000], dtype=np.int64) + 1) - 1
    data = INDEX_FORMATS[pb.INDEX_CODEC_RICE].encode(offsets, int(offsets[-1]) + 1)
    example = re.search(r"^04 00 00 00 \|.*$", (DOCUMENTS / "wire-format.md").read_text(), re.MULTILINE)
    assert example is not None
    assert bytes.fromhex(example[0].replace("|", "")) == data
