"""The cuts of a shard: made while readers ask for them, and the newest few kept.

Shard 0 names a cut by a number. Every shard brings its shadow to the version that it then has, and tells shard 0 this
version and the digest; once all have, the cut may be read. The versions of a cut are those of one moment within a round
trip between shards. So in an asynchronous run a cut of several shards may have a push in one shard and not yet in
another, as every worker's replica may.
"""

import itertools
import logging
import threading
import time
from typing import NamedTuple, Protocol

from pscore.model.modelfile import StateDict
from pscore.wire.errors import ErrorCode, Rejected
from psservice.cuts.readers import Readers
from psservice.cuts.shadow import Shadow
from psservice.cuts.shard_cut import ShardCut
from psservice.model.parameters import ModelShard
from psservice.replies.exact_reply import ParameterThread
from psservice.storage.environment import Environment

log = logging.getLogger(__name__)

_KEPT = 3  # cuts: the two newest whole ones, and the one that is being made
_IDLE_SECONDS = 60.0  # without a question, after which no cut is made or kept
_ALL_SHARDS_SECONDS = 10.0  # for the other shards to take part in a cut
_AGAIN_SECONDS = 5.0  # after which a cut over several shards is tried although shard 0 has not moved
_SHARE, _LONGEST_PAUSE_SECONDS = 0.5, 10.0  # of the time that making cuts may take, up to a pause


class ShardVersion(NamedTuple):
    """A shard's part of a cut: as other shards tell it."""

    generation: int
    version: int
    digest: bytes


class Cut(NamedTuple):
    """A cut that may be read.

    Attributes:
        shards: of each shard, in order.
        buffers_digest: of the buffers; empty if there are none.
        made: when, by the clock of the shard's environment.
    """

    number: int
    shards: tuple[ShardVersion, ...]
    buffers_digest: bytes
    made: float


class CutShard(Protocol):
    """What cuts need of a shard."""

    @property
    def model(self) -> ModelShard | None: ...  # noqa: D102

    @property
    def apply_thread(self) -> ParameterThread: ...  # noqa: D102

    @property
    def environment(self) -> Environment: ...  # noqa: D102

    def buffers_now(self) -> StateDict:
        """Return the buffers by name; none if the shard has none."""

    def buffer_contributions(self) -> int:
        """Count the changes of the buffers."""

    def wait_until_durable(self) -> None:
        """Wait until every version so far is durable; raises :class:`Rejected`."""

    def has_room_for_cuts(self, nbytes: int) -> bool:
        """Tell whether what is kept for answers is within its limit with so many bytes more."""

    def tell_shards(self) -> None:
        """Have the other shards hear of :attr:`Cuts.wanted`, and waiting calls look at their conditions."""


class Cuts:
    """Makes and keeps a shard's cuts; on shard 0 in a thread, which runs while readers ask. Thread-safe.

    Args:
        interval_seconds: the shortest time from one cut to the next.
        num_shards: of the model.

    Attributes:
        newest: the newest cut that may be read; on shard 0.
        trouble: why no cut could be made the last time, in words; empty if one could. On shard 0.
        wanted: the number of the cut that every shard is to take part in; 0 if nobody reads. On shard 0.
        readers: that have asked; on shard 0.
    """

    def __init__(self, shard: CutShard, interval_seconds: float, num_shards: int) -> None:
        self._shard, self._interval, self._num_shards = shard, interval_seconds, num_shards
        self._clock = shard.environment.monotonic
        self._shadow: Shadow | None = None
        self._kept: list[ShardCut] = []  # the oldest first
        self._told: dict[int, ShardVersion] = {}  # by the index of the shard, of the wanted cut
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._numbers = itertools.count(int.from_bytes(shard.environment.random_bytes(5), "little") + 1)
        self._asked_at = self._begun_at = float("-inf")
        self._buffers_at = 0
        self.newest: Cut | None = None
        self.wanted, self.trouble = 0, ""
        self.readers = Readers(self._clock)

    @property
    def nbytes(self) -> int:
        """Bytes that are kept for readers."""
        shadow = self._shadow
        return 0 if shadow is None else shadow.nbytes

    # Questions

    def ask(self) -> Cut | None:
        """Return the newest cut, and have newer ones made for a while; on shard 0."""
        with self._lock:
            self._asked_at = self._clock()
            if self._thread is None and not self._stopping.is_set():
                self._thread = self._shard.environment.start(self._work, "cuts")
        return self.newest

    def find(self, version: ShardVersion) -> ShardCut:
        """Return this shard's part of a cut; raises :class:`Rejected` (``NO_SUCH_CUT``)."""
        with self._lock:
            for cut in reversed(self._kept):
                if (cut.generation, cut.version, cut.digest) == version:
                    return cut
        number, generation = version.version, version.generation
        raise Rejected(
            ErrorCode.NO_SUCH_CUT, f"version {number} of generation {generation} is not, or no longer, that of a cut"
        )

    # Making

    def take_part(self, number: int) -> None:
        """Open this shard's part of a cut, unless that was done; number 0: keep none. Raises :class:`Rejected`."""
        if not number:
            self.forget()
            return
        with self._lock:
            if self._kept and self._kept[-1].number == number:
                return
        shard, model = self._shard, self._shard.model
        if model is None:
            return
        shadow = self._shadow
        if shadow is None or shadow.model is not model:
            self._shadow = shadow = None  # freed first
            if not shard.has_room_for_cuts(model.theta.nbytes):
                raise Rejected(ErrorCode.BUSY, "there is no room for readers within --memory-bytes")
            self._shadow = shadow = Shadow(model, shard.apply_thread)
        elif not shard.has_room_for_cuts(0):
            with self._lock:  # what is overwritten is kept for cuts
                self._kept, self.newest = [], None
        shadow.advance()
        cut = ShardCut(number, shadow, shard.buffers_now(), self._clock())
        shard.wait_until_durable()
        with self._lock:
            if model is self._shard.model:  # and no other was installed meanwhile
                self._kept = [*self._kept, cut][-_KEPT:]
            else:
                self._shadow = None

    def own(self) -> tuple[int, ShardVersion | None]:
        """Return the number of the newest cut that this shard has taken part in, and its version there."""
        with self._lock:
            if not self._kept:
                return 0, None
            cut = self._kept[-1]
            return cut.number, ShardVersion(cut.generation, cut.version, cut.digest)

    def hear(self, shard_index: int, number: int, version: ShardVersion) -> None:
        """Note another shard's version in a cut; on shard 0."""
        with self._lock:
            if number and number == self.wanted:
                self._told[shard_index] = version
        self._end_if_whole()

    def make_if_due(self) -> None:
        """Begin a cut if the model has moved; on shard 0, in one thread at a time."""
        model, now = self._shard.model, self._clock()
        if model is None or now < self._begun_at + self._interval or not self._is_wanted(model, now):
            return
        self._begun_at, number = now, next(self._numbers)
        self._buffers_at = self._shard.buffer_contributions()  # before they are read
        with self._lock:
            self.wanted, self._told = number, {}
        if self._num_shards > 1:
            self._shard.tell_shards()
        try:
            self.take_part(number)
            self.trouble = ""
        except Rejected as refusal:  # another model is on its way in, or nothing can be written: it is tried again
            self.trouble = refusal.detail
        self._end_if_whole()

    def _is_wanted(self, model: ModelShard, now: float) -> bool:
        newest = self.newest
        if newest is None or newest.number != self.wanted:  # one is under way
            return now >= self._begun_at + (_ALL_SHARDS_SECONDS if self._num_shards > 1 and self.wanted else 0.0)
        if self._num_shards > 1 and now >= self._begun_at + _AGAIN_SECONDS:
            return True
        is_same = (model.generation, model.version) == newest.shards[0][:2]
        is_same &= self._shard.buffer_contributions() == self._buffers_at
        return not is_same or not model.versions_name_values

    def _end_if_whole(self) -> None:
        """Let the wanted cut be read if every shard has told its part."""
        with self._lock:
            mine = self._kept[-1] if self._kept else None
            if mine is None or mine.number != self.wanted or len(self._told) < self._num_shards - 1:
                return
            if self.newest is not None and self.newest.number == self.wanted:
                return
            others = [self._told[index] for index in range(1, self._num_shards)]
            shards = (ShardVersion(mine.generation, mine.version, mine.digest), *others)
            before, cut = self.newest, Cut(self.wanted, shards, mine.buffers_digest, mine.made)
            is_same = before is not None and before[1:3] == cut[1:3]
            self.newest = before._replace(number=cut.number) if before is not None and is_same else cut
        if not is_same:
            self._shard.tell_shards()

    def _work(self) -> None:
        began = time.perf_counter()
        while self.keep_up():
            took = time.perf_counter() - began
            self._stopping.wait(max(self._interval, min(took / _SHARE, _LONGEST_PAUSE_SECONDS)))
            began = time.perf_counter()

    def keep_up(self) -> bool:
        """Make a cut if it is time; without a question for long keep none. Return whether to call again soon."""
        with self._lock:
            goes_on = not self._stopping.is_set() and self._clock() < self._asked_at + _IDLE_SECONDS
            had_readers = self.wanted != 0
            if not goes_on:  # the next question starts a thread
                self._kept, self.newest, self.wanted, self._thread, self._shadow = [], None, 0, None, None
        if goes_on:
            try:
                self.make_if_due()
            except Exception as error:  # whatever it was, readers get a cut once it is over
                log.exception("a cut could not be made")
                self.trouble = f"a cut could not be made: {error}"
        elif had_readers and self._num_shards > 1:
            self._shard.tell_shards()
        return goes_on

    def forget(self) -> None:
        """Keep no cut; readers go on with the next one."""
        with self._lock:
            self._kept, self.newest, self.wanted, self._shadow = [], None, 0, None

    def close(self) -> None:
        """Stop the thread."""
        self._stopping.set()
        thread = self._thread
        if thread is not None:
            thread.join()
