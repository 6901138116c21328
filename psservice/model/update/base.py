"""What an update rule is: a shard's parameters, what a push does to them, and what must survive a restart."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from pscore.model.layout import ModelLayout, Span
from pscore.model.segment import Segment
from psservice.model.changelog import ChangedIndices
from psservice.model.update.reshard import RuleMemory


@dataclass(frozen=True, slots=True)
class Place:
    """What a rule works on.

    Attributes:
        layout: of the whole model.
        span: what the shard owns of it.
        theta: its parameters, fp32 ``[span.length]``; changed in place.
    """

    layout: ModelLayout
    span: Span
    theta: torch.Tensor


@dataclass(frozen=True, slots=True)
class RuleState:
    """What a rule remembers from push to push.

    Attributes:
        plain: values that JSON can hold.
        tensors: by name; copies.
    """

    plain: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What comes with a push, or with the mean of a round, beside its values.

    Attributes:
        rates: learning rate of each param group of the rule; empty for those agreed.
        samples: that it comes from; 0 for a flush.
    """

    rates: tuple[float, ...] = ()
    samples: int = 1


PLAIN = StepInfo()


class UpdateRule(Protocol):
    """Does one thing with every push. Called on the writer thread, or where nobody else has the shard.

    Attributes:
        rates: the agreed learning rate of each param group; empty where the rule has none.
        spreads: whether a sparse push changes more than the entries that it names.
    """

    rates: tuple[float, ...]
    spreads: bool

    def apply(self, push: Segment | None, info: StepInfo = PLAIN) -> ChangedIndices:
        """Change the parameters; return which may have changed.

        Args:
            push: over the whole shard, fp32 on the parameters' device; ``None``: it had no entries.
            info: its rates, as many as :attr:`rates` or none, and its samples.

        Raises:
            Refusal: ``NON_FINITE``, where a parameter would leave the range of fp32; nothing is changed.
        """

    def export(self) -> RuleState:
        """Copy what is remembered."""

    def restore(self, state: RuleState) -> None:
        """Take over what :meth:`export` returned; raises ``ValueError`` or ``KeyError`` where it does not fit."""

    def remember(self) -> RuleMemory:
        """Return what is remembered, for shards that are cut in other places."""

    def inherit(self, memories: Sequence[RuleMemory]) -> None:
        """Take over what all shards of another run :meth:`remember`, with a rule of the same kind."""


RuleMaker = Callable[[Place], UpdateRule]
"""Makes a run's rule for a shard; raises ``Rejected`` where rule and model do not go together."""
