"""Selectors: which entries of a tensor are sent."""

from collections.abc import Mapping

from pscore.selection.exact import SelectFunction, exact, ldte
from pscore.selection.rule import TOLERANCE, SelectorState

__all__ = [
    "DEFAULT_DENSE_BELOW",
    "DEFAULT_SELECTOR",
    "SELECTORS",
    "TOLERANCE",
    "SelectFunction",
    "SelectorState",
    "entries_for",
]

DEFAULT_SELECTOR = "warm"

SELECTORS: Mapping[str, SelectFunction | None] = {"exact": exact, "ldte": ldte, DEFAULT_SELECTOR: None}
"""Every selector by name; ``None`` is the rule of :mod:`pscore.selection.rule`, of all tensors at once."""

DEFAULT_DENSE_BELOW = 4096
"""Tensors with fewer elements (biases, norms) are sent whole: they cost little and matter much. 0 exempts nothing."""


def entries_for(numel: int, density: float) -> int:
    """Return ``k = max(1, ⌊ρ·n⌋)`` (0 for an empty tensor): even a one-element tensor is updated."""
    return min(numel, max(1, int(density * numel)))
