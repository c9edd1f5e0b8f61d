"""Files and batches, in OpenAI's form."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from quire.server.protocol.common import RequestStruct

LEAST_EXPIRY, MOST_EXPIRY = 3600, 30 * 24 * 3600
"""Bounds of a file's life, in seconds; the second is the default."""
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512

Seconds = Annotated[int, Meta(ge=LEAST_EXPIRY, le=MOST_EXPIRY)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=MAX_METADATA_KEY)], Annotated[str, Meta(max_length=MAX_METADATA_VALUE)]],
    Meta(max_length=MAX_METADATA),
]


class FileObject(msgspec.Struct):
    """File of a client. bytes: its size. Times are Unix times in seconds."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"


class FileList(msgspec.Struct):
    data: list[FileObject]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None
    object: str = "list"


class FileDeleted(msgspec.Struct):
    id: str
    deleted: bool = True
    object: str = "file"


class FileUpload(msgspec.Struct):
    """Fields of an upload, which is multipart/form-data. file: content. expires_after: as `expires_after[anchor]`
    (`created_at`) and `expires_after[seconds]`."""

    file: str
    purpose: str


class ExpiresAfter(RequestStruct, kw_only=True, frozen=True):
    """Field of uploads and batches. seconds: life of a file from its creation."""

    anchor: Literal["created_at"] = "created_at"
    seconds: Seconds


class BatchRequest(RequestStruct, kw_only=True, frozen=True):
    """Batch to begin. completion_window: hours until what is not answered expires, such as `24h`."""

    input_file_id: Annotated[str, Meta(max_length=256)]
    endpoint: Annotated[str, Meta(max_length=256)]
    completion_window: Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,2}h$(?!\n)")]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchError(msgspec.Struct):
    """Reason why an input file is refused. line: number in the file, from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct):
    data: list[BatchError]
    object: str = "list"


class RequestCounts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, kw_only=True):
    """State of a batch. Times are Unix times in seconds."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, str] | None = None


class BatchList(msgspec.Struct):
    data: list[BatchObject]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None
    object: str = "list"
