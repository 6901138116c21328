"""Admission at one shard: the cut-off and the bound on leads; what is refused changes nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.wire.errors import ErrorCode, Rejected
from psservice.awaiting import NotYetError
from psservice.membership.admission import Admission, Pace
from psservice.shard.join import leave
from psservice.shard.lifecycle import finish
from psservice.shard.push import check_push
from psservice.values import Identity
from tests.psservice.service_makers import F32, layout_of
from tests.psservice.shard_makers import (
    ANNA,
    BERT,
    HOUR,
    join,
    open_shards,
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
CARL = Identity("carl", "1")
WORKERS = (ANNA, BERT, CARL)


def attempt(shard, step, entries=(), who=ANNA, **options):
    """A push as the servicer takes it: looked at by its header first."""
    check_push(shard, who, step)
    return push(shard, step, entries, who, **options)


def advance(shard, who, pushes):
    for _ in range(pushes):
        attempt(shard, shard.state.pushes.find(who).step + 1, who=who)


# The rules by themselves


def test_every_rule_is_off_at_first():
    rules = Admission()
    rules.require_fresh(1_000_000)
    rules.require_in_step(Pace(1_000_000, 0, "bert"))


@given(st.integers(1, 100), st.integers(0, 200))
def test_the_cut_off_refuses_what_is_staler_and_says_by_how_much(most, staleness):
    rules = Admission(max_staleness=most)
    if staleness <= most:
        rules.require_fresh(staleness)
        return
    with pytest.raises(Rejected, match=str(staleness)) as refused:
        rules.require_fresh(staleness)
    assert refused.value.reason is ErrorCode.TOO_STALE
    assert refused.value.metadata == {"staleness": str(staleness), "max_staleness": str(most)}


@given(st.integers(1, 50), st.integers(0, 200), st.integers(0, 200))
def test_the_bound_holds_back_who_would_be_further_ahead_until_the_slowest_has_come_on(bound, clock, slowest):
    rules, paces = Admission(ssp_bound=bound), [Pace(clock, slowest, BERT)]
    if clock + 1 - slowest <= bound:
        rules.require_in_step(lambda: paces[-1])
        return
    with pytest.raises(NotYetError, match="'bert'") as refused:
        rules.require_in_step(lambda: paces[-1])
    assert refused.value.reason is ErrorCode.TOO_FAR_AHEAD
    assert 0 < refused.value.retry_seconds <= 1.0
    assert not refused.value.is_over()
    paces.append(Pace(clock, clock - bound, BERT))
    assert not refused.value.is_over()
    paces.append(Pace(clock, clock + 1 - bound, BERT))
    assert refused.value.is_over()
    paces.append(None)  # the other worker has gone
    assert refused.value.is_over()


def test_a_worker_alone_is_never_held_back():
    Admission(ssp_bound=1).require_in_step(lambda: None)


# The cut-off


@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from(WORKERS), st.booleans()), max_size=30))
@settings(deadline=None, max_examples=examples(40))
def test_nothing_staler_than_the_cut_off_is_applied_and_everything_else_is(most, schedule):
    with serving(LAYOUT, ZEROS, max_staleness=most) as shard:
        for who in WORKERS[1:]:
            join(shard, LAYOUT, who)
        bases, steps, order = dict.fromkeys(WORKERS, 0), dict.fromkeys(WORKERS, 0), []
        for who, pulls in schedule:
            steps[who] += 1
            stale = sum(pusher != who for pusher in order[bases[who] :])
            if stale > most:
                assert reason_of(attempt, shard, steps[who], {0: 1.0}, who, base=bases[who]) is ErrorCode.TOO_STALE
            else:
                answer, _ = attempt(shard, steps[who], {0: 1.0}, who, base=bases[who])
                assert answer.staleness == stale
                order.append(who)
            assert (shard.model.version, theta(shard)[0].item()) == (len(order), -len(order))
            if pulls:
                bases[who] = shard.model.version


def test_a_repeat_is_answered_although_it_would_be_too_stale_by_now():
    with serving(LAYOUT, ZEROS, max_staleness=1) as shard:
        join(shard, LAYOUT, BERT)
        first, _ = attempt(shard, 1, {0: 1.0})
        for step in (1, 2, 3):
            attempt(shard, step, who=BERT, base=shard.model.version)
        assert attempt(shard, 1, {0: 1.0}) == (first, True)
        assert reason_of(attempt, shard, 2, {0: 1.0}) is ErrorCode.TOO_STALE


def test_each_shard_cuts_off_its_own_part():
    with serving_shards(2, LAYOUT, ZEROS, max_staleness=1) as (first, second):
        for shard in (first, second):
            join(shard, LAYOUT, BERT)
        for step in (1, 2):
            attempt(second, step, who=BERT, base=step - 1)
        assert attempt(first, 1, {0: 1.0})[0].version == 1
        assert reason_of(attempt, second, 1, {9: 1.0}) is ErrorCode.TOO_STALE


# The bound

moves = st.lists(
    st.tuples(st.sampled_from(WORKERS), st.sampled_from(["push", "push", "push", "repeat", "leave", "join", "die"])),
    max_size=60,
)


@given(st.integers(1, 4), moves)
@settings(deadline=None, max_examples=examples(60))
def test_no_worker_is_ever_further_ahead_and_the_slowest_is_never_held_back(bound, schedule):
    with serving(LAYOUT, ZEROS, ssp_bound=bound) as shard:
        clock, model, steps = with_clock(shard), {ANNA: 0}, dict.fromkeys(WORKERS, 0)
        for who, move in schedule:
            if move == "join":
                join(shard, LAYOUT, who)
                model.setdefault(who, min(model.values(), default=0))
            elif move == "leave":
                leave(shard, who)
                model.pop(who, None)
            elif move == "die":  # every lease but this one's is renewed
                clock.now += HOUR / 2
                for other in set(model) - {who}:
                    shard.leases.require(other)
                clock.now += HOUR / 2 + 1
                model.pop(who, None)
                for other in model:
                    shard.leases.require(other)
            elif move == "repeat" and who in model and steps[who]:
                assert attempt(shard, steps[who], who=who)[1]
            elif move == "push" and who in model:
                others = [count for other, count in model.items() if other != who]
                before = shard.model.version
                if others and model[who] + 1 - min(others) > bound:
                    assert reason_of(check_push, shard, who, steps[who] + 1) is ErrorCode.TOO_FAR_AHEAD
                    assert reason_of(push, shard, steps[who] + 1, who=who) is ErrorCode.TOO_FAR_AHEAD
                    assert shard.model.version == before
                    assert model[who] > min(others)
                else:
                    steps[who] += 1
                    attempt(shard, steps[who], who=who)
                    model[who] += 1
            assert {member.identity: member.worker.clock for member in shard.leases.members()} == model
            assert shard.leases.clock_spread() <= bound


def test_a_late_joiner_holds_nobody_back_for_its_past():
    with serving(LAYOUT, ZEROS, ssp_bound=2) as shard:
        join(shard, LAYOUT, BERT)
        for _ in range(5):
            advance(shard, ANNA, 1)
            advance(shard, BERT, 1)
        join(shard, LAYOUT, CARL)
        advance(shard, ANNA, 2)
        assert reason_of(attempt, shard, 8, who=ANNA) is ErrorCode.TOO_FAR_AHEAD


def test_a_dead_worker_stops_counting_when_its_lease_ends():
    with serving(LAYOUT, ZEROS, ssp_bound=1) as shard:
        clock = with_clock(shard)
        join(shard, LAYOUT, BERT)
        advance(shard, ANNA, 1)
        clock.now += HOUR - 1
        assert reason_of(check_push, shard, ANNA, 2) is ErrorCode.TOO_FAR_AHEAD
        clock.now += 2
        advance(shard, ANNA, 5)


def test_one_that_leaves_stops_counting_at_once():
    with serving(LAYOUT, ZEROS, ssp_bound=1) as shard:
        join(shard, LAYOUT, BERT)
        advance(shard, ANNA, 1)
        assert reason_of(check_push, shard, ANNA, 2) is ErrorCode.TOO_FAR_AHEAD
        leave(shard, BERT)
        advance(shard, ANNA, 5)


def test_the_end_of_the_run_is_told_to_one_that_waits():
    with serving(LAYOUT, ZEROS, ssp_bound=1) as shard:
        join(shard, LAYOUT, BERT)
        advance(shard, ANNA, 1)
        finish(shard)
        assert reason_of(attempt, shard, 2) is ErrorCode.RUN_FINISHED


def test_shard_0_alone_keeps_the_bound():
    with serving_shards(2, LAYOUT, ZEROS, ssp_bound=1) as (first, second):
        for shard in (first, second):
            join(shard, LAYOUT, BERT)
            advance(shard, ANNA, 1)
        assert reason_of(check_push, first, ANNA, 2) is ErrorCode.TOO_FAR_AHEAD
        advance(second, ANNA, 1)


def test_what_is_refused_leaves_nothing_in_the_journal(tmp_path):
    limits = {"max_staleness": 1, "ssp_bound": 3}
    with serving(LAYOUT, ZEROS, data_dir=tmp_path, **limits) as shard:
        join(shard, LAYOUT, BERT)
        advance(shard, ANNA, 1)
        attempt(shard, 1, who=BERT, base=1)
        attempt(shard, 2, who=BERT, base=1)
        before = shard.durability.journal_bytes
        assert reason_of(attempt, shard, 2, {0: 1.0}) is ErrorCode.TOO_STALE
        assert reason_of(push, shard, 3, {0: 1.0}, base=0) is ErrorCode.TOO_STALE
        assert shard.durability.journal_bytes == before
        assert shard.model.version == 3


def test_a_repeat_is_answered_by_a_server_that_was_started_with_a_lower_cut_off(tmp_path):
    with serving(LAYOUT, ZEROS, data_dir=tmp_path) as shard:
        join(shard, LAYOUT, BERT)
        advance(shard, BERT, 3)
        first, _ = attempt(shard, 1, {0: 5.0}, base=0)
    with open_shards(data_dir=tmp_path, max_staleness=1) as (again,):
        answer, repeated = attempt(again, 1, {0: 5.0}, base=0)
        assert (answer.version, repeated) == (first.version, True)


@pytest.mark.parametrize("settings", [{"max_staleness": 1}, {"ssp_bound": 1}])
def test_no_rule_refuses_a_worker_that_is_alone(settings):
    with serving(LAYOUT, ZEROS, **settings) as shard:
        for step in range(1, 20):
            attempt(shard, step, {0: 0.5}, base=shard.model.version)
        assert shard.model.version == 19
