"""From the bytes of a request body to one parsed type that can only be valid, or an error that names the field."""

from __future__ import annotations

import re
import types
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from fastapi import Request

from quire.errors import UserError, nearest_name
from quire.server.errors import ApiError, invalid_request
from quire.server.protocol.common import RequestStruct

_UNKNOWN_FIELD = "Object contains unknown field `"
_MISSING_FIELD = "Object missing required field `"
_AT_PATH = " - at `"
_OF_A_KEY = "key` in `"
_PATH_STEP = re.compile(r"\.([^.\[\]]+)|\[[^\]]*\]")


T = TypeVar("T", bound=RequestStruct)


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body of at most `limit` bytes. A larger one raises a 413 error as soon as that is known."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
    return b"".join(parts)


def parse_body(body: bytes, kind: type[T]) -> T:
    """Decode JSON into `kind`. Fields that are null count as absent.

    Raises ApiError (400) for what is not JSON, unknown fields (nearest name suggested), fields that are not supported
    and wrong types, with the field as `param`; UserError where the struct's own checks fail.
    """
    fields = {name: value for name, value in _decode_object(body).items() if value is not None}
    reject_unsupported(fields, kind.UNSUPPORTED)
    for name in fields:
        if name not in kind.__struct_fields__:
            raise _unknown_field(name, name, kind.__struct_fields__)
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _explain(error, kind) from None


def reject_unsupported(fields: dict[str, Any], unsupported: dict[str, tuple[object, ...]]) -> None:
    """Remove known fields whose value changes nothing; raise a 400 error for one that asks for what is not there."""
    for name, harmless in unsupported.items():
        if name not in fields:
            continue
        value = fields[name]
        if not any(value == allowed and type(value) is type(allowed) for allowed in harmless):
            only = f" (only {msgspec.json.encode(harmless[0]).decode()} is)" if harmless else ""
            raise invalid_request(
                f"{name} is not supported by this server{only}", param=name, code="unsupported_parameter"
            )
        del fields[name]


def _decode_object(body: bytes) -> dict[str, Any]:
    if not body:
        raise invalid_request("the request body is empty: a JSON object is expected", code="invalid_json")
    try:
        value = msgspec.json.decode(body)
    except UnicodeDecodeError as error:
        raise invalid_request(f"the request body is not valid UTF-8: {error.reason}", code="invalid_utf8") from None
    except RecursionError:
        raise invalid_request("the request body is nested too deeply", code="invalid_json") from None
    except msgspec.MsgspecError as error:
        raise invalid_request(f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise invalid_request("the request body must be a JSON object", code="invalid_json")
    return value


def _too_large(limit: int) -> ApiError:
    return invalid_request(
        f"the request body is larger than the limit of {limit} bytes", code="request_too_large", status=413
    )


def _unknown_field(name: str, path: str, known: tuple[str, ...]) -> ApiError:
    return invalid_request(f"unknown field {path!r}{nearest_name(name, known)}", param=path, code="unknown_parameter")


def _explain(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> ApiError:
    """Turn "Expected `int`, got `str` - at `$.n`" into an error whose `param` is the path of the field."""
    text, path = _split_path(str(error))
    if isinstance(error.__cause__, UserError):
        return invalid_request(error.__cause__.message, param=_join(path, error.__cause__.param))
    if text.startswith(_UNKNOWN_FIELD):
        name = text[len(_UNKNOWN_FIELD) : -1]
        return _unknown_field(name, _join(path, name), _fields_at(kind, path))
    if text.startswith(_MISSING_FIELD):
        field = _join(path, text[len(_MISSING_FIELD) : -1])
        return invalid_request(f"{field} is required", param=field, code="missing_required_parameter")
    text = text[0].lower() + text[1:].replace(" | null", "").replace("`", "")
    return invalid_request(_join(path, text, ": "), param=path or None, code="invalid_type")


def _split_path(message: str) -> tuple[str, str]:
    """(what is wrong, path of the field) of msgspec's " - at `$.path`", both without its marks.

    The path is looked for from the end, in time proportional to the message: what comes before it may quote a field's
    name, which is the client's and may hold anything. The path itself holds our names and indices only.
    """
    text, found, path = message.rpartition(_AT_PATH)
    path = path.removeprefix(_OF_A_KEY)
    if not found or not (path.startswith("$") and path.endswith("`")):
        return message, ""
    return text, path[1:-1].lstrip(".").removesuffix("[...]")


def _join(path: str, name: str | None, separator: str = ".") -> str:
    return separator.join(part for part in (path, name) if part)


def _fields_at(kind: type[msgspec.Struct], path: str) -> tuple[str, ...]:
    """Names of the fields that an object at `path` (such as `messages[0].content[1]`) may have."""
    structs = [kind]
    for step in _PATH_STEP.finditer("." + path if path else ""):
        if step[1] is not None:
            structs = [found for s in structs for found in _structs_in(get_type_hints(s).get(step[1]))]
    return tuple(name for s in structs for name in s.__struct_fields__)


def _structs_in(hint: Any) -> list[type[msgspec.Struct]]:
    """The struct types inside a type hint, through unions and lists."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return [hint]
    if get_origin(hint) in (Union, types.UnionType, list, Annotated):
        return [found for inner in get_args(hint) for found in _structs_in(inner)]
    return []
