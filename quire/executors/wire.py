"""Control calls between an executor and its ranks, as msgpack: configurations, layouts and profiles.

Each composite value is an array that begins with its kind.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from quire.config.engine import EngineConfig
from quire.kv_cache.layout import KVCacheLayout
from quire.kv_cache.sizing import MemoryProfile
from quire.kv_cache.spec import LayerSpec
from quire.scheduler.preemption import PreemptionCosts

_ROOTS = (EngineConfig, LayerSpec, KVCacheLayout, MemoryProfile, PreemptionCosts)
"""Types that calls of RankedExecutor carry over the wire."""
_INTEGER_BITS = 63


def _find_records(annotation: Any, found: dict[str, type]) -> dict[str, type]:
    if isinstance(annotation, type) and is_dataclass(annotation):
        if annotation.__name__ not in found:
            found[annotation.__name__] = annotation
            for field in get_type_hints(annotation).values():
                _find_records(field, found)
        assert found[annotation.__name__] is annotation, f"two records are called {annotation.__name__}"
    for part in get_args(annotation):
        _find_records(part, found)
    return found


_RECORDS: dict[str, Any] = {}
for _root in _ROOTS:
    _find_records(_root, _RECORDS)


def encode(value: object) -> bytes:
    """Encode a message between engine and ranks as msgpack. Raises TypeError for an unsupported value."""
    return msgspec.msgpack.encode(_plain(value))


def decode(data: bytes) -> Any:
    """Value given to `encode`; mappings come back as dictionaries. Inverse of `encode`."""
    return _restored(msgspec.msgpack.decode(data))


def _plain(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > _INTEGER_BITS:
        return ["integer", str(value)]
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, Path):
        return ["path", str(value)]
    if type(value) in (list, tuple):
        return [type(value).__name__, *map(_plain, value)]
    if type(value).__name__ in _RECORDS:
        return [type(value).__name__, *(_plain(getattr(value, field.name)) for field in fields(value))]
    if hasattr(value, "items"):
        return ["mapping", *([_plain(key), _plain(item)] for key, item in value.items())]
    raise TypeError(f"a {type(value).__name__} cannot be sent to a rank")


def _restored(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, *parts = value
    match kind:
        case "integer":
            return int(parts[0])
        case "path":
            return Path(parts[0])
        case "mapping":
            return {_restored(key): _restored(item) for key, item in parts}
        case "list":
            return [_restored(part) for part in parts]
        case "tuple":
            return tuple(_restored(part) for part in parts)
    record = _RECORDS[kind]
    return record(**{field.name: _restored(part) for field, part in zip(fields(record), parts, strict=True)})
