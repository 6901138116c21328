"""Structured logs: one JSON object a line, or readable text."""

import logging
import logging.handlers
import math
import os
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import Any

from pythonjsonlogger.json import JsonFormatter

from pscore.names import escaped

log = logging.getLogger("psservice")
audit = logging.getLogger("psservice.audit")

_MOST_LINES = 10_000
_LAST_LINES_SECONDS = 2.0
_COMPLAINT_SECONDS = 60.0
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


class _AuditFile(logging.handlers.WatchedFileHandler):
    """Appends lines to a file that its owner alone can read, and to a new one once that was moved or deleted."""

    def __init__(self, path: Path) -> None:
        self._complained = -math.inf
        super().__init__(path, encoding="utf-8", errors="backslashreplace")

    def _open(self) -> TextIOWrapper:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        return open(descriptor, "a", encoding=self.encoding, errors=self.errors)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; a file that cannot be opened again is an error of the file, and not of the thread."""
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the base's name
        """Say in the log, once a minute, that the file cannot be written; the line is in the log anyway."""
        if record.created - self._complained >= _COMPLAINT_SECONDS:
            self._complained = record.created
            why = str(sys.exc_info()[1])
            log.error("the audit log cannot be written", extra={"file": self.baseFilename, "why": why})


def configure(level: str, form: str, shard: int | None = None, audit_log: Path | None = None) -> None:
    """Send every log line of this process to stderr, from ``level`` up; ``form`` is ``json``, ``text`` or ``auto``.

    Python's warnings, and exceptions that nobody catches, are lines of the log too. If a run has several shards, each
    line has the field ``shard``. What the logger ``psservice.audit`` has from level info up is also written to
    ``audit_log``, as JSON; ``-`` is stdout. Raises ``OSError`` if that cannot be opened.
    """
    if form == "auto":
        form = "text" if sys.stderr.isatty() else "json"
    handler = logging.StreamHandler(sys.stderr)
    json = _JsonFormatter("{asctime}{levelname}{name}{message}", style="{", rename_fields=_RENAMED)
    handler.setFormatter(json if form == "json" else _TextFormatter("%(asctime)s %(levelname)-7s %(message)s"))
    handler.setLevel(level.upper())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    _write_audit_log(audit_log, json)
    for each in (handler, *audit.handlers):
        if shard is not None:
            each.addFilter(lambda record: record.__dict__.setdefault("shard", shard) == shard)
    logging.getLogger("grpc._common").setLevel(logging.CRITICAL)  # the error of a call says that it cannot be read
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = lambda failed: _log_uncaught(failed.exc_type, failed.exc_value, failed.exc_traceback)
    sys.unraisablehook = lambda failed: _log_uncaught(failed.exc_type, failed.exc_value, failed.exc_traceback)


def _write_audit_log(path: Path | None, form: logging.Formatter) -> None:
    """Have the lines of the audit trail written to a file too, whatever the level of the log is."""
    for old in audit.handlers:
        old.close()
    audit.handlers = []
    audit.setLevel(logging.NOTSET)
    if path is not None:
        written = logging.StreamHandler(sys.stdout) if str(path) == "-" else _AuditFile(path)
        written.setFormatter(form)
        written.setLevel(logging.INFO)
        audit.addHandler(written)
        audit.setLevel(min(logging.INFO, logging.getLogger().level))


class _LineThread(logging.Handler):
    """Hands lines to a thread that writes them with another handler.

    While many wait, as on a disk that hangs, further lines are dropped; their number has a line afterwards.
    """

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__(handler.level)
        self._handler = handler
        self._lines: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._lines.qsize() < _MOST_LINES:
            record.msg, record.args = record.getMessage(), None  # what the line is about may change
            self._lines.put(record)
        else:
            self._dropped += 1

    def close(self) -> None:
        """Write what waits, as far as that takes no long time."""
        self._lines.put(None)
        self._thread.join(_LAST_LINES_SECONDS)
        super().close()

    def _write(self) -> None:
        while (record := self._lines.get()) is not None:
            self._handler.handle(record)
            if self._dropped and self._lines.empty():
                self._tell_of_dropped()

    def _tell_of_dropped(self) -> None:
        assert self.lock is not None
        with self.lock:  # as emit
            count, self._dropped = self._dropped, 0
        what = "log lines are lost: they came faster than they could be written"
        told = {"name": log.name, "levelno": logging.ERROR, "levelname": "ERROR", "msg": what, "lines": count}
        self._handler.handle(logging.makeLogRecord(told))


@contextmanager
def in_thread() -> Iterator[None]:
    """Have a thread write all lines meanwhile, so that who logs waits for no terminal, pipe or disk."""
    loggers = [logging.getLogger(), audit]
    handlers = [logger.handlers for logger in loggers]
    for logger in loggers:
        logger.handlers = [_LineThread(handler) for handler in logger.handlers]
    try:
        yield
    finally:
        for logger, before in zip(loggers, handlers, strict=True):
            threads, logger.handlers = logger.handlers, before
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
