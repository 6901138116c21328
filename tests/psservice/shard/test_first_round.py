"""The first round of a run waits for its first workers, also if the run begins with another run's model."""

import json

import pytest
import torch

from tests.psservice.durability.test_recovery import after_a_crash, send
from tests.psservice.service_makers import F32, layout_of, sparse_push
from tests.psservice.shard_makers import ANNA, BERT, join, open_shards, upload

LAYOUT = layout_of((10, F32))


def rounds(start_workers):
    return {"rounds": json.dumps({"quorum": 0, "seconds": 0, "start_workers": start_workers})}


@pytest.fixture
def former(tmp_path):
    """The directory of a run that has closed a round."""
    with open_shards(data_dir=tmp_path / "former") as (shard,):
        upload(shard, torch.ones(10), ANNA, join(shard, LAYOUT, ANNA, method_settings=rounds(1)).generation)
        send(shard, 1, sparse_push(shard.span, 0.5, 0))
        assert shard.model.version == 1
    return tmp_path / "former"


def test_a_run_that_begins_with_anothers_directory_waits_for_its_first_workers(former, tmp_path):
    with open_shards(data_dir=tmp_path / "new", init=former) as (shard,):
        join(shard, LAYOUT, ANNA, method_settings=rounds(2))
        send(shard, 1, sparse_push(shard.span, 0.5, 0), base=1)
        assert shard.model.version == 1
        image = after_a_crash(tmp_path / "new")
    with open_shards(data_dir=image, init=former) as (shard,):
        send(shard, 2, sparse_push(shard.span, 0.5, 1), base=1)
        assert shard.model.version == 1  # a restart does not make the run older
        join(shard, LAYOUT, BERT, method_settings=rounds(2))
        send(shard, 1, sparse_push(shard.span, 0.5, 0), BERT, base=1)
        assert shard.model.version == 2
        shard.leases.leave(BERT)
        send(shard, 3, sparse_push(shard.span, 0.5, 0), base=2)
        assert shard.model.version == 3  # only the first round waits
