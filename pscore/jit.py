"""Loops that numba compiles at their first call; numba itself is imported no earlier."""

import importlib
import logging
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger(__name__)

announce: Callable[..., None] = _log.info
"""Logs, once a process, that loops are being compiled. A worker sets a louder one: its steps wait for the compiler."""

_COMPILING = "compiling loops for this machine's processor: that takes some seconds, and is kept for the next start"
_NOT_KEPT = (
    "compiled loops cannot be cached in %s (%s): they are used, and compiled again by the next process; make room "
    "there, empty it, or name another directory in NUMBA_CACHE_DIR"
)
_lock = threading.RLock()
_logged: set[str] = set()


class compiled(Generic[P, R]):  # noqa: N801 - a decorator
    """Makes a module-level function a loop that numba compiles, once for each combination of argument types.

    A loop runs without the GIL. It is cached on disk, beside the source or in numba's cache directory; where the cache
    can be neither written nor read it is compiled all the same, and a warning says so once. Constants of a loop, and
    other loops that it calls, must stand in its own file: the cache notices changes there and nowhere else.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        self.function = function
        self._dispatcher: Any = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the loop."""
        result: R = (self._dispatcher or self.dispatcher)(*args, **kwargs)
        return result

    @property
    def dispatcher(self) -> Any:
        """The compiled function; the plain one where NUMBA_DISABLE_JIT is set."""
        if self._dispatcher is None:
            with _lock:
                self._dispatcher = self._dispatcher or _compile(self.function)
        return self._dispatcher


def _compile(function: Callable[..., Any]) -> Any:
    numba: Any = importlib.import_module("numba")  # its types lack what is used here
    if numba.config.DISABLE_JIT:
        return function
    called = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    called = {name: loop.dispatcher for name, loop in called.items() if isinstance(loop, compiled)}
    if called:  # numba calls its own functions only
        function = FunctionType(function.__code__, function.__globals__ | called, function.__name__)
    try:
        loop = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError as error:  # no directory for the cache can be written
        _log_once(announce, _COMPILING)
        _log_once(_log.warning, _NOT_KEPT, "any directory", error)
        return numba.njit(nogil=True)(function)
    loop._cache = _ForgivingCache(loop._cache)
    return loop


def _log_once(log: Callable[..., None], words: str, *arguments: object) -> None:
    if words not in _logged:
        _logged.add(words)
        log(words, *arguments)


class _ForgivingCache:
    """A function's cache on disk whose errors do not reach the call that compiles; numba's own would."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def load_overload(self, signature: Any, context: Any) -> Any:
        found = None
        try:
            found = self._cache.load_overload(signature, context)
        except Exception as error:  # half a file may raise anything
            _log_once(_log.warning, _NOT_KEPT, self._cache.cache_path, error)
        if found is None:
            _log_once(announce, _COMPILING)
        return found

    def save_overload(self, signature: Any, result: Any) -> None:
        try:
            self._cache.save_overload(signature, result)
        except Exception as error:  # numba reads the index first: see above
            _log_once(_log.warning, _NOT_KEPT, self._cache.cache_path, error)
