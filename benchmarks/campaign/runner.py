"""Work that is done once: what the ledger has is not done again; what fails is told, and tried by the next call."""

import time
from collections.abc import Callable
from typing import Any, Protocol

from benchmarks.campaign.ledger import Ledger
from benchmarks.campaign.processes import ChildFailedError
from psclient.errors import SparsepsError


class Watcher(Protocol):
    """Is told how far it is, in expected seconds of work."""

    def plan(self, expected_seconds: float) -> None:
        """Expect more work."""

    def begin(self, what: str) -> None:
        """See something begin."""

    def done(self, expected_seconds: float, seconds: float | None) -> None:
        """See something end; ``None`` seconds if it was done before."""


class Runner:
    """Does pieces of work, each once.

    Attributes:
        watcher: is told.
        failures: what went wrong, in words.
    """

    def __init__(self, ledger: Ledger, watcher: Watcher) -> None:
        self.watcher = watcher
        self.failures: list[str] = []
        self._ledger = ledger

    def once(
        self, key: str, words: str, expected_seconds: float, do: Callable[[], dict[str, Any]] | None
    ) -> dict[str, Any] | None:
        """Return what the ledger has, or what ``do`` returns; ``None`` if it fails, or if there is no ``do``."""
        kept = self._ledger.get(key)
        if kept is not None:
            self.watcher.done(expected_seconds, None)
            return kept
        if do is None:
            return None
        self.watcher.begin(words)
        started = time.monotonic()
        try:
            kept = do()
        except (ChildFailedError, SparsepsError) as error:
            self.failures.append(f"{words}: {error}")
            return None
        finally:
            self.watcher.done(expected_seconds, time.monotonic() - started)
        self._ledger.keep(key, kept)
        return kept
