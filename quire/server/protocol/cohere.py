"""Bodies of Cohere's /v2/embed."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.errors import UserError
from quire.server.protocol.common import Int32, ShortString
from quire.server.protocol.pooling import MAX_INPUTS, PooledFields

EmbeddingType = Literal["float", "binary", "ubinary", "base64"]


class CohereEmbedRequest(PooledFields, kw_only=True, frozen=True):
    """input_type: name of the model's prompt to put before each text. output_dimension: leading elements to keep.
    embedding_types: forms of the vectors; floats by default. truncate: cut the end of texts longer than `max_tokens` or
    the context, or refuse them ("NONE")."""

    texts: Annotated[list[str], Meta(max_length=MAX_INPUTS)] | None = None
    input_type: ShortString | None = None
    output_dimension: Int32 | None = None
    embedding_types: Annotated[list[EmbeddingType], Meta(max_length=64)] = []  # noqa: RUF012  # msgspec copies it
    truncate: Literal["NONE", "START", "END"] = "END"
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None

    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {"images": ([],), "inputs": ([],)}

    def __post_init__(self) -> None:
        if not self.texts:
            raise UserError(
                "Exactly one of texts, images, or inputs must be provided, and it must be non-empty (here: texts)",
                param="texts",
            )
        if self.truncate == "START":
            raise UserError(
                "truncate 'START' is not supported by this server (only 'END' and 'NONE')", param="truncate"
            )

    @property
    def num_kept(self) -> int | None:
        """Maximum tokens kept from a text, -1 for the model's context; None: longer texts are errors."""
        return None if self.truncate == "NONE" else self.max_tokens or -1


class CohereEmbeddings(msgspec.Struct, rename={"floats": "float"}):
    """Vectors in each requested form. binary, ubinary: bit for each element, set unless negative; eight per number,
    the highest bit first; `binary` subtracts 128."""

    floats: list[list[float]] | UnsetType = UNSET
    binary: list[list[int]] | UnsetType = UNSET
    ubinary: list[list[int]] | UnsetType = UNSET
    base64: list[str] | UnsetType = UNSET


class ApiVersion(msgspec.Struct):
    version: str = "2"


class BilledUnits(msgspec.Struct):
    input_tokens: int
    image_tokens: int = 0


class CohereMeta(msgspec.Struct):
    billed_units: BilledUnits
    api_version: ApiVersion = msgspec.field(default_factory=ApiVersion)


class CohereEmbedResponse(msgspec.Struct):
    id: str
    embeddings: CohereEmbeddings
    texts: list[str]
    meta: CohereMeta
    response_type: str = "embeddings_by_type"
