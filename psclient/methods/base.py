"""What a training method is: how a gradient becomes what is sent, and what is kept.

A method works on one tensor at a time, flattened, in fp32, and knows no RPC. ``state`` is the optimizer's own
``state[parameter]``, so whatever a method keeps there is part of ``state_dict()``.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

State = dict[str, Any]
Group = Mapping[str, Any]
"""A param group: ``lr``, ``momentum``, … as the schedulers left them."""


class Sent(NamedTuple):
    """What one tensor sends: int64 offsets (``None``: every element) and fp32 values, which the server subtracts."""

    offsets: torch.Tensor | None
    values: torch.Tensor


class Tools(NamedTuple):
    """What a method is handed to select and to quantise.

    Attributes:
        choose: fp32 ``[n]`` to the offsets of the entries to be sent (top ρ of the magnitude).
        quantise: fp32 values to the nearest ones that travel (``Q``); the identity for fp32.
    """

    choose: Callable[[torch.Tensor], torch.Tensor]
    quantise: Callable[[torch.Tensor], torch.Tensor]


class Method(Protocol):
    """One training method."""

    name: ClassVar[str]

    @staticmethod
    def compress(state: State, gradient: torch.Tensor, group: Group, tools: Tools) -> Sent:
        """Accumulate ``gradient`` (fp32 ``[n]``, weight decay included) and take out what is sent now."""

    @staticmethod
    def give_back(state: State, payload: torch.Tensor, group: Group) -> None:
        """Take a refused payload back, so that nothing of it is lost: fp32 ``[n]``, zero where nothing was refused."""

    @staticmethod
    def flush_state(state: State, group: Group, tools: Tools) -> Sent:
        """Take out everything that is still held."""


def memory(state: State, name: str, like: torch.Tensor) -> torch.Tensor:
    """Return the fp32 tensor ``state[name]``, zero at first, flat like ``like``."""
    if name not in state:
        state[name] = torch.zeros(like.numel(), dtype=torch.float32, device=like.device)
    tensor: torch.Tensor = state[name]
    return tensor


def held_entries(memory_tensor: torch.Tensor | None) -> torch.Tensor:
    """Return the offsets at which something is held; none where there is no memory yet."""
    if memory_tensor is None:
        return torch.empty(0, dtype=torch.int64)
    return memory_tensor.nonzero().view(-1)
