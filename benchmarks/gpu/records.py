"""Results as lines of JSON, written as soon as they are known: a part that runs out of time keeps what it has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]
"""Has "part" and "what"; the rest depends on these."""
Emit = Callable[[Record], None]


def writer(path: Path, *, quiet: bool = False) -> Emit:
    """Appends to a file, and prints (not if quiet)."""

    def emit(record: Record) -> None:
        line = json.dumps(record)
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        if not quiet:
            print(line, flush=True)

    return emit


def read(path: Path) -> list[Record]:
    """Everything that was written; a last line that broke off is left out."""
    return list(_lines(path)) if path.exists() else []


def _lines(path: Path) -> Iterator[Record]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return
