"""A shard's past, brought back: a snapshot, and every record behind it done again in its order.

The journal holds the very messages of each push, and they are read, merged and applied by the code that served them;
so the parameters come out bit for bit as they were.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import DecodeError

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice, merge
from pscore.wire.errors import Rejected
from pscore.wire.messages import kept_layout_from_message
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.cluster.dedup import PushRecord
from psservice.cluster.run import RunState, added
from psservice.model.buffers import BufferAverage
from psservice.model.changelog import ChangedIndices, ChangeLog
from psservice.model.parameters import ModelShard
from psservice.model.training_mode import TrainingMode
from psservice.model.update.base import PushContext, RuleState
from psservice.model.wagma.replicas import GroupedShard, shard_kind
from psservice.model.wagma.rounds import Decision
from psservice.policy.admission import first_clock
from psservice.policy.staleness import OwnVersions
from psservice.recovery.records import Kind, messages_in
from psservice.sampling.codec import brought_back, finished_of, redo
from psservice.settings import ShardSettings
from psservice.storage.files import Files, StorageError
from psservice.storage.journal_format import Record
from psservice.storage.manifest import Manifest
from psservice.storage.recovery_source import RecoverySource, sources
from psservice.storage.snapshots import Snapshot, found
from psservice.types import Identity, PushAnswer
from psservice.wire.identity import identity_from_message
from psservice.wire.push_stream import read_all, read_push

log = logging.getLogger(__name__)

THETA, BUFFER_PREFIX, MEMORY_PREFIX = "theta", "buffer.", "memory."
"""Names of a snapshot's tensors: the shard's parameters, fp32 ``[length]``, each buffer of the average, and what the
update rule and an open round remember."""


@dataclass(slots=True)
class Live:
    """A worker that held a lease; see :class:`psservice.cluster.leases.Member`."""

    identity: Identity
    index_codecs: frozenset[int]
    clock: int


class LogReplayer:
    """A shard at one version of its past: a snapshot, and the records behind it as far as they were replayed.

    Args:
        source: with a snapshot.
        device: where the parameters are to live.
        settings: what the shard keeps after :meth:`apply_settings`; until then, what the records were made with.

    Raises:
        StorageError: the snapshot does not make sense.
    """

    def __init__(self, source: RecoverySource, device: torch.device, settings: ShardSettings) -> None:
        assert source.snapshot is not None
        self._source = source
        self.snapshot: Snapshot = source.snapshot
        self.manifest = manifest = source.snapshot.manifest
        try:
            self.layout = kept_layout_from_message(ParseDict(manifest.layout, pb.ModelLayout()))
        except (ParseError, Rejected) as error:
            raise StorageError(f"{self.snapshot.path}: the layout in the manifest is malformed: {error}") from error
        self.span = Span(manifest.start, manifest.start + manifest.length)
        tensors = source.tensors
        theta = tensors.get(THETA)
        if theta is None or theta.dtype != torch.float32 or tuple(theta.shape) != (self.span.length,):
            raise StorageError(f"{self.snapshot.path}: the parameters are not fp32 [{self.span.length}]")
        self._settings = settings
        then = replace(settings, delay_compensation=manifest.delay_compensation)
        if then.delay_compensation:  # which values are still known follows from this one
            then = replace(then, ledger_multiple=manifest.ledger_multiple)
        self.model = self._shard(theta.to(device), manifest.version, then)
        memory = {n.removeprefix(MEMORY_PREFIX): t for n, t in tensors.items() if n.startswith(MEMORY_PREFIX)}
        try:
            self.model.restore(RuleState(manifest.memory, memory))
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise StorageError(f"{self.snapshot.path}: the update rule's state cannot be read: {error}") from error
        values = [tensors.get(f"{BUFFER_PREFIX}{spec.name}") for spec in self.layout.buffers]
        there = [value for value in values if value is not None]
        self.buffers = BufferAverage(self.layout.buffers, there) if there and len(there) == len(values) else None
        if self.buffers is not None:
            self.buffers.weight = manifest.buffer_weight
        self.run_id = manifest.run_id
        self.run_state = RunState(manifest.run_state)
        self.samples = manifest.samples
        self.pushes: OrderedDict[Identity, PushRecord] = OrderedDict(
            (
                Identity(push.worker_id, push.incarnation),
                PushRecord(
                    push.step,
                    PushAnswer(push.version, push.staleness, 0, push.applied_scale) if push.step else None,
                    push.buffer_step,
                    OwnVersions(push.own_generation, tuple(push.own_versions)),
                ),
            )
            for push in manifest.pushes
        )
        self.last_pushes = OrderedDict(manifest.last_pushes)
        self.workers = {
            worker.worker_id: Live(
                Identity(worker.worker_id, worker.incarnation), frozenset(worker.index_codecs), worker.clock
            )
            for worker in manifest.workers
        }
        self.datasets = brought_back(manifest.datasets)
        self.replayed = 0

    def replay(self, to_version: int | None = None) -> Iterator[int]:
        """Replay the records one by one, and yield the version after each.

        Raises:
            StorageError: a record makes no sense behind the ones before it, or the version is not covered.
        """
        if to_version is None or to_version > self.model.version:
            for record in self._source.records():
                try:
                    self._do(record)
                except (Rejected, ValueError, DecodeError, KeyError, IndexError) as error:
                    self._source.give_up(self._source.damaged(record, f"a record cannot be done: {error}"))
                    break
                except (MemoryError, RuntimeError) as error:  # torch's want of memory is the latter
                    raise StorageError(
                        f"the record at byte {record.offset} of the journal behind {self.snapshot.path} cannot be "
                        f"applied: {error!r}; nothing on the disk was changed: mend the cause (is memory short?) and "
                        "start again"
                    ) from error
                self.replayed += 1
                yield self.model.version
                if self.model.version == to_version:
                    return
        if to_version is not None and self.model.version != to_version:
            raise StorageError(
                f"version {to_version} is not covered: there are {self.manifest.version} to {self.model.version}"
            )

    def replay_to(self, version: int | None) -> None:
        """Replay up to a version, or everything; see :meth:`replay`."""
        for _ in self.replay(version):
            pass

    def versions_dropped(self) -> int:
        """Return how many versions are given up behind damage, as far as their records can be read."""
        made_by = Kind.PUSHED if self.model.round is None else Kind.ROUND
        return sum(record.kind == made_by for record in self._source.dropped())

    def apply_settings(self) -> bool:
        """Keep from now on what the settings say; return whether the records were made with something else.

        Then a snapshot has to follow, and diffs begin anew.
        """
        old = self.model
        wanted = self._shard(old.theta, old.version, self._settings)
        if wanted.settings == old.settings:
            return False
        wanted.restore(old.export())
        self.model = wanted
        return True

    def _shard(self, theta: torch.Tensor, version: int, settings: ShardSettings) -> ModelShard:
        mode = TrainingMode.of(self.manifest.method_settings)
        return shard_kind(mode)(
            self.layout,
            self.span,
            theta,
            generation=self.manifest.generation,
            version=version,
            settings=settings,
            mode=mode,
        )

    def extend_changelog(self) -> None:
        """Let the change log reach back before the snapshot, as far as the journal is kept: diffs stay sparse.

        Segments are read newest first and only while there is room, so this takes no more memory than the log itself.
        """
        if not self.model.versions_are_pushes:
            return
        ledger, version = self.model.changelog, self.manifest.version
        for records in self._source.earlier():
            if ledger.covered_from != version or not ledger.room:
                return
            newest = self._newest_supports(records, version, ledger.room)
            if newest is None:
                return
            supports = newest.all()
            ledger.reach_back(supports)
            if newest.covered_from:  # there was more than room
                return
            version -= len(supports)

    def _newest_supports(self, records: Iterator[Record], version: int, room: int) -> ChangeLog | None:
        """Return what the last pushes of a segment changed, ending in ``version``, within ``room`` entries.

        Returns:
            Nothing changed where the segment holds no push; ``None`` where the versions do not follow one another.
        """
        newest = ChangeLog(self.span.length, room)
        last: tuple[int, ChangedIndices] | None = None
        try:
            for record in records:
                if record.kind != Kind.PUSHED:
                    continue
                header, segments, answer = self._push_in(record)
                if header.generation != self.manifest.generation:
                    return None
                if last is not None and last[0] == answer.version - 1:
                    newest.append(*last)
                elif last is not None and last[0] != answer.version:  # else the push before it was refused
                    return None
                last = answer.version, self.model.changed_by(merge(self.span, segments))
        except (StorageError, Rejected, ValueError, DecodeError, IndexError):
            return None
        if last is not None and last[0] == version:
            newest.append(*last)
        elif last is not None and last[0] != version + 1:  # else it was refused, as the one that follows
            return None
        return newest

    def _push_in(self, record: Record) -> tuple[pb.PushHeader, list[SparseSlice], pb.PushSparseResponse]:
        *requests, answer = messages_in(record.body)
        pushed = map(pb.PushSparseRequest.FromString, requests)
        header, segments, _ = read_all(read_push(lambda opened: self.span), pushed)
        segments.sort(key=lambda segment: segment.span.start)
        return header, segments, pb.PushSparseResponse.FromString(answer)

    def _do(self, record: Record) -> None:
        if record.kind == Kind.PUSHED:
            self._do_push(record)
        elif record.kind == Kind.AVERAGED:
            self._do_buffers(record)
        elif record.kind == Kind.JOINED:
            request = pb.JoinRequest.FromString(messages_in(record.body)[0])
            identity = identity_from_message(request.identity)
            others = (live.clock for name, live in self.workers.items() if name != identity.worker_id)
            self.workers[identity.worker_id] = Live(identity, frozenset(request.index_codecs), first_clock(others))
        elif record.kind == Kind.LEFT:
            identity = identity_from_message(pb.LeaveRequest.FromString(messages_in(record.body)[0]).identity)
            known = self.workers.get(identity.worker_id)
            if known is not None and known.identity == identity:
                del self.workers[identity.worker_id]
        elif record.kind == Kind.FINISHED:
            self.run_state = RunState.FINISHED
            self.model.finish()
        elif record.kind == Kind.ROUND:
            self._do_round(record)
        elif record.kind == Kind.GROUPS:
            if not isinstance(self.model, GroupedShard):
                raise ValueError("the shard has no groups")
            self.model.decide(Decision.from_bytes(record.body))
        elif record.kind == Kind.LEASED:
            redo(self.datasets, messages_in(record.body))
        else:
            raise ValueError(f"records of kind {record.kind} are not known to this version of the server")

    def _do_push(self, record: Record) -> None:
        header, segments, answer = self._push_in(record)
        if (header.generation, answer.version) != (self.model.generation, self.model.version + 1):
            raise ValueError(
                f"it is version {answer.version} of generation {header.generation}, and follows version "
                f"{self.model.version} of {self.model.generation}"
            )
        update = on_device(merge(self.span, segments), self.model.theta.device)
        context = PushContext.of(header, answer.applied_scale or 1.0)
        try:
            self.model.take(header.identity.worker_id, update, context, header.step)
        except Rejected as error:  # as it was then: that follows from the parameters and the push alone
            log.debug("a push that was refused is left out", extra={"offset": record.offset, "why": str(error)})
            return
        self.run_id = self.run_id or header.identity.run_id  # a shard that follows learns it from its workers
        identity = identity_from_message(header.identity)
        self.datasets.put(self.datasets.finish(identity, finished_of(header)))
        known = self.pushes.setdefault(identity, PushRecord())
        known.step, known.answer = (
            header.step,
            PushAnswer(answer.version, answer.staleness, 0, answer.applied_scale or 1.0),
        )
        if self.model.round is None:
            known.own = known.own.noted(header.generation, header.base_version, answer.version)
        self.pushes.move_to_end(identity)
        self.last_pushes[identity.worker_id] = (identity.incarnation, header.step)
        self.last_pushes.move_to_end(identity.worker_id)
        live = self.workers.get(identity.worker_id)
        if live is not None and live.identity == identity:
            live.clock += 1
        self.samples = added(self.samples, header.samples)

    def _do_round(self, record: Record) -> None:
        (data,) = messages_in(record.body)
        version = pb.PushSparseResponse.FromString(data).version
        if self.model.round is None or version != self.model.version + 1:
            raise ValueError(f"a round that makes version {version} follows version {self.model.version}")
        self.model.close_round()

    def _do_buffers(self, record: Record) -> None:
        if self.buffers is None:
            raise ValueError("the shard keeps no buffers")
        opening, chunk, answer = messages_in(record.body)
        header, data = pb.BuffersHeader.FromString(opening), pb.BytesChunk.FromString(chunk).data
        self.buffers.contribute(data, header.samples, pb.RenewLeaseResponse.FromString(answer).live_workers)
        self.pushes.setdefault(identity_from_message(header.identity), PushRecord()).buffer_step = header.step


def bring_back(
    directory: Path,
    files: Files,
    device: torch.device,
    settings: ShardSettings,
    *,
    version: int | None = None,
    checkpoint: str = "",
) -> LogReplayer:
    """Bring a shard back as it was at a version (of its newest history that had it), in a checkpoint, or at the end.

    Raises:
        StorageError: that is not kept, or is damaged.
    """
    if version is None and not checkpoint:
        newest = RecoverySource(directory, files)
        if newest.snapshot is None:
            raise StorageError(f"{directory} holds no model yet")
        replayer = LogReplayer(newest, device, settings)
        replayer.replay_to(None)
        return replayer

    def is_wanted(manifest: Manifest) -> bool:
        return manifest.checkpoint == checkpoint if version is None else manifest.version <= version

    for source in sources(directory, files, is_wanted):
        replayer = LogReplayer(source, device, settings)
        try:
            replayer.replay_to(replayer.model.version if version is None else version)
        except StorageError as error:
            log.info("not from here", extra={"snapshot": str(replayer.snapshot.path), "error": str(error)})
            continue
        replayer.apply_settings()
        return replayer
    kept = [each.manifest for each in found(files, directory / "snapshots")]
    names = ", ".join(f"{each.version}" + (f" ({each.checkpoint})" if each.checkpoint else "") for each in kept)
    there = f"there are snapshots of version {names}" if kept else "there are no snapshots"
    if version is None:
        raise StorageError(f"{directory} has no whole snapshot of checkpoint {checkpoint!r}: {there}")
    raise StorageError(f"version {version} is not covered by what {directory} keeps: {there}")


def on_device(update: SparseSlice | None, device: torch.device) -> SparseSlice | None:
    """Move an update to where the parameters are."""
    if update is None or device.type == "cpu":
        return update
    offsets = None if update.offsets is None else update.offsets.to(device)
    return SparseSlice(update.span, offsets, update.values.to(device))
