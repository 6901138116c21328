"""Traces of a worker's step, here and at each server, as one tree of spans. Off until :func:`start`.

A step opens the first span (:func:`begin_step`), a server continues that of a caller (:func:`continued`). Any other
span is a child of the current one of its thread, and is opened only if there is one. While tracing is off nothing
here has an effect, and OpenTelemetry is not imported.

Spans carry numbers and names (step, shard, version, reason), never values, tokens or messages of errors.
"""

import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ParamSpec, cast

from pscore.telemetry.span import NO_SPAN, Result, TraceSpan, TracingError

if TYPE_CHECKING:
    from pscore.telemetry.spans import Spans

Parameters = ParamSpec("Parameters")

spans: "Spans | None" = None
"""``None`` while tracing is off."""
_starting = threading.Lock()


def start(service: str, instance: str) -> None:
    """Trace from here on, once a process. OpenTelemetry's variables apply (docs/operate/tracing.md).

    ``service`` is the ``service.name`` if ``OTEL_SERVICE_NAME`` names no other; ``instance`` the
    ``service.instance.id``. Raises :class:`TracingError` if OpenTelemetry is missing or its variables are wrong.
    """
    global spans
    with _starting:
        if spans is not None:
            return
        try:
            from pscore.telemetry.spans import Spans
        except ImportError as error:
            raise TracingError(
                f"tracing is asked for, and {error.name} is not installed: pip install 'sparseps[tracing]'"
            ) from error
        spans = Spans(service, instance)


def stop() -> None:
    """Export the spans that have ended, and trace no longer."""
    global spans
    with _starting:
        ending, spans = spans, None
    if ending is not None:
        ending.close()


def begin_step(**attributes: str | int | float) -> TraceSpan:
    """Begin a step: the root of a trace, or part of the caller's own."""
    return NO_SPAN if spans is None else spans.begin("step", attributes, root=True)


def begin(name: str, **attributes: str | int | float) -> TraceSpan:
    """Begin a span below the current one; it is made current by :meth:`TraceSpan.active` only."""
    return NO_SPAN if spans is None else spans.begin(name, attributes)


def span(name: str, **attributes: str | int | float) -> AbstractContextManager[TraceSpan]:
    """Make the body a span below the current one."""
    return nullcontext(NO_SPAN) if spans is None else spans.body(name, attributes)


def continued(name: str, traceparent: str) -> TraceSpan:
    """Begin a server's span of a call, below that of the caller; a header that makes no sense begins none."""
    return NO_SPAN if spans is None else spans.continued(name, traceparent)


def traced(name: str) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Make each call of a function a span; of a generator, the time from its first item until it ends."""

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            if spans is None:
                return function(*args, **kwargs)
            with spans.body(name, {}):
                return function(*args, **kwargs)

        @functools.wraps(function)
        def iterate(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Iterator[Any]:
            return cast("Iterator[Any]", function(*args, **kwargs)) if spans is None else spanned(*args, **kwargs)

        def spanned(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Iterator[Any]:
            opened = begin(name)
            try:
                yield from cast("Iterator[Any]", function(*args, **kwargs))
            finally:
                opened.end()

        return cast("Callable[Parameters, Result]", iterate) if inspect.isgeneratorfunction(function) else call

    return decorate


def carried(job: Callable[[], Result], waiting: str = "") -> Callable[[], Result]:
    """Return a job, to be called once in another thread, that is part of the span that is current here.

    ``waiting`` names a span from now until the job begins; empty for none.
    """
    if spans is None:
        return job
    context = contextvars.copy_context()
    waited = begin(waiting) if waiting else NO_SPAN

    def run() -> Result:
        waited.end()
        return context.run(job)

    return run
