"""What a shard's data directory holds of the past, and whether all of it is still there."""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import torch

from psservice.storage import lock_file, snapshots
from psservice.storage.files import StorageError, sync_directory, sync_file
from psservice.storage.journal import segment_numbers, segment_path
from psservice.storage.journal_format import DamagedError, Record, Segment
from psservice.storage.lock_file import LOCK_NAME, Watermark, read_watermark
from psservice.storage.snapshots import Manifest, Snapshot

log = logging.getLogger(__name__)

RecoverMode = Literal["strict", "last-good"]


class RecoverySource:
    """What a directory holds of the past: a snapshot to begin from, and the records behind it.

    Args:
        directory: the shard's own.
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
        *,
        mode: RecoverMode = "strict",
        mend: bool = False,
        begin_at: Snapshot | None = None,
    ) -> None:
        """Find and read the snapshot."""
        self._mode, self._mend = mode, mend
        self._journal, self._snapshots = directory / "journal", directory / "snapshots"
        self.snapshot: Snapshot | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self.lost = False
        self._until: int | None = None  # the segment where another generation begins
        self._damaged: Segment | None = None
        # Before the files: while a server runs, they only ever hold more than it says.
        watermark = read_watermark(directory)
        self._watermark = watermark or Watermark()
        self._same_boot = bool(self._watermark.boot_id) and self._watermark.boot_id == lock_file.boot_id()
        found = snapshots.found(directory / "snapshots")
        if begin_at is not None:
            self._watermark = Watermark()  # who asks for a version takes any that is there
            self.tensors, self.snapshot = begin_at.read(), begin_at
            others = [each.manifest for each in found if each.manifest.generation != begin_at.manifest.generation]
            self._until = min(
                (each.segment for each in others if each.segment > begin_at.manifest.segment), default=None
            )
            return
        for snapshot in reversed(found):
            try:
                self.tensors = snapshot.read()
            except StorageError as error:
                log.error("snapshot is damaged, the one before it is tried", extra={"error": str(error)})
                continue
            self.snapshot = snapshot
            break
        had_some = self._newest_snapshot or (watermark is None and self.last_segment)
        if self.snapshot is None and had_some:
            raise StorageError(
                f"no snapshot in {directory / 'snapshots'} can be read; restore one from a copy, or begin anew in an "
                "empty --data-dir"
            )
        if self.snapshot is not None and watermark is None:
            what = f"{directory / LOCK_NAME} is missing or damaged"
            self._forgive(
                what,
                StorageError(
                    f"{what}, so it is not known whether another server has the directory, and whether all that it "
                    "acknowledged is there. Make sure that no server uses it, and restore the file from a copy, or "
                    "start with --recover last-good to begin a new history"
                ),
            )
        newest = max(
            [(self._watermark.snapshot, self._watermark.generation)]
            + [(each.manifest.segment, each.manifest.generation) for each in found]
        )
        if self.snapshot is not None and newest[1] != self.snapshot.manifest.generation:
            self._until = newest[0]
            what = f"snapshot {newest[0]:012d} in {self._snapshots} is missing or damaged"
            self._forgive(
                what,
                StorageError(
                    f"{what}, and the model began anew with it. Restore it from a copy, or start with --recover "
                    "last-good to go back to the one before"
                ),
            )

    def sync(self) -> None:
        """Force the segments behind the snapshot to the disk: the life that wrote them may have died before it did.

        Raises:
            StorageError: that is not possible, so nobody knows what a power cut would leave.
        """
        first = self.snapshot.manifest.segment if self.snapshot is not None else 0
        try:
            for number in segment_numbers(self._journal):
                if number >= first:
                    sync_file(segment_path(self._journal, number))
        except OSError as error:
            raise StorageError(f"cannot force {self._journal} to the disk: {error.strerror}") from error

    @property
    def last_segment(self) -> int:
        """Number of the newest segment; 0 where there is none."""
        return max(segment_numbers(self._journal), default=0)

    @property
    def next_number(self) -> int:
        """The number of the segment to begin: behind all others, and not before any snapshot, readable or not."""
        return max(self.last_segment + 1, self._watermark.segment + 1, self._newest_snapshot)

    @property
    def nothing_was_lost(self) -> bool:
        """Whether every record that a worker ever saw is still there: the machine lived, or fsync did."""
        return self._same_boot or self._watermark.fsync == "always"

    @property
    def _newest_snapshot(self) -> int:
        """The number of the newest snapshot that was ever written, there or not; 0 for none."""
        return max(snapshots.last_number(self._snapshots), self._watermark.snapshot)

    @property
    def reaches_the_newest_snapshot(self) -> bool:
        """Whether the journal goes on to where a newer snapshot than the one begun from was taken, if there is one."""
        assert self.snapshot is not None
        return self._newest_snapshot <= max(self.snapshot.manifest.segment, self.last_segment)

    def records(self) -> Iterator[Record]:
        """Yield what was appended since the snapshot, in order.

        Raises:
            DamagedError: there is damage, in the mode ``strict``.
        """
        if self.snapshot is None:
            return
        first = self.snapshot.manifest.segment
        there = {
            number
            for number in segment_numbers(self._journal)
            if number >= first and (self._until is None or number < self._until)
        }
        must_reach = self._watermark.segment if self._required and self._until is None else 0
        last = max(there | {must_reach})
        for number in range(first, last + 1):
            segment = Segment(segment_path(self._journal, number))
            try:
                if number not in there:
                    raise DamagedError(segment.path, 0, "this segment is missing")
                yield from segment.records()
                self._require_acknowledged(segment, number)
                if segment.torn is not None and number != last:
                    raise DamagedError(segment.path, segment.good, f"{segment.torn}, and another segment follows")
            except DamagedError as error:
                self._forgive(error.what, error)
                self._damaged = segment
                return
            if segment.torn is not None:
                self._drop_tail(segment)

    def earlier(self) -> Iterator[Iterator[Record]]:
        """Yield the segments from before the snapshot, newest first, each as its records; nothing rests on them.

        Reading a segment may raise :class:`StorageError`.
        """
        if self.snapshot is None:
            return
        for number in reversed(segment_numbers(self._journal)):
            if number < self.snapshot.manifest.segment:
                yield Segment(segment_path(self._journal, number)).records()

    @property
    def _required(self) -> int:
        """Bytes that the newest segment must have."""
        return self._watermark.appended if self._same_boot else self._watermark.durable

    def _require_acknowledged(self, segment: Segment, number: int) -> None:
        """Raise :class:`DamagedError` where a segment ends before the last record that was acknowledged."""
        if number == self._watermark.segment and segment.good < self._required:
            missing = self._required - segment.good
            raise DamagedError(
                segment.path, segment.good, f"{segment.torn or 'it ends'}, and {missing} more bytes were acknowledged"
            )

    def _drop_tail(self, segment: Segment) -> None:
        """Take leave of what stands behind the last whole record."""
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
        if self._mend:
            _cut(segment)

    def dropped(self) -> Iterator[Record]:
        """Yield the records that are given up in the mode ``last-good``, as far as they can be read."""
        if self._damaged is not None:
            yield from self._damaged.behind()
        for number in segment_numbers(self._journal):
            path = segment_path(self._journal, number)
            if (self._damaged is not None and path > self._damaged.path) or (self._until or number + 1) <= number:
                yield from Segment(path).behind()

    def _forgive(self, what: str, error: StorageError) -> None:
        if self._mode == "strict":
            raise error
        log.error("what is behind the damage is given up, as asked for", extra={"damage": what})
        self.lost = True


def pasts(directory: Path, wanted: Callable[[Manifest], bool]) -> Iterator[RecoverySource]:
    """Yield what a directory holds behind each snapshot that is wanted and whole, newest first; nothing is changed."""
    for snapshot in reversed(snapshots.found(directory / "snapshots")):
        if wanted(snapshot.manifest):
            try:
                yield RecoverySource(directory, begin_at=snapshot)
            except StorageError as error:
                log.warning("snapshot is damaged", extra={"error": str(error)})


def _cut(segment: Segment) -> None:
    """Cut a torn tail off; a file without a whole head goes, since with another behind it it would look damaged."""
    if segment.good:
        os.truncate(segment.path, segment.good)
        sync_file(segment.path)
    else:
        segment.path.unlink()
        sync_directory(segment.path.parent)
