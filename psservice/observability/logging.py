"""Structured logs: one JSON object a line, or readable text."""

import logging
import sys
from typing import Any

from pythonjsonlogger.json import JsonFormatter

from pscore.names import escaped

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class _TextFormatter(logging.Formatter):
    """A line of text with the extra fields behind it as ``name=value``, and an exception's lines, indented, below.

    Words of others are among all of these: what a terminal would obey is escaped, and no part of them begins a line.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base's name
        extras = {name: value for name, value in record.__dict__.items() if name not in _STANDARD}
        fields = "".join(f" {name}={value}" for name, value in extras.items())
        return escaped(super().formatMessage(record) + fields)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the base's name
        return "\n".join(f"    {escaped(line)}" for line in super().formatException(ei).splitlines())


def configure(level: str, form: str, shard: int | None = None) -> None:
    """Send every log line of this process to stderr, from ``level`` up; ``form`` is ``json``, ``text`` or ``auto``.

    Where a run has several shards, each line has the field ``shard``.
    """
    if form == "auto":
        form = "text" if sys.stderr.isatty() else "json"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter("{asctime}{levelname}{name}{message}", style="{", rename_fields={"levelname": "level"})
        if form == "json"
        else _TextFormatter("%(asctime)s %(levelname)-7s %(message)s")
    )
    if shard is not None:
        handler.addFilter(lambda record: record.__dict__.setdefault("shard", shard) == shard)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
