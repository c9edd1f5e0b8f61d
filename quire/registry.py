"""A table from names to implementations that are imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from quire.errors import UserError, nearest_name


class Registry:
    """Maps a name to `"module:attribute"`. `kind` is the noun used in error messages."""

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def register(self, name: str, target: str) -> None:
        """Add or replace an entry; `target` is `"module:attribute"`."""
        self._entries[name] = target

    def load(self, name: str) -> Any:
        """Import and return the implementation. Raises UserError (listing what is known) for an unknown name."""
        if name not in self._entries:
            known = ", ".join(self)
            raise UserError(f"unknown {self.kind} {name!r}{nearest_name(name, self._entries)} (known: {known})")
        return load_target(self._entries[name])


def load_target(target: str) -> Any:
    """Import and return a `"module:attribute"`, which this program names: never one that a checkpoint or a request
    does."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)
