"""A share of the dense bytes becomes a density and a value type that take no more than that."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire import frames
from pscore.wire.budget import FEWEST_BYTES, bits_of, density_of, element_bits, fit, least_share, roomiest
from pscore.wire.codecs.values import VALUE_FORMATS
from pscore.wire.v1 import parameter_server_pb2 as pb

CODECS = [pb.VALUE_CODEC_FP32, pb.VALUE_CODEC_BF16, pb.VALUE_CODEC_INT8, pb.VALUE_CODEC_INT4]
shares = st.floats(1e-5, 1.0)


@given(shares, st.floats(0.0, 1.0))
def test_the_form_takes_no_more_than_the_share_and_uses_it(share, whole):
    if share <= 1.001 * least_share(whole):
        return
    density, codec = fit(share, whole)
    value = VALUE_FORMATS[codec]
    bits = whole * bits_of(value) + (1 - whole) * element_bits(density, value)
    assert bits <= 32 * share * (1 + 1e-9)
    assert density == 1 or bits >= 32 * share * 0.969


@given(shares, shares)
def test_a_larger_share_carries_no_fewer_entries_and_no_fewer_bits(one, other):
    (low, few), (high, many) = fit(min(one, other)), fit(max(one, other))
    assert low <= high
    assert VALUE_FORMATS[few].bits <= VALUE_FORMATS[many].bits


@pytest.mark.parametrize("codec", CODECS)
@given(st.floats(1e-6, 0.9))
def test_the_density_of_a_cost_is_its_inverse(codec, density):
    value = VALUE_FORMATS[codec]
    assert density_of(element_bits(density, value), value) == pytest.approx(density, rel=1e-6)


@given(st.floats(1e-4, 0.9), st.integers(1, 5000))
def test_few_entries_get_the_bits_that_the_budget_has_left(share, count):
    """Never more than it carries, and the next codec would be too much."""
    size, form = 5000, fit(share)
    offsets = None if count == size else torch.arange(count)
    codec = roomiest(SparseSlice(Span(0, size), offsets, torch.ones(count)), form)
    most = element_bits(form.density, VALUE_FORMATS[form.value])
    taken = [element_bits(count / size, VALUE_FORMATS[each]) <= most for each in CODECS]
    assert codec == (CODECS[taken.index(True)] if any(taken) else form.value)


@pytest.mark.parametrize("share", [0.003, 0.03, 0.1])
def test_what_is_written_keeps_the_share(share):
    size, random = 1_000_000, np.random.default_rng(0)
    density, codec = fit(share)
    offsets = np.sort(random.choice(size, int(size * density), replace=False))
    entries = SparseSlice(Span(0, size), torch.from_numpy(offsets), torch.randn(offsets.size))
    form = frames.WireForm(codec, link_bytes_per_second=FEWEST_BYTES)
    nbytes = sum(piece.chunk.ByteSize() for piece in frames.encode(entries, form, chunk_bytes=1 << 20))
    assert 0.93 * share <= nbytes / (4 * size) <= share
