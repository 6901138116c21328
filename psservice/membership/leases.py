"""Which workers take part: a lease each; and which an operator keeps out for a time.

Liveness is the lease, not the connection: any call of a worker renews the lease, and the worker's state is freed at
the lease's end.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from pscore.wire.errors import ErrorCode, Rejected
from psservice.awaiting import NotYetError, Waiters
from psservice.membership.admission import Pace
from psservice.replies.reply_mode import ReplyRule
from psservice.replies.reply_session import ReplyMode, ReplySession
from psservice.state.pushes import smoothed
from psservice.state.workers import Worker
from psservice.values import Identity


@dataclass
class Member:
    """What a shard keeps of a worker for as long as the worker's lease lasts.

    Attributes:
        received_bytes: of streams, also of those that were cut.
        reply_density: density of the last reply.
        worker: what the journal knows of it.
        clock_moved: when the worker last pushed, or joined.
        interval_seconds: mean time between the worker's pushes; 0 before the second.
        first_batches: fingerprint of the worker's first batches; 0 if the worker has not sent one.
        batches_told: when the worker first sent that fingerprint.
        release: of the worker's program, as it says; empty if it does not.
        loss: that the worker has told last; ``None`` if it has told none.
        has_no_samples: the last lease of samples was empty and the worker holds none: rounds close without the worker.
    """

    worker: Worker
    downlink: ReplySession
    lease_end: float
    last_step: int = 0
    staleness: int = 0
    pushes: int = 0
    push_bytes: int = 0
    pull_bytes: int = 0
    received_bytes: int = 0
    samples: int = 0
    reply_mode: ReplyMode | None = None
    reply_density: float = 0.0
    clock_moved: float = 0.0
    interval_seconds: float = 0.0
    first_batches: int = 0
    batches_told: float = 0.0
    release: str = ""
    loss: float | None = None
    has_no_samples: bool = False

    @property
    def identity(self) -> Identity:
        """Whose lease it is."""
        return self.worker.identity

    @property
    def makes_pushes(self) -> bool:
        """Whether the others may have to wait for a push of this worker."""
        return not self.worker.wait and not self.has_no_samples


class ServingClock:
    """The clock of leases: seconds during which this process could have answered. Thread-safe.

    A process that is stopped or swapped out receives no renewal meanwhile. When it continues, renewals that wait must
    be served before any lease ends. So time between two readings counts up to ``longest_gap`` seconds only, and the
    clock must be read more often than that. ``clock`` returns monotonic seconds.
    """

    def __init__(self, longest_gap: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest_gap, self._clock = longest_gap, clock
        self._lock = threading.Lock()
        self._read = clock()
        self._time = 0.0

    def __call__(self) -> float:
        """Return the seconds that have counted."""
        with self._lock:
            now = self._clock()
            gap = now - self._read
            self._time += gap if gap < self._longest_gap else self._longest_gap
            self._read = now
            return self._time


class Leases:
    """The live workers of a shard. Thread-safe; nothing waits for a disk under the lock.

    All leases are of one length, so members in the order of their last renewal are in the order of their leases' ends.
    ``waiters`` are woken when a lease ends, and when all live workers have become through.
    """

    def __init__(
        self, lease_seconds: float, make_rule: Callable[[], ReplyRule], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.lease_seconds, self.clock = lease_seconds, clock
        self._make_rule = make_rule
        self.waiters = Waiters()
        self._members: OrderedDict[str, Member] = OrderedDict()
        self._ended: list[Member] = []
        self._lock = threading.RLock()
        self._bans: dict[str, float] = {}  # ends by name; in memory only, so a restart forgets them

    def require_free(self, identity: Identity) -> Member | None:
        """Return the live member, ``None`` if a lease can be granted; raises ``WORKER_ALIVE`` or ``EVICTED``."""
        with self._lock:
            self._require_no_ban(identity.worker_id)
            now = self.clock()
            member = self._named(identity.worker_id, now)
            if member is not None and member.identity != identity:
                other, remaining = member.identity, member.lease_end - now
                raise NotYetError(
                    ErrorCode.WORKER_ALIVE,
                    f"worker {identity.worker_id!r} is alive as incarnation {other.incarnation}, "
                    f"for {remaining:.1f} s more unless renewed",
                    lambda: not self.is_live(other),
                    again_seconds=remaining,
                    worker=identity.worker_id,
                    lease_seconds=f"{remaining:.3f}",
                )
            return None if member is None else self._renewed(member, now)

    def grant(self, worker: Worker, release: str = "") -> Member:
        """Give a worker that has joined, with a program of that release, a lease; after :meth:`require_free`."""
        with self._lock:
            now = self.clock()
            member = Member(worker, ReplySession(self._make_rule()), 0.0, clock_moved=now, release=release)
            self._members[worker.identity.worker_id] = member
            return self._renewed(member, now)

    def find(self, identity: Identity) -> Member | None:
        """Return the live member, and leave the lease as it is."""
        with self._lock:
            return self._find(identity, self.clock())

    def require(self, identity: Identity) -> Member:
        """Return the live member and renew the lease; raises :class:`Rejected` (``LEASE_EXPIRED``, ``EVICTED``)."""
        worker_id = identity.worker_id
        with self._lock:
            now = self.clock()
            if self._bans:
                self._require_no_ban(worker_id)
            member = self._members.get(worker_id)
            if member is None or member.identity != identity or member.lease_end <= now:
                raise Rejected(
                    ErrorCode.LEASE_EXPIRED,
                    f"worker {worker_id!r} ({identity.incarnation}) has no lease here",
                    worker=worker_id,
                )
            member.lease_end = now + self.lease_seconds
            self._members.move_to_end(worker_id)
            return member

    def received(self, identity: Identity, nbytes: int) -> None:
        """Count bytes of a stream; they renew a lease that has not ended."""
        with self._lock:
            now = self.clock()
            if (member := self._find(identity, now)) is not None:
                self._renewed(member, now).received_bytes += nbytes

    def leave(self, identity: Identity) -> bool:
        """End a lease at once; tell whether there was one."""
        with self._lock:
            member = self._members.get(identity.worker_id)
            if member is None or member.identity != identity:
                return False
            del self._members[identity.worker_id]
        self.waiters.wake()
        return True

    def evict(self, worker_id: str, ban_seconds: float) -> Member | None:
        """End the lease under a name, ban the name (0 ends a ban), and return the member (``NO_SUCH_WORKER``)."""
        with self._lock:
            member = self._named(worker_id, self.clock())
            if member is None and not ban_seconds and worker_id not in self.evicted():
                raise Rejected(
                    ErrorCode.NO_SUCH_WORKER, f"no live worker is called {worker_id!r} here", worker=worker_id
                )
            self._bans.pop(worker_id, None)
            if ban_seconds > 0:
                self._bans[worker_id] = self.clock() + ban_seconds
            evicted = self._members.pop(worker_id, None)
        self.waiters.wake()
        return evicted

    def evicted(self) -> dict[str, float]:
        """Return the seconds that are left of each ban, by name."""
        with self._lock:
            now = self.clock()
            self._bans = {name: end for name, end in sorted(self._bans.items()) if end > now}
            return {name: end - now for name, end in self._bans.items()}

    def pop_ended(self) -> list[Member]:
        """Return every member whose lease has run out and that was not returned yet."""
        with self._lock:
            self._drop_ended(self.clock())
            ended, self._ended = self._ended, []
        if ended:
            self.waiters.wake()
        return ended

    def is_live(self, identity: Identity) -> bool:
        """Tell whether this identity has a lease."""
        with self._lock:
            return self._find(identity, self.clock()) is not None

    def members(self) -> list[Member]:
        """Return the live members by name."""
        with self._lock:
            self._drop_ended(self.clock())
            return [self._members[name] for name in sorted(self._members)]

    def identities(self) -> set[Identity]:
        """Return the identities of the live members."""
        with self._lock:
            self._drop_ended(self.clock())
            return {member.identity for member in self._members.values()}

    def __len__(self) -> int:
        with self._lock:
            self._drop_ended(self.clock())
            return len(self._members)

    def pace(self, member: Member) -> Pace | None:
        """Compare a member's clock with those of the others that make pushes; ``None`` if there is no other."""
        with self._lock:
            self._drop_ended(self.clock())
            others = [other for other in self._members.values() if other is not member and other.makes_pushes]
            if not others:
                return None
            slowest = min(others, key=lambda other: (other.worker.clock, other.clock_moved))
            return Pace(member.worker.clock, slowest.worker.clock, slowest.identity)

    def pushed(self, member: Member) -> None:
        """Note that one of a member's pushes was applied."""
        with self._lock:
            now = self.clock()
            if member.pushes:
                member.interval_seconds = smoothed(member.interval_seconds, now - member.clock_moved)
            member.has_no_samples = False
            member.pushes += 1
            member.clock_moved = now

    def same_batches(self, member: Member, fingerprint: int) -> int:
        """Note the fingerprint of a member's first batches; return how many other members have the same one."""
        with self._lock:
            if fingerprint != member.first_batches:
                member.first_batches, member.batches_told = fingerprint, self.clock()
            # A member without a call since then may be a former life of this worker.
            heard_after = member.batches_told + self.lease_seconds
            return sum(
                other is not member and other.first_batches == fingerprint and other.lease_end > heard_after
                for other in self._members.values()
                if fingerprint
            )

    def clock_spread(self) -> int:
        """Return how many pushes the slowest live member is behind the fastest."""
        clocks = [member.worker.clock for member in self.members() if not member.worker.wait]
        return max(clocks, default=0) - min(clocks, default=0)

    def reset_downlinks(self) -> None:
        """Drop every image: another model is installed."""
        with self._lock:
            for member in self._members.values():
                member.downlink = ReplySession(self._make_rule())

    # Below, the lock is held.

    def _require_no_ban(self, worker_id: str) -> None:
        remaining = self._bans.get(worker_id, 0.0) - self.clock()
        if remaining > 0:
            raise Rejected(
                ErrorCode.EVICTED,
                f"an operator has evicted worker {worker_id!r}; it may come back in {remaining:.1f} s",
                retry_seconds=remaining,
                worker=worker_id,
            )

    def _named(self, worker_id: str, now: float) -> Member | None:
        self._drop_ended(now)
        return self._members.get(worker_id)

    def _find(self, identity: Identity, now: float) -> Member | None:
        member = self._named(identity.worker_id, now)
        return member if member is not None and member.identity == identity else None

    def _renewed(self, member: Member, now: float) -> Member:
        member.lease_end = now + self.lease_seconds
        self._members.move_to_end(member.identity.worker_id)
        return member

    def _drop_ended(self, now: float) -> None:
        while self._members:
            name, member = next(iter(self._members.items()))
            if member.lease_end > now:
                return
            del self._members[name]
            self._ended.append(member)
