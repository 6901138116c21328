"""Index codecs: every one gives back what it was given, in as few bits as it promises."""

import math
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.wire.codecs import index_loops, rice
from pscore.wire.codecs.format import MAX_ENTRIES
from pscore.wire.codecs.index import INDEX_FORMATS, decode_offsets
from pscore.wire.codecs.index_loops import BLOCK, ESCAPE, MAX_PARAMETER
from pscore.wire.codecs.rice import RICE
from pscore.wire.codecs.runs import RUNS, count_runs
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.pscore import rice_reference
from tests.pscore.codec_makers import each_index_format, gap_lists, length_of, offsets_of, random_support
from tests.tiers import examples

many = settings(deadline=None, max_examples=examples(100))
each_format = pytest.mark.parametrize("codec", each_index_format.values(), ids=each_index_format)


def using(loops, function, *arguments):
    """Call with one implementation of the format."""
    with patch.object(rice, "loops", loops):
        return function(*arguments)


def entropy(density):
    """Bits an entry that a random support needs."""
    return -(density * math.log2(density) + (1 - density) * math.log2(1 - density)) / density


def bits_an_entry(codec, offsets):
    return 8 * len(INDEX_FORMATS[codec].encode(offsets, length_of(offsets))) / len(offsets)


def test_every_codec_of_the_protocol_is_registered_by_its_name():
    assert {*INDEX_FORMATS, pb.INDEX_CODEC_DENSE} == {*pb.IndexCodec.values()} - {pb.INDEX_CODEC_UNSPECIFIED}
    for codec, index_format in INDEX_FORMATS.items():
        assert pb.IndexCodec.Name(codec) == f"INDEX_CODEC_{index_format.name.upper()}"


@each_format
@given(gaps=gap_lists())
@many
def test_indices_come_back(codec, gaps):
    if codec == pb.INDEX_CODEC_BITMAP:  # a bit for each element that is skipped
        gaps = [min(gap, 5000) for gap in gaps]
    offsets = offsets_of(gaps)
    length = length_of(offsets)
    data = INDEX_FORMATS[codec].encode(offsets, length)
    back = decode_offsets(codec, data, len(gaps), length)
    assert back.dtype == np.int64
    assert back.tolist() == offsets.tolist()


@each_format
@given(gaps=gap_lists(huge=5000), base=st.sampled_from([0, 1, 2**32, 2**40]), shift=st.sampled_from([0, 3, 2**33]))
@many
def test_offsets_are_written_from_one_base_and_read_to_another(codec, gaps, base, shift):
    offsets = offsets_of([min(gap, 5000) for gap in gaps])
    length = length_of(offsets)
    data = INDEX_FORMATS[codec].encode(offsets + base, length, base)
    assert data == INDEX_FORMATS[codec].encode(offsets, length)
    assert decode_offsets(codec, data, len(gaps), length, shift).tolist() == (offsets + shift).tolist()


@each_format
@pytest.mark.parametrize("offset", [0, 1, 7, 8, 254, 255, 65534, 65535, 2**24, 2**31 - 1, 2**31, 2**32 - 1])
def test_the_largest_offsets_come_back(codec, offset):
    if codec == pb.INDEX_CODEC_BITMAP:  # which would have as many bits
        offset = min(offset, 2**24)
    data = INDEX_FORMATS[codec].encode(np.array([offset]), offset + 1)
    assert decode_offsets(codec, data, 1, offset + 1).tolist() == [offset]


@each_format
def test_an_offset_at_the_end_of_the_span_is_refused(codec):
    offsets = np.array([0, 3, 9])
    data = INDEX_FORMATS[codec].encode(offsets, 10)
    assert decode_offsets(codec, data, 3, 10).tolist() == [0, 3, 9]
    with pytest.raises(Rejected) as refused:
        decode_offsets(codec, data, 3, 8)
    assert refused.value.reason is ErrorCode.BAD_CHUNK


@each_format
def test_more_entries_than_a_chunk_may_hold_are_refused(codec):
    with pytest.raises(Rejected, match="at most") as refused:
        decode_offsets(codec, bytes(MAX_ENTRIES), MAX_ENTRIES + 1, 1 << 30)
    assert refused.value.reason is ErrorCode.BAD_CHUNK


@pytest.mark.parametrize("codec", [pb.INDEX_CODEC_UNSPECIFIED, pb.INDEX_CODEC_DENSE, 77])
def test_a_codec_without_index_bytes_is_refused(codec):
    with pytest.raises(Rejected) as refused:
        decode_offsets(codec, b"", 0, 0)
    assert refused.value.reason is ErrorCode.UNKNOWN_CODEC


@pytest.mark.parametrize("density", [0.5, 0.3, 0.1, 0.01, 0.001])
def test_rice_stays_within_two_per_cent_of_the_entropy_of_a_random_support(density):
    assert bits_an_entry(pb.INDEX_CODEC_RICE, random_support(density, 1 << 17)) <= 1.02 * entropy(density)


@each_format
@pytest.mark.parametrize("density", [0.3, 0.1, 0.01, 0.001])
def test_the_estimate_of_bits_is_what_a_random_support_needs(codec, density):
    offsets = random_support(density, 1 << 15)
    estimate = INDEX_FORMATS[codec].bits(len(offsets), length_of(offsets), count_runs(offsets))
    assert estimate / len(offsets) == pytest.approx(bits_an_entry(codec, offsets), rel=0.03)


def test_rice_needs_a_bit_an_entry_for_runs_and_adapts_to_each_block():
    run = [0] * (100 * BLOCK)
    assert bits_an_entry(pb.INDEX_CODEC_RICE, offsets_of(run)) < 1.02
    sparse = (np.random.default_rng(0).geometric(0.001, 100 * BLOCK) - 1).tolist()
    together = bits_an_entry(pb.INDEX_CODEC_RICE, offsets_of(run + sparse))
    assert together == pytest.approx((1 + bits_an_entry(pb.INDEX_CODEC_RICE, offsets_of(sparse))) / 2, rel=0.01)


@pytest.mark.parametrize("gap", [2**16, 2**24, 2**31, 2**32 - 2**20])
def test_no_gap_costs_rice_more_than_49_bits(gap):
    offsets = offsets_of([0] * 200 + [gap] + [0] * 300)
    without = offsets_of([0] * 501)
    assert bits_an_entry(pb.INDEX_CODEC_RICE, offsets) * 501 <= bits_an_entry(pb.INDEX_CODEC_RICE, without) * 501 + 56


def cost(gaps, parameter):
    """Bits of one block, counted entry by entry from the format's description."""
    return sum(gap // 2**parameter + 1 + parameter if gap >> parameter < ESCAPE else 49 for gap in gaps)


@given(gap_lists(huge=2**31))
@many
def test_each_block_gets_its_cheapest_parameter(gaps):
    data = RICE.encode(offsets_of(gaps), 0)
    for block, parameter in enumerate(data[4 : 4 + -(-len(gaps) // BLOCK)]):
        part = gaps[block * BLOCK : (block + 1) * BLOCK]
        assert parameter == min(range(MAX_PARAMETER + 1), key=lambda candidate: cost(part, candidate))


@given(gap_lists())
@many
def test_loops_and_numpy_write_the_same_rice_bytes_and_read_each_other(gaps):
    offsets = offsets_of(gaps)
    length = length_of(offsets)
    data = using(rice_reference, RICE.encode, offsets, length)
    assert using(index_loops, RICE.encode, offsets, length) == data
    for loops in (rice_reference, index_loops):
        assert using(loops, RICE.decode, data, len(gaps), length).tolist() == offsets.tolist()


@given(gap_lists(), st.data())
@many
def test_loops_and_numpy_refuse_the_same_rice_bytes(gaps, data):
    offsets = offsets_of(gaps)
    length = length_of(offsets)
    raw = bytearray(using(rice_reference, RICE.encode, offsets, length))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    answers = []
    for loops in (rice_reference, index_loops):
        try:
            answers.append(using(loops, RICE.decode, bytes(raw), len(gaps), length).tolist())
        except Rejected as refusal:
            answers.append(refusal.detail)
    assert answers[0] == answers[1]


def test_the_layout_of_rice_bytes_is_the_documented_one():
    """Gaps 0, 5, 3, 2 and a long one: b = 1 is the cheapest; quotients 0, 2, 1, 1 and an escape."""
    data = using(rice_reference, RICE.encode, offsets_of([0, 5, 3, 2, 1_000_000]), 0)
    quotient_bytes, b = [4, 0, 0, 0], [1]
    quotients = [0b10_10_100_1, 0, 0, 0b1]
    low_bits, escaped = [0b0110], [0x40, 0x42, 0x0F, 0x00]
    assert [*data] == [*quotient_bytes, *b, *quotients, *low_bits, *escaped]


@pytest.mark.parametrize(("columns", "bits_a_row"), [(4, 13), (16, 17), (64, 21), (768, 31)])
def test_runs_write_a_touched_row_once(columns, bits_a_row):
    """2 % of a table's rows, 1.2 % of one with 768 columns: 8 bits say which, and some how long the row is."""
    share = 0.012 if columns == 768 else 0.02
    rows = np.flatnonzero(np.random.default_rng(0).random(50_000) < share)
    offsets = (rows[:, None] * columns + np.arange(columns)).ravel()
    assert bits_an_entry(pb.INDEX_CODEC_RUNS, offsets) * columns < bits_a_row
    assert bits_an_entry(pb.INDEX_CODEC_RICE, offsets) * columns > 2 * bits_a_row


def test_the_layout_of_runs_is_the_documented_one():
    """Entries 20 to 23 and 28 to 31: starts 20 and 28, ends 3 and 7."""
    data = RUNS.encode(np.array([*range(20, 24), *range(28, 32)]), 40)
    starts, ends = RICE.encode(np.array([20, 28]), 40), RICE.encode(np.array([3, 7]), 8)
    assert data == bytes([2, 0, 0, 0, len(starts), 0, 0, 0]) + starts + ends
    page = (Path(__file__).parents[3] / "docs" / "reference" / "wire-format.md").read_text()
    assert data.hex() in page.replace(" ", "").replace("|", "")
