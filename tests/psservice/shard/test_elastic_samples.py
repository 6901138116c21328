"""Data leases in a shard: leases of workers, pushes that finish samples, restarts, and rollbacks."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.ranges import Ranges
from pscore.wire.errors import ErrorCode
from psservice.data_leases.codec import share_to_messages
from psservice.data_leases.dataset import Plan, SampleRequest
from psservice.shard.join import leave
from psservice.shard.lifecycle import finish as finish_run
from psservice.shard.push import check_push, prepare_push
from psservice.shard.rollback import roll_back
from psservice.shard.samples import lease_samples
from psservice.state.stream_readers import read_all, read_push
from psservice.values import Identity
from tests.psservice.durability.test_recovery import Shard, after_a_crash, begin, stream
from tests.psservice.service_makers import F32, layout_of
from tests.psservice.shard_makers import (
    ANNA,
    BERT,
    HOUR,
    join,
    push,
    push_of,
    reason_of,
    serving,
    serving_shards,
    with_clock,
)
from tests.tiers import examples

LAYOUT = layout_of((50, F32))
SIZE = 40


def lease(shard, who=ANNA, *, epoch=0, samples=8, held=None, name="train"):
    return lease_samples(shard, who, SampleRequest(name, Plan(SIZE, 1, True), epoch, samples, held or {}))


def finish(shard, step, share, who=ANNA):
    """Push nothing but that samples are finished, as a stream that the journal keeps."""
    messages = stream(shard, step, None, who, base=shard.model.version)
    messages[0].header.finished.add(dataset="train", ranges=share_to_messages(share))
    header, entries, _ = read_all(read_push(lambda opened: (shard.span, shard.value_dtype)), messages)
    raw = [message.SerializeToString() for message in messages]
    answer = shard.apply_thread.run(prepare_push(shard, header, entries, raw))
    shard.durability.records.wait()
    return answer


def held(shard, who=ANNA):
    return shard.state.datasets["train"].held_by(who)


def serving_here(**options):
    return serving(LAYOUT, torch.zeros(LAYOUT.size), **options)


def test_no_bound_on_leads_holds_a_worker_for_one_that_waits_for_its_samples():
    with serving_here(ssp_bound=1) as shard:
        join(shard, LAYOUT, BERT)
        lease(shard, ANNA, samples=30)
        while lease(shard, BERT, samples=10, held=held(shard, BERT)).granted:
            pass
        push(shard, 1, {0: 1.0})
        assert reason_of(check_push, shard, ANNA, 2) is ErrorCode.TOO_FAR_AHEAD
        finish(shard, 1, held(shard, BERT), BERT)
        assert not lease(shard, BERT, samples=10).granted
        for step in (2, 3, 4):
            push(shard, step, {0: 1.0}, base=shard.model.version)


def test_samples_are_finished_when_their_push_is_applied_and_by_a_repeat_not_again():
    with serving_here() as shard:
        lease(shard)
        finish(shard, 1, {0: Ranges([(0, 3)])})
        assert held(shard) == {0: Ranges([(3, 8)])}
        _, repeated = finish(shard, 1, {0: Ranges([(0, 8)])})
        assert repeated
        assert held(shard) == {0: Ranges([(3, 8)])}


def test_a_push_that_is_refused_finishes_nothing():
    with serving_here(max_staleness=1) as shard:
        join(shard, LAYOUT, BERT)
        lease(shard)
        for step in (1, 2):
            push(shard, step, {1: 0.5}, BERT)
        done = {"train": {0: Ranges([(0, 3)])}}
        late = push_of(ANNA, 1, shard.model.generation, 0, 1, [], finished=done)
        assert reason_of(shard.apply_thread.run, prepare_push(shard, *late)) is ErrorCode.TOO_STALE
        assert held(shard) == {0: Ranges([(0, 8)])}


def test_a_dead_workers_samples_go_to_who_asks_next():
    with serving_here() as shard:
        clock = with_clock(shard)
        join(shard, LAYOUT, BERT)
        lease(shard)
        finish(shard, 1, {0: Ranges([(0, 3)])})
        clock.now += HOUR - 1
        assert lease(shard, BERT).granted == {0: Ranges([(8, 16)])}
        clock.now += 2
        assert lease(shard, BERT, held=held(shard, BERT)).granted == {0: Ranges([(3, 8), (16, 19)])}


def test_who_has_no_lease_gets_no_samples():
    with serving_here() as shard:
        assert reason_of(lease, shard, BERT) is ErrorCode.LEASE_EXPIRED
        leave(shard, ANNA)
        assert reason_of(lease, shard) is ErrorCode.LEASE_EXPIRED


def test_only_shard_0_hands_out_samples_and_after_the_end_nobody_does():
    with serving_shards(2, LAYOUT, torch.zeros(LAYOUT.size)) as (first, second):
        assert reason_of(lease, second) is ErrorCode.BAD_REQUEST
        finish_run(first)
        assert lease(first).granted == {}


def test_there_are_no_samples_before_there_is_a_model(tmp_path):
    with Shard(tmp_path / "live") as shard:
        join(shard, LAYOUT)
        assert reason_of(lease, shard) is ErrorCode.NOT_INITIALISED


def test_where_a_lease_cannot_be_written_down_none_is_given(tmp_path, monkeypatch):
    with Shard(tmp_path / "live") as shard:
        begin(shard)
        lease(shard)
        before = dict(shard.state.datasets)

        def full(descriptor, parts):
            raise OSError(28, "no space left")

        monkeypatch.setattr("psservice.storage.files.OpenFile.append", full)
        assert reason_of(lease, shard, held=held(shard)) is ErrorCode.NOT_DURABLE
        assert shard.state.datasets == before
        monkeypatch.undo()
        assert lease(shard, held=held(shard)).granted == {0: Ranges([(8, 16)])}


scripts = st.lists(
    st.one_of(
        st.tuples(st.just("lease"), st.integers(0, 1), st.integers(0, 12)),
        st.tuples(st.just("finish"), st.integers(0, 1), st.integers(0, 12)),
        st.tuples(st.just("leave"), st.just(1), st.just(0)),
        st.tuples(st.just("snapshot"), st.just(0), st.just(0)),
        st.tuples(st.just("crash"), st.just(0), st.just(0)),
    ),
    max_size=25,
)


@given(script=scripts)
@settings(deadline=None, max_examples=examples(15))
def test_after_every_crash_the_same_samples_are_in_the_same_hands(script, tmp_path_factory):
    directory = tmp_path_factory.mktemp("data") / "live"
    life = Shard(directory)
    begin(life.engine)
    lives, step = 1, 0
    finished = []
    try:
        for action, number, count in script:
            shard = life.engine
            who = (ANNA, Identity("bert", str(lives)))[number]
            if number and not shard.leases.is_live(who):
                join(shard, shard.state.layout, who)
            if action == "lease":
                newest = shard.state.datasets["train"].newest if shard.state.datasets else 0
                lease(shard, who, epoch=newest + count % 2, samples=count, held=known(shard, who))
            elif action == "finish" and known(shard, who):
                step += 1
                epoch, ranges = min(known(shard, who).items())
                finish(shard, step, {epoch: ranges.first(count)}, who)
                finished += [(epoch, i) for start, end in ranges.first(count) for i in range(start, end)]
            elif action == "leave":
                leave(shard, who)
                lives += 1
            elif action == "snapshot":
                shard.durability.take()
            elif action == "crash":
                directory = after_a_crash(directory)
                again = Shard(directory)
                assert again.engine.state.datasets == shard.state.datasets
                shard.close()
                life = again
        assert len(finished) == len(set(finished))
    finally:
        life.engine.close()


def known(shard, who):
    return held(shard, who) if shard.state.datasets else {}


def test_a_rollback_takes_the_data_back_with_the_model(tmp_path):
    with Shard(tmp_path / "live") as shard:
        begin(shard)
        lease(shard)
        finish(shard, 1, {0: Ranges([(0, 3)])})
        then = dict(shard.state.datasets)
        finish(shard, 2, {0: Ranges([(3, 8)])})
        lease(shard, samples=20)
        roll_back(shard, 1, "")
        assert shard.state.datasets == then
        assert lease(shard).granted == {0: Ranges([(3, 8)])}  # it has forgotten: it hears of them again
        with Shard(after_a_crash(tmp_path / "live")) as again:
            assert again.state.datasets == shard.state.datasets
