"""One shard's data directory (docs/operate/durability.md has the tree): its lock, its snapshots and its journal.

A snapshot names the first segment behind it. The last snapshots are kept, and the journal as far back as the oldest of
them, so that any version since then can be restored.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from psservice.model.copies import TensorCopy
from psservice.settings import ServerSettings
from psservice.storage import snapshots
from psservice.storage.environment import Environment
from psservice.storage.files import Files, StorageError, discard
from psservice.storage.journal import Journal, Position, segment_numbers
from psservice.storage.lock_file import LOCK_NAME, LockFile, Watermark
from psservice.storage.manifest import Manifest
from psservice.storage.parts import HeldPart, JournalPart, SnapshotPart, part_behind
from psservice.storage.recovery_source import RecordError, RecoverySource, newest_source
from psservice.storage.replica import AHEAD_NAME, PROMOTED_NAME
from psservice.storage.snapshots import Snapshot

log = logging.getLogger(__name__)

IMPORT_NAME = ".import"
"""Of the folder beside the shards' in which `psservice checkpoint import` works."""


class DataDir:
    """The directory of a running shard; not thread-safe.

    Raises :class:`StorageError` if another server has the directory, or the directory cannot be written, or lies
    beside that of another number of shards.
    """

    def __init__(self, settings: ServerSettings, environment: Environment, on_health: Callable[[], None]) -> None:
        assert settings.data_dir is not None
        self._settings, self._environment, self._on_health = settings, environment, on_health
        self.files = environment.files
        if IMPORT_NAME in self.files.list(settings.data_dir):
            raise StorageError(
                f"a backup is being imported into {settings.data_dir}, or its import broke off: wait for `psservice "
                "checkpoint import`, or run it again"
            )
        self.path = settings.data_dir / f"shard-{settings.shard_index}-of-{settings.num_shards}"
        self._snapshots, self._journals = self.path / "snapshots", self.path / "journal"
        if settings.init is None and not snapshots.newest_number(self.files, self._snapshots):
            require_same_number(self.files, settings.data_dir, str(settings.num_shards))
        self._journal: Journal | None = None
        self._lock_file = LockFile(self.path, self.files)
        self._number = 0
        # Now: later there may be no descriptor to read the boot id with.
        promise = {"boot_id": self.files.boot_id(), "fsync": settings.fsync}
        self._promise: dict[str, Any] = promise if settings.durability == "journal" else {}
        try:
            for directory in (self._snapshots, self._journals):
                self.files.make_directory(directory)
        except OSError as error:
            self._lock_file.close()
            raise StorageError(f"cannot write to {self.path} (--data-dir): {error.strerror}") from error
        snapshots.remove_unfinished(self.files, self._snapshots)

    def source(self, unfit: RecordError | None = None) -> RecoverySource | None:
        """Open the newest snapshot and its journal, to be read before :meth:`begin`; ``None`` in an empty directory.

        ``unfit`` is a record that could not be applied.
        """
        strict = self._settings.recover == "strict"
        return newest_source(self.path, self.files, strict=strict, repair=True, unfit=unfit)

    def foreign(self) -> list[Path]:
        """Return what is in the directory and is neither a server's nor the file system's."""
        known = (LOCK_NAME, PROMOTED_NAME, AHEAD_NAME, self._snapshots.name, self._journals.name, "lost+found")
        names = self.files.list(self.path)
        return [self.path / name for name in names if name not in known and not name.startswith(".")]

    def begin(self, *, is_served: bool) -> Journal | None:
        """Begin to append, in a new segment of the journal, if one is kept; raises :class:`StorageError`.

        ``is_served``: whether the shard serves what is on the disk; else the next snapshot makes that so.
        """
        before = self._lock_file.watermark or Watermark()
        newest_segment = max(segment_numbers(self.files, self._journals), default=0)
        # The next one, since a gap is damage, and not before any snapshot that was ever written.
        self._number = max(newest_segment + 1, snapshots.newest_number(self.files, self._snapshots), before.snapshot)
        # Without a promise if not served: a power cut would be judged by that of the life before.
        begun = replace(before, boot_id="", fsync="", clean=False)
        if is_served:
            begun = replace(begun, **self._promise)
        if self._promise:
            begun = replace(begun, segment=self._number, appended=0, durable=0)
        try:
            self._lock_file.begin(begun)
            if self._promise:
                self._journal = Journal(
                    self._environment,
                    self._journals,
                    self._number,
                    self._settings.fsync,
                    self._settings.fsync_interval_seconds,
                    self._on_health,
                    self._lock_file,
                )
        except OSError as error:
            raise StorageError(f"cannot write to {self.path}: {error.strerror}") from error
        return self._journal

    def rotate(self) -> int:
        """Begin another segment, for a snapshot of this version; return its number. Raises :class:`StorageError`."""
        self._number = self._number + 1 if self._journal is None else self._journal.rotate()
        return self._number

    def prepare(self, manifest: Manifest, tensors: Mapping[str, TensorCopy]) -> Manifest:
        """Write a snapshot that no start finds before :meth:`commit`; return its sealed manifest.

        Raises :class:`StorageError`.
        """
        try:
            return snapshots.prepare(self.files, self._snapshots, manifest, tensors)
        except OSError as error:
            raise self._unwritten(error) from error

    def abandon(self, manifest: Manifest) -> None:
        """Remove a prepared snapshot."""
        snapshots.abandon(self.files, self._snapshots, manifest)

    def commit(self, manifest: Manifest, *, clean: bool, needed_from: int | None = None) -> Snapshot:
        """Give a prepared snapshot its name; then remove old ones, and the journal before the oldest.

        ``clean``: the last act of a server that was told to stop. ``needed_from``: the first segment that somebody else
        still reads. Raises :class:`StorageError`.
        """
        try:
            snapshot = snapshots.commit(self.files, self._snapshots, manifest)
            try:  # from now on the shard serves what is on the disk
                changes = {"snapshot": manifest.segment, "generation": manifest.generation, "clean": clean}
                self._lock_file.note(**changes, **self._promise)
            except OSError:
                discard(self.files, snapshot.path)
                raise
        except OSError as error:
            raise self._unwritten(error) from error
        try:  # the new one is on the disk already: no failure from here on is its caller's
            kept = snapshots.prune(self.files, self._snapshots, self._settings.keep_snapshots)
            if self._journal is not None and kept:
                first = min(each.manifest.segment for each in kept)
                self._journal.cut_before(first if needed_from is None else min(first, needed_from))
        except OSError as error:
            log.warning("old snapshots stay", extra={"path": str(self._snapshots), "error": str(error)})
        return snapshot

    def _unwritten(self, error: OSError) -> StorageError:
        return StorageError(f"cannot write a snapshot to {self._snapshots}: {error.strerror or error}")

    def may_have(self, manifest: Manifest) -> bool:
        """Tell whether a restart may find a snapshot that could not be written: its name could not be removed again."""
        try:
            return snapshots.name_of(manifest) in self.files.list(self._snapshots)
        except OSError:
            return True

    def part_behind(self, held: HeldPart, newest: Snapshot, end: Position) -> JournalPart | SnapshotPart | None:
        """Return the next part behind a standby's; ``None`` if there is none. Raises ``OSError``."""
        return part_behind(self.files, self._journals, held, newest, end)

    def lost_file(self) -> Path | None:
        """Return a file of the directory whose name stands for nothing, or for another file, by now; else ``None``.

        Nothing is removed from the directory meanwhile by this process.
        """
        lock, segment = self.path / LOCK_NAME, self._journal.path if self._journal is not None else None
        for path in filter(None, (lock, segment)):
            try:
                self.files.place(path)
                if path is lock and self._lock_file.is_replaced():
                    return path
            except FileNotFoundError:
                return path
            except OSError:  # says nothing about the name
                continue
        return None

    def snapshots(self) -> list[Snapshot]:
        """Return the snapshots that can be read, oldest first."""
        return snapshots.readable(self.files, self._snapshots)

    def close(self) -> None:
        """Close the journal and unlock the directory."""
        if self._journal is not None:
            self._journal.close()
        self._lock_file.close()


def require_same_number(files: Files, data_dir: Path, ours: str) -> None:
    """Raise :class:`StorageError` if a run with another number of shards has a directory."""
    for name in files.list(data_dir):
        number = name.rpartition("-of-")[2] if name.startswith("shard-") else ours
        if number != ours and snapshots.newest_number(files, data_dir / name / "snapshots"):
            raise StorageError(
                f"{data_dir / name} holds a model of a run with --num-shards {number}, and this server was started "
                f"with {ours}. Start it with --num-shards {number}, or all on one host with --shards {number}, to go "
                f"on with that run, or with a --data-dir of its own, and --init {data_dir} to begin from that model"
            )
