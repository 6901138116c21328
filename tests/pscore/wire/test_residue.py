"""The residue code: words for a receiver that has words near them."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.layout import Span
from pscore.wire import frames
from pscore.wire.codecs import residue
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb


def reason_of(call, *arguments):
    """The reason of a refusal; ``None`` if there was none."""
    try:
        call(*arguments)
    except Rejected as refusal:
        return refusal.reason
    return None


ALL = np.arange(1 << 16, dtype=np.uint16)


def near(own, steps):
    """The words that are so many places from these, as far as there are places."""
    return residue.words_at(np.clip(residue.places_of(own).astype(np.int64) + steps, 0, 0xFFFF).astype(np.uint16))


def apart(first, second):
    places = [residue.places_of(each).astype(np.int64) for each in (first, second)]
    return np.abs(places[0] - places[1]).astype(np.uint16)


def test_each_word_has_a_place_of_its_own():
    assert (np.sort(residue.places_of(ALL)) == ALL).all()
    assert (residue.words_at(residue.places_of(ALL)) == ALL).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_places_are_in_the_order_of_the_numbers(dtype):
    numbers = torch.from_numpy(residue.words_at(ALL)).view(dtype).float()
    numbers = numbers[~numbers.isnan()]
    assert (numbers.diff() >= 0).all()


@st.composite
def pairs(draw):
    """Words of a receiver, those to send, and bounds of how far they are apart."""
    count, seed = draw(st.integers(1, 600)), draw(st.integers(0, 2**32 - 1))
    furthest = draw(st.sampled_from([1, 3, 7, 100, 40000]))
    rng = np.random.default_rng(seed)
    own = rng.integers(0, 1 << 16, count).astype(np.uint16)
    share = draw(st.sampled_from([0.0, 0.1, 1.0]))
    words = near(
        own, rng.integers(-furthest, furthest + 1, count) * (rng.random(count) < share) + rng.integers(-1, 2, count)
    )
    slack = rng.integers(0, draw(st.sampled_from([1, 4])), count)
    return own, words, np.minimum(apart(own, words).astype(np.int64) + slack, residue.UNKNOWN).astype(np.uint16)


@given(pairs())
@settings(deadline=None)
def test_what_is_read_is_what_was_written_and_may_be_read_again(pair):
    own, words, distances = pair
    data = residue.encode(words, distances)
    if data is None:
        return
    assert len(data) < 2 * words.size
    assert (residue.decode(data, own) == words).all()
    assert (residue.decode(data, words) == words).all()
    half = np.where(np.arange(words.size) % 2, own, words)
    assert (residue.decode(data, half) == words).all()


def test_small_steps_need_two_or_three_bits_a_word():
    rng = np.random.default_rng(0)
    own = rng.integers(0, 1 << 16, 1 << 16).astype(np.uint16)
    for most, bits in ((1, 2.01), (3, 3.01)):
        words = near(own, rng.integers(-most, most + 1, own.size))
        data = residue.encode(words, apart(own, words))
        assert 8 * len(data) / own.size < bits


def test_words_of_which_nothing_is_known_are_not_written():
    assert residue.encode(ALL, np.full(ALL.size, residue.UNKNOWN, np.uint16)) is None


@given(pairs(), st.data())
@settings(deadline=None)
def test_other_bytes_are_refused_or_read_as_words(pair, data):
    own, words, distances = pair
    written = residue.encode(words, distances) or bytes(9)
    where = data.draw(st.integers(0, len(written) - 1))
    other = data.draw(
        st.sampled_from(
            [
                written[:where],
                written + b"\0",
                written[:where] + bytes([data.draw(st.integers(0, 255))]) + written[where + 1 :],
            ]
        )
    )
    reason = reason_of(residue.decode, other, own)
    assert reason in (None, ErrorCode.BAD_CHUNK)
    if reason is None:
        assert residue.decode(other, own).shape == own.shape


@pytest.mark.parametrize(
    "header", [(0, 0, 0), (1, 0, 0), (9, 0, 0), (2, 2**32 - 1, 0), (2, 0, 2**32 - 1), (2, 5, 0), (2, 0, 5)]
)
def test_forged_headers_are_refused_before_anything_is_allocated(header):
    own = np.zeros(4, np.uint16)
    assert reason_of(residue.decode, struct.pack("<BII", *header) + bytes(1), own) is ErrorCode.BAD_CHUNK


def chunk_of(words, distances):
    return pb.Chunk(
        start=10,
        length=words.size,
        count=words.size,
        index_codec=pb.INDEX_CODEC_DENSE,
        value_codec=pb.VALUE_CODEC_RESIDUE,
        values=residue.encode(words, distances),
    )


def test_a_chunk_of_residues_needs_a_receiver_with_values():
    own = torch.linspace(-1, 1, 64).bfloat16()
    words = own.view(torch.uint16).numpy()
    chunk = chunk_of(words, np.zeros(64, np.uint16))
    assert reason_of(frames.decode, chunk, Span(0, 100)) is ErrorCode.UNKNOWN_CODEC
    found = frames.decode(chunk, Span(0, 100), own=lambda span, offsets: own)
    assert found.span == Span(10, 74)
    assert torch.equal(found.values, own.float())
