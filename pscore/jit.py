"""Loops that numba compiles at their first call, once a machine; numba itself is imported no earlier."""

import fcntl
import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from types import FunctionType
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger(__name__)

announce: Callable[..., None] = _log.info
"""Logs that loops are being compiled, and now and then for how long. A worker sets a louder one: its steps wait."""

_COMPILING = (
    "compiling loops for this machine's processor: about half a minute on idle cores, minutes on a busy machine; they "
    "are kept for the next start"
)
_SO_FAR = "still compiling loops: %.0f s so far; nothing is wrong with the servers"
_TELL_EVERY_SECONDS = 10.0
_NOT_KEPT = (
    "compiled loops cannot be cached in %s (%s): they are used, and compiled again by the next process; make room "
    "there, empty it, or name another directory in NUMBA_CACHE_DIR"
)
_MOST_SECONDS = 120.0  # of waiting for another process: one that is stopped must not stop this one
_POLL_SECONDS = 0.02
COMPILED_FROM = 256
"""Entries from which a loop is worth compiling: below, nothing shall ever wait for the compiler."""

_run_as_python = 0
_compiling_seconds = _told_seconds = 0.0  # what loops have taken since that was first said, and when it was last said
_depth = 0  # of loops that are compiled for the sake of others
_lock = threading.RLock()
_logged: set[str] = set()


class compiled(Generic[P, R]):  # noqa: N801 - a decorator
    """Makes a module-level function a loop that numba compiles, once for each combination of argument types.

    A loop runs without the GIL. It is cached on disk, beside the source or in numba's cache directory. While one
    process compiles a loop, others that want it wait for the file. If the cache can be neither written nor read, the
    loop is compiled all the same, and a warning says so once. Constants of a loop, and other loops that it calls, must
    stand in its own file: the cache notices changes there and nowhere else.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        self.function = function
        self._dispatcher: Any = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the loop."""
        result: R = (self._dispatcher or self.dispatcher)(*args, **kwargs)
        return result

    def on(self, entries: int) -> Callable[P, R]:
        """Return the loop for so many entries: for few, and if nothing has compiled it in this process, as Python.

        Both have the same bits.
        """
        if self._dispatcher is None and entries < COMPILED_FROM:
            global _run_as_python
            _run_as_python += entries  # threads may lose some of another's: nobody needs the exact number
            return self.plain
        return self._dispatcher or self.dispatcher  # type: ignore[no-any-return]

    @cached_property
    def plain(self) -> Callable[P, R]:
        """The loop as Python, which checks every place that it reads and writes."""
        numpy: Any = importlib.import_module("numpy")
        function = _calling(self.function, lambda loop: loop.plain)

        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with numpy.errstate(all="ignore"):  # integers wrap on purpose, and who calls looks for what is not finite
                return function(*args, **kwargs)

        return run

    @property
    def dispatcher(self) -> Any:
        """The compiled function; the plain one if NUMBA_DISABLE_JIT is set."""
        if self._dispatcher is None:
            with _lock:
                self._dispatcher = self._dispatcher or _compile(self.function)
        return self._dispatcher


def run_as_python() -> int:
    """Return over how many entries loops ran as Python in this process, each about a microsecond of its CPU."""
    return _run_as_python


def _compile(function: Callable[..., Any]) -> Any:
    numba: Any = importlib.import_module("numba")  # its types lack what is used here
    if numba.config.DISABLE_JIT:
        return function
    function = _calling(function, lambda loop: loop.dispatcher)  # numba calls its own functions only
    loop = numba.njit(nogil=True)(function)
    kept = loop._cache = _Cache(function)
    compile_now, one_at_a_time = loop.compile, importlib.import_module("numba.core.compiler_lock").global_compiler_lock

    def compile_once(signature: Any) -> Any:
        with one_at_a_time, _timed():
            try:
                return compile_now(signature)
            finally:
                kept.unlock()

    loop.compile = compile_once
    return loop


@contextmanager
def _timed() -> Iterator[None]:
    """Say, once in a while and behind a loop, how long compiling has taken; one thread at a time is here."""
    global _compiling_seconds, _told_seconds, _depth
    began, _depth = time.monotonic(), _depth + 1
    try:
        yield
    finally:
        _depth -= 1
        if not _depth and _COMPILING in _logged:
            _compiling_seconds += time.monotonic() - began
            if _compiling_seconds - _told_seconds >= _TELL_EVERY_SECONDS:
                _told_seconds = _compiling_seconds
                announce(_SO_FAR, _compiling_seconds)


def _calling(function: Callable[P, R], form: Callable[[Any], Any]) -> Callable[P, R]:
    """Return a function that calls other loops in a form of theirs."""
    called = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    called = {name: form(loop) for name, loop in called.items() if isinstance(loop, compiled)}
    return FunctionType(function.__code__, function.__globals__ | called, function.__name__) if called else function


def _log_once(log: Callable[..., None], words: str, *arguments: object) -> None:
    if words not in _logged:
        _logged.add(words)
        log(words, *arguments)


@cache
def _caches() -> tuple[Any, Any]:
    """Return numba's cache of a function, and one that only reads what was compiled beside the source."""
    caching: Any = importlib.import_module("numba.core.caching")
    named = getattr(caching, "InTreeCacheLocator", None) or caching._InTreeCacheLocator  # the name before 0.63

    class Beside(named):  # type: ignore[misc,valid-type]
        @classmethod
        def from_function(cls, function: Any, file: str) -> Any:
            return cls(function, file)  # numba itself asks whether the directory can be written

    class Impl(caching.CompileResultCacheImpl):  # type: ignore[misc]
        _locator_classes = [Beside]  # noqa: RUF012 - numba's

    class Shipped(caching.FunctionCache):  # type: ignore[misc]
        _impl_class = Impl

    return caching.FunctionCache, Shipped


class _Cache:
    """A function's compiled forms on disk, shared by the processes of a machine.

    They are read from the directory that this process may write. If that is not the source's, they are also read from
    beside the source, where an image brings them. No error of the disk reaches the call that compiles; numba's own
    cache would raise it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        writable, shipped = _caches()
        is_installed_for_others = not os.access(os.path.dirname(function.__code__.co_filename), os.W_OK)
        self._shipped = shipped(function) if is_installed_for_others else None
        self._own: Any = None
        self._held: int | None = None  # descriptor of the lock file
        try:
            self._own = writable(function)
        except RuntimeError as error:  # no directory for the cache can be written
            self._reason: tuple[str, object] = ("any directory", error)

    def load_overload(self, signature: Any, context: Any) -> Any:
        """Return the compiled form, if need be after another process has compiled it; ``None``: compile it here."""
        found = self._load(signature, context)
        if found is None and self._shipped is not None:
            with suppress(Exception):
                found = self._shipped.load_overload(signature, context)
        if found is None:
            _log_once(announce, _COMPILING)
            if self._own is None:
                _log_once(_log.warning, _NOT_KEPT, *self._reason)
            else:
                self._lock_file()
                found = self._load(signature, context)  # another process may have compiled it meanwhile
        return found

    def _load(self, signature: Any, context: Any) -> Any:
        try:
            return self._own and self._own.load_overload(signature, context)
        except Exception as error:  # half a file may raise anything
            _log_once(_log.warning, _NOT_KEPT, self.cache_path, error)
            return None

    @property
    def cache_path(self) -> str | None:
        """The directory that is written."""
        return None if self._own is None else self._own.cache_path

    def save_overload(self, signature: Any, result: Any) -> None:
        """Keep a compiled form."""
        if self._own is None:
            return
        try:
            self._own.save_overload(signature, result)
        except Exception as error:  # numba reads the index first: see above
            _log_once(_log.warning, _NOT_KEPT, self.cache_path, error)

    def _lock_file(self) -> None:
        """Wait until no other process compiles this function, and keep others from it until :meth:`unlock`."""
        until = time.monotonic() + _MOST_SECONDS
        try:
            path = os.path.join(self._own.cache_path, f"{self._own._impl.filename_base}.lock")
            self._held = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            while time.monotonic() < until:
                with suppress(BlockingIOError):
                    fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                time.sleep(_POLL_SECONDS)
        except OSError:  # a disk without locks, or full: each process compiles for itself
            pass

    def unlock(self) -> None:
        """Let other processes read what was compiled, or compile it after an error here."""
        if self._held is not None:
            os.close(self._held)
            self._held = None
