"""Reply rules: whether a worker is answered exactly or with the top-k of the difference.

A rule sees, at each pull, how dense the change since the worker's version is, and says whether the worker should be in
top-k mode from now on. The mechanics of the switch are in :mod:`psservice.model.reply_session`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

CALM_PULLS = 64
"""Pulls in a row with little change after which ``auto`` goes back to exact replies."""


class ReplyRule(Protocol):
    """Decides the mode of one worker's replies, pull by pull."""

    def wants_topk(self, changed_density: float | None, in_topk: bool) -> bool:
        """Say whether the next replies should be top-k.

        Args:
            changed_density: what changed since the worker's version over all elements; ``None`` where a dense reply is
                due anyway (no base, dense pushes, a restart).
            in_topk: whether the worker is answered in top-k mode now.
        """


class Exact:
    """Always exact."""

    def wants_topk(self, changed_density: float | None, in_topk: bool) -> bool:
        """Never."""
        return False


class TopK:
    """Always top-k (secondary compression, DGS paper)."""

    def wants_topk(self, changed_density: float | None, in_topk: bool) -> bool:
        """Always."""
        return True


@dataclass
class Auto:
    """Exact while what changed is sparse; top-k above ``limit``; back after a calm stretch below half of it."""

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
    makers: dict[str, Callable[[], ReplyRule]] = {"exact": Exact, "topk": TopK, "auto": lambda: Auto(limit)}
    return makers[name]()
