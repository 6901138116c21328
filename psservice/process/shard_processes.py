"""``psservice serve --shards N``: a process for each shard of one run, forked, watched, and ended together."""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass

from psservice.process.ready import tell_ready
from psservice.process.shared_health import SharedHealth
from psservice.rpc.ports import bind_port, hold_port
from psservice.settings import ServerSettings, at_port, split_address

log = logging.getLogger(__name__)

Serve = Callable[[ServerSettings, SharedHealth], int]
"""Serves one shard in this process until it is told to stop, and returns the exit status."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP)
_POLL_SECONDS, _START_POLL_SECONDS = 0.5, 0.02
_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS = 0.5, 30.0
_STABLE_SECONDS = 60.0  # after which an end counts as the first one again
_MOST_RESTARTS = 6  # in a row


@dataclass
class _Life:
    """One shard's process now, how often in a row it was started again, and when that is due (monotonic seconds)."""

    pid: int = 0
    started: float = 0.0
    restarts: int = 0
    due: float | None = None
    has_started: bool = False


class ShardProcesses:
    """Forks a process for each shard, before anything in this one has started a thread.

    A shard that ends unasked is started again, after a delay that doubles with each end in a row. All end if one
    cannot start at first, ends too often, or was told to stop; and if this process is told so, or its parent ends.
    """

    def __init__(self, settings: ServerSettings, serve: Serve) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # run hears them: from here on there is a folder to clean
        self._folder = tempfile.TemporaryDirectory(prefix="psservice-")  # nobody else may enter it
        coordinator = f"unix:{self._folder.name}/shard-0"
        self._settings = _with_ports(settings).model_copy(update={"coordinator": coordinator})
        self._serve = serve
        self._health = SharedHealth(settings.shards)
        self._lives = [_Life() for _ in range(settings.shards)]
        self._ready_fd = settings.ready_fd
        self._is_announced = self._is_stopping = False
        self._status = 0

    def run(self) -> int:
        """Serve until all processes have ended; return 0, or the first shard's status that ended all.

        A status is 128 and the number of the signal if a signal has killed the shard, as shells have it.
        """
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent that ignores it would have the kernel forget statuses
        for shard in range(len(self._lives)):
            self._start(shard)
        parent = self._settings.parent_pid
        while not self._is_stopping or any(life.pid for life in self._lives):
            heard = signal.sigtimedwait(_SIGNALS, _POLL_SECONDS if self._is_announced else _START_POLL_SECONDS)
            if heard is not None and heard.si_signo == signal.SIGHUP:
                self._pass_on(signal.SIGHUP)
            elif heard is not None and heard.si_signo != signal.SIGCHLD:
                self._stop("told to stop")
            elif parent is not None and os.getppid() != parent and not self._is_stopping:
                self._stop("the parent process is gone")
            self._reap()
            for shard, life in enumerate(self._lives):
                life.has_started |= self._health.has_started(shard)
                if life.due is not None and time.monotonic() >= life.due:
                    self._start(shard)
            if not self._is_announced and self._health.all_count_all:
                self._announce()
        self._folder.cleanup()
        log.info("all shards have ended", extra={"status": self._status})
        return self._status

    def _start(self, shard: int) -> None:
        settings = self._settings.of_shard(shard).model_copy(update={"ready_fd": None, "parent_pid": os.getpid()})
        life = self._lives[shard]
        life.due, life.started = None, time.monotonic()
        try:
            life.pid = os.fork()
        except OSError as error:  # too many processes, or too little memory, which others may give back
            log.error("no process for a shard", extra={"shard": shard, "error": str(error)})
            self._note_end(shard, life, 1)
            return
        if life.pid:
            return
        status = 1
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            if self._ready_fd is not None:
                os.close(self._ready_fd)
            status = self._serve(settings, self._health)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)  # whatever the parent's frames would do is the parent's

    def _reap(self) -> None:
        """Take note of every process that has ended."""
        while any(life.pid for life in self._lives):
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            for shard, life in enumerate(self._lives):
                if life.pid == pid:
                    life.pid = 0
                    self._note_end(shard, life, os.waitstatus_to_exitcode(wait_status))

    def _note_end(self, shard: int, life: _Life, code: int) -> None:
        """Start a shard again that has ended unasked, or end all."""
        life.has_started |= self._health.has_started(shard)
        self._health.note(shard, has_started=False, serves=False, is_broken=False)
        status = code if code >= 0 else 128 - code
        if self._is_stopping:
            self._status = self._status or status
            return
        if time.monotonic() - life.started > _STABLE_SECONDS:
            life.restarts = 0
        about = {"shard": shard, "status": status}
        if not status:
            self._stop("a shard was told to stop", **about)
        elif not life.has_started or life.restarts >= _MOST_RESTARTS:
            self._status = status
            self._stop("a shard cannot start" if not life.has_started else "a shard has ended too often", **about)
        else:
            seconds = min(_LONGEST_DELAY_SECONDS, _FIRST_DELAY_SECONDS * 2**life.restarts)
            life.restarts += 1
            life.due = time.monotonic() + seconds
            log.error("a shard has ended; it is started again", extra={**about, "seconds": seconds})

    def _stop(self, why: str, **about: int) -> None:
        """Have every shard drain and end."""
        level = logging.ERROR if self._status else logging.INFO
        log.log(level, "stopping all shards", extra={"why": why, **about})
        self._is_stopping = True
        for life in self._lives:
            life.due = None
        self._pass_on(signal.SIGTERM)

    def _pass_on(self, number: signal.Signals) -> None:
        for life in self._lives:
            if life.pid:
                os.kill(life.pid, number)

    def _announce(self) -> None:
        """Tell that all shards serve."""
        self._is_announced = True
        settings = self._settings
        addresses = {
            "address": settings.listen, "health": settings.health_listen, "metrics": settings.metrics_listen
        }  # fmt: skip
        log.info("all shards serve", extra={**addresses, "shards": settings.shards})
        if self._ready_fd is not None:
            tell_ready(self._ready_fd, addresses)
            self._ready_fd = None


def _with_ports(settings: ServerSettings) -> ServerSettings:
    """Choose free ports if the settings have port 0, so that a shard that is started again has the same ones."""
    chosen: dict[str, str] = {}
    named: set[int] = set()
    counts = {"listen": settings.shards, "metrics_listen": settings.shards, "health_listen": 1}
    addresses = {name: getattr(settings, name) for name in counts if getattr(settings, name)}
    for name, address in addresses.items():
        port = split_address(address)[1]
        named.update(range(port, port + counts[name]))
    with contextlib.ExitStack() as held:  # until all are chosen, so that they differ
        for name, address in addresses.items():
            if split_address(address)[1] == 0:
                host = split_address(address)[0]
                first = bind_port(host, 0, lambda port: _hold(host, port, counts[name], held, named))  # noqa: B023
                chosen[name] = at_port(address, first)
    return settings.model_copy(update=chosen)


def _hold(host: str, first: int, count: int, held: contextlib.ExitStack, named: Collection[int]) -> int:
    """Bind so many ports in a row until ``held`` closes; return the first one.

    Raises ``OSError`` if one is taken, or is among the ``named``, which the settings give to another address.
    """
    if not set(range(first, first + count)).isdisjoint(named):
        raise OSError("a port of another address")
    with contextlib.ExitStack() as bound:
        for port in range(first, first + count):
            bound.enter_context(hold_port(host, port))
        held.push(bound.pop_all())
    return first
