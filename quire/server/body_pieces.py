"""Large request bodies are decoded by the types of their fields: a value of a field that no struct has stays as it is,
and a list that is longer than its type allows is refused before its entries are decoded.

Large containers of the outer levels are decoded one entry after the other: no other thread runs while msgspec decodes,
and the event loop's has streams to serve.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from quire.server.errors import invalid_request
from quire.server.fields import check_entries, join, structs_in

PIECE_BYTES = 64 * 1024
"""A shorter text is decoded in one call."""
CONTAINER_LEVELS = 6
"""Levels of a batch of chats: the body, its conversations, their messages, a message, its parts, a part."""
PEEK_BYTES = 64
MAX_HARMLESS_BYTES = 64
"""A longer value is none of those with which a field that is not supported is accepted."""
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ARRAY = msgspec.json.Decoder(list[msgspec.Raw])

Hints = tuple[Any, ...]


def decode_known(body: bytes, kind: type[msgspec.Struct]) -> Any:
    """Decode a JSON text, an object of which is to become a `kind`. A long value of a field that its structs do not
    have stays a msgspec.Raw; a long container where its type has none becomes an empty one.

    Raises as msgspec.json.decode, and ApiError (400) for a list that is longer than its type allows.
    """
    return _decode(memoryview(body), (kind,), "", CONTAINER_LEVELS)


@dataclass(slots=True)
class _Shape:
    """JSON that may have one of several types. fields: those of structs, by their names on the wire -> types.
    extensions: fields whose names matter, one by one. entries: types of the entries of lists and tables.
    max_length: of a list; None without a limit. has_structs_inside: whether an entry of a list may be an object."""

    is_any: bool = False
    has_structs: bool = False
    has_tables: bool = False
    has_lists: bool = False
    fields: dict[str, Hints] = field(default_factory=dict)
    extensions: set[str] = field(default_factory=set)
    entries: Hints = ()
    max_length: int | None = None
    has_structs_inside: bool = False


def _decode(view: memoryview, hints: Hints, path: str, num_levels: int) -> Any:
    """The value at `path` of the body, which may have any of the types `hints`."""
    first = bytes(view[:PEEK_BYTES]).lstrip()
    if len(view) <= PIECE_BYTES or not num_levels or first[:1] not in (b"{", b"["):
        return msgspec.json.decode(view)
    shape = _shape(hints)
    if first.startswith(b"{"):
        return _decode_object(_OBJECT.decode(view), shape, path, num_levels - 1)
    if not shape.has_lists and not shape.is_any:
        _ARRAY.decode(view)
        return []
    if first[1:].lstrip()[:1] not in (b"{", b"[", b'"'):  # numbers
        return msgspec.json.decode(view)
    entries = _ARRAY.decode(view)
    if shape.max_length is not None and len(entries) > shape.max_length:
        message = f"expected array of length <= {shape.max_length}"
        raise invalid_request(join(path, message, ": "), param=path or None, code="invalid_type")
    if shape.has_structs_inside:
        check_entries(len(entries), path)
    return _decode_each(entries, shape.entries, lambda index: f"{path}[{index}]", num_levels - 1)


def _decode_each(values: list[msgspec.Raw], hints: Hints, path_of: Callable[[int], str], num_levels: int) -> list[Any]:
    """Entries of one container: short ones as many in one call as make a piece. path_of: by the place in `values`."""
    found: list[Any] = []
    num_bytes = sum(len(memoryview(value)) for value in values)
    per_piece = max(1, PIECE_BYTES * len(values) // max(1, num_bytes))
    for start in range(0, len(values), per_piece):
        run = values[start : start + per_piece]
        text = b"[" + b",".join(run) + b"]"
        if len(text) <= 2 * PIECE_BYTES:
            found += msgspec.json.decode(text)
        else:
            found += [
                _decode(memoryview(value), hints, path_of(index), num_levels) for index, value in enumerate(run, start)
            ]
    return found


def _decode_object(values: dict[str, msgspec.Raw], shape: _Shape, path: str, num_levels: int) -> dict[str, Any]:
    if not shape.has_structs:
        if not shape.has_tables and not shape.is_any:
            return {}
        names = list(values)
        found_values = _decode_each(
            list(values.values()), shape.entries, lambda index: join(path, names[index]), num_levels
        )
        return dict(zip(names, found_values, strict=True))
    found: dict[str, Any] = {}
    for name, value in values.items():
        view = memoryview(value)
        if name in shape.fields:
            found[name] = _decode(view, shape.fields[name], join(path, name), num_levels)
        elif len(view) <= MAX_HARMLESS_BYTES:
            found[name] = msgspec.json.decode(view)
        elif name in shape.extensions and bytes(view[:1]) == b"{":
            found[name] = _OBJECT.decode(view)
        else:
            found[name] = value
    return found


@functools.cache
def _shape(hints: Hints) -> _Shape:
    shape = _Shape()
    lengths: list[int | None] = []
    for hint, max_length in (option for each in hints for option in _options(each)):
        origin = get_origin(hint)
        if hint is Any:
            shape.is_any = True
            shape.entries += (Any,)
        elif isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            shape.has_structs = True
            _add_fields(shape, hint)
        elif origin is dict:
            shape.has_tables = True
            shape.entries += get_args(hint)[1:]
        elif origin is list:
            shape.has_lists = True
            shape.entries += get_args(hint)
            shape.has_structs_inside = shape.has_structs_inside or bool(structs_in(hint))
            lengths.append(max_length)
    known = [length for length in lengths if length is not None]
    shape.max_length = max(known) if known and len(known) == len(lengths) and not shape.is_any else None
    return shape


def _add_fields(shape: _Shape, kind: type[msgspec.Struct]) -> None:
    found = get_type_hints(kind, include_extras=True)
    for name, encoded in zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True):
        shape.fields[encoded] = (*shape.fields.get(encoded, ()), found[name])
    if (tag := kind.__struct_config__.tag_field) is not None:
        shape.fields[tag] = (str,)
    shape.extensions |= getattr(kind, "EXTENSIONS", frozenset())


def _options(hint: Any, max_length: int | None = None) -> Iterator[tuple[Any, int | None]]:
    """The types that a hint allows, each with the length that an annotation bounds."""
    origin = get_origin(hint)
    if origin is Annotated:
        inner, *notes = get_args(hint)
        found = [note.max_length for note in notes if isinstance(note, msgspec.Meta) and note.max_length is not None]
        yield from _options(inner, min(found, default=max_length))
    elif origin in (Union, types.UnionType):
        for option in get_args(hint):
            yield from _options(option, max_length)
    else:
        yield hint, max_length
