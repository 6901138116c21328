"""Recursive least squares with forgetting, for costs that are seen a sample at a time and drift."""

from collections.abc import Sequence

import numpy as np

from psclient.buckets.costs import Floats

_CLIP = 4.0  # times the usual error; a sample that is further off counts as if it were no further
_TRUSTED = 8  # samples until the usual error is known
_ERROR_GAIN = 0.05


class RecursiveLeastSquares:
    """Fits ``y ≈ coefficients · features``, coefficients ≥ 0, to samples of which recent ones count most.

    Large errors are clipped: times on a busy machine have a long tail. What is forgotten is bounded: a direction that
    no sample shows keeps what was known of it.

    Args:
        guess: coefficients before the first sample.
        spread: how far off each guess may be.
        error: what a sample is off by, about, in units of ``y``: how fast the guesses are given up.
        memory: calls of :meth:`fade` after which a sample counts ``1/e`` of what it did.
    """

    def __init__(self, guess: Sequence[float], spread: Sequence[float], error: float, memory: float = 10.0) -> None:
        self._scale = np.array(spread, dtype=np.float64)  # coefficients are kept in these units, all alike
        self._theta = np.array(guess, dtype=np.float64) / self._scale
        self._covariance = np.eye(len(self._scale))
        self._own, self._keep = error**2, 1 - 1 / memory
        self._usual, self._samples = 0.0, 0

    @property
    def coefficients(self) -> Floats:
        """The estimate; where one would be negative it is 0, and the others are the best beside it."""
        theta, covariance = self._theta.copy(), self._covariance.copy()
        for _ in theta:
            lowest = int(theta.argmin())
            if theta[lowest] >= 0:
                break
            along = covariance[lowest] / covariance[lowest, lowest]
            theta = theta - along * theta[lowest]
            covariance = covariance - np.outer(along, covariance[lowest])
            theta[lowest] = 0.0
            covariance[lowest, lowest] = 1.0
        found: Floats = np.maximum(theta, 0.0) * self._scale
        return found

    def fade(self) -> None:
        """Let what was seen so far count less: once a step, since steps differ in their number of samples."""
        self._covariance = self._covariance / self._keep
        if float(self._covariance.diagonal().max()) > 1.0:
            lengths, axes = np.linalg.eigh(self._covariance)
            self._covariance = (axes * np.minimum(lengths, 1.0)) @ axes.T

    def observe(self, features: Sequence[float], value: float) -> None:
        """Learn from one sample."""
        phi = np.array(features, dtype=np.float64) * self._scale
        predicted = float(phi @ self._theta)
        along = self._covariance @ phi
        variance = float(phi @ along) + self._own
        error = value - predicted
        if self._samples >= _TRUSTED:
            bound = _CLIP * self._usual
            error = min(max(error, -bound), bound)
        self._samples += 1
        self._usual += max(_ERROR_GAIN, 1 / self._samples) * (abs(value - predicted) - self._usual)
        self._theta = self._theta + along * (error / variance)
        gain = np.eye(len(phi)) - np.outer(along / variance, phi)
        self._covariance = gain @ self._covariance @ gain.T + np.outer(along, along) * (self._own / variance**2)
