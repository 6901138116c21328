"""A shard at one moment, copied: what a snapshot is made of."""

import time
from dataclasses import dataclass
from typing import Protocol

import torch

from pscore.model.modelfile import StateDict
from psservice.cluster.dedup import Dedup
from psservice.cluster.leases import Leases
from psservice.cluster.run import Run, RunState
from psservice.model.buffers import BufferAverage
from psservice.model.parameters import ModelShard
from psservice.observability.metrics import Metrics
from psservice.recovery.replayer import BUFFER_PREFIX, MEMORY_PREFIX, THETA, History, layout_to_plain
from psservice.sampling.codec import kept
from psservice.sampling.dataset import Datasets
from psservice.shard.apply_thread import Writer
from psservice.storage.snapshots import KnownPush, LiveWorker, Manifest


@dataclass(frozen=True, slots=True)
class Content:
    """What a shard holds that is replaced with its model."""

    model: ModelShard
    buffers: BufferAverage | None
    datasets: Datasets
    run_id: str
    run_state: RunState
    samples: int


class Kept(Protocol):
    """What of an engine is kept, and how it is brought back."""

    device: torch.device
    is_coordinator: bool
    run: Run
    leases: Leases
    dedup: Dedup
    writer: Writer
    metrics: Metrics

    @property
    def model(self) -> ModelShard | None:
        """Its model."""

    def content(self) -> Content:
        """Return what it holds."""

    def adopt(self, history: History) -> None:
        """Become what a history has been replayed to."""

    def require_model(self, generation: int | None) -> ModelShard:
        """Return the model; raises :class:`Rejected` where there is none."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A shard at one version, copied, and ready to be written."""

    manifest: Manifest
    tensors: dict[str, torch.Tensor]


def moment_of(
    engine: Kept,
    content: Content,
    place: tuple[int, int],
    segment: int,
    buffers: tuple[float, StateDict],
    checkpoint: str,
    last_checkpoint: tuple[int, int],
    *,
    clean: bool,
) -> Moment:
    """Copy a shard; on the writer thread.

    Args:
        engine: whose it is.
        content: what it holds, or is to hold.
        place: its number, and of how many.
        segment: of the journal, that begins behind this moment.
        buffers: weight and values of the average of buffers.
        checkpoint: to which it belongs, or nothing.
        last_checkpoint: where the newest is that this shard has taken part in.
        clean: whether nothing follows in this life of the server.
    """
    model = content.model
    memory = model.export()
    known, last_pushes = engine.dedup.remembered()
    manifest = Manifest(
        checkpoint=checkpoint,
        segment=segment,
        version=model.version,
        generation=model.generation,
        start=model.span.start,
        length=model.span.length,
        shard_index=place[0],
        num_shards=place[1],
        layout=layout_to_plain(model.layout),
        run_id=content.run_id,
        run_state=content.run_state.value,
        method=engine.run.method,
        method_settings=engine.run.method_settings,
        samples=content.samples,
        pushes=[
            KnownPush(
                worker_id=identity.worker_id,
                incarnation=identity.incarnation,
                step=record.step,
                version=record.answer.version if record.answer else 0,
                staleness=record.answer.staleness if record.answer else 0,
                applied_scale=record.answer.applied_scale if record.answer else 1.0,
                buffer_step=record.buffer_step,
                own_generation=record.own.generation,
                own_versions=list(record.own.runs),
            )
            for identity, record in known
        ],
        last_pushes=dict(last_pushes),
        workers=[
            LiveWorker(
                worker_id=member.identity.worker_id,
                incarnation=member.identity.incarnation,
                index_codecs=sorted(member.index_codecs),
                clock=member.clock,
            )
            for member in engine.leases.members()
        ],
        memory=dict(memory.plain),
        datasets=kept(content.datasets),
        delay_compensation=model.settings.delay_compensation,
        ledger_multiple=model.settings.ledger_multiple,
        buffer_weight=buffers[0],
        last_checkpoint=last_checkpoint,
        clean=clean,
        created_unix_seconds=time.time(),
    )
    tensors = {THETA: model.current()}
    tensors |= {f"{BUFFER_PREFIX}{name}": value for name, value in buffers[1].items()}
    return Moment(manifest, tensors | {f"{MEMORY_PREFIX}{name}": value for name, value in memory.tensors.items()})
