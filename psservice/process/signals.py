"""Signals are heard by a thread that does nothing else."""

import os
import signal
import threading
from collections.abc import Callable

_HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class SignalThread:
    """Calls ``hear`` with each SIGTERM, SIGINT and SIGHUP, in a thread. Only the main thread may make one.

    Python runs a handler in the main thread, between two instructions: an exception of it may come between the start
    of a gRPC server and the assignment of it, and a signal just before a file of a hung mount is opened is not heard
    before that file is there. The thread is told of a signal at once, whatever the main thread does.
    """

    def __init__(self, hear: Callable[[signal.Signals], None]) -> None:
        self.hear = hear
        """What is called; another may be assigned at any time."""
        numbers, told = os.pipe()
        os.set_blocking(told, False)
        threading.Thread(target=self._work, args=(numbers,), name="signals", daemon=True).start()
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        for number in _HEARD:
            signal.signal(number, lambda *_: None)  # without a handler there is nothing to hear
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)  # a parent may have left them blocked

    def _work(self, numbers: int) -> None:
        while True:
            for number in os.read(numbers, 64):
                if number in _HEARD:
                    self.hear(signal.Signals(number))
