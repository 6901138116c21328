"""Loading the loops of a reader before they are needed."""

from functools import cache

import numpy as np

from pscore.jit import COMPILED_FROM
from pscore.model import digest_loops
from pscore.wire.codecs import index_loops


def warm_up(elements: int) -> bool:
    """Load the loops for a model of so many elements, or compile them; tell whether that may have taken time."""
    if elements < COMPILED_FROM or _load.cache_info().currsize:
        return False
    _load()
    return True


@cache
def _load() -> None:
    digest_loops.warm_up()  # type: ignore[no-untyped-call]
    index_loops.read_rice(np.frombuffer(bytes(4), np.uint8), 0, 0, 0, np.empty(0, np.int64))
