"""The C library's allocator: giving freed memory back to the system."""

import ctypes
from collections.abc import Callable


def trimming() -> Callable[[], object] | None:
    """Return a call that returns free memory to the system; ``None`` if the C library has none (musl).

    glibc keeps freed memory in an arena of every thread, and gives little of it back by itself.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None
    return lambda: trim(0)
