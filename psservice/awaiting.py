"""Calls that wait for a shard's state instead of being refused, and what wakes them.

A handler that finds its condition unmet raises :class:`NotYetError` and ends, so a call that waits holds no thread. The
event loop runs the handler again once the condition holds. Whatever changes a condition (a version, a round, a lease,
an installed model) calls :meth:`Waiters.wake`. A push changes the conditions of those only that wait for a push of its
worker: the event loop calls :meth:`Waiters.pushed` when it has the push's result.
"""

import math
from collections.abc import Callable

from pscore.wire.errors import ErrorCode, Rejected
from psservice.values import Identity

RECORDS = Identity("", "")
"""Stands, as the ``pusher`` of a :class:`NotYetError`, for every record: :meth:`Waiters.recorded` wakes such a call."""

_RETRY_SECONDS = 0.1  # for a call that does not wait, or has waited as long as it may
_SHORTEST_SECONDS = 0.01  # between two tries of a call: the time may be over that decides, and the condition unmet


class NotYetError(Rejected):
    """A refusal that stands until a condition holds; a call that may wait is answered then.

    Attributes:
        is_over: tells whether the condition holds; called on the event loop, so it waits for nothing.
        pusher: returns the worker whose next push may meet the condition; ``None`` if no push alone does.
        again_seconds: after which the call is tried again in any case, because time alone may meet the condition.
        least_seconds: how long a call waits that does not say for how long it may.
    """

    def __init__(
        self,
        reason: ErrorCode,
        detail: str,
        is_over: Callable[[], bool],
        *,
        pusher: Callable[[], Identity | None] = lambda: None,
        again_seconds: float = math.inf,
        least_seconds: float = 0.0,
        **metadata: str,
    ) -> None:
        again_seconds = max(_SHORTEST_SECONDS, again_seconds)
        super().__init__(reason, detail, retry_seconds=min(_RETRY_SECONDS, again_seconds), **metadata)
        self.is_over, self.pusher = is_over, pusher
        self.again_seconds, self.least_seconds = again_seconds, least_seconds

    def refusal(self) -> Rejected:
        """Return the refusal alone, for a call that cannot wait."""
        return Rejected(self.reason, self.detail, retry_seconds=self.retry_seconds, **self.metadata)


class Waiters:
    """The calls that wait for one shard. :meth:`wake` is for any thread, all else for the loop.

    Attributes:
        pushers: the workers for whose pushes calls wait, each with these calls.
        everyone: another object whenever everyone is woken.
    """

    def __init__(self) -> None:
        self._waiting: dict[Callable[[], None], tuple[Callable[[], bool], Callable[[], Identity | None]]] = {}
        self.pushers: dict[Identity, dict[Callable[[], None], None]] = {}
        self._pusher_of: dict[Callable[[], None], Identity] = {}
        self._post: Callable[[Callable[[], None]], object] = lambda look: None
        self._is_posted = self._is_record_posted = False
        self.everyone = self._seen = object()

    def __len__(self) -> int:
        return len(self._waiting)

    def serve_on(self, post: Callable[[Callable[[], None]], object]) -> None:
        """Look after the calls on an event loop; ``post`` has the loop call something soon, and waits for nothing."""
        self._post = post

    def add(
        self,
        wake: Callable[[], None],
        is_over: Callable[[], bool],
        pusher: Callable[[], Identity | None] = lambda: None,
    ) -> None:
        """Have ``wake`` called once ``is_over``, which is asked now, at each change, and at each push of ``pusher``."""
        self._waiting[wake] = is_over, pusher
        self._look_at(wake)

    def remove(self, wake: Callable[[], None]) -> None:
        """Call it no more."""
        self._waiting.pop(wake, None)
        self._wait_for_push(wake, None)

    def wake(self, *, everyone: bool = False) -> None:
        """Have every waiting call look at its condition; waits for nothing, so locks may be held.

        ``everyone``: wake the calls whose condition does not hold as well, because it may never hold any more.
        """
        if everyone:
            self.everyone = object()
        if self._waiting and not self._is_posted:
            self._is_posted = True
            self._post(self._look)

    def pushed(self, identity: Identity) -> None:
        """Have the calls look at their conditions that wait for a push of this worker; on the event loop."""
        for wake in [*self.pushers.get(identity, ())]:
            self._look_at(wake)

    def recorded(self) -> None:
        """Have the calls look at their conditions that wait for a record; from any thread, and waits for nothing."""
        if RECORDS in self.pushers and not self._is_record_posted:
            self._is_record_posted = True
            self._post(self._look_at_records)

    def _look_at_records(self) -> None:
        self._is_record_posted = False  # first: a record from here on posts anew
        self.pushed(RECORDS)

    def _look(self) -> None:
        self._is_posted = False  # first: a change from here on posts anew
        everyone = self.everyone
        wakes_all, self._seen = everyone is not self._seen, everyone
        for wake in [*self._waiting]:
            self._look_at(wake, wakes_all=wakes_all)

    def _look_at(self, wake: Callable[[], None], *, wakes_all: bool = False) -> None:
        """Wake a call if its condition holds; else note whose push it waits for, before the condition is asked."""
        is_over, pusher = self._waiting[wake]
        while not (wakes_all or is_over()):
            if not self._wait_for_push(wake, pusher()):
                return
        self.remove(wake)
        wake()

    def _wait_for_push(self, wake: Callable[[], None], pusher: Identity | None) -> bool:
        """Note whose push a call waits for; tell whether that is another worker than before."""
        before = self._pusher_of.pop(wake, None)
        if pusher is not None:
            self._pusher_of[wake] = pusher
            self.pushers.setdefault(pusher, {})[wake] = None
        if before is not None and before != pusher:
            del self.pushers[before][wake]
            if not self.pushers[before]:
                del self.pushers[before]
        return before != pusher
