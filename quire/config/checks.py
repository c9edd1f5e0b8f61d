"""Checks of single options. Each raises ConfigError that names the option."""

from __future__ import annotations

from quire.errors import ConfigError, nearest_name


def positive(name: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise ConfigError(f"{name} must be at least 1, not {value}", param=name)
    return value


def choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        known = ", ".join(choices)
        raise ConfigError(f"{name} must be one of {known}, not {value!r}{nearest_name(value, choices)}", param=name)
    return value
