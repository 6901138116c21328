"""A shard at a version of its past: a snapshot, and the records behind it, applied one by one."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import torch
from google.protobuf.message import DecodeError

from pscore.wire.errors import Rejected
from psservice.durability.capture import model_from, restore
from psservice.feed.staged_shard import StagedShard
from psservice.model.changelog import Change
from psservice.model.parameters import ModelShard, on_device
from psservice.rules.changed import changed_by
from psservice.settings import ShardSettings
from psservice.state.records import KINDS, PUBLISHED, PUSHED, RELAYED, ROUND_CLOSED, read_record, read_update
from psservice.state.run import Run
from psservice.state.state import ShardState
from psservice.state.v1 import journal_pb2 as rec
from psservice.storage.files import StorageError
from psservice.storage.formats import OtherReleaseError
from psservice.storage.journal_format import Record as JournalRecord
from psservice.storage.recovery_source import RecoverySource

log = logging.getLogger(__name__)


class Past:
    """A shard's state at one version of its past.

    ``settings`` serve from :meth:`apply_settings` on; until then, those with which the records were made. ``clock``
    counts the seconds of the model's rounds, and ``state`` is that of a shard without a model. Raises
    :class:`StorageError` if the snapshot does not make sense.
    """

    def __init__(
        self,
        source: RecoverySource,
        device: torch.device,
        settings: ShardSettings,
        clock: Callable[[], float] = time.monotonic,
        state: ShardState | None = None,
    ) -> None:
        self._source, self._device, self._settings, self._clock = source, device, settings, clock
        self.snapshot = source.snapshot
        self.state = state or ShardState(Run("", coordinator=False), clock)
        restore(self.state, source.snapshot, source.tensors, device, settings, clock)
        self.replayed = 0

    @property
    def model(self) -> ModelShard:
        """The shard's part of the model."""
        assert self.state.model is not None
        return self.state.model

    def replay(self, to_version: int | None = None) -> Iterator[int]:
        """Replay the records one by one, and yield the version after each.

        Raises :class:`StorageError` if the version is not covered, and :class:`RecordError` if a record cannot be
        applied: the model may then have half of it.
        """
        before, behind = self.model.version, None
        if to_version is None or to_version > self.model.version:
            for record in self._source.records():
                try:
                    self.apply(record)
                except OtherReleaseError:
                    raise
                except Exception as error:  # torch's want of memory is a RuntimeError; and whatever fails each time
                    raise self._source.unfit(record, error) from error
                self.replayed += 1
                yield self.model.version
                if to_version is None:
                    continue
                if self.model.version == to_version:
                    return
                if self.model.version < to_version:
                    before = self.model.version
                elif behind is None:
                    behind = self.model.version
        if to_version is not None and self.model.version != to_version:
            first = self.snapshot.manifest.version
            there = f"there are {first} to {before}" if behind is None else f"version {before} is followed by {behind}"
            raise StorageError(f"version {to_version} is not covered: {there}")

    def replay_to(self, version: int | None) -> None:
        """Replay up to a version, or everything; see :meth:`replay`."""
        for _ in self.replay(version):
            pass

    def replay_to_publication(self, publication: str) -> None:
        """Replay up to a publication of a feed or a relay; raises :class:`StorageError` if it is not covered."""
        for _ in chain([0], self.replay()):
            if isinstance(self.model, StagedShard) and self.model.bring_to(publication):
                return
        raise StorageError(f"publication {publication} is not covered")

    def versions_dropped(self) -> int:
        """Count the versions behind the damage, as far as their records can be read."""
        mode = self.model.mode
        is_published = mode.is_feed or mode.is_relayed
        made_by = PUBLISHED if is_published else PUSHED if mode.rounds is None else ROUND_CLOSED
        return sum(record.kind == made_by for record in self._source.dropped())

    def apply_settings(self) -> bool:
        """Use the settings from now on; return whether they are new, so that a snapshot has to follow."""
        old = self.model
        wanted = model_from(self.snapshot.manifest, old.layout, old.theta, self._settings, self._clock)
        if wanted.settings == old.settings:
            return False
        wanted.version = old.version
        wanted.restore(old.export())
        self.state.model = wanted
        return True

    def extend_changelog(self) -> None:
        """Let the change log reach back before the snapshot, as far as the journal is kept: diffs stay sparse.

        Segments are read newest first and only while there is room, so this takes no more memory than the log itself.
        """
        if not self.model.versions_are_records:
            return
        changelog, version = self.model.changelog, self.snapshot.manifest.version
        for records in self._source.earlier_segments():
            if changelog.covered_from != version or not changelog.room:
                return
            try:
                newest, are_all = self._newest_changes(records, version, changelog.room)
            except (StorageError, Rejected, ValueError, DecodeError):
                return
            changelog.reach_back(newest)
            if not are_all:
                return
            version = newest[0].before if newest else version

    def _newest_changes(
        self, records: Iterator[JournalRecord], version: int, room: int
    ) -> tuple[Sequence[Change], bool]:
        """Return the changes of the last versions of a segment, ending in ``version``, within ``room`` entries.

        And whether they are all of it.

        Raises ``ValueError`` if the versions do not follow one another.
        """
        newest, entries, are_all = deque[Change](), 0, True
        last: Change | None = None
        for change in chain(self._changes(records), [Change(version, version + 1, None)]):
            if last is not None and last.version == change.before:
                newest.append(last)
                entries += 0 if last.changed is None else last.changed.numel()
                while entries > room:
                    dropped, are_all = newest.popleft().changed, False
                    entries -= 0 if dropped is None else dropped.numel()
            elif last is not None and last.version != change.version:  # else the push before was refused
                raise ValueError(f"version {change.version} follows version {last.version}")
            last = change
        return newest, are_all

    def _changes(self, journaled: Iterator[JournalRecord]) -> Iterator[Change]:
        """Yield the versions that records were to make, and the indices that each has changed."""
        staged: Change | None = None
        for each in journaled:
            if each.kind not in (PUSHED, RELAYED, PUBLISHED):
                continue
            record, messages = read_record(each.kind, each.body)
            assert isinstance(record, rec.Pushed | rec.Relayed | rec.Published)
            if isinstance(record, rec.Published):
                if staged is None:
                    raise ValueError(f"version {record.version} was staged in an earlier segment")
                if staged.version > staged.before:  # else other shards, or buffers, alone have changed
                    yield staged
                staged = None
                continue
            if record.generation != self.snapshot.manifest.generation:
                raise ValueError(f"version {record.version} is of generation {record.generation}")
            changed = changed_by(read_update(messages, self.model.span, self.model.theta.dtype))
            if isinstance(record, rec.Relayed):
                staged = Change(record.before, record.version, changed)
            else:
                yield Change(record.version - 1, record.version, changed)

    def apply(self, journaled: JournalRecord) -> None:
        """Apply one record; raises :class:`OtherReleaseError`, and whatever a record raises that does not fit."""
        if journaled.kind not in KINDS:
            path = self.snapshot.path.parents[1] / "journal"
            raise OtherReleaseError(path, f"records of kind {journaled.kind}, unknown to this release", is_newer=True)
        record, messages = read_record(journaled.kind, journaled.body)
        if not isinstance(record, rec.Pushed | rec.Relayed):
            self.state.apply(record)
            return
        update = on_device(read_update(messages, self.model.span, self.model.theta.dtype), self._device)
        try:
            self.state.apply(record, update)
        except Rejected as error:  # as it was then: that follows from the state and the push alone
            log.debug("a push that was refused is left out", extra={"version": record.version, "why": str(error)})
