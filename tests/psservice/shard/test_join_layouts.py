"""What a joining worker brings is compared with the run's model, and read only where it may become that."""

from dataclasses import replace

import pytest
import torch

from pscore.model.layout import ModelLayout, TensorSpec
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.layouts import layout_to_message, pack_layout
from psservice.shard import join as joining
from tests.packed import packed
from tests.psservice.service_makers import F32, layout_of
from tests.psservice.shard_makers import ANNA, BERT, join, open_shards, serving

LAYOUT = layout_of((6, F32), (4, F32), buffers=(TensorSpec("count", (), torch.int64),))


@pytest.fixture
def shard(monkeypatch):
    with serving(LAYOUT, torch.zeros(10), buffers=[torch.tensor(0)]) as running:

        def read(message):
            raise AssertionError("a layout is read although the run has one")

        monkeypatch.setattr(joining, "unpack_layout", read)
        yield running


def changed(layout, position, **fields):
    specs = list(layout.parameters)
    specs[position] = replace(specs[position], **fields)
    return ModelLayout(tuple(specs), layout.buffers)


def test_the_same_model_is_the_runs_own(shard):
    layouts = joining.JoinLayouts(shard)
    assert layouts.read(BERT, pack_layout(LAYOUT)) is shard.state.layout
    tied = pack_layout(changed(LAYOUT, 1, aliases=("head",)))
    assert layouts.read(BERT, tied) is shard.state.layout


@pytest.mark.parametrize(
    ("other", "tensor"),
    [
        (changed(LAYOUT, 1, shape=(2, 2)), "t1"),
        (changed(LAYOUT, 0, name="other"), "other"),
        (ModelLayout(LAYOUT.parameters[:1], LAYOUT.buffers), "t1"),
        (ModelLayout(LAYOUT.parameters), "count"),
        (ModelLayout((*LAYOUT.parameters, TensorSpec("more", (1,), F32)), LAYOUT.buffers), "more"),
    ],
)
def test_another_model_is_refused_by_its_first_tensor_that_differs(shard, other, tensor):
    with pytest.raises(Rejected) as refused:
        joining.JoinLayouts(shard).read(BERT, pack_layout(other))
    assert refused.value.reason is ErrorCode.FINGERPRINT_MISMATCH
    assert refused.value.metadata == {"tensor": tensor}


def test_a_name_of_any_length_makes_a_short_answer(shard):
    message = layout_to_message(LAYOUT)
    message.parameters[0].name = "\x1b" * 1_000_000
    message.parameters[1].shape.extend(range(200_000))
    with pytest.raises(Rejected) as refused:
        joining.JoinLayouts(shard).read(BERT, packed(message))
    assert len(str(refused.value)) < 2000
    assert str(refused.value).isprintable()


def test_a_fingerprint_that_is_not_the_models_is_refused(shard):
    message = packed(layout_to_message(LAYOUT), fingerprint=bytes(32))
    with pytest.raises(Rejected, match="fingerprint") as refused:
        joining.JoinLayouts(shard).read(BERT, message)
    assert refused.value.reason is ErrorCode.BAD_REQUEST


def test_before_there_is_a_model_one_who_is_alone_brings_another():
    other = layout_of((5, F32))
    with open_shards() as (shard,):
        join(shard, LAYOUT, ANNA)
        layouts = joining.JoinLayouts(shard)
        assert layouts.read(ANNA, pack_layout(other)) == other
        with pytest.raises(Rejected):
            layouts.read(BERT, pack_layout(other))
