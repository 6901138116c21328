"""What pushes, pulls and buffers weigh on the wire, and what they would have weighed without sparsity."""

import threading
from dataclasses import dataclass

from pscore.model.layout import ModelLayout, Span

COUNTED = ("PushSparse", "PullDiff", "ExchangeBuffers")
"""The calls whose bytes are counted."""


@dataclass(frozen=True, slots=True)
class Flow:
    """One kind of call since the start.

    Attributes:
        calls: answered.
        message_bytes: of all of them.
        dense_bytes: the payload of as many calls that carry every element of the shard in its own data type.
    """

    calls: int = 0
    message_bytes: int = 0
    dense_bytes: int = 0


class Traffic:
    """Flows of pushes, pulls and buffers since the start, for the status. Thread-safe."""

    def __init__(self) -> None:
        """Start at zero."""
        self._flows = {rpc: Flow() for rpc in COUNTED}
        self._lock = threading.Lock()

    def count(self, rpc: str, message_bytes: int) -> None:
        """Add bytes of a call."""
        self._add(rpc, Flow(message_bytes=message_bytes))

    def answered(self, rpc: str, dense_bytes: int) -> None:
        """Count an answered call, with what it would have weighed dense."""
        self._add(rpc, Flow(calls=1, dense_bytes=dense_bytes))

    def _add(self, rpc: str, more: Flow) -> None:
        with self._lock:
            flow = self._flows[rpc]
            self._flows[rpc] = Flow(
                flow.calls + more.calls,
                flow.message_bytes + more.message_bytes,
                flow.dense_bytes + more.dense_bytes,
            )

    def __getitem__(self, rpc: str) -> Flow:
        """Return one kind of call."""
        return self._flows[rpc]


def dense_bytes(layout: ModelLayout, span: Span) -> int:
    """Return what all elements of a span weigh, each in the data type of its parameter."""
    return sum(dtype.itemsize * run.length for dtype, run in layout.dtype_runs(span))
