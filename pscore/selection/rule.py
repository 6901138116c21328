"""The default selector: last step's threshold in one pass, corrected by the secant of the tail.

The threshold is known before the step, so one pass accumulates and takes. The count that the pass finds moves the
threshold for the next step, by the tail's own scale. If the count misses ``k`` by more than the tolerance, it is
corrected within the step: a surplus is put back (no pass over the memory), a lack costs counting passes and a second
take. The first step starts at the Laplace estimate ``b·ln(n/k)``. A small tensor, whose count varies by chance, may
miss ``k`` by more; it is ranked if it has no threshold. So is a large one, for some steps, if no threshold is found:
equal magnitudes lie on both sides of ``k``, or a few are out of all proportion to the rest.

The threshold does not follow the learning rate: when that falls, the entries near the threshold still consist of steps
at the old rate. The threshold drifts down as these are taken, and the drift is predicted.

:mod:`pscore.selection.host` and :mod:`pscore.selection.cuda` carry the rule out, on the same state.
"""

import math
from collections.abc import MutableMapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Reals = NDArray[np.float32]

SelectorState = MutableMapping[str, float]
"""What is kept of a tensor between steps, and saved: ``threshold`` and ``drift``, or how long it is ``ranked``."""

TOLERANCE = 0.1
"""Share of ``k`` by which a threshold selector may miss it."""

ROOM = 3
"""Entries that a pass may take, as a multiple of ``k``: a surplus up to there needs no other pass."""

SMALL_SIZE = 1 << 14
"""Elements of a tensor whose count may be off by chance."""

CHANCE = 1.5
"""By how much, in square roots of ``k``."""

RANKED_STEPS = 16


def deviation(k: Any, chance: Any) -> Any:
    """Return by how many entries a count may miss ``k`` without a correction; of numbers or of arrays.

    That is the tolerance or, if it is more, ``chance`` times ``√k``, which a count varies by from step to step.
    """
    return np.maximum(TOLERANCE * k, np.minimum(chance * np.sqrt(k), k - 1))


def remember(state: SelectorState, threshold: float, drift: float, ranked: int = 0) -> None:
    """Keep what the next step begins with: a threshold, or for how many steps the tensor is still ranked."""
    if ranked:
        state.clear()
        state["ranked"] = ranked
    else:
        state.pop("ranked", None)
        state["threshold"], state["drift"] = threshold, drift


def threshold_of(state: SelectorState) -> float:
    """Return the threshold that a step begins with: infinite if there is none."""
    return math.inf if "ranked" in state else state.get("threshold", math.inf)
