"""The memory of images: what top-k replies may keep, on the device of the parameters."""

import threading


class ImageBudget:
    """Bytes that images may occupy together. Thread-safe.

    Args:
        most: in total; 0 for no image.
    """

    def __init__(self, most: int) -> None:
        """Begin with none."""
        self.most = most
        self._bytes = 0
        self._lock = threading.RLock()  # a claim may be freed by whatever runs under it

    @property
    def bytes(self) -> int:
        """Bytes claimed now."""
        return self._bytes

    def claim(self, nbytes: int) -> "Claim | None":
        """Claim room for an image before it is made; ``None`` where there is not enough."""
        with self._lock:
            if self._bytes + nbytes > self.most:
                return None
            self._bytes += nbytes
        return Claim(self, nbytes)

    def give_back(self, nbytes: int) -> None:
        """Free what a claim had."""
        with self._lock:
            self._bytes -= nbytes


class Claim:
    """The room of one image; it lives where the image does, and is given back with the last reference."""

    __slots__ = ("_budget", "_bytes")

    def __init__(self, budget: ImageBudget, nbytes: int) -> None:
        """Hold the room."""
        self._budget, self._bytes = budget, nbytes

    def __del__(self) -> None:
        """Give it back."""
        self._budget.give_back(self._bytes)
