"""Errors of the `tokenizers` library as errors of this package."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.errors import ModelLoadError, is_interrupt

MAX_REASON = 300
STDERR = 2


@contextmanager
def refusing(path: Path, what: str) -> Iterator[None]:
    """Turn the block's exceptions and the library's panics into ModelLoadError."""
    try:
        with last_word_to_exceptions():
            yield
    except MemoryError:
        raise
    except BaseException as error:
        if is_interrupt(error) or (isinstance(error, ModelLoadError) and str(path) in error.message):
            raise
        raise ModelLoadError(f"{path} {what}: {first_line(error)[:MAX_REASON]}") from None


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def last_word_to_exceptions() -> Iterator[None]:
    """Hold back standard error during the block, and drop it if the block raises."""
    try:
        before = os.dup(STDERR)
    except OSError:  # there is no standard error
        yield
        return
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), STDERR)
        try:
            yield
        finally:
            os.dup2(before, STDERR)
            os.close(before)
        kept.seek(0)
        while piece := kept.read(2**16):
            os.write(STDERR, piece)
