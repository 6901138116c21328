"""A run goes on with another number of shards: what is taken along, and from which directories."""

import json
import shutil

import pytest
import torch

from pscore.model.layout import Span, TensorSpec
from pscore.model.ranges import Ranges
from pscore.model.sparse_slice import SparseSlice
from psservice.data_leases.dataset import Plan, SampleRequest
from psservice.rules.base import PieceState
from psservice.rules.torch_optimizer import reshard
from psservice.shard.push import prepare_push
from psservice.shard.samples import lease_samples
from psservice.storage.files import StorageError
from tests.psservice.service_makers import F32, layout_of
from tests.psservice.shard_makers import ANNA, BERT, join, open_shards, present, push_of, upload

LAYOUT = layout_of((7, F32), ((2, 5), F32), (9, F32), buffers=(TensorSpec("mean", (3,), F32),))
SAMPLES = 20
STEPS = 4


def settings(optimizer="Adam", lr=0.1):
    return {"update": "torch", "optimizer": json.dumps({"name": optimizer, "options": {"lr": lr}})}


def at_home(values, gradients):
    """The parameters after torch's own steps."""
    pieces = [values[LAYOUT.offsets[i] : LAYOUT.offsets[i + 1]].clone() for i in range(3)]
    optimizer = torch.optim.Adam(pieces, lr=0.1)
    for gradient in gradients:
        for i, piece in enumerate(pieces):
            piece.grad = gradient[LAYOUT.offsets[i] : LAYOUT.offsets[i + 1]]
        optimizer.step()
    return torch.cat(pieces)


def push(shard, who, step, gradient, finished=None):
    values = gradient[shard.span.start : shard.span.end]
    done = {"train": {0: Ranges([finished])}} if finished else {}
    segments = [SparseSlice(shard.span, None, values)]
    shard.apply_thread.run(
        prepare_push(shard, *push_of(who, step, present(shard), shard.model.version, 1, segments, finished=done))
    )


def train(shards, who, gradients):
    for step, gradient in enumerate(gradients, start=1):
        for shard in shards:
            push(shard, who, step, gradient)


def lease(shard, who):
    """Ask for samples until none is left; return how many places were handed out."""
    mine = Ranges()
    while True:
        wish = SampleRequest("train", Plan(SAMPLES, 1, True), 0, SAMPLES, {0: mine} if mine else {})
        granted = lease_samples(shard, who, wish).granted.get(0)
        if not granted:
            return sum(end - start for start, end in mine)
        mine |= granted


def model_of(shards):
    return torch.cat([shard.copy_model().read(shard.span) for shard in shards])


def checkpoint(shards):
    for shard in shards:
        shard.durability.take_asked("there")


@pytest.fixture
def two(tmp_path):
    """The directory of a run of two shards that has gone some way, with its first values and all gradients."""
    values, gradients = torch.randn(LAYOUT.size), [torch.randn(LAYOUT.size) for _ in range(3 * STEPS)]
    directory = tmp_path / "two"
    with open_shards(2, data_dir=directory, durability="snapshot") as shards:
        for shard in shards:
            generation = join(shard, LAYOUT, ANNA, method_settings=settings()).generation or 1 << 32 | 1
            upload(shard, values, ANNA, generation, buffers=[torch.ones(3)] if shard.is_coordinator else ())
        train(shards, ANNA, gradients[: STEPS - 1])
        assert lease(shards[0], ANNA) == SAMPLES
        for shard in shards:
            push(shard, ANNA, STEPS, gradients[STEPS - 1], (0, 6) if shard.is_coordinator else None)
        shards[0].state.buffers.weight = 12.0
        checkpoint(shards)
    return directory, values, gradients


def going_on(num_shards, directory, target):
    options = {"init": directory, "init_checkpoint": "there", "data_dir": target, "durability": "snapshot"}
    return open_shards(num_shards, **options)


def test_two_shards_become_three_and_then_one(two, tmp_path):
    directory, values, gradients = two
    for runs, num_shards in enumerate((3, 1), start=1):
        target = tmp_path / str(num_shards)
        with going_on(num_shards, directory, target) as shards:
            for shard in shards:
                assert join(shard, LAYOUT, BERT, method_settings=settings()).version == runs * STEPS
            assert lease(shards[0], BERT) == SAMPLES - 6  # what Anna held and had not finished too
            train(shards, BERT, gradients[runs * STEPS : (runs + 1) * STEPS])
            expected = at_home(values, gradients[: (runs + 1) * STEPS])
            torch.testing.assert_close(model_of(shards), expected, rtol=1e-5, atol=1e-6)
            assert shards[0].run.samples == (runs + 1) * STEPS
            assert shards[0].state.buffers.weight == 12.0
            assert shards[0].state.buffers.state()["mean"].tolist() == [1.0, 1.0, 1.0]
            checkpoint(shards)
        directory = target


def test_a_restart_goes_on_from_its_own_directory_and_not_from_the_start_again(two, tmp_path):
    directory, values, gradients = two
    with going_on(3, directory, tmp_path / "three") as shards:
        for shard in shards:
            join(shard, LAYOUT, BERT, method_settings=settings())
        train(shards, BERT, gradients[STEPS : 2 * STEPS])
    shutil.rmtree(directory)
    with going_on(3, directory, tmp_path / "three") as shards:
        assert [shard.model.version for shard in shards] == [2 * STEPS] * 3
        torch.testing.assert_close(model_of(shards), at_home(values, gradients[: 2 * STEPS]), rtol=1e-5, atol=1e-6)


def test_a_volume_may_hold_the_old_shard_and_the_new_one(two, tmp_path):
    volume, values, gradients = two
    old = tmp_path / "old"
    old.mkdir()
    for shard in volume.iterdir():
        (old / shard.name).symlink_to(shard)
    for _ in range(2):
        with going_on(3, old, volume) as shards:
            for shard in shards:
                assert join(shard, LAYOUT, BERT, method_settings=settings()).version == STEPS
            torch.testing.assert_close(model_of(shards), at_home(values, gradients[:STEPS]), rtol=1e-5, atol=1e-6)


def test_another_optimizer_begins_anew_and_says_so(two, tmp_path, caplog):
    directory, _, _ = two
    with going_on(1, directory, tmp_path / "other") as (shard,):
        assert join(shard, LAYOUT, BERT, method_settings=settings("RMSprop")).version == STEPS
        assert not shard.model.export().tensors
    assert "begins anew" in caplog.text


def test_shards_folders_may_be_links_to_volumes_that_nobody_writes_to(two, tmp_path):
    directory, values, gradients = two
    links = tmp_path / "links"
    links.mkdir()
    for shard in sorted(directory.iterdir()):
        volume = tmp_path / "volumes" / shard.name
        volume.parent.mkdir(exist_ok=True)
        shard.rename(volume)
        (links / shard.name).symlink_to(volume)
    before = listing(tmp_path / "volumes")
    with going_on(1, links, tmp_path / "one") as (shard,):
        join(shard, LAYOUT, BERT, method_settings=settings())
        torch.testing.assert_close(model_of([shard]), at_home(values, gradients[:STEPS]), rtol=1e-5, atol=1e-6)
    assert listing(tmp_path / "volumes") == before
    (links / "shard-1-of-2").unlink()
    with pytest.raises(StorageError, match="lacks shard 1 of 2"), going_on(1, links, tmp_path / "none"):
        pass


def listing(directory):
    """Every file, its size, and when it was changed."""
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in directory.rglob("*")}


def test_a_tensor_that_was_cut_is_put_together_and_cut_elsewhere():
    left = PieceState(Span(0, 3), (3,), {"step": torch.tensor(4.0), "left": 0.9, "mean": torch.tensor([1.0, 2.0, 3.0])})
    right = PieceState(
        Span(3, 6), (3,), {"step": torch.tensor(5.0), "left": 0.8, "mean": torch.tensor([4.0, 5.0, 6.0])}
    )
    whole = reshard([right, left], Span(0, 6), (2, 3))
    assert (whole["step"].item(), whole["left"]) == (5.0, 0.8)
    assert whole["mean"].tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert reshard([left, right], Span(2, 4), (2,))["mean"].tolist() == [3.0, 4.0]
    assert reshard([left], Span(2, 4), (2,))["mean"].tolist() == [3.0, 0.0]
    assert reshard([left, right], Span(6, 8), (2,)) == {}


def test_what_is_cut_in_the_same_places_stays_as_it_is():
    rows = {"row": torch.ones(2), "step": 3}
    assert reshard([PieceState(Span(0, 6), (2, 3), rows)], Span(0, 6), (2, 3)) == rows
