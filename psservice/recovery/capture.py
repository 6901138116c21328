"""A copy of a shard at one version, of which a snapshot is made."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from google.protobuf.json_format import MessageToDict

from pscore.wire.messages import layout_to_message
from psservice.apply_thread import ApplyThread
from psservice.cluster.checkpoints import place_of
from psservice.cluster.dedup import Dedup
from psservice.cluster.leases import Leases
from psservice.cluster.run import Run, RunState
from psservice.model.buffers import BufferAverage
from psservice.model.parameters import ModelShard
from psservice.observability.metrics import Metrics
from psservice.recovery.replayer import BUFFER_PREFIX, MEMORY_PREFIX, THETA, LogReplayer
from psservice.sampling.codec import to_manifest
from psservice.sampling.dataset import Datasets
from psservice.storage.manifest import KnownPush, LiveWorker, Manifest


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
    """What of an shard is kept, and how it is brought back."""

    device: torch.device
    is_coordinator: bool
    run: Run
    leases: Leases
    dedup: Dedup
    apply_thread: ApplyThread
    metrics: Metrics

    @property
    def model(self) -> ModelShard | None:
        """Its model."""

    def content(self) -> Content:
        """Return what it holds."""

    def adopt(self, history: LogReplayer) -> None:
        """Become what a log was replayed to."""

    def require_model(self, generation: int | None) -> ModelShard:
        """Return the model; raises :class:`Rejected` where there is none."""


@dataclass(frozen=True, slots=True)
class Capture:
    """A shard at one version, copied, and ready to be written."""

    manifest: Manifest
    tensors: dict[str, torch.Tensor]


def capture(shard: Kept, content: Content, checkpoint: str, average: tuple[float, Any], **others: Any) -> Capture:
    """Copy a shard; on the writer thread.

    Args:
        shard: the shard.
        content: what the shard holds, or is to hold.
        checkpoint: to which the copy belongs, or nothing.
        average: weight and values of the average of buffers.
        others: fields of the manifest that the shard does not know.
    """
    model, run = content.model, shard.run
    memory = model.export()
    known, last_pushes = shard.dedup.remembered()
    manifest = Manifest(
        checkpoint=checkpoint,
        is_named=bool(checkpoint) and place_of(checkpoint) is None,
        version=model.version,
        generation=model.generation,
        start=model.span.start,
        length=model.span.length,
        layout=MessageToDict(layout_to_message(model.layout)),
        run_id=content.run_id,
        run_state=content.run_state.value,
        method=run.method,
        method_settings=run.method_settings,
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
            for member in shard.leases.members()
        ],
        memory=dict(memory.plain),
        datasets=to_manifest(content.datasets),
        delay_compensation=model.settings.delay_compensation,
        ledger_multiple=model.settings.ledger_multiple,
        buffer_weight=average[0],
        **others,
    )
    tensors = {THETA: model.current()}
    tensors |= {f"{BUFFER_PREFIX}{name}": value for name, value in average[1].items()}
    return Capture(manifest, tensors | {f"{MEMORY_PREFIX}{name}": value for name, value in memory.tensors.items()})
