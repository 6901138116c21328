"""Compiling a server's loops before they are needed."""

import numpy as np

from pscore import warmup
from psservice.model import union_loops
from psservice.replies import reply_loops
from psservice.rules.rmsprop import step_at
from psservice.rules.subtract import subtract_at


def warm_up() -> None:
    """Run every loop once, so that no push and no pull waits for the compiler: seconds, once a machine."""
    warmup.warm_up()
    union_loops.warm_up()
    reply_loops.warm_up()
    x, at, ends, one = np.ones(1, np.float32), np.zeros(1, np.int64), np.ones(1, np.int64), np.float32(1)
    subtract_at(x, at, x.copy())
    for offsets in (at, None):
        step_at(x, x.copy(), offsets, x.copy(), ends, x.copy(), one, one, one)
