"""What an update rule is: what a push does to a shard's parameters, and what must survive a restart."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from pscore.model.layout import ModelLayout, Span
from pscore.model.segment import Segment
from psservice.model.changelog import ChangedIndices
from psservice.model.update.reshard import RuleMemory


@dataclass(frozen=True, slots=True)
class RuleContext:
    """A shard's parameters: fp32 ``theta[span.length]``, changed in place, of the whole model's layout."""

    layout: ModelLayout
    span: Span
    theta: torch.Tensor


@dataclass(frozen=True, slots=True)
class RuleState:
    """What is kept from push to push: values that JSON can hold, and copies of tensors by name."""

    plain: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What comes with a push, or with the mean of a round, beside its values.

    Attributes:
        rates: learning rate of each param group of the rule; empty for those agreed.
        samples: of the step; 0 for a flush.
    """

    rates: tuple[float, ...] = ()
    samples: int = 1


PLAIN = StepInfo()


class UpdateRule(Protocol):
    """Applies pushes. Called on the writer thread, or before the shard is served.

    Attributes:
        rates: the agreed learning rate of each param group; empty where the rule has none.
        densifies: whether a sparse push changes more than the entries that it names.
    """

    rates: tuple[float, ...]
    densifies: bool

    def apply(self, push: Segment | None, info: StepInfo = PLAIN) -> ChangedIndices:
        """Change the parameters; return which may have changed.

        Args:
            push: over the whole shard, fp32 on the parameters' device; ``None``: it had no entries.
            info: its rates, as many as :attr:`rates` or none, and its samples.

        Raises:
            Refusal: ``NON_FINITE``, where a parameter would leave the range of fp32; nothing is changed.
        """

    def export(self) -> RuleState:
        """Copy the rule's state."""

    def restore(self, state: RuleState) -> None:
        """Restore what :meth:`export` returned; raises ``ValueError`` or ``KeyError`` where it does not fit."""

    def export_portable(self) -> RuleMemory:
        """Return the rule's state for shards with other borders."""

    def import_portable(self, memories: Sequence[RuleMemory]) -> None:
        """Import the states of all shards of another run with a rule of the same kind."""


RuleMaker = Callable[[RuleContext], UpdateRule]
"""Makes a run's rule for a shard; raises ``Rejected`` where rule and model do not go together."""
