"""Parsing of request bodies into valid typed requests, or errors that name the field."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from fastapi import Request

from quire.errors import UserError
from quire.server.errors import ApiError, invalid_request
from quire.server.fields import (
    MAX_CONTAINERS,
    MIN_CONTAINER_BYTES,
    check_containers,
    check_fields,
    coerce,
    join,
)
from quire.server.protocol.common import MAX_TOKEN_ID

if TYPE_CHECKING:
    from quire.server.context import ServerContext

IGNORED_FIELDS = "quire.ignored_fields"
"""Entry of a request's scope with its unknown fields, for the response header (quire/server/headers.py)."""
MAX_SHOWN_KEYS, MAX_SHOWN_KEY = 8, 40
"""Wrong keys that an error shows, and characters of each."""
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MISSING_FIELD = "Object missing required field `"
_AT_PATH = " - at `"
_OF_A_KEY = "key` in `"

T = TypeVar("T", bound=msgspec.Struct)


def report_ignored(request: Request, context: ServerContext, names: Sequence[str]) -> None:
    """Log each field without effect once, and report all in a header."""
    if names:
        request.scope[IGNORED_FIELDS] = [*request.scope.get(IGNORED_FIELDS, ()), *names]
        context.log_unknown_fields(request.scope["path"], list(names))


async def read_body(request: Request, limit: int) -> list[bytes]:
    """Body in the parts that it came in. Raises ApiError (413) once it exceeds `limit` bytes."""
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
    return parts


def parse_body(body: bytes, kind: type[T], *, strict: bool = False) -> tuple[T, list[str]]:
    """Decode JSON into `kind`; see `parse_fields`."""
    return parse_fields(_decode_object(body), kind, strict=strict)


def parse_fields(fields: dict[str, Any], kind: type[T], *, strict: bool = False) -> tuple[T, list[str]]:
    """Convert a decoded object into `kind`; null fields count as absent. Also returns the unknown fields
    (`check_fields`). strict: refuse these and numbers in other types; otherwise `coerce` converts values. Raises
    ApiError (400), with the field as `param`, for near misses, unsupported fields and wrong types; UserError if the
    struct's own checks fail."""
    fields = {name: value for name, value in fields.items() if value is not None}
    unknown = check_fields(fields, kind, strict=strict)
    try:
        try:
            return msgspec.convert(fields, kind, str_keys=True), unknown
        except msgspec.ValidationError as error:
            if strict or isinstance(error.__cause__, UserError):
                raise
        return msgspec.convert(coerce(fields, kind), kind, str_keys=True), unknown
    except msgspec.ValidationError as error:
        raise _explain(error, fields) from None


def raw_fields(body: bytes) -> dict[str, msgspec.Raw]:
    """Fields of a JSON object, undecoded. Raises ApiError (400) for any other body."""
    with _refusing(body):
        try:
            return _FIELDS.decode(body)
        except msgspec.ValidationError:
            raise _no_object() from None


def _decode_object(body: bytes) -> dict[str, Any]:
    if len(body) > MIN_CONTAINER_BYTES * MAX_CONTAINERS:
        check_containers(raw_fields(body))
    with _refusing(body):
        value = msgspec.json.decode(body)
    if not isinstance(value, dict):
        raise _no_object()
    return value


@contextlib.contextmanager
def _refusing(body: bytes) -> Iterator[None]:
    if not body:
        raise invalid_request("the request body is empty: a JSON object is expected", code="invalid_json")
    try:
        yield
    except UnicodeDecodeError as error:
        raise invalid_request(f"the request body is not valid UTF-8: {error.reason}", code="invalid_utf8") from None
    except RecursionError:
        raise invalid_request("the request body is nested too deeply", code="invalid_json") from None
    except msgspec.MsgspecError as error:
        raise invalid_request(f"the request body is not valid JSON: {error}", code="invalid_json") from None


def _no_object() -> ApiError:
    return invalid_request("the request body must be a JSON object", code="invalid_json")


def _too_large(limit: int) -> ApiError:
    return invalid_request(
        f"the request body is larger than the limit of {limit} bytes", code="request_too_large", status=413
    )


def _explain(error: msgspec.ValidationError, fields: dict[str, Any]) -> ApiError:
    """Turn "Expected `int`, got `str` - at `$.n`" into an error whose `param` is the field's path."""
    text, path = _split_path(str(error))
    if isinstance(error.__cause__, UserError):
        return invalid_request(error.__cause__.message, param=join(path, error.__cause__.param))
    if text.startswith(_MISSING_FIELD):
        field = join(path, text[len(_MISSING_FIELD) : -1])
        return invalid_request(f"{field} is required", param=field, code="missing_required_parameter")
    text = text[0].lower() + text[1:].replace(" | null", "").replace("`", "")
    if text == f"expected int <= {MAX_TOKEN_ID}" and (path.endswith("]") or _OF_A_KEY in str(error)):
        text += " (a larger token id is out of vocabulary)"
    table = fields.get(path)
    if _AT_PATH + _OF_A_KEY in str(error) and isinstance(table, dict):
        wrong = [str(key) for key in table if not str(key).isdecimal()]
        text += "".join(f", {key[:MAX_SHOWN_KEY]!r}" for key in wrong[:MAX_SHOWN_KEYS])
    return invalid_request(join(path, text, ": "), param=path or None, code="invalid_type")


def _split_path(message: str) -> tuple[str, str]:
    """(message, field's path) from msgspec's " - at `$.path`"."""
    text, found, path = message.rpartition(_AT_PATH)
    path = path.removeprefix(_OF_A_KEY)
    if not found or not (path.startswith("$") and path.endswith("`")):
        return message, ""
    return text, path[1:-1].lstrip(".").removesuffix("[...]")
