"""A table from names to implementations imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from quire.errors import UserError, nearest_name


class Registry:
    """Table of name -> `"module:attribute"`. `kind` is the noun in error messages."""

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def register(self, name: str, target: str) -> None:
        """Add or replace an entry. target: `"module:attribute"`."""
        self._entries[name] = target

    def load(self, name: str) -> Any:
        """Import and return the implementation. Raises UserError, with the known names, for an unknown name."""
        if name not in self._entries:
            known = ", ".join(self)
            raise UserError(f"unknown {self.kind} {name!r}{nearest_name(name, self._entries)} (known: {known})")
        return load_target(self._entries[name])


def load_target(target: str) -> Any:
    """Import and return a `"module:attribute"`. Only for targets that this program names, never for those of a
    checkpoint or request."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)
