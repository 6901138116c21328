"""The publisher of a feed: compares a source with its baseline, and publishes the words that differ."""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from psclient import settings as client_settings
from psclient.errors import REJOIN_REASONS, ConfigurationError, ServerFaultError, from_refusal
from psclient.executor import SerialExecutor
from psclient.model.module import NamedBuffers
from psclient.publisher.baseline import Baseline, Held
from psclient.publisher.published import Published
from psclient.publisher.source import Source
from psclient.publisher.words import OwnWords, WordSource
from psclient.rpc.resolver import connect
from psclient.rpc.run import Run
from psclient.rpc.shard_stream import EncodedPart, ShardStream
from psclient.settings import ClientSettings, Server
from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice, entries
from pscore.reader.cut import weight_version
from pscore.wire import frames
from pscore.wire.dense import bytes_of
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb

if TYPE_CHECKING:
    import torch.distributed as dist

    from psclient.publisher.gathered import Gathered

log = logging.getLogger("psclient")

METHOD, AGREED = "feed", {"update": "assign"}
_NAME = "publisher"  # of the run's one worker
_MOST_CHANGED = 0.5  # of the words that are sent as changes: of more all are sent, and no change is kept
_CLOSING_SECONDS = 10.0


class _Prepared(NamedTuple):
    """A version that every shard has staged, and which may or may not be published."""

    version: int
    changes: Sequence[SparseSlice]
    shards: tuple[tuple[int, int], ...]


class Publisher:
    """Publishes the tensors of a model that is trained elsewhere, for followers (:func:`psclient.follow`).

    A feed is a server that trains nothing: its words are bits, of any data type, and are assigned. A version is
    published as a whole: whoever dies in between, readers have this version or the one before.

    >>> publisher = psclient.Publisher("ps:50051")
    >>> publisher.publish(model)

    Args:
        server: the address of each shard, as for an optimizer.
        feed: the run's id (``--run-id``) if the server must have this one; else any.
        baseline: file with the words of the version that was published last, as long as the model. With it, a new
            publisher goes on with differences; without, its first publication has all words. The system keeps as much
            of it in memory as there is room.
        group: process group of ranks that have blocks of the tensors (DTensors), or some of the tensors each. Every
            rank makes a publisher, and calls :meth:`publish`; each compares its own blocks, and the group's first rank,
            which alone needs the server's address, publishes what differs.
        settings: of the client; read from the environment if left out.

    Raises:
        ConfigurationError: no server is named, or the file cannot be used.
        RankLostError: a rank of the group is gone, or does not come.
    """

    def __init__(
        self,
        server: Server | None = None,
        feed: str = "",
        *,
        baseline: str | Path = "",
        group: "dist.ProcessGroup | None" = None,
        settings: ClientSettings | None = None,
    ) -> None:
        self._settings = client_settings.resolve(settings, server, _NAME)
        if feed:
            self._settings = self._settings.model_copy(update={"run_id": feed})
        self._ranks = None if group is None else _gathered(group, baseline)
        if self._ranks is None or self._ranks.is_first:
            client_settings.require_server(self._settings)
        self._baseline = Baseline(baseline if self._ranks is None or self._ranks.is_first else "")
        self._run: Run | None = None
        self._prepared: _Prepared | None = None
        self._is_closed, self._step = False, 0
        self._thread = SerialExecutor("psclient-publish")

    def publish(self, source: Source) -> Published:
        """Publish tensors as the next version; returns once that is durable on shard 0, and readers get it.

        ``source`` has the same names, shapes and data types, in the same order, each time; the calling thread waits.
        In a group every rank publishes its own part, and gets the same answer.

        Raises:
            ConfigurationError: the tensors are others than before, or cannot be published.
            RankLostError: a rank of the group is gone, or does not come.
            SparsepsError: servers that cannot be reached, or refuse. The feed then has this version or the one
                before, and the next call finds out which.
        """
        if self._is_closed:
            raise ConfigurationError("this publisher is closed; make a new one")
        return self._thread.call(partial(self._publish, source), self._cancel)

    def close(self) -> None:
        """Leave the run. Harmless twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._run is not None:
            self._run.set_deadline(_CLOSING_SECONDS)
            self._thread.call(self._run.close, self._cancel)
        self._thread.close(_CLOSING_SECONDS)
        self._baseline.close()
        if self._ranks is not None:
            self._ranks.close()

    def __enter__(self) -> "Publisher":
        """Return the publisher."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _cancel(self) -> None:
        if self._run is not None:
            self._run.cancel_unawaited()

    # In the publisher's thread

    def _publish(self, source: Source) -> Published:
        began = time.perf_counter()
        with torch.no_grad():
            if self._ranks is None:
                return self._publish_words(OwnWords(source), began)
            return self._ranks.publish(source, partial(self._publish_words, began=began), lambda: self._baseline.held)

    def _publish_words(self, words: WordSource, began: float) -> Published:
        run, has_words = self._run, False  # whether the baseline has the words that are published
        if run is None:
            run, has_words = self._begin(words)
            if has_words and self._has_base(run):  # it was uploaded
                self._note(run)
                return self._published(run, self._baseline.layout.size, run.upload_bytes, began)
        else:
            self._settle(run)
        most = int(_MOST_CHANGED * self._baseline.layout.size)
        changes = None if has_words else _Changes(words.differences(self._baseline), most)
        return self._published(run, *self._send(run, changes), began)

    @staticmethod
    def _published(run: Run, changed: int, nbytes: int, began: float) -> Published:
        """Describe the version that every shard now has."""
        name = weight_version(run.identity.run_id, [(shard.generation, shard.version) for shard in run.shards])
        return Published(run.coordinator.version, changed, nbytes, time.perf_counter() - began, name)

    def _begin(self, words: WordSource) -> tuple[Run, bool]:
        """Join, and upload the words if the server has nothing; return whether the baseline has them all."""
        baseline, layout = self._baseline, words.layout
        is_known = layout is not None and baseline.open(layout)
        if not is_known:
            words.fill(baseline)
        held = baseline.held
        connections = connect(self._settings.server, self._settings.security, self._settings.connect_seconds)
        spans = baseline.layout.shard_spans(len(connections))
        shards = [ShardStream(each, i, spans[i], self._settings) for i, each in enumerate(connections)]
        run = Run(shards, _NAME, baseline, NamedBuffers(()), METHOD, AGREED, self._settings, lambda: False)
        try:
            run.join()
        except BaseException:
            run.close()
            raise
        self._run = run
        generations = [shard.generation for shard in shards]
        if held is not None and (held.run_id, [each[0] for each in held.shards]) == (run.identity.run_id, generations):
            for shard, (generation, version) in zip(shards, held.shards, strict=True):
                shard.adopt(generation, version=version)
        return run, not is_known

    def _send(self, run: Run, changes: "_Changes | None") -> tuple[int, int]:
        """Publish changes, or all words of the baseline; return the number of words, and of bytes."""
        nbytes = 0
        for _ in run.joining_again("publications"):
            if changes is not None and (changes.are_many or not self._has_base(run)):
                self._baseline.change(changes.drain())  # from which everything is sent
                changes = None
                self._forget_base(run)
            if changes is None and self._has_base(run):  # it was uploaded anew
                changes = _Changes((), 0)
            try:
                answers = self._stage(run, changes)
            except _ManyChangesError:
                continue
            nbytes += sum(part for _, part in answers)
            refused = next((answer for answer, _ in answers if isinstance(answer, Rejected)), None)
            if refused is None:
                versions = {answer.version for answer, _ in answers if not isinstance(answer, Rejected)}
                if len(versions) != 1:
                    raise ServerFaultError(f"shards have staged different versions: {sorted(versions)}")
                generations = [shard.generation for shard in run.shards]
                version = versions.pop()
                seen = () if changes is None else changes.seen
                self._prepared = _Prepared(version, seen, tuple((each, version) for each in generations))
                refused = self._settle(run)
            if refused is None:
                return self._baseline.layout.size if changes is None else entries(changes.seen), nbytes
            if refused.reason is ErrorCode.TOO_STALE:  # the feed has another version
                self._forget_base(run)
            elif refused.reason not in REJOIN_REASONS:
                raise from_refusal(refused) from None
        raise AssertionError("joining again ends by itself")

    def _stage(self, run: Run, changes: "_Changes | None") -> list[tuple[pb.PushSparseResponse | Rejected, int]]:
        """Have every shard stage changes, as they are found, or all words; return the answers, and the bytes sent."""
        base = max(shard.version if shard.has_base else shard.joined_version for shard in run.shards)
        self._step = max(self._step + 1, run.first_step)
        for shard in run.shards:
            shard.abandon_push()
            shard.version = base
            header = pb.PushHeader(identity=run.identity, step=self._step)
            shard.open_push(header, [shard.span], run.settings.deadline_seconds)
        whole = Span(0, self._baseline.layout.size)
        try:
            for segment in self._baseline.read(whole) if changes is None else changes:
                for shard in run.shards:
                    if (part := segment.clip(shard.span)) is not None:
                        rate = shard.uplink.bytes_per_second
                        form = frames.WireForm(allowed=shard.readable, link_bytes_per_second=rate)
                        shard.send(_encoded(part, form, run.run_settings.chunk_bytes))
        except BaseException:
            for shard in run.shards:
                shard.abandon_push()
            raise
        sent = [shard.send_commit() for shard in run.shards]
        return [*zip(run.each(run.shards, lambda shard: shard.await_ack(run.policy())), sent, strict=True)]

    def _settle(self, run: Run) -> Rejected | None:
        """Publish the version that every shard has staged, if there is one; note it, or return the refusal."""
        prepared = self._prepared
        if prepared is None:
            return None
        shard = run.coordinator
        request = pb.PublishRequest(identity=run.identity, generation=shard.generation, version=prepared.version)

        def attempt(seconds: float) -> pb.PublishResponse:
            answer: pb.PublishResponse = shard.connection.result(
                shard.connection.stub.Publish.future(request, timeout=seconds)
            )
            return answer

        answer = shard.connection.call(run.policy(), attempt)
        self._prepared = None
        if isinstance(answer, Rejected):
            return answer
        for each, (generation, version) in zip(run.shards, prepared.shards, strict=True):
            each.adopt(generation, version=version)
        self._baseline.change(prepared.changes)
        self._note(run)
        return None

    def _note(self, run: Run) -> None:
        versions = tuple((shard.generation, shard.version) for shard in run.shards)
        self._baseline.hold(Held(run.identity.run_id, versions))

    @staticmethod
    def _has_base(run: Run) -> bool:
        return all(shard.has_base for shard in run.shards)

    @staticmethod
    def _forget_base(run: Run) -> None:
        for shard in run.shards:
            shard.joined_version = max(shard.joined_version, shard.version if shard.has_base else 0)
            shard.forget_base()


class _ManyChangesError(Exception):
    """So many words have changed that all of them are sent."""


class _Changes:
    """Words that differ, as they are found; yielded as often as they are asked for.

    If they are more than ``most``, :class:`_ManyChangesError` is raised.

    Attributes:
        seen: what came so far.
        are_many: whether there are more than ``most``.
    """

    def __init__(self, found: Iterable[SparseSlice], most: int) -> None:
        self._left, self._room = iter(found), most
        self.seen: list[SparseSlice] = []
        self.are_many = False

    def __iter__(self) -> Iterator[SparseSlice]:
        yield from self.seen
        for each in self._left:
            self.seen.append(each)
            self._room -= each.entries
            if self._room < 0:
                self.are_many = True
                raise _ManyChangesError
            yield each

    def drain(self) -> Iterator[SparseSlice]:
        """Yield all, for the last time, and keep nothing."""
        while self.seen:
            yield self.seen.pop(0)
        yield from self._left


def _gathered(group: "dist.ProcessGroup", baseline: str | Path) -> "Gathered":
    from psclient.publisher.gathered import Gathered  # which loads torch.distributed.tensor

    return Gathered(group, baseline)


def _encoded(part: SparseSlice, form: frames.WireForm, chunk_bytes: int) -> EncodedPart:
    """Write words as chunks, whose bytes are not copied."""
    data, nbytes = bytes_of(part.values), part.values.itemsize
    chunks = frames.chunks_without_values(part, form, chunk_bytes)
    beside = [(chunk, data[nbytes * first : nbytes * (first + chunk.count)]) for chunk, first in chunks]
    return EncodedPart(beside, part, None)
