"""Checked reading of JSON files of a Hugging Face directory. Errors name file and key."""

from __future__ import annotations

import json
import reprlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.errors import ModelLoadError
from quire.utils.model_files import file_bytes, read_model_file

MAX_JSON_BYTES = 2**24
MAX_JSON_VALUES = 2**17
MAX_INTEGER = 2**31 - 1

_shorten = reprlib.Repr()
_shorten.maxstring = _shorten.maxother = 120
_shorten.maxlong = 40


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON file of one object. Raises ModelLoadError with the file's name."""
    content = read_model_file(path, MAX_JSON_BYTES)
    if content.count(b",") + content.count(b"[") + content.count(b"{") > MAX_JSON_VALUES:
        raise ModelLoadError(f"{path} may hold {MAX_JSON_VALUES} values, and holds more")
    try:
        parsed = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not {type(parsed).__name__}")
    return parsed


def read_optional_json(path: Path) -> dict[str, Any]:
    return {} if file_bytes(path) is None else read_json(path)


def shown(value: Any) -> str:
    """Value as text (`repr`) for error messages; long ones are cut."""
    return _shorten.repr(value)


class Fields:
    """Typed access to one JSON object. A key absent or null takes the default; without one it is required. where: name
    of the object in errors (a path, or a path and a key)."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def error(self, message: str) -> ModelLoadError:
        return ModelLoadError(f"{self.where}: {message}")

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_INTEGER) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(f"{key} must be an integer of at least {minimum}, not {shown(value)}")
        if value > maximum:
            raise self.error(f"{key} must be at most {maximum}, not {shown(value)}")
        return value

    def optional_integer(self, key: str, *, minimum: int = 1, maximum: int = MAX_INTEGER) -> int | None:
        return None if self.values.get(key) is None else self.integer(key, minimum=minimum, maximum=maximum)

    def number(self, key: str, default: float | None = None) -> float:
        """Finite number greater than zero."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise self.error(f"{key} must be a number greater than zero, not {shown(value)}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, not {shown(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(f"{key} must be a string, not {shown(value)}")
        return value

    def choice(self, key: str, choices: Sequence[str], default: str | None = None) -> str:
        value = self.text(key, default)
        if value not in choices:
            raise self.error(f"{key} {shown(value)} is not supported (known: {', '.join(sorted(choices))})")
        return value

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """List of `length` numbers greater than zero."""
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
