"""Copies of a model at one version, while later versions are made."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from psservice.durability.final_model import ModelCopy
from psservice.model.parameters import ModelShard
from psservice.model.training_mode import TrainingMode
from psservice.settings import ShardSettings
from tests.psservice.service_makers import F32, layout_of

SPAN = Span(3, 23)


def shard(values):
    return ModelShard(
        layout_of((30, F32)), SPAN, values, generation=1, version=0, settings=ShardSettings(), mode=TrainingMode()
    )


@given(st.lists(st.booleans(), max_size=12), st.integers(1, 9))
@settings(deadline=None)
def test_a_copy_is_the_model_at_its_version_whatever_is_pushed_meanwhile(steps, size):
    values = torch.arange(20.0)
    model = shard(values.clone())
    copy, parts, start = ModelCopy(model, {}), [], SPAN.start
    for pushes in [*steps, *[False] * 20]:
        if pushes:
            model.apply(SparseSlice(SPAN, None, torch.ones(20)))
        elif start < SPAN.end:
            end = min(SPAN.end, start + size)
            parts.append(copy.read(Span(start, end)))
            start = end
    assert torch.equal(torch.cat(parts), values)
    assert copy.version == 0
    copy.close()
    assert not model.before_update


@pytest.mark.parametrize("pushes", [0, 1])
def test_the_unread_rest_is_copied_once_and_before_an_update_only(pushes):
    model = shard(torch.arange(20.0))
    copy = ModelCopy(model, {})
    copy.read(Span(3, 13))
    for _ in range(3 * pushes):
        model.apply(SparseSlice(SPAN, None, torch.ones(20)))
    assert copy._values.numel() == (10 if pushes else 20)
    assert (copy._values.data_ptr() == model.theta.data_ptr()) is not bool(pushes)
    assert len(model.before_update) == 1 - pushes
