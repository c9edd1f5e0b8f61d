"""Lines of batch files, in OpenAI's form."""

from __future__ import annotations

from typing import Any

import msgspec

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""UTF-8 byte order mark, which editors on Windows write and JSON forbids."""


class BatchLine(msgspec.Struct):
    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


class BatchResponse(msgspec.Struct):
    """body: None for an error, which BatchResult holds."""

    status_code: int
    request_id: str
    body: msgspec.Raw | None = None


class BatchResult(msgspec.Struct):
    """Line of the output file. response: None for a line that is not a request. error: None for success."""

    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: Any = None


def custom_id_of(line: bytes) -> str | None:
    """Return the custom_id of an input line if it can be read, even from an invalid request."""
    try:
        value = msgspec.json.decode(line.removeprefix(BYTE_ORDER_MARK))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    found = value.get("custom_id") if isinstance(value, dict) else None
    return found if isinstance(found, str) else None
