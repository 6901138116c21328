"""The residuals and momenta of a model's parameters: on the host parts of one flat array each, in layout order.

Those of parameters that are selected from on their own device are there.

``optimizer.state[parameter][name]`` is a tensor over its part, with a storage of its own, so that saving or copying it
takes no more than that. A tensor that was put there by others, as by ``load_state_dict``, is copied into the part.
"""

from collections.abc import MutableMapping, Sequence
from itertools import repeat
from operator import is_
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from psclient.compress.method import State
from pscore.model.layout import ModelLayout

_MOST_FOUND = 64  # sets of parameters


class TableMemories(Protocol):
    """The memories that a table of tensors on the host reads and writes."""

    def flat(self, name: str) -> NDArray[np.float32]:
        """Return all memories of this name, fp32; a table knows where each begins."""

    def states_of(self, positions: tuple[int, ...]) -> list[State]:
        """Return the states of some parameters."""

    def has(self, name: str, positions: tuple[int, ...]) -> list[bool]:
        """Tell of each parameter whether it has this memory."""

    def require(self, name: str, positions: tuple[int, ...]) -> None:
        """Have these memories; zero if there was none."""

    def clear(self, name: str, positions: tuple[int, ...]) -> None:
        """Make these memories zero, if there are any."""


class Memories(TableMemories):
    """Finds and makes the memories of each parameter; ``states`` may be replaced between two steps.

    ``on_host`` tells of each parameter whether its memories are here; it may change between two steps.
    """

    def __init__(
        self,
        layout: ModelLayout,
        parameters: Sequence[torch.Tensor],
        states: MutableMapping[torch.Tensor, State],
        on_host: NDArray[np.bool_],
    ) -> None:
        self.states = states
        self._layout, self._parameters, self._on_host = layout, parameters, on_host
        self._flat: dict[str, NDArray[np.float32]] = {}
        self._views: dict[str, dict[int, torch.Tensor]] = {}
        self._known: list[State] = []  # the states of all parameters at the last look-up
        self._found: dict[tuple[int, ...], list[State]] = {}  # the states of some parameters, by their positions
        self._placed: dict[tuple[str, tuple[int, ...]], list[torch.Tensor]] = {}
        self._used: set[tuple[str, int]] = set()  # whose place has been in use

    def state(self, position: int) -> State:
        """Return a parameter's state."""
        return self.states[self._parameters[position]]

    def flat(self, name: str) -> NDArray[np.float32]:
        """Return all memories of this name, fp32 ``[n]``; a place is meaningful if its parameter's is here."""
        if name not in self._flat:
            # Of pages that the system zeroes when they are first touched: what is on other devices costs nothing.
            self._flat[name] = np.zeros(self._layout.size, np.float32)
            self._views[name] = {}
        return self._flat[name]

    def states_of(self, positions: tuple[int, ...]) -> list[State]:
        """Return the states of some parameters, which are looked up again if others have replaced a state."""
        if len(self.states) != len(self._known) or not all(map(is_, self.states.values(), self._known)):
            self._found.clear()
        if positions not in self._found:
            if len(self._found) >= _MOST_FOUND:
                self._found.clear()
                self._placed.clear()
            self._found[positions] = [self.state(position) for position in positions]
            self._known = list(self.states.values())
        return self._found[positions]

    def require(self, name: str, positions: tuple[int, ...]) -> None:
        """Have memories that are kept on the host in their places; zero if there was none."""
        self.flat(name)
        states, placed = self.states_of(positions), self._placed.get((name, positions))
        if placed is not None and all(map(is_, map(dict.get, states, repeat(name)), placed)):
            return
        self._placed[name, positions] = [
            self._place(state, name, position) for state, position in zip(states, positions, strict=True)
        ]

    def has(self, name: str, positions: tuple[int, ...]) -> list[bool]:
        """Tell of each parameter whether it has this memory."""
        return [name in state for state in self.states_of(positions)]

    def clear(self, name: str, positions: tuple[int, ...]) -> None:
        """Drop these memories, if there are any: they are zero when they are made again."""
        for state in self.states_of(positions):
            state.pop(name, None)

    def of(self, name: str, position: int) -> torch.Tensor:
        """Return a parameter's memory, fp32 ``[n]``; zero at first."""
        parameter = self._parameters[position]
        state = self.state(position)
        if self._on_host[position]:
            self.flat(name)
            return self._place(state, name, position)
        if name not in state:
            state[name] = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        memory: torch.Tensor = state[name]
        return memory

    def _place(self, state: State, name: str, position: int) -> torch.Tensor:
        views = self._views[name]
        if position not in views:
            span = self._layout.span(position)
            views[position] = torch.from_numpy(self._flat[name][span.start : span.end])
        held, view = state.get(name), views[position]
        is_new = (name, position) not in self._used
        self._used.add((name, position))
        if held is None:
            if not is_new:  # else its pages are zero, and a table of many rows touches few of them
                view.zero_()
        elif held is not view:
            view.copy_(held.reshape(-1))
        state[name] = view
        return view
