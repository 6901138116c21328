"""A model on its way into a shard: which worker may upload (docs/reference/protocol.md), and what has arrived.

An upload keeps what has arrived when a call is cut; the next call of the same worker for the same generation resumes
behind that. Values are written where the model will have them, so an upload occupies what the model does.
"""

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pscore.model.layout import Span
from pscore.wire import frames
from pscore.wire.dense import DenseReader
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.generation import epoch, next_generation
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.durability.initial_model import InitialModel
from psservice.membership.leases import Leases
from psservice.values import Identity

log = logging.getLogger(__name__)

_MOST_EPOCH_SEEN = 1 << 31
"""Highest epoch of a generation that a joining worker may report; those that shard 0 assigns may exceed it."""

_LEAST_RISE = 1e-6
"""The least rise of the share sent that counts as progress: almost nothing does not hold a grant for ever."""


class Upload:
    """One upload of one worker. Thread-safe; every method may raise :class:`Rejected`.

    ``model`` has the values that have arrived; ``moved`` is when the last message did. While ``is_whole``, nothing is
    read.
    """

    def __init__(
        self,
        identity: Identity,
        generation: int,
        span: Span,
        dtype: torch.dtype,
        buffer_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self.identity, self.generation, self.span, self.buffer_bytes = identity, generation, span, buffer_bytes
        self.model = DenseReader(span, dtype)
        self._clock = clock
        self._lock = threading.Lock()
        self._call = 0
        self.is_whole = False
        self._begin()

    def _begin(self) -> None:
        self.model.checksum = frames.Checksum()
        self._buffers = frames.BytesReader(self.buffer_bytes, self.buffer_bytes)
        self.moved = self._clock()

    @property
    def nbytes(self) -> int:
        """Bytes of values that have arrived."""
        return self.model.values.itemsize * self.model.checksum.entries

    def go_on(self) -> int:
        """Return the number of a call that reads from now on; messages of earlier calls are refused."""
        with self._lock:
            self._call += 1
            return self._call

    def received(self) -> pb.UploadModelResponse:
        """Return how much has arrived."""
        return pb.UploadModelResponse(
            received=self.model.checksum.commit(), received_buffer_bytes=self._buffers.received
        )

    def read(self, call: int, chunk: pb.Chunk, *values: memoryview) -> None:
        """Read the next chunk, or the first one, which begins anew (``BAD_CHUNK``, ``STALE_GENERATION``).

        ``values`` are the chunk's value bytes, which may be in the chunk itself instead.
        """
        with self._lock:
            self._require_current(call)
            if chunk.start == self.span.start:
                self._begin()
            self.model.read(chunk, *values)
            self.moved = self._clock()

    def read_buffers(self, call: int, piece: pb.BytesChunk) -> None:
        """Read the next bytes of buffers (``BAD_CHUNK``, ``STALE_GENERATION``)."""
        with self._lock:
            self._require_current(call)
            self._buffers.read(piece)
            self.moved = self._clock()

    def verify(self, call: int, commit: pb.Commit) -> None:
        """Check that everything has arrived as it was sent (``BAD_COMMIT``); else all must be sent again."""
        with self._lock:
            self._require_current(call)
            try:
                self.model.checksum.verify(commit)
                self.model.require_complete()
                self._buffers.finish()
            except Rejected:
                self._begin()
                raise
            self.is_whole = True

    def buffers(self) -> bytes:
        """Return all buffers (``BAD_COMMIT``)."""
        return self._buffers.finish()

    def _require_current(self, call: int) -> None:
        if call != self._call or self.is_whole:
            raise Rejected(ErrorCode.STALE_GENERATION, "another call of this worker has gone on with this upload")


@dataclass(frozen=True, slots=True)
class Origin:
    """The model that a worker has uploaded: where its training began, and its digest."""

    generation: int
    version: int
    digest: bytes


@dataclass(slots=True)
class _Grant:
    identity: Identity
    generation: int
    from_replica: bool
    began: float
    moved: float
    share: float = 0.0


class Uploads:
    """Where the shard's model comes from; shard 0 grants the upload to one worker.

    A grant ends after ``idle_seconds`` without progress. Only :meth:`note_progress` and :meth:`progress` are called
    without ``join_lock``.

    Attributes:
        initial: the ``--init`` model, until the first worker has brought a layout that fits.
        current: the unfinished upload; changed under ``lock``.
        origin: of the model that is installed.
    """

    def __init__(self, leases: Leases, idle_seconds: float) -> None:
        self._leases, self._idle_seconds = leases, idle_seconds
        self._grant: _Grant | None = None
        self.initial: InitialModel | None = None
        self.current: Upload | None = None
        self.origin: Origin | None = None
        self.lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of an unfinished upload."""
        upload = self.current
        return 0 if upload is None else upload.nbytes

    def grant(self, identity: Identity, generation_seen: int, has_replica: bool) -> int | None:
        """Return the generation that a worker is to upload, ``None`` while another does. See :meth:`require_seen`."""
        grant, now = self._grant, self._leases.clock()
        replica_beats_fresh = has_replica and grant is not None and not grant.from_replica
        if grant is not None and grant.identity != identity and self._is_active(grant) and not replica_beats_fresh:
            return None
        previous = 0 if grant is None else grant.generation
        # A shard with this very generation was filled by this worker; another generation of its epoch was not.
        is_outdone = generation_seen != previous and epoch(generation_seen) >= epoch(previous)
        if grant is None or grant.identity != identity or is_outdone:
            generation = next_generation(max(previous, generation_seen))
            self._grant = grant = _Grant(identity, generation, has_replica, now, now)
            log.info("upload granted", extra={"worker": identity.worker_id, "generation": grant.generation})
            self._leases.waiters.wake()
        return grant.generation

    def require_seen(self, generation_seen: int, present: int) -> None:
        """Refuse an impossible epoch (``BAD_REQUEST``); ``present`` is the generation of the shard's model, or 0."""
        previous = 0 if self._grant is None else self._grant.generation
        if epoch(generation_seen) > max(_MOST_EPOCH_SEEN, epoch(previous), epoch(present)):
            raise Rejected(
                ErrorCode.BAD_REQUEST,
                f"generation_seen is of epoch {epoch(generation_seen)}; it must be 0 to {_MOST_EPOCH_SEEN}, or shard 0 "
                "must know it. If a shard really has such a model, restart all shards together, empty",
            )

    def require_grant(self, identity: Identity, generation: int) -> None:
        """Raise :class:`Rejected` (``STALE_GENERATION``) unless this worker may upload this generation."""
        grant = self._grant
        if grant is None or (grant.identity, grant.generation) != (identity, generation):
            raise Rejected(ErrorCode.STALE_GENERATION, "another worker holds the upload now")

    def note_progress(self, identity: Identity, share: float) -> None:
        """Note how much of the whole model, 0 to 1, a worker has sent to all shards; only a new maximum counts."""
        grant = self._grant
        if grant is not None and grant.identity == identity and share > grant.share + _LEAST_RISE:
            grant.share, grant.moved = share, self._leases.clock()

    def progress(self) -> pb.ModelProgress | None:
        """Return the upload's progress; ``None`` if no worker uploads."""
        grant = self._grant
        if grant is None or not self._is_active(grant):
            return None
        left = (self._leases.clock() - grant.began) * (1 - grant.share) / grant.share if grant.share else 0.0
        return pb.ModelProgress(worker_id=grant.identity.worker_id, share=grant.share, seconds_left=left)

    def release_grant(self, identity: Identity) -> None:
        """End the grant of a worker that has left; its generation stays known."""
        if self._grant is not None and self._grant.identity == identity:
            self._grant.moved = -math.inf
            self._leases.waiters.wake()

    def end_grant(self) -> None:
        """Drop the grant: the model is installed."""
        self._grant = None

    def _is_active(self, grant: _Grant) -> bool:
        """Tell whether a worker uploads, or may resume sooner than another worker could send everything again."""
        patience = self._idle_seconds
        if not self._leases.is_live(grant.identity):
            patience = min(patience, self._leases.lease_seconds + grant.moved - grant.began)
        return self._leases.clock() - grant.moved < patience
