"""Shards as processes that can be killed and started again: same ports, same data directory."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO

from verify.cluster.release_before import environment, python
from verify.failpoint import boots, failed_syncs, skewed_clock

_START_SECONDS = 40.0
_STOP_SECONDS = 40.0
_LOWEST_PORT, _HIGHEST_PORT = 30_000, 32_700
"""Above the ports of servers that nobody names, below those of outgoing connections: both could take a dead one."""
_claims: dict[int, socket.socket] = {}


def end_on_sigterm() -> None:
    """Let this process end on SIGTERM as on Ctrl-C: every block is left in order, and every child with it."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)


class StartFailedError(Exception):
    """A server ended, or did not come up.

    Attributes:
        status: with which it ended; ``None`` where it hangs.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Servers:
    """All shards of one run.

    Args:
        shards: how many.
        data_dir: theirs.
        directory: where logs and clocks lie.
        **settings: of ``psservice serve``, by name.

    Attributes:
        told: of each shard that has started: the addresses that it listens on, by purpose.
        syncs: of each shard: the file of :mod:`verify.failpoint.failed_syncs`.
        boot: the file of :mod:`verify.failpoint.boots`, of all shards: one machine.
        coordinator: where the shards dial shard 0; its own address unless another one is set.
        packages: folder from which shards that start from now on import psservice; ``None``: this repository's.
    """

    def __init__(self, shards: int, data_dir: Path, directory: Path, **settings: object) -> None:
        """Choose the ports; nothing is started yet."""
        self.shards = shards
        self.ports = free_ports(shards)
        self.coordinator = self.addresses[0]
        self.clocks = [directory / f"clock-{index}" for index in range(shards)]
        for clock in self.clocks:
            skewed_clock.set_error(clock, 0.0)
        self.syncs = [directory / f"syncs-{index}" for index in range(shards)]
        for syncs in self.syncs:
            failed_syncs.set_error(syncs, 0)
        self.boot = directory / "boot-id"
        boots.keep(self.boot)
        self.data_dir = data_dir
        self.packages: Path | None = None
        self.told: dict[int, dict[str, str]] = {}
        self._settings = {
            "data_dir": data_dir,
            "metrics_listen": "127.0.0.1:0",
            "health_listen": "127.0.0.1:0",
            "device": "cpu",
        } | settings
        self.log_path = directory / "servers.log"
        self._log = self.log_path.open("ab", buffering=0)
        self._scribes: dict[int, threading.Thread] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ready: dict[int, int] = {}

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self.ports]

    def folder(self, shard: int) -> Path:
        """Directory of a shard, inside the data directory."""
        return self.data_dir / f"shard-{shard}-of-{self.shards}"

    def pid(self, shard: int) -> int:
        """Process id of a shard."""
        return self._processes[shard].pid

    def start(self, shard: int, **more: object) -> None:
        """Start a shard, with more settings than all have; :meth:`await_ready` comes after it."""
        read_end, write_end = os.pipe()
        settings = (
            self._settings
            | more
            | {
                "listen": self.addresses[shard],
                "shard_index": shard,
                "num_shards": self.shards,
                "coordinator": self.coordinator,
                "ready_fd": write_end,
                "parent_pid": os.getpid(),
                "log_format": "json",
                "log_level": "warning",
            }
        )
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        process = self._processes[shard] = subprocess.Popen(
            [
                *python(self.packages),
                "-m",
                "verify.failpoint.serve",
                str(self.clocks[shard]),
                str(self.syncs[shard]),
                str(self.boot),
                "serve",
                *flags,
            ],
            pass_fds=(write_end,),
            env=environment(self.packages),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.close(write_end)
        self._ready[shard] = read_end
        assert process.stdout is not None
        self._scribes[shard] = threading.Thread(target=self._write_down, args=(process.stdout,), daemon=True)
        self._scribes[shard].start()

    def _write_down(self, said: IO[bytes]) -> None:
        """Keep what a server says: through a pipe, so that a limit on its files does not silence it."""
        with said:
            for line in said:
                self._log.write(line)

    def await_ready(self, shard: int) -> None:
        """Wait until a shard serves.

        Raises:
            StartFailedError: it ended instead, or takes too long.
        """
        with os.fdopen(self._ready.pop(shard)) as stream:
            readable, _, _ = select.select([stream], [], [], _START_SECONDS)
            line = stream.readline() if readable else ""
        if not line:
            if not readable:
                self._processes[shard].send_signal(signal.SIGABRT)  # its log then says where it hangs
            ended = self._end(shard)
            why = f"ended with status {ended}" if readable else f"is not there after {_START_SECONDS:.0f} s"
            raise StartFailedError(f"shard {shard} {why}; see {self.log_path}", ended if readable else None)
        self.told[shard] = json.loads(line)
        assert self.told[shard]["address"] == self.addresses[shard]

    def kill(self, shard: int) -> None:
        """As the out-of-memory killer does it, at whatever it is doing."""
        with contextlib.suppress(KeyError):
            os.close(self._ready.pop(shard))
        self._processes[shard].kill()
        self._end(shard)

    def terminate(self, shard: int, seconds: float) -> int | None:
        """Tell a shard to end, with ``SIGTERM``; return its exit status, ``None`` where it has not ended in time."""
        self._processes[shard].send_signal(signal.SIGCONT)
        self._processes[shard].send_signal(signal.SIGTERM)
        try:
            return self._processes[shard].wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def _end(self, shard: int) -> int:
        """Wait until a shard has ended and all that it said is written down; return its status."""
        status = self._processes[shard].wait()
        self._scribes[shard].join()
        return status

    def stop(self) -> list[int]:
        """Tell all to end, with ``SIGTERM``; return their exit statuses."""
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGTERM)
        end = time.monotonic() + _STOP_SECONDS
        for process in self._processes.values():
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        return [self._end(shard) for shard in self._processes]

    def has_said(self, words: str) -> bool:
        """Tell whether any of them has said these words so far."""
        return words in self.log_path.read_text(encoding="utf-8", errors="replace")

    def errors(self) -> list[str]:
        """Return what the servers logged as errors, or said in another form than a log line."""
        found = []
        for line in self.log_path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                found.append(line)
                continue
            if str(entry.get("level", entry.get("levelname", ""))).lower() in ("error", "critical"):
                found.append(line)
        return found

    def __enter__(self) -> "Servers":
        """Start all, and wait for them."""
        try:
            for shard in range(self.shards):
                self.start(shard)
            for shard in range(self.shards):
                self.await_ready(shard)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what still runs."""
        for shard, process in self._processes.items():
            if process.poll() is None:
                self.kill(shard)
        for read_end in self._ready.values():
            os.close(read_end)
        self._ready.clear()
        self._log.close()


def free_ports(count: int) -> list[int]:
    """Find ports on loopback that nobody listens on, and that no other process finds here before this one has ended."""
    found: list[int] = []
    for port in range(_LOWEST_PORT, _HIGHEST_PORT):
        if port not in _claims and _claim(port) and _is_free(port):
            found.append(port)
        if len(found) == count:
            return found
    raise StartFailedError("no port is free")


def _claim(port: int) -> bool:
    """Bind a name that the system frees with this process; one process has it at a time."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0sparseps-port-{port}")
    except OSError:
        claim.close()
        return False
    _claims[port] = claim
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as trial:
        try:
            trial.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
