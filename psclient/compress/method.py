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


class TensorGradient(NamedTuple):
    """A tensor's gradient ``[n]``, and its values ``θ`` ``[n]`` where there is weight decay; neither may be changed.

    The gradient has the parameter's dtype, or fp32 where it was scaled.
    """

    gradient: torch.Tensor
    parameters: torch.Tensor | None


class ResidualUpdate(NamedTuple):
    """A memory of which the largest entries are sent.

    Attributes:
        memory: fp32 ``[n]``.
        added: this step's addition to the memory: :class:`pscore.select.inputs.Memory` adds it when it selects.
        keep: what remains in the memory of an entry that is sent, as a factor.
        unit: ``unit·memory`` is sent.
        masked: set to zero where an entry is selected, not where a tensor is sent whole; ``None`` for nothing.
    """

    memory: torch.Tensor
    added: GradientUpdate | None = None
    keep: float = 0.0
    unit: float = 1.0
    masked: torch.Tensor | None = None

    @property
    def share(self) -> float:
        """The factor of a sent value that did not arrive and returns to the memory; 0 where nothing was sent."""
        return (1 - self.keep) / self.unit if self.unit else 0.0


class DenseUpdate(NamedTuple):
    """A tensor that is sent whole: ``unit`` times its memory, fp32 ``[n]``, to which nothing else may refer."""

    values: torch.Tensor
    unit: float = 1.0

    @property
    def share(self) -> float:
        """See :attr:`ResidualUpdate.share`."""
        return 1 / self.unit if self.unit else 0.0


class Method(Protocol):
    """One training method."""

    name: ClassVar[str]

    @staticmethod
    def accumulate(state: State, group: Group, step: TensorGradient) -> ResidualUpdate | DenseUpdate:
        """Return what the step adds to the residual; of a dense method, what is sent whole, the residual included.

        A :class:`ResidualUpdate` only describes the addition: the selection of the tensor's entries carries it out.
        """

    @staticmethod
    def held(state: State, group: Group) -> ResidualUpdate:
        """Return how a flush empties ``state["residual"]``, which is there."""


def memory(state: State, name: str, like: torch.Tensor) -> torch.Tensor:
    """Return the fp32 tensor ``state[name]``, zero at first, flat like ``like``."""
    if name not in state:
        state[name] = torch.zeros(like.numel(), dtype=torch.float32, device=like.device)
    tensor: torch.Tensor = state[name]
    return tensor


def restore(residual: torch.Tensor, share: float, piece: SparseSlice) -> None:
    """Add ``share`` of a piece that did not arrive to the residual of its span (:attr:`ResidualUpdate.share`)."""
    values = piece.values.to(residual.device)
    if piece.offsets is None:
        residual.add_(values, alpha=share)
    else:
        residual.index_add_(0, piece.offsets.to(residual.device), values, alpha=share)
