"""Many hold the model as it is; one changes it when nobody does."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_POLL_SECONDS = 0.1


class Holds:
    """A lock that many may hold together, or one alone. Whoever waits to be alone goes before later holders.

    A thread may hold it several times over, and give it back in any order, as tasks of an event loop do.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._holders = 0
        self._waiting_alone = 0
        self._is_alone = False
        self._mine = threading.local()

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds it, with others or without."""
        return getattr(self._mine, "depth", 0) > 0

    @contextmanager
    def together(self, seconds: float | None = None) -> Iterator[None]:
        """Hold it together with others; raises ``TimeoutError`` if that cannot be in so many seconds."""
        if not self.is_mine:
            end = None if seconds is None else time.monotonic() + seconds
            with self._condition:
                while self._is_alone or self._waiting_alone:
                    left = None if end is None else end - time.monotonic()
                    if left is not None and left <= 0:
                        raise TimeoutError
                    self._condition.wait(left)
                self._holders += 1
        self._mine.depth = getattr(self._mine, "depth", 0) + 1
        try:
            yield
        finally:
            self._mine.depth -= 1
            if not self.is_mine:
                with self._condition:
                    self._holders -= 1
                    self._condition.notify_all()

    @contextmanager
    def alone(self, is_cancelled: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Hold it alone; raises ``InterruptedError`` if nobody wants that any more."""
        with self._condition:
            self._waiting_alone += 1
            try:
                while self._is_alone or self._holders:
                    self._condition.wait(_POLL_SECONDS)
                    if is_cancelled():
                        raise InterruptedError
                self._is_alone = True
            finally:
                self._waiting_alone -= 1
                self._condition.notify_all()
        try:
            yield
        finally:
            with self._condition:
                self._is_alone = False
                self._condition.notify_all()
