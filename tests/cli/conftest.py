from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quire_logger() -> Iterator[None]:
    """Commands configure the `quire` logger of the whole process: put it back after each test."""
    logger = logging.getLogger("quire")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = propagate
