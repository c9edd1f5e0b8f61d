"""Lines of batch files, in OpenAI's form, and a file of results as the journal of a batch that goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quire.errors import UserError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""UTF-8 byte order mark, which editors on Windows write and JSON forbids."""


class BatchLine(msgspec.Struct):
    """Request of a batch. body: its fields, undecoded, because decoding a large body would hold up other requests."""

    custom_id: str
    url: str
    body: dict[str, msgspec.Raw]
    method: str = "POST"


class BatchResponse(msgspec.Struct):
    """HTTP answer to a batch's line. body: null for an error, which BatchResult holds."""

    status_code: int
    request_id: str
    body: msgspec.Raw = msgspec.Raw(b"null")


class BatchResult(msgspec.Struct):
    """Line of the output file. response: None for a line that is not a request. error: None for success."""

    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: Any = None


class _Named(msgspec.Struct):
    custom_id: str


def custom_id_of(line: bytes) -> str | None:
    """Return the custom_id of an input line if it can be read, even from an invalid request."""
    try:
        return msgspec.json.decode(line.removeprefix(BYTE_ORDER_MARK), type=_Named).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


class AnsweredLine(NamedTuple):
    """Line of a results file written before, from which a batch continues."""

    custom_id: str | None
    has_failed: bool


def read_answered(path: Path, *, is_ours: bool = False) -> list[AnsweredLine]:
    """Results in a file; a truncated last line is removed. Raises UserError for other files. is_ours: no other file is
    meant, and what follows the first wrong line is removed."""
    if not path.exists():
        return []
    found: list[AnsweredLine] = []
    with path.open("r+b") as file:
        whole = 0
        for line in file:
            try:
                answer = msgspec.json.decode(line, type=BatchResult)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                if line.endswith(b"\n") and not is_ours:
                    raise UserError(f"resume: line {len(found) + 1} of {path} is no answer", param="resume") from None
                break
            if not line.endswith(b"\n"):
                break
            found.append(AnsweredLine(answer.custom_id, answer.error is not None))
            whole += len(line)
        file.truncate(whole)
    return found


def unanswered(requests: Iterator[bytes], answered: list[AnsweredLine]) -> Iterator[bytes]:
    """Requests after the answered ones. Raises UserError if the answers belong to another file."""
    number = 0
    for index, whole in enumerate(requests):
        line = whole if index else whole.removeprefix(BYTE_ORDER_MARK)
        if number < len(answered) and line.strip():
            if custom_id_of(line) != answered[number].custom_id:
                raise UserError(f"resume: answer {number + 1} is to no request of the input file", param="resume")
            number += 1
        elif number >= len(answered):
            yield line
    if number < len(answered):
        raise UserError("resume: there are more answers than requests", param="resume")
