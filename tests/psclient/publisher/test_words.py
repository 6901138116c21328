"""The words that differ from a baseline: the same ones, however small the tensors are and in whichever blocks."""

from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psclient.errors import ConfigurationError
from psclient.publisher import words
from psclient.publisher.baseline import Baseline
from psclient.publisher.words import OwnWords
from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from tests.pscore.core_makers import as_dict
from tests.tiers import examples


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=20).filter(any),
    st.integers(1, 30),
    st.integers(1, 60),
    st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=examples(60))
def test_what_differs_is_found_in_order_however_tensors_are_compared(sizes, small, block, chance):
    tensors = {f"t{i}": torch.zeros(size, dtype=torch.int16) for i, size in enumerate(sizes)}
    flat = np.zeros(sum(sizes), np.uint16)
    baseline = Baseline("")
    try:
        OwnWords(tensors).fill(baseline)
        for place in chance.sample(range(flat.size), chance.randrange(flat.size + 1)):
            flat[place] = 7
        for tensor, part in zip(tensors.values(), np.split(flat, np.cumsum(sizes)[:-1]), strict=True):
            tensor.copy_(torch.from_numpy(part.view(np.int16)))
        handed = torch.empty(40, dtype=torch.int16)  # the same memory again and again

        def one_by_one():
            for name, tensor in tensors.items():
                yield name, handed[: tensor.numel()].copy_(tensor)

        for source in (tensors, one_by_one()):
            with mock.patch.multiple(words, _SMALL=small, _BLOCK=block):
                found = list(OwnWords(source).differences(baseline))
            indices = [segment.span.start + offset for segment in found for offset in segment.offsets.tolist()]
            assert indices == np.flatnonzero(flat).tolist()
            assert all((segment.values == 7).all() for segment in found)
            assert all(segment.span.length <= block for segment in found)
    finally:
        baseline.close()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=30), st.integers(1, 40))
@settings(deadline=None, max_examples=examples(60))
def test_segments_of_small_tensors_are_joined_within_a_block_and_keep_their_entries(gaps, block):
    segments, end = [], 0
    for gap, length in gaps:
        span = Span(end + gap, end + gap + length)
        offsets = torch.arange(0, length, 2)
        segments.append(SparseSlice(span, offsets, (offsets + span.start).to(torch.int32)))
        end = span.end
    with mock.patch.object(words, "_BLOCK", block):
        found = list(words.joined(segments))
    assert as_dict(*found) == as_dict(*segments)
    assert [each.span.start for each in found] == sorted({each.span.start for each in found})
    assert all(each.span.length <= max(block, 9) for each in found)
    assert all(later.span.end - each.span.start > block for each, later in pairwise(found))


@pytest.mark.parametrize("number", [0, 1500, 2999])
def test_a_tensor_among_many_that_is_another_is_named(number):
    baseline = Baseline("")
    tensors = [(f"t{i}", torch.zeros(2)) for i in range(3000)]
    try:
        OwnWords(tensors).fill(baseline)
        with pytest.raises(ConfigurationError, match="the source lacks t2999 "):
            list(OwnWords(tensors[:-1]).differences(baseline))
        tensors[number] = ("other", torch.zeros(2))
        with pytest.raises(ConfigurationError, match=rf"other .* stands where the feed has t{number} "):
            list(OwnWords(tensors).differences(baseline))
    finally:
        baseline.close()
