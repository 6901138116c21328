"""Whether a worker is answered exactly or with the top-k of the difference (secondary compression, DGS paper)."""

from dataclasses import dataclass, field

CALM_PULLS = 64
"""Pulls in a row with little change after which ``auto`` returns to exact replies."""


@dataclass
class ReplyRule:
    """Chooses the mode of one worker's replies, pull by pull; ``mode`` is the setting ``down_mode``.

    ``auto`` is exact up to ``limit``, then top-k, and exact again after a calm stretch below half of that.
    """

    mode: str
    limit: float = 0.0
    _calm: int = field(default=0, init=False)

    def wants_topk(
        self, changed_density: float | None, in_topk: bool, limit: float | None = None, *, pushes_all: bool = False
    ) -> bool:
        """Tell whether the next replies should be top-k; ``limit`` replaces the rule's own.

        A worker that ``pushes_all`` entries is answered exactly by ``auto``: a top-k reply would hold back most of what
        the worker itself has just sent.

        ``changed_density`` is ``None`` if the exact reply would be dense anyway (no base, dense pushes, a restart).
        That alone does not switch to top-k, unless the worker has a byte budget.
        """
        if limit is None:
            limit = self.limit
        elif changed_density is None:
            changed_density = 1.0
        if self.mode != "auto":
            return self.mode == "topk"
        if pushes_all:
            return False
        if changed_density is None:
            return in_topk
        if not in_topk:
            self._calm = 0
            return changed_density > limit
        self._calm = self._calm + 1 if changed_density < limit / 2 else 0
        if self._calm < CALM_PULLS:
            return True
        self._calm = 0
        return False
