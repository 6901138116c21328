"""Steps that divide a gradient by the root of its entry's squares, at the cost of a push's entries.

The base of :mod:`psservice.rules.rmsprop` and :mod:`psservice.rules.adagrad`. Absent entries of a sparse push are
gradients of zero. In step ``t``::

    v ← α·v + β·g²
    θ ← θ − lr_t·g / (√v + ε)

A gradient of zero leaves ``θ`` alone and takes a factor ``α`` from ``v``. So ``v`` is kept as ``c·V``, where ``c`` has
the factors of all steps, and a push touches only its entries. The values are torch's but for rounding.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pscore.jit import compiled
from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice
from pscore.selection.rule import Integers, Reals
from pscore.wire.errors import ErrorCode, Rejected
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
from psservice.rules.optimizer_settings import TorchSettings, bad

_LEAST_FACTOR = 2.0**-20  # below it V is multiplied by the factor, and the next factor is 1
_LEAST_EPS, _LARGEST_EPS = 1e-30, 1e30
_LARGEST_GRADIENT = np.float32(1e15)  # its square over the least factor is finite
_LARGEST_PARAMETER = np.float32(1e30)  # a step does not take it out of fp32's range


def options_of(settings: TorchSettings, name: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a rule named after an optimizer of torch's; ``BAD_REQUEST`` for settings of another.

    ``defaults`` are the options that the rule has beside ``lr``; a group has a rate of its own and nothing else.
    """
    rule, options = name.lower(), {**defaults, **settings.optimizer.options}
    if settings.optimizer.name != name or options.keys() - {"lr", *defaults} or settings.scheduler:
        *most, last = ["lr", *defaults]
        raise bad(f"the rule {rule} is {name} with {', '.join(most)} and {last}, without a scheduler")
    if any(group.options.keys() - {"lr"} for group in settings.groups):
        raise bad(f"a group of the rule {rule} has a rate of its own, and nothing else")
    if not _LEAST_EPS <= options["eps"] <= _LARGEST_EPS:
        raise bad(f"eps of the rule {rule} must be from {_LEAST_EPS:g} to {_LARGEST_EPS:g}, not {options['eps']!r}")
    return options


class ScaledBySquares(UpdateRule):
    """Applies sparse or dense gradients; ``BAD_REQUEST`` if groups name tensors that are not there.

    Attributes:
        squares_name: of ``v`` in the state of torch's optimizer.
    """

    squares_name: str

    def __init__(
        self, settings: TorchSettings, eps: float, first: float, layout: ModelLayout, span: Span, theta: torch.Tensor
    ) -> None:
        self._theta, self._span, self._eps = theta, span, np.float32(eps)
        default = settings.optimizer.rate
        own = [group.options for group in settings.groups]
        self.rates = tuple(float(options.get("lr", default)) for options in own) or (default,)
        numbers = np.zeros(len(layout.parameters), np.int64)
        for number, group in enumerate(settings.groups):
            if group.tensors and max(group.tensors) >= numbers.size:
                raise bad("the optimizer's groups name tensors that the model does not have")
            numbers[list(group.tensors)] = number
        parts = list(layout.overlapping(span))
        self._groups = numbers[[position for position, _ in parts]]
        self._ends = np.array([common.end - span.start for _, common in parts], np.int64)
        self._updates = 0
        self._factor = 1.0
        self._squares = torch.full_like(theta, first) if first else torch.zeros_like(theta)

    @abstractmethod
    def coefficients(self, updates: int) -> tuple[float, float, float]:
        """Return ``α``, ``β`` and the factor of the learning rates, for the step behind so many."""

    def apply(self, push: SparseSlice | None, context: PushContext = PLAIN) -> ChangedIndices:
        """Step once; a push without entries is a step of zeros if it has samples, as it may have entries elsewhere."""
        sent = push if push is not None and push.entries else None
        if sent is None and not context.samples:
            return changed_by(push)
        alpha, rest, slowed = self.coefficients(self._updates)
        factor = self._factor * alpha
        if sent is not None:
            self._step(sent, context, slowed, factor, rest)
        self._updates, self._factor = self._updates + 1, factor
        if factor < _LEAST_FACTOR:
            self.overwrites(self._squares, None)
            self._squares.mul_(factor)
            self._factor = 1.0
        return changed_by(push)

    def _step(self, push: SparseSlice, context: PushContext, slowed: float, factor: float, rest: float) -> None:
        rates = np.array(context.group_rates or self.rates, np.float32)[self._groups] * np.float32(slowed)
        scalars = np.float32(factor), np.float32(rest), self._eps
        for tensor in (self._theta, self._squares):
            self.overwrites(tensor, push.offsets)
        if self._theta.is_cpu:
            offsets = None if push.offsets is None else push.offsets.numpy()
            arrays = self._theta.numpy(), self._squares.numpy(), offsets, push.values.numpy(), self._ends, rates
            fits = step_at.on(push.entries)(*arrays, *scalars)
        else:
            tensors = self._theta, self._squares, push.offsets, push.values
            fits = _step_on_device(*tensors, self._ends, rates, *map(float, scalars))
        if not fits:
            raise Rejected(
                ErrorCode.NON_FINITE,
                f"a gradient above {_LARGEST_GRADIENT:g} or a parameter above {_LARGEST_PARAMETER:g} is not stepped",
            )

    def export(self) -> RuleState:
        """Return ``V``, its factor and the number of updates."""
        return RuleState({"updates": self._updates, "factor": self._factor}, {"squares": self._squares})

    def restore(self, state: RuleState) -> None:
        """Restore an exported state."""
        self._updates, self._factor = int(state.plain["updates"]), float(state.plain["factor"])
        self._squares.copy_(state.tensors["squares"])

    def export_portable(self) -> PortableState:
        """Return ``v`` by entries of the layout."""
        piece = PieceState(self._span, tuple(self._theta.shape), {self.squares_name: self._squares * self._factor})
        return PortableState(self.kind, self._updates, 0, [piece])

    def import_portable(self, states: Sequence[PortableState]) -> bool:
        """Put ``v`` together from shards with other borders."""
        if not super().import_portable(states):
            return False
        import_by_entries(states, self._span, {self.squares_name: self._squares})
        self._updates, self._factor = max(state.updates for state in states), 1.0
        return True


@compiled
def step_at(theta, squares, offsets, values, ends, rates, factor, rest, eps):  # type: ignore[no-untyped-def]
    """Step the entries at ``offsets``; False, with nothing changed, if a number is too large.

    ``factor`` is ``c`` after the step, ``rest`` is ``β``; ``rates`` of the tensors that end at ``ends``.
    """
    for j in range(values.size):
        i = j if offsets is None else offsets[j]
        if not (abs(values[j]) <= _LARGEST_GRADIENT and abs(theta[i]) <= _LARGEST_PARAMETER):
            return False
    row = 0
    for j in range(values.size):
        i = j if offsets is None else offsets[j]
        while i >= ends[row]:
            row += 1
        g = values[j]
        v = factor * squares[i] + rest * (g * g)
        squares[i] = v / factor
        theta[i] -= rates[row] * g / (np.sqrt(v) + eps)
    return True


def _step_on_device(
    theta: torch.Tensor,
    squares: torch.Tensor,
    offsets: torch.Tensor | None,
    values: torch.Tensor,
    ends: Integers,
    rates: Reals,
    factor: float,
    rest: float,
    eps: float,
) -> bool:
    """:func:`step_at` by torch's operations."""
    place = torch.arange(values.numel(), dtype=torch.int64, device=theta.device) if offsets is None else offsets
    before = theta[place]
    if not bool(((values.abs() <= float(_LARGEST_GRADIENT)) & (before.abs() <= float(_LARGEST_PARAMETER))).all()):
        return False
    rows = torch.bucketize(place, torch.from_numpy(ends).to(theta.device), right=True)
    v = squares[place] * factor + values * values * rest
    squares[place] = v / factor
    root = v.double().sqrt().float()  # torch does not round an fp32 root correctly on every processor
    theta[place] = before - torch.from_numpy(rates).to(theta.device)[rows] * values / (root + eps)
    return True
