"""Synchronous rounds: who closes them, what their mean is, and what becomes of those who are late."""

import json
import math
import statistics
from contextlib import closing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.layout import Span
from pscore.model.ranges import Ranges
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.errors import ErrorCode
from psservice.data_leases.dataset import Plan, SampleRequest
from psservice.model.training_mode import RoundSettings
from psservice.observability.metrics import Metrics
from psservice.rounds.expected import ExpectedWorkers
from psservice.rounds.round import SynchronousRound
from psservice.rules.base import PushContext
from psservice.settings import ServerSettings
from psservice.shard.join import leave
from psservice.shard.lifecycle import finish, open_shard
from psservice.shard.samples import lease_samples
from psservice.state.run import RunState
from psservice.storage.environment import Environment
from psservice.values import Identity
from tests.psservice.service_makers import F32, layout_of, sparse_push
from tests.psservice.shard_makers import (
    ANNA,
    BERT,
    HOUR,
    UPLOAD,
    Clock,
    join,
    open_shards,
    pull,
    push,
    reason_of,
    theta,
    upload,
    with_clock,
)

CARL = Identity("carl", "1")
LAYOUT = layout_of((4, F32))
ZERO = torch.zeros(4)


def rounds(quorum=0, seconds=0.0, start_workers=1, **further):
    return {"rounds": json.dumps({"quorum": quorum, "seconds": seconds, "start_workers": start_workers, **further})}


@pytest.fixture
def shard():
    with open_shards() as (one,):
        yield one


def begin(shard, *who, **options):
    for each in who:
        outcome = join(shard, LAYOUT, each, "ssgd", rounds(**options))
        if outcome.state == UPLOAD:
            upload(shard, ZERO, each, outcome.generation)


def test_the_mean_of_all_live_workers_makes_one_version(shard):
    begin(shard, ANNA, BERT)
    push(shard, 1, {0: 2.0, 1: 4.0}, ANNA)
    assert shard.model.version == 0
    assert not theta(shard).any()
    push(shard, 1, {1: 2.0, 3: 8.0}, BERT)
    assert shard.model.version == 1
    assert theta(shard).tolist() == [-1.0, -3.0, 0.0, -4.0]


def test_who_has_contributed_waits_until_the_mean_is_applied(shard, monkeypatch):
    """A pull in between would be answered with the version before, and make its worker's next push too stale."""
    begin(shard, ANNA, BERT)
    push(shard, 1, {0: 2.0}, ANNA)
    seen, apply = [], shard.model.rule.apply

    def applied(*args):
        seen.append(reason_of(shard.synchronizer.require_closed, ANNA.worker_id))
        return apply(*args)

    monkeypatch.setattr(shard.model.rule, "apply", applied)
    push(shard, 1, {0: 2.0}, BERT)
    assert seen == [ErrorCode.ROUND_OPEN]
    assert pull(shard, ANNA, base=0).version == 1


def test_those_who_have_contributed_wait_and_the_others_do_not(shard):
    begin(shard, ANNA, BERT)
    push(shard, 1, {0: 2.0}, ANNA)
    assert reason_of(pull, shard, ANNA, base=0) is ErrorCode.ROUND_OPEN
    assert pull(shard, BERT, base=0).version == 0
    push(shard, 1, {0: 2.0}, BERT)
    reply = pull(shard, ANNA, base=0)
    assert (reply.version, reply.density) == (1, 0.25), "a sparse round is a sparse difference"


def test_a_push_for_a_closed_round_is_too_stale(shard):
    begin(shard, ANNA, BERT, CARL, quorum=2)
    push(shard, 1, {0: 3.0}, ANNA)
    push(shard, 1, {0: 1.0}, BERT)
    assert (shard.model.version, theta(shard)[0]) == (1, -2.0), "the mean is over the two that contributed"
    assert reason_of(push, shard, 1, {0: 9.0}, CARL, base=0) is ErrorCode.TOO_STALE
    assert theta(shard)[0] == -2.0
    push(shard, 2, {0: 9.0}, CARL, base=1)
    assert shard.model.version == 1


def test_the_death_of_the_last_one_closes_the_round(shard):
    begin(shard, ANNA, BERT)
    clock = with_clock(shard)
    push(shard, 1, {0: 2.0}, ANNA)
    clock.now += 1800
    assert reason_of(pull, shard, ANNA, base=0) is ErrorCode.ROUND_OPEN  # and Anna's lease is renewed
    clock.now += 1801
    assert pull(shard, ANNA, base=0).version == 1
    assert theta(shard)[0] == -2.0


def test_leaving_closes_the_round_too(shard):
    begin(shard, ANNA, BERT)
    push(shard, 1, {0: 2.0}, ANNA)
    leave(shard, BERT)
    assert shard.model.version == 1


def test_a_contribution_of_one_who_has_left_counts(shard):
    begin(shard, ANNA, BERT)
    push(shard, 1, {0: 2.0}, ANNA)
    leave(shard, ANNA)
    assert shard.model.version == 0, "Bert is awaited"
    push(shard, 1, {0: 4.0}, BERT)
    assert theta(shard)[0] == -3.0


def test_a_round_ends_some_time_after_its_first_contribution_by_the_shards_own_clock():
    clock = Clock()
    settings = ServerSettings(lease_seconds=HOUR)
    shard = open_shard(settings, torch.device("cpu"), Metrics(), environment=Environment(monotonic=clock))
    with closing(shard):
        begin(shard, ANNA, BERT, seconds=5.0)
        clock.now = 7.0
        push(shard, 1, {0: 2.0}, ANNA)
        clock.now = 11.9
        assert reason_of(pull, shard, ANNA, base=0) is ErrorCode.ROUND_OPEN
        clock.now = 12.0
        assert pull(shard, ANNA, base=0).version == 1


@pytest.fixture
def at():
    """A shard whose rounds wait 1.5 times as long as the median worker takes, and what sets its clock."""
    clock = Clock()
    settings = ServerSettings(lease_seconds=HOUR)
    shard = open_shard(settings, torch.device("cpu"), Metrics(), environment=Environment(monotonic=clock))

    def set_clock(seconds):
        clock.now = seconds

    with closing(shard):
        begin(shard, ANNA, BERT, CARL, wait_factor=1.5)
        set_clock(0.0)
        yield shard, set_clock


def contribute(shard, step, *who, base):
    for each in who:
        push(shard, step, {0: 1.0}, each, base=base)


@pytest.fixture
def known(at):
    """The same after three rounds, at 20 seconds: all three workers take 10."""
    shard, set_clock = at
    for number in (1, 2, 3):
        set_clock(10.0 * number - 10.0)
        contribute(shard, number, ANNA, BERT, CARL, base=number - 1)
    return at


def test_a_worker_that_takes_longer_than_others_is_not_waited_for_and_counts_when_it_comes(at):
    """Anna and Bert take 10 seconds, Carl takes 30."""
    shard, set_clock = at
    contribute(shard, 1, ANNA, BERT, CARL, base=0)
    set_clock(10.0)
    contribute(shard, 2, ANNA, BERT, base=1)
    set_clock(29.9)
    assert reason_of(pull, shard, ANNA, base=1) is ErrorCode.ROUND_OPEN, "nobody's times are known"
    set_clock(30.0)
    contribute(shard, 2, CARL, base=1)
    assert shard.model.version == 2
    for number in (3, 4):
        set_clock(10.0 * number + 10.0)
        contribute(shard, number, ANNA, BERT, base=number - 1)
        assert shard.model.version == number, "Carl is slow: nobody waits"
    set_clock(55.0)
    contribute(shard, 3, CARL, base=2)
    assert shard.model.version == 4
    before = theta(shard)[0].item()
    set_clock(60.0)
    contribute(shard, 5, ANNA, BERT, base=4)
    assert shard.model.version == 5
    assert theta(shard)[0] == before - 1.0, "the mean of three, with what Carl began three rounds ago"


def test_a_worker_that_has_joined_is_not_waited_for_and_not_measured_before_it_contributes(known):
    shard, set_clock = known
    newcomers = [Identity(f"new-{number}", "1") for number in range(3)]
    begin(shard, *newcomers, wait_factor=1.5)
    set_clock(30.0)
    contribute(shard, 4, ANNA, BERT, CARL, base=3)
    assert shard.model.version == 4
    set_clock(31.0)
    contribute(shard, 1, *newcomers, base=4)
    assert shard.model.version == 4, "the others take 10 seconds"
    set_clock(40.0)
    contribute(shard, 5, ANNA, BERT, CARL, base=4)
    assert shard.model.version == 5


def test_a_flush_and_a_refused_push_are_not_measured(known):
    shard, set_clock = known
    set_clock(20.1)
    for who in (ANNA, BERT):
        push(shard, 4, {0: 1.0}, who, base=3, samples=0)
    assert reason_of(push, shard, 4, {0: math.inf}, CARL, base=3) is ErrorCode.NON_FINITE
    set_clock(30.0)
    contribute(shard, 5, ANNA, BERT, base=3)
    assert reason_of(pull, shard, ANNA, base=3) is ErrorCode.ROUND_OPEN
    contribute(shard, 5, CARL, base=3)
    assert shard.model.version == 4


def test_a_round_ends_after_a_restart_too_when_no_times_are_known(tmp_path):
    """Bert may wait at another shard for Anna, who is late there."""
    clock = Clock()

    def open_again():
        settings = ServerSettings(lease_seconds=HOUR, data_dir=tmp_path)
        return open_shard(settings, torch.device("cpu"), Metrics(), environment=Environment(monotonic=clock))

    with closing(open_again()) as shard:
        begin(shard, ANNA, BERT, wait_factor=1.5)
        for number in range(3):
            clock.now += 10.0
            contribute(shard, number + 1, ANNA, BERT, base=number)
        clock.now += 10.0
        contribute(shard, 4, ANNA, base=3)
    with closing(open_again()) as shard:
        assert reason_of(pull, shard, ANNA, base=3) is ErrorCode.ROUND_OPEN
        clock.now += HOUR - 1.0
        shard.leases.require(BERT)
        assert reason_of(pull, shard, ANNA, base=3) is ErrorCode.ROUND_OPEN
        clock.now += 1.0
        assert pull(shard, ANNA, base=3).version == 4


def test_a_round_waits_for_workers_that_are_hardly_slower(at):
    shard, set_clock = at
    contribute(shard, 1, ANNA, BERT, CARL, base=0)
    for number in range(2, 6):
        set_clock(20.0 * number - 26.0)
        contribute(shard, number, ANNA, BERT, base=number - 1)
        assert reason_of(pull, shard, ANNA, base=number - 1) is ErrorCode.ROUND_OPEN
        set_clock(20.0 * number - 20.0)
        contribute(shard, number, CARL, base=number - 1)
        assert shard.model.version == number


def test_a_pause_is_forgotten(known):
    shard, set_clock = known
    set_clock(30.0)
    contribute(shard, 4, ANNA, BERT, base=3)
    set_clock(35.0)
    assert pull(shard, ANNA, base=3).version == 4, "Carl pauses"
    set_clock(45.0)
    contribute(shard, 5, ANNA, BERT, base=4)
    assert shard.model.version == 5
    contribute(shard, 4, CARL, base=3)
    set_clock(55.0)
    contribute(shard, 6, ANNA, BERT, base=5)
    set_clock(65.0)
    contribute(shard, 7, ANNA, BERT, base=6)
    assert shard.model.version == 6, "Carl is as fast as the others, but for one pause"
    contribute(shard, 5, CARL, base=6)
    assert shard.model.version == 7


def test_if_all_have_paused_the_first_to_come_makes_no_round_alone(known):
    shard, set_clock = known
    set_clock(1000.0)
    contribute(shard, 4, ANNA, base=3)
    set_clock(1004.9)
    assert reason_of(pull, shard, ANNA, base=3) is ErrorCode.ROUND_OPEN
    contribute(shard, 4, BERT, CARL, base=3)
    assert shard.model.version == 4


@given(
    factor=st.floats(1.1, 4.0),
    seconds=st.lists(st.floats(0.5, 2.0), min_size=3, max_size=8),
    slow=st.floats(10.0, 30.0),
)
@settings(deadline=None)
def test_a_slow_worker_costs_the_others_nothing(factor, seconds, slow):
    """After it is known: each round lasts as long as the slowest of those that are waited for."""
    now = 0.0
    expected = ExpectedWorkers(factor, HOUR, lambda: now)
    takes = {f"worker-{number}": each for number, each in enumerate(seconds)} | {"slow": slow}
    expected.closed(takes, takes)
    due = dict(takes)
    while now < 4 * slow:
        opened, contributed = now, set()
        while not contributed or {*expected.of(takes)} - contributed:
            comes, worker = min((due[each], each) for each in takes if each not in contributed)
            now = max(now, min(comes, now + expected.seconds_left))
            if now < comes:
                break
            expected.contributed(worker)
            contributed.add(worker)
        expected.closed(contributed, takes)
        due |= {worker: now + takes[worker] for worker in contributed}
        if opened > 2 * slow:  # by then the others are known
            usual = statistics.median(takes.values())
            assert now - opened <= factor * usual * (1 + 1e-9)


def test_the_first_round_waits_for_its_workers(shard):
    begin(shard, ANNA, start_workers=2)
    push(shard, 1, {0: 2.0}, ANNA)
    assert reason_of(pull, shard, ANNA, base=0) is ErrorCode.ROUND_OPEN
    begin(shard, BERT, start_workers=2)
    push(shard, 1, {0: 4.0}, BERT)
    assert theta(shard)[0] == -3.0
    leave(shard, BERT)
    push(shard, 2, {0: 1.0}, ANNA, base=1)
    assert shard.model.version == 2, "later rounds take who is there"


def test_several_contributions_of_one_worker_count_as_one(shard):
    begin(shard, ANNA, BERT)
    push(shard, 1, {0: 2.0}, ANNA)
    push(shard, 2, {0: 2.0}, ANNA)
    push(shard, 1, {0: 2.0}, BERT)
    assert theta(shard)[0] == -3.0


def test_a_repeat_is_answered_as_before_and_not_added(shard):
    begin(shard, ANNA, BERT)
    first, _ = push(shard, 1, {0: 2.0}, ANNA)
    again, repeated = push(shard, 1, {0: 2.0}, ANNA)
    assert repeated
    assert again == first
    push(shard, 1, {}, BERT)
    assert theta(shard)[0] == -1.0


def test_the_end_of_the_run_takes_the_open_round_along():
    with open_shards(end_samples=3) as (shard,):
        begin(shard, ANNA, BERT)
        push(shard, 1, {0: 2.0}, ANNA, samples=3)
        assert shard.run.state is RunState.FINISHED
        assert theta(shard)[0] == -2.0
        assert pull(shard, ANNA, base=0).version == 1


def test_a_run_of_so_many_versions_ends_with_its_last_round():
    with open_shards(end_versions=1) as (shard,):
        begin(shard, ANNA, BERT)
        push(shard, 1, {0: 2.0}, ANNA)
        assert shard.run.state is RunState.TRAINING
        push(shard, 1, {0: 2.0}, BERT)
        assert shard.run.state is RunState.FINISHED


def test_finishing_by_hand_takes_the_open_round_along(shard):
    begin(shard, ANNA, BERT)
    push(shard, 1, {0: 2.0}, ANNA)
    finish(shard)
    assert (shard.model.version, theta(shard)[0]) == (1, -2.0)


def test_a_flush_is_added_and_neither_counted_nor_waited_for(shard):
    begin(shard, ANNA, BERT, CARL)
    push(shard, 1, {0: 3.0}, CARL, samples=0)
    assert pull(shard, CARL, base=0).version == 0
    leave(shard, CARL)
    push(shard, 1, {0: 2.0}, ANNA)
    push(shard, 1, {0: 4.0}, BERT)
    assert theta(shard)[0] == -4.5
    push(shard, 2, {}, ANNA, base=1, samples=0)
    push(shard, 3, {0: 1.0}, ANNA, base=1)
    assert shard.model.version == 1, "an empty flush has not counted for Anna, nor her step for Bert"
    push(shard, 2, {0: 1.0}, BERT, base=1)
    assert theta(shard)[0] == -5.5


def test_a_flush_is_never_too_late_for_a_round(shard):
    begin(shard, ANNA, BERT, quorum=1)
    push(shard, 1, {0: 1.0}, ANNA)
    assert reason_of(push, shard, 1, {0: 2.0}, BERT, base=0) is ErrorCode.TOO_STALE
    push(shard, 2, {0: 2.0}, BERT, base=0, samples=0)
    leave(shard, BERT)
    push(shard, 2, {0: 1.0}, ANNA, base=1)
    assert theta(shard)[0] == -4.0


def test_what_was_flushed_last_is_in_the_model_at_the_end(shard):
    begin(shard, ANNA)
    push(shard, 1, {0: 2.0}, ANNA, samples=0)
    finish(shard)
    assert theta(shard)[0] == -2.0


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        "1",
        '{"quorum": -1, "seconds": 0, "start_workers": 1}',
        '{"quorum": 0, "seconds": 1e999, "start_workers": 1}',
        '{"quorum": 0, "seconds": NaN, "start_workers": 1}',
        '{"quorum": 0, "seconds": 0, "start_workers": 1, "wait_factor": 1}',
        '{"quorum": 0, "seconds": 0, "start_workers": 1, "wait_factor": 1e999}',
        '{"quorum": 0, "seconds": 0, "start_workers": 0}',
        '{"quorum": 99999999999, "seconds": 0, "start_workers": 1}',
        '{"quorum": {}, "seconds": 0, "start_workers": 1}',
        '{"quorum": "3", "seconds": 0, "start_workers": 1}',
        '{"quorum": 0, "seconds": true, "start_workers": 1}',
        '{"quorum": 0, "seconds": 0, "start_workers": 1, "wait_factor": "1.5"}',
        '{"quorum": 0, "seconds": 0, "start_workers": 1, "wait_factor": false}',
    ],
)
def test_rounds_that_make_no_sense_are_refused(shard, text):
    assert reason_of(join, shard, LAYOUT, ANNA, "ssgd", {"rounds": text}) is ErrorCode.BAD_REQUEST
    assert not shard.run.method, "nothing was agreed"


def test_a_value_that_would_spoil_the_sum_is_refused_before_it_counts(shard):
    begin(shard, ANNA, BERT)
    assert reason_of(push, shard, 1, {0: 1e38}, ANNA) is ErrorCode.NON_FINITE
    assert not shard.model.round.contributors


pushes = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.1, 0.6, None]), st.integers(0, 99)), min_size=1, max_size=8
)


@given(pushes=pushes, again=pushes)
@settings(deadline=None)
def test_the_mean_is_that_of_the_dense_updates(pushes, again):
    """Sparse, dense and empty ones, whatever the order; and a closed round leaves nothing behind."""
    span = Span(0, 50)
    gathered = SynchronousRound(RoundSettings(0, 0, 1), span, torch.device("cpu"), Clock())
    for batch in (pushes, again):
        expected, names = torch.zeros(50, dtype=torch.float64), set()
        for worker, density, seed in batch:
            generator = torch.Generator().manual_seed(seed)
            whole = SparseSlice(span, None, torch.randn(50, generator=generator))
            update = whole if density is None else sparse_push(span, density, seed)
            gathered.add(f"worker-{worker}", update)
            names.add(worker)
            if update is not None:
                where = torch.arange(50) if update.offsets is None else update.offsets
                expected[where] += update.values.double()
        mean, _ = gathered.close()
        gathered.open_next()
        found = torch.zeros(50)
        if mean is not None:
            found[torch.arange(50) if mean.offsets is None else mean.offsets] = mean.values
        torch.testing.assert_close(found, (expected / len(names)).float(), rtol=1e-5, atol=1e-6)


@given(
    live=st.sets(st.sampled_from("abcde")),
    contributors=st.sets(st.sampled_from("abcde")),
    quorum=st.integers(0, 6),
    seconds=st.sampled_from([0.0, 1.0]),
    age=st.floats(0, 3),
)
def test_a_round_is_due_exactly_when_its_rule_says(live, contributors, quorum, seconds, age):
    clock = Clock()
    current = SynchronousRound(RoundSettings(quorum, seconds, 1), Span(0, 1), torch.device("cpu"), clock)
    for worker in contributors:
        current.add(worker, None)
    clock.now += age
    due = current.is_due(live, live, is_first=False)
    enough = live <= contributors or (quorum and len(contributors) >= quorum) or (seconds and age >= seconds)
    assert due == bool(contributors and enough)


def test_contributors_are_measured(shard):
    assert isinstance(shard.metrics, Metrics)
    begin(shard, ANNA, BERT)
    push(shard, 1, {0: 2.0}, ANNA)
    push(shard, 1, {0: 2.0}, BERT)
    found = {s.name: s.value for m in shard.metrics.registry.collect() for s in m.samples if not s.labels}
    assert found["psservice_round_contributors_sum"] == 2


def test_nobody_waits_for_a_worker_that_waits_for_samples_itself(shard):
    """Elastic data: the round would wait for Anna, and she for the samples that Bert has still to train."""
    begin(shard, ANNA, BERT)

    def lease(who, held=0, epoch=0):
        share = {0: Ranges([(0, held)])} if held else {}
        return lease_samples(shard, who, SampleRequest("train", Plan(4, 1, True), epoch, 8, share)).granted

    while lease(BERT, shard.state.datasets["train"].held_by(BERT)[0].total if shard.state.datasets else 0):
        pass
    assert not lease(ANNA)
    push(shard, 1, {0: 2.0}, BERT)
    assert pull(shard, BERT, base=0).version == 1
    assert lease(ANNA, epoch=1)
    push(shard, 2, {0: 2.0}, BERT, base=1)
    assert reason_of(pull, shard, BERT, base=1) is ErrorCode.ROUND_OPEN
    push(shard, 1, {0: 4.0}, ANNA, base=1)
    assert theta(shard)[0] == -5.0


def test_a_round_that_lacks_workers_to_begin_is_not_looked_at_again_and_again():
    now = [0.0]
    open_round = SynchronousRound(RoundSettings(0, 3.0, 2), Span(0, 4), torch.device("cpu"), lambda: now[0])
    open_round.add("anna", None, PushContext(samples=1))
    now[0] = 10.0
    assert open_round.seconds_left(["anna"], 0.0, is_first=True) == math.inf, "its time is over, and decides nothing"
    assert open_round.seconds_left(["anna", "bert"], math.inf, is_first=True) == 0.0
    assert open_round.seconds_left(["anna"], math.inf, is_first=False) == 0.0
