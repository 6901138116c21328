"""Messages as plain values, for ``--output json`` and the status page."""

from typing import Any

from google.protobuf.message import Message


def plain(message: Message) -> dict[str, Any]:
    """Return a message as a dict in the order of its fields: enums as short words, ``None`` if a part is missing.

    Of its repeated fields it has messages only, as those of operators' calls.
    """
    return {field.name: _plain_field(message, field) for field in message.DESCRIPTOR.fields}


def _plain_field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.has_presence and not message.HasField(field.name):
        return None
    if field.message_type is not None:
        return plain(value) if field.has_presence else [plain(each) for each in value]
    if field.enum_type is not None:
        unspecified, known = field.enum_type.values_by_number[0].name, field.enum_type.values_by_number.get(value)
        return known.name.removeprefix(unspecified.removesuffix("UNSPECIFIED")).lower() if known else str(value)
    return value
