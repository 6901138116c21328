"""Log lines of a program that has not configured logging have the logger's name: a reader knows whose they are."""

import logging
import sys


class NamedLog(logging.Handler):
    """Writes ``name: message`` to stderr if no other handler gets a record; from WARNING on.

    In its place ``logging.lastResort`` would write the message alone.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless the program has a handler for it."""
        if self._has_another(logging.getLogger(record.name)):
            return
        try:
            print(f"{record.name}: {self.format(record)}", file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)

    def _has_another(self, logger: logging.Logger | None) -> bool:
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


def install(*names: str) -> None:
    """Name the lines of these loggers, and of those below them."""
    handler = NamedLog()
    for name in names:
        logging.getLogger(name).addHandler(handler)
