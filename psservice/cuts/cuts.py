"""The cuts of a shard: made while readers ask for them, and the newest few kept.

Shard 0 names a cut by a number. Every shard brings its shadow to the version that it then has, and tells shard 0 this
version and the digest; once all have, the cut may be read. The versions of a cut are those of one moment within a round
trip between shards. So in an asynchronous run a cut of several shards may have a push in one shard and not yet in
another, as every worker's replica may.
"""

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

from pscore.model.modelfile import StateDict
from pscore.reader.cut import ShardVersion
from pscore.wire.errors import ErrorCode, Rejected
from psservice.cuts.readers import Readers
from psservice.cuts.shadow import ReaderType, Shadow
from psservice.cuts.shard_cut import ShardCut
from psservice.model.parameters import ModelShard
from psservice.replies.exact_reply import ModelValues, ParameterThread
from psservice.storage.environment import Environment

log = logging.getLogger(__name__)

_KEPT = 3  # cuts: the two newest whole ones, and the one that is being made
_IDLE_SECONDS = 60.0  # without a question, after which no cut is made
_FORGET_SECONDS = 3600.0  # without a question, after which nothing is kept; a reader that is back sooner lacks little
_IDLE_PAUSE_SECONDS = 0.5
_TYPE_SECONDS = 600.0  # without a question of a type's readers, or of those at a version, after which they are gone
_MOST_VERSIONS = 1024  # of readers, of whom some have gone without a word
_ALL_SHARDS_SECONDS = 10.0  # for the other shards to take part in a cut
_AGAIN_SECONDS = 5.0  # after which a cut over several shards is tried although shard 0 has not moved
_SHARE, _LONGEST_PAUSE_SECONDS = 0.5, 10.0  # of the time that making cuts may take, up to a pause


class Wanted(NamedTuple):
    """The cut that every shard is to take part in, for readers of these data types; number 0 if nobody reads."""

    number: int
    types: tuple[ReaderType, ...]


class Part(NamedTuple):
    """A shard's part of a cut as shards tell it: digests in the order of the types that are wanted.

    ``publication`` is that of a feed that the version is.
    """

    generation: int
    version: int
    digests: tuple[bytes, ...]
    publication: str = ""


class Cut(NamedTuple):
    """A cut that may be read.

    Attributes:
        shards: of each shard, in order, by the readers' data type.
        buffers_digest: of the buffers; empty if there are none.
        made: when, by the clock of the shard's environment.
    """

    number: int
    shards: dict[ReaderType, tuple[ShardVersion, ...]]
    buffers_digest: bytes
    made: float

    @property
    def version(self) -> int:
        """Of shard 0."""
        return self._any[0].version

    @property
    def generation(self) -> int:
        """Of shard 0."""
        return self._any[0].generation

    @property
    def _any(self) -> tuple[ShardVersion, ...]:
        return next(iter(self.shards.values()))


class _At(NamedTuple):
    """Readers at a version: how many, and when the last one came there."""

    readers: int
    since: float


_NO_READERS = Wanted(0, ())


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
        wanted: the cut that every shard is to take part in; on shard 0.
        readers: that have asked; on shard 0.
        may_begin: tells whether a cut may begin; on shard 0. On a relay the shards must have the source's cut.
    """

    def __init__(self, shard: CutShard, interval_seconds: float, num_shards: int) -> None:
        self._shard, self._interval, self._num_shards = shard, interval_seconds, num_shards
        self._clock = shard.environment.monotonic
        self._shadow: Shadow | None = None
        self._kept: list[ShardCut] = []  # the oldest first
        self._types: dict[ReaderType, float] = {}  # that readers have asked for, and when they did last
        self._readers_at: dict[int, _At] = {}  # by the version that they have been sent
        self._told: dict[int, Part] = {}  # by the index of the shard, of the wanted cut
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._numbers = itertools.count(int.from_bytes(shard.environment.random_bytes(5), "little") + 1)
        self._asked_at = self._begun_at = float("-inf")
        self._buffers_at = 0
        self.newest: Cut | None = None
        self.wanted, self.trouble = _NO_READERS, ""
        self.readers = Readers(self._clock)
        self.may_begin: Callable[[], bool] = lambda: True

    @property
    def nbytes(self) -> int:
        """Bytes that are kept for readers."""
        shadow = self._shadow
        return 0 if shadow is None else shadow.nbytes

    # Questions

    def type_of(self, dtype: ReaderType) -> ReaderType:
        """Return ``None`` in place of a type that makes no difference: the run has no fp32 parameters."""
        model = self._shard.model
        return None if model is None or model.layout.viewed_in(dtype) is model.layout else dtype

    def ask(self, dtype: ReaderType = None) -> Cut | None:
        """Return the newest cut, and have newer ones made for a while, for readers of a data type too; on shard 0.

        Raises :class:`Rejected` (``BUSY``) if there is no room for readers of this type.
        """
        dtype, model = self.type_of(dtype), self._shard.model
        if (
            dtype not in self._types
            and model is not None
            and not self._shard.has_room_for_cuts(_view_bytes(model, dtype))
        ):
            raise Rejected(ErrorCode.BUSY, "there is no room for readers of this type within --memory-bytes")
        with self._lock:
            self._asked_at = self._types[dtype] = self._clock()
            self._begin_work()
        return self.newest

    def _begin_work(self) -> None:
        if self._thread is None and not self._stopping.is_set():
            self._thread = self._shard.environment.start(self._work, "cuts")

    def find(self, version: ShardVersion, dtype: ReaderType = None, buffers_digest: bytes = b"") -> ShardCut:
        """Return this shard's part of a cut, with buffers of a digest if one is given.

        Raises :class:`Rejected` (``NO_SUCH_CUT``).
        """
        with self._lock:
            for cut in reversed(self._kept):
                view, has_them = cut.views.get(dtype), buffers_digest in (b"", cut.buffers_digest)
                if view is not None and has_them and (cut.generation, cut.version, view.digest) == version:
                    return cut
        number, generation = version.version, version.generation
        raise Rejected(
            ErrorCode.NO_SUCH_CUT, f"version {number} of generation {generation} is not, or no longer, that of a cut"
        )

    def values_of(self, cut: ShardCut, version: int) -> ModelValues | None:
        """Return the values at an older version of a cut's model, if a cut that is kept has them."""
        with self._lock:
            found = (each.values for each in self._kept if each.version == version and each.model is cut.model)
            return next(found, None)

    # Making

    def take_part(self, wanted: Wanted) -> None:
        """Open this shard's part of a cut, unless that was done; number 0: keep none. Raises :class:`Rejected`."""
        if not wanted.number:
            self.forget()
            return
        with self._lock:
            if self._kept and self._kept[-1].number == wanted.number:
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
        elif shadow.is_read and not shard.has_room_for_cuts(model.theta.nbytes):  # that may be overwritten
            with self._lock:
                self._kept, self.newest = [], None
            if shadow.is_read:
                raise Rejected(ErrorCode.BUSY, "slow readers keep what is there within --memory-bytes")
        buffers = None
        while buffers is None:
            try:
                shadow.advance(wanted.types)
            except Rejected:
                raise  # before anything has changed
            except BaseException:
                self._shadow = None
                raise
            publication = model.publication_at(shadow.version)
            buffers = self._buffers_of(model, publication)
        cut = ShardCut(wanted.number, shadow, publication, buffers, self._clock(), wanted.types)
        shard.wait_until_durable()
        with self._lock:
            dropped = self._kept[: 1 - _KEPT]
            if model is self._shard.model:  # and no other was installed meanwhile
                self._kept = [*self._kept, cut][-_KEPT:]
            else:
                self._shadow = None
                return
        self._track(shadow, dropped)

    def _buffers_of(self, model: ModelShard, publication: str) -> StateDict | None:
        """Return the buffers: on a relay those of this publication, or nothing if it is no longer the newest one."""
        shard = self._shard
        if not (model.mode.is_relayed and model.layout.buffers):
            return shard.buffers_now()
        return shard.apply_thread.run(
            lambda: shard.buffers_now() if model.publication_at(model.version) == publication else None
        )

    def _track(self, shadow: Shadow, dropped: list[ShardCut]) -> None:
        """Have a track of each dropped cut that a reader still has, and none of others, as far as there is room."""
        with self._lock:
            oldest = self._clock() - _TYPE_SECONDS
            self._readers_at = {version: at for version, at in self._readers_at.items() if at.since > oldest}
            held = [*self._readers_at]
        room = self._shard.has_room_for_cuts(shadow.track_bytes)
        shadow.keep_tracks(held if room else [])
        for cut in dropped:
            if room and cut.version in held and shadow.model.versions_name_values:
                shadow.track(cut.version, cut.values)

    def sent(self, cut: ShardCut, before: int | None) -> None:
        """Note that a reader, which has had a version, has been sent a cut."""
        with self._lock:
            at, now = self._readers_at, self._clock()
            at[cut.version] = _At(at[cut.version].readers + 1 if cut.version in at else 1, now)
            if before in at and before != cut.version:
                at[before] = at[before]._replace(readers=at[before].readers - 1)
                if at[before].readers <= 0:
                    del at[before]
            while len(at) > _MOST_VERSIONS:
                del at[min(at)]

    @property
    def is_asked(self) -> bool:
        """Whether readers have asked lately."""
        return self._clock() < self._asked_at + _IDLE_SECONDS

    def own(self) -> tuple[int, Part | None]:
        """Return the number of the newest cut that this shard has taken part in, and its part."""
        with self._lock:
            if not self._kept:
                return 0, None
            return self._kept[-1].number, _part_of(self._kept[-1])

    def hear(self, shard_index: int, number: int, part: Part) -> None:
        """Note another shard's part in a cut; on shard 0."""
        with self._lock:
            if number and number == self.wanted.number and len(part.digests) == len(self.wanted.types):
                self._told[shard_index] = part
        self._end_if_whole()

    def make_if_due(self) -> None:
        """Begin a cut if the model has moved; on shard 0, in one thread at a time."""
        model, now = self._shard.model, self._clock()
        if model is None or now < self._begun_at + self._interval or not self._is_wanted(model, now):
            return
        self._begun_at = now
        self._buffers_at = self._shard.buffer_contributions()  # before they are read
        with self._lock:
            oldest = now - _TYPE_SECONDS
            self._types = {dtype: asked for dtype, asked in self._types.items() if asked > oldest}
            self.wanted = wanted = Wanted(next(self._numbers), tuple(self._types) or (None,))
            self._told = {}
        if self._num_shards > 1:
            self._shard.tell_shards()
        try:
            self.take_part(wanted)
            self.trouble = ""
        except Rejected as refusal:  # another model is on its way in, or nothing can be written: it is tried again
            self.trouble = refusal.detail
        self._end_if_whole()

    def _is_wanted(self, model: ModelShard, now: float) -> bool:
        if not self.may_begin():
            return False
        newest, is_alone = self.newest, self._num_shards == 1 or not self.wanted.number
        if newest is None or newest.number != self.wanted.number:  # one is under way
            return now >= self._begun_at + (0.0 if is_alone else _ALL_SHARDS_SECONDS)
        if any(dtype not in newest.shards for dtype in self._types):
            return True
        if self._num_shards > 1 and now >= self._begun_at + _AGAIN_SECONDS:
            return True
        is_same = (model.generation, model.version) == (newest.generation, newest.version)
        is_same &= self._shard.buffer_contributions() == self._buffers_at
        return not is_same or not model.versions_name_values

    def _end_if_whole(self) -> None:
        """Let the wanted cut be read if every shard has told its part."""
        with self._lock:
            mine = self._kept[-1] if self._kept else None
            number, types = self.wanted
            if mine is None or mine.number != number or len(self._told) < self._num_shards - 1:
                return
            if self.newest is not None and self.newest.number == number:
                return
            parts = [_part_of(mine), *(self._told[index] for index in range(1, self._num_shards))]
            if not _may_be_a_cut(mine.model, parts):
                self._begun_at = -math.inf  # a shard has not heard yet of a version that is published: another try
                return
            shards = {
                dtype: tuple(ShardVersion(part.generation, part.version, part.digests[place]) for part in parts)
                for place, dtype in enumerate(types)
            }
            before, cut = self.newest, Cut(number, shards, mine.buffers_digest, mine.made)
            is_same = before is not None and before[1:3] == cut[1:3]
            self.newest = before._replace(number=cut.number) if before is not None and is_same else cut
        if not is_same:
            self._shard.tell_shards()

    def _work(self) -> None:
        began = time.perf_counter()
        while self.keep_up():
            took = time.perf_counter() - began
            self._stopping.wait(max(self._interval, min(took / _SHARE, _LONGEST_PAUSE_SECONDS), self._idle_pause()))
            began = time.perf_counter()

    def _idle_pause(self) -> float:
        return 0.0 if self.is_asked else _IDLE_PAUSE_SECONDS

    def keep_up(self) -> bool:
        """Make a cut if it is time and readers ask; after an hour without a question keep nothing.

        Return whether to call again soon.
        """
        with self._lock:
            now, had_readers = self._clock(), self.wanted.number != 0
            goes_on = not self._stopping.is_set() and now < self._asked_at + _FORGET_SECONDS
            is_asked = self.is_asked
            if not goes_on:  # the next question starts a thread
                self._thread = None
                self._free()
        if goes_on and is_asked:
            try:
                self.make_if_due()
            except Exception as error:  # whatever it was, readers get a cut once it is over
                log.exception("a cut could not be made")
                self.trouble = f"a cut could not be made: {error}"
        elif not goes_on and had_readers and self._num_shards > 1:
            self._shard.tell_shards()
        return goes_on

    def forget_if_idle(self) -> None:
        """Keep nothing if nobody has asked for a while; on shard 0."""
        if not self.is_asked:
            self.forget()

    def forget(self) -> None:
        """Keep no cut; readers go on with the next one."""
        with self._lock:
            self._free()

    def _free(self) -> None:
        self._kept, self.newest, self.wanted, self._types, self._shadow = [], None, _NO_READERS, {}, None
        self._readers_at.clear()

    def close(self) -> None:
        """Stop the thread."""
        self._stopping.set()
        thread = self._thread
        if thread is not None:
            thread.join()


def _view_bytes(model: ModelShard, dtype: ReaderType) -> int:
    """Return the bytes of a type's view: a stamp an element, and with 16 bits a window."""
    return model.span.length * (1 if dtype is None else 2)


def _may_be_a_cut(model: ModelShard, parts: Collection[Part]) -> bool:
    """Tell whether readers may have parts together: those of a feed or a relay if all are of one publication.

    A restore of which one shard did not hear leaves shards that may have one number for two publications. On a relay a
    publication is a cut of the source.
    """
    publications = {part.publication for part in parts}
    is_any = not (model.mode.is_feed or model.mode.is_relayed)
    return is_any or (len(publications) == 1 and "" not in publications)


def _part_of(cut: ShardCut) -> Part:
    return Part(cut.generation, cut.version, tuple(view.digest for view in cut.views.values()), cut.publication)
