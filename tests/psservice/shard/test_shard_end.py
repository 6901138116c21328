"""The end of a run: pushes are refused, everything else goes on, and the last model is written."""

import pytest
import torch

from pscore.model import modelfile
from pscore.model.layout import TensorSpec
from pscore.wire.errors import ErrorCode
from psservice.shard.lifecycle import finish
from psservice.state.run import RunState
from tests.psservice.service_makers import F32, layout_of
from tests.psservice.shard_makers import (
    ANNA,
    BERT,
    READY,
    join,
    open_shards,
    pull,
    push,
    reason_of,
    serving,
    serving_shards,
    theta,
)

LAYOUT = layout_of((6, F32), (4, F32))
WITH_BUFFERS = layout_of((6, F32), (4, F32), buffers=(TensorSpec("mean", (2,), F32),))
ONES = torch.ones(10)


@pytest.mark.parametrize(("ending", "samples"), [({"end_versions": 2}, 1), ({"end_samples": 50}, 25)])
def test_a_run_ends_at_a_version_or_after_samples(ending, samples):
    with serving(LAYOUT, ONES, **ending) as shard:
        push(shard, 1, samples=samples)
        assert shard.run.state is RunState.TRAINING
        last, _ = push(shard, 2, {0: 1.0}, samples=samples)
        assert shard.run.state is RunState.FINISHED
        assert reason_of(push, shard, 3, {0: 1.0}) is ErrorCode.RUN_FINISHED
        assert push(shard, 2, {0: 1.0}) == (last, True), "a repeat is answered after the end too"
        assert shard.model.version == 2


def test_only_the_coordinator_counts():
    with serving_shards(2, LAYOUT, ONES, end_versions=1) as (_, shard):
        push(shard, 1)
        push(shard, 2)
        assert shard.run.state is RunState.TRAINING
        finish(shard)
        assert reason_of(push, shard, 3) is ErrorCode.RUN_FINISHED


def test_after_the_end_everyone_can_fetch_the_model():
    with serving(LAYOUT, ONES) as shard:
        push(shard, 1, {0: 1.0})
        finish(shard)
        assert pull(shard, base=0).version == 1
        assert join(shard, LAYOUT, BERT).state == READY
        assert pull(shard, BERT).version == 1
        assert shard.copy_model().version == 1


def test_finishing_twice_is_finishing_once(tmp_path):
    path = tmp_path / "final.safetensors"
    with serving(LAYOUT, ONES, final_model=path) as shard:
        assert finish(shard) == str(path)
        written = path.read_bytes()
        path.unlink()
        assert finish(shard) == ""
        assert written
        assert not path.exists()


def test_there_is_no_end_without_a_model():
    with open_shards() as (shard,):
        assert reason_of(finish, shard) is ErrorCode.NOT_INITIALISED


def test_the_final_model_is_that_of_the_last_version_with_its_buffers(tmp_path):
    path = tmp_path / "final.safetensors"
    mean = torch.tensor([3.0, 4.0])
    with serving(WITH_BUFFERS, ONES, [mean], final_model=path, end_versions=2) as shard:
        push(shard, 1, {0: 0.5})
        push(shard, 2, {9: 0.25})
        assert finish(shard) == str(path)
        expected = theta(shard)
    state = modelfile.read(path)
    assert torch.equal(modelfile.flatten(WITH_BUFFERS, state), expected)
    assert torch.equal(state["mean"], mean)


def test_the_parts_of_several_shards_join_to_the_whole(tmp_path):
    path = tmp_path / "final.safetensors"
    with serving_shards(3, WITH_BUFFERS, torch.arange(10.0), [torch.ones(2)], final_model=path, run_id="r") as shards:
        parts = [finish(shard) for shard in shards]
    state = modelfile.read_parts(parts)
    assert torch.equal(modelfile.flatten(WITH_BUFFERS, state), torch.arange(10.0))
    assert state["mean"].tolist() == [1, 1]


def test_a_server_that_closes_has_written_its_model(tmp_path):
    path = tmp_path / "final.safetensors"
    with serving(LAYOUT, ONES, final_model=path, end_versions=1) as shard:
        push(shard, 1, {0: 1.0}, ANNA)
    assert modelfile.read(path)["t0"][0].item() == 0


def test_parts_of_different_runs_do_not_join(tmp_path):
    parts = []
    for run_id in ("one", "two"):
        path = tmp_path / run_id / "final.safetensors"
        with serving_shards(2, LAYOUT, ONES, final_model=path, run_id=run_id) as shards:
            parts.append([finish(shard) for shard in shards])
    with pytest.raises(modelfile.ModelFileError, match="another run"):
        modelfile.read_parts([parts[0][0], parts[1][1]])
