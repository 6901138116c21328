"""A disk breaks under load: the next ``fsync`` fails, and nobody knows what is on it until a restart has read it."""

import errno
import os

from verify.campaign import Campaign
from verify.cluster.waiting import until
from verify.failpoint import failed_syncs
from verify.validate import server_readings

_FREE_SECONDS = 0.5, 1.5
_LIVENESS_SECONDS, _END_SECONDS, _MEND_SECONDS = 20.0, 20.0, 20.0
_ERRORS = errno.EIO, errno.ENOSPC


class BrokenDisk:
    """The health port asks for a restart, the process ends by SIGTERM, and nothing acknowledged is lost.

    Args:
        rounds: of each error.
    """

    expected_errors: tuple[str, ...] = tuple(os.strerror(number) for number in _ERRORS)

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds

    def strike(self, campaign: Campaign) -> None:
        """Break the disk and mend it; the server ends by SIGTERM, and by a kill, in turn."""
        servers, failures = campaign.servers, campaign.result.failures
        for number in range(self._rounds * len(_ERRORS)):
            error = _ERRORS[number % len(_ERRORS)]
            campaign.say(f"fsync fails with {errno.errorcode[error]}")
            campaign.await_load(0)
            campaign.pause(*_FREE_SECONDS)
            failed_syncs.set_error(servers.syncs[0], error)
            campaign.result.faults["fsync failed"] += 1
            health = servers.told[0]["health"]
            if not until(lambda health=health: server_readings.wants_restart(health), _LIVENESS_SECONDS):  # type: ignore[misc]
                failures.append(f"no restart is asked for {_LIVENESS_SECONDS:.0f} s after a failed fsync")
            if number % 2 == 0 and servers.terminate(0, _END_SECONDS) is None:
                failures.append(f"SIGTERM has not ended the server in {_END_SECONDS:.0f} s")
            failed_syncs.set_error(servers.syncs[0], 0)
            campaign.kill([0])
            if not campaign.gets_through(_MEND_SECONDS):
                failures.append(f"no push is acknowledged {_MEND_SECONDS:.0f} s after the disk was mended")
                campaign.kill([0])  # what it acknowledged is accounted for all the same
                return
