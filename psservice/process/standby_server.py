"""The process of a standby, until it is told to stop or to serve in its primary's place."""

import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from enum import Enum

import grpc.aio

from pscore.version import __version__
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.observability.metrics import Metrics
from psservice.process.ready import tell_ready
from psservice.process.server import StartError, device_of, listen, read_secrets
from psservice.process.shared_health import SharedHealth
from psservice.process.signals import SignalThread
from psservice.rpc.file_watcher import FileWatcher
from psservice.rpc.health_and_reflection import LIVENESS, Health
from psservice.rpc.ports import EventLoop, open_port
from psservice.rpc.watched_files import SecurityError
from psservice.settings import ServerSettings, shown
from psservice.shard.shard import Shard
from psservice.standby.compactor import Compactor
from psservice.standby.following import Following
from psservice.standby.primary import Primary
from psservice.standby.service import StandbyService
from psservice.storage.environment import MACHINE
from psservice.storage.files import StorageError
from psservice.storage.replica import Replica

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_AGAIN_SECONDS = 10.0  # after a snapshot of one's own could not be taken


class End(Enum):
    """How a standby has ended."""

    STOPPED = "stopped"
    PROMOTED = "promoted"


class StandbyServer:
    """Follows one shard of a server; ready to serve in its place.

    Raises :class:`~psservice.process.server.StartError` if a port is taken, or the data directory is another's.

    Attributes:
        settings: with the ports that were bound.
    """

    def __init__(self, settings: ServerSettings, shared_health: SharedHealth | None = None) -> None:
        self._shared_health = shared_health or SharedHealth(1)
        self._place = settings.shard_index if shared_health else 0
        self._closing, self._segments = threading.Event(), threading.Event()
        self._told: queue.SimpleQueue[End] = queue.SimpleQueue()
        self._loop, self._health, self._watcher = EventLoop(), Health(), FileWatcher()
        self._port: grpc.aio.Server | None = None
        self._started = time.monotonic()
        self.settings = settings
        try:
            if settings.health_listen:
                self._listen("health_listen", self._health.open_port)
            self._open()
        except BaseException:
            self._close_ports()
            raise
        for name, serving in (("", False), (LIVENESS, True)):
            self._health.set(name, serving=serving)
        self._shared_health.note(self._place, has_started=True, serves=False, is_broken=False)

    def _open(self) -> None:
        settings = self.settings
        try:
            authenticator, certificates = read_secrets(settings, self._watcher)
            self._replica = Replica(settings, MACHINE)
        except (StorageError, SecurityError) as error:
            raise StartError(str(error)) from error
        try:
            name = f"{socket.gethostname()} {settings.listen} {self._replica.path}"
            self._following = Following(settings, MACHINE, self._replica, Primary(settings, name[:200]))
            service = StandbyService(authenticator, self.status, self._promote, settings.standby_of)
            credentials = certificates.credentials if certificates else None

            def open_port_at(address: str) -> int:
                self._port, number = self._loop.run(open_port(address, [service.handler], credentials))
                return number

            self._listen("listen", open_port_at)
        except BaseException:
            self._replica.close()
            raise
        self._following.start(self._has_segment)

    def _listen(self, name: str, bind: Callable[[str], int]) -> None:
        """Open a port, and have the settings name it."""
        address = listen(getattr(self.settings, name), ServerSettings.explicit(name), bind)
        self.settings = self.settings.model_copy(update={name: address})

    def status(self) -> pb.GetStatusResponse:
        """Return the status."""
        settings, newest = self.settings, self._replica.newest
        manifest = newest.manifest if newest is not None else None
        return pb.GetStatusResponse(
            run_id=manifest.run_id if manifest else "",
            shard_index=settings.shard_index,
            num_shards=settings.num_shards,
            ports_in_a_row=settings.shards > 1,
            server_version=__version__,
            durability="journal",
            durable=True,
            snapshot_version=manifest.version if manifest else 0,
            uptime_seconds=time.monotonic() - self._started,
            standby=self._following.status(),
        )

    def _promote(self, force: bool) -> pb.PromoteResponse:
        self._following.require_promotable(force=force)
        self._note_model()
        if not self._shared_health.all_have_models:
            raise Rejected(
                ErrorCode.BAD_REQUEST,
                "a standby of another shard of this command has no model yet, and all serve together: see psservice "
                "status of each",
            )
        self._shared_health.promote()
        return pb.PromoteResponse(behind_bytes=self._following.status().behind_bytes)

    def _note_model(self) -> None:
        if self._following.has_model:
            self._shared_health.note_has_model(self._place)

    # The snapshots of its own

    def _has_segment(self) -> None:
        self._segments.set()

    def _compact(self) -> None:
        """Take a snapshot behind each complete segment, until the standby ends."""
        settings = self.settings.model_copy(update={"data_dir": None, "replicate": "behind"})
        shard = Shard(settings, device_of(settings), Metrics(), lambda: None, lambda: None, MACHINE)
        compactor = Compactor(shard, self._replica)
        try:
            while not self._closing.is_set():
                self._segments.wait()
                self._segments.clear()
                try:
                    while not self._closing.is_set() and compactor.advance():
                        pass
                except StorageError as error:
                    log.error("no snapshot of the standby could be taken", extra={"error": str(error)})
                    if not self._closing.wait(_AGAIN_SECONDS):
                        self._segments.set()
        finally:
            shard.apply_thread.close()

    # The life of the process

    def run(self, signals: SignalThread) -> End:
        """Follow until told to stop or to serve; the directory is free then, and the ports are closed."""
        signals.hear = lambda number: None if number is signal.SIGHUP else self._told.put(End.STOPPED)
        settings = self.settings
        addresses = {"address": settings.listen, "health": settings.health_listen, "metrics": ""}
        log.info("standing by", extra={**addresses, "version": __version__, "settings": shown(settings)})
        if settings.ready_fd is not None:
            tell_ready(settings.ready_fd, addresses)
        self._shared_health.note_counts_all(self._place)
        compacting = threading.Thread(target=self._compact, name="standby-snapshots", daemon=True)
        compacting.start()
        end = self._await_end()
        log.info("the standby ends", extra={"end": end.value, "position": tuple(self._replica.held.position)})
        self._following.close()
        self._closing.set()
        self._segments.set()
        compacting.join()
        if end is End.PROMOTED:
            self._note_promoted()
        self._replica.close()
        self._close_ports()
        return end

    def _note_promoted(self) -> None:
        try:
            self._replica.note_promoted()
        except StorageError as error:
            log.error("a later start would stand by again, and be refused", extra={"error": str(error)})

    def _await_end(self) -> End:
        parent = self.settings.parent_pid
        while True:
            try:
                return self._told.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                pass
            if parent is not None and os.getppid() != parent:
                return End.STOPPED
            self._note_model()
            is_due = self._following.is_due() and self._shared_health.all_have_models
            if is_due and not self._shared_health.is_promoted:
                log.warning(
                    "the primary is lost, and the standby has all that was acknowledged: it serves from now on",
                    extra={"lost_seconds": round(self._following.lost_seconds, 1)},
                )
                self._shared_health.promote()
            if self._shared_health.is_promoted:
                return End.PROMOTED

    def _close_ports(self) -> None:
        if self._port is not None:
            self._loop.run(self._port.stop(0.5))
        self._loop.close()
        self._health.close()
        self._watcher.close()
