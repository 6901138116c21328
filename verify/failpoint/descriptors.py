"""A server has no file descriptors left, under load; then it has them again."""

import resource

from verify.campaign import SNAPSHOT_SECONDS, Campaign
from verify.cluster.waiting import until
from verify.failpoint import limits
from verify.validate import server_readings

_FREE_SECONDS = 0.5, 1.5
_WITHOUT_SECONDS = 0.5, SNAPSHOT_SECONDS + 1
_LIVENESS_SECONDS, _MEND_SECONDS = 1.5, 20.0


class NoDescriptors:
    """Nothing hangs and nothing acknowledged is lost: not while nothing can be opened, and not afterwards.

    Args:
        rounds: how often.
    """

    expected_errors: tuple[str, ...] = "Too many open files", "File descriptor limit reached"

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds

    def strike(self, campaign: Campaign) -> None:
        """Take them away and give them back; a server that wants to be started anew is."""
        for number in range(self._rounds):
            campaign.say(f"round {number + 1} of {self._rounds}")
            campaign.await_load(0)
            campaign.pause(*_FREE_SECONDS)
            pid = campaign.servers.pid(0)
            with limits.lowered(pid, resource.RLIMIT_NOFILE, limits.next_descriptor(pid)):
                campaign.result.faults["descriptors used up"] += 1
                campaign.pause(*_WITHOUT_SECONDS)
            if self._wants_restart(campaign):
                campaign.result.faults["restarts that the health port asked for"] += 1
                campaign.kill([0])
            if not campaign.gets_through(_MEND_SECONDS):
                campaign.result.failures.append(f"no push is acknowledged {_MEND_SECONDS:.0f} s after there were more")
                campaign.kill([0])  # what it acknowledged is accounted for all the same
                return

    def _wants_restart(self, campaign: Campaign) -> bool:
        """Ask the health port, as Kubernetes does: a journal that cannot be forced to the disk needs a restart."""
        health = campaign.servers.told[0]["health"]
        return until(lambda: server_readings.wants_restart(health), _LIVENESS_SECONDS)
