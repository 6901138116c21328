"""The pushes that a server claims to have, in order, while its power is cut: what may be gone, and what may not.

The server is asked behind each cut for its version and its values. Version ``n`` stands for the first ``n`` pushes of
the history, so a push that is gone takes all later ones along: one that is missing in the middle shows in the values.
"""

import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from verify.client.wire import Download, Floats, Push, digest
from verify.validate.cut_verdict import CutVerdict

_KEPT_EVERY = 32  # versions, between two models that are kept


class Promise(NamedTuple):
    """What may be gone behind a cut.

    Attributes:
        cut_at: seconds of the system's monotonic clock.
        seconds: before the cut, in which what was answered may be gone: 0 if nothing may, infinite if everything.
    """

    cut_at: float
    seconds: float


class Resent(NamedTuple):
    """A push that was sent again behind a cut.

    Attributes:
        push: which.
        version: answered; 0 if the push was refused, since it belongs to a history that has ended.
        repeated: whether the answer says that the push was there.
        at: when the answer came, seconds of the monotonic clock.
    """

    push: Push
    version: int
    repeated: bool
    at: float


class _Answered(NamedTuple):
    """A push at its version; ``at`` is when its first answer came, minus infinity once a cut has left it there."""

    push: Push
    at: float


class _Seen(NamedTuple):
    """A model that a worker was given."""

    version: int
    digest: str
    at: float


Name = tuple[str, int]


class Timeline:
    """What workers were told, and what the server is found to have. Thread-safe.

    Args:
        initial: the model at version 0.

    Attributes:
        verdict: so far.
        generation: of the history that the server was last found with.
        version: at which it was last found.
    """

    def __init__(self, initial: Floats) -> None:
        self.verdict = CutVerdict()
        self.generation = self.version = 0
        self._kept: dict[int, Floats] = {0: initial.astype(np.float32).copy()}
        self._known: dict[int, _Answered] = {}
        self._versions: dict[Name, int] = {}
        self._seen: list[_Seen] = []
        self._lock = threading.Lock()

    def sent(self) -> None:
        """Note that a worker is about to send a new push."""
        with self._lock:
            self.verdict.sent += 1

    def answered(self, push: Push, version: int, at: float) -> None:
        """Note the answer to a push, at a time of the monotonic clock."""
        with self._lock:
            self._note(push, version, at)

    def seen(self, version: int, seen: str, at: float) -> None:
        """Note the digest of a model that a worker was given."""
        with self._lock:
            self._seen.append(_Seen(version, seen, at))

    def values_at(self, version: int) -> Floats | None:
        """Return the model at a version; ``None`` if not all pushes up to there are known."""
        with self._lock:
            return self._at(version) if self._is_known(version) else None

    def found(self, last: Download, resent: Sequence[Resent], promise: Promise) -> None:
        """Judge the server behind a cut: its model before anything was sent again, and the answers to what was."""
        with self._lock:
            is_same = last.generation == self.generation
            self.verdict.histories += not is_same
            self.generation, self.version = last.generation, last.version
            for each in resent:
                self._judge_resent(each, last.version)
            self._judge_gone(last.version, promise, is_same=is_same)
            for seen in self._seen:
                if self._is_known(seen.version):
                    self._compare(seen.digest, seen.version, "given to a worker")
            if self._is_known(last.version):
                assert last.values.dtype == np.float32
                self._compare(digest(last.values), last.version, "found behind a cut")
            else:
                missing = min({*range(1, last.version + 1)} - self._known.keys())
                self._twice(f"version {missing} of {last.version} is nobody's")
            self._settle(last.version)
            for each in resent:
                if each.version and not each.repeated:
                    self._note(each.push, each.version, each.at)

    # Under the lock

    def _judge_resent(self, resent: Resent, found: int) -> None:
        push, name = resent.push, _name(resent.push)
        known = self._versions.get(name)
        was_there = known is not None and known <= found
        if not resent.version:
            if was_there:
                self.verdict.lost += 1
                self.verdict.say(f"push {name} is version {known} of {found}, and its repeat is refused")
            return
        if resent.repeated != (resent.version <= found):
            said = "a repeat" if resent.repeated else "new"
            self._twice(f"push {name} is answered with version {resent.version}, {said}; the server had {found}")
        elif resent.repeated:
            self.verdict.repeated += 1
            if known is None:
                self.verdict.acknowledged += 1
            self._place(push, resent.version, -math.inf)
        elif was_there:
            self._twice(f"push {name} was version {known}, and is applied again as {resent.version}")

    def _judge_gone(self, version: int, promise: Promise, *, is_same: bool) -> None:
        """Judge what was answered or seen above the server's version."""
        for number, answered in sorted(self._known.items()):
            if number <= version:
                continue
            age = promise.cut_at - answered.at
            self.verdict.gone += 1
            self.verdict.gone_seconds = max(self.verdict.gone_seconds, age)
            if is_same or age > promise.seconds:
                self.verdict.lost += 1
                history = "the same" if is_same else "a new"
                self.verdict.say(
                    f"version {number} was acknowledged {age:.3f} s before the cut; {history} history has {version}"
                )
        for seen in self._seen:
            if seen.version > version and (is_same or promise.cut_at - seen.at > promise.seconds):
                self.verdict.lost += 1
                self.verdict.say(f"version {seen.version} was given to a worker, and the server has {version}")

    def _settle(self, version: int) -> None:
        """Forget what is gone, since the versions above mean other pushes from now on; the rest can no longer go."""
        for number, answered in [*self._known.items()]:
            if number > version:
                del self._versions[_name(self._known.pop(number).push)]
            elif answered.at > -math.inf:
                self._known[number] = answered._replace(at=-math.inf)
        for number in [each for each in self._kept if each > version]:
            del self._kept[number]
        self._seen.clear()

    def _is_known(self, version: int) -> bool:
        begin = max(each for each in self._kept if each <= version)
        return all(each in self._known for each in range(begin + 1, version + 1))

    def _compare(self, seen: str, version: int, what: str) -> None:
        self.verdict.compared += 1
        if seen != digest(self._at(version)):
            self.verdict.different += 1
            self.verdict.say(f"a model {what} is not the replay of the {version} pushes that it claims")

    def _at(self, version: int) -> Floats:
        begin = max(each for each in self._kept if each <= version)
        theta = self._kept[begin].copy()
        for number in range(begin + 1, version + 1):
            push = self._known[number].push
            if push.offsets is None:
                theta -= push.values
            else:
                theta[push.offsets] -= push.values
            if number % _KEPT_EVERY == 0:
                self._kept[number] = theta.copy()
        return theta

    def _note(self, push: Push, version: int, at: float) -> None:
        self.verdict.acknowledged += 1
        self._place(push, version, at)

    def _place(self, push: Push, version: int, at: float) -> None:
        before, other = self._known.get(version), self._versions.get(_name(push))
        if before is not None and _name(before.push) != _name(push):
            self._twice(f"pushes {_name(before.push)} and {_name(push)} are both version {version}")
        if other is not None and other != version:
            self._twice(f"push {_name(push)} is version {other} and version {version}")
        self._known[version] = _Answered(push, at)
        self._versions[_name(push)] = version

    def _twice(self, what: str) -> None:
        self.verdict.duplicated += 1
        self.verdict.say(what)


def _name(push: Push) -> Name:
    """Return which push it is: incarnation and step."""
    return push.incarnation, push.step
