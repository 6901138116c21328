"""The interface of a span, without OpenTelemetry."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

Result = TypeVar("Result")

Headers = tuple[tuple[str, str], ...]
"""Metadata of a call."""

TRACEPARENT = "traceparent"
"""The only header that is sent and read: https://www.w3.org/TR/trace-context/."""


class TracingError(Exception):
    """Tracing is asked for and cannot begin; the message contains a remedy."""


class TraceSpan:
    """A span that has begun and not ended; this one belongs to no trace and has no effect."""

    @property
    def headers(self) -> Headers | None:
        """Metadata that makes a call part of the trace; ``None`` for none."""
        return None

    def active(self) -> AbstractContextManager[None]:
        """Make this span the parent of those that begin in the body, in this thread."""
        return nullcontext()

    def run(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Call a function with this span as the parent of those that begin in it."""
        with self.active():
            return function(*arguments)

    def note(self, **attributes: str | int | float) -> None:
        """Add attributes, which are named ``sparseps.…``."""

    def end(self, error: str = "") -> None:
        """End the span; later calls do nothing. ``error`` is the kind of an error."""


NO_SPAN = TraceSpan()
