"""A thread that looks at files: a file on a mount that hangs keeps that thread waiting, and no other."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

log = logging.getLogger(__name__)

_SECONDS = 0.5  # between two looks


class FileWatcher:
    """A thread that calls whatever was given to :meth:`watch`, again and again; it starts with the first of these."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._asked, self._closed = threading.Event(), False
        self._next = _running_future()

    def watch(self, call: Callable[[], object]) -> None:
        """Call this at each look."""
        self._calls.append(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="file-watcher", daemon=True)
            self._thread.start()

    def look(self) -> Future[None]:
        """Look now; the result, which all who ask meanwhile share, is there after a look that begins from here on."""
        with self._lock:
            looked = self._next
        self._asked.set()
        return looked

    def close(self) -> None:
        """End the thread, without waiting for a file."""
        self._closed = True
        self._asked.set()

    def _work(self) -> None:
        while not self._closed:
            self._asked.wait(_SECONDS)
            self._asked.clear()
            with self._lock:
                looked, self._next = self._next, _running_future()
            for call in self._calls:
                try:
                    call()
                except Exception:
                    log.exception("files that may have changed could not be looked at")
            looked.set_result(None)


def _running_future() -> Future[None]:
    """Return a future that nobody who waits for it can cancel for the others."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future
