"""One shard's part of a push: its messages, as they are sent and sent again, and its payload."""

from dataclasses import dataclass, field

from psclient.rpc.stream import Stream
from pscore.model.sparse_slice import SparseSlice
from pscore.telemetry.span import TraceSpan
from pscore.wire import frames
from pscore.wire.dense import message_bytes

_TOGETHER_BYTES = 16 << 10  # of fields of a push that are sent together on any link
_TOGETHER_SECONDS = 0.02  # that the fields sent together may take on the link
_MOST_TOGETHER = 64  # parts of fields


def bytes_together(link_bytes_per_second: float | None) -> int:
    """Return how many bytes of fields are sent together: few, or as many as the link carries in a moment."""
    return max(_TOGETHER_BYTES, message_bytes(link_bytes_per_second, _TOGETHER_SECONDS))


@dataclass(slots=True)
class PushPart:
    """One shard's part of a push, kept until it is acknowledged or refused.

    ``stream`` has what is sent, until an attempt to read the answer has failed; later attempts send ``messages``, the
    same bytes. ``segments`` is the payload as it arrives, for restoring it. Fields are sent together until they have
    ``together_bytes``. ``group_bytes`` are those of each group's chunks, by place in the plan.
    """

    generation: int
    trace: TraceSpan
    stream: Stream | None
    together_bytes: int
    group_bytes: list[int]
    messages: list[bytes] = field(default_factory=list)
    segments: list[SparseSlice] = field(default_factory=list)
    checksum: frames.Checksum = field(default_factory=frames.Checksum)
    nbytes: int = 0
    _pending: list[bytes | memoryview] = field(default_factory=list)
    _pending_bytes: int = 0

    def add(self, *parts: bytes | memoryview, group: int | None = None) -> int:
        """Add a serialised field of :class:`pb.PushSparseRequest`, in parts end to end; return its bytes.

        ``group`` is the one that a field is a chunk of.
        """
        size, most = sum(map(len, parts)), self.together_bytes
        if self._pending and self._pending_bytes + size > most:
            self.flush()
        self._pending += parts
        self._pending_bytes += size
        if group is not None:
            self.group_bytes[group] += size
        if self._pending_bytes >= most or len(self._pending) >= _MOST_TOGETHER:
            self.flush()
        return size

    def flush(self) -> None:
        """Send what has been added."""
        data = b"".join(self._pending)
        self._pending.clear()
        self._pending_bytes = 0
        self.messages.append(data)
        self.nbytes += len(data) + frames.FRAMING_BYTES
        if self.stream is not None:
            self.stream.send(data)
