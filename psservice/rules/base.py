"""The interface of an update rule: how a push changes a shard's parameters, and which state survives a restart."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice
from psservice.rules.changed import ChangedIndices, Overwrites


@dataclass(frozen=True, slots=True)
class RuleState:
    """State that a shard with the same borders restores: values for JSON, and tensors by name."""

    plain: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PieceState:
    """An optimizer's state, as in ``torch.optim``, of the part of a tensor that was stepped as one of ``shape``."""

    span: Span
    shape: tuple[int, ...]
    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PortableState:
    """State of one shard's rule that shards with other borders can import, if their rule has the same ``kind``."""

    kind: str
    updates: int = 0
    samples: int = 0
    pieces: Sequence[PieceState] = ()


@dataclass(frozen=True, slots=True)
class PushContext:
    """What the server knows of a push beside its entries.

    Attributes:
        base_version: at which the gradient was computed; ``None`` if compensation is not wanted.
        learning_rate: in the push's values; 0 if unknown.
        samples: of the step; 0 for a flush, which no round counts.
        group_rates: learning rates for the rule's param groups; empty for those agreed.
        name: of the push, which is the same on every shard, and no other push's.
    """

    base_version: int | None = None
    learning_rate: float = 0.0
    samples: int = 1
    group_rates: tuple[float, ...] = ()
    name: str = ""


PLAIN = PushContext()


class UpdateRule(Protocol):
    """Applies pushes; called on the apply thread, or before the shard is served. A rule without state adds ``apply``.

    Attributes:
        kind: of the exported state.
        rates: the agreed learning rate of each param group; empty if the rule has none.
        densifies: whether a sparse push changes more than the entries that it names.
        overwrites: is told which elements of the parameters and of the exported state are about to change.
    """

    kind: str
    rates: tuple[float, ...] = ()
    densifies: bool = False
    overwrites: Overwrites = staticmethod(lambda tensor, offsets: None)

    @abstractmethod
    def apply(self, push: SparseSlice | None, context: PushContext = PLAIN) -> ChangedIndices:
        """Change the parameters, and return which may have changed; ``None`` is a push without entries.

        Raises :class:`Rejected` (``NON_FINITE``), with nothing changed, if a parameter would leave fp32's range.
        """

    def export(self) -> RuleState:
        """Return the rule's state: the tensors themselves, which :meth:`apply` changes."""
        return RuleState()

    def restore(self, state: RuleState) -> None:
        """Restore an exported state; raises ``ValueError`` or ``KeyError`` if the state does not fit."""

    def export_portable(self) -> PortableState:
        """Return the rule's state by entries of the layout."""
        return PortableState(self.kind)

    def import_portable(self, states: Sequence[PortableState]) -> bool:
        """Import the states of all shards of another run; False if their rule is of another kind."""
        return {state.kind for state in states} == {self.kind}


def import_by_entries(states: Sequence[PortableState], span: Span, into: Mapping[str, torch.Tensor]) -> None:
    """Fill ``into`` with this span's values, taken from the states of a run with other shard borders."""
    for piece in (piece for state in states for piece in state.pieces):
        common = piece.span.intersect(span)
        for name, tensor in into.items() if common.length else ():
            part = piece.state[name][common.start - piece.span.start : common.end - piece.span.start]
            tensor[common.start - span.start : common.end - span.start] = part


RuleMaker = Callable[[ModelLayout, Span, torch.Tensor], UpdateRule]
"""Makes a run's rule for parameters ``theta`` (fp32 ``[span.length]``, changed in place) of a layout's span.

Raises :class:`Rejected` (``BAD_REQUEST``) if rule and model do not go together.
"""
