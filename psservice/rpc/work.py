"""The work of a request on its messages, in a thread or on the event loop: parsing, the handler, serializing."""

from collections.abc import Callable, Generator
from contextlib import closing
from typing import TypeAlias

from google.protobuf.message import Message

from pscore.wire.frames import FRAMING_BYTES
from psservice.rpc.calls import Answer, Call, StreamReader, parse

Batch: TypeAlias = tuple[list[bytes], bool]
"""Serialized answers, and whether no more follow."""

Answers: TypeAlias = tuple[Batch, Generator[Batch, None, None]]
"""The first batch, which is made, and those behind."""

_ANSWER_BYTES = 1 << 20  # of messages that are written in one piece of work


def reply_to(call: Call, handler: Callable[[Call, Message], Answer], raw: bytes) -> Answers:
    """Answer a request of one message; raises :class:`Rejected`."""
    call.received_bytes = len(raw) + FRAMING_BYTES
    message = parse(call, raw)
    return call.span.run(_begin, call, handler(call, message))


def _begin(call: Call, answer: Answer) -> Answers:
    batches = _batches(call, answer)
    return next(batches), batches


def _batches(call: Call, answer: Answer) -> Generator[Batch, None, None]:
    """Serialize a handler's answers, in a thread."""
    batch, size = [], 0
    with closing((each for each in (answer,)) if isinstance(answer, Message) else answer) as messages:
        for message in messages:
            data = message if isinstance(message, bytes) else message.SerializeToString()
            call.on_sent(len(data) + FRAMING_BYTES)
            batch.append(data)
            size += len(data)
            if size >= _ANSWER_BYTES:
                yield batch, False
                batch, size = [], 0
    yield batch, True


def feed(call: Call, reading: StreamReader, raw: bytes | None, arrived_nanoseconds: int) -> Answers | None:
    """Send a message into a reader; return its answers where the reader has ended."""
    try:
        if raw is None:
            reading.send(None)
            raise AssertionError("a reader must end where its stream ends")
        nbytes = len(raw) + FRAMING_BYTES
        call.received_bytes += nbytes
        call.arrived_nanoseconds = arrived_nanoseconds
        call.on_received(nbytes)
        if call.raw is not None:
            call.raw.append(raw)
        message = parse(call, raw)
        call.span.run(reading.send, message)
    except StopIteration as end:
        return _begin(call, end.value)
    return None
