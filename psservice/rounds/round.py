"""Synchronous rounds: gather one update from every live worker, apply their mean once (docs/reference/protocol.md).

Backup workers: Chen et al. 2016.
"""

import math
from collections.abc import Callable, Collection

import torch

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.errors import ErrorCode, Rejected
from psservice.model.training_mode import RoundSettings
from psservice.rules.base import PLAIN, PushContext, RuleState
from psservice.rules.changed import Overwrites

_LARGEST_VALUE = 1e30  # sums of millions of these are finite


class SynchronousRound:
    """The open round of a shard: the sum of its updates, and its contributors; ``clock`` returns seconds.

    ``overwrites`` is told which elements of the exported tensors are about to change.

    Attributes:
        settings: when it closes.
        dropped: workers whose contribution a rollback has dropped and who have made none since; none waits for them.
        is_empty: whether no update at all is in the round.
    """

    def __init__(
        self,
        settings: RoundSettings,
        span: Span,
        device: torch.device,
        clock: Callable[[], float],
        overwrites: Overwrites = lambda tensor, offsets: None,
    ) -> None:
        self.settings, self._span, self._clock, self._overwrites = settings, span, clock, overwrites
        self._sum = torch.zeros(span.length, dtype=torch.float32, device=device)
        self._touched = torch.zeros(span.length, dtype=torch.bool, device=device)
        self._opened = 0.0
        self._rates: dict[str, tuple[float, ...]] = {}
        self._samples = 0
        self.contributors: set[str] = set()
        self.dropped: set[str] = set()
        self.is_empty = True

    def is_due(self, live: Collection[str], awaited: Collection[str], *, is_first: bool) -> bool:
        """Tell whether the round closes, given the live workers and those of them that it waits for; from any thread.

        ``is_first``: whether it is the first round of the run.
        """
        settings, contributors = self.settings, self.contributors
        if not contributors or self._lacks_workers(live, is_first=is_first):
            return False
        if settings.seconds and self._clock() - self._opened >= settings.seconds:
            return True
        if settings.quorum and len(contributors) >= settings.quorum:
            return True
        return all(name in contributors or name in self.dropped for name in awaited)

    def seconds_left(self, live: Collection[str], awaited: float, *, is_first: bool) -> float:
        """Return the time until the clock closes the round; infinite if only workers do.

        ``awaited``: the seconds after which the round waits for nobody any more.
        """
        if self._lacks_workers(live, is_first=is_first):
            return math.inf
        limit = self.settings.seconds
        return min(awaited, max(0.0, self._opened + limit - self._clock()) if limit else math.inf)

    def _lacks_workers(self, live: Collection[str], *, is_first: bool) -> bool:
        """Tell whether the first round waits for more workers to join."""
        return is_first and len({*live, *self.contributors}) < self.settings.start_workers

    def add(self, worker: str, update: SparseSlice | None, context: PushContext = PLAIN) -> None:
        """Add a contribution (``NON_FINITE``); several of one worker count as one, a flush (no samples) as none."""
        if update is not None:
            if bool(update.values.abs().max() > _LARGEST_VALUE):
                raise Rejected(ErrorCode.NON_FINITE, f"a value above {_LARGEST_VALUE:g} is not taken into a round")
            where = slice(None) if update.offsets is None else update.offsets
            for tensor in (self._sum, self._touched):
                self._overwrites(tensor, update.offsets)
            self._sum[where] += update.values
            self._touched[where] = True
            self.is_empty = False
        if update is not None or context.samples:
            self._rates[worker] = context.group_rates
            self._samples += context.samples
        if context.samples:
            if not self.contributors:
                self._opened = self._clock()
            self.contributors.add(worker)
            self.dropped.discard(worker)

    def begin_anew(self, dropped: Collection[str]) -> None:
        """Drop all contributions, and wait for none of these workers until it has contributed again."""
        self.close()
        self.open_next()
        self.dropped = set(dropped)

    def close(self) -> tuple[SparseSlice | None, PushContext]:
        """Return the means of updates and rates and the sum of samples; contributors wait until :meth:`open_next`."""
        count = max(1, len(self.contributors))
        offsets = self._touched.nonzero().view(-1)
        mean: SparseSlice | None = None
        if offsets.numel() == self._span.length:
            mean = SparseSlice(self._span, None, self._sum / count)
        elif offsets.numel():
            mean = SparseSlice(self._span, offsets, self._sum[offsets] / count)
        for tensor in (self._sum, self._touched):
            self._overwrites(tensor, offsets)
        self._sum[offsets] = 0
        self._touched[offsets] = False
        rates = tuple(map(_mean, zip(*self._rates.values(), strict=True)))
        context = PushContext(samples=self._samples, group_rates=rates)
        self.is_empty, self._rates, self._samples = True, {}, 0
        return mean, context

    def open_next(self) -> None:
        """Begin the next round."""
        self.contributors = set()

    def export(self) -> RuleState:
        """Return the round: the tensors themselves, which later contributions change."""
        if not self.contributors and not self.dropped and self.is_empty:
            return RuleState()
        plain = {
            "contributors": sorted(self.contributors),
            "dropped": sorted(self.dropped),
            "is_empty": self.is_empty,
            "rates": self._rates,
            "samples": self._samples,
        }
        return RuleState(plain, {"sum": self._sum, "touched": self._touched})

    def restore(self, state: RuleState) -> None:
        """Continue a round; its age begins anew."""
        if not state.plain:
            return
        self.is_empty = bool(state.plain["is_empty"])
        self.contributors = {str(name) for name in state.plain["contributors"]}
        self.dropped = {str(name) for name in state.plain["dropped"]}
        self._rates = {str(name): tuple(map(float, rates)) for name, rates in state.plain["rates"].items()}
        self._samples = int(state.plain["samples"])
        self._sum.copy_(state.tensors["sum"])
        self._touched.copy_(state.tensors["touched"])
        self._opened = self._clock()


def _mean(rates: tuple[float, ...]) -> float:
    """Return a mean that does not depend on the order, and is the rate itself if all are the same."""
    return rates[0] if min(rates) == max(rates) else math.fsum(rates) / len(rates)
