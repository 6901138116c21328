"""Whether a worker is answered exactly or with the top-k of the difference.

A rule sees, at each pull, how dense the change since the worker's version is, and chooses the mode from then on. The
mechanics of the switch are in :mod:`psservice.model.reply_session`.
"""

from dataclasses import dataclass, field
from typing import Protocol

CALM_PULLS = 64
"""Pulls in a row with little change after which ``auto`` returns to exact replies."""


class ReplyRule(Protocol):
    """Chooses the mode of one worker's replies, pull by pull."""

    def wants_topk(self, changed_density: float | None, in_topk: bool) -> bool:
        """Tell whether the next replies should be top-k.

        Args:
            changed_density: changed entries since the worker's version over all; ``None`` where a dense reply is due
                anyway (no base, dense pushes, a restart).
            in_topk: whether the worker is answered in top-k mode now.
        """


@dataclass
class Always:
    """One mode: exact, or top-k (secondary compression, DGS paper)."""

    topk: bool

    def wants_topk(self, changed_density: float | None, in_topk: bool) -> bool:
        """Return the mode."""
        return self.topk


@dataclass
class Auto:
    """Exact while the change is sparse; top-k above ``limit``; exact again after a calm stretch below half of it."""

    limit: float
    _calm: int = field(default=0, init=False)

    def wants_topk(self, changed_density: float | None, in_topk: bool) -> bool:
        """Compare the density of change with the limit, with hysteresis on the way back."""
        if changed_density is None:
            return in_topk
        if not in_topk:
            self._calm = 0
            return changed_density > self.limit
        self._calm = self._calm + 1 if changed_density < self.limit / 2 else 0
        if self._calm < CALM_PULLS:
            return True
        self._calm = 0
        return False


def reply_rule(name: str, limit: float) -> ReplyRule:
    """Return a fresh rule, one a worker; ``name`` is the setting ``down_mode``."""
    return Auto(limit) if name == "auto" else Always(topk=name == "topk")
