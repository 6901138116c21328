"""Compiling a server's loops before they are needed."""

from collections.abc import Callable

import numpy as np

from pscore import warmup
from pscore.model import digest_loops
from psservice.cuts import stamp_loops
from psservice.model import union_loops
from psservice.replies import reply_loops
from psservice.rules.scaled_by_squares import step_at
from psservice.rules.subtract import subtract_at


def warm_up(is_over: Callable[[], bool] = lambda: False) -> None:
    """Run every loop once, so that no push and no pull waits for the compiler: seconds, once a machine.

    ``is_over`` is asked between the parts, each of which takes a few seconds on an idle machine.
    """
    loops = (union_loops, digest_loops, reply_loops, stamp_loops)
    for part in (warmup.warm_up, *(each.warm_up for each in loops), _warm_up_rules):
        if is_over():
            return
        part()


def _warm_up_rules() -> None:
    x, at, ends, one = np.ones(1, np.float32), np.zeros(1, np.int64), np.ones(1, np.int64), np.float32(1)
    subtract_at(x, at, x.copy())
    for offsets in (at, None):
        step_at(x, x.copy(), offsets, x.copy(), ends, x.copy(), one, one, one)
