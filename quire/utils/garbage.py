"""When the garbage collector looks for circles of references."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """A context in which nothing is collected: for work that makes many objects and drops few, such as an import of
    torch, whose every collection looks through all that it has made so far."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
