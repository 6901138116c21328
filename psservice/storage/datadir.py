"""One shard's data directory: its lock, its snapshots, its journal, and how to begin from them again.

    DIR/shard-0-of-2/lock                          how far the rest was acknowledged
                     snapshots/000000000007-v120/   manifest.json, state.safetensors
                     journal/000000000007.journal   what came behind it

A snapshot names the first segment behind it. The last snapshots are kept, and the journal as far back as the oldest of
them, so that any version since then can be had again.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from psservice.storage import lock_file, snapshots
from psservice.storage.files import StorageError, remove_directory
from psservice.storage.journal import FsyncMode, Journal
from psservice.storage.journal_format import Body
from psservice.storage.lock_file import LockFile, Watermark
from psservice.storage.recovery_source import RecoverMode, RecoverySource
from psservice.storage.snapshots import Manifest, Snapshot

log = logging.getLogger(__name__)


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


def require_same_number(data_dir: Path, shard_index: int, num_shards: int) -> None:
    """Refuse to begin with nothing beside what a run with another number of shards keeps.

    Raises:
        StorageError: a shard of such a run is there, and nothing of this one.
    """
    if snapshots.last_number(shard_directory(data_dir, shard_index, num_shards) / "snapshots"):
        return
    for other in sorted(data_dir.glob("shard-*-of-*")):
        number = other.name.rpartition("-")[2]
        if number != str(num_shards) and snapshots.last_number(other / "snapshots"):
            raise StorageError(
                f"{other} holds a model of a run with --num-shards {number}, and this server was started with "
                f"{num_shards}. Start it with --num-shards {number} to go on with that run, or with a --data-dir of "
                "its own, and --init DIR to begin from that model"
            )


class Store:
    """The directory of a running shard.

    Args:
        settings: see :class:`StoreSettings`.
        on_health: told whether records can be written.

    Raises:
        StorageError: another server has the directory, or it cannot be written.
    """

    def __init__(self, settings: StoreSettings, on_health: Callable[[bool], None]) -> None:
        """Take the directory, and remove the snapshots that a dead writer had not finished."""
        self.settings = settings
        self.directory = settings.directory
        self._on_health = on_health
        self._lock_file = LockFile(self.directory)
        self._journal: Journal | None = None
        self._number = 0
        self._boot_id = lock_file.boot_id()  # now: later there may be no descriptor to read it with
        self._writing = threading.Lock()
        try:
            for name in ("snapshots", "journal"):
                (self.directory / name).mkdir(exist_ok=True)
        except OSError as error:
            self._lock_file.close()
            raise StorageError(f"cannot write to {self.directory} (--data-dir): {error.strerror}") from error
        snapshots.remove_unfinished(self.directory / "snapshots")

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

    def past(self, mode: RecoverMode) -> RecoverySource:
        """Open what the directory holds; :meth:`begin` comes after it is read."""
        return RecoverySource(self.directory, mode=mode, mend=True)

    def begin(self, number: int, *, is_true: bool) -> None:
        """Begin to append, in a segment of this number.

        Args:
            number: of the segment.
            is_true: whether what is on the disk is what will be served; else the next snapshot makes it so.

        Raises:
            StorageError: it cannot be written.
        """
        self._number = number
        # Not without it: a power cut would be judged by the promise of the life before.
        begun = replace(self._lock_file.watermark or Watermark(), boot_id="", fsync="")
        if self.settings.journal:
            begun = replace(begun, segment=number, appended=0, durable=0)
            if is_true:
                begun = replace(begun, boot_id=self._boot_id, fsync=self.settings.fsync)
        try:
            self._lock_file.begin(begun)
            if self.settings.journal:
                self._journal = Journal(
                    self.directory / "journal",
                    number,
                    self.settings.fsync,
                    self.settings.fsync_interval_seconds,
                    self._on_health,
                    self._reached,
                )
        except OSError as error:
            raise StorageError(f"cannot write to {self.directory}: {error.strerror}") from error

    def append(self, kind: int, body: Body) -> None:
        """Append one record, where there is a journal. See :meth:`Journal.append`."""
        if self._journal is not None:
            self._journal.append(kind, body)

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
                self._note(snapshot)
            except OSError as error:
                raise StorageError(f"cannot write a snapshot to {directory}: {error.strerror or error}") from error
            self._remove_old(directory)
        return snapshot

    def snapshots(self) -> list[Snapshot]:
        """Return the snapshots that can be read, oldest first."""
        return snapshots.found(self.directory / "snapshots")

    def remove(self, snapshot: Snapshot) -> None:
        """Remove a snapshot; raises :class:`StorageError`."""
        try:
            remove_directory(snapshot.path)
        except OSError as error:
            raise StorageError(f"cannot remove {snapshot.path}: {error.strerror or error}") from error

    def close(self) -> None:
        """Close the journal and let the directory go."""
        if self._journal is not None:
            self._journal.close()
        self._lock_file.close()

    def _note(self, snapshot: Snapshot) -> None:
        """Note a snapshot in the lock; where that fails, the snapshot goes again. Raises ``OSError``."""
        manifest = snapshot.manifest
        # From now on the disk says what is served.
        served = {"boot_id": self._boot_id, "fsync": self.settings.fsync} if self.settings.journal else {}
        try:
            self._lock_file.note(snapshot=manifest.segment, generation=manifest.generation, **served)
        except OSError:
            remove_directory(snapshot.path)
            raise

    def _remove_old(self, directory: Path) -> None:
        """Remove what is behind the oldest snapshot kept; what cannot be removed now stays until the next snapshot.

        The newest is on the disk already, so its caller must not be told that it could not be written.
        """
        try:
            kept = snapshots.prune(directory, self.settings.keep)
            if self._journal is not None and kept:
                self._journal.cut_before(min(each.manifest.segment for each in kept))
        except OSError as error:
            log.warning("old snapshots stay", extra={"path": str(directory), "error": str(error)})

    def _reached(self, number: int, appended: int, durable: int) -> None:
        self._lock_file.note(segment=number, appended=appended, durable=durable)
