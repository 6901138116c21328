"""Traces: what a worker's step waits for, here and at each server, as one tree of spans. Off until :func:`start`.

A span is opened where something begins, as a child of the one that is current in that thread, and only where there is
one: a step opens the first (:func:`begin_step`), a server goes on with what a call brings (:func:`continued`). While
tracing is off, everything here does nothing, and OpenTelemetry is not imported. The spans are in
:mod:`pscore.telemetry.spans`.

Spans carry numbers and names (step, shard, version, reason), never values, tokens or messages of errors.
"""

import contextvars
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from pscore.telemetry.spans import Spans

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

Headers = tuple[tuple[str, str], ...]
"""Metadata of a call."""

TRACEPARENT = "traceparent"
"""The only header that is sent and read: https://www.w3.org/TR/trace-context/."""


class TracingError(Exception):
    """Tracing is asked for and cannot begin; the message says what to do."""


class TraceSpan:
    """A span that has begun and not ended. This one belongs to no trace and does nothing."""

    @property
    def headers(self) -> Headers | None:
        """What a call sends along to be part of the trace; ``None`` for nothing."""
        return None

    def active(self) -> AbstractContextManager[None]:
        """Let what begins in the body, in this thread, be part of it."""
        return _NULL

    def run(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Call a function, and let what begins in it be part of the span."""
        return function(*arguments)

    def note(self, **attributes: str | int | float) -> None:
        """Add attributes, which are named ``sparseps.…``."""

    def end(self, error: str = "") -> None:
        """End it, once; ``error`` is the kind of what went wrong."""


NO_SPAN = TraceSpan()
_NULL: AbstractContextManager[None] = nullcontext()
_NO_SPAN_HERE: AbstractContextManager[TraceSpan] = nullcontext(NO_SPAN)

_spans: "Spans | None" = None
_starting = threading.Lock()


def start(service: str, instance: str) -> None:
    """Trace from now on; once a process, later calls do nothing.

    What happens with spans is set by OpenTelemetry's own variables (docs/tracing.md).

    Args:
        service: ``service.name``, where ``OTEL_SERVICE_NAME`` names no other.
        instance: ``service.instance.id``.

    Raises:
        TracingError: OpenTelemetry is not installed, or its variables make no sense.
    """
    global _spans
    with _starting:
        if _spans is not None:
            return
        try:
            from pscore.telemetry.spans import Spans
        except ImportError as error:
            raise TracingError(
                f"tracing is asked for, and {error.name} is not installed: pip install 'sparseps[tracing]'"
            ) from error
        _spans = Spans(service, instance)


def stop() -> None:
    """Hand over the spans that have ended, and trace no longer."""
    global _spans
    with _starting:
        ending, _spans = _spans, None
    if ending is not None:
        ending.close()


def begin_step(**attributes: str | int | float) -> TraceSpan:
    """Begin a step: the root of a trace, or part of the caller's own."""
    return NO_SPAN if _spans is None else _spans.begin("step", attributes, root=True)


def begin(name: str, **attributes: str | int | float) -> TraceSpan:
    """Begin a span below the current one; it is made current by :meth:`TraceSpan.active` only."""
    return NO_SPAN if _spans is None else _spans.begin(name, attributes)


def span(name: str, **attributes: str | int | float) -> AbstractContextManager[TraceSpan]:
    """Let the body be a span below the current one."""
    return _NO_SPAN_HERE if _spans is None else _spans.body(name, attributes)


def continued(name: str, traceparent: str) -> TraceSpan:
    """Begin a server's span of a call, below that of the caller; a header that makes no sense begins none."""
    return NO_SPAN if _spans is None else _spans.continued(name, traceparent)


def traced(name: str) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Make each call of a function a span."""

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(function)
        def wrapper(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            if _spans is None:
                return function(*args, **kwargs)
            with _spans.body(name, {}):
                return function(*args, **kwargs)

        return wrapper

    return decorate


def traced_stream(
    name: str,
) -> Callable[[Callable[Parameters, Iterator[Result]]], Callable[Parameters, Iterator[Result]]]:
    """Make a generator a span, from its first item until it ends."""

    def decorate(function: Callable[Parameters, Iterator[Result]]) -> Callable[Parameters, Iterator[Result]]:
        @functools.wraps(function)
        def wrapper(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Iterator[Result]:
            opened = begin(name)
            try:
                yield from function(*args, **kwargs)
            finally:
                opened.end()

        return wrapper

    return decorate


def carried(job: Callable[[], Result], waiting: str = "") -> Callable[[], Result]:
    """Return a job for another thread, to be part of what is current here.

    Args:
        job: what is to be done.
        waiting: name of a span from now until the job begins; empty for none.
    """
    if _spans is None:
        return job
    context = contextvars.copy_context()
    waited = begin(waiting) if waiting else NO_SPAN

    def run() -> Result:
        waited.end()
        return context.run(job)

    return run
