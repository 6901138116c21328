"""Between the engine and its data directory: what is written when, and how a shard begins from it again.

The order of things is the promise: a record is appended *before* the push is applied, and an answer leaves when the
record is as durable as the mode promises. A pull waits likewise, so that no worker ever holds a version that a power
cut could take back (with ``--fsync always``).
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from google.protobuf.message import Message

from pscore.generation import epoch, nonce, sibling_generation
from pscore.reasons import Reason, Refusal
from pscore.tracing import traced
from pscore.v1 import parameter_server_pb2 as pb
from psservice.datamessages import record_of
from psservice.dataset import Leased, Wish
from psservice.durability.files import StorageError
from psservice.durability.journal import JournalError
from psservice.durability.records import Body
from psservice.durability.snapshots import Manifest, Snapshot
from psservice.durability.store import Store, StoreSettings, require_same_number, shard_directory
from psservice.history import (
    AVERAGED,
    FINISHED,
    GROUPS,
    JOINED,
    LEASED,
    LEFT,
    PUSHED,
    ROUND,
    History,
    add_message,
    at_checkpoint,
    at_version,
    body_of,
)
from psservice.identities import identity_to_message
from psservice.membership import Identity, PushAnswer
from psservice.metrics import Metrics
from psservice.moment import Kept, Moment, moment_of
from psservice.rules.freezing import Decision
from psservice.settings import ServerSettings

log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
_PROGRESS_SECONDS = 5.0
_POLL_SECONDS = 1.0
_PATIENCE = 3
"""Periods after which a shard that hears of no checkpoint takes a snapshot for itself."""


class Persistence:
    """What an engine tells, and is told by, its data directory. Without one, every call does nothing.

    Args:
        settings: the server's.
        on_health: told ``False`` while pushes cannot be made durable, ``True`` when they can again.

    Attributes:
        last_snapshot: the newest; ``None`` before the first.
        snapshot_errors: snapshots that could not be taken, since the start.

    Raises:
        StorageError: the directory is in use, cannot be written, or lies beside that of another number of shards.
    """

    def __init__(self, settings: ServerSettings, on_health: Callable[[bool], None]) -> None:
        """Take the directory."""
        self._settings = settings
        self._store: Store | None = None
        if settings.data_dir is not None and settings.durability != "none":
            directory = shard_directory(settings.data_dir, settings.shard_index, settings.num_shards)
            if settings.init is None:
                require_same_number(settings.data_dir, settings.shard_index, settings.num_shards)
            self._store = Store(
                StoreSettings(
                    directory,
                    settings.durability == "journal",
                    settings.fsync,
                    settings.fsync_interval_seconds,
                    settings.keep_snapshots,
                ),
                on_health,
            )
        self.averaging = threading.Lock()
        """Held while buffers are averaged in and noted, so that a snapshot falls between two of these."""
        self._stop, self._told = threading.Event(), threading.Event()
        self._followed = ""
        self._bytes_behind = 0  # of the journal, where the newest snapshot was begun
        self._thread: threading.Thread | None = None
        self._taking = threading.Lock()
        self.last_snapshot: Snapshot | None = None
        self.snapshot_errors = 0

    @property
    def keeps_journal(self) -> bool:
        """Whether pushes are written down one by one."""
        return self._store is not None and self._store.keeps_journal

    @property
    def journal_bytes(self) -> int:
        """Bytes written down since the start."""
        return 0 if self._store is None else self._store.journal_bytes

    @property
    def journal_errors(self) -> int:
        """Failed attempts to write the journal, or to force it to the disk, since the start."""
        return 0 if self._store is None else self._store.journal_errors

    @property
    def snapshot_interval_seconds(self) -> float:
        """Longest time between two snapshots of a model that changes; 0 where none are taken."""
        periods = 1 if self._settings.shard_index == 0 else _PATIENCE
        return 0.0 if self._store is None else self._settings.snapshot_seconds * periods

    @property
    def is_broken(self) -> bool:
        """Whether nothing can be written down any more until the server is started again."""
        return self._store is not None and self._store.is_broken

    # The way back

    def recover(self, engine: Kept) -> None:
        """Bring an engine that has just been made to where the directory's past ends.

        Raises:
            StorageError: the past is damaged, or of another run.
        """
        if self._store is None:
            return
        past = self._store.past(self._settings.recover)
        if past.snapshot is None:
            log.info("the data directory is empty", extra={"path": str(self._store.directory)})
            self._store.begin(past.next_number, is_true=True)
            return
        manifest = past.snapshot.manifest
        self._require_ours(manifest)
        history = History(past, engine.device, self._settings.shard)
        started = said = time.monotonic()
        for version in history.replay():
            if time.monotonic() - said > _PROGRESS_SECONDS:
                said = time.monotonic()
                log.info("replaying the journal", extra={"version": version, "records": history.replayed})
        resettled = history.settle()
        history.remember_supports()
        if self._settings.fsync != "never":  # the next segment's promise is for what is served from now on, old or new
            past.sync()
        untouched = manifest.clean and past.last_segment <= manifest.segment
        lost = past.lost or not past.reaches_the_newest_snapshot
        new_history = lost or not (untouched or past.nothing_was_lost)
        if new_history:  # versions that workers have seen may be gone: the same numbers will mean other values
            history.model.generation = sibling_generation(manifest.generation)
        engine.adopt(history)
        self._store.begin(past.next_number, is_true=not new_history)
        self._note(past.snapshot, engine.metrics)
        log.info(
            "recovered",
            extra={
                "version": history.model.version,
                "snapshot": manifest.version,
                "replayed": history.replayed,
                "seconds": round(time.monotonic() - started, 3),
                "workers": len(history.workers),
                "history": "new" if new_history else "the same",
            },
        )
        if (
            new_history or resettled or not self.keeps_journal
        ):  # what the disk says must be true when this life ends without a word
            self.take(engine)

    def look_back(self, engine: Kept, version: int | None, checkpoint: str) -> History:
        """Bring back what the shard was at a version, or in a checkpoint, beside the running one.

        Raises:
            Refusal: ``BAD_REQUEST``, where it is not kept.
        """
        directory = self._require_store().directory
        with self._taking:  # nothing is removed meanwhile
            try:
                if version is not None:
                    return at_version(directory, version, engine.device, self._settings.shard)
                return at_checkpoint(directory, checkpoint, engine.device, self._settings.shard)
            except StorageError as error:
                raise Refusal(Reason.BAD_REQUEST, str(error)) from error

    def _require_store(self) -> Store:
        if self._store is None:
            raise Refusal(Reason.BAD_REQUEST, "this server keeps nothing; start it with --data-dir")
        return self._store

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

    # What happens meanwhile

    def start(self, engine: Kept) -> None:
        """Begin to take snapshots every period."""
        if self._store is not None:
            self._thread = threading.Thread(target=self._work, args=(engine,), name="snapshots", daemon=True)
            self._thread.start()

    def written(self, messages: Sequence[Message]) -> Body | None:
        """Prepare the messages of a push for :meth:`pushed`, beside the writer."""
        return body_of(messages) if self.keeps_journal else None

    def pushed(self, body: Body | None, answer: PushAnswer) -> None:
        """Write a push down, before it is applied. If it is refused then, the next life refuses it again.

        Raises:
            Refusal: ``NOT_DURABLE``.
        """
        if body is not None:
            said = pb.PushSparseResponse(
                version=answer.version, staleness=answer.staleness, applied_scale=answer.applied_scale
            )
            self._append(PUSHED, add_message(body, said))

    def averaged(self, identity: Identity, step: int, samples: int, data: bytes, live_workers: int) -> None:
        """Write an exchange of buffers down; raises :class:`Refusal` (``NOT_DURABLE``)."""
        if self.keeps_journal:
            header = pb.BuffersHeader(
                identity=identity_to_message(identity), step=step, samples=samples, buffer_bytes=len(data)
            )
            said = pb.RenewLeaseResponse(live_workers=live_workers)
            self._append(AVERAGED, body_of([header, pb.BytesChunk(data=data), said]))

    def joined(self, identity: Identity, index_codecs: frozenset[int]) -> None:
        """Write a lease down; raises :class:`Refusal` (``NOT_DURABLE``)."""
        if self.keeps_journal:
            codecs = [cast("pb.IndexCodec.ValueType", codec) for codec in sorted(index_codecs)]
            self._append(JOINED, body_of([pb.JoinRequest(identity=identity_to_message(identity), index_codecs=codecs)]))

    def leased(self, identity: Identity, wish: Wish, leased: Leased) -> None:
        """Write down that samples are handed out; raises :class:`Refusal` (``NOT_DURABLE``)."""
        if self.keeps_journal:
            self._append(LEASED, body_of(record_of(identity, wish, leased)))

    def left(self, identity: Identity) -> None:
        """Write the end of a lease down; where that fails, the lease ends once more after a restart."""
        if self.keeps_journal:
            try:
                self._append(LEFT, body_of([pb.LeaveRequest(identity=identity_to_message(identity))]))
            except Refusal as error:
                log.warning("the end of a lease is not written down", extra={"error": str(error)})

    def finished(self, run_id: str) -> None:
        """Write the run's end down; raises :class:`Refusal` (``NOT_DURABLE``)."""
        if self.keeps_journal:
            self._append(FINISHED, body_of([pb.FinishRunRequest(run_id=run_id)]))

    def closed_round(self, version: int) -> None:
        """Write down that a round is closed, before it is; raises :class:`Refusal` (``NOT_DURABLE``)."""
        if self.keeps_journal:
            self._append(ROUND, body_of([pb.PushSparseResponse(version=version)]))

    def decided(self, decision: Decision) -> None:
        """Write down what happens in the groups, before it does; raises :class:`Refusal` (``NOT_DURABLE``)."""
        if self.keeps_journal:
            self._append(GROUPS, Body.of([decision.to_bytes()]))

    @traced("durable")
    def wait(self) -> None:
        """Wait until everything that was written before this call is as durable as was promised.

        Raises:
            Refusal: ``NOT_DURABLE``.
        """
        if self._store is None:
            return
        try:
            self._store.wait()
        except JournalError as error:
            raise _not_durable(error) from error

    @traced("journal")
    def _append(self, kind: int, body: Body) -> None:
        assert self._store is not None
        try:
            self._store.append(kind, body)
        except JournalError as error:
            raise _not_durable(error) from error

    # Snapshots

    @property
    def checkpoint(self) -> str:
        """Id of the newest snapshot's checkpoint."""
        return self.last_snapshot.manifest.checkpoint if self.last_snapshot else ""

    def take_asked(self, engine: Kept, checkpoint: str) -> Snapshot:
        """Take a snapshot that somebody asked for; raises :class:`Refusal` (``BAD_REQUEST``, ``NOT_DURABLE``)."""
        self._require_store()
        engine.require_model(None)
        try:
            snapshot = self.take(engine, checkpoint or self._next_checkpoint(engine))
        except StorageError as error:
            raise _not_durable(error) from error
        assert snapshot is not None
        return snapshot

    def follow(self, engine: Kept, checkpoint: str) -> None:
        """Take part in a checkpoint of shard 0's that a worker has told of, beside the call that told it."""
        if self._store is None or not checkpoint or engine.is_coordinator or checkpoint == self._followed:
            return
        self._followed = checkpoint
        self._told.set()

    def _next_checkpoint(self, engine: Kept) -> str:
        if not engine.is_coordinator:
            return ""
        model = engine.require_model(None)
        # With the nonce: a shard that has gone back comes to the same version again, of another history.
        return f"e{epoch(model.generation)}-v{model.version}-{nonce(model.generation):08x}"

    def take(self, engine: Kept, checkpoint: str = "") -> Snapshot | None:
        """Take a snapshot; ``None`` without a directory or a model. The writer is held for a copy only.

        Raises:
            StorageError: it could not be written.
        """
        if self._store is None or engine.model is None:
            return None
        with self._taking:
            return self._write(engine.writer.run(lambda: self.copy(engine, checkpoint, clean=False)), engine.metrics)

    def take_inside(self, engine: Kept) -> None:
        """Take a snapshot of a model that was just installed, on the writer thread, before anybody is told of it.

        Raises:
            Refusal: ``NOT_DURABLE``.
        """
        if self._store is None:
            return
        try:
            self._write(self.copy(engine, "", clean=False), engine.metrics)
        except StorageError as error:
            raise _not_durable(error) from error

    def copy(self, engine: Kept, checkpoint: str, *, clean: bool) -> Moment:
        """Copy the shard as it is now, and begin another segment behind it; on the writer thread."""
        assert self._store is not None
        assert engine.model is not None
        with self._counted():
            with self.averaging:
                segment = self._store.rotate()
                self._bytes_behind = self.journal_bytes
                weight, buffers = engine.buffers.export() if engine.buffers else (0.0, {})
            place = (self._settings.shard_index, self._settings.num_shards)
            return moment_of(engine, engine.model, place, segment, (weight, buffers), checkpoint, clean=clean)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count whatever goes wrong with a snapshot."""
        try:
            yield
        except Exception:
            self.snapshot_errors += 1
            raise

    def _note(self, snapshot: Snapshot, metrics: Metrics) -> None:
        self.last_snapshot = snapshot
        metrics.observe_snapshot(snapshot.manifest.version, snapshot.manifest.created_unix_seconds)

    def _write(self, moment: Moment, metrics: Metrics) -> Snapshot:
        assert self._store is not None
        started = time.monotonic()
        with self._counted():
            on_host = {name: tensor.cpu().contiguous() for name, tensor in moment.tensors.items()}
            snapshot = self._store.write(moment.manifest, on_host)
        self._note(snapshot, metrics)
        metrics.snapshot_write_seconds.set(time.monotonic() - started)
        log.info(
            "snapshot taken",
            extra={
                "version": moment.manifest.version,
                "checkpoint": moment.manifest.checkpoint,
                "path": str(snapshot.path),
                "seconds": round(time.monotonic() - started, 3),
            },
        )
        return snapshot

    def _work(self, engine: Kept) -> None:
        """Shard 0 takes a checkpoint every period; the others when they are told of one, or long after nobody did."""
        period = self.snapshot_interval_seconds
        tried = time.monotonic()
        while not self._stop.is_set():
            told = self._told.wait(min(_POLL_SECONDS, period))
            self._told.clear()
            model, last = engine.model, self.last_snapshot
            long_journal = self.journal_bytes - self._bytes_behind >= self._settings.journal_bytes
            due = told or long_journal or time.monotonic() - tried >= period
            if self._stop.is_set() or model is None or not due:
                continue
            tried = time.monotonic()
            now = model.generation, model.version
            unchanged = last is not None and (last.manifest.generation, last.manifest.version) == now
            if unchanged and not told and not long_journal:
                continue
            try:
                self.take(engine, self._followed if told else self._next_checkpoint(engine))
            except Exception as error:  # whatever it was, the thread lives on and tries again
                unknown = not isinstance(error, StorageError | Refusal)
                log.error("no snapshot could be taken", extra={"error": str(error)}, exc_info=unknown)

    def stop(self) -> None:
        """Stop the periodic snapshots."""
        self._stop.set()
        self._told.set()
        if self._thread is not None:
            self._thread.join()

    def abandon(self) -> None:
        """Let the directory go as it is."""
        if self._store is not None:
            self._store.close()

    def close(self, engine: Kept) -> None:
        """Take the last snapshot, after the writer has stopped, and let the directory go."""
        self.stop()
        if self._store is None:
            return
        try:
            if engine.model is not None:
                self._write(self.copy(engine, "", clean=True), engine.metrics)
        except (StorageError, Refusal) as error:
            log.error("no snapshot at the end; the journal has everything", extra={"error": str(error)})
        self._store.close()


def _not_durable(error: StorageError) -> Refusal:
    return Refusal(Reason.NOT_DURABLE, str(error), retry_seconds=_RETRY_SECONDS)
