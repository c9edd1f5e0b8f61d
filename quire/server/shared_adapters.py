"""Adapters shared by API processes, in files that each reads after a change."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from quire.adapter_orders import AdapterRef

K = TypeVar("K")
V = TypeVar("V")


class NamedAdapter(msgspec.Struct, frozen=True):
    """Adapter loaded by name. path: folder as given. ref: the same for all processes."""

    path: str
    ref: AdapterRef
    base_model_name: str | None = None


class NumberedAdapter(msgspec.Struct, frozen=True):
    """Adapter of `--lora` or `--lora-scaled`. ref: with scale 1. scale: for requests that name none."""

    ref: AdapterRef
    scale: float


Names = dict[str, NamedAdapter]
Numbered = dict[int, NumberedAdapter]


class SharedTable(Protocol[K, V]):
    def news(self) -> dict[K, V] | None:
        """Entries of all processes; None if unchanged since the last call."""
        ...

    def reread(self) -> None:
        """Let the next `news` return the entries in any case."""
        ...

    def change(self, change: Callable[[dict[K, V]], None]) -> None:
        """Change the entries under a lock. If `change` raises, they stay unchanged."""
        ...


class OneProcess:
    """Table of a server with one process."""

    def news(self) -> None:
        return None

    def reread(self) -> None:
        pass

    def change(self, change: Callable[[dict[Any, Any]], None]) -> None:
        """Does nothing."""


class TableFile(Generic[K, V]):
    """Table of several API processes in a file, replaced as a whole."""

    def __init__(self, path: Path, kind: type[dict[K, V]]) -> None:
        self._path = path
        self._seen: BinaryIO | None = None
        self._decoder = msgspec.json.Decoder(kind)

    def news(self) -> dict[K, V] | None:
        try:
            if self._seen and os.path.samestat(os.fstat(self._seen.fileno()), self._path.stat()):
                return None
            file = self._path.open("rb")
        except FileNotFoundError:
            return None
        self.reread()
        self._seen = file  # open, so that no later table has its inode
        return self._decoder.decode(file.read())

    def reread(self) -> None:
        if self._seen:
            self._seen.close()
            self._seen = None

    def change(self, change: Callable[[dict[K, V]], None]) -> None:
        with open(f"{self._path}.lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            table = self._decoder.decode(self._path.read_bytes()) if self._path.exists() else {}
            before = dict(table)
            change(table)
            if table != before:
                draft = Path(f"{self._path}.{os.getpid()}")
                draft.write_bytes(msgspec.json.encode(table))
                draft.replace(self._path)


class SharedAdapters(NamedTuple):
    """Tables of adapters by name and by number."""

    names: SharedTable[str, NamedAdapter] = OneProcess()
    numbered: SharedTable[int, NumberedAdapter] = OneProcess()

    @classmethod
    def of(cls, directory: Path) -> SharedAdapters:
        return cls(TableFile(directory / "adapters", Names), TableFile(directory / "numbered-adapters", Numbered))
