"""A model on its way into a shard, over as many calls as that takes.

An upload keeps what has arrived when a call is cut; the next call of the same worker for the same generation resumes
behind that. Values are written where the model will have them, so an upload occupies what the model does.
"""

import threading
from collections.abc import Callable

import torch

from pscore.model.layout import Span
from pscore.wire import frames
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.types import Identity


class Upload:
    """One upload of one worker. Thread-safe; every method may raise :class:`Rejected`.

    ``values`` are fp32 ``[span.length]`` on the host; the system allocates memory as they are written. ``moved`` is
    when the last message arrived.
    """

    def __init__(
        self, identity: Identity, generation: int, span: Span, buffer_bytes: int, clock: Callable[[], float]
    ) -> None:
        self.identity, self.generation, self.span, self.buffer_bytes = identity, generation, span, buffer_bytes
        self.values = torch.empty(span.length)
        self._clock = clock
        self._lock = threading.Lock()
        self._call = 0
        self._is_whole = False
        self._begin()

    def _begin(self) -> None:
        self._checksum = frames.Checksum()
        self._buffers = frames.BytesReader(self.buffer_bytes, self.buffer_bytes)
        self.moved = self._clock()

    @property
    def nbytes(self) -> int:
        """Bytes of values that have arrived."""
        return 4 * self._checksum.entries

    def go_on(self) -> int:
        """Return the number of a call that reads from now on; messages of earlier calls are refused."""
        with self._lock:
            self._call += 1
            return self._call

    def received(self) -> pb.UploadModelResponse:
        """Return how much has arrived."""
        return pb.UploadModelResponse(received=self._checksum.commit(), received_buffer_bytes=self._buffers.received)

    def read(self, call: int, chunk: pb.Chunk) -> None:
        """Read the next chunk, or the first one, which begins anew (``BAD_CHUNK``, ``STALE_GENERATION``)."""
        with self._lock:
            self._require_current(call)
            if chunk.start == self.span.start:
                self._begin()
            first = self._checksum.entries
            if chunk.start != self.span.start + first or chunk.index_codec != pb.INDEX_CODEC_DENSE:
                raise Rejected(
                    ErrorCode.BAD_CHUNK, f"chunk at {chunk.start}, expected a dense one at {self.span.start + first}"
                )
            segment = frames.decode(chunk, self.span)
            self.values[first : first + chunk.count] = segment.values
            self._checksum.add(chunk)
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
                self._checksum.verify(commit)
                if self._checksum.entries != self.span.length:
                    raise Rejected(
                        ErrorCode.BAD_COMMIT, f"{self._checksum.entries} of {self.span.length} elements were sent"
                    )
                self._buffers.finish()
            except Rejected:
                self._begin()
                raise
            self._is_whole = True

    def reopen(self) -> None:
        """Read again, after a whole upload could not be installed."""
        self._is_whole = False

    def buffers(self) -> bytes:
        """Return all buffers (``BAD_COMMIT``)."""
        return self._buffers.finish()

    def _require_current(self, call: int) -> None:
        if call != self._call or self._is_whole:
            raise Rejected(ErrorCode.STALE_GENERATION, "another call of this worker has gone on with this upload")
