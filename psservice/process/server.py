"""The server's process: ports, threads, start and a clean end."""

import logging
import os
import queue
import signal
import threading
from collections.abc import Callable, Collection
from enum import Enum
from pathlib import Path

import grpc
import grpc.aio
import torch
from grpc_health.v1 import health

from pscore.net.channels import is_loopback
from pscore.telemetry import tracing
from pscore.telemetry.span import TracingError
from pscore.version import __version__
from psservice.observability.metrics import Metrics
from psservice.process.maintenance import MaintenanceThread
from psservice.process.progress_thread import ProgressThread
from psservice.process.ready import tell_ready
from psservice.process.shared_health import SharedHealth
from psservice.process.signals import SignalThread
from psservice.relay.relay import Relay
from psservice.rpc.auth import Authenticator
from psservice.rpc.calls import SERVICE, handlers_of
from psservice.rpc.certificates import ServerCertificates
from psservice.rpc.dispatcher import Dispatcher
from psservice.rpc.file_watcher import FileWatcher
from psservice.rpc.health_and_reflection import LIVENESS, Health, reflection_handlers
from psservice.rpc.operators import OperatorCalls
from psservice.rpc.ports import EventLoop, bind_port, open_port
from psservice.rpc.readers import ReaderCalls
from psservice.rpc.shards import Follower, ShardCalls, security_of
from psservice.rpc.standbys import StandbyCalls
from psservice.rpc.status import bind_certificates, bind_metrics
from psservice.rpc.watched_files import SecurityError
from psservice.rpc.workers import WorkerCalls
from psservice.settings import ServerSettings, at_port, shown, split_address
from psservice.shard.lifecycle import open_shard
from psservice.standby.successor import SuccessorThread
from psservice.storage.files import StorageError
from psservice.web.pages import application
from psservice.web.server import WebServer

log = logging.getLogger(__name__)

_POLL_SECONDS, _START_POLL_SECONDS = 0.5, 0.05
_LAST_CALLS_SECONDS = 0.5  # for health checks and the ends of connections, after the calls of workers
_LAST_ANSWERS_SECONDS = 1.0  # of a shard that has failed: for the answers that say so


class StartError(Exception):
    """The server cannot start: a port is taken, a device or a file is missing."""


class ShardFailedError(Exception):
    """An update failed half-way, and the server has stopped: started again, it recovers."""


class _Word(Enum):
    """What the main thread is told, by a signal or a call."""

    STOP = "stop"
    READ_AGAIN = "read again"


class Server:
    """One running shard: the service, its health, and its metrics and status page, each on a port of its own.

    Health is that of all shards of the command, which ``shared_health`` has.
    """

    def __init__(self, settings: ServerSettings, shared_health: SharedHealth | None = None) -> None:
        """Bind every port and start to serve, health first, before a journal is replayed; raises ``StartError``."""
        self.settings = settings
        self._shared_health = shared_health or SharedHealth(1)
        self._place = settings.shard_index if shared_health else 0
        if settings.compute_threads or settings.shards > 1:
            torch.set_num_threads(settings.compute_threads or max(1, torch.get_num_threads() // settings.shards))
        self._metrics = Metrics()
        self._loop = EventLoop()
        self._watcher = FileWatcher()
        self._health = Health()
        self._port: grpc.aio.Server | None = None
        self._shards_port: grpc.aio.Server | None = None  # of other shards of this command
        self._follower: Follower | None = None
        self._relay: Relay | None = None
        self._successor: SuccessorThread | None = None
        self._certificates: ServerCertificates | None = None
        self._web: WebServer | None = None
        self._told: queue.SimpleQueue[_Word] = queue.SimpleQueue()
        self._serving, self._reporting = False, threading.Lock()
        self.address = self.health_address = self.metrics_address = ""
        try:
            self.update_health()
            if settings.health_listen:
                self.health_address = self._listen(settings.health_listen, "--health-listen", self._health.open_port)
            self._start_service()
        except BaseException:
            self._close_ports()
            self._watcher.close()
            raise
        self._serving = True
        self.update_health()

    def _start_service(self) -> None:
        """Recover the shard, and open the ports of workers and metrics."""
        settings = self.settings
        require_coordinator(settings)
        try:
            if settings.tracing:
                tracing.start("psservice", f"shard-{settings.shard_index}")
            authenticator, self._certificates = read_secrets(settings, self._watcher)
            bind_certificates(self._metrics, self._certificates)
            self.shard = open_shard(settings, device_of(settings), self._metrics, self.update_health, self._failed)
        except (StorageError, SecurityError, TracingError) as error:
            raise StartError(str(error)) from error
        operators = OperatorCalls(self.shard, lambda: self._dispatcher.queued, self.update_health, self._ask_to_stop)
        shard = self.shard
        calls = (WorkerCalls(shard), ReaderCalls(shard), ShardCalls(shard), StandbyCalls(shard), operators)
        handlers_by_rpc = {rpc: handler for each in calls for rpc, handler in handlers_of(each).items()}
        self._dispatcher = Dispatcher(handlers_by_rpc, authenticator, self.shard)
        self.shard.leases.waiters.serve_on(self._loop.loop.call_soon_threadsafe)
        bind_metrics(self.shard)
        handlers = [self._dispatcher.service, self._health.check_handler()]
        is_local = is_loopback(split_address(settings.listen)[0])
        if settings.reflection == "on" or (settings.reflection == "auto" and is_local):
            handlers += reflection_handlers(
                (SERVICE.full_name, health.SERVICE_NAME), authenticator, self._dispatcher.audit
            )
        if settings.metrics_listen:
            self.metrics_address = self._start_web(operators)
        credentials = self._certificates.credentials if self._certificates else None

        def open_workers_port(address: str) -> int:
            self._port, number = self._loop.run(open_port(address, handlers, credentials))
            return number

        self.address = self._listen(settings.listen, "--listen", open_workers_port)
        if settings.coordinator_is_here and self.shard.is_coordinator:
            _require_private(Path(settings.coordinator.removeprefix("unix:")).parent)
            self._shards_port, _ = self._loop.run(open_port(settings.coordinator, handlers, None))
        if settings.relay_of:
            self._relay = Relay(self.shard)
        if settings.standby_of:
            self._successor = SuccessorThread(self.shard)
        if settings.shard_index:
            self._follower = Follower(self.shard, authenticator)
        if self._relay is not None:
            self._relay.start(self._follower.ask_now if self._follower is not None else lambda: None)
        self._progress = ProgressThread(self.shard)
        self._maintenance = MaintenanceThread(lambda: self.shard.model.layout.size if self.shard.model else 0)

    def run(self, signals: SignalThread) -> None:
        """Announce the addresses, wait for SIGTERM, SIGINT or the parent's end, then drain and stop.

        SIGHUP, which a terminal sends when it is closed, ends nothing: files of secrets are read again if they have
        changed. Raises :class:`ShardFailedError` if the server has stopped because an update failed half-way.
        """
        signals.hear = lambda number: self._told.put(_Word.READ_AGAIN if number is signal.SIGHUP else _Word.STOP)
        addresses = {"address": self.address, "health": self.health_address, "metrics": self.metrics_address}
        device, settings = str(self.shard.device), shown(self.settings)
        log.info("serving", extra={**addresses, "device": device, "version": __version__, "settings": settings})
        for name in ("health_listen", "metrics_listen") + (() if self.settings.tls_cert else ("listen",)):
            address = getattr(self.settings, name)
            if address and not is_loopback(split_address(address)[0]):
                log.warning("reachable beyond this machine, in plaintext", extra={name: address})
        if self.settings.ready_fd is not None:
            tell_ready(self.settings.ready_fd, addresses)
        parent = self.settings.parent_pid
        while not self._is_asked_to_stop(_POLL_SECONDS if self._shared_health.all_count_all else _START_POLL_SECONDS):
            if parent is not None and os.getppid() != parent:
                log.info("the parent process is gone")
                break
            self.update_health()
        self.stop()
        if self.shard.apply_thread.failed:
            raise ShardFailedError("an update failed half-way; start the server again and it recovers")

    def stop(self) -> None:
        """NOT_SERVING, refuse new pushes, finish what is committed, stop."""
        log.info("draining")
        if self._relay is not None:
            self._relay.close()
        if self._follower is not None:
            self._follower.close()
        if self._successor is not None:
            self._successor.close()
        self._serving = False
        self.shard.drain_gate.is_closed = True
        self.update_health()
        failed = self.shard.apply_thread.failed
        self._loop.run(self._dispatcher.drain(_LAST_ANSWERS_SECONDS if failed else self.settings.drain_seconds))
        assert self._port is not None
        self._loop.run(self._port.stop(min(self.settings.drain_seconds, _LAST_CALLS_SECONDS)))
        self._dispatcher.close()
        self._watcher.close()
        self._progress.close()
        self.shard.close()
        self._maintenance.close()
        self._close_ports()
        if self._web is not None:
            self._web.close()
        tracing.stop()
        log.info("stopped", extra={"version": self.shard.model.version if self.shard.model else 0})

    def _close_ports(self) -> None:
        for port in filter(None, (self._port, self._shards_port)):
            self._loop.run(port.stop(0.0))
        self._loop.close()
        self._health.close()

    def _ask_to_stop(self) -> None:
        self._told.put(_Word.STOP)

    def _is_asked_to_stop(self, seconds: float) -> bool:
        try:
            word = self._told.get(timeout=seconds)
        except queue.Empty:
            return False
        if word is _Word.READ_AGAIN:
            log.info("SIGHUP: certificates and tokens are read again if they have changed; the server goes on")
            self._watcher.look()
        return word is _Word.STOP

    def _failed(self) -> None:
        self.update_health()
        self._ask_to_stop()

    def update_health(self) -> None:
        """Report SERVING while every shard accepts pushes and can make them durable as promised.

        Ask for a restart if a journal is damaged beyond repair by a running server. Any thread may call this.
        """
        with self._reporting:  # so that the last report has the state of the shard then, or a later one
            self._report_health()

    def _report_health(self) -> None:
        has_started, shared = bool(self.address), self._shared_health
        serves = self._serving and self._accepts_pushes()
        is_broken = has_started and self.shard.durability.is_broken
        shared.note(self._place, has_started=has_started, serves=serves, is_broken=is_broken)
        counts_all = shared.all_have_started
        for name in ("", SERVICE.full_name):
            self._health.set(name, serving=shared.all_serve)
        self._health.set(LIVENESS, serving=not shared.is_broken)
        if counts_all:
            shared.note_counts_all(self._place)

    def _accepts_pushes(self) -> bool:
        shard = self.shard
        is_open = not shard.drain_gate.is_closed and not shard.replaced_by
        return shard.durability.is_healthy and not shard.apply_thread.failed and is_open

    def _listen(self, address: str, flag: str, bind: Callable[[str], int]) -> str:
        return listen(address, flag, bind, self._named_ports())

    def _named_ports(self) -> set[int]:
        """Return the ports that the settings name: no other address may take one before it is bound itself."""
        named = (self.settings.listen, self.settings.health_listen, self.settings.metrics_listen)
        return {split_address(address)[1] for address in named if address}

    def _start_web(self, operators: OperatorCalls) -> str:
        host, port = split_address(self.settings.metrics_listen)
        try:
            pages = application(self._metrics.registry, operators.status, self.shard.progress.history)
            self._web = bind_port(host, port, lambda each: WebServer(host, each, pages), self._named_ports())
        except OSError as error:
            raise StartError(
                f"cannot listen on {self.settings.metrics_listen} (--metrics-listen; empty turns it off): {error}"
            ) from error
        return at_port(self.settings.metrics_listen, self._web.server_port)


def _require_private(folder: Path) -> None:
    """Require that no other user can enter a folder: whoever calls by a socket in it is taken for a shard."""
    try:
        mode = folder.stat().st_mode
    except OSError as error:
        raise StartError(f"cannot listen in {folder} (--coordinator): {error.strerror}") from error
    if mode & 0o077:
        raise StartError(
            f"{folder} has the socket of shards (--coordinator), and others may enter it: chmod 700 {folder}"
        )


def require_coordinator(settings: ServerSettings) -> None:
    """Require that every shard but shard 0 knows shard 0, and can check its certificate; raises :class:`StartError`."""
    if settings.shard_index and not settings.coordinator:
        raise StartError(f"shard {settings.shard_index} follows shard 0: give shard 0's HOST:PORT as --coordinator")
    needs_ca = settings.tls_cert is not None and not settings.coordinator_is_here
    if settings.shard_index and needs_ca and security_of(settings).ca is None:
        raise StartError("shard 0's certificate cannot be checked: give its CA as --coordinator-ca")


def read_secrets(settings: ServerSettings, watcher: FileWatcher) -> tuple[Authenticator, ServerCertificates | None]:
    """Return the authenticator, and the certificates, if there are any; ``watcher`` reads both again.

    Raises :class:`~psservice.rpc.watched_files.SecurityError`.
    """
    authenticator, certificates = Authenticator(settings.tokens, watcher, settings.certificate_roles), None
    if settings.tls_cert and settings.tls_key:
        certificates = ServerCertificates(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        certificates.check()
        watcher.watch(certificates.check)
    return authenticator, certificates


def listen(address: str, flag: str, bind: Callable[[str], int], named: Collection[int] = ()) -> str:
    """Open a port, and return the address with its number; ``bind`` gets its address and returns the number.

    For port 0 it is none of the ``named``. Raises :class:`StartError`.
    """
    try:
        number = bind_port(*split_address(address), lambda each: bind(at_port(address, each)), named)
    except RuntimeError as error:
        raise StartError(
            f"cannot listen on {address} ({flag}): is another server running there? Choose another port, or 0 for any"
        ) from error
    return at_port(address, number)


def device_of(settings: ServerSettings) -> torch.device:
    """Return the device that ``--device`` means here; raises :class:`StartError` if it is not there.

    Shards of a machine with several GPUs that are given none of them by number take turns.
    """
    count = torch.cuda.device_count() if settings.device != "cpu" else 0
    if settings.device == "cpu" or (settings.device == "auto" and not count):
        return torch.device("cpu")
    _, _, number = settings.device.partition(":")
    index = int(number) if number else settings.shard_index % max(1, count)
    if index >= count:
        raise StartError(f"device {settings.device} is not there ({count} CUDA devices found); use --device cpu")
    return torch.device("cuda", index)
