"""Secret files that may change while the server runs."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from pscore.net.channels import stamp_of

log = logging.getLogger(__name__)

Content = TypeVar("Content")


class SecurityError(Exception):
    """A certificate, a key or a token file cannot be used; the message names it."""


class WatchedFiles(Generic[Content]):
    """The content of files, read again when one changes, unless that fails. Thread-safe. A missing file has changed.

    ``read`` raises :class:`SecurityError` if the files cannot be used.
    """

    def __init__(self, name: str, paths: Sequence[Path], read: Callable[[], Content]) -> None:
        self._name, self._paths, self._read = name, paths, read
        self._lock = threading.Lock()
        self._stamps = self._complained = [stamp_of(path) for path in paths]
        self.content = read()

    def refresh(self) -> bool:
        """Read the files if one has changed; tell whether the content is new. What is wrong is logged once a change."""
        with self._lock:
            stamps = [stamp_of(path) for path in self._paths]
            if stamps == self._stamps:
                return False
            try:
                self.content = self._read()
            except SecurityError as error:
                if self._complained != stamps:
                    self._complained = stamps
                    what = f"{self._name} have changed and cannot be used; the old ones stay"
                    log.error(what, extra={"why": str(error)})
                return False
            self._stamps = self._complained = stamps
        log.info(f"{self._name} read again")
        return True
