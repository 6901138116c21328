"""Calls that end by their caller's own fault wait for their answer, once they are many: a flood slows itself down."""

import time
from collections import OrderedDict
from collections.abc import Callable

from pscore.wire.errors import ErrorCode, Rejected

_FREE = 100
"""Refusals of one host that are answered at once; large calls count more."""

_A_SECOND = 50.0
"""Refusals of one host in a second beyond that."""

_COUNTED_BYTES = 16 << 10  # count as one more refusal
_LONGEST_SECONDS = 5.0
_MOST_HOSTS = 4096

_FAULTS = frozenset({"INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED"})
_MISMATCHES = frozenset({ErrorCode.FINGERPRINT_MISMATCH, ErrorCode.SETTINGS_MISMATCH})


class Penalty:
    """Faults by host. Not thread-safe.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Know of no host."""
        self._clock = clock
        self._paid_until: OrderedDict[str, float] = OrderedDict()

    def seconds(self, peer: str, nbytes: int = 0) -> float:
        """Count a call that ends by its caller's fault; return how long the answer is to wait.

        Args:
            peer: of the connection, as gRPC writes it; its port does not count.
            nbytes: that the call has brought.
        """
        host, now = peer.rpartition(":")[0], self._clock()
        paid_until = max(self._paid_until.pop(host, 0.0), now) + (1 + nbytes / _COUNTED_BYTES) / _A_SECOND
        self._paid_until[host] = min(paid_until, now + _FREE / _A_SECOND + _LONGEST_SECONDS)
        while len(self._paid_until) > _MOST_HOSTS:
            self._paid_until.popitem(last=False)
        return max(0.0, self._paid_until[host] - now - _FREE / _A_SECOND)


def is_fault(refusal: Rejected) -> bool:
    """Tell whether a call is refused by its caller's own fault, and not by what training meets."""
    fault = refusal.reason.status_name in _FAULTS or refusal.reason in _MISMATCHES
    return fault and refusal.retry_seconds is None
