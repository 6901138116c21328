"""Structured logs: one JSON object a line, or readable text."""

import logging
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from pythonjsonlogger.json import JsonFormatter

from pscore.names import escaped

log = logging.getLogger("psservice")

_MOST_LINES = 10_000
_LAST_LINES_SECONDS = 2.0
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_RENAMED = {"asctime": "time", "levelname": "level"}


class _JsonFormatter(JsonFormatter):
    """The time is UTC, so that the lines of servers in several zones sort and merge as text."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - the base's name
        return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class _TextFormatter(logging.Formatter):
    """A line of text with the extra fields behind it as ``name=value``, and an exception's lines, indented, below.

    Words of others are among all of these: what a terminal would obey is escaped, and no part of them begins a line.
    The time is local, with the offset of its zone.
    """

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - the base's name
        return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base's name
        extras = {name: value for name, value in record.__dict__.items() if name not in _STANDARD}
        fields = "".join(f" {name}={value}" for name, value in extras.items())
        return escaped(super().formatMessage(record) + fields)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the base's name
        return "\n".join(f"    {escaped(line)}" for line in super().formatException(ei).splitlines())


def configure(level: str, form: str, shard: int | None = None) -> None:
    """Send every log line of this process to stderr, from ``level`` up; ``form`` is ``json``, ``text`` or ``auto``.

    Python's warnings, and exceptions that nobody catches, are lines of the log too. If a run has several shards, each
    line has the field ``shard``.
    """
    if form == "auto":
        form = "text" if sys.stderr.isatty() else "json"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _JsonFormatter("{asctime}{levelname}{name}{message}", style="{", rename_fields=_RENAMED)
        if form == "json"
        else _TextFormatter("%(asctime)s %(levelname)-7s %(message)s")
    )
    if shard is not None:
        handler.addFilter(lambda record: record.__dict__.setdefault("shard", shard) == shard)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("grpc._common").setLevel(logging.CRITICAL)  # the error of a call says that it cannot be read
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = lambda failed: _log_uncaught(failed.exc_type, failed.exc_value, failed.exc_traceback)
    sys.unraisablehook = lambda failed: _log_uncaught(failed.exc_type, failed.exc_value, failed.exc_traceback)


class _LineThread(logging.Handler):
    """Hands lines to a thread that writes them with another handler; further lines are dropped while many wait."""

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__()
        self._handler = handler
        self._lines: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._lines.qsize() < _MOST_LINES:
            record.msg, record.args = record.getMessage(), None  # what the line is about may change
            self._lines.put(record)

    def close(self) -> None:
        """Write what waits, as far as that takes no long time."""
        self._lines.put(None)
        self._thread.join(_LAST_LINES_SECONDS)
        super().close()

    def _write(self) -> None:
        while (record := self._lines.get()) is not None:
            self._handler.handle(record)


@contextmanager
def in_thread() -> Iterator[None]:
    """Have a thread write all lines meanwhile, so that who logs waits for no terminal, pipe or disk."""
    root = logging.getLogger()
    handlers = root.handlers
    root.handlers = [_LineThread(handler) for handler in handlers]
    try:
        yield
    finally:
        threads, root.handlers = root.handlers, handlers
        for each in threads:
            each.close()


def _uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
    else:
        _log_uncaught(kind, error, traceback)


def _log_uncaught(kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None) -> None:
    if not issubclass(kind, SystemExit):
        log.critical("an exception that nobody has caught", exc_info=(kind, error or kind(), traceback))
