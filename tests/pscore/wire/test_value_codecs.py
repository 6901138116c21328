"""Value codecs: exact or within their error, the same bits on both sides, never a value that is not finite."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.wire.codecs.bounded import BLOCK
from pscore.wire.codecs.format import MAX_ENTRIES
from pscore.wire.codecs.names import VALUE_CODECS
from pscore.wire.codecs.values import (
    CODEC_OF_DTYPE,
    VALUE_FORMATS,
    WORD_FORMATS,
    decode_values,
    format_of,
    host_values,
)
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.pscore import bounded_reference
from tests.pscore.codec_makers import each_value_format, squared_error, tail
from tests.pscore.loop_makers import FORMS, run_as
from tests.tiers import examples

many = settings(deadline=None, max_examples=examples(100))
each_format = pytest.mark.parametrize("codec", each_value_format.values(), ids=each_value_format)
bounded = pytest.mark.parametrize("codec", [pb.VALUE_CODEC_INT8, pb.VALUE_CODEC_INT4], ids=["int8", "int4"])
LARGEST = np.finfo(np.float32).max

finite = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from(
    [0.0, -0.0, 1e-45, -1e-45, 1e-38, float(LARGEST), -float(LARGEST), 65504.0, 65520.0]
)


@st.composite
def value_arrays(draw):
    """Any finite values, over block boundaries too."""
    few = np.array(draw(st.lists(finite, max_size=40)), dtype=np.float32)
    if draw(st.booleans()):
        size = draw(st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3]))
        generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        scale = np.float32(10.0 ** draw(st.integers(-40, 37)))
        few = np.concatenate([few, generator.normal(size=size).astype(np.float32) * scale])
    return few


def test_every_codec_of_the_protocol_is_registered_by_its_name():
    needs_own_values = {pb.VALUE_CODEC_RESIDUE}  # test_residue.py
    named = {*pb.ValueCodec.values()} - {pb.VALUE_CODEC_UNSPECIFIED} - needs_own_values
    assert {*VALUE_FORMATS} | {*WORD_FORMATS} == named
    assert not {*VALUE_FORMATS} & {*WORD_FORMATS}
    for codec, value_format in (VALUE_FORMATS | WORD_FORMATS).items():
        assert format_of(codec) is value_format
        assert pb.ValueCodec.Name(codec) == f"VALUE_CODEC_{value_format.name.upper()}"


@each_format
@given(values=value_arrays())
@many
def test_the_receiver_decodes_what_the_sender_was_told_bit_for_bit(codec, values):
    data, told = VALUE_FORMATS[codec].encode(values)
    assert len(data) == VALUE_FORMATS[codec].size(values.size)
    received = decode_values(codec, data, values.size)
    assert received.dtype == told.dtype == np.float32
    assert received.tobytes() == told.tobytes()
    assert np.isfinite(received).all()


@each_format
@given(values=value_arrays())
@many
def test_signs_and_magnitudes_stay_within_the_bounds_of_their_block(codec, values):
    _, decoded = VALUE_FORMATS[codec].encode(values)
    block = VALUE_FORMATS[codec].block
    for first in range(0, values.size if block > 1 else 0, block):
        magnitudes, back = np.abs(values[first : first + block]), decoded[first : first + block]
        assert magnitudes.min() <= np.abs(back).min()
        assert np.abs(back).max() <= magnitudes.max()
        assert (np.signbit(back) == np.signbit(values[first : first + block])).all()


@bounded
@given(values=value_arrays())
@many
def test_zeros_and_the_bounds_of_a_block_come_back_exactly(codec, values):
    _, decoded = VALUE_FORMATS[codec].encode(values)
    assert not decoded[values == 0].any()
    for first in range(0, values.size, BLOCK):
        magnitudes, back = np.abs(values[first : first + BLOCK]), np.abs(decoded[first : first + BLOCK])
        for bound in (magnitudes.min(), magnitudes.max()):
            assert (back[magnitudes == bound] == bound).all()


@bounded
@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(1, BLOCK + 5))
@many
def test_a_block_of_one_magnitude_is_exact(codec, value, count):
    values = np.full(count, value, np.float32)
    values[::3] *= -1
    assert VALUE_FORMATS[codec].encode(values)[1].tobytes() == values.tobytes()


def test_int8_is_off_by_half_a_step_at_most():
    values = np.random.default_rng(0).laplace(size=10 * BLOCK).astype(np.float32)
    decoded = VALUE_FORMATS[pb.VALUE_CODEC_INT8].encode(values)[1]
    for first in range(0, values.size, BLOCK):
        part = np.abs(values[first : first + BLOCK])
        step = (part.max() - part.min()) / 127
        assert np.abs(values - decoded)[first : first + BLOCK].max() <= step * 0.5001


@pytest.mark.parametrize("count", [100, 3 * BLOCK + 7])
@given(st.integers(0, 2**16), st.sampled_from([1e-44, 1e-3, 1.0, 5e37]), st.booleans())
@many
def test_an_int4_value_gets_the_nearest_level_of_its_block(count, seed, scale, zero):
    rng = np.random.default_rng(seed)
    values = rng.laplace(size=count).clip(-6, 6).astype(np.float32) * np.float32(scale)
    values[0] *= not zero
    _, decoded = VALUE_FORMATS[pb.VALUE_CODEC_INT4].encode(values)
    for first in range(0, count, BLOCK):
        magnitudes, back = np.abs(values[first : first + BLOCK]), np.abs(decoded[first : first + BLOCK])
        low, high = (np.sqrt(np.sqrt(np.float64(bound))) for bound in (magnitudes.min(), magnitudes.max()))
        roots = low + (high - low) * (np.arange(8) / 7)
        levels = np.minimum((roots * roots) * (roots * roots), magnitudes.max()).astype(np.float32).astype(np.float64)
        distances = np.abs(magnitudes.astype(np.float64)[:, None] - levels)
        error = np.abs(magnitudes.astype(np.float64) - back)
        assert np.isin(back, levels.astype(np.float32)).all()
        # Where the middle of two levels has no fp32 number of its own, it is off by less than the next number.
        assert (error <= distances.min(1) + np.spacing(magnitudes)).all()


@pytest.mark.parametrize(
    ("name", "noise", "limit"),
    [
        ("fp16", "laplace", 1e-7),
        ("bf16", "laplace", 1e-5),
        ("int8", "laplace", 1.8e-5),
        ("int8", "normal", 1.8e-5),
        ("int4", "laplace", 5.4e-3),
        ("int4", "normal", 5.4e-3),
        ("int4", "student-t3", 1.5e-2),
        ("sign_mean", "laplace", 3.3e-2),
        ("sign_mean", "normal", 3.3e-2),
    ],
)
def test_the_error_on_what_selection_leaves_over_stays_below_the_documented_one(name, noise, limit):
    values = tail(noise, 0.01)
    assert squared_error(values, VALUE_FORMATS[each_value_format[name]].encode(values)[1]) <= limit


@pytest.mark.parametrize("dtype", CODEC_OF_DTYPE, ids=str)
@given(st.integers(0, 2**32 - 1), st.integers(0, 50))
@many
def test_the_codec_of_a_dtype_is_exact_for_it(dtype, seed, count):
    generator = torch.Generator().manual_seed(seed)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    limits = torch.iinfo(whole)
    values = torch.randint(limits.min, limits.max, (count,), generator=generator, dtype=whole).view(dtype)
    values = values[values.isfinite()]
    codec, read = CODEC_OF_DTYPE[dtype], torch.float32 if dtype.is_floating_point else dtype
    data, _ = format_of(codec).encode(host_values(values))
    assert len(data) == values.numel() * dtype.itemsize
    back = torch.from_numpy(decode_values(codec, data, values.numel(), read)).to(dtype)
    assert torch.equal(back.view(whole), values.view(whole))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@given(st.integers(0, 2**32 - 1))
@many
def test_half_widths_round_as_torch_does(dtype, seed):
    values = np.random.default_rng(seed).integers(0, 2**32, 50, dtype=np.uint32).view(np.float32)
    values = values[np.abs(values) < 65000]
    decoded = VALUE_FORMATS[CODEC_OF_DTYPE[dtype]].encode(values)[1]
    assert decoded.tobytes() == torch.from_numpy(values).to(dtype).float().numpy().tobytes()


@pytest.mark.parametrize(("name", "largest"), [("fp16", 65504.0), ("bf16", torch.finfo(torch.bfloat16).max)])
def test_what_is_too_large_becomes_the_largest(name, largest):
    values = np.array([LARGEST, -LARGEST], np.float32)
    assert VALUE_FORMATS[each_value_format[name]].encode(values)[1].tolist() == [largest, -largest]


@each_format
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused_or_clamped_but_never_decoded(codec, value):
    values, value_format = np.array([1, value, 2], np.float32), VALUE_FORMATS[codec]
    if value_format.name in ("fp16", "bf16") and np.isinf(value):
        assert np.isfinite(value_format.decode(value_format.encode(values)[0], 3)).all()
        return
    with pytest.raises(Rejected) as refused:
        value_format.decode(value_format.encode(values)[0], 3)
    assert refused.value.reason is ErrorCode.NON_FINITE


@each_format
@pytest.mark.parametrize("count", [5, 1500])
def test_bytes_are_read_from_any_place_of_a_message(codec, count):
    data, decoded = VALUE_FORMATS[codec].encode(tail("laplace", 0.25)[:count])
    for offset in range(4):
        view = memoryview(bytes(offset) + data)[offset:]
        assert decode_values(codec, view, count).tobytes() == decoded.tobytes()


def test_strided_values_are_written_in_order():
    data, _ = VALUE_FORMATS[pb.VALUE_CODEC_FP32].encode(host_values(torch.arange(10.0)[::3]))
    assert decode_values(pb.VALUE_CODEC_FP32, data, 4).tolist() == [0, 3, 6, 9]


@each_format
def test_more_entries_than_a_chunk_may_hold_are_refused(codec):
    with pytest.raises(Rejected, match="at most"):
        decode_values(codec, b"", MAX_ENTRIES + 1)


@pytest.mark.parametrize("codec", [pb.VALUE_CODEC_UNSPECIFIED, 77])
def test_an_unknown_codec_is_refused(codec):
    with pytest.raises(Rejected) as refused:
        decode_values(codec, b"", 0)
    assert refused.value.reason is ErrorCode.UNKNOWN_CODEC


@pytest.mark.parametrize("name", ["int8", "int4"])
@given(
    st.integers(0, 2**16),
    st.sampled_from([1, 2, 255, 512, 513, 1100]),
    st.sampled_from(["normal", "zeros", "one", "alike", "tiny", "huge", "bits"]),
)
@settings(deadline=None, max_examples=examples(40))
def test_the_loops_compiled_and_as_python_give_the_bytes_and_values_of_the_reference(name, seed, count, kind):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(count).astype(np.float32)
    if kind == "zeros":
        values[rng.random(count) < 0.5] = -0.0
    if kind == "alike":
        values = np.nextafter(np.sign(values), rng.choice(np.float32([0, 2]), count))
    if kind == "bits":
        values = rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
        values[~np.isfinite(values)] = 65519
    if kind in ("one", "tiny", "huge"):
        values = {"one": np.sign(values), "tiny": values * np.float32(1e-44), "huge": values * np.float32(5e37)}[kind]
    form = VALUE_FORMATS[VALUE_CODECS[name]]
    expected, decoded = getattr(bounded_reference, name.replace("int", "write"))(values)
    for shape in FORMS:
        with run_as(shape):
            written, read = form.encode(values)
            assert (written, read.tobytes()) == (expected, decoded.tobytes())
            assert form.decode(written, count).tobytes() == decoded.tobytes()
