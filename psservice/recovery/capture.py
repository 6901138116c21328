"""A copy of a shard at one version, of which a snapshot is made."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from google.protobuf.json_format import MessageToDict

from pscore.wire.messages import layout_to_message
from psservice.apply_thread import ApplyThread
from psservice.cluster.checkpoints import Place, place_of
from psservice.cluster.dedup import Dedup
from psservice.cluster.histories import Histories
from psservice.cluster.leases import Leases
from psservice.cluster.run import Run, RunState
from psservice.model.buffers import BufferAverage
from psservice.model.parameters import ModelShard
from psservice.observability.metrics import Metrics
from psservice.recovery.replayer import BUFFER_PREFIX, MEMORY_PREFIX, PUSHES, THETA, WORKERS, LiveWorker, LogReplayer
from psservice.sampling.codec import to_plain
from psservice.sampling.dataset import Datasets
from psservice.settings import ServerSettings
from psservice.storage.environment import Environment
from psservice.storage.manifest import Manifest

Capture = tuple[Manifest, dict[str, torch.Tensor]]
"""A shard at one version, copied: the manifest and the tensors of a snapshot."""


@dataclass(frozen=True, slots=True)
class Content:
    """The state of a shard that is replaced together with the model."""

    model: ModelShard
    buffers: BufferAverage | None
    datasets: Datasets
    run_id: str
    run_state: RunState
    samples: int
    histories: Histories


class DurableShard(Protocol):
    """The parts of a shard that snapshots contain and recoveries restore."""

    settings: ServerSettings
    environment: Environment
    device: torch.device
    is_coordinator: bool
    run: Run
    leases: Leases
    dedup: Dedup
    apply_thread: ApplyThread
    metrics: Metrics

    @property
    def model(self) -> ModelShard | None: ...  # noqa: D102

    def content(self) -> Content: ...  # noqa: D102

    def adopt(self, history: LogReplayer) -> None: ...  # noqa: D102


def capture(
    shard: DurableShard, content: Content, segment: int, checkpoint: str, newest: Place, average: tuple[float, Any]
) -> Capture:
    """Copy a shard, with its present content or the next; on the apply thread.

    ``segment`` begins behind the copy, ``newest`` is the shard's newest checkpoint, and ``average`` has the weight and
    the values of the average of buffers.
    """
    model, run, settings = content.model, shard.run, shard.settings
    memory = model.export()
    known, last_pushes = shard.dedup.remembered()
    manifest = Manifest(
        checkpoint=checkpoint,
        is_named=bool(checkpoint) and place_of(checkpoint) is None,
        last_checkpoint=newest,
        created_unix_seconds=shard.environment.unix_seconds(),
        segment=segment,
        shard_index=settings.shard_index,
        num_shards=settings.num_shards,
        version=model.version,
        first_version=model.first_version,
        generation=model.generation,
        start=model.span.start,
        length=model.span.length,
        layout=MessageToDict(layout_to_message(model.layout)),
        run_id=content.run_id,
        run_state=content.run_state.value,
        method=run.method,
        method_settings=run.method_settings,
        samples=content.samples,
        pushes=PUSHES.dump_python([(identity, replace(record, used=0.0)) for identity, record in known], mode="json"),
        last_pushes=dict(last_pushes),
        workers=WORKERS.dump_python([LiveWorker.of(member) for member in shard.leases.members()], mode="json"),
        memory=dict(memory.plain),
        datasets=to_plain(content.datasets),
        delay_compensation=model.settings.delay_compensation,
        ledger_multiple=model.settings.ledger_multiple,
        buffer_weight=average[0],
        origins=[MessageToDict(each) for each in content.histories.origins],
        known_shards=[MessageToDict(each) for each in content.histories.known()],
    )
    tensors = {THETA: model.current()}
    tensors |= {f"{BUFFER_PREFIX}{name}": value for name, value in average[1].items()}
    return manifest, tensors | {f"{MEMORY_PREFIX}{name}": value for name, value in memory.tensors.items()}
