"""Reading JSON files of a Hugging Face directory: every value is checked when it is read, errors name file and key."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.errors import ModelLoadError


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON file that holds one object. Raises ModelLoadError naming the file."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not {type(parsed).__name__}")
    return parsed


class Fields:
    """Typed access to one JSON object. A key that is absent or null takes the default; without one it is required.

    where: what error messages call the object (a path, or a path and a key).
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def error(self, message: str) -> ModelLoadError:
        return ModelLoadError(f"{self.where}: {message}")

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(f"{key} must be an integer of at least {minimum}, not {value!r}")
        return value

    def optional_integer(self, key: str, *, minimum: int = 1) -> int | None:
        return None if self.values.get(key) is None else self.integer(key, minimum=minimum)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number greater than zero."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(f"{key} must be a number greater than zero, not {value!r}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, not {value!r}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(f"{key} must be a string, not {value!r}")
        return value

    def choice(self, key: str, choices: Sequence[str], default: str | None = None) -> str:
        value = self.text(key, default)
        if value not in choices:
            raise self.error(f"{key} {value!r} is not supported (known: {', '.join(sorted(choices))})")
        return value

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of `length` numbers greater than zero."""
        value = self._get(key, None)
        if not isinstance(value, list) or len(value) != length:
            raise self.error(f"{key} must be a list of {length} numbers")
        return tuple(Fields({key: item}, self.where).number(key) for item in value)

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"the key {key!r} is missing")
        return value
