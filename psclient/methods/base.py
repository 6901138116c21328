"""What a training method is: what a gradient adds to a memory, and what happens to what is sent or comes back.

A method works on one tensor at a time, flattened, and knows neither selection nor RPC. ``state`` is the optimizer's own
``state[parameter]``, so whatever a method keeps there is part of ``state_dict()``.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from pscore.kernels.base import Feed

State = dict[str, Any]
Group = Mapping[str, Any]
"""A param group: ``lr``, ``momentum``, … as the schedulers left them."""


class Step(NamedTuple):
    """What a backward pass leaves for one tensor.

    Attributes:
        gradient: ``g``, ``[n]``, in the parameter's dtype; not to be changed.
        parameters: ``θ``, ``[n]``; not to be changed; ``None`` where there is no weight decay.
        clip: what the whole gradient is multiplied by.
    """

    gradient: torch.Tensor
    parameters: torch.Tensor | None
    clip: float = 1.0


class Sparse(NamedTuple):
    """A memory of which the largest entries are sent.

    Attributes:
        memory: fp32 ``[n]``.
        added: what this step adds to it; ``None`` for nothing.
        keep: what remains in the memory of an entry that is sent, as a factor.
        unit: what is sent is ``unit·memory``.
        masked: set to zero where an entry is sent; ``None`` for nothing.
    """

    memory: torch.Tensor
    added: Feed | None = None
    keep: float = 0.0
    unit: float = 1.0
    masked: torch.Tensor | None = None


class Sent(NamedTuple):
    """What one tensor sends: int64 offsets (``None``: every element) and fp32 values, which the server subtracts."""

    offsets: torch.Tensor | None
    values: torch.Tensor


class Method(Protocol):
    """One training method."""

    name: ClassVar[str]

    @staticmethod
    def accumulate(state: State, group: Group, step: Step) -> Sparse | torch.Tensor:
        """Say what the step adds to which memory; or, for a dense method, return what is sent whole (fp32 ``[n]``)."""

    @staticmethod
    def held(state: State, group: Group) -> Sparse | None:
        """Say which memory a flush empties; ``None`` where there is none yet."""

    @staticmethod
    def give_back(state: State, group: Group, returned: Sent, like: torch.Tensor) -> None:
        """Take back what did not arrive, refused by a server or lost to quantisation, so that nothing is lost.

        ``like`` is the parameter: a state that has no memory yet is given one of its size on its device.
        """


def memory(state: State, name: str, like: torch.Tensor) -> torch.Tensor:
    """Return the fp32 tensor ``state[name]``, zero at first, flat like ``like``."""
    if name not in state:
        state[name] = torch.zeros(like.numel(), dtype=torch.float32, device=like.device)
    tensor: torch.Tensor = state[name]
    return tensor


def add(tensor: torch.Tensor, returned: Sent, factor: float = 1.0) -> None:
    """``tensor += factor·returned``."""
    values = returned.values.to(tensor.device)
    if returned.offsets is None:
        tensor.add_(values, alpha=factor)
    else:
        tensor.index_add_(0, returned.offsets.to(tensor.device), values, alpha=factor)
