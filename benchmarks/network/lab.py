"""Hosts on a network of known rate, on this machine: network namespaces, veth pairs, a bridge, and tc's token buckets.

Every host has a card of its own; both ends of its cable are shaped, so each way of each card has the rate. Needs root.
Everything goes away at the end of the ``with`` block, on failure and on Ctrl-C too; what a killed run has left behind
is removed by the next.
"""

import ctypes
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import TypeVar

import psutil

T = TypeVar("T")

_PREFIX = "sparseps-"
_CLONE_NEWNET = 0x40000000
_SECONDS = 20.0
_PORT = 5999
_WARM_SHARE = 0.3


class LabError(Exception):
    """The network cannot be made here; the message says why."""


class Lab:
    """Hosts ``0 … n-1`` around one switch; a context manager.

    Args:
        hosts: how many.
        bits_per_second: of every card, each way.
    """

    def __init__(self, hosts: int, bits_per_second: float) -> None:
        reason = unavailable()
        if reason:
            raise LabError(reason)
        _sweep()
        self._stack = ExitStack()
        self._name = f"{_PREFIX}{os.getpid()}"
        try:
            self._connect(hosts, bits_per_second)
        except BaseException:
            self._stack.close()
            raise

    def space(self, host: int) -> str:
        """Name a host's namespace."""
        return f"{self._name}-{host}"

    @staticmethod
    def address(host: int) -> str:
        return f"10.77.0.{host + 1}"

    def calibrate(self, source: int, target: int, seconds: float) -> float:
        """Return the bits a second that TCP moves from one host to another, its beginning left out."""
        listener = inside(self.space(target), lambda: socket.create_server((self.address(target), _PORT)))
        sender = inside(
            self.space(source), lambda: socket.create_connection((self.address(target), _PORT), timeout=_SECONDS)
        )
        with listener, sender, listener.accept()[0] as receiver:
            receiver.settimeout(_SECONDS)
            stop = threading.Event()
            thread = threading.Thread(target=_pour, args=(sender, stop))
            thread.start()
            try:
                _drain(receiver, _WARM_SHARE * seconds)
                received, taken = _drain(receiver, seconds)
            finally:
                stop.set()
                receiver.close()
                thread.join()
        return 8 * received / taken

    def __enter__(self) -> "Lab":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def received(self, host: int) -> int:
        """Return the bytes that have come to a host."""
        link = json.loads(ip("-n", self.space(host), "-s", "-j", "link", "show", "card"))[0]
        return int(link["stats64"]["rx"]["bytes"])

    def _connect(self, hosts: int, bits_per_second: float) -> None:
        switch = self._space("switch")
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for host in range(hosts):
            self._plug(self._space(str(host)), switch, host, bits_per_second)

    def _space(self, of: str) -> str:
        name = f"{self._name}-{of}"
        ip("netns", "add", name)
        self._stack.callback(ip, "netns", "del", name)
        return name

    def _plug(self, space: str, switch: str, host: int, bits_per_second: float) -> None:
        port = f"port{host}"
        ip("link", "add", "card", "netns", space, "type", "veth", "peer", "name", port, "netns", switch)
        ip("-n", switch, "link", "set", port, "master", "bridge", "up")
        ip("-n", space, "address", "add", f"{self.address(host)}/24", "dev", "card")
        ip("-n", space, "link", "set", "card", "up")
        ip("-n", space, "link", "set", "lo", "up")
        for where, device in ((space, "card"), (switch, port)):
            # A bucket of 4 ms, and a queue of half a second: the rate is reached, and nothing is dropped at once.
            burst, queue = max(16_000, int(bits_per_second / 8 * 0.004)), int(bits_per_second / 8 * 0.5) + 64_000
            shape = ("tbf", "rate", f"{bits_per_second:.0f}bit", "burst", str(burst), "limit", str(queue))
            _run("tc", "-n", where, "qdisc", "add", "dev", device, "root", *shape)


def unavailable() -> str:
    """Say why there can be no lab here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{', '.join(missing)} (iproute2) missing" if missing else ""


def enter(space: str) -> None:
    """Move the calling thread, and what it starts from now on, into a namespace."""
    library = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{space}", "rb") as file:
        if library.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {space}")


def inside(space: str, action: Callable[[], T]) -> T:
    """Do something in a namespace and return its result; sockets and processes that it makes stay there."""
    found: list[T] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            enter(space)
            found.append(action())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)  # a namespace belongs to a thread: this one ends, the caller's stays
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def _pour(sender: socket.socket, stop: threading.Event) -> None:
    data = bytes(64 << 10)
    try:
        while not stop.is_set():
            sender.sendall(data)
    except OSError:
        return  # the receiver has seen enough


def _drain(receiver: socket.socket, seconds: float) -> tuple[int, float]:
    received, started = 0, time.monotonic()
    while (taken := time.monotonic() - started) < seconds:
        received += len(receiver.recv(1 << 20))
    return received, taken


def _sweep() -> None:
    """Remove the namespaces of runs that were killed."""
    for line in ip("netns", "list").splitlines():
        name = line.split()[0] if line.split() else ""
        owner = name.removeprefix(_PREFIX).partition("-")[0]
        if name.startswith(_PREFIX) and owner.isdigit() and not psutil.pid_exists(int(owner)):
            ip("netns", "del", name)


def ip(*words: str) -> str:
    """Run ``ip``, and return what it says."""
    return _run("ip", *words)


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS).stdout
    except subprocess.CalledProcessError as error:
        raise LabError(f"{' '.join(command)}: {error.stderr.strip()}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"{' '.join(command)}: {error}") from error
