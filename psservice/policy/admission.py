"""Admission rules: which pushes are taken, by their staleness, by their worker's lead and by their norm.

Each rule is off at 0. The *cut-off* refuses a push that is too stale; its payload goes back into the worker's residual.
The *bound* is that of stale synchronous parallel training (SSP; Ho et al. 2013): with clocks ``c`` that count pushes,
a worker may push while ``c + 1 − min(c of the others) ≤ s``; else it is told to come back. The *norm cap* refuses an
update whose L2 norm is above it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pscore.model.segment import Segment
from pscore.wire.errors import ErrorCode, Rejected

_SHORTEST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.02, 1.0
_POLL_SHARE = 0.25
_NORM_BLOCK = 1 << 16


def first_clock(live: Iterable[int]) -> int:
    """Return the clock that a worker begins with: that of the slowest live one, so that nobody waits for its past."""
    return min(live, default=0)


@dataclass(frozen=True, slots=True)
class Pace:
    """Where a worker stands among the other live ones.

    Attributes:
        clock: its pushes.
        slowest: the lowest clock of the others.
        slowest_worker: whose that is.
        silent_seconds: since that one's last push, or its joining.
    """

    clock: int
    slowest: int
    slowest_worker: str
    silent_seconds: float

    @property
    def retry_seconds(self) -> float:
        """When to ask again: a share of how long it has taken already, so that a long wait is few calls."""
        return min(max(_POLL_SHARE * self.silent_seconds, _SHORTEST_POLL_SECONDS), _LONGEST_POLL_SECONDS)


@dataclass(frozen=True, slots=True)
class Admission:
    """The admission rules of a run.

    Attributes:
        max_staleness: pushes of others between a push's base and the push; 0 for no cut-off.
        ssp_bound: pushes that a worker may be ahead of the slowest other live one; 0 for no bound.
        max_update_norm: L2 norm of an update; 0 for no cap.
    """

    max_staleness: int = 0
    ssp_bound: int = 0
    max_update_norm: float = 0.0

    def require_fresh(self, staleness: int, *, in_rounds: bool = False) -> None:
        """Apply the cut-off, and in synchronous training that of a round that is closed.

        Raises:
            Refusal: ``TOO_STALE``.
        """
        if in_rounds and staleness:
            raise Rejected(
                ErrorCode.TOO_STALE,
                f"{staleness} rounds were closed since the worker's pull; what it computed is too late for them",
                staleness=str(staleness),
                max_staleness="0",
            )
        if self.max_staleness and staleness > self.max_staleness:
            raise Rejected(
                ErrorCode.TOO_STALE,
                f"{staleness} pushes of others were applied since the worker's pull, "
                f"at most {self.max_staleness} may be",
                staleness=str(staleness),
                max_staleness=str(self.max_staleness),
            )

    def require_in_step(self, pace: Pace | None) -> None:
        """Apply the bound; ``None`` is a worker that is alone. Raises :class:`Rejected` (``TOO_FAR_AHEAD``)."""
        if not self.ssp_bound or pace is None:
            return
        lead = pace.clock + 1 - pace.slowest
        if lead > self.ssp_bound:
            raise Rejected(
                ErrorCode.TOO_FAR_AHEAD,
                f"this push would be {lead} ahead of worker {pace.slowest_worker!r}, at most {self.ssp_bound} may be",
                retry_seconds=pace.retry_seconds,
                worker=pace.slowest_worker,
                ssp_bound=str(self.ssp_bound),
            )

    def norm(self, update: Segment | None) -> float:
        """Measure an update that lies on the host, where there is a cap; else 0."""
        if not self.max_update_norm or update is None:
            return 0.0
        values = update.values.numpy()  # in blocks, in numpy: stays on this thread, and squares do not overflow in fp64
        blocks = (values[first : first + _NORM_BLOCK] for first in range(0, values.size, _NORM_BLOCK))
        return math.sqrt(sum(float(np.square(block, dtype=np.float64).sum()) for block in blocks))

    def require_small(self, norm: float) -> None:
        """Apply the cap; raises :class:`Rejected` (``UPDATE_TOO_LARGE``)."""
        if self.max_update_norm and norm > self.max_update_norm:
            raise Rejected(
                ErrorCode.UPDATE_TOO_LARGE,
                f"the update's L2 norm is {norm:.6g}, at most {self.max_update_norm:g} is taken",
                norm=repr(norm),
                max_update_norm=repr(self.max_update_norm),
            )
