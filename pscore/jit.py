"""Functions compiled by numba at their first use; numba itself is imported no earlier."""

import importlib
import logging
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger(__name__)

announce: Callable[..., None] = _log.info
"""How a process says, once, that it compiles; a worker's is louder: its steps wait for that."""

_lock = threading.Lock()
_compiled: dict[Callable[..., Any], Callable[..., Any] | None] = {}
_said: set[str] = set()


def compile_once(function: Callable[P, R], **options: bool) -> Callable[P, R] | None:
    """Return ``function`` compiled, or ``None`` where numba is missing or cannot start.

    The caller keeps a numpy implementation for ``None``; ``function`` itself would be far too slow uncompiled.
    Compiling happens at the first call for each combination of argument types. The result holds no GIL while it runs,
    and is cached on disk beside the source, or in numba's cache directory, where one of them can be written. Where
    writing or reading fails later, it is compiled all the same, and a warning says so once.

    Args:
        function: module-level function in the subset of Python that numba takes. Constants that it uses must stand in
            its own file: the cache on disk notices changes there and nowhere else.
        options: further options of ``numba.njit``, for instance ``fastmath=True``; those of the first call count.
    """
    found = _compiled.get(function, _MISSING)
    if found is _MISSING:
        with _lock:
            found = _compiled.get(function, _MISSING)
            if found is _MISSING:
                found = _compiled[function] = _compile(function, options)
    return cast("Callable[P, R] | None", found)


def _MISSING() -> None:  # noqa: N802 - a marker that no caller can hand in
    """Stand for a function that was not asked for yet."""


def _compile(function: Callable[..., Any], options: dict[str, bool]) -> Callable[..., Any] | None:
    try:
        numba: Any = importlib.import_module("numba")
    except Exception as error:  # a broken LLVM raises OSError, a numpy that is too new ImportError, and so on
        _log.warning("numba cannot start, numpy takes over and is slower: %s", error)
        return None
    if numba.config.DISABLE_JIT:
        return None
    try:
        loop = numba.njit(nogil=True, cache=True, **options)(function)
    except RuntimeError as error:  # no directory for the cache can be written
        _once(announce, _COMPILING)
        _once(_log.warning, _NOT_KEPT, "any directory", error)
        return cast("Callable[..., Any]", numba.njit(nogil=True, **options)(function))
    loop._cache = _ForgivingCache(loop._cache)
    return cast("Callable[..., Any]", loop)


_COMPILING = "compiling loops for this machine's processor: that takes some seconds, and is kept for the next start"
_NOT_KEPT = (
    "compiled loops cannot be cached in %s (%s): they are used, and compiled again by the next process; make room "
    "there, empty it, or name another directory in NUMBA_CACHE_DIR"
)


def _once(say: Callable[..., None], words: str, *arguments: object) -> None:
    """Say something the first time."""
    if words not in _said:
        _said.add(words)
        say(words, *arguments)


class _ForgivingCache:
    """A function's cache on disk, whose failures stay here: numba lets them pass through the call that compiles."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def load_overload(self, signature: Any, context: Any) -> Any:
        found = None
        try:
            found = self._cache.load_overload(signature, context)
        except Exception as error:  # half a file may raise anything
            _once(_log.warning, _NOT_KEPT, self._cache.cache_path, error)
        if found is None:
            _once(announce, _COMPILING)
        return found

    def save_overload(self, signature: Any, result: Any) -> None:
        try:
            self._cache.save_overload(signature, result)
        except Exception as error:  # it reads the index first: see above
            _once(_log.warning, _NOT_KEPT, self._cache.cache_path, error)
