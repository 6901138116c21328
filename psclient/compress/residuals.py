"""The residuals and momenta of a model's parameters: on the host parts of one flat array each, in layout order.

Those of parameters that are selected from on their own device are there, in fp32. Those on the host are fp32 too, or
bf16, which is half of the bytes: a table has a copy of its part in fp32 for the length of a selection.

``optimizer.state[parameter][name]`` is a tensor over its part, with a storage of its own, so that saving or copying it
takes no more than that. A tensor that was put there by others, as by ``load_state_dict``, is copied into the part.
"""

from abc import abstractmethod
from collections.abc import MutableMapping, Sequence
from itertools import repeat
from operator import is_
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from psclient.compress.method import State
from pscore.model.layout import ModelLayout, Span
from pscore.selection.host.rounding import narrowed, widened
from pscore.selection.rule import Reals

RESIDUAL_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""What residuals and momenta may be kept in on the host, by the name in the settings."""

_MOST_FOUND = 64  # sets of parameters


class TableMemories(Protocol):
    """The memories that a table of tensors on the host reads and writes."""

    def flat(self, name: str, span: Span) -> Reals:
        """Return the memories of this name in the table's span, fp32; a table knows where each begins."""

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

    ``on_host`` tells of each parameter whether its memories are here; it may change between two steps. ``dtype`` is of
    those that are: fp32 or bf16.
    """

    def __init__(
        self,
        layout: ModelLayout,
        parameters: Sequence[torch.Tensor],
        states: MutableMapping[torch.Tensor, State],
        on_host: NDArray[np.bool_],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.states, self.dtype = states, dtype
        self._layout, self._parameters, self._on_host = layout, parameters, on_host
        self._flat: dict[str, NDArray[Any]] = {}  # fp32, or the bits of bf16
        self._views: dict[str, dict[int, torch.Tensor]] = {}
        self._known: list[State] = []  # the states of all parameters at the last look-up
        self._found: dict[tuple[int, ...], list[State]] = {}  # the states of some parameters, by their positions
        self._placed: dict[tuple[str, tuple[int, ...]], list[torch.Tensor]] = {}
        self._used: set[tuple[str, int]] = set()  # whose place has been in use
        self._turn = 0  # counts what was rounded

    def state(self, position: int) -> State:
        """Return a parameter's state."""
        return self.states[self._parameters[position]]

    def stored(self, name: str) -> NDArray[Any]:
        """Return all memories of this name ``[n]``, as they are kept: fp32, or the bits of bf16.

        A place is meaningful if its parameter's memory is here, and was required.
        """
        if name not in self._flat:
            # Of pages that the system zeroes when they are first touched: what is on other devices costs nothing.
            self._flat[name] = np.zeros(self._layout.size, np.float32 if self.dtype == torch.float32 else np.uint16)
            self._views[name] = {}
        return self._flat[name]

    def flat(self, name: str, span: Span) -> Reals:
        """Return the memories of this name in a span of the layout, which are fp32."""
        assert self.dtype == torch.float32, "those in bf16 are copied: see CopiedMemories"
        return self.stored(name)[span.start : span.end]

    def read(self, stored: NDArray[Any]) -> Reals:
        """Return memories in fp32; those that are kept so are not copied."""
        return stored if self.dtype == torch.float32 else widened(stored)

    def kept(self, values: Reals) -> NDArray[Any]:
        """Return fp32 values as they are kept; in bf16 they are rounded up or down by chance."""
        if self.dtype == torch.float32:
            return values
        self._turn += 1
        return narrowed(values, self._turn)

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
        self.stored(name)
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
        """Return a parameter's memory ``[n]``, as it is kept; zero at first."""
        parameter = self._parameters[position]
        state = self.state(position)
        if self._on_host[position]:
            self.stored(name)
            return self._place(state, name, position)
        if name not in state:
            state[name] = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        memory: torch.Tensor = state[name]
        return memory

    def _place(self, state: State, name: str, position: int) -> torch.Tensor:
        views = self._views[name]
        if position not in views:
            span = self._layout.span(position)
            views[position] = torch.from_numpy(self._flat[name][span.start : span.end]).view(self.dtype)
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


class CopiedMemories(TableMemories):
    """A copy of some memories for the length of one selection from a span; :meth:`write_back` ends it.

    Subclasses say what is copied of each parameter, and where to.
    """

    def __init__(self, memories: Memories, span: Span) -> None:
        self._memories, self.span = memories, span
        self._flat: dict[str, Reals] = {}
        self._copied: set[tuple[str, int]] = set()  # names of memories, and positions

    @abstractmethod
    def part_of(self, position: int) -> slice:
        """Return where a parameter's part of the copy is."""

    @abstractmethod
    def taken(self, stored: NDArray[Any], position: int) -> NDArray[Any]:
        """Return what is copied of a parameter, out of all that is stored."""

    @abstractmethod
    def put(self, stored: NDArray[Any], position: int, kept: NDArray[Any]) -> None:
        """Put what was copied of a parameter in its place again."""

    def flat(self, name: str, span: Span) -> Reals:
        """Return the copy of the memories of this name, as long as the span; meaningful for those required."""
        if name not in self._flat:
            self._flat[name] = np.zeros(span.length, np.float32)
        return self._flat[name]

    def states_of(self, positions: tuple[int, ...]) -> list[State]:
        """Return the states of some parameters."""
        return self._memories.states_of(positions)

    def has(self, name: str, positions: tuple[int, ...]) -> list[bool]:
        """Tell of each parameter whether it has this memory."""
        return self._memories.has(name, positions)

    def require(self, name: str, positions: tuple[int, ...]) -> None:
        """Have these memories, and a copy of them; zero if there was none."""
        self._memories.require(name, positions)
        flat, stored = self.flat(name, self.span), self._memories.stored(name)
        for position in positions:
            if (name, position) not in self._copied:
                self._copied.add((name, position))
                flat[self.part_of(position)] = self._memories.read(self.taken(stored, position)).reshape(-1)

    def clear(self, name: str, positions: tuple[int, ...]) -> None:
        """Make the copies zero, if there are any."""
        for position in positions:
            if (name, position) in self._copied:
                self._flat[name][self.part_of(position)] = 0

    def write_back(self) -> None:
        """Put the copies in their places."""
        for name, position in sorted(self._copied):  # rounding depends on the order
            copy = self._flat[name][self.part_of(position)]
            self.put(self._memories.stored(name), position, self._memories.kept(copy))


class WholeMemories(CopiedMemories):
    """A copy of whole memories, laid out as a span of the layout."""

    def __init__(self, memories: Memories, layout: ModelLayout, span: Span) -> None:
        super().__init__(memories, span)
        self._layout = layout

    def part_of(self, position: int) -> slice:
        """Return where a parameter lies in the span."""
        span = self._layout.span(position)
        return slice(span.start - self.span.start, span.end - self.span.start)

    def taken(self, stored: NDArray[Any], position: int) -> NDArray[Any]:
        """Return all of a parameter's."""
        span = self._layout.span(position)
        return stored[span.start : span.end]

    def put(self, stored: NDArray[Any], position: int, kept: NDArray[Any]) -> None:
        """Set all of a parameter's."""
        span = self._layout.span(position)
        stored[span.start : span.end] = kept

    def clear(self, name: str, positions: tuple[int, ...]) -> None:
        """Drop these memories, if there are any, and their copies: they are zero when they are made again."""
        self._memories.clear(name, positions)
        self._copied -= {(name, position) for position in positions}
