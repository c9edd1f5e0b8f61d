"""Check of request fields that a struct does not define: misspelled, unsupported or unknown. Class attributes name more
fields. UNSUPPORTED: would change the answer -> harmless values. NO_EFFECT: without meaning here. NOTED: the same, but
reported. EXTENSIONS: objects whose keys are all unknown fields."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Iterable
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from quire.errors import nearest_name
from quire.server.errors import invalid_request

Structs = tuple[type[msgspec.Struct], ...]

MIN_NAME_LETTERS = 6
"""Minimum length of a name for misspellings."""
MAX_UNKNOWN_FIELDS = 64
MAX_ENTRIES = 2**17
"""Limit on entries in all lists of one request that may hold objects: messages, parts, tools, calls."""
MAX_CONTAINERS = 2**18
"""Limit on objects and lists in one request, at all depths."""
MIN_CONTAINER_BYTES = 2
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""Pattern of a string in a JSON text, which takes linear time."""


def check_fields(fields: dict[str, Any], kind: type[msgspec.Struct], *, strict: bool) -> list[str]:
    """Unknown fields of a request, sorted, as paths without indices such as `messages[].foo`.

    strict: unknown fields are errors. Raises ApiError (400) for these, near misses, unsupported fields, and more than
        MAX_ENTRIES list entries.
    """
    check = _Check(strict)
    check.visit(fields, (kind,), "", "")
    return sorted(check.unknown)


class _Check:
    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._num_entries = 0
        self.unknown: set[str] = set()

    def visit(self, value: Any, kinds: Structs, path: str, pattern: str) -> None:
        """Check an object, or the objects of a list. path: its place in the request. pattern: path without
        indices."""
        if isinstance(value, dict):
            known, nested = _shape(kinds)
            if not value.keys() <= known:
                for name in value.keys() - known:
                    if value[name] is not None:
                        self._check_name(name, value[name], kinds, path, pattern)
            for name in nested.keys() & value.keys():
                self.visit(value[name], nested[name], join(path, name), join(pattern, name))
        elif isinstance(value, list):
            self._num_entries += len(value)
            check_entries(self._num_entries, path)
            for index, entry in enumerate(value):
                if isinstance(entry, dict | list):
                    self.visit(entry, kinds, f"{path}[{index}]", f"{pattern}[]")

    def _check_name(self, name: str, value: Any, kinds: Structs, path: str, pattern: str) -> None:
        where = join(path, name)
        for kind in kinds:
            unsupported: dict[str, tuple[object, ...]] = getattr(kind, "UNSUPPORTED", {})
            if name in unsupported:
                _reject_unsupported(where, value, unsupported[name])
                return
        if any(name in getattr(kind, "NO_EFFECT", ()) for kind in kinds):
            return
        unknown = join(pattern, name)
        if unknown in self.unknown:
            return
        if any(name in getattr(kind, "NOTED", ()) for kind in kinds):
            self.unknown.add(unknown)
            return
        if any(name in getattr(kind, "EXTENSIONS", ()) for kind in kinds) and not self._strict:
            if not isinstance(value, dict):
                raise invalid_request(f"{where!r} must be an object", param=where)
            for key in value:
                self._add(join(unknown, key), join(where, key))
            return
        known = _shape(kinds)[0]
        if self._strict:
            raise invalid_request(
                f"unknown field {where!r}{nearest_name(name, known)}", param=where, code="unknown_parameter"
            )
        offered = {*known, *(other for kind in kinds for other in getattr(kind, "UNSUPPORTED", ()))}
        if (meant := near_miss(name, offered)) is not None:
            raise invalid_request(
                f"unknown field {where!r}; did you mean {meant!r}?", param=where, code="unknown_parameter"
            )
        self._add(unknown, where)

    def _add(self, unknown: str, where: str) -> None:
        if len(self.unknown) == MAX_UNKNOWN_FIELDS:
            raise invalid_request(
                f"the request has more than {MAX_UNKNOWN_FIELDS} unknown fields, {where!r} among them",
                param=where,
                code="unknown_parameter",
            )
        self.unknown.add(unknown)


def check_entries(num_entries: int, path: str) -> None:
    """Raise ApiError (400) for more than MAX_ENTRIES list entries. path: list named in the error."""
    if num_entries > MAX_ENTRIES:
        message = f"the lists of the request have more than {MAX_ENTRIES} entries, those of {path} among them"
        raise invalid_request(message, param=path)


def check_containers(fields: dict[str, msgspec.Raw]) -> None:
    """Raise ApiError (400) for more than MAX_CONTAINERS objects and lists in a body, before they are decoded."""
    num_found = 0
    for name, value in fields.items():
        num_found += _num_brackets(bytes(value))
        if num_found > MAX_CONTAINERS:
            message = f"the request has more than {MAX_CONTAINERS} objects and lists, those of {name} among them"
            raise invalid_request(message, param=name)


def _num_brackets(text: bytes) -> int:
    num_found = text.count(b"[") + text.count(b"{")
    if num_found <= MAX_CONTAINERS:
        return num_found
    bare = _STRING.sub(b"", text)
    return bare.count(b"[") + bare.count(b"{")


def near_miss(name: str, known: Iterable[str]) -> str | None:
    """Known name, of at least MIN_NAME_LETTERS, one edit away (insertion, deletion, substitution, transposition); None:
    none is."""
    for other in sorted(known):
        if len(other) >= MIN_NAME_LETTERS and abs(len(other) - len(name)) <= 1 and _is_one_edit_away(name, other):
            return other
    return None


def _is_one_edit_away(name: str, other: str) -> bool:
    if len(name) > len(other):
        name, other = other, name
    first = next((i for i, letter in enumerate(name) if letter != other[i]), len(name))
    if len(name) < len(other):
        return name[first:] == other[first + 1 :]
    rest, expected = name[first:], other[first:]
    return rest != expected and (
        rest[1:] == expected[1:] or (rest[1::-1] == expected[:2] and len(rest) > 1 and rest[2:] == expected[2:])
    )


def _reject_unsupported(where: str, value: object, harmless: tuple[object, ...]) -> None:
    if any(value == allowed and type(value) is type(allowed) for allowed in harmless):
        return
    only = f" (only {msgspec.json.encode(harmless[0]).decode()} is)" if harmless else ""
    raise invalid_request(f"{where} is not supported by this server{only}", param=where, code="unsupported_parameter")


def join(path: str, name: str | None, separator: str = ".") -> str:
    return separator.join(part for part in (path, name) if part)


@functools.cache
def _shape(
    kinds: Structs,
) -> tuple[frozenset[str], dict[str, Structs]]:
    nested: dict[str, Structs] = {}
    for kind in kinds:
        for name, hint in hints(kind).items():
            if found := tuple(structs_in(hint)):
                nested[name] = nested.get(name, ()) + found
    known = {name for kind in kinds for name in kind.__struct_encode_fields__}
    return frozenset(known | {kind.__struct_config__.tag_field or "" for kind in kinds} - {""}), nested


@functools.cache
def hints(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Type hints of a struct's fields, by wire name."""
    found = get_type_hints(kind)
    names = zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True)
    return {encoded: found[name] for name, encoded in names}


def structs_in(hint: Any) -> list[type[msgspec.Struct]]:
    """Struct types inside a type hint, through unions and lists."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return [hint]
    if get_origin(hint) in (Union, types.UnionType, list, Annotated):
        return [found for inner in get_args(hint) for found in structs_in(inner)]
    return []


_INTEGER = re.compile(r"[+-]?[0-9]{1,20}(\.0{0,20})?")
_NUMBER = re.compile(r"[+-]?([0-9]{1,20}(\.[0-9]{0,40})?|\.[0-9]{1,40})([eE][+-]?[0-9]{1,3})?")
_BOOLEANS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}


def coerce(value: Any, hint: Any) -> Any:
    """Convert numbers and booleans written as text (`"4"`, `"true"`) or as another number (`4.0`, `1` for true) to the
    type of `hint`. Other values stay unchanged."""
    origin = get_origin(hint)
    if origin is Annotated:
        return coerce(value, get_args(hint)[0])
    if origin in (Union, types.UnionType):
        return _coerce_to_one(value, get_args(hint))
    if isinstance(value, list) and origin is list:
        return [coerce(entry, get_args(hint)[0]) for entry in value]
    if isinstance(value, dict):
        if origin is dict:
            return {key: coerce(entry, get_args(hint)[1]) for key, entry in value.items()}
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            inner = hints(hint)
            return {key: coerce(entry, inner[key]) if key in inner else entry for key, entry in value.items()}
    if hint in (int, float, bool):
        return _coerce_scalar(value, hint)
    return value


def _coerce_to_one(value: Any, options: tuple[Any, ...]) -> Any:
    if type(value) in options:
        return value
    for option in options:
        if (changed := coerce(value, option)) is not value:
            return changed
    return value


def _coerce_scalar(value: Any, kind: type) -> Any:
    if isinstance(value, bool):
        return value
    text = value.strip() if isinstance(value, str) else None
    if kind is int:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return int(text.partition(".")[0]) if text is not None and _INTEGER.fullmatch(text) else value
    if kind is float:
        return float(text) if text is not None and _NUMBER.fullmatch(text) else value
    if text is not None:
        return _BOOLEANS.get(text.lower(), value)
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else value
