"""Two hosts on this machine and a line between them that is slow, long, lossy and cut: packets pass here.

``tc`` has no delay here, so both ends are TUN devices, each in a network namespace of its own, and this process is the
line: every IP packet waits for its place at the rate, then for the delay, and is dropped with a probability, where the
queue is full, or while the line is cut. TCP at both ends is the kernel's. Needs root.
"""

import fcntl
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections import deque
from types import TracebackType

from benchmarks.network.lab import inside

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_PACKET_BYTES = 2048
_SECONDS = 20.0


class LongLine:
    """Hosts ``server`` (10.78.0.1) and ``workers`` (10.78.0.2); a context manager.

    Args:
        bits_per_second: each way.
        delay_seconds: one way.
        loss: share of the packets that are lost, each way.
        queue_seconds: what the line's queue holds before it drops.

    Attributes:
        cut: whether nothing passes now.
        bytes_up: to the server, that have passed.
        bytes_down: to the workers.
    """

    server = "10.78.0.1"

    def __init__(
        self, bits_per_second: float, delay_seconds: float, loss: float, queue_seconds: float = 0.5, seed: int = 1
    ) -> None:
        self._rate, self._delay, self._loss = bits_per_second / 8, delay_seconds, loss
        self._queue_seconds, self._seed = queue_seconds, seed
        self._spaces = {host: f"sparseps-{os.getpid()}-{host}" for host in ("server", "workers")}
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._ends: list[int] = []
        self.cut = False
        self.bytes_up = self.bytes_down = 0

    def inside(self, host: str) -> list[str]:
        """Return what a command begins with that runs on a host."""
        return ["ip", "netns", "exec", self._spaces[host]]

    def __enter__(self) -> "LongLine":
        """Make both hosts, and let packets pass."""
        try:
            for number, space in enumerate(self._spaces.values(), start=1):
                _ip("netns", "add", space)
                self._ends.append(inside(space, _open_tun))
                for words in (
                    ("link", "set", "lo", "up"),
                    ("address", "add", f"10.78.0.{number}/24", "dev", "line"),
                    ("link", "set", "line", "up"),
                ):
                    _ip("-n", space, *words)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        server, workers = self._ends
        for source, target, name in ((workers, server, "bytes_up"), (server, workers, "bytes_down")):
            thread = threading.Thread(target=self._carry, args=(source, target, name), daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(_SECONDS)
        for end in self._ends:
            os.close(end)
        for space in self._spaces.values():
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, timeout=_SECONDS)

    def _carry(self, source: int, target: int, counter: str) -> None:
        rng = random.Random(f"{self._seed} {counter}")
        waiting: deque[tuple[float, bytes]] = deque()
        free = 0.0  # when the line has sent what is in its queue
        while not self._stop.is_set():
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                packet = waiting.popleft()[1]
                if not self.cut:
                    os.write(target, packet)
                    setattr(self, counter, getattr(self, counter) + len(packet))
            pause = min(0.1, max(0.0, waiting[0][0] - now)) if waiting else 0.1
            if not select.select([source], [], [], pause)[0]:
                continue
            packet = os.read(source, _PACKET_BYTES)
            now = time.monotonic()
            if self.cut or rng.random() < self._loss or free - now > self._queue_seconds:
                continue
            free = max(now, free) + len(packet) / self._rate
            waiting.append((free + self._delay, packet))


def _open_tun() -> int:
    end = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", b"line", _IFF_TUN | _IFF_NO_PI))
    return end


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=_SECONDS)
