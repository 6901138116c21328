"""Limits that all codecs share."""

from pscore.wire.errors import ErrorCode, Rejected

MAX_ENTRIES = 1 << 22
"""Entries in one chunk. Some codecs need a bit an entry or less, so the bytes alone do not bound the memory.

4 Mi entries are 16 MiB of fp32 values and 32 MiB of int64 offsets; a chunk of 2 MiB with 4-bit values has as many.
"""

COMPILED_FROM = 256
"""Entries from which compiled loops are worth their start: below, a small model shall never wait for the compiler."""


def is_compiled(count: int) -> bool:
    """Tell whether compiled loops write and read a chunk of ``count`` entries."""
    return count >= COMPILED_FROM


def check_count(count: int) -> None:
    """Refuse (``BAD_CHUNK``) more entries than a chunk may have."""
    if not 0 <= count <= MAX_ENTRIES:
        raise Rejected(ErrorCode.BAD_CHUNK, f"{count} entries in one chunk, at most {MAX_ENTRIES} are taken")
