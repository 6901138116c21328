"""Delayed Nesterov: momentum for local steps that arrive one by one (Liu et al., 2024; arXiv 2401.09135, algorithm 3).

If workers push the displacement ``s`` of their local steps asynchronously, momentum at every push amplifies stale
displacements, and training fails. Here each push moves the model by its share at once. Every ``N``-th push renews the
momentum by the mean of the last ``N``, and the momentum moves the model too::

    d ← d + s
    θ ← θ − lr·s / N
    every N-th push:  m ← β·m + d / N;  θ ← θ − lr·β·m;  d ← 0
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.messages import LARGEST_RATE
from psservice.rules.base import (
    PLAIN,
    PieceState,
    PortableState,
    PushContext,
    RuleState,
    UpdateRule,
    import_by_entries,
)
from psservice.rules.changed import ChangedIndices, changed_by
from psservice.rules.optimizer_settings import bad

_MOST_PUSHES = 10_000
_NAMES = "momentum", "sum"


class Options(NamedTuple):
    """``lr``, ``β`` and ``N``."""

    lr: float
    momentum: float
    every: int

    @classmethod
    def parse(cls, settings: Mapping[str, str]) -> "Options":
        """Read ``{"name": "DelayedNesterov", "options": {"lr": 0.7, "momentum": 0.9, "every": 4}}``."""
        try:
            options = json.loads(settings.get("optimizer", ""))["options"]
            lr, beta, every = (options[name] for name in ("lr", "momentum", "every"))
            is_sane = 0 <= lr <= LARGEST_RATE and 0 <= beta < 1 and every == int(every) and 1 <= every <= _MOST_PUSHES
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise bad(f"DelayedNesterov has lr, momentum and every: {error!r}") from error
        if not is_sane or options.keys() - {"lr", "momentum", "every"} or not math.isfinite(lr):
            raise bad(
                f"of DelayedNesterov lr must be 0 to {LARGEST_RATE:g}, momentum 0 to below 1, and every, the "
                f"pushes from one renewal of the momentum to the next, 1 to {_MOST_PUSHES}"
            )
        return cls(float(lr), float(beta), int(every))


class DelayedNesterov(UpdateRule):
    """Steps along the ways of local steps."""

    kind = "delayed_nesterov"
    densifies = True

    def __init__(self, options: Options, layout: ModelLayout, span: Span, theta: torch.Tensor) -> None:
        self._lr, self._beta, self._every = options
        self._theta, self._span, self._updates = theta, span, 0
        self._state = {name: torch.zeros_like(theta) for name in _NAMES}

    def apply(self, push: SparseSlice | None, context: PushContext = PLAIN) -> ChangedIndices:
        """Step once; a push without entries is no step."""
        if push is None or not push.entries:
            return changed_by(push)
        place = slice(None) if push.offsets is None else push.offsets
        added = self._state["sum"][place] + push.values
        stepped = self._theta[place] - push.values * (self._lr / self._every)
        fits = added.isfinite().all() & stepped.isfinite().all()
        if (self._updates + 1) % self._every:
            _require(fits)
            for tensor in (self._theta, self._state["sum"]):
                self.overwrites(tensor, push.offsets)
            self._state["sum"][place], self._theta[place] = added, stepped
            changed = changed_by(push)
        else:
            total = self._state["sum"].clone()
            total[place] = added
            momentum = self._state["momentum"] * self._beta + total / self._every
            theta = self._theta.clone()
            theta[place] = stepped
            theta -= momentum * (self._lr * self._beta)
            _require(fits & momentum.isfinite().all() & theta.isfinite().all())
            for tensor in (self._theta, *self._state.values()):
                self.overwrites(tensor, None)
            self._state["momentum"].copy_(momentum)
            self._state["sum"].zero_()
            self._theta.copy_(theta)
            changed = None
        self._updates += 1
        return changed

    def export(self) -> RuleState:
        """Return momentum, sum and the number of updates."""
        return RuleState({"updates": self._updates}, dict(self._state))

    def restore(self, state: RuleState) -> None:
        """Restore an exported state."""
        self._updates = int(state.plain["updates"])
        for name in _NAMES:
            self._state[name].copy_(state.tensors[name])

    def export_portable(self) -> PortableState:
        """Return the state by entries of the layout."""
        piece = PieceState(self._span, tuple(self._theta.shape), {name: v.clone() for name, v in self._state.items()})
        return PortableState(self.kind, self._updates, 0, [piece])

    def import_portable(self, states: Sequence[PortableState]) -> bool:
        """Put the state together from shards with other borders."""
        if not super().import_portable(states):
            return False
        import_by_entries(states, self._span, self._state)
        self._updates = max(state.updates for state in states)
        return True


def _require(fits: torch.Tensor) -> None:
    if not bool(fits):
        raise Rejected(ErrorCode.NON_FINITE, "this push would take a parameter out of the range of fp32")
