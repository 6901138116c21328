"""Replay of a shard's past: a snapshot, and every record behind it done again in its order.

The journal has the messages of each push as they came, and the code that served them reads, merges and applies them
again, so the parameters are bit for bit as they were.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch
from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import DecodeError
from pydantic import TypeAdapter

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice, merge
from pscore.selection.cuda.launches import to_device
from pscore.wire.errors import Rejected
from pscore.wire.messages import kept_layout_from_message
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.cluster.dedup import PushRecord
from psservice.cluster.histories import Histories
from psservice.cluster.member import Member
from psservice.cluster.run import RunState, added
from psservice.model.buffers import BufferAverage
from psservice.model.changelog import ChangedIndices, ChangeLog, changed_by
from psservice.model.parameters import ModelShard
from psservice.model.training_mode import TrainingMode
from psservice.model.update.base import PushContext, RuleState
from psservice.model.wagma.group_rounds import Decision
from psservice.model.wagma.replicas import GroupedShard, shard_kind
from psservice.recovery.event_log import Kind, messages_in
from psservice.sampling.codec import finished_of, from_plain, replay_record
from psservice.settings import ShardSettings
from psservice.storage.files import StorageError
from psservice.storage.formats import OtherReleaseError
from psservice.storage.journal_format import Record
from psservice.storage.recovery_source import RecoverySource
from psservice.types import Identity, PushAnswer
from psservice.wire.identity import identity_from_message
from psservice.wire.push_stream import read_all, read_push

log = logging.getLogger(__name__)

THETA, BUFFER_PREFIX, MEMORY_PREFIX = "theta", "buffer.", "memory."
"""Names of a snapshot's tensors: the shard's parameters, fp32 ``[length]``, each buffer of the average, and what the
update rule and an open round remember."""


@dataclass(frozen=True, slots=True)
class LiveWorker:
    """A worker that had a lease."""

    identity: Identity
    index_codecs: list[int]
    clock: int

    @classmethod
    def of(cls, member: Member) -> "LiveWorker":
        """Describe a live worker."""
        return cls(member.identity, sorted(member.index_codecs), member.clock)


PUSHES, WORKERS = TypeAdapter(list[tuple[Identity, PushRecord]]), TypeAdapter(list[LiveWorker])
"""How a manifest has the records of pushes and the live workers."""


class LogReplayer:
    """A shard at one version of its past: a snapshot, and the records behind it as far as they were replayed.

    ``settings`` serve from :meth:`apply_settings` on; until then, those with which the records were made. ``clock``
    counts the seconds of the model's rounds. Raises :class:`StorageError` where the snapshot does not make sense.
    """

    def __init__(
        self,
        source: RecoverySource,
        device: torch.device,
        settings: ShardSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source, self._settings, self._clock = source, settings, clock
        self.snapshot, tensors = source.snapshot, source.tensors
        self.manifest = manifest = source.snapshot.manifest
        path = self.snapshot.path
        try:
            self.layout = kept_layout_from_message(ParseDict(manifest.layout, pb.ModelLayout()))
        except (ParseError, Rejected) as error:
            raise StorageError(f"{path}: the layout in the manifest is malformed: {error}") from error
        self.span = Span(manifest.start, manifest.start + manifest.length)
        theta = tensors.get(THETA)
        if theta is None or theta.dtype != torch.float32 or tuple(theta.shape) != (self.span.length,):
            raise StorageError(f"{path}: the parameters are not fp32 [{self.span.length}]")
        then = replace(settings, delay_compensation=manifest.delay_compensation)
        if then.delay_compensation:  # which values are still known follows from this one
            then = replace(then, ledger_multiple=manifest.ledger_multiple)
        self.model = self._shard(theta.to(device), manifest.version, then)
        memory = {n.removeprefix(MEMORY_PREFIX): t for n, t in tensors.items() if n.startswith(MEMORY_PREFIX)}
        try:
            self.model.restore(RuleState(manifest.memory, memory))
            self.pushes = OrderedDict(PUSHES.validate_python(manifest.pushes))
            self.workers = {each.identity.worker_id: each for each in WORKERS.validate_python(manifest.workers)}
            self.datasets = from_plain(manifest.datasets)
            self.histories = Histories(
                [ParseDict(each, pb.ShardOrigin()) for each in manifest.origins],
                [ParseDict(each, pb.ShardHistory()) for each in manifest.known_shards],
            )
        except (KeyError, ValueError, TypeError, RuntimeError, ParseError) as error:
            raise StorageError(f"{path}: the state that the manifest describes cannot be read: {error}") from error
        names = [f"{BUFFER_PREFIX}{spec.name}" for spec in self.layout.buffers]
        self.buffers: BufferAverage | None = None
        if names and tensors.keys() >= {*names}:
            self.buffers = BufferAverage(self.layout.buffers, [tensors[name] for name in names])
            self.buffers.weight = manifest.buffer_weight
        self.run_id, self.samples = manifest.run_id, manifest.samples
        self.run_state = RunState(manifest.run_state)
        self.last_pushes = OrderedDict(manifest.last_pushes)
        self.replayed = 0

    def replay(self, to_version: int | None = None) -> Iterator[int]:
        """Replay the records one by one, and yield the version after each.

        Raises :class:`StorageError` where the version is not covered, and :class:`RecordError` where a record cannot be
        applied: the model may then have half of it.
        """
        if to_version is None or to_version > self.model.version:
            for record in self._source.records():
                try:
                    self._redo(record)
                except OtherReleaseError:
                    raise
                except Exception as error:  # torch's want of memory is a RuntimeError; and whatever fails each time
                    raise self._source.unfit(record, error) from error
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
        """Count the versions behind the damage, as far as their records can be read."""
        made_by = Kind.PUSHED if self.model.round is None else Kind.ROUND
        return sum(record.kind == made_by for record in self._source.dropped())

    def apply_settings(self) -> bool:
        """Use the settings from now on; return whether they are new, so that a snapshot has to follow."""
        old = self.model
        wanted = self._shard(old.theta, old.version, self._settings)
        if wanted.settings == old.settings:
            return False
        wanted.restore(old.export())
        self.model = wanted
        return True

    def _shard(self, theta: torch.Tensor, version: int, settings: ShardSettings) -> ModelShard:
        mode, generation = TrainingMode.of(self.manifest.method_settings), self.manifest.generation
        return shard_kind(mode)(
            self.layout,
            self.span,
            theta,
            generation=generation,
            version=version,
            settings=settings,
            mode=mode,
            clock=self._clock,
            first_version=self.manifest.first_version,
        )

    def extend_changelog(self) -> None:
        """Let the change log reach back before the snapshot, as far as the journal is kept: diffs stay sparse.

        Segments are read newest first and only while there is room, so this takes no more memory than the log itself.
        """
        if not self.model.versions_are_pushes:
            return
        changelog, version = self.model.changelog, self.manifest.version
        for records in self._source.earlier_segments():
            if changelog.covered_from != version or not changelog.room:
                return
            try:
                newest = self._newest_changes(records, version, changelog.room)
            except (StorageError, Rejected, ValueError, DecodeError, IndexError):
                return
            changes = newest.all()
            changelog.reach_back(changes)
            if newest.covered_from:  # there was more than room
                return
            version -= len(changes)

    def _newest_changes(self, records: Iterator[Record], version: int, room: int) -> ChangeLog:
        """Return the changes of the last pushes of a segment, ending in ``version``, within ``room`` entries.

        Raises ``ValueError`` where the versions do not follow one another.
        """
        newest = ChangeLog(self.span.length, room)
        last: tuple[int, ChangedIndices] | None = None
        for made, changed in chain(self._changes(records), [(version + 1, None)]):
            if last is not None and last[0] == made - 1:
                newest.append(*last)
            elif last is not None and last[0] != made:  # else the push before was refused
                raise ValueError(f"version {made} follows version {last[0]}")
            last = made, changed
        return newest

    def _changes(self, records: Iterator[Record]) -> Iterator[tuple[int, ChangedIndices]]:
        """Yield the version that each push was to make, and the indices that the push changed."""
        for record in records:
            if record.kind == Kind.PUSHED:
                header, merged, answer = self._read_push(messages_in(record.body))
                if header.generation != self.manifest.generation:
                    raise ValueError(f"the push is of generation {header.generation}")
                yield answer.version, changed_by(merged)

    def _read_push(self, messages: list[bytes]) -> tuple[pb.PushHeader, SparseSlice | None, pb.PushSparseResponse]:
        *requests, answer = messages
        pushed = map(pb.PushSparseRequest.FromString, requests)
        header, segments, _ = read_all(read_push(lambda opened: self.span), pushed)
        segments.sort(key=lambda segment: segment.span.start)
        return header, merge(self.span, segments), pb.PushSparseResponse.FromString(answer)

    def _redo(self, record: Record) -> None:
        messages = [] if record.kind == Kind.GROUPS else messages_in(record.body)
        if record.kind == Kind.PUSHED:
            self._redo_push(messages)
        elif record.kind == Kind.AVERAGED:
            self._redo_buffers(messages)
        elif record.kind == Kind.JOINED:
            request = pb.JoinRequest.FromString(messages[0])
            identity = identity_from_message(request.identity)
            others = (live.clock for name, live in self.workers.items() if name != identity.worker_id)
            self.workers[identity.worker_id] = LiveWorker(
                identity, sorted(request.index_codecs), min(others, default=0)
            )
        elif record.kind == Kind.LEFT:
            identity = identity_from_message(pb.LeaveRequest.FromString(messages[0]).identity)
            known = self.workers.get(identity.worker_id)
            if known is not None and known.identity == identity:
                del self.workers[identity.worker_id]
        elif record.kind == Kind.FINISHED:
            self.run_state = RunState.FINISHED
            self.model.finish()
        elif record.kind == Kind.ROUND:
            version = pb.PushSparseResponse.FromString(messages[0]).version
            if self.model.round is None or version != self.model.version + 1:
                raise ValueError(f"a round that makes version {version} follows version {self.model.version}")
            self.model.close_round()
        elif record.kind == Kind.GROUPS:
            if not isinstance(self.model, GroupedShard):
                raise ValueError("the shard has no groups")
            self.model.decide(Decision.from_bytes(record.body))
        elif record.kind == Kind.KNOWN:
            for message in messages:
                self.histories.replay(pb.ShardHistory.FromString(message))
        elif record.kind == Kind.LEASED:
            replay_record(self.datasets, messages)
        else:
            path = self.snapshot.path.parents[1] / "journal"
            raise OtherReleaseError(path, f"records of kind {record.kind}, unknown to this release", is_newer=True)

    def _redo_push(self, messages: list[bytes]) -> None:
        header, merged, answer = self._read_push(messages)
        if (header.generation, answer.version) != (self.model.generation, self.model.version + 1):
            raise ValueError(
                f"it is version {answer.version} of generation {header.generation}, and follows version "
                f"{self.model.version} of {self.model.generation}"
            )
        update = on_device(merged, self.model.theta.device)
        context = PushContext.of(header, answer.applied_scale or 1.0)
        try:
            self.model.take(header.identity.worker_id, update, context, header.step)
        except Rejected as error:  # as it was then: that follows from the parameters and the push alone
            log.debug("a push that was refused is left out", extra={"version": answer.version, "why": str(error)})
            return
        self.run_id = self.run_id or header.identity.run_id  # a shard that follows learns it from its workers
        identity = identity_from_message(header.identity)
        self.datasets.update(self.datasets.finish(identity, finished_of(header)))
        known = self.pushes.setdefault(identity, PushRecord())
        known.step = header.step
        known.answer = PushAnswer(answer.version, answer.staleness, 0, answer.applied_scale or 1.0)
        if self.model.round is None:
            known.own = known.own.noted(header.generation, header.base_version, answer.version)
        self.pushes.move_to_end(identity)
        self.last_pushes[identity.worker_id] = (identity.incarnation, header.step)
        self.last_pushes.move_to_end(identity.worker_id)
        live = self.workers.get(identity.worker_id)
        if live is not None and live.identity == identity:
            self.workers[identity.worker_id] = replace(live, clock=live.clock + 1)
        self.samples = added(self.samples, header.samples)

    def _redo_buffers(self, messages: list[bytes]) -> None:
        if self.buffers is None:
            raise ValueError("the shard keeps no buffers")
        opening, chunk, answer = messages
        header, data = pb.BuffersHeader.FromString(opening), pb.BytesChunk.FromString(chunk).data
        self.buffers.contribute(data, header.samples, pb.RenewLeaseResponse.FromString(answer).live_workers)
        self.pushes.setdefault(identity_from_message(header.identity), PushRecord()).buffer_step = header.step


def on_device(update: SparseSlice | None, device: torch.device) -> SparseSlice | None:
    """Move an update from the host to where the parameters are, in one copy, for which nothing waits."""
    if update is None or update.values.device == device:
        return update
    arrays = [each.numpy() for each in (update.values, update.offsets) if each is not None]
    values, *offsets = to_device(arrays, device)
    return SparseSlice(update.span, offsets[0].view(torch.int64) if offsets else None, values.view(torch.float32))
