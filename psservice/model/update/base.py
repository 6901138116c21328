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
    """The learning rates of the rule's param groups (empty for those agreed) and the samples of a step (0: a flush)."""

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
        """Change the parameters, and return which may have changed; ``None`` is a push without entries.

        Raises :class:`Rejected` (``NON_FINITE``), with nothing changed, where a parameter would leave fp32's range.
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
