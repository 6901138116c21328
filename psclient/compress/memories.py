"""The residuals and momenta of a model's parameters: on the host parts of one flat array each, in layout order.

``optimizer.state[parameter][name]`` is a tensor over its part, with a storage of its own, so that saving or copying it
takes no more than that. A tensor that was put there by others, as by ``load_state_dict``, is copied into the part.
"""

from collections.abc import MutableMapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from psclient.compress.method import State
from pscore.model.layout import ModelLayout


class Memories:
    """Finds and makes the memories of each parameter; ``states`` may be replaced between two steps."""

    def __init__(
        self, layout: ModelLayout, parameters: Sequence[torch.Tensor], states: MutableMapping[torch.Tensor, State]
    ) -> None:
        self.states = states
        self._layout, self._parameters = layout, parameters
        self._flat: dict[str, NDArray[np.float32]] = {}
        self._views: dict[str, dict[int, torch.Tensor]] = {}

    def state(self, position: int) -> State:
        """Return a parameter's state."""
        return self.states[self._parameters[position]]

    def flat(self, name: str) -> NDArray[np.float32]:
        """Return all memories of this name, fp32 ``[n]``; a place is meaningful where a host parameter has one."""
        if name not in self._flat:
            # Of pages that the system zeroes when they are first touched: what is on other devices costs nothing.
            self._flat[name] = np.zeros(self._layout.size, np.float32)
            self._views[name] = {}
        return self._flat[name]

    def require(self, name: str, positions: Sequence[int]) -> None:
        """Have the memories of parameters on the host in their places; zero where there was none."""
        self.flat(name)
        views, states, parameters = self._views[name], self.states, self._parameters
        for position in positions:
            state = states[parameters[position]]
            held = state.get(name)
            if held is None or held is not views.get(position):
                self._place(state, name, position)

    def of(self, name: str, position: int) -> torch.Tensor:
        """Return a parameter's memory, fp32 ``[n]`` on its device; zero at first."""
        parameter = self._parameters[position]
        if parameter.device.type == "cpu":
            self.require(name, [position])
        state = self.state(position)
        if name not in state:
            state[name] = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        memory: torch.Tensor = state[name]
        return memory

    def _place(self, state: State, name: str, position: int) -> None:
        views = self._views[name]
        if position not in views:
            span = self._layout.span(position)
            views[position] = torch.from_numpy(self._flat[name][span.start : span.end])
        held, view = state.get(name), views[position]
        if held is None:
            view.zero_()
        else:
            view.copy_(held.reshape(-1))
        state[name] = view
