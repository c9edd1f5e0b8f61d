"""What the `tokenizers` library raises while files are read, as errors of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.errors import ModelLoadError, is_interrupt
from quire.utils.panics import last_word_to_exceptions

MAX_REASON = 300
"""Characters of what the library says."""


@contextmanager
def refusing(path: Path, what: str) -> Iterator[None]:
    """Turn whatever the library raises (plain exceptions, and panics, which are none) into a ModelLoadError."""
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
