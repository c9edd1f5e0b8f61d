"""Uploads: multipart/form-data written to disk piece by piece."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from fastapi import Request
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from quire.server.body import report_ignored
from quire.server.context import ServerContext
from quire.server.errors import ApiError, invalid_request, overloaded
from quire.server.file_store import BATCH_PURPOSE, IncomingFile, Space, StoredFile, too_large
from quire.server.protocol.files import LEAST_EXPIRY, MOST_EXPIRY

MAX_UPLOADS, MAX_UPLOADS_OF_KEY = 64, 16
"""Uploads that one process receives at a time, in all and of one key."""
RETRY_SECONDS = 1
PIECE_BYTES = 256 * 1024
MAX_PARTS, MAX_FIELD_BYTES = 16, 1024
MAX_FORM_BYTES = 64 * 1024
"""Bytes of a body besides the file's."""
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_KNOWN = ("file", "purpose", _ANCHOR, _SECONDS)


class _Terms(NamedTuple):
    purpose: str
    life: int


class Uploads:
    """Receiver of one process's uploads to /v1/files, within limits."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._num_running: Counter[str] = Counter()
        """Owner of a space -> its uploads."""

    async def receive(self, request: Request, space: Space, max_file_bytes: int) -> StoredFile:
        """Raises ApiError: 400 for a malformed form or wrong fields, 413 and 429 at the quotas, 503 for a full disk."""
        running = self._num_running
        if running.total() >= MAX_UPLOADS:
            raise overloaded(f"{MAX_UPLOADS} files are being received", RETRY_SECONDS)
        if running[space.owner] >= MAX_UPLOADS_OF_KEY:
            raise overloaded(f"{MAX_UPLOADS_OF_KEY} files of this API key are being received", RETRY_SECONDS)
        running[space.owner] += 1
        try:
            return await self._receive(request, space, max_file_bytes)
        finally:
            running[space.owner] -= 1
            if not running[space.owner]:
                del running[space.owner]

    async def _receive(self, request: Request, space: Space, max_file_bytes: int) -> StoredFile:
        form = _Form(request.headers.get("content-type", ""))
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > max_file_bytes + MAX_FORM_BYTES:
            raise too_large(max_file_bytes)
        reserved = min(max_file_bytes, int(declared)) if declared.isdigit() else max_file_bytes
        upload: IncomingFile = await space.store.in_thread(space.begin_upload, reserved)
        try:
            async for chunk in request.stream():
                form.feed(chunk)
                if len(form.content) >= PIECE_BYTES:
                    await space.store.in_thread(upload.write, form.take_content())
            await space.store.in_thread(upload.write, form.take_content())
            terms = form.terms()
            report_ignored(request, self._context, sorted(form.fields.keys() - set(_KNOWN)))
            return await space.store.in_thread(upload.keep, form.filename, terms.purpose, terms.life)
        finally:
            await space.store.in_thread(upload.close)


class _Form:
    """Form of an upload that arrives. content: bytes of the file that are not written yet."""

    def __init__(self, content_type: str) -> None:
        """content_type: with the boundary. Raises ApiError (400) for a form without a boundary."""
        _, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if not boundary:
            raise _malformed("its Content-Type has no boundary")
        self.content = bytearray()
        self.filename = ""
        self.fields: dict[str, str] = {}
        self._has_file = self._has_ended = False
        self._name = self._value = b""
        self._headers: dict[bytes, bytes] = {}
        self._header = [bytearray(), bytearray()]
        self._num_other_bytes = self._num_parts = 0
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_part_data": self._take_data,
                    "on_part_end": self._end_part,
                    "on_header_field": lambda data, start, end: self._take_header(0, data[start:end]),
                    "on_header_value": lambda data, start, end: self._take_header(1, data[start:end]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_end": self._end,
                },
            )
        except ValueError as error:  # a too long boundary
            raise _malformed(str(error)) from None

    def feed(self, chunk: bytes) -> None:
        """Parse the next bytes. Raises ApiError (400)."""
        if not chunk:
            return
        before = len(self.content)
        try:
            self._parser.write(chunk)
        except MultipartParseError as error:
            raise _malformed(str(error)) from None
        self._num_other_bytes += len(chunk) - (len(self.content) - before)
        if self._num_other_bytes > MAX_FORM_BYTES:
            raise _malformed(f"it has more than {MAX_FORM_BYTES} bytes besides the file")

    def take_content(self) -> bytes:
        piece, self.content = bytes(self.content), bytearray()
        return piece

    def terms(self) -> _Terms:
        """Purpose and life of the file, at the form's end. Raises ApiError (400)."""
        if not self._has_ended:
            raise _malformed("its end is missing")
        for name, is_there in (("file", self._has_file), ("purpose", "purpose" in self.fields)):
            if not is_there:
                raise invalid_request(f"{name} is required", param=name, code="missing_required_parameter")
        purpose = self.fields["purpose"]
        if purpose != BATCH_PURPOSE:
            raise invalid_request(f"purpose must be {BATCH_PURPOSE!r}, not {purpose!r:.100}", param="purpose")
        if self.fields.get(_ANCHOR, "created_at") != "created_at":
            raise invalid_request("expires_after[anchor] must be created_at", param="expires_after")
        seconds = self.fields.get(_SECONDS, str(MOST_EXPIRY))
        if not (seconds.isascii() and seconds.isdigit() and LEAST_EXPIRY <= int(seconds) <= MOST_EXPIRY):
            raise invalid_request(
                f"expires_after[seconds] must be from {LEAST_EXPIRY} to {MOST_EXPIRY}, not {seconds!r:.100}",
                param="expires_after",
            )
        return _Terms(purpose, int(seconds))

    # Called by the parser

    def _begin_part(self) -> None:
        self._headers, self._name, self._value = {}, b"", b""
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _malformed(f"it has more than {MAX_PARTS} parts")

    def _take_header(self, part: int, data: bytes) -> None:
        self._header[part] += data

    def _end_header(self) -> None:
        name, value = map(bytes, self._header)
        self._headers[name.lower()] = value
        self._header = [bytearray(), bytearray()]

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"")
        if self._name == b"file":
            if self._has_file:
                raise invalid_request("one file is uploaded at a time", param="file")
            self._has_file = True
            filename = options.get(b"filename", b"").decode("utf-8", "replace")
            self.filename = "".join(c if c.isprintable() else "_" for c in filename)[:255] or "file"

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == b"file":
            self.content += memoryview(data)[start:end]
        else:
            self._value += data[start:end]
            if len(self._value) > MAX_FIELD_BYTES:
                raise _malformed(f"a field has more than {MAX_FIELD_BYTES} bytes")

    def _end_part(self) -> None:
        if self._name != b"file":
            name = self._name.decode("utf-8", "replace")
            self.fields[name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._has_ended = True


def _malformed(reason: str) -> ApiError:
    return invalid_request(f"the form is not valid multipart/form-data: {reason}", code="invalid_form")
