"""Logging to standard error: one logger tree, one line a record, as text or JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TextIO

from quire import envs
from quire.utils.streams import guard_streams, take_num_lost

_FORMAT = "%(levelname).1s %(asctime)s %(name)s: %(message)s"

_LOST = "%d times what was to be written here was lost: its disk was full, or its reader did not read"

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the request that the running task answers."""


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def configure_logging(level: str | None = None) -> None:
    """Attach one handler to the `quire` logger; a record that cannot be written raises no error. The command line and
    the processes of engine and server call it, never an import."""
    guard_streams("stderr")
    logger = logging.getLogger("quire")
    logger.setLevel(level or envs.log_level())
    if not logger.handlers:
        logger.addHandler(make_handler())
        logger.propagate = False


def set_log_format(name: str) -> None:
    """Set the log format, see `envs.keep_log_format`."""
    envs.keep_log_format(name)
    for handler in logging.getLogger("quire").handlers:
        handler.setFormatter(_make_formatter())


def make_handler() -> logging.Handler:
    """Handler that writes to standard error in the format of `QUIRE_LOG_FORMAT`."""
    handler = _Handler(sys.stderr)
    handler.setFormatter(_make_formatter())
    return handler


class _Handler(logging.StreamHandler[TextIO]):
    """Handler that reports before the next record how many records were lost."""

    _num_lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        self._num_lost += take_num_lost(self.stream)
        if self._num_lost:
            super().emit(logging.LogRecord(__name__, logging.WARNING, "", 0, _LOST, (self._num_lost,), None))
            if take_num_lost(self.stream):
                self._num_lost += 1
                return
            self._num_lost = 0
        super().emit(record)


def note(name: str, message: str, *arguments: object, fields: Mapping[str, object] | None = None) -> None:
    """Log a routine message for operators at level INFO. It appears although the default level is WARNING. name: name
    of the logger. fields: extra fields of JSON records."""
    logger = logging.getLogger(name)
    if logger.isEnabledFor(logging.WARNING):
        extra = None if fields is None else {"fields": dict(fields)}
        logger.handle(logger.makeRecord(name, logging.INFO, "", 0, message, arguments, None, extra=extra))


def tell(message: str) -> None:
    """Write a message to standard error for a command's user, at any log level."""
    if envs.log_format() == "json":
        record = logging.LogRecord("quire", logging.INFO, "", 0, message, None, None)
        line = JsonFormatter().format(record)
    else:
        line = f"quire: {message}"
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time` (UTC), `level`, `logger`, `message`; also `request_id` where known, `exception`
    with its stack, and the fields of `extra={"fields": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := REQUEST_ID.get()) is not None:
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _make_formatter() -> logging.Formatter:
    return JsonFormatter() if envs.log_format() == "json" else logging.Formatter(_FORMAT, datefmt="%Y-%m-%d %H:%M:%S")
