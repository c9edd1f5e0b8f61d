"""Cohere's POST /v2/embed, for embedding models."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from functools import partial

from fastapi import FastAPI

from quire.errors import UserError
from quire.pooling_params import PoolingParams
from quire.server.context import ServerContext, new_id
from quire.server.pooling import add_pooling_route, run_texts
from quire.server.protocol.cohere import (
    BilledUnits,
    CohereEmbeddings,
    CohereEmbedRequest,
    CohereEmbedResponse,
    CohereMeta,
    EmbeddingType,
)

BITS = 8
NAMES = {
    "dimensions": "output_dimension",
    "truncate_prompt_tokens=-1": "truncate=END",
    "truncate_prompt_tokens": "max_tokens",
}
"""Engine's field names -> Cohere's, for errors."""


def add_cohere_routes(app: FastAPI, context: ServerContext) -> None:
    add_pooling_route(app, context, ("/v2/embed",), "embed", CohereEmbedRequest, _embed)


async def _embed(context: ServerContext, body: CohereEmbedRequest) -> CohereEmbedResponse:
    try:
        return await _embedded(context, body)
    except UserError as error:
        raise error.named(NAMES) from None


async def _embedded(context: ServerContext, body: CohereEmbedRequest) -> CohereEmbedResponse:
    engine, texts = context.engine, body.texts or []
    params = PoolingParams(dimensions=body.output_dimension, truncate_prompt_tokens=body.num_kept)
    prompts: list[str | list[int]] = list(texts)
    if (name := body.input_type) is not None:
        behind = partial(engine.pooling.tokens_behind, name, truncate=body.num_kept)
        prompts = [await engine.texts.off_loop(len(text), partial(behind, text)) for text in texts]
    outputs = await run_texts(context, body, params, [(each, None) for each in prompts], ["texts"] * len(texts))
    longest = max(len(output.prompt_token_ids) for output in outputs)
    if body.max_tokens is not None and longest > body.max_tokens:
        raise UserError(
            f"Input of {longest} tokens exceeds max_tokens={body.max_tokens} with truncate=NONE. Set truncate to END "
            "to allow truncation.",
            param="max_tokens",
        )
    vectors = [engine.pooling.vector(output, params) for output in outputs]
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    embeddings = in_types(vectors, body.embedding_types or ["float"])
    return CohereEmbedResponse(new_id("embd", body.request_id), embeddings, texts, CohereMeta(BilledUnits(num_tokens)))


def in_types(vectors: Sequence[list[float]], types: Sequence[EmbeddingType]) -> CohereEmbeddings:
    """Vectors in each of these forms. Raises UserError for bits of vectors whose length is not a multiple of 8."""
    found = CohereEmbeddings()
    if "float" in types:
        found.floats = list(vectors)
    if "base64" in types:
        found.base64 = [base64.b64encode(struct.pack(f"<{len(each)}f", *each)).decode() for each in vectors]
    if "binary" in types or "ubinary" in types:
        packed = [_bits(each) for each in vectors]
        if "ubinary" in types:
            found.ubinary = packed
        if "binary" in types:
            found.binary = [[number - 2 ** (BITS - 1) for number in each] for each in packed]
    return found


def _bits(vector: list[float]) -> list[int]:
    if len(vector) % BITS:
        raise UserError(
            f"the number of elements must be a multiple of {BITS} for binary embedding types, but is {len(vector)}",
            param="embedding_types",
        )
    return [
        sum((value >= 0) << (BITS - 1 - place) for place, value in enumerate(vector[start : start + BITS]))
        for start in range(0, len(vector), BITS)
    ]
