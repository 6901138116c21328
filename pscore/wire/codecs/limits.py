"""What a chunk may hold at most, whatever its bytes claim."""

from pscore.wire.errors import ErrorCode, Rejected

MAX_ENTRIES = 1 << 22
"""Entries in one chunk: some codecs need a bit an entry or less, and what they decode to must stay small as well.

4 Mi entries are 16 MiB of fp32 values and 32 MiB of int64 offsets; a chunk of 2 MiB with 4-bit values has as many.
"""


def check_count(count: int) -> None:
    """Refuse (``BAD_CHUNK``) more entries than a chunk may hold."""
    if not 0 <= count <= MAX_ENTRIES:
        raise Rejected(ErrorCode.BAD_CHUNK, f"{count} entries in one chunk, at most {MAX_ENTRIES} are taken")
