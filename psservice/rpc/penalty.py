"""Callers who are refused by their own fault wait for the answer, once they are many: a flood slows itself down."""

import time
from collections import OrderedDict
from collections.abc import Callable

from pscore.reasons import Reason, Refusal

_FREE = 100
"""Refusals of one host that are answered at once; large calls count more."""

_A_SECOND = 50.0
"""Refusals of one host in a second beyond that."""

_COUNTED_BYTES = 16 << 10  # count as one more refusal
_LONGEST_SECONDS = 5.0
_MOST_HOSTS = 4096

_FAULTS = frozenset({"INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED"})
_MISMATCHES = frozenset({Reason.FINGERPRINT_MISMATCH, Reason.SETTINGS_MISMATCH})


class Penalty:
    """Refusals by host. Not thread-safe.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Know of no host."""
        self._clock = clock
        self._paid_until: OrderedDict[str, float] = OrderedDict()

    def seconds(self, peer: str, refusal: Refusal, nbytes: int = 0) -> float:
        """Return how long the answer to a call is to wait; 0 for one that is refused by no fault of its caller.

        Args:
            peer: of the connection, as gRPC writes it; its port does not count.
            refusal: what the answer will be.
            nbytes: that the call has brought.
        """
        fault = refusal.reason.status_name in _FAULTS or refusal.reason in _MISMATCHES
        if not fault or refusal.retry_seconds is not None:
            return 0.0
        host, now = peer.rpartition(":")[0], self._clock()
        paid_until = max(self._paid_until.pop(host, 0.0), now) + (1 + nbytes / _COUNTED_BYTES) / _A_SECOND
        self._paid_until[host] = min(paid_until, now + _FREE / _A_SECOND + _LONGEST_SECONDS)
        while len(self._paid_until) > _MOST_HOSTS:
            self._paid_until.popitem(last=False)
        return max(0.0, self._paid_until[host] - now - _FREE / _A_SECOND)
