"""A shard's past, brought back: a snapshot, and every record behind it done again in its order.

The journal holds the very messages of each push, and they are read, merged and applied by the code that served them;
so the parameters come out bit for bit as they were.
"""

import logging
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.message import DecodeError, Message

from pscore.model.layout import ModelLayout, Span
from pscore.model.segment import Segment, merge
from pscore.wire.errors import Rejected
from pscore.wire.messages import kept_layout_from_message, layout_to_message
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.cluster.dedup import PushRecord
from psservice.cluster.run import RunState, added
from psservice.model.buffers import BufferAverage
from psservice.model.changelog import ChangedIndices, ChangeLog
from psservice.model.parameters import ModelShard, ShardSettings
from psservice.model.training_mode import TrainingMode
from psservice.model.update.base import PushContext, RuleState
from psservice.model.wagma.replicas import GroupedShard, shard_kind
from psservice.model.wagma.rounds import Decision
from psservice.policy.admission import first_clock
from psservice.policy.staleness import OwnVersions
from psservice.rpc.identity import identity_from_message
from psservice.rpc.push_stream import PushReader, read_all, read_push
from psservice.sampling.codec import brought_back, finished_of, redo
from psservice.storage.files import StorageError
from psservice.storage.journal_format import Body, DamagedError, Record
from psservice.storage.recovery_source import RecoverySource, pasts
from psservice.storage.snapshots import Manifest, Snapshot, found
from psservice.types import Identity, PushAnswer

log = logging.getLogger(__name__)

PUSHED, AVERAGED, JOINED, LEFT, FINISHED, ROUND, GROUPS = range(1, 8)
"""What a record says: a push was taken, buffers were averaged in, a lease began or ended, the run is over, a round was
closed, something was decided in the groups."""

LEASED = 10
"""What a record says: samples were handed out."""

THETA, BUFFER_PREFIX, MEMORY_PREFIX = "theta", "buffer.", "memory."
"""Names of a snapshot's tensors: the shard's parameters, fp32 ``[length]``, each buffer of the average, and what the
update rule and an open round remember."""

_LENGTH = struct.Struct("<I")


def body_of(messages: Sequence[Message]) -> Body:
    """Return messages as the body of a record; see :func:`body_of_raw`."""
    return body_of_raw([message.SerializeToString() for message in messages])


def body_of_raw(messages: Sequence[bytes]) -> Body:
    """Return messages as they came as the body of a record, each behind its length (uint32)."""
    return Body.of([part for data in messages for part in (_LENGTH.pack(len(data)), data)])


def add_message(body: Body, message: Message) -> Body:
    """Add one message behind a body."""
    data = message.SerializeToString()
    return body.with_part(_LENGTH.pack(len(data)) + data)


def messages_in(body: bytes) -> list[bytes]:
    """Take a body apart; raises ``ValueError`` where the lengths do not fit."""
    found, position = [], 0
    while position < len(body):
        if position + _LENGTH.size > len(body):
            raise ValueError("a length is cut")
        (length,) = _LENGTH.unpack_from(body, position)
        position += _LENGTH.size
        if position + length > len(body):
            raise ValueError("a message is cut")
        found.append(body[position : position + length])
        position += length
    return found


def layout_to_plain(layout: ModelLayout) -> dict[str, object]:
    """Return a layout as plain values, for a manifest."""
    return dict(MessageToDict(layout_to_message(layout)))


@dataclass(slots=True)
class Live:
    """A worker that held a lease at some moment of the past."""

    identity: Identity
    index_codecs: frozenset[int]
    clock: int
    """See :class:`psservice.cluster.leases.Member`."""


class History:
    """A shard at one moment of its past.

    Args:
        past: the directory; its snapshot is there.
        device: where the parameters are to live.
        settings: what the shard keeps after :meth:`settle`; until then it is what the records were made with.

    Raises:
        StorageError: the snapshot does not make sense.

    Attributes:
        layout: of the model.
        model: at the version reached so far.
        buffers: likewise; ``None`` where the shard keeps none.
        run_id, run_state, samples: of the run.
        pushes: what is remembered of each incarnation.
        last_pushes: by worker name.
        workers: who holds a lease, by name.
        datasets: whose samples are whose.
        replayed: records done again.
    """

    def __init__(self, past: RecoverySource, device: torch.device, settings: ShardSettings) -> None:
        """Begin at the snapshot."""
        assert past.snapshot is not None
        self._past = past
        self.snapshot: Snapshot = past.snapshot
        manifest = self.manifest
        self.layout = _layout_of(self.snapshot)
        self.span = Span(manifest.start, manifest.start + manifest.length)
        tensors = past.tensors
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
        values = {name.removeprefix(BUFFER_PREFIX): t for name, t in tensors.items() if name.startswith(BUFFER_PREFIX)}
        self.buffers = (
            BufferAverage(self.layout.buffers, [values[spec.name] for spec in self.layout.buffers])
            if values and {*values} == {spec.name for spec in self.layout.buffers}
            else None
        )
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

    @property
    def manifest(self) -> Manifest:
        """The snapshot's."""
        return self.snapshot.manifest

    def replay(self, to_version: int | None = None) -> Iterator[int]:
        """Do the records again, one by one, and yield the version after each.

        Args:
            to_version: the last one; ``None`` for all that there is.

        Raises:
            DamagedError: a record makes no sense behind the ones before it.
            StorageError: the version is not covered.
        """
        if to_version is None or to_version > self.model.version:
            for record in self._past.records():
                try:
                    self._do(record)
                except (Rejected, ValueError, DecodeError, KeyError, IndexError) as error:
                    raise DamagedError(
                        self.snapshot.path, record.offset, f"a record cannot be done: {error}"
                    ) from error
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

    def versions_dropped(self) -> int:
        """Return how many versions are given up behind damage, as far as their records can be read."""
        made_by = PUSHED if self.model.round is None else ROUND
        return sum(record.kind == made_by for record in self._past.dropped())

    def settle(self) -> bool:
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

    def remember_supports(self) -> None:
        """Let the ledger reach back before the snapshot, as far as the journal is kept: diffs stay sparse.

        Segments are read newest first and only while the ledger has room for what they hold, so this takes no more
        memory than the ledger and one push.
        """
        if not self.model.versions_are_pushes:
            return
        ledger, version = self.model.changelog, self.manifest.version
        for records in self._past.earlier():
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
        """Return what the pushes of a segment changed, as many of the last ones as there is room for.

        Args:
            records: of the segment.
            version: of its last push.
            room: entries.

        Returns:
            Of versions that follow one another and end in ``version``; none where the segment holds no push.
            ``None`` where those cannot be read.
        """
        newest = ChangeLog(self.span.length, room)
        last: tuple[int, ChangedIndices] | None = None
        try:
            for record in records:
                if record.kind != PUSHED:
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

    def _push_in(self, record: Record) -> tuple[pb.PushHeader, list[Segment], pb.PushSparseResponse]:
        *requests, answer = messages_in(record.body)
        header, _, segments = read_all(
            read_push(lambda opened: PushReader.of(opened, self.span)), map(pb.PushSparseRequest.FromString, requests)
        )
        segments.sort(key=lambda segment: segment.span.start)
        return header, segments, pb.PushSparseResponse.FromString(answer)

    def _do(self, record: Record) -> None:
        if record.kind == PUSHED:
            self._do_push(record)
        elif record.kind == AVERAGED:
            self._do_buffers(record)
        elif record.kind == JOINED:
            request = pb.JoinRequest.FromString(messages_in(record.body)[0])
            identity = identity_from_message(request.identity)
            others = (live.clock for name, live in self.workers.items() if name != identity.worker_id)
            self.workers[identity.worker_id] = Live(identity, frozenset(request.index_codecs), first_clock(others))
        elif record.kind == LEFT:
            identity = identity_from_message(pb.LeaveRequest.FromString(messages_in(record.body)[0]).identity)
            known = self.workers.get(identity.worker_id)
            if known is not None and known.identity == identity:
                del self.workers[identity.worker_id]
        elif record.kind == FINISHED:
            self.run_state = RunState.FINISHED
            self.model.finish()
        elif record.kind == ROUND:
            self._do_round(record)
        elif record.kind == GROUPS:
            if not isinstance(self.model, GroupedShard):
                raise ValueError("the shard has no groups")
            self.model.decide(Decision.from_bytes(record.body))
        elif record.kind == LEASED:
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


def at_version(directory: Path, version: int, device: torch.device, settings: ShardSettings) -> History:
    """Bring a shard back as it was at a version, in its newest history that had it.

    Raises:
        StorageError: no snapshot and journal that are kept cover it.
    """
    for past in pasts(directory, lambda manifest: manifest.version <= version):
        history = History(past, device, settings)
        try:
            for _ in history.replay(version):
                pass
        except StorageError as error:
            log.info("not from here", extra={"snapshot": str(history.snapshot.path), "error": str(error)})
            continue
        history.settle()
        return history
    raise StorageError(f"version {version} is not covered by what {directory} keeps: {_covered(directory)}")


def newest(directory: Path, device: torch.device, settings: ShardSettings) -> History:
    """Bring a shard back to its last version; raises :class:`StorageError` where nothing is kept or it is damaged."""
    past = RecoverySource(directory)
    if past.snapshot is None:
        raise StorageError(f"{directory} holds no model yet")
    history = History(past, device, settings)
    for _ in history.replay():
        pass
    return history


def at_checkpoint(directory: Path, checkpoint: str, device: torch.device, settings: ShardSettings) -> History:
    """Bring a shard back as it was in a checkpoint; raises :class:`StorageError` where it is not kept."""
    for past in pasts(directory, lambda manifest: manifest.checkpoint == checkpoint):
        history = History(past, device, settings)
        history.settle()
        return history
    raise StorageError(f"{directory} has no whole snapshot of checkpoint {checkpoint!r}: {_covered(directory)}")


def _covered(directory: Path) -> str:
    kept = [
        f"{snapshot.manifest.version}" + (f" ({snapshot.manifest.checkpoint})" if snapshot.manifest.checkpoint else "")
        for snapshot in found(directory / "snapshots")
    ]
    return "there are snapshots of version " + ", ".join(kept) if kept else "there are no snapshots"


def on_device(update: Segment | None, device: torch.device) -> Segment | None:
    """Move an update to where the parameters are."""
    if update is None or device.type == "cpu":
        return update
    offsets = None if update.offsets is None else update.offsets.to(device)
    return Segment(update.span, offsets, update.values.to(device))


def _layout_of(snapshot: Snapshot) -> ModelLayout:
    path: Path = snapshot.path
    try:
        return kept_layout_from_message(ParseDict(snapshot.manifest.layout, pb.ModelLayout()))
    except (ParseError, Rejected) as error:
        raise StorageError(f"{path}: the layout in the manifest is malformed: {error}") from error
