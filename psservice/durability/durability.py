"""The durability of a shard: when records and snapshots are written, and how a shard recovers from both.

The order is the promise: a record is appended *before* the push is applied, and an answer leaves when the record is as
durable as the mode promises. A pull waits likewise, so that (with ``--fsync always``) no worker has a version that a
power cut could undo.
"""

import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import BinaryIO, NamedTuple

import torch

from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.generation import sibling_generation
from psservice.awaiting import NotYetError
from psservice.durability.capture import Capture, DurableShard, capture
from psservice.durability.checkpoints import Checkpoints, new_id, place_of
from psservice.durability.earlier_models import replay_to
from psservice.durability.record_log import RecordLog, or_not_durable
from psservice.durability.replay import Past
from psservice.durability.replication import Replication
from psservice.durability.storage_error import or_storage_error
from psservice.model.parameters import ModelShard
from psservice.state.state import ShardState
from psservice.storage.datadir import DataDir
from psservice.storage.files import StorageError, discard
from psservice.storage.journal import Position
from psservice.storage.manifest import Manifest
from psservice.storage.parts import HeldPart, JournalPart, SnapshotPart
from psservice.storage.recovery_source import RecordError, RecoverySource
from psservice.storage.snapshots import Snapshot

log = logging.getLogger(__name__)

_PROGRESS_SECONDS = 5.0
_POLL_SECONDS = 1.0
_LOST = "is no longer there: the data directory was removed or replaced while the server ran"
_PERIODS_ALONE = 3  # after which a shard that hears of no checkpoint takes a snapshot for itself


class Prepared(NamedTuple):
    """Another state that is written down and not served yet; ``manifest`` is that of its snapshot, if one is kept."""

    state: ShardState
    manifest: Manifest | None


class Durability:
    """Writes records and snapshots of a shard to its data directory. Without one, every call does nothing.

    The shard may be under construction: only its settings and its environment are read at first. ``on_health`` is
    called after each change of ``is_healthy``, ``on_snapshot`` after each snapshot, ``on_append`` after each record.

    Attributes:
        snapshot_errors: snapshots that could not be taken, since the start.

    Raises:
        StorageError: see :class:`~psservice.storage.datadir.DataDir`.
    """

    def __init__(
        self,
        shard: DurableShard,
        on_health: Callable[[], None],
        on_snapshot: Callable[[], None] = lambda: None,
        on_append: Callable[[], None] = lambda: None,
    ) -> None:
        self._shard, self._settings, self._environment = shard, shard.settings, shard.environment
        self._dir: DataDir | None = None
        self._is_lost = False  # somebody has removed the directory, or put another in its place
        self._on_health, self._on_snapshot = on_health, on_snapshot
        if self._settings.data_dir is not None and self._settings.durability != "none":
            self._dir = DataDir(self._settings, self._environment, on_health)
        self.replication = Replication(
            self._environment.monotonic,
            is_required=self._settings.replicate == "ack",
            waits=self._environment.is_threaded,
        )
        self.records = RecordLog(self.replication, on_append)
        self.checkpoints = Checkpoints()
        self._snapshotting = threading.Lock()
        self._stop, self._wake = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._tried = self._environment.monotonic()
        self._bytes_behind = 0  # of the journal, where the newest snapshot was begun
        self.last_snapshot: Snapshot | None = None
        self.snapshot_errors = 0

    @property
    def journal_bytes(self) -> int:
        """Bytes appended to the journal since the start."""
        return self.records.journal.bytes_written if self.records.journal else 0

    @property
    def journal_errors(self) -> int:
        """Failed attempts to write the journal, or to force it to the disk, since the start."""
        return self.records.journal.errors if self.records.journal else 0

    @property
    def is_healthy(self) -> bool:
        """Whether pushes are made durable as promised."""
        return not self._is_lost and (self.records.journal is None or self.records.journal.healthy)

    @property
    def is_broken(self) -> bool:
        """Whether nothing can be written any more until the server is started again."""
        return self._is_lost or bool(self.records.journal and self.records.journal.broken)

    @property
    def snapshot_interval_seconds(self) -> float:
        """Longest time between two snapshots of a model that changes; 0 if none are taken."""
        periods = 1 if self._settings.shard_index == 0 else _PERIODS_ALONE
        return 0.0 if self._dir is None else self._settings.snapshot_seconds * periods

    # The life of a shard

    def recover(self) -> None:
        """Bring the new shard to the last state in the directory; raises :class:`StorageError`."""
        if self._dir is not None:
            with or_storage_error(self._dir.path):
                self._recover(self._dir)

    def _recover(self, data_dir: DataDir) -> None:
        started = self._environment.monotonic()
        source = data_dir.source()
        if source is None:
            log.info("the data directory is empty", extra={"path": str(data_dir.path)})
            for path in data_dir.foreign():
                log.warning(
                    "the data directory holds no model, but this, which no server has put there; if it is of a backup, "
                    "stop the server and put the backup's `snapshots` into the data directory itself",
                    extra={"path": str(path)},
                )
            self.records.journal = data_dir.begin(is_served=True)
            return
        source, past = self._replay(data_dir, source)
        manifest = source.snapshot.manifest
        if source.lost:
            dropped = f"at least {past.versions_dropped()}"
            log.error(
                "went back to the last good version",
                extra={"version": past.model.version, "versions_dropped": dropped},
            )
        has_other_settings = past.apply_settings()
        past.extend_changelog()
        if self._settings.fsync != "never":  # the next segment's promise is for what is served from now on, old or new
            source.sync()
        is_relayed = past.state.mode.is_relayed  # whose versions are the source's, and mean the same values for ever
        if source.is_copy and not is_relayed:
            log.warning(
                "the data directory is a copy: a new history begins, and a worker that has seen more pulls all",
                extra={"path": str(data_dir.path), "version": past.model.version},
            )
        if source.is_of_standby:
            log.warning(
                "this server serves from now on in the place of the one that it stood by for: a new history begins, "
                "and a worker that has seen more pulls all",
                extra={"path": str(data_dir.path), "version": past.model.version},
            )
        is_complete = source.is_complete
        new_history = not is_complete and not is_relayed
        if new_history:  # versions that workers have seen may be gone: the same numbers will mean other values
            at = manifest.checkpoint if not past.replayed else ""
            past.state.histories.branch(manifest.generation, past.model.version, at)
            self.replication.part(manifest.generation, source.end)
            past.model.generation = sibling_generation(manifest.generation)
        self._shard.restart(past.state)
        self.records.journal = data_dir.begin(is_served=is_complete)
        self.checkpoints.last = manifest.last_checkpoint
        self._note(source.snapshot)
        log.info(
            "recovered",
            extra={
                "version": past.model.version,
                "snapshot": manifest.version,
                "replayed": past.replayed,
                "seconds": round(self._environment.monotonic() - started, 3),
                "workers": len(past.state.workers),
                "history": "new" if new_history else "the same",
            },
        )
        if not is_complete or has_other_settings or self.records.journal is None:
            self.take()  # the disk must be right if this process is killed

    def _replay(self, data_dir: DataDir, source: RecoverySource) -> tuple[RecoverySource, Past]:
        """Replay everything behind the newest snapshot; raises :class:`StorageError`.

        With ``--recover last-good``, up to the first record that cannot be applied.
        """
        try:
            return source, self._replay_all(source)
        except RecordError as error:
            again = data_dir.source(error) if self._settings.recover == "last-good" else None
            if again is None:
                raise
        return self._replay(data_dir, again)  # anew: half of the record may be in the model

    def _replay_all(self, source: RecoverySource) -> Past:
        self._require_ours(source.snapshot.manifest)
        past = Past(
            source, self._shard.device, self._settings.shard, self._environment.monotonic, self._shard.new_state()
        )
        reported = self._environment.monotonic()
        for version in past.replay():
            if self._environment.monotonic() - reported > _PROGRESS_SECONDS:
                reported = self._environment.monotonic()
                log.info("replaying the journal", extra={"version": version, "records": past.replayed})
        return past

    def _require_ours(self, manifest: Manifest) -> None:
        mine = (self._settings.shard_index, self._settings.num_shards)
        if (manifest.shard_index, manifest.num_shards) != mine:
            raise StorageError(
                f"the data directory is that of shard {manifest.shard_index} of {manifest.num_shards}, "
                f"this is shard {mine[0]} of {mine[1]}"
            )
        if self._settings.run_id and manifest.run_id != self._settings.run_id:
            raise StorageError(
                f"the data directory holds run {manifest.run_id!r}, --run-id asks for {self._settings.run_id!r}; "
                "leave --run-id out to continue, or use another --data-dir"
            )

    def start(self) -> None:
        """Begin to take snapshots every period."""
        if self._dir is not None:
            self._thread = self._environment.start(self._take_snapshots, "snapshots")

    def stop(self) -> None:
        """Stop the periodic snapshots."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def abandon(self) -> None:
        """Close the directory without a snapshot."""
        if self._dir is not None:
            self._dir.close()

    def close(self) -> None:
        """Take the last snapshot, after :meth:`stop` and the end of the apply thread, and close the directory."""
        model = self._shard.state.model
        try:
            if self._dir is not None and model is not None:
                with self._snapshotting:
                    # If nothing has changed since the newest snapshot, this one takes the place of that.
                    unchanged = self.records.journal is not None and self.journal_bytes == self._bytes_behind
                    last = self.last_snapshot if unchanged and self._is_saved(model) else None
                    is_pinned = last is not None and any(
                        each.is_pinned for each in self.snapshots() if each.path == last.path
                    )
                    checkpoint = last.manifest.checkpoint if last and not is_pinned else ""
                    self._write(self._copy(self._shard.state, checkpoint), clean=True)
        except (StorageError, Rejected) as error:
            is_there = self._dir is not None and not self._is_lost and self._dir.lost_file() is None
            rest = "; the journal has everything" if self.records.journal is not None and is_there else ""
            log.error(f"no snapshot at the end{rest}", extra={"error": str(error)})
        self.abandon()

    # What operators ask for

    def take_asked(self, checkpoint: str) -> Snapshot:
        """Take a snapshot that somebody asked for; raises :class:`Rejected` (``BAD_REQUEST``, ``NOT_DURABLE``)."""
        with self._snapshotting, or_not_durable():
            for manifest in (each.manifest for each in self.snapshots()):
                if checkpoint and manifest.checkpoint == checkpoint and manifest.is_named:
                    raise Rejected(
                        ErrorCode.BAD_REQUEST,
                        f"checkpoint {checkpoint!r} is there already, of version {manifest.version}: choose another "
                        f"name, or delete that one with `psservice checkpoint delete {checkpoint}`",
                    )
            return self._take(checkpoint or None)

    def snapshots(self) -> list[Snapshot]:
        """Return the snapshots that can be read, oldest first; ``BAD_REQUEST`` if none are kept."""
        return self._require_dir().snapshots()

    def open(self, checkpoint: str) -> list[tuple[str, int, BinaryIO]]:
        """Open the files of a checkpoint, as :meth:`Snapshot.open` does; raises ``NO_SUCH_CHECKPOINT``."""
        data_dir = self._require_dir()
        with self._snapshotting, or_not_durable():  # nothing is removed meanwhile
            return _find(data_dir.snapshots(), checkpoint).open()

    def pin(self, checkpoint: str) -> Snapshot:
        """Keep a checkpoint until it is deleted; raises ``NO_SUCH_CHECKPOINT`` or ``NOT_DURABLE``."""
        data_dir = self._require_dir()
        with self._snapshotting, or_not_durable():
            found = _find(data_dir.snapshots(), checkpoint)
            if not found.is_kept:
                found.pin()
        return found

    def delete(self, checkpoint: str) -> Snapshot:
        """Remove a checkpoint that an operator has named or pinned.

        Raises ``NO_SUCH_CHECKPOINT`` or ``BAD_REQUEST``.
        """
        data_dir = self._require_dir()
        with self._snapshotting:
            kept = data_dir.snapshots()
            if kept and kept[-1].manifest.checkpoint == checkpoint:
                raise Rejected(
                    ErrorCode.BAD_REQUEST,
                    f"checkpoint {checkpoint!r} is the newest snapshot, from which the server would recover; take "
                    "another with `psservice checkpoint create` first",
                )
            found = _find(kept, checkpoint)
            if not found.is_kept:
                raise Rejected(
                    ErrorCode.BAD_REQUEST,
                    f"nobody has named or pinned checkpoint {checkpoint!r}: it goes by itself with newer ones "
                    "(--keep-snapshots)",
                )
            discard(data_dir.files, found.path)
        log.info("checkpoint deleted", extra={"checkpoint": checkpoint, "path": str(found.path)})
        return found

    def replay_to(self, version: int | None, checkpoint: str, publication: str = "") -> Past:
        """Return the shard as it was at a version (of a publication) or in a checkpoint (``NO_SUCH_CHECKPOINT``)."""
        data_dir = self._require_dir()
        where = (data_dir.path, data_dir.files, self._shard.device, self._settings.shard)
        with self._snapshotting:  # nothing is removed meanwhile
            try:
                return replay_to(*where, version, checkpoint, self._environment.monotonic, publication)
            except StorageError as error:
                raise Rejected(ErrorCode.NO_SUCH_CHECKPOINT, str(error)) from error

    def _require_dir(self) -> DataDir:
        if self._dir is None:
            raise Rejected(ErrorCode.BAD_REQUEST, "this server keeps nothing; start it with --data-dir")
        return self._dir

    # A standby

    def newest_position(self) -> Position:
        """Return the end of the journal, as a standby sees it; the beginning if no journal is kept."""
        return Position() if self.records.journal is None else self.records.journal.position

    def lacks(self, held: HeldPart) -> bool:
        """Tell whether there is something that a standby lacks; waits for nothing."""
        if self.records.journal is None:
            return True  # which its request is told
        end, last = self.records.journal.position, self.last_snapshot
        return last is not None and (held.generation != last.manifest.generation or held.position != end)

    def must_compare(self, held: HeldPart) -> bool:
        """Tell whether only :meth:`next_part` can tell if a part is of this journal: until then it does not count."""
        return self.last_snapshot is not None and not self.replication.is_compared(held)

    def next_part(self, held: HeldPart) -> JournalPart | SnapshotPart | None:
        """Return the next part behind the one that a standby has; ``None`` if there is none yet.

        Raises :class:`Rejected`: ``BAD_REQUEST`` if no journal is kept, ``BUSY`` if files go meanwhile.
        """
        data_dir, journal = self._require_dir(), self.records.journal
        if journal is None:
            raise Rejected(ErrorCode.BAD_REQUEST, "this server keeps no journal, which a standby follows")
        end = journal.position  # first: what is appended to another model comes behind the snapshot of that
        last = self.last_snapshot
        if last is None:
            return None
        try:
            return data_dir.part_behind(held, last, end)
        except OSError as error:  # as of a snapshot that is removed meanwhile
            why = f"what the standby lacks cannot be read: {error.strerror or error}"
            raise Rejected(ErrorCode.BUSY, why, retry_seconds=1.0) from error

    # Checkpoints of all shards

    def announced_checkpoint(self) -> str:
        """Return shard 0's newest checkpoint that nobody has named, in which the other shards take part."""
        last = self.last_snapshot.manifest.checkpoint if self.last_snapshot else ""
        return last if self._shard.is_coordinator and place_of(last) is not None else ""

    def hear_of_checkpoint(self, checkpoint: str) -> None:
        """Take part in a checkpoint that shard 0 has announced; the thread of snapshots does the work."""
        model = self._shard.state.model
        if self._dir is not None and self.checkpoints.hear(model.generation if model else None, checkpoint):
            self._wake.set()

    # Snapshots

    def _take_snapshots(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(min(_POLL_SECONDS, self.snapshot_interval_seconds))
            if not self._stop.is_set():
                self.check_directory()
                self.snapshot_if_due()

    def check_directory(self) -> None:
        """Refuse pushes once the directory was removed or replaced: they would go into files that nobody opens again.

        Another directory in its place, as a backup that was put back, stays as it is.
        """
        if self._dir is None or self._is_lost:
            return
        with self._snapshotting:  # which removes segments
            lost = self._dir.lost_file()
        if lost is None:
            return
        self._is_lost = True
        why = f"{lost} {_LOST}"
        if self.records.journal is None:
            log.error("the data directory is lost; restart the server", extra={"error": why})
        else:
            self.records.journal.give_up(why)  # logs it
        self._on_health()

    def snapshot_if_due(self) -> None:
        """Shard 0 takes a checkpoint every period; the others when one is announced, or long after none was."""
        announced = self._wake.is_set()
        self._wake.clear()
        model, now = self._shard.state.model, self._environment.monotonic()
        long_journal = self.journal_bytes - self._bytes_behind >= self._settings.journal_bytes
        is_due = long_journal or now - self._tried >= self.snapshot_interval_seconds
        if model is None or not (announced or is_due):
            return
        self._tried = now
        try:
            with self._snapshotting:
                wanted = self.checkpoints.wanted  # none, if a call has taken the one that was announced
                if wanted or (is_due and (long_journal or not self._is_saved(model))):
                    self._take(wanted or None)
        except NotYetError:  # the model is being replaced, which may take longer than a look: at the next one
            self._tried = -math.inf
        except torch.AcceleratorError as error:  # a GPU's error stays: only another process can recover
            with suppress(Rejected):
                self._shard.apply_thread.fail(error)
        except Exception as error:  # whatever it was, the thread lives on and tries again
            unknown = not isinstance(error, StorageError | Rejected)
            log.error("no snapshot could be taken", extra={"error": str(error)}, exc_info=unknown)

    def take(self, checkpoint: str | None = "") -> Snapshot:
        """Take a snapshot, of a checkpoint (for ``None`` shard 0 draws one).

        Raises :class:`StorageError`, or :class:`Rejected` if there is no directory or no model.
        """
        with self._snapshotting:
            return self._take(checkpoint)

    def _take(self, checkpoint: str | None) -> Snapshot:
        shard = self._shard
        return self._write(shard.apply_thread.run(lambda: self._copy(shard.state, checkpoint)))

    def prepare(self, make: Callable[[], ShardState]) -> "Prepared":
        """Write the first snapshot of another state; the apply thread refuses jobs until :meth:`publish`.

        Raises :class:`Rejected` (``NOT_DURABLE``), or what ``make`` raises on the apply thread.
        """
        apply_thread = self._shard.apply_thread

        def begin() -> tuple[ShardState, Capture | None]:
            state = make()
            apply_thread.held = True
            return state, None if self._dir is None else self._copy(state, "")

        with self._snapshotting, or_not_durable():  # a snapshot of the old model must not come behind this one
            try:
                state, copied = apply_thread.run(begin)
                return Prepared(state, None if copied is None else self._prepare(copied))
            except BaseException:
                apply_thread.held = False
                raise

    def publish(self, prepared: "Prepared", publish: Callable[[ShardState], None]) -> None:
        """Publish a prepared state; raises :class:`Rejected` (``NOT_DURABLE``), and then all goes on as before."""
        with self._snapshotting, or_not_durable():
            try:
                if prepared.manifest is not None:
                    self._commit_first(prepared.manifest)
                publish(prepared.state)
            finally:
                self._shard.apply_thread.held = False

    def abandon_prepared(self, prepared: "Prepared") -> None:
        """Go on as before :meth:`prepare`."""
        with self._snapshotting:
            if prepared.manifest is not None:
                self._require_dir().abandon(prepared.manifest)
            self._shard.apply_thread.held = False

    def _is_saved(self, model: ModelShard) -> bool:
        """Return whether the newest snapshot is of this version."""
        last = self.last_snapshot.manifest if self.last_snapshot else None
        return last is not None and (last.generation, last.version) == (model.generation, model.version)

    def _copy(self, state: ShardState, checkpoint: str | None) -> Capture:
        """Copy a state, and begin another segment behind the copy; on the apply thread."""
        shard = self._shard
        if (model := state.model) is None:
            raise Rejected(ErrorCode.NOT_INITIALISED, "no worker has uploaded a model yet")
        with self._counting_errors():
            shard.apply_thread.require_whole()
            segment = self._require_dir().rotate()
            self._bytes_behind = self.journal_bytes
            if checkpoint is None:
                checkpoint = new_id(model.generation, segment, model.version) if shard.is_coordinator else ""
            return capture(shard, state, segment, checkpoint, self.checkpoints.up_to(checkpoint))

    def _write(self, copied: Capture, *, clean: bool = False) -> Snapshot:
        return self._commit(self._prepare(copied), clean=clean)

    def _prepare(self, copied: Capture) -> Manifest:
        data_dir = self._require_dir()
        started = self._environment.monotonic()
        with closing(copied), self._counting_errors():
            if (lost := data_dir.lost_file()) is not None:
                raise StorageError(f"{lost} {_LOST}")
            manifest = data_dir.prepare(copied.manifest, copied.tensors)
        self._shard.metrics.snapshot_write_seconds.set(self._environment.monotonic() - started)
        return manifest

    def _commit(self, manifest: Manifest, *, clean: bool = False) -> Snapshot:
        with self._counting_errors():
            snapshot = self._require_dir().commit(manifest, clean=clean, needed_from=self.replication.keep_from())
        self._note(snapshot)
        extra = {"version": manifest.version, "checkpoint": manifest.checkpoint, "path": str(snapshot.path)}
        log.info("snapshot taken", extra=extra)
        return snapshot

    def _commit_first(self, manifest: Manifest) -> None:
        """Commit the first snapshot of another model; if it fails and stays, refuse all that a restart could not apply.

        A restart would begin with that snapshot, and what is journaled from here on is of the model before.
        """
        try:
            self._commit(manifest)
        except StorageError as error:
            if self.records.journal is not None and self._require_dir().may_have(manifest):
                self.records.journal.give_up(f"{error}; what was written of another model could not be removed again")
            raise

    def _note(self, snapshot: Snapshot) -> None:
        self.last_snapshot = snapshot
        self.replication.begin(snapshot.manifest.generation)
        self.checkpoints.taken(snapshot.manifest.checkpoint)
        self._shard.metrics.observe_snapshot(snapshot.manifest.version, snapshot.manifest.created_unix_seconds)
        self._on_snapshot()

    @contextmanager
    def _counting_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.snapshot_errors += 1
            raise


def _find(kept: list[Snapshot], checkpoint: str) -> Snapshot:
    """Return the newest snapshot of a checkpoint; raises ``NO_SUCH_CHECKPOINT``."""
    for each in reversed(kept):
        if each.manifest.checkpoint == checkpoint:
            return each
    raise Rejected(ErrorCode.NO_SUCH_CHECKPOINT, f"no checkpoint {checkpoint!r} is kept here")
