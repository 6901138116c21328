"""A follower: keeps one whole version of the model up to date, from a thread of its own."""

import _thread
import contextlib
import logging
import os
import secrets
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from psclient import executor
from psclient import settings as client_settings
from psclient.errors import (
    ConfigurationError,
    FollowerNotReadyError,
    RolledBackError,
    ServerFaultError,
    ServerNotReadyError,
    SparsepsError,
    from_refusal,
)
from psclient.executor import SerialExecutor, is_cancelled
from psclient.reader.holds import Holds
from psclient.reader.lag import Lag
from psclient.reader.module_sink import ModuleSink, Rename
from psclient.reader.patch_sink import PatchReceiver, PatchSink
from psclient.reader.shard_reader import ShardReader
from psclient.reader.sink import CutDeclinedError, MisfitError, Sink, StagedCut
from psclient.rpc.channel import Connection, RetryPolicy, pause, suppress_errors
from psclient.rpc.resolver import connect
from psclient.rpc.shard_stream import WAIT_SHARE
from psclient.settings import ClientSettings, Server
from psclient.whole_numbers import whole_number
from pscore.model.buffers import unpack
from pscore.model.digest import ModelDigest
from pscore.model.layout import ModelLayout
from pscore.model.sparse_slice import SparseSlice
from pscore.reader.cut import Cut
from pscore.reader.transfer import CutTransfer, FetchedShard
from pscore.reader.warmup import warm_up
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.layouts import unpack_layout
from pscore.wire.messages import type_to_message
from pscore.wire.v1 import parameter_server_pb2 as pb

log = logging.getLogger("psclient")

_ATTEMPT_SECONDS = 10.0  # for a lost server, before everything is looked up anew
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 5.0
_CLOSING_SECONDS, _LEAVING_SECONDS = 5.0, 1.0
_COMPLAINT_SECONDS = 60.0
_POLL_SECONDS = 0.05
_CONVERSION_SECONDS = 2.0  # of a conversion outside hold(), which may be seen half done
_FIRST_WAIT_SECONDS = 1.0  # for a model, before the server's word that there is none is passed on
_GONE = (ErrorCode.NO_SUCH_CUT, ErrorCode.STALE_GENERATION, ErrorCode.NOT_INITIALISED)
"""Refusals after which the newest cut is asked for again."""


class Follower:
    """Follows a run from now on until :meth:`close`, in a thread of its own; a context manager.

    Each cut is fetched, checked by its digest, staged, and then written in one go, so that the sink holds one version
    of the whole model at any time. A follower that is slower than the run skips versions. If the server is away, or
    the line is cut, the follower keeps what it has and goes on by itself. One that nobody refers to any more is closed
    by itself too; what its own sink or ``on_cut`` refers to does not keep it.

    Args:
        server: the address of each shard, as for an optimizer.
        sink: where the model goes: a :class:`Sink`, or what takes patches of tensors (:class:`PatchReceiver`).
        settings: how the connection is secured; the default comes from the environment.
        dtype: in which an engine takes the run's fp32 parameters: float16 or bfloat16; ``None``: as the run has them.
        name: this reader's name in the server's status; the default is made of host and process.
        allow_older: whether to follow a run that has been taken back to an older version, too.
        on_cut: called in the follower's thread with each cut that was committed, and with the newest one if the sink
            is found to hold it; an error in it is logged.

    Raises:
        ConfigurationError: no server is named, or an argument or a setting cannot be used.
    """

    def __init__(
        self,
        server: Server | None,
        sink: Sink | PatchReceiver,
        settings: ClientSettings | None = None,
        *,
        dtype: torch.dtype | None = None,
        name: str = "",
        allow_older: bool = False,
        on_cut: Callable[[Cut], object] = lambda cut: None,
    ) -> None:
        self._settings = client_settings.resolve(settings, server, None)
        client_settings.require_server(self._settings)
        if not callable(on_cut):
            raise ConfigurationError(f"on_cut= must be a function of a cut, not {on_cut!r}")
        if dtype is not None and isinstance(sink, Sink):
            raise ConfigurationError(
                "dtype= is for engines; give it to the sink: DirectorySink(path, dtype), PatchSink(engine, dtype)"
            )
        self._sink = sink if isinstance(sink, Sink) else PatchSink(sink, dtype)
        self._on_cut = on_cut
        self._following = following = _Following(weakref.ref(self), self._settings, name, allow_older)
        self._holds, self._changed = following._holds, following._changed

    # What is held

    @property
    def cut(self) -> Cut | None:
        """The cut that the sink holds; ``None`` before the first one, or if it may hold a mixture."""
        return self._following._cut

    @property
    def ready(self) -> bool:
        """Whether the sink holds a whole model."""
        return self.cut is not None

    @property
    def version(self) -> int:
        """The version of the model that is held, as workers count; raises :class:`FollowerNotReadyError` without."""
        return self._held().version

    @property
    def digest(self) -> str:
        """The digest of the model that is held; raises :class:`FollowerNotReadyError` without one."""
        return self._held().digest

    @property
    def lag(self) -> Lag:
        """How far the model that is held is behind, as far as is known here."""
        following, cut, now = self._following, self.cut, time.monotonic()
        versions = max(0, following._newest_version - (cut.version if cut is not None else 0))
        return Lag(versions, 0.0 if following._is_waiting and following._is_heard else now - following._current)

    @property
    def finished(self) -> bool:
        """Whether the run is over and its last version is held."""
        return self._following._has_finished and self.cut is not None and self.cut == self._following._known

    @property
    def is_over(self) -> bool:
        """Whether the follower has ended: it was closed, or met an error that no other attempt would mend."""
        return self._following._is_over

    @property
    def error(self) -> BaseException | None:
        """What keeps the follower from going on, or did last; ``None`` while all is well."""
        return self._following._error

    @property
    def fetched_bytes(self) -> int:
        """How many bytes came for the cuts that were committed."""
        return self._following._fetched_bytes

    def _held(self) -> Cut:
        if self.cut is None:
            raise self._not_ready("there is no whole model here yet")
        return self.cut

    # Waiting and holding

    def wait_for(self, version: int, seconds: float | None = None) -> Cut:
        """Wait until a version, or a later one, is held, and return its cut.

        Raises:
            FollowerNotReadyError: after ``seconds``, or if the follower has ended, or the run has at a lower version.
            ConfigurationError: ``version`` is no whole number.
        """
        whole_number(version, "version must be a whole number", 0)

        def there() -> Cut | None:
            cut = self.cut
            return cut if cut is not None and cut.version >= version else None

        with self._changed:
            self._changed.wait_for(lambda: there() is not None or self.is_over or self.finished, seconds)
            if (cut := there()) is not None:
                return cut
        raise self._not_ready(f"version {version} is not here" if self.ready else "there is no whole model here yet")

    @contextmanager
    def hold(self, seconds: float | None = None) -> Iterator[Cut]:
        """Keep the model as it is during the body, and give its cut: ``with follower.hold(): module(x)``.

        Waits for the first cut. Newer ones are staged meanwhile, and committed afterwards. Raises as :meth:`wait_for`.
        """
        with self.at_least(0, seconds) as cut:
            yield cut

    @contextmanager
    def at_least(self, version: int, seconds: float | None = None) -> Iterator[Cut]:
        """As :meth:`hold`, with this version or a later one."""
        end = None if seconds is None else time.monotonic() + seconds

        def left() -> float | None:
            return None if end is None else max(0.0, end - time.monotonic())

        while True:
            if self._holds.is_mine and (self.cut is None or self.cut.version < version):
                raise self._not_ready(f"version {version} cannot come while this thread holds another one")
            self.wait_for(version, left())
            with ExitStack() as holding:
                try:
                    holding.enter_context(self._holds.together(left()))
                except TimeoutError:
                    raise self._not_ready("a newer version waits for others that hold the model") from None
                cut = self.cut
                if cut is not None and cut.version >= version:  # else another one came in between
                    yield cut
                    return

    def _not_ready(self, what: str) -> FollowerNotReadyError:
        held = f"; version {self.cut.version} is" if self.cut is not None else ""
        if self.error is not None:
            why = f": {self.error}"
        elif self.is_over:
            why = ": the follower is closed"
        elif self.finished:
            why = ": the run is over"
        else:
            newest = self._following._newest_version
            why = f"; the server has version {newest}" if newest else ": no answer yet"
        return FollowerNotReadyError(f"{what}{held}{why}")

    # The end

    def close(self) -> None:
        """Stop following; the sink keeps what it holds. Harmless twice."""
        self._following.close()

    def __del__(self) -> None:
        """Have another thread close it: a collector may call this anywhere, and nothing may be waited for there."""
        following = getattr(self, "_following", None)  # not there if an argument was refused
        if following is not None and not following._is_over and not sys.is_finalizing():
            following._job.cancelled = True
            _thread.start_new_thread(_end_dropped, (following, self._sink))  # takes no lock, unlike threading.Thread

    def __repr__(self) -> str:
        """Say what is held."""
        held = f"version {self.cut.version} of run {self.cut.run_id}" if self.cut is not None else "not ready"
        return f"<psclient.Follower: {held}{', closed' if self.is_over else ''}>"

    def __enter__(self) -> "Follower":
        """Return the follower."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


def _end_dropped(following: "_Following", sink: Sink) -> None:
    following.close()
    following._job.wait()  # the sink may be at work until then
    sink.close()


class _Following:
    """The state of a follower's thread.

    The thread refers to this object alone. The follower, with its sink and its callback, can so be collected while the
    thread waits for a server.
    """

    def __init__(self, owner: "weakref.ref[Follower]", settings: ClientSettings, name: str, allow_older: bool) -> None:
        self._owner, self._settings, self._allow_older = owner, settings, allow_older
        self._name = name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._holds, self._changed = Holds(), threading.Condition()
        self._cut: Cut | None = None
        self._last: Cut | None = None  # that was held, also if nothing whole is now
        self._known: Cut | None = None  # the newest that was heard of
        self._told: Cut | None = None  # that on_cut was last called with
        self._newest_version = 0
        self._current = time.monotonic()  # when the model here was last known to be the newest
        self._is_waiting = False  # for a cut newer than the one here
        self._is_heard = False  # whether the last question was answered
        self._has_finished = False
        self._run_state = pb.RUN_STATE_UNSPECIFIED
        self._error: BaseException | None = None
        self._complained = self._complained_of_callback = float("-inf")
        self._is_over = False
        self._run_layout: ModelLayout | None = None
        self._layout: ModelLayout | None = None  # in the sink's data type
        self._dtype: torch.dtype | None = None
        self._reading = threading.Lock()  # the sink, from the threads of several shards
        self._connections: list[Connection] = []
        self._readers: list[ShardReader] = []
        self._threads: list[SerialExecutor] = []
        self._fetched_bytes = 0
        self._thread = SerialExecutor("psclient-follow")
        self._job = self._thread.submit(self._run)

    @property
    def _sink(self) -> Sink:
        owner = self._owner()
        if owner is None:
            raise InterruptedError("nobody refers to the follower any more")
        return owner._sink

    def _tell(self, cut: Cut) -> None:
        owner, self._told = self._owner(), cut
        if owner is None:
            return
        try:
            owner._on_cut(cut)
        except Exception as error:
            now = time.monotonic()
            is_new = now > self._complained_of_callback + _COMPLAINT_SECONDS
            self._complained_of_callback = now if is_new else self._complained_of_callback
            log.error("on_cut has failed for version %d: %r", cut.version, error, exc_info=is_new)

    def _run(self) -> None:
        delay = _SHORTEST_PAUSE_SECONDS
        while not is_cancelled():
            try:
                self._step()
                self._error, delay = None, _SHORTEST_PAUSE_SECONDS
                continue
            except ConfigurationError as error:
                self._end(error)
                return
            except (SparsepsError, Rejected, OSError) as error:
                if not is_cancelled():
                    self._note(error)
            except Exception as error:
                log.exception("following has failed; it is tried again")
                self._note(error)
            if not isinstance(self._error, SparsepsError):
                self._readers = []  # the sink looks anew at what it holds
            if is_cancelled():
                break
            self._is_waiting = False
            if not isinstance(self._error, RolledBackError):
                self._known = None  # what could not be done is tried again with the newest cut
            if isinstance(self._error, SparsepsError | Rejected):  # else it is the sink that has failed
                self._disconnect()
            pause(delay)
            delay = min(2 * delay, _LONGEST_PAUSE_SECONDS)
        self._end(None)

    def _note(self, error: BaseException) -> None:
        now = time.monotonic()
        if type(error) is not type(self._error) or now > self._complained + _COMPLAINT_SECONDS:
            self._complained = now
            held = f"version {self._cut.version} stays" if self._cut is not None else "there is no model yet"
            log.warning("not following now (%s): %s", held, error)
        cause: BaseException | None = error
        while cause is not None:  # the frames refer to the sink, and so perhaps to the follower
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__context__
        self._error = error
        with self._changed:
            self._changed.notify_all()

    def _end(self, error: BaseException | None) -> None:
        if self._connections:  # so that the server's status forgets this reader
            leaving = pb.AwaitCutRequest(reader=self._name, leaves=True)
            suppress_errors(partial(self._connections[0].stub.AwaitCut, leaving, timeout=_LEAVING_SECONDS))
        self._disconnect()
        with contextlib.suppress(InterruptedError):  # a sink without its follower is closed behind this
            self._sink.close()
        self._is_waiting = False
        with self._changed:
            self._error, self._is_over = error or self._error, True
            self._changed.notify_all()
        if error is not None:
            log.error("following has ended: %s", error)

    def _step(self) -> None:
        """Wait for a cut, and go there; or until a conversion, of which half was seen, is done."""
        with contextlib.suppress(MisfitError):
            self._advance()
            return
        self._await_fit()

    def _await_fit(self) -> None:
        """Wait until the sink can have the model. Nobody is inside ``hold()`` when it is asked."""
        layout, end = self._run_layout, time.monotonic() + _CONVERSION_SECONDS
        assert layout is not None
        self._readers = []  # the sink looks anew at what it holds
        while True:
            with self._holds.alone(is_cancelled):
                try:
                    self._sink.open(layout.viewed_in(self._sink.dtype(layout)))
                    return
                except MisfitError:
                    if time.monotonic() > end:
                        raise
            pause(_POLL_SECONDS)

    def _advance(self) -> None:
        if not self._connections:
            settings = self._settings
            hint = "The follower goes on trying"
            self._connections = connect(settings.server, settings.security, _ATTEMPT_SECONDS, hint)
            if len(self._readers) != len(self._connections):
                self._readers = []
            for reader, connection in zip(self._readers, self._connections, strict=False):
                reader.connection = connection  # what it has of an unfinished transfer stays
        dtype = self._sink.dtype(self._run_layout)
        if dtype != self._dtype:
            self._dtype, self._known, self._readers = dtype, None, []
        answer = self._await_cut()
        if isinstance(answer, Rejected):
            raise from_refusal(answer)
        if answer.HasField("layout"):
            self._run_layout = unpack_layout(answer.layout)
            self._readers = []
            has_taken_time = warm_up(self._run_layout.size)
            if has_taken_time or self._sink.dtype(self._run_layout) != dtype:
                return  # the cut is old, or of another type: it is asked for anew
        cut = Cut.from_message(answer.cut)
        self._newest_version, self._known = answer.newest_version, cut
        self._require_newer(cut)
        if self._run_layout is None:
            raise ServerFaultError("the server names a cut, and not the model's tensors")
        if not self._readers:
            self._layout = self._run_layout.viewed_in(dtype)
        layout = self._layout
        assert layout is not None
        if len(cut.shards) != len(self._connections):
            raise ServerNotReadyError(
                f"the model has {len(cut.shards)} shards, and {len(self._connections)} addresses are known: name each "
                "shard once, in order"
            )
        if not self._readers:
            self._cut = self._sink.open(layout)
            self._last = self._cut or self._last or self._sink.last
            spans = layout.shard_spans(len(cut.shards))
            each = enumerate(zip(self._connections, spans, strict=True))
            self._readers = [
                ShardReader(connection, CutTransfer(i, layout, span, dtype, self._read))
                for i, (connection, span) in each
            ]
            self._require_newer(cut)  # than what the sink has been found to hold
        if cut != self._cut:
            self._go_to(cut, layout)
        elif cut != self._told:  # found by the sink
            self._tell(cut)
        with self._changed:
            self._run_state = answer.run_state
            self._has_finished = answer.run_state == pb.RUN_STATE_FINISHED and answer.newest_version == cut.version
            self._current = time.monotonic()
            self._changed.notify_all()

    def _await_cut(self) -> pb.AwaitCutResponse | Rejected:
        connection, cut = self._connections[0], self._cut

        def attempt(seconds: float) -> pb.AwaitCutResponse:
            request = pb.AwaitCutRequest(
                reader=self._name,
                version=cut.version if cut is not None else 0,
                wait_seconds=WAIT_SHARE * seconds if self._run_layout is not None else _FIRST_WAIT_SECONDS,
                fingerprint=self._run_layout.fingerprint if self._run_layout is not None else b"",
                reader_type=type_to_message(self._dtype),
            )
            known = self._known if self._readers else None
            if known is not None:
                request.known.extend(pb.ShardVersion(**shard._asdict()) for shard in known.shards)
                request.buffers_digest = known.buffers_digest
            request.run_state = self._run_state
            self._is_waiting = cut is not None and known == cut
            try:
                answer: pb.AwaitCutResponse = connection.result(
                    connection.stub.AwaitCut.future(request, timeout=seconds)
                )
                if self._is_waiting:
                    self._current = time.monotonic()
                self._is_heard = True
                return answer
            except BaseException:
                self._is_heard = False
                raise
            finally:
                self._is_waiting = False

        return connection.call(self._policy(), attempt)

    def _policy(self) -> RetryPolicy:
        return RetryPolicy(_ATTEMPT_SECONDS, self._settings.deadline_seconds, "The follower goes on trying")

    def _require_newer(self, cut: Cut) -> None:
        wanted = self._settings.run_id
        if wanted and cut.run_id != wanted:
            raise RolledBackError(f"the server has run {cut.run_id}, and this follower is for run {wanted} (run_id)")
        held = self._cut or self._last
        if held is None or self._allow_older or cut == held:
            return
        if cut.run_id != held.run_id:
            raise RolledBackError(
                f"the server has run {cut.run_id}, and here is version {held.version} of run {held.run_id}: make "
                "another follower, or allow_older=True (--allow-older), to leave that"
            )
        if (shard := cut.older_shard(held)) is not None:
            now, before = cut.shards[shard].version, held.shards[shard].version
            raise RolledBackError(
                f"shard {shard} of the run has gone back to version {now}, and version {before} of it is held: that "
                "stays until the run is ahead again; allow_older=True (--allow-older) follows back"
            )

    def _go_to(self, cut: Cut, layout: ModelLayout) -> None:
        """Fetch, verify, stage and commit a cut."""
        if self._sink.dtype(self._run_layout) != self._dtype:
            self._known = None  # others have converted what follows: the cut is asked for anew
            return
        if not self._sink.is_current():
            log.warning("others have written to what follows, or replaced it: all is fetched anew")
            self._cut = self._sink.open(layout)
        held = self._cut if self._cut is not None and self._cut.run_id == cut.run_id else None
        fetched = self._fetch(cut, held, self._sink.buffers() if held is not None else b"")
        if fetched is None:
            return  # the cut is gone: the next one is asked for
        verified = [self._verified(reader, cut, part) for reader, part in zip(self._readers, fetched, strict=True)]
        if any(part is None for part in verified):
            return
        changes, before = list[SparseSlice](), list[SparseSlice]()
        for part in verified:
            assert part is not None
            changes += part[0]
            before += part[1]
        packed = fetched[0].buffers
        buffers = unpack(packed, layout.buffers) if packed else None
        is_whole = all(part.base is None for part in fetched)
        try:
            self._sink.stage(StagedCut(cut, layout, changes, before, buffers, is_whole))
        except CutDeclinedError:
            self._sink.abort()
            return  # the next cut is waited for
        except BaseException:
            self._sink.abort()
            raise
        try:
            with self._holds.alone(is_cancelled), torch.no_grad():
                if not self._is_as_staged():
                    self._known = None  # the cut is asked for anew
                    return
                try:
                    self._sink.commit()
                except BaseException as error:
                    self._cut = None  # nobody may hold it until it is known what it is
                    self._cut = self._sink.open(layout)
                    if self._cut != cut or not isinstance(error, Exception):
                        raise
                    log.warning("a commit has failed, and version %d is held all the same: %r", cut.version, error)
                self._cut = self._last = cut
                self._error = None
        finally:
            with self._changed:
                self._changed.notify_all()
        self._fetched_bytes += sum(part.received_bytes for part in fetched)
        self._current = time.monotonic()
        self._tell(cut)

    def _is_as_staged(self) -> bool:
        """Tell whether the sink's tensors are those from before the fetch; if not, drop the staged cut."""
        with contextlib.suppress(MisfitError):  # it was converted
            if self._sink.is_current():
                return True
        self._sink.abort()
        return False

    def _fetch(self, cut: Cut, held: Cut | None, buffers: bytes) -> list[FetchedShard] | None:
        """Fetch from all shards, and buffers if others than these are held; ``None`` if one no longer has the cut."""
        while len(self._threads) < len(self._readers) - 1:
            self._threads.append(SerialExecutor("psclient-follow"))
        jobs = [
            thread.submit(partial(reader.fetch, cut, held, b"", self._policy()), as_part=True)
            for thread, reader in zip(self._threads, self._readers[1:], strict=False)
        ]
        try:
            found = [self._readers[0].fetch(cut, held, buffers, self._policy())]
        finally:
            for job in jobs:
                job.wait()
        found += [job.result() for job in jobs]
        fetched = []
        for part in found:
            if isinstance(part, Rejected):
                if part.reason in _GONE:
                    self._known = None
                    return None
                raise from_refusal(part)
            fetched.append(part)
        return fetched

    def _verified(
        self, reader: ShardReader, cut: Cut, part: FetchedShard
    ) -> tuple[list[SparseSlice], list[SparseSlice]] | None:
        """Return the changes and what is held in their places; ``None``: the sink does not hold what it should."""
        assert self._layout is not None
        digest = ModelDigest(self._layout, *([part.base.digest] if part.base is not None else []))
        before = [entries for change in part.changes if (entries := self._read(change)) is not None]
        if part.base is not None:
            if len(before) < len(part.changes):
                return part.changes, []  # a sink that cannot be read
            for entries in before:
                digest.remove(entries)
        for change in part.changes:
            digest.add(change)
        if digest.value == part.version.digest:
            return part.changes, before
        if part.base is None:
            raise ServerFaultError(f"{reader.connection.address} sent values of another digest than the cut's")
        log.warning(
            "the model here is not version %d as it was committed: others have written to it. All is fetched anew",
            part.base.version,
        )
        self._cut = self._known = None
        return None

    def _read(self, change: SparseSlice) -> SparseSlice | None:
        with self._reading:
            return self._sink.read(change) if self._cut is not None else None

    def _disconnect(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections = []

    def close(self) -> None:
        """End the calls and the thread, and wait for that."""
        self._job.cancelled = True
        if executor.current() is self._job:  # called by on_cut: the thread ends behind that
            return
        end = time.monotonic() + _CLOSING_SECONDS
        while not self._job.finished and time.monotonic() < end:
            for connection in [*self._connections]:  # also those calls that begin just now
                with contextlib.suppress(ValueError, RuntimeError):
                    connection.cancel_unawaited()
            self._job.wait(_POLL_SECONDS)
        self._thread.close(_POLL_SECONDS)
        for thread in self._threads:
            thread.close(_CLOSING_SECONDS)


def follow(
    server: Server | None,
    module: torch.nn.Module,
    *,
    rename: Rename | None = None,
    settings: ClientSettings | None = None,
    name: str = "",
    allow_older: bool = False,
    on_cut: Callable[[Cut], object] = lambda cut: None,
) -> Follower:
    """Keep a module at the newest version of a run, in place, without training in the run.

    >>> with psclient.follow("ps:50051", module) as follower:
    ...     with follower.hold():  # one version, whole, until the end of the block
    ...         module(x)

    Args:
        server: the address of each shard, as for an optimizer.
        module: built as the workers build theirs, on any device, or converted by ``half()`` or ``bfloat16()``; frozen
            parameters are the caller's.
        rename: returns the module's name of a tensor from the run's.
        settings: as for :class:`Follower`, and so the other three.
        name: of this reader.
        allow_older: whether to follow back.
        on_cut: called after each commit.
    """
    sink = ModuleSink(module, rename)
    return Follower(server, sink, settings, name=name, allow_older=allow_older, on_cut=on_cut)
