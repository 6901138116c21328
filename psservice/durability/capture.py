"""The state of a shard as a snapshot has it: a manifest and tensors, written and read."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from pydantic import TypeAdapter

from pscore.model.layout import ModelLayout, Span
from pscore.wire.errors import Rejected
from pscore.wire.layouts import OncePerLayout, kept_layout_from_message, layout_to_message
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.apply_thread import ApplyThread
from psservice.data_leases.codec import from_plain, to_plain
from psservice.durability.checkpoints import Place, place_of
from psservice.feed.feed_shard import FeedShard
from psservice.feed.relayed_shard import RelayedShard
from psservice.model.buffers import BufferAverage
from psservice.model.copies import TensorCopy
from psservice.model.parameters import ModelShard
from psservice.model.training_mode import TrainingMode
from psservice.observability.metrics import Metrics
from psservice.rounds.round_shard import RoundShard
from psservice.rules.base import RuleState
from psservice.settings import ServerSettings, ShardSettings
from psservice.state.histories import Histories
from psservice.state.pushes import PushRecord
from psservice.state.run import RunState
from psservice.state.state import ShardState
from psservice.state.workers import Worker
from psservice.storage.environment import Environment
from psservice.storage.files import StorageError
from psservice.storage.manifest import Manifest
from psservice.storage.snapshots import Snapshot
from psservice.values import Identity
from psservice.wagma.replicas import GroupedShard


@dataclass(frozen=True, slots=True)
class Capture:
    """A shard at one version: the manifest and open copies of the tensors of a snapshot. :meth:`close` must follow."""

    manifest: Manifest
    tensors: Mapping[str, TensorCopy]

    def close(self) -> None:
        """Keep nothing any more."""
        for tensor in self.tensors.values():
            tensor.close()


THETA, BUFFER_PREFIX, MEMORY_PREFIX = "theta", "buffer.", "memory."
"""Names of a snapshot's tensors: the shard's parameters, fp32 or words ``[length]``, each buffer of the average, and
what the update rule, an open round or a staged version remember."""

_PUSHES, _WORKERS = TypeAdapter(list[tuple[Identity, PushRecord]]), TypeAdapter(list[Worker])


class DurableShard(Protocol):
    """The parts of a shard that its durability works with."""

    settings: ServerSettings
    environment: Environment
    device: torch.device
    is_coordinator: bool
    state: ShardState
    apply_thread: ApplyThread
    metrics: Metrics
    layout_json: OncePerLayout[dict[str, Any]]

    def new_state(self) -> ShardState: ...  # noqa: D102

    def restart(self, state: ShardState) -> None: ...  # noqa: D102


def layout_json(layout: ModelLayout) -> dict[str, Any]:
    """Write a layout for a manifest."""
    written: dict[str, Any] = MessageToDict(layout_to_message(layout))
    return written


def capture(shard: DurableShard, state: ShardState, segment: int, checkpoint: str, newest: Place) -> Capture:
    """Open a copy of a shard's state, the present one or the next; on the apply thread.

    ``segment`` begins behind the copy, and ``newest`` is the shard's newest checkpoint.
    """
    model, run, settings = state.model, state.run, shard.settings
    assert model is not None
    memory = model.export()
    weight, buffers = state.buffers.export() if state.buffers else (0.0, {})
    pushes = [(identity, replace(record, used=0.0)) for identity, record in state.pushes.items()]
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
        layout=shard.layout_json(model.layout),
        run_id=run.run_id,
        run_state=run.state.value,
        method=run.method,
        method_settings=run.method_settings,
        samples=run.samples,
        pushes=_PUSHES.dump_python(pushes, mode="json"),
        last_pushes=state.pushes.last_pushes(),
        workers=_WORKERS.dump_python([*state.workers], mode="json"),
        memory=deepcopy(dict(memory.plain)),  # pushes go on while the snapshot is written
        datasets=to_plain(state.datasets),
        delay_compensation=model.settings.delay_compensation,
        ledger_multiple=model.settings.ledger_multiple,
        buffer_weight=weight,
        origins=[MessageToDict(each) for each in state.histories.origins],
        known_shards=[MessageToDict(each) for each in state.histories.known()],
    )
    tensors = {f"{BUFFER_PREFIX}{name}": value for name, value in buffers.items()}
    tensors |= {f"{MEMORY_PREFIX}{name}": value for name, value in memory.tensors.items()}
    return Capture(manifest, {THETA: model.open_values(), **model.copies.open_all(tensors)})


def restore(
    state: ShardState,
    snapshot: Snapshot,
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
    settings: ShardSettings,
    clock: Callable[[], float],
) -> None:
    """Bring the state of a shard without a model to a snapshot; raises :class:`StorageError` if that makes no sense."""
    manifest, path = snapshot.manifest, snapshot.path
    try:
        layout = kept_layout_from_message(ParseDict(manifest.layout, pb.ModelLayout(), ignore_unknown_fields=True))
    except (ParseError, Rejected) as error:
        raise StorageError(f"{path}: the layout in the manifest is malformed: {error}") from error
    theta = tensors.get(THETA)
    if theta is None or theta.dtype != layout.value_dtype or tuple(theta.shape) != (manifest.length,):
        dtype = str(layout.value_dtype).removeprefix("torch.")
        raise StorageError(f"{path}: the parameters are not {dtype} [{manifest.length}]")
    then = replace(settings, delay_compensation=manifest.delay_compensation)
    if then.delay_compensation:  # which values are still known follows from this one
        then = replace(then, ledger_multiple=manifest.ledger_multiple)
    model = model_from(manifest, layout, theta.to(device), then, clock)
    memory = {n.removeprefix(MEMORY_PREFIX): t for n, t in tensors.items() if n.startswith(MEMORY_PREFIX)}
    try:
        model.restore(RuleState(manifest.memory, memory))
        for identity, record in _PUSHES.validate_python(manifest.pushes):
            state.pushes.add(identity, record)
        for name, (incarnation, step) in manifest.last_pushes.items():
            state.pushes.note_last(name, incarnation, step)
        for worker in _WORKERS.validate_python(manifest.workers):
            state.workers.add(worker)
        state.datasets = from_plain(manifest.datasets)
        state.histories = Histories(
            [ParseDict(each, pb.ShardOrigin()) for each in manifest.origins],
            [ParseDict(each, pb.ShardHistory()) for each in manifest.known_shards],
        )
    except (KeyError, ValueError, TypeError, RuntimeError, ParseError) as error:
        raise StorageError(f"{path}: the state that the manifest describes cannot be read: {error}") from error
    names = [f"{BUFFER_PREFIX}{spec.name}" for spec in layout.buffers]
    if names and tensors.keys() >= {*names}:
        state.buffers = BufferAverage(layout.buffers, [tensors[name] for name in names])
        state.buffers.weight = manifest.buffer_weight
    state.layout, state.mode, state.model = layout, model.mode, model
    run = state.run
    run.run_id, run.state, run.samples = manifest.run_id, RunState(manifest.run_state), manifest.samples
    run.agree(manifest.method, manifest.method_settings)


def shard_kind(mode: TrainingMode) -> type[ModelShard]:
    """Return the kind of model that a training mode needs."""
    if mode.is_feed:
        return FeedShard
    if mode.is_relayed:
        return RelayedShard
    if mode.groups is not None:
        return GroupedShard
    return ModelShard if mode.rounds is None else RoundShard


def model_from(
    manifest: Manifest, layout: ModelLayout, theta: torch.Tensor, settings: ShardSettings, clock: Callable[[], float]
) -> ModelShard:
    """Return a shard's model of parameters at a snapshot's version; without the memories of its rule and round."""
    mode = TrainingMode.of(manifest.method_settings)
    return shard_kind(mode)(
        layout,
        Span(manifest.start, manifest.start + manifest.length),
        theta,
        generation=manifest.generation,
        version=manifest.version,
        settings=settings,
        mode=mode,
        clock=clock,
        first_version=manifest.first_version,
    )
