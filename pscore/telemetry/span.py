"""The interface of a span, without OpenTelemetry."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

Result = TypeVar("Result")

TRACEPARENT = "traceparent"
"""The only header that is read: https://www.w3.org/TR/trace-context/. Streams have it in each request."""


class TracingError(Exception):
    """Tracing is asked for and cannot begin; the message contains a remedy."""


class TraceSpan:
    """A span that has begun and not ended; this one belongs to no trace and has no effect."""

    @property
    def parent(self) -> str:
        """This span for a request's ``traceparent``, which makes the request part of the trace; empty for none."""
        return ""

    def active(self) -> AbstractContextManager[None]:
        """Make this span the parent of those that begin in the body, in this thread."""
        return nullcontext()

    def run(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Call a function with this span as the parent of those that begin in it."""
        return function(*arguments)

    def note(self, **attributes: str | int | float) -> None:
        """Add attributes, which are named ``sparseps.…``."""

    def end(self, error: str = "") -> None:
        """End the span; later calls do nothing. ``error`` is the kind of an error."""


NO_SPAN = TraceSpan()
