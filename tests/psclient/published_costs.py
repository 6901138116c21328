"""The cost models of the paper (Shi et al., INFOCOM 2020, section V), to compare its greedy on its own ground."""

from dataclasses import dataclass

import numpy as np

from psclient.buckets.costs import Costs, Floats

_SELECTION = 2.18896957e-10  # seconds; top-k on a P102-100
_GIGABIT = {2: (1.6e-3, 1.0e-8), 4: (2.7e-3, 1.3e-8), 8: (4.0e-3, 1.5e-8), 16: (1.1e-2, 1.7e-8)}
ENTRY_BYTES = 8
"""Of an entry on the paper's wire: a 32-bit index and a 32-bit value."""


@dataclass(frozen=True)
class OneStreamCosts(Costs):
    """Costs where backward stands still while a group is selected, as where both share a stream."""

    def begin(self, free: Floats, before: Floats, ready: Floats) -> Floats:
        """Return the end of the last selection, and of the backward pass from there on."""
        return free + (ready - before)


@dataclass(frozen=True, kw_only=True)
class PublishedCosts(OneStreamCosts):
    """``t_s(n) = s·n·log2 n`` and ``t_c = 2(a + 4bWρn)`` on 1 Gbit/s Ethernet, of 2, 4, 8 or 16 workers ``W``."""

    workers: int

    def select(self, tensors: Floats, elements: Floats) -> Floats:
        """Return the time of a top-k over a whole group."""
        return _SELECTION * elements * np.log2(np.maximum(elements, 2))

    def send(self, nbytes: Floats) -> Floats:
        """Return the time of an all-gather of indices and one of values."""
        startup, byte = _GIGABIT[self.workers]
        return 2 * startup + byte * self.workers * nbytes


def sent_bytes(elements: Floats, density: float) -> Floats:
    """Return the bytes that tensors send at a density on the paper's wire."""
    return ENTRY_BYTES * np.maximum(1, np.floor(density * elements))
