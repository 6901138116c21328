"""The work of a request on its messages, in a thread or on the event loop: parsing, the handler, serializing."""

from collections.abc import Callable, Generator
from typing import Any, TypeAlias

from google.protobuf.message import Message

from pscore.telemetry.span import NO_SPAN
from pscore.wire.frames import FRAMING_BYTES
from psservice.awaiting import NotYetError
from psservice.rpc.calls import Answer, Call, LastStep, StreamReader, parse

Answers: TypeAlias = tuple[list[bytes], Generator[Any, None, None] | None]
"""Serialized answers, and those that :func:`more` serializes; ``None`` if no more follow."""

_ANSWER_BYTES = 1 << 20  # of messages that are written in one piece of work


def reply_to(call: Call, handler: Callable[[Call, Message], Answer], raw: bytes) -> Answers:
    """Answer a request of one message; raises :class:`Rejected`."""
    call.received_bytes = len(raw) + FRAMING_BYTES
    message = parse(call, raw)
    if call.span is NO_SPAN:
        return begin(call, handler(call, message))
    return call.span.run(begin, call, handler(call, message))


def feed(call: Call, reading: StreamReader, raw: bytes | None, arrived_nanoseconds: int) -> Answers | LastStep | None:
    """Send a message into a reader; return what the reader ends with, if it has ended."""
    try:
        if raw is None:
            reading.send(None)
            raise AssertionError("a reader must end where its stream ends")
        nbytes = len(raw) + FRAMING_BYTES
        call.received_bytes += nbytes
        call.arrived_nanoseconds = arrived_nanoseconds
        if call.on_received is not None:
            call.on_received(nbytes)
        if call.raw is not None:
            call.raw.append(raw)
        message = parse(call, raw)
        if call.span is NO_SPAN:
            reading.send(message)
        else:
            call.span.run(reading.send, message)
    except StopIteration as end:
        return end.value if callable(end.value) else begin(call, end.value)
    return None


def feed_and_finish(
    call: Call, reading: StreamReader, raw: bytes | None, arrived_nanoseconds: int
) -> Answers | LastStep | None:
    """Send a message into a reader, and take the last step if that was the last message and nothing has to wait."""
    found = feed(call, reading, raw, arrived_nanoseconds)
    try:
        return finish(call, found) if callable(found) else found
    except NotYetError:
        return found


def finish(call: Call, last_step: LastStep) -> Answers:
    """Take the last step of a request, and return its answers."""
    return begin(call, last_step() if call.span is NO_SPAN else call.span.run(last_step))


def more(call: Call, answers: Generator[Any, None, None]) -> Answers:
    """Serialize answers up to about a MiB."""
    batch, size = [], 0
    for message in answers:
        data = message if isinstance(message, bytes) else message.SerializeToString()
        batch.append(data)
        size += len(data)
        if size >= _ANSWER_BYTES:
            break
    if call.on_sent is not None:
        call.on_sent(size + FRAMING_BYTES * len(batch))
    return batch, answers if size >= _ANSWER_BYTES else None


def begin(call: Call, answer: Answer) -> Answers:
    """Serialize the first answers."""
    return ([answer.SerializeToString()], None) if isinstance(answer, Message) else more(call, answer)
