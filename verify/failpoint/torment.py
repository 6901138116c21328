"""What happens to workers, connections and clocks while servers are killed: one misfortune at a time, as drawn."""

import random
import threading
from collections import Counter
from types import TracebackType
from typing import Protocol

from verify.cluster.servers import Servers
from verify.failpoint import skewed_clock
from verify.failpoint.network import Network

_LONGEST_SKEW_SECONDS = 10 * 365 * 86_400.0


class Victims(Protocol):
    """Workers that can be killed and stopped, by number."""

    def __len__(self) -> int:
        """Count them."""

    def kill(self, number: int) -> None:
        """Kill one at whatever it is doing; another life takes its place."""

    def stop(self, number: int) -> None:
        """Let one stand still."""

    def resume(self, number: int) -> None:
        """Let it go on."""


class Torment:
    """Draws misfortunes until the end of the ``with`` block.

    Args:
        crew: whose workers are killed and stopped.
        network: whose connections are cut.
        servers: whose clocks are moved.
        seed: of all this.
        period: mean seconds between two misfortunes.
        lease: seconds of a worker's lease: some are stopped for longer.
        who: the crew, in words.
    """

    def __init__(
        self,
        crew: Victims,
        network: Network,
        servers: Servers,
        *,
        seed: int,
        period: float,
        lease: float,
        who: str = "workers",
    ) -> None:
        self._crew, self._network, self._servers, self._who = crew, network, servers, who
        self._rng, self._period, self._lease = random.Random(seed), period, lease
        self._end = threading.Event()
        self._stopped: dict[int, threading.Timer] = {}
        self._thread = threading.Thread(target=self._work, name="torment")
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> "Torment":
        self._network.tell("rough")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Calm down: who is stopped goes on, and the network is well."""
        self._end.set()
        self._thread.join()
        for number, timer in self._stopped.items():
            timer.cancel()
            timer.join()
            self._crew.resume(number)
        self._network.tell("calm")

    def _work(self) -> None:
        while not self._end.wait(self._rng.uniform(0.2, 1.8) * self._period):
            draw = self._rng.random()
            if draw < 0.25:
                self._kill_worker()
            elif draw < 0.65:
                self._stop_worker()
            elif draw < 0.85:
                self.counts["all connections cut"] += 1
                self._network.tell("cut")
            else:
                self._step_clock()

    def _idle(self) -> int | None:
        free = [number for number in range(len(self._crew)) if not self._is_stopped(number)]
        return self._rng.choice(free) if free else None

    def _is_stopped(self, number: int) -> bool:
        timer = self._stopped.get(number)
        return timer is not None and timer.is_alive()

    def _kill_worker(self) -> None:
        number = self._idle()
        if number is not None:
            self.counts[f"{self._who} killed"] += 1
            self._crew.kill(number)

    def _stop_worker(self) -> None:
        number = self._idle()
        if number is None:
            return
        seconds = self._rng.choice((self._rng.uniform(0.1, 0.9), self._rng.uniform(1.1, 1.8))) * self._lease
        longer = " for longer than a lease" if seconds > self._lease else ""
        self.counts[f"{self._who} stopped{longer}"] += 1
        self._crew.stop(number)
        timer = self._stopped[number] = threading.Timer(seconds, self._crew.resume, (number,))
        timer.start()

    def _step_clock(self) -> None:
        self.counts["server clocks stepped"] += 1
        clock = self._rng.choice(self._servers.clocks)
        skewed_clock.set_error(clock, self._rng.uniform(-_LONGEST_SKEW_SECONDS, _LONGEST_SKEW_SECONDS))
