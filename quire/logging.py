"""One logger tree under `quire`, one line a record, to standard error: as text or as JSON."""

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
"""The request that the running task answers."""


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; `name` is `__name__`."""
    return logging.getLogger(name)


def configure_logging(level: str | None = None) -> None:
    """Attach one handler to the `quire` logger, whose records no longer fail to be written. Called by the command line
    and the processes of an engine and a server, never on import."""
    guard_streams("stderr")
    logger = logging.getLogger("quire")
    logger.setLevel(level or envs.log_level())
    if not logger.handlers:
        logger.addHandler(make_handler())
        logger.propagate = False


def set_log_format(name: str) -> None:
    """Log as `name` ("text" or "json") from now on, in this process and in those that it starts."""
    envs.keep_log_format(name)
    for handler in logging.getLogger("quire").handlers:
        handler.setFormatter(_make_formatter())


def make_handler() -> logging.Handler:
    """A handler that writes to standard error in the format that `QUIRE_LOG_FORMAT` names."""
    handler = _Handler(sys.stderr)
    handler.setFormatter(_make_formatter())
    return handler


class _Handler(logging.StreamHandler[TextIO]):
    """Says before the next record how much was lost."""

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
    """Log what an operator reads as a matter of course, at level INFO, although the log begins with warnings unless
    `QUIRE_LOG_LEVEL` says otherwise; a log of errors alone leaves it out. name: of the logger. fields: for JSON."""
    logger = logging.getLogger(name)
    if logger.isEnabledFor(logging.WARNING):
        extra = None if fields is None else {"fields": dict(fields)}
        logger.handle(logger.makeRecord(name, logging.INFO, "", 0, message, arguments, None, extra=extra))


def tell(message: str) -> None:
    """Say to the person or program that runs a command what it should know, whatever the level of the log."""
    if envs.log_format() == "json":
        record = logging.LogRecord("quire", logging.INFO, "", 0, message, None, None)
        line = JsonFormatter().format(record)
    else:
        line = f"quire: {message}"
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time` (UTC), `level`, `logger`, `message`, where known `request_id`, of an exception
    `exception` with its stack, and what a record brings as `extra={"fields": {...}}`."""

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
