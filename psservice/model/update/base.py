"""What an update rule is: what a push does to a shard's parameters, and what must survive a restart."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.v1 import parameter_server_pb2 as pb
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
class PushContext:
    """What the server knows of a push beside its entries.

    Attributes:
        factor: what the push is multiplied by.
        base_version: where the gradient was taken; ``None`` where that is of no interest.
        learning_rate: that the push carries; 0 where it is not known.
        samples: of the step; 0 for a flush, which counts for no round.
        group_rates: at which the update rule steps its param groups; empty for those agreed.
    """

    factor: float = 1.0
    base_version: int | None = None
    learning_rate: float = 0.0
    samples: int = 1
    group_rates: tuple[float, ...] = ()

    @classmethod
    def of(cls, header: pb.PushHeader, factor: float) -> "PushContext":
        """Read a push's header."""
        return cls(factor, header.base_version, header.learning_rate, header.samples, tuple(header.group_rates))


PLAIN = PushContext()


class UpdateRule(Protocol):
    """Applies pushes. Called on the writer thread, or before the shard is served.

    Attributes:
        rates: the agreed learning rate of each param group; empty where the rule has none.
        densifies: whether a sparse push changes more than the entries that it names.
    """

    rates: tuple[float, ...]
    densifies: bool

    def apply(self, push: SparseSlice | None, context: PushContext = PLAIN) -> ChangedIndices:
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
