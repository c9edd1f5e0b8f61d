"""Lines of the files of a batch, in OpenAI's form."""

from __future__ import annotations

from typing import Any

import msgspec

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""What editors on Windows put in front of a text. A JSON text does not begin with it."""


class BatchLine(msgspec.Struct):
    """One line of the input, in OpenAI's form."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


class BatchResponse(msgspec.Struct):
    """body: None where the answer is an error, which the line has as its own."""

    status_code: int
    request_id: str
    body: msgspec.Raw | None = None


class BatchResult(msgspec.Struct):
    """One line of the output. response: None for a line that is no request; error: None where it was answered."""

    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: Any = None


def custom_id_of(line: bytes) -> str | None:
    """The custom_id of a request's line, where it can be read; also of a line that is no request."""
    try:
        value = msgspec.json.decode(line.removeprefix(BYTE_ORDER_MARK))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    found = value.get("custom_id") if isinstance(value, dict) else None
    return found if isinstance(found, str) else None
