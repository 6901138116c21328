"""Exchanging buffers through the shard: counted once a step, kept on the coordinator alone."""

import pytest
import torch

from pscore.model.buffers import pack
from pscore.model.layout import TensorSpec
from pscore.wire.errors import ErrorCode
from psservice.shard.buffers import exchange_buffers
from psservice.shard.join import leave
from tests.psservice.service_makers import F32, layout_of
from tests.psservice.shard_makers import (
    ANNA,
    BERT,
    full,
    join,
    open_shards,
    present,
    reason_of,
    serving,
    serving_shards,
    upload,
)

LAYOUT = layout_of((6, F32), (4, F32), buffers=(TensorSpec("mean", (3,), F32), TensorSpec("count", (), torch.int64)))
ONES = torch.ones(10)
START = [torch.zeros(3), torch.tensor(0)]


def data(value, count=0):
    return pack([torch.full((3,), float(value)), torch.tensor(count)])


def exchange(shard, who, step, samples, contribution):
    return exchange_buffers(shard, who, present(shard), step, samples, contribution)


@pytest.fixture
def shard():
    with serving(LAYOUT, ONES, START) as shard:
        yield shard


def test_one_worker_gets_its_own_buffers_back(shard):
    assert exchange(shard, ANNA, 1, 32, data(5, 7)) == data(5, 7)


def test_a_repeat_is_answered_and_not_counted_again(shard):
    join(shard, LAYOUT, BERT)
    exchange(shard, ANNA, 1, 30, data(3))
    after = exchange(shard, BERT, 1, 30, data(6))
    for _ in range(3):
        assert exchange(shard, BERT, 1, 30, data(6)) == after
    weight = 30 / 2 + 30
    expected = 3 + 30 / weight * (6 - 3)
    assert after == pack([torch.full((3,), torch.tensor(expected).item()), torch.tensor(0)])


def test_an_exchange_without_samples_only_reads(shard):
    exchange(shard, ANNA, 1, 30, data(3))
    assert exchange(shard, ANNA, 0, 0, data(99, 99)) == data(3)
    assert exchange(shard, ANNA, 2, 0, data(99, 99)) == data(3)


def test_two_workers_at_the_same_step_both_count(shard):
    join(shard, LAYOUT, BERT)
    exchange(shard, ANNA, 4, 10, data(0, 1))
    after = exchange(shard, BERT, 4, 10, data(9, 5))
    assert after == pack([torch.full((3,), 6.0), torch.tensor(5)])


def test_another_generation_or_no_lease_is_refused(shard):
    assert reason_of(exchange_buffers, shard, ANNA, full(2), 1, 1, data(1)) is ErrorCode.STALE_GENERATION
    assert reason_of(exchange, shard, BERT, 1, 1, data(1)) is ErrorCode.LEASE_EXPIRED


def test_the_other_shards_keep_none():
    with serving_shards(2, LAYOUT, ONES, START) as (_, shard):
        assert reason_of(exchange, shard, ANNA, 1, 1, data(1)) is ErrorCode.BAD_REQUEST


def test_the_policy_none_keeps_none():
    with open_shards(buffers="none") as (shard,):
        upload(shard, ONES, ANNA, join(shard, LAYOUT).generation)
        assert reason_of(exchange, shard, ANNA, 1, 1, data(1)) is ErrorCode.BAD_REQUEST


def test_the_upload_brings_all_buffers(shard):
    assert exchange(shard, ANNA, 0, 0, data(1)) == pack(START)


def test_a_repeat_after_a_lost_lease_is_not_counted_again(shard):
    join(shard, LAYOUT, BERT)
    exchange(shard, ANNA, 1, 30, data(3))
    after = exchange(shard, BERT, 1, 30, data(6))
    leave(shard, BERT)
    join(shard, LAYOUT, BERT)
    assert exchange(shard, BERT, 1, 30, data(6)) == after


def test_a_contribution_that_is_no_number_does_not_count(shard):
    before = exchange(shard, ANNA, 1, 30, data(3))
    assert exchange(shard, ANNA, 2, 30, data(float("nan"))) == before
    assert exchange(shard, ANNA, 3, 30, data(4)) == data(4)


def test_an_infinite_buffer_stands_and_may_become_finite_again(shard):
    join(shard, LAYOUT, BERT)
    assert exchange(shard, ANNA, 1, 30, data(float("-inf"))) == data(float("-inf"))
    assert exchange(shard, BERT, 1, 30, data(float("-inf"))) == data(float("-inf"))
    assert exchange(shard, ANNA, 2, 30, data(2)) == data(2)
