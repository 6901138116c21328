"""Who takes part: leases, and a small record of each worker's last push for exactly-once.

Liveness is the lease, not the connection: any call of a worker renews it, and at its end the worker's state is freed.
The record of an incarnation (last step, first answer) stays, so that a repeated push is recognised even after a lost
lease.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from pscore.wire.errors import ErrorCode, Rejected
from psservice.cluster.bans import Bans
from psservice.model.reply_session import ReplyMode, ReplySession
from psservice.policy.admission import Pace, first_clock
from psservice.policy.reply_mode import ReplyRule
from psservice.policy.staleness import OwnVersions, smoothed

MOST_RECORDS = 4096
"""Incarnations without a lease that are remembered; beyond it the least recent go."""

RECORD_SECONDS = 24 * 3600.0
"""How long an incarnation without a lease is remembered."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A worker's name and the UUID of this life of it."""

    worker_id: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class PushAnswer:
    """What a push was answered; kept for repeats."""

    version: int
    staleness: int
    apply_nanoseconds: int
    applied_scale: float = 1.0


@dataclass(slots=True)
class PushRecord:
    """What is remembered of an incarnation beyond its lease, so that repeats are recognised.

    Attributes:
        step: its last push; 0 before the first.
        answer: what that push was answered.
        buffer_step: its last exchange of buffers.
        own: the versions that its pushes have made, as far as they are needed to count its staleness.
        used: when it was last asked for, by the clock of leases.
    """

    step: int = 0
    answer: PushAnswer | None = None
    buffer_step: int = 0
    own: OwnVersions = field(default_factory=OwnVersions)
    used: float = field(default=0.0, compare=False)


@dataclass
class Member:
    """A live worker."""

    identity: Identity
    downlink: ReplySession
    lease_end: float
    last_step: int = 0
    staleness: int = 0
    pushes: int = 0
    push_bytes: int = 0
    pull_bytes: int = 0
    received_bytes: int = 0
    """Of streams, also of those that were cut."""
    samples: int = 0
    reply_mode: ReplyMode | None = None
    reply_density: float = 0.0
    """Density of the last reply."""
    index_codecs: frozenset[int] = frozenset()
    """Which the worker reads."""
    clock: int = 0
    """Pushes since it joined, counted from the slowest live clock at that time."""
    clock_moved: float = 0.0
    """When it last pushed, or joined."""
    interval_seconds: float = 0.0
    """Mean time between its pushes; 0 before the second."""
    first_batches: int = 0
    """Fingerprint of its first batches, as it has told; 0 where it has not."""
    batches_told: float = 0.0
    """When it first told that."""
    has_no_samples: bool = False
    """Whether it has asked for samples, was given none and holds none: its next step waits for others' steps."""


@dataclass
class Membership:
    """The live workers of a shard. Thread-safe; nothing waits for a disk under its lock.

    All leases are of one length, so members in the order of their last renewal are in the order of their leases' ends.

    Args:
        lease_seconds: life of a lease without renewal.
        make_rule: returns a fresh reply rule for a new member.
        on_expire: told by :meth:`expire` of each member whose lease has ended by itself, outside the lock.
        clock: monotonic seconds; tests pass their own.
    """

    lease_seconds: float
    make_rule: Callable[[], ReplyRule]
    on_expire: Callable[[Member], None] = lambda member: None
    clock: Callable[[], float] = time.monotonic
    _members: OrderedDict[str, Member] = field(default_factory=OrderedDict)
    _ended: deque[Member] = field(default_factory=deque)
    _records: OrderedDict[Identity, PushRecord] = field(default_factory=OrderedDict)
    _last_pushes: OrderedDict[str, tuple[str, int]] = field(default_factory=OrderedDict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _bans: Bans = field(init=False)

    def __post_init__(self) -> None:
        """Keep nobody out."""
        self._bans = Bans(lambda: self.clock())

    def join(self, identity: Identity) -> Member:
        """Grant or renew a lease.

        Raises:
            Refusal: ``WORKER_ALIVE`` while another incarnation of the same name holds one; ``EVICTED``.
        """
        with self._lock:
            self._bans.require_none(identity.worker_id)
            self._drop_ended()
            member = self._members.get(identity.worker_id)
            if member is not None and member.identity != identity:
                remaining = member.lease_end - self.clock()
                raise Rejected(
                    ErrorCode.WORKER_ALIVE,
                    f"worker {identity.worker_id!r} is alive as incarnation {member.identity.incarnation}, "
                    f"for {remaining:.1f} s more unless renewed",
                    retry_seconds=min(remaining, 1.0),
                    worker=identity.worker_id,
                    lease_seconds=f"{remaining:.3f}",
                )
            if member is None:
                member = Member(identity, ReplySession(self.make_rule()), 0.0, clock_moved=self.clock())
                member.clock = first_clock(other.clock for other in self._members.values())
                self._members[identity.worker_id] = member
            return self._renewed(member)

    def require(self, identity: Identity) -> Member:
        """Return the live member and renew its lease.

        Raises:
            Refusal: ``LEASE_EXPIRED`` if there is none of this identity; ``EVICTED``.
        """
        with self._lock:
            self._bans.require_none(identity.worker_id)
            self._drop_ended()
            member = self._members.get(identity.worker_id)
            if member is None or member.identity != identity:
                raise Rejected(
                    ErrorCode.LEASE_EXPIRED,
                    f"worker {identity.worker_id!r} ({identity.incarnation}) has no lease here",
                    worker=identity.worker_id,
                )
            return self._renewed(member)

    def received(self, identity: Identity, nbytes: int) -> None:
        """Note that bytes of a stream have come, which renew a lease if there is one still."""
        with self._lock:
            self._drop_ended()
            member = self._members.get(identity.worker_id)
            if member is not None and member.identity == identity:
                self._renewed(member).received_bytes += nbytes

    def leave(self, identity: Identity) -> bool:
        """End a lease at once; tell whether there was one."""
        with self._lock:
            member = self._members.get(identity.worker_id)
            if member is None or member.identity != identity:
                return False
            del self._members[identity.worker_id]
            return True

    def evict(self, worker_id: str, ban_seconds: float) -> Member | None:
        """End the lease of whoever has this name, and keep the name out; return who held the lease.

        Args:
            worker_id: the name.
            ban_seconds: how long it is kept out; 0 for not at all, and for no longer.

        Raises:
            Refusal: ``NO_SUCH_WORKER`` where nobody of this name holds a lease or is kept out, and nobody is to be.
        """
        with self._lock:
            self._drop_ended()
            member = self._members.get(worker_id)
            if member is None and not ban_seconds and worker_id not in self._bans.remaining():
                raise Rejected(
                    ErrorCode.NO_SUCH_WORKER, f"no live worker is called {worker_id!r} here", worker=worker_id
                )
            self._bans.put(worker_id, ban_seconds)
            return self._members.pop(worker_id, None)

    def evicted(self) -> dict[str, float]:
        """Return the names that are kept out, and for how many seconds more."""
        with self._lock:
            return self._bans.remaining()

    def expire(self) -> None:
        """Tell of every member whose lease has ended and was not told of yet, and forget old records.

        By one thread at a time, and before a lease of the same name is written down: so the journal has the end of a
        worker's lease before its next one.
        """
        with self._lock:
            self._drop_ended()
            self._forget_records()
        while self._ended:
            self.on_expire(self._ended.popleft())

    def is_live(self, identity: Identity | None) -> bool:
        """Tell whether this identity holds a lease."""
        with self._lock:
            self._drop_ended()
            member = None if identity is None else self._members.get(identity.worker_id)
            return member is not None and member.identity == identity

    def members(self) -> list[Member]:
        """Return the live members by name."""
        with self._lock:
            self._drop_ended()
            return [self._members[name] for name in sorted(self._members)]

    def __len__(self) -> int:
        """Count the live members."""
        with self._lock:
            self._drop_ended()
            return len(self._members)

    def pace(self, member: Member) -> Pace | None:
        """Return where a member stands among the other live ones; ``None`` where there is no other."""
        with self._lock:
            self._drop_ended()
            others = [other for other in self._members.values() if other is not member]
            if not others:
                return None
            slowest = min(others, key=lambda other: (other.clock, other.clock_moved))
            return Pace(
                member.clock, slowest.clock, slowest.identity.worker_id, max(0.0, self.clock() - slowest.clock_moved)
            )

    def tick(self, member: Member) -> None:
        """Move a member's clock: a push of it was applied."""
        with self._lock:
            now = self.clock()
            if member.pushes:
                member.interval_seconds = smoothed(member.interval_seconds, now - member.clock_moved)
            member.has_no_samples = False
            member.pushes += 1
            member.clock += 1
            member.clock_moved = now

    def intervals(self) -> list[float]:
        """Return the mean time between pushes of each live member, seconds; 0 where it is not known yet."""
        return [member.interval_seconds for member in self.members()]

    def same_batches(self, member: Member, fingerprint: int) -> int:
        """Note the fingerprint of a member's first batches; return how many other members have the same.

        Members that were not heard since are not counted: one may be this worker's former life, under another name.
        """
        with self._lock:
            if fingerprint != member.first_batches:
                member.first_batches, member.batches_told = fingerprint, self.clock()
            heard_after = member.batches_told + self.lease_seconds
            return sum(
                other is not member and other.first_batches == fingerprint and other.lease_end > heard_after
                for other in self._members.values()
                if fingerprint
            )

    def clock_spread(self) -> int:
        """Return how many pushes the slowest live member is behind the fastest."""
        clocks = [member.clock for member in self.members()]
        return max(clocks, default=0) - min(clocks, default=0)

    def reset_downlinks(self) -> None:
        """Forget every image: the model is another one."""
        with self._lock:
            for member in self._members.values():
                member.downlink = ReplySession(self.make_rule())

    def record(self, identity: Identity) -> PushRecord:
        """Return what is remembered of an incarnation, to be read and written on the writer thread.

        Of incarnations without a lease, those that were last asked for long ago are forgotten, and the least recent
        beyond a number.
        """
        with self._lock:
            record = self._records.setdefault(identity, PushRecord())
            record.used = self.clock()
            self._records.move_to_end(identity)
            self._forget_records()
            return record

    def remember_push(self, identity: Identity, step: int, answer: PushAnswer, own: OwnVersions) -> None:
        """Record a push that was applied."""
        with self._lock:
            record = self.record(identity)
            record.step, record.answer, record.own = step, answer, own
            self._last_pushes[identity.worker_id] = (identity.incarnation, step)
            self._last_pushes.move_to_end(identity.worker_id)

    def remembered(self) -> tuple[list[tuple[Identity, PushRecord]], list[tuple[str, tuple[str, int]]]]:
        """Return copies of all records, and of the last push by worker name; least recent first."""
        with self._lock:
            self._forget_records()
            return [(identity, replace(record)) for identity, record in self._records.items()], list(
                self._last_pushes.items()
            )

    def restore(
        self, records: Mapping[Identity, PushRecord], last_pushes: Mapping[str, tuple[str, int]], live: list[Identity]
    ) -> list[Member]:
        """Take over what was remembered before a restart, and grant the leases that were held; return the members."""
        with self._lock:
            now = self.clock()
            self._records = OrderedDict((known, replace(record, used=now)) for known, record in records.items())
            self._last_pushes = OrderedDict(
                (name, push) for name, push in last_pushes.items() if Identity(name, push[0]) in self._records
            )
            members = [self.join(identity) for identity in live]
            self._forget_records()
            return members

    def last_push(self, worker_id: str) -> tuple[str, int] | None:
        """Return (incarnation, step) of the last push that was applied under a worker's name."""
        with self._lock:
            return self._last_pushes.get(worker_id)

    # Inner parts; the lock is held

    def _renewed(self, member: Member) -> Member:
        member.lease_end = self.clock() + self.lease_seconds
        self._members.move_to_end(member.identity.worker_id)
        return member

    def _drop_ended(self) -> None:
        now = self.clock()
        while self._members:
            name, member = next(iter(self._members.items()))
            if member.lease_end > now:
                return
            del self._members[name]
            self._ended.append(member)

    def _forget_records(self) -> None:
        oldest = self.clock() - RECORD_SECONDS
        while self._records:
            identity, record = next(iter(self._records.items()))
            if record.used > oldest and len(self._records) <= MOST_RECORDS + len(self._members):
                return
            member = self._members.get(identity.worker_id)
            if member is not None and member.identity == identity:
                record.used = self.clock()
                self._records.move_to_end(identity)
                continue
            del self._records[identity]
            if self._last_pushes.get(identity.worker_id, ("", 0))[0] == identity.incarnation:
                del self._last_pushes[identity.worker_id]
