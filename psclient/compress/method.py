"""What a training method defines: what a gradient adds to a residual, and what is sent of the residual.

A method works on one tensor at a time, flattened, and knows neither selection nor RPC. ``state`` is the optimizer's own
``state[parameter]``, so whatever a method keeps there is part of ``state_dict()``.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from pscore.model.sparse_slice import SparseSlice
from pscore.select.kernels.base import GradientUpdate

State = dict[str, Any]
Group = Mapping[str, Any]
"""A param group: ``lr``, ``momentum``, … as the schedulers left them."""


class Step(NamedTuple):
    """What a backward pass leaves for one tensor; neither is to be changed.

    Attributes:
        gradient: ``g``, ``[n]``, in the parameter's dtype, or in fp32 where it was scaled.
        parameters: ``θ``, ``[n]``; ``None`` where there is no weight decay.
    """

    gradient: torch.Tensor
    parameters: torch.Tensor | None


class Sparse(NamedTuple):
    """A memory of which the largest entries are sent.

    Attributes:
        memory: fp32 ``[n]``.
        added: what this step adds to it; ``None`` for nothing.
        keep: what remains in the memory of an entry that is sent, as a factor.
        unit: what is sent is ``unit·memory``.
        masked: set to zero where an entry is selected, not where a tensor is sent whole; ``None`` for nothing.
    """

    memory: torch.Tensor
    added: GradientUpdate | None = None
    keep: float = 0.0
    unit: float = 1.0
    masked: torch.Tensor | None = None

    @property
    def share(self) -> float:
        """What enters the memory again of what was sent and did not arrive, as a factor; 0 where nothing was sent."""
        return (1 - self.keep) / self.unit if self.unit else 0.0


class Whole(NamedTuple):
    """What a tensor sends whole.

    Attributes:
        values: fp32 ``[n]``, which the server subtracts; nothing else may refer to them.
        unit: what is sent is ``unit`` times what was gathered.
    """

    values: torch.Tensor
    unit: float = 1.0

    @property
    def share(self) -> float:
        """See :attr:`Sparse.share`."""
        return 1 / self.unit if self.unit else 0.0


class Method(Protocol):
    """One training method."""

    name: ClassVar[str]

    @staticmethod
    def accumulate(state: State, group: Group, step: Step) -> Sparse | Whole:
        """Return what the step adds to the residual; of a dense method, what is sent whole, the residual included."""

    @staticmethod
    def held(state: State, group: Group) -> Sparse:
        """Return how a flush empties ``state["residual"]``, which is there."""


def memory(state: State, name: str, like: torch.Tensor) -> torch.Tensor:
    """Return the fp32 tensor ``state[name]``, zero at first, flat like ``like``."""
    if name not in state:
        state[name] = torch.zeros(like.numel(), dtype=torch.float32, device=like.device)
    tensor: torch.Tensor = state[name]
    return tensor


def restore(residual: torch.Tensor, share: float, piece: SparseSlice) -> None:
    """Add to a residual what was sent and did not arrive, refused by a server or lost to quantisation.

    Args:
        residual: that of the elements of ``piece.span``.
        share: as :attr:`Sparse.share` or :attr:`Whole.share` of what was sent.
        piece: what did not arrive.
    """
    values = piece.values.to(residual.device)
    if piece.offsets is None:
        residual.add_(values, alpha=share)
    else:
        residual.index_add_(0, piece.offsets.to(residual.device), values, alpha=share)
