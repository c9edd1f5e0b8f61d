"""One logger tree under `quire`, one line a record, to standard error."""

from __future__ import annotations

import logging
import sys

from quire import envs

_FORMAT = "%(levelname).1s %(asctime)s %(name)s: %(message)s"


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; `name` is `__name__`."""
    return logging.getLogger(name)


def configure_logging(level: str | None = None) -> None:
    """Attach one handler to the `quire` logger. Called by the command line and the engine process, never on import."""
    logger = logging.getLogger("quire")
    logger.setLevel(level or envs.log_level())
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
        logger.addHandler(handler)
        logger.propagate = False
