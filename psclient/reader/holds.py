"""Many hold the model as it is; one changes it when nobody does."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Holds:
    """A lock that many may hold together, or one alone. Whoever waits to be alone goes before later holders.

    A thread may hold it several times over.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._holders = 0
        self._waiting_alone = 0
        self._is_alone = False
        self._mine = threading.local()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Hold it together with others."""
        depth = getattr(self._mine, "depth", 0)
        if not depth:
            with self._condition:
                while self._is_alone or self._waiting_alone:
                    self._condition.wait()
                self._holders += 1
        self._mine.depth = depth + 1
        try:
            yield
        finally:
            self._mine.depth = depth
            if not depth:
                with self._condition:
                    self._holders -= 1
                    self._condition.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold it alone."""
        with self._condition:
            self._waiting_alone += 1
            try:
                while self._is_alone or self._holders:
                    self._condition.wait()
                self._is_alone = True
            finally:
                self._waiting_alone -= 1
        try:
            yield
        finally:
            with self._condition:
                self._is_alone = False
                self._condition.notify_all()
