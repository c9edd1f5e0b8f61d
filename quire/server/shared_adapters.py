"""Adapter names shared by the API processes of a server, in a file that each reads after a change."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from quire.adapter_orders import AdapterRef

ADAPTERS_FILE = "adapters"
"""File name in the directory of the API processes."""


class NamedAdapter(msgspec.Struct, frozen=True):
    """Adapter of a name that all API processes share. path: folder as given. ref: reference that requests carry, the
    same for all processes."""

    path: str
    ref: AdapterRef
    base_model_name: str | None = None


Names = dict[str, NamedAdapter]


class SharedNames(Protocol):
    def news(self) -> Names | None:
        """Adapters of all processes; None if unchanged since the last call."""
        ...

    def change(self, change: Callable[[Names], None]) -> Names:
        """Change the adapters under a lock and return them. If `change` raises, they stay unchanged."""
        ...


class OneProcess:
    """Adapter names of a single process, which shares none."""

    def news(self) -> None:
        return None

    def change(self, change: Callable[[Names], None]) -> Names:
        return {}


class NamesFile:
    """Adapter names of several processes, in a file that is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._decoder = msgspec.json.Decoder(Names)

    def news(self) -> Names | None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        version = (status.st_mtime_ns, status.st_ino)
        if version == self._seen:
            return None
        self._seen = version
        return self._decoder.decode(self._path.read_bytes())

    def change(self, change: Callable[[Names], None]) -> Names:
        with open(f"{self._path}.lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            names = self._decoder.decode(self._path.read_bytes()) if self._path.exists() else {}
            before = dict(names)
            change(names)
            if names != before:
                draft = Path(f"{self._path}.{os.getpid()}")
                draft.write_bytes(msgspec.json.encode(names))
                draft.replace(self._path)
        return names
