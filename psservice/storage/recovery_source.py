"""The past in a shard's data directory: a snapshot, the records behind, and whether anything is missing."""

import logging
from collections.abc import Iterator
from pathlib import Path

from psservice.storage import snapshots
from psservice.storage.files import DISK, Files, StorageError
from psservice.storage.journal import Position, SegmentReader, segment_numbers, segment_path
from psservice.storage.journal_format import HEAD_BYTES, DamagedError, Record
from psservice.storage.lock_file import LOCK_NAME, STANDBY, Watermark, is_copy, read_watermark
from psservice.storage.snapshots import Snapshot

log = logging.getLogger(__name__)


class RecordError(StorageError):
    """A record was read whole, and cannot be applied; ``place`` is its file and offset."""

    def __init__(self, path: Path, record: Record, error: Exception) -> None:
        self.place = path, record.offset
        self.damage = f"the record at byte {record.offset} of {path} cannot be applied: {error!r}"
        super().__init__(
            f"{self.damage}; nothing on the disk was changed. Mend the cause (is memory short?) and start again, or "
            "start with --recover last-good to go back to the version before it"
        )


class RecoverySource:
    """A snapshot, and the records behind it; raises :class:`StorageError` if the snapshot is damaged.

    Args:
        kept: all snapshots of the shard's directory that can be read.
        watermark: the position in the journal that was acknowledged: less is an error. An empty one checks nothing.
        strict: whether damage is an error; else reading ends there (``--recover last-good``).
        repair: whether a torn tail is cut off its file; a reader beside a running server must not.
        is_copy: whether the directory is a copy of the one that the watermark speaks of.
        unfit: a record that could not be applied: it counts as damage.

    Attributes:
        tensors: the snapshot's.
        until: first segment of the next generation: its records do not belong to this snapshot. ``None`` for none.
        is_of_standby: whether a standby has kept the directory: another server may have acknowledged more.
        lost: whether something may be gone that was acknowledged: by damage, or in a torn tail that the death of the
            machine has left.
    """

    def __init__(
        self,
        directory: Path,
        files: Files,
        kept: list[Snapshot],
        snapshot: Snapshot,
        watermark: Watermark,
        *,
        strict: bool = True,
        repair: bool = False,
        is_copy: bool = False,
        unfit: RecordError | None = None,
    ) -> None:
        self.is_copy, self._unfit = is_copy, unfit
        self._files, self._journal = files, directory / "journal"
        self.snapshot, self.tensors = snapshot, snapshot.read()
        self._watermark, self._strict, self._repair = watermark, strict, repair
        self.lost = False
        self.is_of_standby = watermark.fsync == STANDBY
        self._same_boot = bool(watermark.boot_id) and watermark.boot_id == files.boot_id()
        # The snapshot was the last act of a server that was told to stop: it has acknowledged nothing behind.
        self._was_stopped = watermark.clean and watermark.snapshot == snapshot.manifest.segment
        self._bytes_required = watermark.appended if self._same_boot else watermark.durable  # of the newest segment
        # A copy that was made while the server ran may have the lock of a later moment than the journal. One that was
        # made of a stopped server's directory must be whole.
        self._is_hot_copy = is_copy and not watermark.clean
        self._reading: SegmentReader | None = None
        self._number = snapshot.manifest.segment  # of the segment that is read
        self._damaged: SegmentReader | None = None
        numbers = [(each.manifest.segment, each.manifest.generation) for each in kept]
        numbers.append((watermark.snapshot, watermark.generation))
        ours = snapshot.manifest
        later = (number for number, generation in numbers if number > ours.segment and generation != ours.generation)
        self.until = min(later, default=None)

    def sync(self) -> None:
        """Force the segments behind the snapshot to the disk: the life that wrote them may have died before it did."""
        try:
            for number in self._segments():
                self._files.sync(segment_path(self._journal, number))
        except OSError as error:
            raise StorageError(f"cannot force {self._journal} to the disk: {error.strerror}") from error

    @property
    def is_complete(self) -> bool:
        """Whether every version that a worker ever saw is still there, so that the history goes on."""
        if self.is_of_standby:
            return False
        first, last = self.snapshot.manifest.segment, max(segment_numbers(self._files, self._journal), default=0)
        newest = max(snapshots.newest_number(self._files, self.snapshot.path.parent), self._watermark.snapshot)
        if self.lost or self.is_copy or newest > max(first, last):
            return False
        return self._was_stopped or self._same_boot or self._watermark.fsync == "always"

    def records(self) -> Iterator[Record]:
        """Yield the records behind the snapshot, in order; raises :class:`DamagedError` if strict."""
        there = self._segments()
        is_required = self._bytes_required and self.until is None and not self._is_hot_copy
        must_reach = self._watermark.segment if is_required else 0
        last = max([must_reach, *there])
        for number in range(self.snapshot.manifest.segment, last + 1):
            segment = self._reading = SegmentReader(segment_path(self._journal, number), self._files)
            self._number = number
            try:
                if number not in there:
                    raise DamagedError(segment.path, 0, "this segment is missing")
                for record in segment.records():
                    if self._unfit is not None and self._unfit.place == (segment.path, record.offset):
                        self._give_up(self._unfit)
                        return
                    yield record
                missing = self._bytes_required - segment.valid_bytes
                if number == self._watermark.segment and missing > 0 and self._is_hot_copy:
                    log.warning("the copy ends before the lock", extra={"file": str(segment.path), "bytes": missing})
                elif number == self._watermark.segment and missing > 0:
                    why = f"{segment.torn or 'it ends'}, and {missing} more bytes were acknowledged"
                    raise DamagedError(segment.path, segment.valid_bytes, why)
                if segment.torn is not None and number != last:
                    raise DamagedError(
                        segment.path, segment.valid_bytes, f"{segment.torn}, and another segment follows"
                    )
            except DamagedError as error:
                self._give_up(error)
                return
            if segment.torn is not None:
                self._drop_tail(segment)

    @property
    def end(self) -> Position:
        """Where the journal ends that was read: behind the head of a segment at least, which tells of nothing."""
        valid_bytes = self._reading.valid_bytes if self._reading is not None else 0
        return Position(self._number, max(HEAD_BYTES, valid_bytes))

    def unfit(self, record: Record, error: Exception) -> RecordError:
        """Return what to raise if the record that was read last cannot be applied."""
        assert self._reading is not None
        return RecordError(self._reading.path, record, error)

    def earlier_segments(self) -> Iterator[Iterator[Record]]:
        """Yield the records of each segment before the snapshot, newest segment first; raises ``StorageError``."""
        for number in reversed(segment_numbers(self._files, self._journal)):
            if number < self.snapshot.manifest.segment:
                yield SegmentReader(segment_path(self._journal, number), self._files).records()

    def dropped(self) -> Iterator[Record]:
        """Yield the records behind the damage, as far as they can be read."""
        if self._damaged is not None:
            yield from self._damaged.salvage()
        for number in segment_numbers(self._files, self._journal):
            path = segment_path(self._journal, number)
            if (self._damaged is not None and path > self._damaged.path) or (self.until or number + 1) <= number:
                yield from SegmentReader(path, self._files).salvage()

    def tolerate(self, damage: str, error: StorageError) -> None:
        """Raise the error of some damage if strict; else log the damage."""
        if self._strict:
            raise error
        log.error("what is behind the damage is given up, as asked for", extra={"damage": damage})
        self.lost = True

    def _give_up(self, error: DamagedError | RecordError) -> None:
        self.tolerate(error.damage, error)
        self._damaged = self._reading

    def _segments(self) -> list[int]:
        """Return the segments behind the snapshot that belong to the snapshot's generation."""
        first, numbers = self.snapshot.manifest.segment, segment_numbers(self._files, self._journal)
        return [number for number in numbers if first <= number and (self.until is None or number < self.until)]

    def _drop_tail(self, segment: SegmentReader) -> None:
        """Drop the bytes behind the last whole record; a file without a whole head is removed."""
        where = {"file": str(segment.path), "offset": segment.valid_bytes, "why": segment.torn}
        if self._is_hot_copy:
            log.warning("the copy ends inside a record, which is dropped", extra=where)
        elif self._same_boot or self._was_stopped:
            log.warning("the journal ends in a record that was never acknowledged; it is dropped", extra=where)
        else:
            log.error(
                "the machine has died, and the journal ends in a record that does not check: it is dropped, nobody "
                "knows whether it or any behind it was acknowledged, and a new history begins",
                extra=where,
            )
            self.lost = True
        if self._repair and segment.valid_bytes:
            self._files.cut(segment.path, segment.valid_bytes)
            self._files.sync(segment.path)
        elif self._repair:
            self._files.remove(segment.path)
            self._files.sync(segment.path.parent)


def newest_source(
    directory: Path,
    files: Files = DISK,
    *,
    strict: bool = True,
    repair: bool = False,
    unfit: RecordError | None = None,
) -> RecoverySource | None:
    """Open the newest snapshot that is whole; return ``None`` if nothing was ever kept.

    Raises :class:`StorageError` if there were snapshots and none is whole; if strict, also if the lock is gone,
    or a damaged snapshot began another generation.
    """
    watermark = read_watermark(directory, files)  # first: while a server runs, the files only ever have more than that
    copied = watermark is not None and is_copy(directory, files, watermark)
    where = directory / "snapshots"
    kept = snapshots.readable(files, where)
    for snapshot in reversed(kept):
        try:
            source = RecoverySource(
                directory,
                files,
                kept,
                snapshot,
                watermark or Watermark(),
                strict=strict,
                repair=repair,
                is_copy=copied,
                unfit=unfit,
            )
            break
        except StorageError as error:
            log.error("snapshot is damaged, the one before it is tried", extra={"error": str(error)})
    else:
        was_there = snapshots.newest_number(files, where) or (watermark and watermark.snapshot)
        if was_there or (watermark is None and segment_numbers(files, directory / "journal")):
            raise StorageError(
                f"no snapshot in {where} can be read; restore one from a copy, or begin anew in an empty --data-dir"
            )
        return None
    if watermark is None:
        damage = f"{directory / LOCK_NAME} is missing or damaged"
        advice = (
            "so it is not known whether another server has the directory, and whether all that it acknowledged is "
            "there. Make sure that no server uses it, and restore the file from a copy, or start with --recover "
            "last-good to begin a new history"
        )
        source.tolerate(damage, StorageError(f"{damage}, {advice}"))
    if source.until is not None:
        damage = f"snapshot {source.until:012d} in {where} is missing or damaged"
        advice = (
            "and the model began anew with it. Restore it from a copy, or start with --recover last-good to go back "
            "to the one before"
        )
        source.tolerate(damage, StorageError(f"{damage}, {advice}"))
    return source
