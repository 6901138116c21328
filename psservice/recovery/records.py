"""What a record of the journal says, and how its messages lie in its body."""

import struct
from enum import IntEnum

from google.protobuf.message import Message

from psservice.storage.journal_format import Body

_LENGTH = struct.Struct("<I")


class Kind(IntEnum):
    """What a record says."""

    PUSHED = 1
    AVERAGED = 2
    JOINED = 3
    LEFT = 4
    FINISHED = 5
    ROUND = 6
    GROUPS = 7
    LEASED = 10


def add_messages(body: Body, *messages: Message | bytes) -> Body:
    """Add messages, or their bytes, behind a body, each behind its length (uint32)."""
    parts = []
    for message in messages:
        data = message if isinstance(message, bytes) else message.SerializeToString()
        parts += [_LENGTH.pack(len(data)), data]
    return body.with_parts(*parts)


def body_of(*messages: Message | bytes) -> Body:
    """Return messages as the body of a record."""
    return add_messages(Body.of([]), *messages)


def messages_in(body: bytes) -> list[bytes]:
    """Take a body apart; raises ``ValueError`` where the lengths do not fit."""
    found, position = [], 0
    while position < len(body):
        if position + _LENGTH.size > len(body):
            raise ValueError("a length is cut")
        (length,) = _LENGTH.unpack_from(body, position)
        position += _LENGTH.size
        if position + length > len(body):
            raise ValueError("a message is cut")
        found.append(body[position : position + length])
        position += length
    return found
