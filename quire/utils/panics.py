"""Panics of libraries written in Rust."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

STDERR = 2


def is_panic(error: BaseException) -> bool:
    """Whether `error` is a panic: a BaseException whose class no module offers by name."""
    return any(kind.__name__ == "PanicException" for kind in type(error).__mro__)


@contextmanager
def last_word_to_exceptions() -> Iterator[None]:
    """While the block runs, keep what is written to standard error, and write it afterwards, unless the block ended in
    an exception: then that says what was wrong, where a panic's message is pages with a backtrace."""
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
