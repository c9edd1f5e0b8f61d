"""Checks of single options. Each raises a ConfigError that names the option."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import msgspec

from quire.errors import ConfigError, nearest_name

T = TypeVar("T")


def positive(name: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise ConfigError(f"{name} must be at least 1, not {value}", param=name)
    return value


def choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        known = ", ".join(choices)
        raise ConfigError(f"{name} must be one of {known}, not {value!r}{nearest_name(value, choices)}", param=name)
    return value


def converted(name: str, given: Mapping[str, Any], kind: type[T], known: Collection[str]) -> T:
    """Object-valued option as an instance of `kind`, whose fields are `known`. Raises ConfigError."""
    for field in given:
        if field not in known:
            raise ConfigError(f"{name} has no {field!r}{nearest_name(field, known)}", param=name)
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {error}", param=name) from None
