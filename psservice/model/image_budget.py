"""The memory of images: what top-k replies may keep, on the device of the parameters."""

import threading


class ImageBudget:
    """Bytes that images may occupy together; 0 for no image. Thread-safe."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.bytes = 0
        self._lock = threading.RLock()  # garbage collection may free a claim under the lock

    def claim(self, nbytes: int) -> "Claim | None":
        """Claim room for an image before it is made; ``None`` where there is not enough."""
        with self._lock:
            if self.bytes + nbytes > self.most:
                return None
            self.bytes += nbytes
        return Claim(self, nbytes)

    def free(self, nbytes: int) -> None:
        """Free the room of a claim."""
        with self._lock:
            self.bytes -= nbytes


class Claim:
    """The room of one image; kept beside the image and freed with the last reference."""

    __slots__ = ("_budget", "_bytes")

    def __init__(self, budget: ImageBudget, nbytes: int) -> None:
        self._budget, self._bytes = budget, nbytes

    def __del__(self) -> None:
        self._budget.free(self._bytes)
