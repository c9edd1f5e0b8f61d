"""Parsing and formatting of byte sizes and counts."""

from __future__ import annotations

import re

from quire.errors import ConfigError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[_letter] = _UNITS[f"{_letter}IB"] = 1024**_power
    _UNITS[f"{_letter}B"] = 1000**_power

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: int | str, *, param: str) -> int:
    """Bytes (> 0) of `4294967296`, `"4GiB"`, `"4G"` (1024-based) or `"4GB"` (1000-based)."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"{param} must be a number of bytes or a size such as '4GiB', not {value!r}", param=param)
    if isinstance(value, int):
        size = value
    else:
        match = _SIZE.fullmatch(value)
        if match is None or match[2].upper() not in _UNITS:
            raise ConfigError(f"{param} must be a size such as '512MiB' or '4GiB', not {value!r}", param=param)
        size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size <= 0:
        raise ConfigError(f"{param} must be greater than zero, not {value!r}", param=param)
    return size


def format_bytes(size: float) -> str:
    """`1536` -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


_COUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)([kmgtKMGT])\s*")


def parse_count(value: int | str, *, param: str) -> int:
    """Number of `4096`, `"4096"`, `"4k"` (4000), `"25.6k"` or `"4K"` (4096), as in vLLM: small letters are powers of
    1000 and take fractions, capital ones are powers of 1024."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _COUNT.fullmatch(value) if isinstance(value, str) else None
    if match is not None:
        power = "KMGT".index(match[2].upper()) + 1
        if match[2].islower():
            return int(float(match[1]) * 1000**power)
        if "." not in match[1]:
            return int(match[1]) * int(1024**power)
    elif isinstance(value, str) and re.fullmatch(r"\s*-?[0-9]{1,18}\s*", value):
        return int(value)
    raise ConfigError(f"{param} must be an integer such as 4096, 4k (4000) or 4K (4096), not {value!r}", param=param)


def parse_length(value: int | str | None, *, param: str) -> int | None:
    """`parse_count`; None (no limit) for None, "auto" and -1."""
    if value is None or (isinstance(value, str) and value.strip().lower() == "auto"):
        return None
    number = parse_count(value, param=param)
    return None if number == -1 else number
