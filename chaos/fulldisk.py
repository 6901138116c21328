"""A campaign in which the disk is filled under load, and once under a server that starts."""

from chaos.campaign import Campaign
from chaos.disk import FULL, Disk
from chaos.servers import StartFailedError

_ROUNDS = 3
_FULL_SECONDS, _FREE_SECONDS = (0.8, 2.0), (1.0, 2.5)


class FullDisk(Campaign):
    """Pushes are refused while nothing can be written, and nothing that was acknowledged is lost."""

    disk: Disk

    def strike(self) -> None:
        """Fill and free the disk; in the last round a server is killed, and started, while it is full."""
        self.expected_errors = FULL
        for number in range(_ROUNDS):
            self.say(f"round {number + 1} of {_ROUNDS}")
            self.pause(*_FREE_SECONDS)
            pid = self.servers.pid(0)
            self.disk.fill(pid)
            self.result.faults["disk filled"] += 1
            self.pause(*_FULL_SECONDS)
            if number == _ROUNDS - 1 and self.disk.bars_a_start:
                self._start_on_full_disk()
            self.disk.free(pid)
            if number == _ROUNDS - 1:
                self.kill([0])
        self.pause(*_FREE_SECONDS)

    def _start_on_full_disk(self) -> None:
        """A server may refuse to start where it cannot write, and must say so."""
        self.servers.kill(0)
        self.result.faults["servers killed"] += 1
        self.servers.start(0)
        try:
            self.servers.await_ready(0)
            self.result.faults["servers started on a full disk"] += 1
        except StartFailedError:
            self.result.faults["starts refused on a full disk"] += 1
