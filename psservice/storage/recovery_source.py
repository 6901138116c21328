"""What a shard's data directory holds of the past, and whether all of it is still there."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import torch

from psservice.storage import snapshots
from psservice.storage.files import DISK, Files, StorageError
from psservice.storage.journal import segment_numbers, segment_path
from psservice.storage.journal_format import DamagedError, Record, Segment
from psservice.storage.lock_file import LOCK_NAME, Watermark, read_watermark
from psservice.storage.manifest import Manifest
from psservice.storage.snapshots import Snapshot

log = logging.getLogger(__name__)

RecoverMode = Literal["strict", "last-good"]


class RecoverySource:
    """What a directory holds of the past: a snapshot to begin from, and the records behind it.

    Args:
        directory: the shard's own.
        files: where the directory is.
        mode: with ``last-good``, reading ends at damage instead of refusing it.
        mend: whether a torn tail is cut off its file; a reader beside a running server must not.
        begin_at: the snapshot to begin from; ``None`` for the newest that is whole.

    Raises:
        StorageError: there were snapshots, and none is whole; the lock is gone, or what came behind a damaged snapshot
            is not known, in the mode ``strict``.

    Attributes:
        snapshot: where to begin; ``None`` where nothing was ever kept.
        tensors: the snapshot's.
        lost: whether something may be gone that was acknowledged: damage, in the mode ``last-good``, or a torn tail
            that the death of the machine has left.
    """

    def __init__(
        self,
        directory: Path,
        files: Files = DISK,
        *,
        mode: RecoverMode = "strict",
        mend: bool = False,
        begin_at: Snapshot | None = None,
    ) -> None:
        self._files, self._mode, self._mend = files, mode, mend
        self._journal, self._snapshots = directory / "journal", directory / "snapshots"
        self.tensors: dict[str, torch.Tensor] = {}
        self.lost = False
        self._until: int | None = None  # the segment where another generation begins
        self._reading: Segment | None = None
        self._damaged: Segment | None = None
        # Before the files: while a server runs, they only ever hold more than it says.
        watermark = None if begin_at else read_watermark(directory, files)  # any version that is there may be asked for
        self._watermark = watermark or Watermark()
        self._same_boot = bool(self._watermark.boot_id) and self._watermark.boot_id == files.boot_id()
        kept = snapshots.found(files, self._snapshots)
        if begin_at is not None:
            self.snapshot: Snapshot | None = begin_at
            self.tensors, first = begin_at.read(), begin_at.manifest
            later = [each.manifest for each in kept if each.manifest.segment > first.segment]
            self._until = min((each.segment for each in later if each.generation != first.generation), default=None)
            return
        self.snapshot = self._newest_whole(kept)
        if self.snapshot is None:
            if self._newest_snapshot or (watermark is None and self.last_segment):
                raise StorageError(
                    f"no snapshot in {self._snapshots} can be read; restore one from a copy, or begin anew in an "
                    "empty --data-dir"
                )
            return
        if watermark is None:
            what = f"{directory / LOCK_NAME} is missing or damaged"
            self._forgive(
                what,
                StorageError(
                    f"{what}, so it is not known whether another server has the directory, and whether all that it "
                    "acknowledged is there. Make sure that no server uses it, and restore the file from a copy, or "
                    "start with --recover last-good to begin a new history"
                ),
            )
        number, generation = max(
            [(self._watermark.snapshot, self._watermark.generation)]
            + [(each.manifest.segment, each.manifest.generation) for each in kept]
        )
        if generation != self.snapshot.manifest.generation:
            self._until = number
            what = f"snapshot {number:012d} in {self._snapshots} is missing or damaged"
            self._forgive(
                what,
                StorageError(
                    f"{what}, and the model began anew with it. Restore it from a copy, or start with --recover "
                    "last-good to go back to the one before"
                ),
            )

    def _newest_whole(self, kept: list[Snapshot]) -> Snapshot | None:
        for snapshot in reversed(kept):
            try:
                self.tensors = snapshot.read()
            except StorageError as error:
                log.error("snapshot is damaged, the one before it is tried", extra={"error": str(error)})
            else:
                return snapshot
        return None

    def sync(self) -> None:
        """Force the segments behind the snapshot to the disk: the life that wrote them may have died before it did."""
        try:
            for number in self._behind():
                self._files.sync(segment_path(self._journal, number))
        except OSError as error:
            raise StorageError(f"cannot force {self._journal} to the disk: {error.strerror}") from error

    @property
    def last_segment(self) -> int:
        """Number of the newest segment; 0 where there is none."""
        return max(segment_numbers(self._files, self._journal), default=0)

    @property
    def next_number(self) -> int:
        """The number of the segment to begin: the next, since a gap is damage, and not before any snapshot."""
        return max(self.last_segment + 1, self._newest_snapshot)

    @property
    def is_complete(self) -> bool:
        """Whether every version that a worker ever saw is still there, so that the history goes on."""
        assert self.snapshot is not None
        manifest, last = self.snapshot.manifest, self.last_segment
        if self.lost or self._newest_snapshot > max(manifest.segment, last):
            return False
        untouched = self._watermark.clean and self._watermark.snapshot == manifest.segment
        return untouched or self._same_boot or self._watermark.fsync == "always"

    @property
    def _newest_snapshot(self) -> int:
        """The number of the newest snapshot that was ever written, there or not; 0 for none."""
        return max(snapshots.last_number(self._files, self._snapshots), self._watermark.snapshot)

    def _behind(self) -> list[int]:
        """Return the segments behind the snapshot that belong to the snapshot's generation."""
        first = self.snapshot.manifest.segment if self.snapshot is not None else 0
        numbers = segment_numbers(self._files, self._journal)
        return [number for number in numbers if first <= number and (self._until is None or number < self._until)]

    def records(self) -> Iterator[Record]:
        """Yield what was appended since the snapshot, in order; raises :class:`DamagedError` in the mode ``strict``."""
        if self.snapshot is None:
            return
        there = self._behind()
        must_reach = self._watermark.segment if self._bytes_required and self._until is None else 0
        last = max([must_reach, *there])
        for number in range(self.snapshot.manifest.segment, last + 1):
            segment = self._reading = Segment(segment_path(self._journal, number), self._files)
            try:
                if number not in there:
                    raise DamagedError(segment.path, 0, "this segment is missing")
                yield from segment.records()
                missing = self._bytes_required - segment.good
                if number == self._watermark.segment and missing > 0:
                    why = f"{segment.torn or 'it ends'}, and {missing} more bytes were acknowledged"
                    raise DamagedError(segment.path, segment.good, why)
                if segment.torn is not None and number != last:
                    raise DamagedError(segment.path, segment.good, f"{segment.torn}, and another segment follows")
            except DamagedError as error:
                self.give_up(error)
                return
            if segment.torn is not None:
                self._drop_tail(segment)

    def damaged(self, record: Record, why: str) -> DamagedError:
        """Return the error of the record that :meth:`records` has yielded last."""
        assert self._reading is not None
        return DamagedError(self._reading.path, record.offset, why)

    def give_up(self, error: DamagedError) -> None:
        """Give up everything from the record on that was read last; raises the error in the mode ``strict``."""
        self._forgive(error.what, error)
        self._damaged = self._reading

    def earlier(self) -> Iterator[Iterator[Record]]:
        """Yield the segments from before the snapshot, newest first, each as its records (may raise StorageError)."""
        if self.snapshot is None:
            return
        for number in reversed(segment_numbers(self._files, self._journal)):
            if number < self.snapshot.manifest.segment:
                yield Segment(segment_path(self._journal, number), self._files).records()

    @property
    def _bytes_required(self) -> int:
        """Bytes that the newest segment must have."""
        return self._watermark.appended if self._same_boot else self._watermark.durable

    def _drop_tail(self, segment: Segment) -> None:
        """Drop the bytes behind the last whole record; a file without a whole head would look damaged, and goes."""
        where = {"file": str(segment.path), "offset": segment.good, "why": segment.torn}
        if self._same_boot:
            log.warning("the journal ends in a record that was never acknowledged; it is dropped", extra=where)
        else:
            log.error(
                "the machine has died, and the journal ends in a record that does not check: it is dropped, nobody "
                "knows whether it or any behind it was acknowledged, and a new history begins",
                extra=where,
            )
            self.lost = True
        if self._mend and segment.good:
            self._files.cut(segment.path, segment.good)
            self._files.sync(segment.path)
        elif self._mend:
            self._files.remove(segment.path)
            self._files.sync(segment.path.parent)

    def dropped(self) -> Iterator[Record]:
        """Yield the records that are given up in the mode ``last-good``, as far as they can be read."""
        if self._damaged is not None:
            yield from self._damaged.behind()
        for number in segment_numbers(self._files, self._journal):
            path = segment_path(self._journal, number)
            if (self._damaged is not None and path > self._damaged.path) or (self._until or number + 1) <= number:
                yield from Segment(path, self._files).behind()

    def _forgive(self, what: str, error: StorageError) -> None:
        if self._mode == "strict":
            raise error
        log.error("what is behind the damage is given up, as asked for", extra={"damage": what})
        self.lost = True


def sources(directory: Path, files: Files, wanted: Callable[[Manifest], bool]) -> Iterator[RecoverySource]:
    """Yield what a directory holds behind each snapshot that is wanted and whole, newest first; nothing is changed."""
    for snapshot in reversed(snapshots.found(files, directory / "snapshots")):
        if wanted(snapshot.manifest):
            try:
                yield RecoverySource(directory, files, begin_at=snapshot)
            except StorageError as error:
                log.warning("snapshot is damaged", extra={"error": str(error)})
