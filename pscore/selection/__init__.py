"""Selectors: which entries of a tensor, or of a merged group, are sent."""

from pscore.selection.base import TOLERANCE, Selector, SelectorState, exact
from pscore.selection.research import ldte, reuse, sampled, trimmed
from pscore.selection.warm import warm

__all__ = [
    "DEFAULT_DENSE_BELOW",
    "DEFAULT_SELECTOR",
    "SELECTORS",
    "TOLERANCE",
    "Selector",
    "SelectorState",
    "entries_for",
]

SELECTORS: dict[str, Selector] = {
    "exact": exact,
    "sampled": sampled,
    "trimmed": trimmed,
    "ldte": ldte,
    "warm": warm,
    "reuse": reuse,
}
"""Every selector by name."""

DEFAULT_SELECTOR = "warm"

DEFAULT_DENSE_BELOW = 4096
"""Tensors with fewer elements (biases, norms) are sent whole: they cost little and matter much. 0 exempts nothing."""


def entries_for(numel: int, density: float) -> int:
    """Return ``k = max(1, ⌊ρ·n⌋)`` (0 for an empty tensor): even a one-element tensor is updated."""
    return min(numel, max(1, int(density * numel)))
