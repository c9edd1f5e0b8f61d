"""Latest log records of this process, for admins."""

from __future__ import annotations

import logging
from collections import deque

import msgspec

from quire.logging import REQUEST_ID

KEPT = 500
MAX_CHARACTERS = 4000
"""Limit of a kept message, stack included."""

_formatter = logging.Formatter()


class LogLine(msgspec.Struct, frozen=True):
    """number: counts from 1. time: Unix time in seconds."""

    number: int
    time: float
    level: str
    logger: str
    message: str
    request_id: str | None


class LogTail(logging.Handler):
    """Handler that keeps the last records of the `quire` loggers between `open` and `close`."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[LogLine] = deque(maxlen=KEPT)
        self._number = 0

    def open(self) -> None:
        logging.getLogger("quire").addHandler(self)

    def close(self) -> None:
        logging.getLogger("quire").removeHandler(self)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
            if record.exc_info:
                text = f"{text}\n{_formatter.formatException(record.exc_info)}"
        except Exception:  # a wrong format must not fail the caller; the first handler reports it
            text = str(record.msg)
        self._number += 1
        line = LogLine(
            self._number, record.created, record.levelname, record.name, text[:MAX_CHARACTERS], REQUEST_ID.get()
        )
        self._lines.append(line)

    def lines(self, after: int = 0) -> list[LogLine]:
        """Kept lines with a number above `after`, oldest first."""
        self.acquire()
        try:
            return [line for line in self._lines if line.number > after]
        finally:
            self.release()
