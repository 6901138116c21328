"""One shard's data directory: its lock, its snapshots, its journal, and how to begin from them again.

    DIR/shard-0-of-2/lock
                     snapshots/000000000007-v120/   manifest.json, state.safetensors
                     journal/000000000007.journal   what came behind it

A snapshot names the first segment behind it. The last snapshots are kept, and the journal as far back as the oldest of
them, so that any version since then can be had again.
"""

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from psservice.durability import snapshots
from psservice.durability.files import StorageError, lock, sync_directory, sync_file
from psservice.durability.journal import FsyncMode, Journal, segment_numbers, segment_path
from psservice.durability.records import Body, DamagedError, Record, Segment
from psservice.durability.snapshots import Manifest, Snapshot

log = logging.getLogger(__name__)

RecoverMode = Literal["strict", "last-good"]

OPENED = 0
"""Kind of the record that every segment begins with: under which promise it was written."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How a data directory is used.

    Attributes:
        directory: the shard's own.
        journal: whether every push is appended, or snapshots alone are kept.
        fsync: when the journal is forced to the disk.
        fsync_interval_seconds: in the interval mode.
        keep: snapshots that are kept.
    """

    directory: Path
    journal: bool
    fsync: FsyncMode
    fsync_interval_seconds: float
    keep: int


def shard_directory(data_dir: Path, shard_index: int, num_shards: int) -> Path:
    """Return a shard's own directory."""
    return data_dir / f"shard-{shard_index}-of-{num_shards}"


class Past:
    """What a directory holds of the past: a snapshot to begin from, and the records behind it.

    Args:
        directory: the shard's own.
        mode: with ``last-good``, reading ends at damage instead of refusing it.
        mend: whether a torn tail is cut off its file; a reader beside a running server must not.
        begin_at: the snapshot to begin from; ``None`` for the newest that is whole.

    Raises:
        StorageError: there are snapshots, and none is whole, or what came behind a damaged one is not known.

    Attributes:
        snapshot: where to begin; ``None`` where nothing was ever kept.
        tensors: the snapshot's.
        lost: whether something that was written could not be read: damage, in the mode ``last-good``.
        last_promise: the body of the last :data:`OPENED` record, as JSON; empty where there is none.
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
        self.last_promise: dict[str, str] = {}
        self._until: int | None = None  # the segment where another generation begins
        found = snapshots.found(directory / "snapshots")
        if begin_at is not None:
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
        if self.snapshot is None and snapshots.last_number(self._snapshots):
            raise StorageError(
                f"no snapshot in {directory / 'snapshots'} can be read; restore one from a copy, or begin anew in an "
                "empty --data-dir"
            )
        if self.snapshot is not None and found[-1].manifest.generation != self.snapshot.manifest.generation:
            newest = found[-1]
            self._until = newest.manifest.segment
            self._forgive(DamagedError(newest.path / snapshots.TENSORS_NAME, 0, "the model began anew with it"))

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
        return max(self.last_segment + 1, snapshots.last_number(self._snapshots))

    @property
    def reaches_the_newest_snapshot(self) -> bool:
        """Whether the journal goes on to where a newer snapshot than the one begun from was taken, if there is one."""
        assert self.snapshot is not None
        newest = snapshots.last_number(self._snapshots)
        return newest <= max(self.snapshot.manifest.segment, self.last_segment)

    def records(self) -> Iterator[Record]:
        """Yield what was appended since the snapshot, in order.

        Raises:
            DamagedError: there is damage, in the mode ``strict``.
        """
        if self.snapshot is None:
            return
        first = self.snapshot.manifest.segment
        numbers = [
            number
            for number in segment_numbers(self._journal)
            if number >= first and (self._until is None or number < self._until)
        ]
        if numbers and numbers[0] != first:
            yield from self._refuse(segment_path(self._journal, first), 0, "this segment is missing")
            return
        for number in numbers:
            segment = Segment(segment_path(self._journal, number))
            try:
                for record in segment.records():
                    if record.kind == OPENED:
                        self.last_promise = _promise(record.body)
                    else:
                        yield record
            except DamagedError as error:
                self._forgive(error)
                return
            if segment.torn is None:
                continue
            if number != numbers[-1]:
                yield from self._refuse(segment.path, segment.good, f"{segment.torn}, and another segment follows")
                return
            log.warning(
                "the journal ends in a record that was never acknowledged; it is dropped",
                extra={"file": str(segment.path), "offset": segment.good, "why": segment.torn},
            )
            if self._mend:
                _cut(segment)

    def earlier(self) -> Iterator[Record]:
        """Yield what is still kept from before the snapshot, as far as it can be read; nothing rests on it."""
        if self.snapshot is None:
            return
        for number in segment_numbers(self._journal):
            if number >= self.snapshot.manifest.segment:
                return
            try:
                yield from Segment(segment_path(self._journal, number)).records()
            except StorageError:
                continue

    def _refuse(self, path: Path, offset: int, why: str) -> Iterator[Record]:
        self._forgive(DamagedError(path, offset, why))
        return iter(())

    def _forgive(self, error: DamagedError) -> None:
        if self._mode == "strict":
            raise error
        log.error("going back to the last good version", extra={"error": str(error)})
        self.lost = True


def pasts(directory: Path, wanted: Callable[[Manifest], bool]) -> Iterator[Past]:
    """Yield what a directory holds behind each snapshot that is wanted and whole, newest first; nothing is changed."""
    for snapshot in reversed(snapshots.found(directory / "snapshots")):
        if wanted(snapshot.manifest):
            try:
                yield Past(directory, begin_at=snapshot)
            except StorageError as error:
                log.warning("snapshot is damaged", extra={"error": str(error)})


class Store:
    """The directory of a running shard.

    Args:
        settings: see :class:`StoreSettings`.
        on_health: told whether records can be written.

    Attributes:
        snapshot_errors: snapshots that could not be written, so far.

    Raises:
        StorageError: another server has the directory, or it cannot be written.
    """

    def __init__(self, settings: StoreSettings, on_health: Callable[[bool], None]) -> None:
        """Take the directory; nothing is read or written yet."""
        self.settings = settings
        self.directory = settings.directory
        self._on_health = on_health
        self._lock_descriptor = lock(self.directory)
        self._journal: Journal | None = None
        self._number = 0
        self._writing = threading.Lock()
        self.snapshot_errors = 0
        try:
            for name in ("snapshots", "journal"):
                (self.directory / name).mkdir(exist_ok=True)
        except OSError as error:
            os.close(self._lock_descriptor)
            raise StorageError(f"cannot write to {self.directory} (--data-dir): {error.strerror}") from error

    @property
    def keeps_journal(self) -> bool:
        """Whether every push is appended."""
        return self.settings.journal

    @property
    def journal_bytes(self) -> int:
        """Bytes appended since the start."""
        return 0 if self._journal is None else self._journal.bytes_written

    @property
    def journal_errors(self) -> int:
        """Failed attempts to write the journal, or to force it to the disk, since the start."""
        return 0 if self._journal is None else self._journal.errors

    @property
    def is_broken(self) -> bool:
        """Whether only a restart helps. See :attr:`Journal.is_broken`."""
        return self._journal is not None and self._journal.is_broken

    def past(self, mode: RecoverMode) -> Past:
        """Open what the directory holds; :meth:`begin` comes after it is read."""
        return Past(self.directory, mode=mode, mend=True)

    def begin(self, number: int) -> None:
        """Begin to append, in a segment of this number.

        Raises:
            StorageError: it cannot be written.
        """
        self._number = number
        if not self.settings.journal:
            return
        try:
            self._journal = Journal(
                self.directory / "journal",
                number,
                self.settings.fsync,
                self.settings.fsync_interval_seconds,
                self._on_health,
            )
        except OSError as error:
            raise StorageError(f"cannot write to {self.directory / 'journal'}: {error.strerror}") from error
        self._promise()
        try:  # in every mode: without it, a power cut would be judged by the promise of the life before
            sync_file(segment_path(self.directory / "journal", number))
            sync_directory(self.directory / "journal")
        except OSError as error:
            raise StorageError(f"cannot force {self.directory / 'journal'} to the disk: {error.strerror}") from error

    def append(self, kind: int, body: Body) -> int:
        """Append one record, where there is a journal; return its number. See :meth:`Journal.append`."""
        return 0 if self._journal is None else self._journal.append(kind, body)

    def take_back(self, number: int) -> None:
        """Undo the last append. See :meth:`Journal.take_back`."""
        if self._journal is not None:
            self._journal.take_back(number)

    def wait(self) -> None:
        """Wait until what was appended is durable. See :meth:`Journal.wait`."""
        if self._journal is not None:
            self._journal.wait()

    def rotate(self) -> int:
        """Begin another segment, for a snapshot of this moment; return its number.

        Raises:
            JournalError: it cannot be begun.
        """
        if self._journal is None:
            self._number += 1
        else:
            self._number = self._journal.rotate()
            self._promise()
        return self._number

    def write(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> Snapshot:
        """Write a snapshot; remove what is behind the oldest one kept.

        Raises:
            StorageError: it could not be written; what was there is untouched.
        """
        directory = self.directory / "snapshots"
        with self._writing:
            try:
                snapshot = snapshots.write(directory, manifest, tensors)
            except OSError as error:
                self.snapshot_errors += 1
                raise StorageError(f"cannot write a snapshot to {directory}: {error.strerror or error}") from error
            kept = snapshots.prune(directory, self.settings.keep)
            if self._journal is not None:
                self._journal.cut_before(min(each.manifest.segment for each in kept))
        return snapshot

    def close(self) -> None:
        """Close the journal and let the directory go."""
        if self._journal is not None:
            self._journal.close()
        os.close(self._lock_descriptor)

    def _promise(self) -> None:
        assert self._journal is not None
        promise = {"boot_id": boot_id(), "fsync": self.settings.fsync}
        self._journal.append(OPENED, Body.of([json.dumps(promise).encode()]))


def boot_id() -> str:
    """Return what changes when the machine is started anew; empty where that is not known."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def nothing_was_lost(promise: Mapping[str, str]) -> bool:
    """Tell whether every record that was ever visible to a worker is still there: the machine lived, or fsync did."""
    return promise.get("fsync") == "always" or bool(promise.get("boot_id") and promise["boot_id"] == boot_id())


def _cut(segment: Segment) -> None:
    """Cut a torn tail off; a file without a whole head goes, since with another behind it it would look damaged."""
    if segment.good:
        os.truncate(segment.path, segment.good)
        sync_file(segment.path)
    else:
        segment.path.unlink()
        sync_directory(segment.path.parent)


def _promise(body: bytes) -> dict[str, str]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}
