"""Servers on this machine: ``python -m psservice serve`` as child processes on loopback."""

import fcntl
import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self

from psclient.errors import ConfigurationError, ServerUnreachableError
from psclient.settings import sibling_workers
from psclient.whole_numbers import whole_number

log = logging.getLogger("psclient")

_START_SECONDS = 60.0
_STOP_SECONDS = 30.0
_ROOT = Path(__file__).parents[2]
"""The folder of the packages."""


class LocalServer:
    """One or more shards, started as processes and stopped at the end of the ``with`` block (or at exit).

    Settings are those of ``psservice serve`` (``docs/reference/settings.md``) by name:
    ``LocalServer(down_mode="topk")``. A child ends by itself when this process is gone.

    The parameters are on the host, unless ``device`` names another place: a GPU of this machine is for training.
    ``device="auto"`` takes a GPU, also if a worker trains on it; several shards take turns at all of them.

    Args:
        shards: number of server processes.
        log_to: where their logs go: a file open for writing, or ``None`` to pass warnings on to this process's stderr.
        **settings: settings of the server.

    Raises:
        ConfigurationError: the server refuses a setting; the message is the server's.
        ServerUnreachableError: it does not come up in a minute.
    """

    def __init__(self, shards: int = 1, log_to: IO[str] | None = None, **settings: object) -> None:
        shards = whole_number(shards, "shards must be a number of servers", 1)
        self._log_to = log_to
        self._owner = os.getpid()
        self._settings: dict[str, object] = {"log_format": "text", "log_level": "warning", "listen": "127.0.0.1:0"}
        self._settings |= {"health_listen": "", "metrics_listen": "127.0.0.1:0", "device": "cpu"} | settings
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if shards > 1:  # with the socket on which the others follow shard 0
            self._folder = tempfile.TemporaryDirectory(prefix="psclient-", ignore_cleanup_errors=True)
            self._settings["coordinator"] = f"unix:{self._folder.name}/shard-0"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.addresses, self.metrics_addresses, self.health_addresses = ([""] * shards for _ in range(3))
        try:
            ready = [self._start(index) for index in range(shards)]  # all at once
            for index in range(shards):
                self._await_ready(index, ready[index])
        except BaseException:
            self.stop()
            raise

    @property
    def server(self) -> str:
        """The addresses as the ``server=`` of an optimizer."""
        return ",".join(self.addresses)

    def restart(self, index: int = 0) -> None:
        """Start shard ``index`` again at its old addresses after its process has ended.

        With free ports of its own choice it could take that of another shard that is to be started again too.
        """
        self.processes[index].wait(_STOP_SECONDS)
        self._await_ready(
            index,
            self._start(
                index,
                listen=self.addresses[index],
                metrics_listen=self.metrics_addresses[index],
                health_listen=self.health_addresses[index],
            ),
        )

    def stop(self) -> None:
        """Stop the processes: SIGTERM, and SIGKILL if that is not heeded in time; one time for all of them.

        Does nothing in a forked child.
        """
        if os.getpid() != self._owner:
            return
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_SECONDS
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("server process %d did not stop; killing it", process.pid)
                process.kill()
                process.wait()
        if self._folder is not None:
            self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self, index: int, **addresses: str) -> int:
        """Start a shard's process, at these addresses; return the pipe on which it says that it serves."""
        read_end, write_end = _pipe()
        settings = (
            self._settings
            | addresses
            | {
                "shard_index": index,
                "num_shards": len(self.addresses),
                "ready_fd": write_end,
                "parent_pid": os.getpid(),
            }
        )
        flags = [_flag(name, value) for name, value in settings.items() if value is not None]
        try:
            self.processes[index : index + 1] = [spawn(flags, write_end, self._log_to)]
        finally:
            os.close(write_end)
        return read_end

    def _await_ready(self, index: int, ready: int) -> None:
        started = time.monotonic()
        with os.fdopen(ready) as stream:
            readable, _, _ = select.select([stream], [], [], _START_SECONDS)
            line = stream.readline() if readable else ""
        if line:
            found: dict[str, str] = json.loads(line)
            self.addresses[index] = found["address"]
            self.metrics_addresses[index], self.health_addresses[index] = found["metrics"], found["health"]
            return
        if readable:
            status = self.processes[index].wait()
            raise ConfigurationError(f"the embedded server ended with status {status}; its message is above")
        raise ServerUnreachableError(
            "the embedded server", time.monotonic() - started, "it did not come up", "Its log is above"
        )


def spawn(flags: Sequence[str], ready_fd: int, log_to: IO[str] | None) -> subprocess.Popen[bytes]:
    """Start ``psservice serve`` with these flags; it inherits ``ready_fd``, and ``log_to`` or else this stderr."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "psservice", "serve", *flags],  # -P: no module of the working directory
        pass_fds=(ready_fd,),
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=None if sys.stdout else subprocess.DEVNULL,  # closed: its number may be that of another file by now
        stderr=log_to if log_to or sys.stderr else subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches the training script first, which then stops its server
    )


def _pipe() -> tuple[int, int]:
    """Return a pipe whose ends have none of the numbers of the standard streams, which may be closed here."""
    ends = os.pipe()
    above = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3) for end in ends)
    for end in ends:
        os.close(end)
    return above[0], above[1]


def _environment() -> dict[str, str] | None:
    """Return the environment of a server: this one's, and the packages' folder if they are not installed.

    A script finds packages that are not installed in its own folder or its working directory, where a server looks for
    nothing else.
    """
    if _ROOT not in (Path(sys.path[0]).absolute(), Path.cwd()):
        return None
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))}


def _flag(name: str, value: object) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={value}"


def start_alone() -> LocalServer:
    """Start a server for a worker that is alone; refused if the environment says that it is one of several."""
    variable = sibling_workers()
    if variable is not None:
        raise ConfigurationError(
            f'{variable} says that this is one of several workers, and server="local" starts a server for one: each '
            'would train alone. Start `psservice serve` and pass server="HOST:PORT" or set PSCLIENT_SERVER'
        )
    server = LocalServer()
    log.info("a server was started for this process alone at %s, and ends with it", server.server)
    return server
