"""Top-k replies judged: the server's image of a replica is that replica, bit for bit, after every acknowledged reply.

Nobody can read an image from outside. But an entry ``q`` of a top-k reply is ``θ − θ̂`` in fp32, with the server's image
for θ̂; and the reference has θ, and follows every replica from the replies that its worker has applied. So each entry
says whether image and replica are the same there, a reply without any says so of all elements, and the exact reply that
ends an image must make the replica the model. Selection from an image runs beside the apply
thread: an entry may be of a version soon after the reply's, as a whole.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from verify.client.wire import Floats, Offsets, Reply, digest
from verify.validate.verdict import Verdict

_SOON = 64
"""Pushes that may be applied while a reply is selected."""


@dataclass(slots=True)
class _Open:
    """Entries that are not of the reply's version: of a later one, or wrong.

    Attributes:
        reply: theirs.
        offsets: uint32 ``[m]``.
        before: the replica there, without the reply.
        values: of the entries; zero where the reply has none, and the model must be equal to the replica.
    """

    reply: Reply
    offsets: Offsets
    before: Floats
    values: Floats

    def look(self, theta: Floats) -> bool:
        """Leave out what agrees with this version of the model; tell whether something is left."""
        left = theta[self.offsets] - self.before != self.values
        self.offsets, self.before, self.values = self.offsets[left], self.before[left], self.values[left]
        return bool(left.any())


class Images:
    """Follows the replicas of all lives at one shard, version after version.

    Args:
        verdict: told what is wrong.
        replies: of this shard, those of a life in its order.
    """

    def __init__(self, verdict: Verdict, replies: Iterable[Reply]) -> None:
        """Sort the replies by version."""
        self._verdict = verdict
        self._coming: dict[int, list[Reply]] = defaultdict(list)
        self._replicas: dict[str, Floats] = {}
        self._contents: dict[tuple[str, int], tuple[int, bytes, bytes]] = {}
        self._open: list[_Open] = []
        for reply in replies:
            self._coming[reply.version].append(reply)

    def follow(self, version: int, theta: Floats) -> None:
        """Take in the model at the next version."""
        still = []
        for entries in self._open:
            if not entries.look(theta):
                continue
            if version >= entries.reply.version + _SOON:
                self._convict(entries)
            else:
                still.append(entries)
        self._open = still
        for reply in self._coming.pop(version, ()):
            if reply.topk:
                self._take(reply, theta)
            elif reply.applied:
                self._replicas[reply.incarnation] = theta.copy()

    def finish(self) -> None:
        """Judge what is left behind the last version."""
        for entries in self._open:
            self._convict(entries)

    def _take(self, reply: Reply, theta: Floats) -> None:
        verdict = self._verdict
        verdict.topk_replies += 1
        verdict.compared += 1
        if not self._is_repeated_rightly(reply):
            self._wrong(reply, "repeats an earlier one with other bytes")
        replica = self._replicas.get(reply.incarnation)
        if replica is None:
            self._wrong(reply, "has no exact one before it")
            return
        entries = _Open(reply, reply.offsets, replica[reply.offsets], reply.values)
        if not reply.values.any():
            everywhere = np.arange(len(replica), dtype=np.uint32)
            entries = _Open(reply, everywhere, replica, np.zeros_like(replica))
        if entries.look(theta):
            self._open.append(entries)
        after = replica.copy()
        after[reply.offsets] += reply.values
        if digest(after) != reply.digest:
            self._wrong(reply, "made another replica of the worker than of the reference")
        if reply.applied:
            self._replicas[reply.incarnation] = after

    def _is_repeated_rightly(self, reply: Reply) -> bool:
        content = reply.version, reply.offsets.tobytes(), reply.values.tobytes()
        return self._contents.setdefault((reply.incarnation, reply.number), content) == content

    def _convict(self, entries: _Open) -> None:
        first, count = int(entries.offsets[0]), len(entries.offsets)
        self._wrong(entries.reply, f"is not θ − θ̂ at {count} elements, first at {first}: the image is not the replica")

    def _wrong(self, reply: Reply, how: str) -> None:
        self._verdict.different += 1
        self._verdict.say(f"top-k reply {reply.number} of version {reply.version} to {reply.incarnation} {how}")
