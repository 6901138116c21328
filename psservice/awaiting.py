"""Calls that wait for a shard's state instead of being refused, and what wakes them.

A handler that finds its condition unmet raises :class:`NotYetError` and ends, so a call that waits holds no thread. The
event loop runs the handler again once the condition holds. Whatever changes a condition (a version, a round, a lease,
an installed model) calls :meth:`Waiters.wake`.
"""

import math
from collections.abc import Callable

from pscore.wire.errors import ErrorCode, Rejected

_RETRY_SECONDS = 0.1  # for a call that does not wait, or has waited as long as it may


class NotYetError(Rejected):
    """A refusal that stands until a condition holds; a call that may wait is answered then.

    Attributes:
        is_over: tells whether the condition holds; called on the event loop, so it waits for nothing.
        again_seconds: after which the call is tried again in any case, because time alone may meet the condition.
        least_seconds: how long a call waits that does not say for how long it may.
    """

    def __init__(
        self,
        reason: ErrorCode,
        detail: str,
        is_over: Callable[[], bool],
        *,
        again_seconds: float = math.inf,
        least_seconds: float = 0.0,
        **metadata: str,
    ) -> None:
        super().__init__(reason, detail, retry_seconds=min(_RETRY_SECONDS, again_seconds), **metadata)
        self.is_over, self.again_seconds, self.least_seconds = is_over, again_seconds, least_seconds

    def refusal(self) -> Rejected:
        """Return the refusal alone, for a call that cannot wait."""
        return Rejected(self.reason, self.detail, retry_seconds=self.retry_seconds, **self.metadata)


class Waiters:
    """The calls that wait for one shard. :meth:`wake` is for any thread, all else is for the event loop."""

    def __init__(self) -> None:
        self._waiting: dict[Callable[[], None], Callable[[], bool]] = {}
        self._post: Callable[[Callable[[], None]], object] = lambda look: None
        self._is_posted = False
        self.everyone = self._seen = object()  # another one whenever everyone is woken, and that of the last look

    def __len__(self) -> int:
        return len(self._waiting)

    def serve_on(self, post: Callable[[Callable[[], None]], object]) -> None:
        """Look after the calls on an event loop; ``post`` has the loop call something soon, and waits for nothing."""
        self._post = post

    def add(self, wake: Callable[[], None], is_over: Callable[[], bool]) -> None:
        """Have ``wake`` called once ``is_over``, which is asked now and at each change."""
        self._waiting[wake] = is_over  # first: a change from here on posts a look
        if is_over():
            del self._waiting[wake]
            wake()

    def remove(self, wake: Callable[[], None]) -> None:
        """Call it no more."""
        self._waiting.pop(wake, None)

    def wake(self, *, everyone: bool = False) -> None:
        """Have every waiting call look at its condition; waits for nothing, so locks may be held.

        ``everyone``: wake the calls whose condition does not hold as well, because it may never hold any more.
        """
        if everyone:
            self.everyone = object()
        if self._waiting and not self._is_posted:
            self._is_posted = True
            self._post(self._look)

    def _look(self) -> None:
        self._is_posted = False  # first: a change from here on posts anew
        everyone = self.everyone
        wakes_all, self._seen = everyone is not self._seen, everyone
        for wake, is_over in [*self._waiting.items()]:
            if wakes_all or is_over():
                del self._waiting[wake]
                wake()
