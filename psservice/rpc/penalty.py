"""Calls that fail by their caller's own fault get their answer late, once they are many: a flood slows itself down."""

import time
from collections import OrderedDict
from collections.abc import Callable

from pscore.wire.errors import ErrorCode, Rejected

_FREE = 100  # refusals of one host that are answered at once; large calls count more
_A_SECOND = 50.0  # refusals of one host in a second beyond that
_COUNTED_BYTES = 16 << 10  # count as one more refusal
_LONGEST_SECONDS = 5.0
_MOST_HOSTS = 4096

_FAULTS = frozenset({"INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED"})
_MISMATCHES = frozenset({ErrorCode.FINGERPRINT_MISMATCH, ErrorCode.SETTINGS_MISMATCH})


class Penalty:
    """Faults by host. Not thread-safe. ``clock`` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._paid_until: OrderedDict[str, float] = OrderedDict()

    def seconds(self, peer: str, nbytes: int = 0) -> float:
        """Count a call of ``nbytes`` that failed by its caller's fault; return the delay of its answer.

        ``peer`` is written as gRPC does; its port does not count.
        """
        host, now = peer.rpartition(":")[0], self._clock()
        paid_until = max(self._paid_until.pop(host, 0.0), now) + (1 + nbytes / _COUNTED_BYTES) / _A_SECOND
        self._paid_until[host] = min(paid_until, now + _FREE / _A_SECOND + _LONGEST_SECONDS)
        while len(self._paid_until) > _MOST_HOSTS:
            self._paid_until.popitem(last=False)
        return max(0.0, self._paid_until[host] - now - _FREE / _A_SECOND)


def is_fault(refusal: Rejected) -> bool:
    """Tell whether a call is refused by its caller's own fault, and not by what happens in training."""
    fault = refusal.reason.status_name in _FAULTS or refusal.reason in _MISMATCHES
    return fault and refusal.retry_seconds is None
