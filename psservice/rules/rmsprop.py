"""RMSprop on the server: the rule of ``psclient.ServerRMSprop`` (Tieleman and Hinton, 2012), as torch has it.

::

    v ← α·v + (1 − α)·g²
    θ ← θ − lr·g / (√v + ε)
"""

import torch

from pscore.model.layout import ModelLayout, Span
from psservice.rules.optimizer_settings import TorchSettings, bad
from psservice.rules.scaled_by_squares import ScaledBySquares, options_of

_LEAST_ALPHA = 0.5


class RMSprop(ScaledBySquares):
    """RMSprop with lr, alpha and eps; ``BAD_REQUEST`` for other settings."""

    kind = "rmsprop"
    squares_name = "square_avg"

    def __init__(self, settings: TorchSettings, layout: ModelLayout, span: Span, theta: torch.Tensor) -> None:
        options = options_of(settings, "RMSprop", {"alpha": 0.99, "eps": 1e-8})
        self._alpha = float(options["alpha"])
        if not _LEAST_ALPHA <= self._alpha < 1:
            raise bad(f"alpha of the rule rmsprop must be from {_LEAST_ALPHA} to below 1, not {options['alpha']!r}")
        super().__init__(settings, options["eps"], 0.0, layout, span, theta)

    def coefficients(self, updates: int) -> tuple[float, float, float]:
        """Return ``α``, ``1 − α`` and 1."""
        return self._alpha, 1 - self._alpha, 1.0
