"""The process: ports, threads and the way from start to a clean end."""

import json
import logging
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import grpc
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pscore import tracing
from pscore.channels import is_loopback
from pscore.tracing import TracingError
from pscore.v1 import parameter_server_pb2 as pb
from pscore.v1.parameter_server_pb2_grpc import add_ParameterServerServiceServicer_to_server
from pscore.version import __version__
from psservice import readings
from psservice.durability.files import StorageError
from psservice.engine import Engine
from psservice.metrics import Metrics
from psservice.operatorservicer import Process
from psservice.security import CertificateFiles, Gate, SecurityError, TokenFile
from psservice.servicer import ParameterServerServicer
from psservice.settings import ServerSettings, shown, split_address
from psservice.tracedcalls import TracedCalls
from psservice.upkeep import Upkeep
from psservice.watchdog import Watchdog, WatchedCalls
from psservice.web.pages import application
from psservice.web.server import WebServer

log = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ParameterServerService"].full_name

LIVENESS = "liveness"
"""The health service's name for "no restart is needed": not whether it serves. Kubernetes restarts a pod by it."""

_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a second server on the same port is an error, not a silent share
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
_POLL_SECONDS = 0.5
_LAST_ANSWERS_SECONDS = 1.0  # of a shard that has failed: for the answers that say so
_MOST_QUEUED_CALLS = 4  # per thread, before gRPC itself answers RESOURCE_EXHAUSTED


class StartError(Exception):
    """The server cannot start: a port is taken, a device or a file is missing."""


class ShardFailedError(Exception):
    """An update failed half-way, and the server has stopped: started again, it recovers."""


class Server:
    """One running shard: the service, its health, and its metrics and status page, each on a port of its own."""

    def __init__(self, settings: ServerSettings) -> None:
        """Bind every port and start to serve; the health service answers first, before a journal is replayed.

        Raises:
            StartError: with what is missing.
        """
        self.settings = settings
        if settings.compute_threads:
            torch.set_num_threads(settings.compute_threads)
        self._metrics = Metrics()
        self._health = health.HealthServicer()
        self._web: WebServer | None = None
        self._stop = threading.Event()
        self._serving = False
        self._healthy = True
        self._look_at_health()
        self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        self._health_server, self.health_address = self._start_health()
        try:
            self._start_service()
        except BaseException:
            if self._health_server is not None:
                self._health_server.stop(None)
            raise
        self._serving = True
        self._look_at_health()

    def _start_service(self) -> None:
        """Bring the shard back to where it was, and open the ports of workers and metrics."""
        settings = self.settings
        try:
            if settings.tracing:
                tracing.start("psservice", f"shard-{settings.shard_index}")
            gate = Gate(TokenFile(settings.tokens) if settings.tokens else None)
            credentials = _credentials(settings)
            self.engine = Engine(settings, resolve_device(settings.device), self._metrics, self._durable, self._failed)
        except (StorageError, SecurityError, TracingError) as error:
            raise StartError(str(error)) from error
        self.engine.persistence.checkpoints.keys = gate.server_keys
        self._watchdog = Watchdog(settings.stream_idle_seconds, settings.stream_seconds, self._metrics)
        readings.follow(self.engine, self._watchdog)
        interceptors: list[grpc.ServerInterceptor] = [TracedCalls()] if settings.tracing else []
        self._server = _grpc_server(
            settings.rpc_threads,
            settings.rpc_threads * _MOST_QUEUED_CALLS,
            *interceptors,
            WatchedCalls(self._watchdog),
        )
        servicer = ParameterServerServicer(self.engine, gate, Process(self._look_at_health, self._stop.set))
        add_ParameterServerServiceServicer_to_server(servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if self._wants_reflection():
            reflection.enable_server_reflection(
                (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
            )
        self.address = _bind(self._server, settings.listen, "--listen", credentials)
        self.metrics_address = self._start_web(servicer) if settings.metrics_listen else ""
        self._server.start()
        self._upkeep = Upkeep(lambda: self.engine.layout.size if self.engine.layout else 0)

    def run(self) -> None:
        """Announce the addresses, wait for SIGTERM, SIGINT or the parent's end, then drain and stop.

        Raises:
            ShardFailedError: an update failed half-way, and the server has stopped.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        log.info(
            "serving",
            extra={
                "address": self.address,
                "health": self.health_address,
                "metrics": self.metrics_address,
                "device": str(self.engine.device),
                "version": __version__,
                "settings": shown(self.settings),
            },
        )
        plain = (
            ["health_listen", "metrics_listen"]
            if self.settings.tls_cert
            else ["listen", "health_listen", "metrics_listen"]
        )
        for name in plain:
            address = getattr(self.settings, name)
            if address and not is_loopback(split_address(address)[0]):
                log.warning("reachable beyond this machine, in plaintext", extra={name: address})
        if self.settings.ready_fd is not None:
            ready = {"address": self.address, "health": self.health_address, "metrics": self.metrics_address}
            with os.fdopen(self.settings.ready_fd, "w") as stream:
                stream.write(json.dumps(ready) + "\n")
        parent = self.settings.parent_pid
        while not self._stop.wait(_POLL_SECONDS):
            if parent is not None and os.getppid() != parent:
                log.info("the parent process is gone")
                break
            self.check_liveness()
        self.stop()
        if self.engine.writer.failed:
            raise ShardFailedError("an update failed half-way; start the server again and it recovers")

    def check_liveness(self) -> None:
        """Say so where the journal is beyond what a running server can mend."""
        if self.engine.persistence.is_broken:
            self._health.set(LIVENESS, health_pb2.HealthCheckResponse.NOT_SERVING)

    def stop(self) -> None:
        """NOT_SERVING, refuse new pushes, finish what is committed, stop."""
        log.info("draining")
        self._serving = False
        self.engine.doorway.close()
        self._look_at_health()
        self._server.stop(_LAST_ANSWERS_SECONDS if self.engine.writer.failed else self.settings.drain_seconds).wait()
        self._watchdog.close()
        self.engine.close()
        self._upkeep.close()
        if self._health_server is not None:
            self._health_server.stop(None).wait()
        if self._web is not None:
            self._web.close()
        tracing.stop()
        log.info("stopped", extra={"version": self.engine.model.version if self.engine.model else 0})

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop.set()

    def _durable(self, healthy: bool) -> None:
        self._metrics.durable.set(healthy)
        self._healthy = healthy
        self._look_at_health()

    def _failed(self) -> None:
        self._healthy = False
        self._look_at_health()
        self._stop.set()

    def _look_at_health(self) -> None:
        """Say SERVING where pushes are taken and can be written down as promised."""
        states = health_pb2.HealthCheckResponse
        serves = self._serving and self._healthy and not self.engine.doorway.is_closed
        for name in ("", SERVICE_NAME):
            self._health.set(name, states.SERVING if serves else states.NOT_SERVING)

    def _wants_reflection(self) -> bool:
        if self.settings.reflection == "auto":
            return is_loopback(split_address(self.settings.listen)[0])
        return self.settings.reflection == "on"

    def _start_health(self) -> tuple[grpc.Server | None, str]:
        """Start the health service on its own port; return it and its address, or nothing if it is turned off."""
        if not self.settings.health_listen:
            return None, ""
        server = _grpc_server(2, None)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        address = _bind(server, self.settings.health_listen, "--health-listen")
        server.start()
        return server, address

    def _start_web(self, servicer: ParameterServerServicer) -> str:
        host, port = split_address(self.settings.metrics_listen)
        try:
            self._web = WebServer(host, port, application(self._metrics.registry, servicer.report.message))
        except OSError as error:
            raise StartError(
                f"cannot listen on {self.settings.metrics_listen} (--metrics-listen; empty turns it off): {error}"
            ) from error
        return f"[{host}]:{self._web.port}" if ":" in host else f"{host}:{self._web.port}"


def resolve_device(name: str) -> torch.device:
    """Turn ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` into a device.

    Raises:
        StartError: CUDA is asked for and not there.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise StartError(
            f"device {name} is not there ({torch.cuda.device_count()} CUDA devices found); use --device cpu"
        )
    return device


def _grpc_server(threads: int, most_calls: int | None, *interceptors: grpc.ServerInterceptor) -> grpc.Server:
    pool = ThreadPoolExecutor(threads, thread_name_prefix="rpc")
    return grpc.server(pool, interceptors=list(interceptors), options=_OPTIONS, maximum_concurrent_rpcs=most_calls)


def _credentials(settings: ServerSettings) -> grpc.ServerCredentials | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return CertificateFiles(settings.tls_cert, settings.tls_key, settings.tls_client_ca).credentials()


def _bind(server: grpc.Server, address: str, flag: str, credentials: grpc.ServerCredentials | None = None) -> str:
    host, _ = split_address(address)
    try:
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError as error:
        raise StartError(
            f"cannot listen on {address} ({flag}): is another server running there? Choose another port, or 0 for any"
            + ("; or do --tls-cert and --tls-key not belong together?" if credentials else "")
        ) from error
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
