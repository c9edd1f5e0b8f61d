from __future__ import annotations

from dataclasses import dataclass

MAX_CHARACTERS = 120


@dataclass(frozen=True)
class SchemaPlace:
    """Place of a schema's part and its parent's, formatted only for an error."""

    parent: SchemaPlace | None
    name: str | int

    def at(self, name: str | int) -> SchemaPlace:
        return SchemaPlace(self, name)

    def target(self) -> SchemaPlace:
        """Place of the schema that a reference here leads to."""
        return SchemaPlace(None, f"the target of {self}")

    def error(self, reason: str) -> ValueError:
        return ValueError(f"{self}: {reason}")

    def __str__(self) -> str:
        parts: list[str] = []
        place: SchemaPlace | None = self
        while place is not None:
            parts.append(str(place.name)[:MAX_CHARACTERS])
            place = place.parent
        text = "/".join(reversed(parts))
        return text if len(text) <= MAX_CHARACTERS else f"...{text[-MAX_CHARACTERS:]}"
