from __future__ import annotations

import hashlib
from pathlib import Path

from quire.server.batch import DUPLICATE, InvalidLineError, read_line
from quire.server.batch_lines import BYTE_ORDER_MARK
from quire.server.protocol.files import BatchError

MAX_LINES = 50_000
MAX_CUSTOM_ID = 512
MAX_ERRORS = 100
"""Errors listed; a check ends there."""
FRAME_BYTES = 64 * 1024
"""Bytes of a line besides its body."""


def check_input(path: Path, endpoint: str, max_body_bytes: int) -> tuple[int, list[BatchError]]:
    """Number of requests of a batch's file, and its errors. Memory holds one line."""
    errors: list[BatchError] = []
    seen: set[bytes] = set()
    total = number = 0
    limit = max_body_bytes + FRAME_BYTES
    with path.open("rb") as file:
        while (line := file.readline(limit + 1)) and len(errors) < MAX_ERRORS:
            number += 1
            if len(line) > limit:
                errors.append(BatchError("line_too_long", f"a line may have {limit} bytes", number))
                break
            line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
            if not line.strip():
                continue
            total += 1
            if total > MAX_LINES:
                errors.append(BatchError("too_many_requests", f"a batch may have {MAX_LINES} requests", number))
                break
            if (error := _error(line, endpoint, seen)) is not None:
                error.line = number
                errors.append(error)
    if not total:
        errors.append(BatchError("empty_file", "the file has no requests"))
    return total, errors


def _error(line: bytes, endpoint: str, seen: set[bytes]) -> BatchError | None:
    """Fault of a line, None without one. seen: digests of earlier lines' custom_ids, to which this line's is added."""
    try:
        request = read_line(line)
    except InvalidLineError as error:
        return BatchError(error.code, error.message)
    if request.url != endpoint:
        return BatchError("mismatched_url", f"the url is {request.url}, the batch's endpoint {endpoint}", param="url")
    if len(request.custom_id) > MAX_CUSTOM_ID:
        message = f"custom_id may have {MAX_CUSTOM_ID} characters"
        return BatchError("invalid_custom_id", message, param="custom_id")
    digest = hashlib.blake2b(request.custom_id.encode(errors="surrogatepass"), digest_size=16).digest()
    if digest in seen:
        message = f"an earlier line has the custom_id {request.custom_id!r:.100}"
        return BatchError(DUPLICATE, message, param="custom_id")
    seen.add(digest)
    return None
