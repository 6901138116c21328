"""Adagrad on the server: the rule of ``psclient.ServerAdagrad`` (Duchi, Hazan and Singer, 2011), as torch has it.

::

    v ← v + g²
    θ ← θ − lr / (1 + t·lr_decay) · g / (√v + ε)        # t pushes, or rounds, before this one

A gradient of zero changes nothing at all: a push of some rows of an embedding is the same step as one of all its rows.
"""

import torch

from pscore.model.layout import ModelLayout, Span
from psservice.rules.optimizer_settings import TorchSettings, bad
from psservice.rules.scaled_by_squares import ScaledBySquares, options_of

_LARGEST_FIRST, _LARGEST_DECAY = 1e30, 1e30


class Adagrad(ScaledBySquares):
    """Adagrad with lr, lr_decay, eps and initial_accumulator_value; ``BAD_REQUEST`` for other settings."""

    kind = "adagrad"
    squares_name = "sum"

    def __init__(self, settings: TorchSettings, layout: ModelLayout, span: Span, theta: torch.Tensor) -> None:
        defaults = {"lr_decay": 0.0, "eps": 1e-10, "initial_accumulator_value": 0.0}
        options = options_of(settings, "Adagrad", defaults)
        self._decay, first = float(options["lr_decay"]), float(options["initial_accumulator_value"])
        for name, value, most in (
            ("lr_decay", self._decay, _LARGEST_DECAY),
            ("initial_accumulator_value", first, _LARGEST_FIRST),
        ):
            if not 0 <= value <= most:
                raise bad(f"{name} of the rule adagrad must be from 0 to {most:g}, not {value!r}")
        super().__init__(settings, options["eps"], first, layout, span, theta)

    def coefficients(self, updates: int) -> tuple[float, float, float]:
        """Return 1, 1, and the share that is left of the rates."""
        return 1.0, 1.0, 1 / (1 + updates * self._decay)
