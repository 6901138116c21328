"""The digest of a model: the sum over its elements, whatever the order in which they came to be."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.digest import DIGEST_BYTES, ModelDigest, total
from pscore.model.layout import ModelLayout, Span, TensorSpec
from pscore.model.layout import layout_of as layout_of_tensors
from pscore.model.sparse_slice import SparseSlice
from tests.tiers import examples

MASK = (1 << 64) - 1
SIZES = {"a": (30, torch.float32), "b": (25, torch.bfloat16), "c": (20, torch.float16)}
LAYOUT = layout_of_tensors([(name, torch.zeros(size, dtype=dtype)) for name, (size, dtype) in SIZES.items()])
SIZE = LAYOUT.size
LOW = (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xC2B2AE3D27D4EB4F, 0x2545F4914F6CDD1D)
HIGH = (0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3, 0x589965CC75374CC3)


def mixed(index, word, first, second, third, fourth):
    """As docs/reference/wire-format.md has it, in whole numbers."""
    x = (index + fourth) * first & MASK
    x ^= x >> 32
    x = (x ^ (word * second & MASK)) * third & MASK
    x ^= x >> 29
    x = x * fourth & MASK
    return x ^ x >> 32


def by_hand(values):
    words = [
        int.from_bytes(
            value.to(dtype).view(torch.int32 if dtype is torch.float32 else torch.int16).numpy().tobytes(), "little"
        )
        for dtype, run in LAYOUT.dtype_runs(Span(0, SIZE))
        for value in values[run.start : run.end]
    ]
    halves = [sum(mixed(index, word, *keys) for index, word in enumerate(words)) & MASK for keys in (LOW, HIGH)]
    return struct.pack("<QQ", *halves)


def rounded(values):
    return torch.cat([values[run.start : run.end].to(dtype).float() for dtype, run in LAYOUT.dtype_runs(Span(0, SIZE))])


def whole(values):
    return SparseSlice(Span(0, SIZE), None, values)


def digest_of(values):
    digest = ModelDigest(LAYOUT)
    digest.add(whole(values))
    return digest.value


values = st.lists(st.floats(-1e4, 1e4, width=32), min_size=SIZE, max_size=SIZE).map(
    lambda found: torch.tensor(found, dtype=torch.float32)
)


@given(values)
@settings(deadline=None, max_examples=examples(20))
def test_it_is_the_sum_that_the_format_says(found):
    assert digest_of(found) == by_hand(found)


@given(values, values, st.sets(st.integers(0, SIZE - 1)), st.integers(0, SIZE))
@settings(deadline=None, max_examples=examples(50))
def test_it_follows_changes_and_is_the_sum_of_shards(before, after, places, border):
    offsets = torch.tensor(sorted(places), dtype=torch.int64)
    digest = ModelDigest(LAYOUT, digest_of(before))
    digest.remove(SparseSlice(Span(0, SIZE), offsets, before[offsets]))
    digest.add(SparseSlice(Span(0, SIZE), offsets, after[offsets]))
    changed = before.clone()
    changed[offsets] = after[offsets]
    assert digest.value == digest_of(changed) == digest_of(rounded(changed))

    shards = []
    for span in (Span(0, border), Span(border, SIZE)):
        shards.append(ModelDigest(LAYOUT))
        shards[-1].add(SparseSlice(span, None, changed[span.start : span.end]))
    assert total([shard.value for shard in shards]) == digest.value


@given(values, st.integers(0, SIZE - 1), st.integers(0, 15))
@settings(deadline=None, max_examples=examples(50))
def test_a_flipped_bit_and_two_exchanged_values_show(found, place, bit):
    found = rounded(found)
    dtype = next(dtype for dtype, run in LAYOUT.dtype_runs(Span(0, SIZE)) if place < run.end)
    one = found[place].to(dtype).reshape(1)
    words = one.view(torch.int32 if dtype is torch.float32 else torch.int16).numpy().copy()
    words ^= np.array(1 << bit).astype(words.dtype)
    flipped = found.clone()
    flipped[place] = torch.from_numpy(words).view(dtype).float()
    if flipped[place].isfinite():
        assert digest_of(flipped) != digest_of(found)
    exchanged = found.clone()
    exchanged[[0, 1]] = found[[1, 0]]
    if found[0].view(torch.int32) != found[1].view(torch.int32):
        assert digest_of(exchanged) != digest_of(found)


def test_signs_of_zero_differ():
    assert digest_of(torch.zeros(SIZE)) != digest_of(-torch.zeros(SIZE))


def test_large_models_are_read_in_blocks():
    layout = layout_of_tensors([("a", torch.empty(600_001))])
    found, digest, other = torch.randn(600_001), ModelDigest(layout), ModelDigest(layout)
    digest.add(SparseSlice(Span(0, 600_001), None, found))
    places = torch.arange(600_001)
    other.add(SparseSlice(Span(0, 600_001), places, found))
    assert digest.value == other.value
    for place in (0, 262_144, 600_000):
        digest.remove(SparseSlice(Span(place, place + 1), None, found[place : place + 1]))
    other.remove(SparseSlice(Span(0, 600_001), torch.tensor([0, 262_144, 600_000]), found[[0, 262_144, 600_000]]))
    assert digest.value == other.value


@pytest.mark.parametrize("index", [0, 2**32, 2**40])
def test_places_beyond_32_bits_have_terms_of_their_own(index):
    assert mixed(index, 7, *LOW) != mixed(index + 2**32, 7, *LOW)
    assert len(ModelDigest(LAYOUT).value) == DIGEST_BYTES


def test_words_beyond_two_and_four_thousand_million_count_with_their_indices():
    layout = ModelLayout((TensorSpec("w", (2**33,), torch.uint8),), word_bytes=1)
    places = [0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**33 - 1]
    words = torch.tensor([1, 2, 3, 4, 5, 6], dtype=torch.uint8)
    digest = ModelDigest(layout)
    digest.add(SparseSlice(Span(0, 2**33), torch.tensor(places), words))
    entries = list(zip(places, words.tolist(), strict=True))
    halves = [sum(mixed(place, word, *odd) for place, word in entries) & MASK for odd in (LOW, HIGH)]
    assert digest.value == b"".join(half.to_bytes(8, "little") for half in halves)
    for place, word in zip(places, words, strict=True):
        digest.remove(SparseSlice(Span(place, place + 1), None, word[None]))
    assert digest.value == bytes(DIGEST_BYTES)
