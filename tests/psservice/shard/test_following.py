"""What the other shards do when shard 0 tells them of the run."""

import pytest
import torch

from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.shard.following import follow, news_of
from psservice.shard.lifecycle import end_leases, finish
from psservice.shard.rollback import roll_back
from psservice.state.run import RunState
from tests.psservice.service_makers import F32, layout_of
from tests.psservice.shard_makers import ANNA, BERT, HOUR, join, open_shards, push, serving_shards, upload, with_clock

LAYOUT = layout_of((6, F32), (4, F32))
ZEROS = torch.zeros(10)
ROUNDS = {"rounds": '{"quorum": 0, "seconds": 0, "start_workers": 1}'}


def test_a_shard_learns_the_runs_id_from_shard_0():
    with open_shards(2) as (first, second):
        assert second.run.run_id == ""
        follow(second, news_of(first))
        assert second.run.run_id == first.run.run_id != ""


def test_a_shard_ends_the_run_with_the_push_that_ended_it_at_shard_0():
    with serving_shards(2, LAYOUT, ZEROS, end_versions=2, run_id="run") as (first, second):
        for step in (1, 2):
            push(first, step, {1: 1.0}, base=step - 1)
        assert first.run.state is RunState.FINISHED
        push(second, 1, {7: 1.0})
        follow(second, news_of(first))
        assert second.run.state is RunState.TRAINING
        push(second, 2, {7: 1.0}, base=1)
        assert (second.run.state, second.model.version) == (RunState.FINISHED, 2)


def test_a_shard_does_not_wait_for_the_last_push_of_a_worker_that_is_gone():
    with serving_shards(2, LAYOUT, ZEROS, end_versions=1, run_id="run") as (first, second):
        push(first, 1, {1: 1.0})
        follow(second, news_of(first))
        assert second.run.state is RunState.TRAINING
        clock = with_clock(second)
        clock.now += HOUR + 1
        end_leases(second)
        assert second.run.state is RunState.FINISHED


def test_a_run_that_an_operator_has_ended_ends_at_once():
    with serving_shards(2, LAYOUT, ZEROS, run_id="run") as (first, second):
        finish(first)
        follow(second, news_of(first))
        assert second.run.state is RunState.FINISHED


@pytest.mark.parametrize("first_to_go_back", [0, 1])
def test_a_run_that_goes_back_before_its_end_is_not_ended_again(first_to_go_back, tmp_path):
    with serving_shards(2, LAYOUT, ZEROS, end_versions=2, run_id="run", data_dir=tmp_path) as shards:
        first, second = shards
        for step in (1, 2):
            for shard, entry in ((first, 1), (second, 7)):
                push(shard, step, {entry: 1.0}, base=step - 1)
        follow(second, news_of(first))
        for shard in sorted(shards, key=lambda shard: shard is not shards[first_to_go_back]):
            roll_back(shard, 0, "")
            follow(second, news_of(first))  # still of the end, if the second shard goes back first
        end_leases(second)
        assert [shard.run.state for shard in shards] == [RunState.TRAINING, RunState.TRAINING]
        for step in (3, 4):
            for shard, entry in ((first, 1), (second, 7)):
                push(shard, step, {entry: 1.0}, base=step - 3)
        follow(second, news_of(first))
        assert [(shard.run.state, shard.model.version) for shard in shards] == [(RunState.FINISHED, 2)] * 2


def test_a_run_that_an_operator_has_ended_goes_back_and_ends_once_more(tmp_path):
    with serving_shards(2, LAYOUT, ZEROS, run_id="run", data_dir=tmp_path) as (first, second):
        for shard, entry in ((first, 1), (second, 7)):
            push(shard, 1, {entry: 1.0})
        finish(first)
        follow(second, news_of(first))
        for shard in (second, first):
            roll_back(shard, 0, "")
        for _ in range(2):
            follow(second, news_of(first))
            end_leases(second)
        assert second.run.state is RunState.TRAINING
        finish(first)
        follow(second, news_of(first))
        assert second.run.state is RunState.FINISHED


def test_no_round_of_another_shard_waits_for_a_worker_without_samples():
    with open_shards(2, run_id="run") as shards:
        for shard in shards:
            for who in (ANNA, BERT):
                generation = join(shard, LAYOUT, who, method_settings=ROUNDS).generation or 1 << 32 | 1
                if who == ANNA:
                    upload(shard, ZEROS, who, generation)
        _, second = shards
        push(second, 1, {7: 1.0})
        assert second.model.version == 0
        follow(second, pb.RunNews(run_id="run", run_state=pb.RUN_STATE_TRAINING, workers_without_samples=["bert"]))
        assert second.model.version == 1


def test_a_shard_of_another_run_changes_nothing(caplog):
    with serving_shards(2, LAYOUT, ZEROS, run_id="run") as (_, second):
        follow(second, pb.RunNews(run_id="another", run_state=pb.RUN_STATE_FINISHED))
        assert (second.run.run_id, second.run.state) == ("run", RunState.TRAINING)
        assert "of another run" in caplog.text
