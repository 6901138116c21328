"""Messages as plain values, for ``--json`` and the status page."""

from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message


def plain(message: Message) -> dict[str, Any]:
    """Return a message as a dict: every field under its own name, 64-bit integers as numbers, enums in short words."""
    found = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return _corrected(found, message)


def _corrected(found: dict[str, Any], message: Any) -> dict[str, Any]:
    """Undo what the JSON mapping does: strings for 64-bit integers, long enum names, default values last."""
    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = found.get(field.name)
        if field.message_type is not None:
            children = getattr(message, field.name)
            if isinstance(value, list):
                value = [_corrected(p, m) for p, m in zip(value, children, strict=True)]
            elif value is not None:
                value = _corrected(value, children)
        elif field.enum_type is not None:
            prefix = field.enum_type.values_by_number[0].name.removesuffix("UNSPECIFIED")
            value = str(value).removeprefix(prefix).lower()
        elif isinstance(value, str) and field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64):
            value = int(value)
        result[field.name] = value
    return result
