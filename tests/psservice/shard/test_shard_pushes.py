"""Pushes at one shard: once per identity, in order, in the right history, or not at all."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.errors import ErrorCode
from psservice.shard.join import leave
from psservice.shard.push import check_push
from psservice.values import Identity
from tests.psservice.service_makers import F32, layout_of
from tests.psservice.shard_makers import (
    ANNA,
    BERT,
    HOUR,
    full,
    join,
    last_push,
    open_shards,
    pull,
    push,
    reason_of,
    serving,
    serving_shards,
    theta,
    with_clock,
)
from tests.tiers import examples

LAYOUT = layout_of((6, F32), (4, F32))
ZEROS = torch.zeros(10)


@pytest.fixture
def shard():
    with serving(LAYOUT, ZEROS) as shard:
        join(shard, LAYOUT, BERT)
        yield shard


def test_a_push_is_subtracted_and_counted(shard):
    answer, repeated = push(shard, 1, {2: 0.5, 9: -1.0})
    assert (answer.version, answer.staleness, repeated) == (1, 0, False)
    assert theta(shard).tolist() == [0, 0, -0.5, 0, 0, 0, 0, 0, 0, 1.0]


@given(st.lists(st.tuples(st.sampled_from([ANNA, BERT]), st.integers(1, 4)), max_size=25))
@settings(deadline=None, max_examples=examples(30))
def test_each_identity_is_applied_exactly_once(schedule):
    with serving(LAYOUT, ZEROS) as shard:
        join(shard, LAYOUT, BERT)
        applied, last, answers = torch.zeros(10), {}, {}
        for who, step in schedule:
            entries = {step: float(step), 5 if who is ANNA else 6: 1.0}
            if step < last.get(who, 0):
                assert reason_of(push, shard, step, entries, who) is ErrorCode.STEP_OUT_OF_ORDER
                continue
            answer, repeated = push(shard, step, entries, who)
            assert repeated == (step == last.get(who))
            assert answer == answers.setdefault((who, step), answer)
            if not repeated:
                for index, value in entries.items():
                    applied[index] += value
            last[who] = step
        assert torch.equal(theta(shard), -applied)
        assert shard.model.version == len(answers)


def test_a_repeat_that_races_its_first_attempt_is_applied_once(shard):
    together, found = threading.Barrier(8), []

    def attempt():
        together.wait()
        found.append(push(shard, 1, {0: 1.0}))

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(repeated for _, repeated in found) == [False] + [True] * 7
    assert len({answer for answer, _ in found}) == 1
    assert theta(shard)[0].item() == -1


def test_steps_rise_with_gaps_allowed(shard):
    push(shard, 3, {0: 1.0})
    push(shard, 10, {0: 1.0})
    assert reason_of(push, shard, 4, {0: 1.0}) is ErrorCode.STEP_OUT_OF_ORDER
    assert shard.model.version == 2
    assert theta(shard)[0].item() == -2


def test_empty_pushes_are_counted_too(shard):
    assert [push(shard, step)[0].version for step in (1, 2, 3)] == [1, 2, 3]
    assert torch.equal(theta(shard), ZEROS)


def test_staleness_is_how_far_the_server_went_on(shard):
    for step in (1, 2, 3):
        push(shard, step, who=BERT)
    assert push(shard, 1, base=1)[0].staleness == 2
    assert push(shard, 2, base=4)[0].staleness == 0


def test_a_restarted_worker_counts_its_steps_anew(shard):
    push(shard, 7, {0: 1.0})
    leave(shard, ANNA)
    again = Identity("anna", "2")
    assert last_push(join(shard, LAYOUT, again)) == ("1", 7)
    assert push(shard, 1, {0: 1.0}, again)[1] is False
    assert shard.model.version == 2


def test_a_repeat_is_recognised_although_another_life_of_the_worker_came_between(shard):
    first, _ = push(shard, 5, {0: 1.0})
    again = Identity("anna", "2")
    leave(shard, ANNA)
    join(shard, LAYOUT, again)
    push(shard, 1, {0: 1.0}, again)
    leave(shard, again)
    join(shard, LAYOUT, ANNA)
    assert push(shard, 5, {0: 1.0}) == (first, True)
    assert shard.model.version == 2


def test_a_repeat_after_a_lost_lease_is_recognised(shard):
    clock = with_clock(shard)
    first, _ = push(shard, 1, {0: 1.0})
    clock.now += HOUR
    assert reason_of(push, shard, 1, {0: 1.0}) is ErrorCode.LEASE_EXPIRED
    assert last_push(join(shard, LAYOUT, ANNA)) == (ANNA.incarnation, 1)
    assert push(shard, 1, {0: 1.0}) == (first, True)
    assert theta(shard)[0].item() == -1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"generation": full(2)}, ErrorCode.STALE_GENERATION),
        ({"generation": full(1, nonce=0)}, ErrorCode.STALE_GENERATION),
        ({"generation": 0}, ErrorCode.STALE_GENERATION),
        ({"base": 1}, ErrorCode.VERSION_IN_FUTURE),
        ({"who": Identity("carl", "1")}, ErrorCode.LEASE_EXPIRED),
        ({"who": Identity("anna", "2")}, ErrorCode.LEASE_EXPIRED),
    ],
)
def test_a_refused_push_changes_nothing_and_its_step_stays_free(shard, options, reason):
    assert reason_of(push, shard, 5, {0: 1.0}, **options) is reason
    assert shard.model.version == 0
    assert torch.equal(theta(shard), ZEROS)
    assert push(shard, 1, {0: 1.0})[1] is False


def test_before_the_upload_there_is_nothing_to_push_to():
    with open_shards() as (shard,):
        assert reason_of(push, shard, 1) is ErrorCode.NOT_INITIALISED
        join(shard, LAYOUT)
        assert reason_of(push, shard, 1) is ErrorCode.NOT_INITIALISED
        assert reason_of(pull, shard) is ErrorCode.NOT_INITIALISED


def test_a_draining_server_takes_no_new_push(shard):
    shard.drain_gate.is_closed = True
    assert reason_of(check_push, shard, ANNA, 1) is ErrorCode.DRAINING
    assert reason_of(join, shard, LAYOUT, Identity("carl", "1")) is ErrorCode.DRAINING


def test_segments_may_come_in_any_order_dense_and_sparse(shard):
    dense = SparseSlice(Span(7, 10), None, torch.tensor([7.0, 8.0, 9.0]))
    sparse = SparseSlice(Span(0, 6), torch.tensor([1, 5]), torch.tensor([1.0, 5.0]))
    push(shard, 1, [dense, sparse])
    assert theta(shard).tolist() == [0, -1, 0, 0, 0, -5, 0, -7, -8, -9]


pushes = st.lists(st.dictionaries(st.integers(0, 9), st.floats(-10, 10, width=32), max_size=6), max_size=12)


@pytest.mark.long
@given(pushes, st.integers(2, 4), st.integers(0, 2**16))
@settings(deadline=None, max_examples=examples(25))
def test_several_shards_are_one_bit_for_bit(history, num_shards, seed):
    values = torch.randn(10, generator=torch.Generator().manual_seed(seed))
    with serving(LAYOUT, values) as whole, serving_shards(num_shards, LAYOUT, values) as shards:
        for shard in (whole, *shards):
            for step, entries in enumerate(history, 1):
                push(shard, step, entries)
        assert {shard.model.version for shard in (whole, *shards)} == {len(history)}
        assert torch.equal(torch.cat([theta(shard) for shard in shards]), theta(whole))
