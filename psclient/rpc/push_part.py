"""One shard's part of a push: its messages, as they are sent and sent again, and its payload."""

from dataclasses import dataclass, field

from psclient.rpc.stall import OpenStream
from pscore.model.sparse_slice import SparseSlice
from pscore.telemetry.span import TraceSpan
from pscore.wire import frames

_TOGETHER_BYTES = 16 << 10  # of a field of a push that others may follow in the same message
_MOST_TOGETHER = 64  # such fields


@dataclass(slots=True)
class PushPart:
    """One shard's part of a push, kept until it is acknowledged or refused.

    ``stream`` has what is sent, until an attempt to read the answer has failed; later attempts send ``messages``, the
    same bytes. ``segments`` is the payload as it arrives, for restoring it.
    """

    generation: int
    trace: TraceSpan
    stream: OpenStream | None
    messages: list[bytes] = field(default_factory=list)
    segments: list[SparseSlice] = field(default_factory=list)
    checksum: frames.Checksum = field(default_factory=frames.Checksum)
    nbytes: int = 0
    _pending: list[bytes] = field(default_factory=list)

    def add(self, data: bytes) -> int:
        """Add a serialised field of :class:`pb.PushSparseRequest`; small ones are sent together. Return its bytes."""
        if len(data) > _TOGETHER_BYTES and self._pending:
            self.flush()  # the values of a large chunk are read from a message that has nothing else
        self._pending.append(data)
        if len(data) > _TOGETHER_BYTES or len(self._pending) > _MOST_TOGETHER:
            self.flush()
        return len(data)

    def flush(self) -> None:
        """Send what has been added."""
        data = b"".join(self._pending)
        self._pending.clear()
        self.messages.append(data)
        self.nbytes += len(data) + frames.FRAMING_BYTES
        if self.stream is not None:
            self.stream.send(data)
