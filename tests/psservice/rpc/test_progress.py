"""How shards fare: measured by each, told to shard 0, and losses told by workers."""

import pytest
import torch

from pscore.wire.errors import ErrorCode
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.process.progress_thread import Counts, measure
from psservice.rpc.shards import ShardCalls, question_of
from psservice.rpc.status import status_of
from psservice.shard.push import prepare_push
from tests.psservice.service_makers import F32, layout_of
from tests.psservice.shard_makers import ANNA, BERT, join, present, push, push_of, reason_of, serving, serving_shards

LAYOUT = layout_of((8, F32))


class FromShard:
    """A call of a shard, that does not wait."""

    wait_seconds, is_late = 0.0, False

    class caller:  # noqa: N801  # an attribute of a call
        is_shard, role = True, None


class FromReader(FromShard):
    """A call of a reader."""

    class caller:  # noqa: N801
        is_shard, role = False, None


def measured(shard, seconds=2.0):
    """Measure as if ``seconds`` had passed since the start."""
    now = Counts.of(shard)
    return measure(shard, now._replace(seconds=now.seconds - seconds, pushes=0, samples=0))


def push_loss(shard, step, loss, who=ANNA):
    header, _ = push_of(who, step, present(shard), 0, 1, [])
    if loss is not None:
        header.loss = loss
    return shard.apply_thread.run(prepare_push(shard, header, None))


def test_shard_0_has_all_shards_and_another_itself():
    with serving_shards(2, LAYOUT, torch.zeros(8)) as (first, second):
        assert question_of(second, 0).HasField("progress") is False, "it has measured nothing yet"
        for shard in (first, second):
            for step in (1, 2, 3):
                push(shard, step, {0: 1.0, 7: 1.0})
            shard.metrics.count("PushSparse", received_bytes=1000)
        for shard in (second, first):
            measured(shard)
            ShardCalls(first).follow_run(FromShard(), question_of(second, 0))
        measured(first)
        shards = status_of(first, 1.0, 0).shards
        assert [(each.shard_index, each.version) for each in shards] == [(0, 3), (1, 3)]
        assert [each.shard_index for each in status_of(second, 1.0, 0).shards] == [1]
        assert shards[0].pushes_per_second == pytest.approx(1.5, rel=0.2)
        point = first.progress.history.recent()[-1]
        assert point.samples_per_second == pytest.approx(1.5, rel=0.2)
        assert point.workers == 1


def test_a_shard_that_is_silent_counts_no_more_and_its_age_is_told():
    with serving_shards(2, LAYOUT, torch.zeros(8)) as (first, second):
        second.progress.measured(pb.ShardProgress(shard_index=1, push_bytes_per_second=1e6, durable=True))
        ShardCalls(first).follow_run(FromShard(), question_of(second, 0))
        measured(first)
        assert first.progress.history.recent()[-1].push_bytes_per_second >= 1e6
        first.progress._clock = lambda: first.environment.monotonic() + 60.0
        measured(first)
        assert first.progress.history.recent()[-1].push_bytes_per_second < 1e6
        ages = [each.age_seconds for each in status_of(first, 1.0, 0).shards]
        assert ages[0] == 0.0
        assert 59.0 < ages[1] < 120.0


@pytest.mark.parametrize("index", [0, 2, 2**32 - 1])
def test_progress_of_a_shard_that_cannot_be_is_refused(index):
    with serving_shards(2, LAYOUT, torch.zeros(8)) as (first, _):
        request = pb.FollowRunRequest(shard_index=1, num_shards=2, progress=pb.ShardProgress(shard_index=index))
        assert reason_of(ShardCalls(first).follow_run, FromShard(), request) is ErrorCode.BAD_REQUEST
        assert len(first.progress.known()) == 0


def test_readers_tell_of_no_shard():
    with serving_shards(2, LAYOUT, torch.zeros(8)) as (first, _):
        request = pb.FollowRunRequest(shard_index=1, num_shards=2, progress=pb.ShardProgress(shard_index=1))
        ShardCalls(first).follow_run(FromReader(), request)
        assert first.progress.known() == []


def test_a_loss_is_shown_once_for_each_push_and_the_curve_is_their_mean():
    with serving(LAYOUT, torch.zeros(8)) as shard:
        join(shard, LAYOUT, BERT)
        push_loss(shard, 1, 2.0)
        push_loss(shard, 1, 50.0)  # the same push again, answered as before
        push_loss(shard, 1, 4.0, BERT)
        push_loss(shard, 2, None)
        measured(shard)
        measured(shard)
        assert [each.loss for each in shard.progress.history.recent()] == [3.0, None]
        losses = {each.worker_id: each.loss for each in status_of(shard, 1.0, 0).workers}
        assert losses == {"anna": 2.0, "bert": 4.0}


def test_a_worker_without_a_loss_has_none():
    with serving(LAYOUT, torch.zeros(8)) as shard:
        push_loss(shard, 1, None)
        assert not status_of(shard, 1.0, 0).workers[0].HasField("loss")
