"""Staleness and speed: which versions are a worker's own, and the mean time between its pushes."""

from dataclasses import dataclass

_SMOOTHING = 0.1
_MOST_RUNS = 1024  # of a worker that others interrupt so often without a pull; beyond, its oldest count as others'


def smoothed(before: float, seconds: float) -> float:
    """Return a worker's mean time between pushes after one more (seconds; 0 before the first)."""
    return seconds if not before else before + _SMOOTHING * (seconds - before)


@dataclass(frozen=True, slots=True)
class OwnVersions:
    """The versions of a generation that a worker's own pushes have made since the base of the last one.

    ``runs`` has the first and last of neighbouring versions, ascending.
    """

    generation: int = 0
    runs: tuple[tuple[int, int], ...] = ()

    def since(self, generation: int, base: int) -> int:
        """Count those above a base version."""
        if generation != self.generation:
            return 0
        return sum(last - max(first - 1, base) for first, last in self.runs if last > base)

    def noted(self, generation: int, base: int, version: int) -> "OwnVersions":
        """Add a version, and drop those up to the base of its push: a later push has no older base."""
        runs = [(first, last) for first, last in self.runs if last > base] if generation == self.generation else []
        if runs and runs[-1][1] == version - 1:
            runs[-1] = (runs[-1][0], version)
        else:
            runs.append((version, version))
        return OwnVersions(generation, tuple(runs[-_MOST_RUNS:]))
