"""Shards of WAGMA-SGD without a network: every worker pushes, rounds freeze, models are read."""

import torch

from pscore.model.sparse_slice import SparseSlice
from psservice.model.training_mode import GroupSettings, TrainingMode
from psservice.settings import ShardSettings
from psservice.wagma.replicas import GroupedShard
from tests.psservice.service_makers import F32, layout_of
from tests.psservice.shard_makers import Clock

LAYOUT = layout_of((6, F32), (4, F32))
SIZE = LAYOUT.size


def grouped(settings, *workers, values=None, clock=None):
    """A shard in which these workers take part, all with the same model."""
    shard = GroupedShard(
        LAYOUT,
        LAYOUT.shard_spans(1)[0],
        torch.zeros(SIZE) if values is None else values.clone(),
        generation=1,
        version=0,
        settings=ShardSettings(ledger_multiple=100.0),
        mode=TrainingMode(groups=settings),
        clock=clock or Clock(),
    )
    for worker in workers:
        shard.decide("enter", worker, "1")
    return shard


def dense(values):
    return SparseSlice(LAYOUT.shard_spans(1)[0], None, torch.as_tensor(values, dtype=torch.float32).clone())


def sparse(entries):
    offsets = torch.tensor(sorted(entries), dtype=torch.int64)
    return SparseSlice(LAYOUT.shard_spans(1)[0], offsets, torch.tensor([float(entries[i]) for i in sorted(entries)]))


def freeze_due(shard):
    frozen = []
    while (due := shard.rounds.due()) is not None:
        shard.decide("freeze", due.fresh[0], iteration=due.iteration)
        frozen.append(due)
    return frozen


def all_push(shard, workers, step, pushes):
    """Everybody pushes in time: rounds freeze when all are there."""
    for worker in workers:
        shard.take(worker, pushes.get(worker), step=step)
    return freeze_due(shard)


def models(shard, workers):
    return {worker: shard.replicas[worker].model.theta.clone() for worker in workers}


def settings_of(size=2, tau=10, late="replace"):
    return GroupSettings(size, tau, late)
