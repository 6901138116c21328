"""The durability of a shard: what is written when, and how a shard begins from that again.

The order of things is the promise: a record is appended *before* the push is applied, and an answer leaves when the
record is as durable as the mode promises. A pull waits likewise, so that no worker ever holds a version that a power
cut could take back (with ``--fsync always``).
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.generation import sibling_generation
from psservice.cluster.checkpoints import Checkpoints, new_id
from psservice.model.parameters import ModelShard
from psservice.observability.metrics import Metrics
from psservice.recovery.capture import Capture, Content, Kept, capture
from psservice.recovery.event_log import EventLog, not_durable
from psservice.recovery.replayer import LogReplayer, bring_back
from psservice.settings import ServerSettings
from psservice.storage.datadir import DataDir, require_same_number
from psservice.storage.environment import MACHINE, Environment
from psservice.storage.files import StorageError, discard
from psservice.storage.manifest import Manifest
from psservice.storage.snapshots import Snapshot

log = logging.getLogger(__name__)

_PROGRESS_SECONDS = 5.0
_POLL_SECONDS = 1.0
_PATIENCE = 3  # periods after which a shard that hears of no checkpoint takes a snapshot for itself


class Durability:
    """Writes what happens to a shard to its data directory. Without one, every call does nothing.

    Args:
        settings: the server's.
        on_health: told ``False`` while pushes cannot be made durable, ``True`` when they can again.
        environment: clocks, threads and files.

    Attributes:
        averaging: held while buffers are averaged in and noted, so that a snapshot falls between two of these.
        last_snapshot: the newest; ``None`` before the first.
        snapshot_errors: snapshots that could not be taken, since the start.

    Raises:
        StorageError: the directory is in use, cannot be written, or lies beside that of another number of shards.
    """

    def __init__(
        self, settings: ServerSettings, on_health: Callable[[bool], None], environment: Environment = MACHINE
    ) -> None:
        self._settings, self._environment = settings, environment
        self._dir: DataDir | None = None
        if settings.data_dir is not None and settings.durability != "none":
            if settings.init is None:
                require_same_number(environment.files, settings.data_dir, settings.shard_index, settings.num_shards)
            self._dir = DataDir(settings, environment, on_health)
        self.events = EventLog(self._dir)
        self.averaging = threading.Lock()
        self._stop, self._told = threading.Event(), threading.Event()
        self.checkpoints = Checkpoints()
        self._bytes_behind = 0  # of the journal, where the newest snapshot was begun
        self._thread: threading.Thread | None = None
        self._taking = threading.Lock()
        self._tried = environment.monotonic()
        self.last_snapshot: Snapshot | None = None
        self.snapshot_errors = 0

    @property
    def journal_bytes(self) -> int:
        """Bytes appended to the journal since the start."""
        return self._dir.journal.bytes_written if self._dir and self._dir.journal else 0

    @property
    def journal_errors(self) -> int:
        """Failed attempts to write the journal, or to force it to the disk, since the start."""
        return self._dir.journal.errors if self._dir and self._dir.journal else 0

    @property
    def is_broken(self) -> bool:
        """Whether nothing can be written any more until the server is started again."""
        return bool(self._dir and self._dir.journal and self._dir.journal.is_broken)

    @property
    def snapshot_interval_seconds(self) -> float:
        """Longest time between two snapshots of a model that changes; 0 where none are taken."""
        periods = 1 if self._settings.shard_index == 0 else _PATIENCE
        return 0.0 if self._dir is None else self._settings.snapshot_seconds * periods

    def recover(self, shard: Kept) -> None:
        """Bring a new shard to where the directory's past ends; raises :class:`StorageError`."""
        if self._dir is None:
            return
        source = self._dir.source()
        if source.snapshot is None:
            log.info("the data directory is empty", extra={"path": str(self._dir.directory)})
            self._dir.begin(source.next_number, is_true=True)
            return
        manifest = source.snapshot.manifest
        self._require_ours(manifest)
        replayer = LogReplayer(source, shard.device, self._settings.shard)
        started = reported = self._environment.monotonic()
        for version in replayer.replay():
            if self._environment.monotonic() - reported > _PROGRESS_SECONDS:
                reported = self._environment.monotonic()
                log.info("replaying the journal", extra={"version": version, "records": replayer.replayed})
        if source.lost:
            dropped = f"at least {replayer.versions_dropped()}"
            log.error(
                "went back to the last good version",
                extra={"version": replayer.model.version, "versions_dropped": dropped},
            )
        has_other_settings = replayer.apply_settings()
        replayer.extend_changelog()
        if self._settings.fsync != "never":  # the next segment's promise is for what is served from now on, old or new
            source.sync()
        new_history = not source.is_complete
        if new_history:  # versions that workers have seen may be gone: the same numbers will mean other values
            replayer.model.generation = sibling_generation(manifest.generation)
        shard.adopt(replayer)
        self._dir.begin(source.next_number, is_true=not new_history)
        self.checkpoints.last = manifest.last_checkpoint
        self._note(source.snapshot, shard.metrics)
        log.info(
            "recovered",
            extra={
                "version": replayer.model.version,
                "snapshot": manifest.version,
                "replayed": replayer.replayed,
                "seconds": round(self._environment.monotonic() - started, 3),
                "workers": len(replayer.workers),
                "history": "new" if new_history else "the same",
            },
        )
        if new_history or has_other_settings or not self._dir.keeps_journal:
            self.take(shard)  # what the disk says must be true when this life ends without a word

    def look_back(self, shard: Kept, version: int | None, checkpoint: str) -> LogReplayer:
        """Return the shard as it was at a version or in a checkpoint; raises ``NO_SUCH_CHECKPOINT``."""
        data_dir = self._require_dir()
        where = (data_dir.directory, data_dir.files, shard.device, self._settings.shard)
        with self._taking:  # nothing is removed meanwhile
            try:
                return bring_back(*where, version=version, checkpoint=checkpoint)
            except StorageError as error:
                raise Rejected(ErrorCode.NO_SUCH_CHECKPOINT, str(error)) from error

    def _require_dir(self) -> DataDir:
        if self._dir is None:
            raise Rejected(ErrorCode.BAD_REQUEST, "this server keeps nothing; start it with --data-dir")
        return self._dir

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

    def start(self, shard: Kept) -> None:
        """Begin to take snapshots every period."""
        if self._dir is not None:
            self._thread = self._environment.start(lambda: self._work(shard), "snapshots")

    def told(self, shard: Kept) -> str:
        """Return shard 0's newest checkpoint, which workers carry to the other shards, or nothing."""
        if not shard.is_coordinator or self.last_snapshot is None:
            return ""
        return self.checkpoints.told(shard.run.run_id, self.last_snapshot.manifest.checkpoint)

    def take_asked(self, shard: Kept, checkpoint: str) -> Snapshot:
        """Take a snapshot that somebody asked for; raises :class:`Rejected` (``BAD_REQUEST``, ``NOT_DURABLE``)."""
        same = [each.manifest for each in self.snapshots() if checkpoint and each.manifest.checkpoint == checkpoint]
        if same and same[0].is_named:
            raise Rejected(
                ErrorCode.BAD_REQUEST,
                f"checkpoint {checkpoint!r} is there already, of version {same[0].version}: choose another name, or "
                f"delete that one with `psservice checkpoints --delete {checkpoint}`",
            )
        shard.require_model(None)
        try:
            snapshot = self.take(shard, checkpoint or None)
        except StorageError as error:
            raise not_durable(error) from error
        assert snapshot is not None
        return snapshot

    def snapshots(self) -> list[Snapshot]:
        """Return what is kept, oldest first; raises :class:`Rejected` (``BAD_REQUEST``) where nothing is."""
        return self._require_dir().snapshots()

    def delete(self, checkpoint: str) -> Snapshot:
        """Remove a checkpoint that an operator has named; raises ``NO_SUCH_CHECKPOINT`` or ``BAD_REQUEST``."""
        data_dir = self._require_dir()
        with self._taking:
            kept = data_dir.snapshots()
            if kept and kept[-1].manifest.checkpoint == checkpoint:
                raise Rejected(
                    ErrorCode.BAD_REQUEST,
                    f"checkpoint {checkpoint!r} is the newest snapshot, from which the server would recover; take "
                    "another with `psservice snapshot` first",
                )
            found = [each for each in kept if each.manifest.checkpoint == checkpoint]
            if not found:
                raise Rejected(ErrorCode.NO_SUCH_CHECKPOINT, f"no checkpoint {checkpoint!r} is kept here")
            if not found[0].manifest.is_named:
                raise Rejected(
                    ErrorCode.BAD_REQUEST,
                    f"nobody has named checkpoint {checkpoint!r}: it goes by itself with newer ones (--keep-snapshots)",
                )
            discard(data_dir.files, found[0].path)
        log.info("checkpoint deleted", extra={"checkpoint": checkpoint, "path": str(found[0].path)})
        return found[0]

    def follow(self, shard: Kept, told: str) -> None:
        """Take part in a checkpoint of shard 0's that a worker has told of, beside the call that told it."""
        model = shard.model
        follows = self._dir is not None and told and not shard.is_coordinator
        if follows and model is not None and self.checkpoints.hear(shard.run.run_id, model.generation, told):
            self._told.set()

    def take(self, shard: Kept, checkpoint: str | None = "") -> Snapshot | None:
        """Take a snapshot, of a checkpoint (for ``None`` shard 0 draws one); raises :class:`StorageError`.

        Nothing happens without a directory or a model.
        """
        if self._dir is None or shard.model is None:
            return None
        with self._taking:
            copied = shard.apply_thread.run(lambda: self._copy(shard, shard.content(), checkpoint))
            return self._write(copied, shard.metrics)

    def install(self, shard: Kept, make: Callable[[], Content], publish: Callable[[Content], None]) -> Content:
        """Take the first snapshot of a new content, and publish that; the writer refuses jobs meanwhile.

        Raises:
            Rejected: ``NOT_DURABLE``, or what ``make`` raises on the writer thread.
        """

        def begin() -> tuple[Content, Capture | None]:
            shard.apply_thread.held = True  # first: buffers are averaged in beside the writer
            content = make()
            return content, None if self._dir is None else self._copy(shard, content, "")

        with self._taking:  # a snapshot of the old model must not come behind this one
            try:
                content, copied = shard.apply_thread.run(begin)
                if copied is not None:
                    self._write(copied, shard.metrics)
            except StorageError as error:
                raise not_durable(error) from error
            else:
                publish(content)
            finally:
                shard.apply_thread.held = False
        return content

    def _copy(self, shard: Kept, content: Content, checkpoint: str | None) -> Capture:
        """Copy what a shard holds, and begin another segment behind it; on the writer thread."""
        assert self._dir is not None
        model, average = content.model, content.buffers
        with self._counted():
            with self.averaging:
                shard.apply_thread.require_whole()  # nor half of an average that has failed
                segment = self._dir.rotate()
                self._bytes_behind = self.journal_bytes
                buffers = average.export() if average else (0.0, {})
            if checkpoint is None:
                checkpoint = new_id(model.generation, segment, model.version) if shard.is_coordinator else ""
            return capture(
                shard,
                content,
                checkpoint,
                buffers,
                segment=segment,
                shard_index=self._settings.shard_index,
                num_shards=self._settings.num_shards,
                last_checkpoint=self.checkpoints.up_to(checkpoint),
                created_unix_seconds=self._environment.unix_seconds(),
            )

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.snapshot_errors += 1
            raise

    def _note(self, snapshot: Snapshot, metrics: Metrics) -> None:
        self.last_snapshot = snapshot
        self.checkpoints.taken(snapshot.manifest.checkpoint)
        metrics.observe_snapshot(snapshot.manifest.version, snapshot.manifest.created_unix_seconds)

    def _write(self, copied: Capture, metrics: Metrics, *, clean: bool = False) -> Snapshot:
        assert self._dir is not None
        started = self._environment.monotonic()
        with self._counted():
            on_host = {name: tensor.cpu().contiguous() for name, tensor in copied.tensors.items()}
            snapshot = self._dir.write(copied.manifest, on_host, clean=clean)
        self._note(snapshot, metrics)
        seconds = self._environment.monotonic() - started
        metrics.snapshot_write_seconds.set(seconds)
        log.info(
            "snapshot taken",
            extra={
                "version": copied.manifest.version,
                "checkpoint": copied.manifest.checkpoint,
                "path": str(snapshot.path),
                "seconds": round(seconds, 3),
            },
        )
        return snapshot

    def _work(self, shard: Kept) -> None:
        while not self._stop.is_set():
            self._told.wait(min(_POLL_SECONDS, self.snapshot_interval_seconds))
            if not self._stop.is_set():
                self.snapshot_if_due(shard)

    def snapshot_if_due(self, shard: Kept) -> None:
        """Shard 0 takes a checkpoint every period; the others when they are told of one, or long after nobody did."""
        told = self._told.is_set()
        self._told.clear()
        model, now = shard.model, self._environment.monotonic()
        long_journal = self.journal_bytes - self._bytes_behind >= self._settings.journal_bytes
        if model is None or not (told or long_journal or now - self._tried >= self.snapshot_interval_seconds):
            return
        self._tried = now
        unchanged = self._is_last(model)
        if unchanged and not self.checkpoints.wanted and not long_journal:
            return
        try:
            self.take(shard, self.checkpoints.wanted or None)
        except Exception as error:  # whatever it was, the thread lives on and tries again
            unknown = not isinstance(error, StorageError | Rejected)
            log.error("no snapshot could be taken", extra={"error": str(error)}, exc_info=unknown)

    def stop(self) -> None:
        """Stop the periodic snapshots."""
        self._stop.set()
        self._told.set()
        if self._thread is not None:
            self._thread.join()

    def abandon(self) -> None:
        """Close the directory without a snapshot."""
        if self._dir is not None:
            self._dir.close()

    def close(self, shard: Kept) -> None:
        """Take the last snapshot, after the writer has stopped, and close the directory."""
        self.stop()
        if self._dir is None:
            return
        try:
            with self._taking:
                if shard.model is not None:
                    checkpoint = self._checkpoint_if_unchanged(shard.model)
                    copied = self._copy(shard, shard.content(), checkpoint)
                    self._write(copied, shard.metrics, clean=True)
        except (StorageError, Rejected) as error:
            log.error("no snapshot at the end; the journal has everything", extra={"error": str(error)})
        self._dir.close()

    def _is_last(self, model: ModelShard) -> bool:
        """Return whether the newest snapshot is of this version."""
        last = self.last_snapshot.manifest if self.last_snapshot else None
        return last is not None and (last.generation, last.version) == (model.generation, model.version)

    def _checkpoint_if_unchanged(self, model: ModelShard) -> str:
        """Return the newest snapshot's checkpoint where nothing has changed since, so that the next takes its place."""
        if self.last_snapshot is None or not self._is_last(model) or self._settings.durability != "journal":
            return ""
        return self.last_snapshot.manifest.checkpoint if self.journal_bytes == self._bytes_behind else ""
