"""Codec bytes that lie: a table of single lies for each codec, then anything at all; only refusals come out."""

import struct
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.codecs.index import INDEX_FORMATS, decode_offsets
from pscore.codecs.limits import MAX_ENTRIES
from pscore.codecs.values import VALUE_FORMATS, decode_values
from pscore.reasons import Reason, Refusal
from pscore.v1 import parameter_server_pb2 as pb

many = settings(deadline=None, max_examples=400)

RICE, PCODEC, STREAMVBYTE = pb.INDEX_CODEC_RICE, pb.INDEX_CODEC_PCODEC, pb.INDEX_CODEC_STREAMVBYTE
OFFSETS = np.array([0, 3, 9, 1_000_000])


def written(codec, offsets=OFFSETS):
    return INDEX_FORMATS[codec].encode(np.asarray(offsets), int(offsets[-1]) + 1)


def rice(b, quotients, low=b"", escaped=(), declared=None):
    size = len(quotients) if declared is None else declared
    return (
        struct.pack("<I", size)
        + bytes([b])
        + bytes(quotients)
        + bytes(low)
        + struct.pack(f"<{len(escaped)}I", *escaped)
    )


def pcodec_of(numbers):
    from pcodec import ChunkConfig, standalone

    return standalone.simple_compress(numbers, ChunkConfig())


# What is wrong: (codec, bytes, count, length). Two entries unless the lie is about their number.
INDEX_LIES = {
    "raw: a byte too few": (pb.INDEX_CODEC_RAW32, struct.pack("<2I", 0, 3)[:-1], 2, 10),
    "raw: one too many": (pb.INDEX_CODEC_RAW32, struct.pack("<3I", 0, 3, 4), 2, 10),
    "raw: repeated": (pb.INDEX_CODEC_RAW32, struct.pack("<2I", 3, 3), 2, 10),
    "raw: falling": (pb.INDEX_CODEC_RAW32, struct.pack("<2I", 3, 0), 2, 10),
    "raw: outside": (pb.INDEX_CODEC_RAW32, struct.pack("<2I", 3, 10), 2, 10),
    "bitmap: nothing": (pb.INDEX_CODEC_BITMAP, b"", 2, 10),
    "bitmap: a byte too few": (pb.INDEX_CODEC_BITMAP, b"\x03", 2, 10),
    "bitmap: a byte too many": (pb.INDEX_CODEC_BITMAP, b"\x03\0\0", 2, 10),
    "bitmap: too few bits": (pb.INDEX_CODEC_BITMAP, b"\x01\0", 2, 10),
    "bitmap: too many bits": (pb.INDEX_CODEC_BITMAP, b"\x07\0", 2, 10),
    "bitmap: a bit beyond the span": (pb.INDEX_CODEC_BITMAP, b"\x01\x04", 2, 10),
    "bitmap: a span of 2^48": (pb.INDEX_CODEC_BITMAP, b"\x03\0", 2, 1 << 48),
    "rice: nothing": (RICE, b"", 2, 10),
    "rice: no parameter": (RICE, bytes(4), 2, 10),
    "rice: quotients longer than the bytes": (RICE, rice(0, [3], declared=2), 2, 10),
    "rice: quotients of 4 GiB": (RICE, rice(0, [3], declared=2**32 - 1), 2, 10),
    "rice: quotients shorter than they are": (RICE, rice(0, [3], declared=0), 2, 10),
    "rice: a parameter of 28": (RICE, rice(28, [3], bytes(7)), 2, 1 << 60),
    "rice: a parameter of 255": (RICE, rice(255, [3], bytes(64)), 2, 1 << 60),
    "rice: a quotient too few": (RICE, rice(0, [1]), 2, 10),
    "rice: a quotient too many": (RICE, rice(0, [7]), 2, 10),
    "rice: an empty byte of quotients": (RICE, rice(0, [3, 0]), 2, 10),
    "rice: 17 zeros": (RICE, rice(0, [1, 0, 4]), 2, 100),
    "rice: zeros without end": (RICE, rice(0, [1, *bytes(1000), 1]), 2, 1 << 20),
    "rice: low bits missing": (RICE, rice(3, [3]), 2, 10),
    "rice: a byte of low bits too many": (RICE, rice(3, [3], [0, 0]), 2, 10),
    "rice: bits behind the last low bits": (RICE, rice(3, [3], [0x40]), 2, 10),
    "rice: an escape without its gap": (RICE, rice(0, [1, 0, 2]), 2, 100),
    "rice: half a gap": (RICE, rice(0, [1, 0, 2]) + b"\x40\0", 2, 100),
    "rice: a gap without its escape": (RICE, rice(0, [3], escaped=[40]), 2, 100),
    "rice: a gap that needs no escape": (RICE, rice(0, [1, 0, 2], escaped=[15]), 2, 100),
    "rice: outside": (RICE, rice(0, [1, 0, 2], escaped=[99]), 2, 100),
    "rice: far outside": (RICE, rice(27, [1, 0x80, 0x40], bytes([255] * 7)), 3, 1 << 31),
    "pcodec: nothing": (PCODEC, b"", 2, 10),
    "pcodec: another magic": (PCODEC, b"pcp!" + written(PCODEC)[4:], 4, 1 << 30),
    "pcodec: cut": (PCODEC, written(PCODEC)[:-1], 4, 1 << 30),
    "pcodec: an entry too few": (PCODEC, written(PCODEC), 5, 1 << 30),
    "pcodec: an entry too many": (PCODEC, written(PCODEC), 3, 1 << 30),
    "pcodec: outside": (PCODEC, written(PCODEC), 4, 1_000_000),
    "pcodec: floats": (PCODEC, pcodec_of(np.ones(2, np.float32)), 2, 1 << 30),
    "pcodec: 64 bits": (PCODEC, pcodec_of(np.ones(2, np.uint64)), 2, 1 << 30),
    "pcodec: far outside": (PCODEC, pcodec_of(np.full(9, 2**32 - 1, np.uint32)), 9, 1 << 33),
    "pcodec: many of nothing": (PCODEC, pcodec_of(np.zeros(4, np.uint32)), MAX_ENTRIES, 1 << 40),
    "streamvbyte: nothing": (STREAMVBYTE, b"", 2, 10),
    "streamvbyte: no data": (STREAMVBYTE, b"\0", 2, 10),
    "streamvbyte: a byte too few": (STREAMVBYTE, b"\x01\0\0", 2, 10),
    "streamvbyte: a byte too many": (STREAMVBYTE, b"\0\0\0\0", 2, 10),
    "streamvbyte: control bits for nobody": (STREAMVBYTE, b"\x10\0\0", 2, 10),
    "streamvbyte: control bits ask for all there is": (STREAMVBYTE, b"\xff" * 8, 8, 1 << 40),
    "streamvbyte: outside": (STREAMVBYTE, b"\0\x05\x04", 2, 10),
    "streamvbyte: far outside": (STREAMVBYTE, b"\x0f" + b"\xff" * 8, 2, 1 << 32),
}


@pytest.mark.parametrize(("codec", "data", "count", "length"), INDEX_LIES.values(), ids=INDEX_LIES)
def test_index_bytes_that_lie_are_refused(codec, data, count, length):
    with pytest.raises(Refusal) as refused:
        decode_offsets(codec, data, count, length)
    assert refused.value.reason is Reason.BAD_CHUNK


FLOAT = struct.Struct("<f")
INF, NAN = float("inf"), float("nan")


def bounds(low, high):
    return struct.pack("<2f", low, high)


VALUE_LIES = {
    "fp32: a byte too few": (pb.VALUE_CODEC_FP32, bytes(11), Reason.BAD_CHUNK),
    "fp32: NaN": (pb.VALUE_CODEC_FP32, struct.pack("<3f", 0, NAN, 0), Reason.NON_FINITE),
    "fp16: a byte too many": (pb.VALUE_CODEC_FP16, bytes(7), Reason.BAD_CHUNK),
    "fp16: infinity": (pb.VALUE_CODEC_FP16, b"\0\x7c" * 3, Reason.NON_FINITE),
    "bf16: infinity": (pb.VALUE_CODEC_BF16, b"\x80\x7f" * 3, Reason.NON_FINITE),
    "bf16: a byte too few": (pb.VALUE_CODEC_BF16, bytes(5), Reason.BAD_CHUNK),
    "int8: no bounds": (pb.VALUE_CODEC_INT8, bytes(3), Reason.BAD_CHUNK),
    "int8: a byte too few": (pb.VALUE_CODEC_INT8, bounds(0, 1) + bytes(2), Reason.BAD_CHUNK),
    "int8: bounds the wrong way round": (pb.VALUE_CODEC_INT8, bounds(2, 1) + bytes(3), Reason.BAD_CHUNK),
    "int8: a negative bound": (pb.VALUE_CODEC_INT8, bounds(-1, 1) + bytes(3), Reason.BAD_CHUNK),
    "int8: minus zero": (pb.VALUE_CODEC_INT8, bounds(-0.0, 1) + bytes(3), Reason.BAD_CHUNK),
    "int8: an infinite bound": (pb.VALUE_CODEC_INT8, bounds(0, INF) + bytes(3), Reason.NON_FINITE),
    "int8: bounds that are no numbers": (pb.VALUE_CODEC_INT8, bounds(NAN, NAN) + bytes(3), Reason.NON_FINITE),
    "int4: no bounds": (pb.VALUE_CODEC_INT4, bytes(2), Reason.BAD_CHUNK),
    "int4: a byte too many": (pb.VALUE_CODEC_INT4, bounds(0, 1) + bytes(3), Reason.BAD_CHUNK),
    "int4: bits behind the last": (pb.VALUE_CODEC_INT4, bounds(0, 1) + b"\0\x10", Reason.BAD_CHUNK),
    "int4: bounds the wrong way round": (pb.VALUE_CODEC_INT4, bounds(2, 1) + bytes(2), Reason.BAD_CHUNK),
    "int4: an infinite bound": (pb.VALUE_CODEC_INT4, bounds(INF, INF) + bytes(2), Reason.NON_FINITE),
    "sign_mean: no mean": (pb.VALUE_CODEC_SIGN_MEAN, bytes(1), Reason.BAD_CHUNK),
    "sign_mean: a negative mean": (pb.VALUE_CODEC_SIGN_MEAN, FLOAT.pack(-1) + bytes(1), Reason.BAD_CHUNK),
    "sign_mean: an infinite mean": (pb.VALUE_CODEC_SIGN_MEAN, FLOAT.pack(INF) + bytes(1), Reason.NON_FINITE),
    "sign_mean: no number": (pb.VALUE_CODEC_SIGN_MEAN, FLOAT.pack(NAN) + bytes(1), Reason.NON_FINITE),
    "sign_mean: bits behind the last": (pb.VALUE_CODEC_SIGN_MEAN, FLOAT.pack(1) + b"\x08", Reason.BAD_CHUNK),
}


@pytest.mark.parametrize(("codec", "data", "reason"), VALUE_LIES.values(), ids=VALUE_LIES)
def test_bytes_of_three_values_that_lie_are_refused(codec, data, reason):
    with pytest.raises(Refusal) as refused:
        decode_values(codec, data, 3)
    assert refused.value.reason is reason


def offsets_or_refusal(codec, data, count, length):
    """Decode; whatever is taken are offsets."""
    try:
        offsets = decode_offsets(codec, data, count, length)
    except Refusal:
        return
    assert offsets.dtype == np.int64
    assert offsets.size == count
    assert count == 0 or (offsets[0] >= 0 and offsets[-1] < length and bool((np.diff(offsets) > 0).all()))


index_codecs = pytest.mark.parametrize("codec", INDEX_FORMATS, ids=[each.name for each in INDEX_FORMATS.values()])
value_codecs = pytest.mark.parametrize("codec", VALUE_FORMATS, ids=[each.name for each in VALUE_FORMATS.values()])
counts = st.integers(0, 40) | st.integers(0, 2**32 - 1) | st.sampled_from([MAX_ENTRIES, MAX_ENTRIES + 1])
lengths = st.integers(0, 300) | st.integers(0, 2**64 - 1)


@index_codecs
@given(data=st.binary(max_size=100), count=counts, length=lengths)
@many
def test_any_index_bytes_are_taken_or_refused(codec, data, count, length):
    offsets_or_refusal(codec, data, count, length)


def damaged(draw, data):
    """Change, cut or lengthen a few places."""
    raw = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        how = draw(st.sampled_from(["change", "flip", "cut", "grow"]))
        place = draw(st.integers(0, max(0, len(raw) - 1)))
        if how == "cut" or not raw:
            del raw[place:]
        elif how == "grow":
            raw[place:place] = draw(st.binary(max_size=8))
        else:
            raw[place] = draw(st.integers(0, 255)) if how == "change" else raw[place] ^ 1 << draw(st.integers(0, 7))
    return bytes(raw)


@index_codecs
@given(data=st.data())
@many
def test_any_damage_to_good_index_bytes_is_taken_or_refused(codec, data):
    count, seed = data.draw(st.sampled_from([1, 2, 5, 60, 600, 1500])), data.draw(st.integers(0, 99))
    offsets = np.cumsum(np.random.default_rng(seed).geometric(data.draw(st.sampled_from([0.5, 0.05])), count)) - 1
    raw = damaged(data.draw, written(codec, offsets))
    offsets_or_refusal(codec, raw, count + data.draw(st.sampled_from([0, 0, 0, -1, 1])), int(offsets[-1]) + 1)


@value_codecs
@given(data=st.binary(max_size=100), count=counts, fit=st.booleans())
@many
def test_any_value_bytes_are_taken_or_refused(codec, data, count, fit):
    if fit:  # as long as they should be, so that something is decoded
        count %= 300
        data = (data * 40 + bytes(1300))[: VALUE_FORMATS[codec].size(count)]
    try:
        values = decode_values(codec, data, count)
    except Refusal:
        return
    assert values.dtype == np.float32
    assert values.size == count
    assert np.isfinite(values).all()


@index_codecs
@pytest.mark.parametrize("filler", [b"\0", b"\1", b"\x55", b"\x80", b"\xff"])
@pytest.mark.parametrize("size", [64, 64 << 10])
def test_decoding_takes_memory_and_time_of_the_bytes_and_the_count_only(codec, filler, size):
    decode_offsets(codec, written(codec), OFFSETS.size, 1 << 20 if codec != pb.INDEX_CODEC_BITMAP else 1_000_001)
    for count in (1, size, 8 * size, MAX_ENTRIES):
        for length in (count, 8 * size, 1 << 32, 1 << 63):
            tracemalloc.start()
            began = time.perf_counter()
            offsets_or_refusal(codec, filler * size, count, length)
            seconds, peak = time.perf_counter() - began, tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert seconds < 5
            most = 200 * size + (1 << 20)
            if codec == PCODEC:  # its bytes do not bound the count: the array to decode into is all that it may take
                most += 4 * count
            assert peak <= most, f"{peak} bytes for {size} bytes and {count} entries"


@value_codecs
def test_values_are_counted_before_anything_is_allocated(codec):
    tracemalloc.start()
    for count in (1000, MAX_ENTRIES, 2**32 - 1):
        with pytest.raises(Refusal):
            decode_values(codec, bytes(64), count)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 10
