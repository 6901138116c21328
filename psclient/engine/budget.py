"""Follows a byte budget: the form of each push, and of the reply to it."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

from psclient.budget import Budget
from psclient.errors import ConfigurationError
from psclient.rpc.shard_stream import ShardStream
from psclient.rpc.stream import Bandwidth
from pscore.model.layout import ModelLayout
from pscore.wire.budget import fit, least_share, most_whole

_UNMEASURED = 0.03  # of the dense bytes, before the line or a step's time is known
_LEAST_CHANGE = 0.1  # of a share, that is worth another form: the next selections begin anew with it
_STEPS = 16  # whose median is the time of a step
_PROBE_STEPS = 100  # without a transfer that says what the line carries, after which one is made that does
_PROBE_BYTES, _PROBE_SECONDS = 192 << 10, 0.1  # of such a transfer, the greater: several messages


class BudgetSchedule:
    """The density of each step under a budget.

    ``sends_all``: the method sends every entry. ``dense_below``: tensors with fewer elements are sent whole, if they
    take no more than a quarter of the budget.

    Raises:
        ConfigurationError: the budget does not carry every entry, and the method sends them all.
    """

    def __init__(self, budget: Budget, layout: ModelLayout, dense_below: int, *, sends_all: bool) -> None:
        self._budget, self._dense_bytes = budget, 4 * max(1, layout.size)
        self.dense_below = layout.whole_below(dense_below, most_whole(layout.size, budget.share or _UNMEASURED))
        whole = sum(spec.numel for spec in layout.parameters if spec.numel < self.dense_below)
        self._whole = 1.0 if sends_all else whole / max(1, layout.size)
        self._least = least_share(self._whole)
        if budget.share is not None and budget.share <= self._least:
            raise ConfigurationError(
                f"budget={budget.share:g} is less than the {self._least:.2g} of the dense bytes that every entry "
                "takes in 4 bits, and this method sends every entry; raise it, or use psclient.GradientDropping, its "
                "sparse form"
            )
        self._begun: deque[float] = deque(maxlen=_STEPS + 1)
        self._up, self._down = _LineTime(self._dense_bytes), _LineTime(self._dense_bytes)
        self._shares = 0.0, 0.0
        self._density = 1.0

    def of(self, shards: Sequence[ShardStream]) -> Callable[[int], float]:
        """Return the density as a function of the step; a call begins the step at these shards."""
        return lambda _: self._begin_step(shards)

    def _begin_step(self, shards: Sequence[ShardStream]) -> float:
        """Return the density of the push that begins, and tell the shards the forms of push and reply."""
        self._begun.append(time.monotonic())
        up, down = (max(min(share, 1.0), 1.001 * self._least, 1e-6) for share in self._wanted(shards))
        if abs(up - self._shares[0]) > _LEAST_CHANGE * up or abs(down - self._shares[1]) > _LEAST_CHANGE * down:
            self._shares = up, down
            push, reply = fit(up, self._whole), fit(down, self._whole)
            self._density = push.density
            for shard in shards:
                shard.use_forms(push, reply)
        return self._density

    def _wanted(self, shards: Sequence[ShardStream]) -> tuple[float, float]:
        """Return the shares of the dense bytes up and down."""
        budget = self._budget
        if budget.share is not None:
            return budget.share, budget.reply_share or budget.share
        if budget.bytes_per_second is not None:
            times = [later - earlier for earlier, later in pairwise(self._begun)]
            share = budget.bytes_per_second * median(times) / self._dense_bytes if times else _UNMEASURED
            return share, share
        assert budget.seconds_per_step is not None
        seconds = budget.seconds_per_step
        return (
            self._up.share(seconds, [shard.uplink for shard in shards]),
            self._down.share(seconds, [shard.downlink for shard in shards]),
        )


class _LineTime:
    """The share of the dense bytes that one way of the line carries in a time."""

    def __init__(self, dense_bytes: int) -> None:
        self._dense_bytes = dense_bytes
        self._transfers, self._steps = 0, -1  # those that were measured; steps since the last of them

    def share(self, seconds: float, lines: Sequence[Bandwidth]) -> float:
        """Return what all shards together carry, which work side by side and have equal parts; call it at each step.

        If that is too little to be measured by, a step now and then takes more.
        """
        transfers = sum(line.transfers for line in lines)
        self._steps = 0 if transfers != self._transfers else self._steps + 1
        self._transfers = transfers
        known = [line.bytes_per_second for line in lines]
        rate = min((each for each in known if each is not None), default=0.0)
        of_all = len(lines) / self._dense_bytes
        share = seconds * rate * of_all if None not in known else _UNMEASURED
        if self._steps % _PROBE_STEPS == 0 and (self._steps or None in known):
            return max(share, of_all * max(_PROBE_BYTES, _PROBE_SECONDS * rate))
        return share
