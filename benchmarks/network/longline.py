"""Hosts on this machine and lines between them that are slow, long, lossy and cut: packets pass a process of their own.

``tc`` has no delay here, so each host's card is a TUN device and the process is the switch: every IP packet waits for
its place at the sender's rate, then for the delay, then for its place at the receiver's rate. It is dropped with a
probability, where a queue is full, or while the lines are cut. TCP at both ends is the kernel's. Needs root.
"""

import fcntl
import heapq
import os
import random
import select
import struct
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from benchmarks.harness.children import Child
from benchmarks.network.lab import Lab, inside, ip

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_PACKET_BYTES = 1 << 16
_START_SECONDS, _STOP_SECONDS = 120.0, 20.0
_TOGETHER = 32  # packets that are taken from a card before those that are due are looked at


class LongLine(Lab):
    """Hosts ``0 … n-1`` around one switch with a delay; a context manager.

    Args:
        hosts: how many.
        bits_per_second: of every card, each way.
        delay_seconds: one way.
        loss: share of the packets that are lost.
        queue_seconds: what a card's queue holds before it drops.
        packet_bytes: largest packet.
    """

    def __init__(
        self,
        hosts: int,
        bits_per_second: float,
        delay_seconds: float,
        loss: float = 0.0,
        queue_seconds: float = 0.5,
        packet_bytes: int = 1500,
    ) -> None:
        self._line = (bits_per_second / 8, delay_seconds, loss, queue_seconds)
        self._packet_bytes, self._cut = packet_bytes, False
        super().__init__(hosts, bits_per_second)

    def _connect(self, hosts: int, bits_per_second: float) -> None:
        spaces = [self._space(str(host)) for host in range(hosts)]
        self._switch = self._stack.enter_context(Child("the switch", _switch, spaces, *self._line))
        self._stack.callback(self._switch.tell)
        self._switch.hear(_START_SECONDS)
        for host, space in enumerate(spaces):
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "address", "add", f"{self.address(host)}/24", "dev", "card")
            ip("-n", space, "link", "set", "card", "mtu", str(self._packet_bytes), "up")

    @property
    def cut(self) -> bool:
        """Tell whether nothing passes now."""
        return self._cut

    @cut.setter
    def cut(self, cut: bool) -> None:
        self._cut = cut
        self._switch.tell(cut)


def _switch(
    connection: Connection, spaces: Sequence[str], rate: float, delay: float, loss: float, queue_seconds: float
) -> None:
    """Carry packets until told nothing."""
    cards = [inside(space, _open_tun) for space in spaces]
    connection.send("ready")
    rng, poll, cut = random.Random(1), select.poll(), False
    sent, received = [0.0] * len(cards), [0.0] * len(cards)  # when each card's queue is empty, each way
    waiting: list[tuple[float, int, int, bytes]] = []
    number = 0
    for end in (connection.fileno(), *cards):
        poll.register(end, select.POLLIN)
    host_of = {card: host for host, card in enumerate(cards)}
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 1.0
        for ready, _ in poll.poll(1000 * pause):
            if ready not in host_of:
                cut = connection.recv()
                if cut is None:
                    return
                continue
            for _ in range(_TOGETHER):
                try:
                    packet = os.read(ready, _PACKET_BYTES)
                except BlockingIOError:
                    break
                now, source, target = time.monotonic(), host_of[ready], packet[19] - 1
                if packet[0] >> 4 != 4 or not 0 <= target < len(cards):
                    continue  # not IPv4, or to everybody
                taken = len(packet) / rate
                if cut or rng.random() < loss or sent[source] - now > queue_seconds:
                    continue
                sent[source] = max(now, sent[source]) + taken
                there = sent[source] + delay
                if received[target] - there > queue_seconds:
                    continue
                received[target] = max(there - taken, received[target]) + taken
                number += 1
                heapq.heappush(waiting, (received[target], number, target, packet))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, target, packet = heapq.heappop(waiting)
            if not cut:
                os.write(cards[target], packet)


def _open_tun() -> int:
    card = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(card, _TUNSETIFF, struct.pack("16sH", b"card", _IFF_TUN | _IFF_NO_PI))
    return card
