"""LAGS: a density for each layer, as large as its push can hide behind the backward time that is still ahead."""

from collections.abc import Sequence
from dataclasses import dataclass

from psclient.errors import ConfigurationError


@dataclass(frozen=True)
class LayerDensity:
    """Densities by layer (LAGS-SGD: layer-wise adaptive gradient sparsification, Shi et al., 2019).

    ::

        ρ_l = clip((slack_l − a) / (8·β·n_l), lowest, highest)

    with the backward time ahead once the layer's gradient is there (``slack_l``), and the measured start-up ``a`` of a
    message and time ``β`` of a byte (docs/internals/merging.md); ``start`` until these are measured. An object of this
    class is a density for any sparse method; it needs ``overlap=True``, since without overlap nothing is ahead.
    """

    lowest: float = 0.001
    highest: float = 0.1
    start: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.lowest <= self.start <= self.highest <= 1:
            raise ConfigurationError(
                f"lags needs 0 < lowest ≤ start ≤ highest ≤ 1, not {self.lowest}, {self.start}, {self.highest}"
            )

    def check(self, *, overlap: bool, select_over: str) -> None:
        """Raise :class:`ConfigurationError` where densities by layer would mean nothing."""
        if not overlap:
            raise ConfigurationError(
                "density=lags() hides pushes behind the backward pass, and without overlap there is none left: pass "
                "overlap=True, or give a number as density"
            )
        if select_over != "tensor":
            raise ConfigurationError(
                "density=lags() gives each tensor a density of its own, and select_over='group' selects over several: "
                "set select_over to tensor"
            )

    def __call__(self, step: int) -> float:
        """Return the density of all layers before costs are measured, at any step."""
        return self.start

    def densities(
        self, slack: Sequence[float], elements: Sequence[float], message: float, byte: float, entry_bytes: float = 8.0
    ) -> list[float]:
        """Return ``ρ_l``; ``slack``, ``message`` and ``byte`` in seconds, ``entry_bytes`` 8 until measured."""
        found = []
        for ahead, count in zip(slack, elements, strict=True):
            cost = entry_bytes * byte * count
            density = (ahead - message) / cost if cost > 0 else self.highest
            found.append(min(max(density, self.lowest), self.highest))
        return found
