"""Compiling loops: the one place that knows numba.

numba takes a third of a second to import, and compiles a function at its first call (then keeps it on disk), so nothing
here happens before a loop is asked for.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

log = logging.getLogger("pscore")


@cache
def numba_works() -> bool:
    """Import numba; where it is missing or cannot start, say so once."""
    try:
        import numba
    except Exception as error:  # a broken LLVM raises OSError, a numpy that is too new ImportError, and so on
        log.warning(
            "numba cannot start, so selection and Rice codes run several times slower (pip install numba): %s", error
        )
        return False
    return not numba.config.DISABLE_JIT


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function at its first call, to machine code that runs without the interpreter lock.

    A decorator for modules that are imported only where :func:`numba_works`.
    """
    import numba

    try:
        return numba.njit(nogil=True, cache=True, error_model="numpy")(function)  # type: ignore[no-any-return]
    except RuntimeError:  # no directory to keep it in: neither beside the source nor in the user's cache
        return numba.njit(nogil=True, error_model="numpy")(function)  # type: ignore[no-any-return]
