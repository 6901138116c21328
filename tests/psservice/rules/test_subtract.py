"""Subtracting a push's entries: the loop, and the same loop as Python, do what torch's operations do, or refuse it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.layout import ModelLayout, Span, TensorSpec
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.errors import Rejected
from psservice.rules.subtract import Subtract
from tests.pscore.loop_makers import FORMS, run_as
from tests.tiers import examples


@pytest.mark.parametrize("form", FORMS)
@given(st.integers(1, 400), st.floats(0, 1), st.sampled_from([1.0, 1e30, 3e38]), st.integers(0, 2**16))
@settings(deadline=None, max_examples=examples(50))
def test_entries_are_subtracted_or_all_are_refused(form, n, density, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    x, values = torch.randn(2, n, generator=generator)
    offsets = (torch.rand(n, generator=generator) < density).nonzero().view(-1)
    x, values = x.clamp(-1, 1) * scale, (values[offsets] * scale).clamp(-3.4e38, 3.4e38)
    theta, expected = x.clone(), x.index_put((offsets,), x[offsets] - values)
    rule = Subtract(ModelLayout((TensorSpec("t", (n,), torch.float32),)), Span(0, n), theta)
    with run_as(form):
        if bool(expected.isfinite().all()):
            rule.apply(SparseSlice(Span(0, n), offsets, values))
            assert torch.equal(theta, expected)
        else:
            with pytest.raises(Rejected, match="out of the range"):
                rule.apply(SparseSlice(Span(0, n), offsets, values))
            assert torch.equal(theta, x)
