"""POST /tokenize and /detokenize."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from quire.errors import UserError
from quire.server.body import parse_body, read_body
from quire.server.context import ServerContext
from quire.server.generation import render_chat
from quire.server.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from quire.server.responses import json_response


def add_tokenize_routes(app: FastAPI, context: ServerContext) -> None:
    tokenizer = context.tokenizer

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = parse_body(await read_body(request, context.max_body_bytes), TokenizeRequest)
        context.served_name(body.model)
        if body.messages is not None:
            tokens = (await render_chat(context.engine, body)).token_ids
        else:
            tokens = await context.engine.encode(body.prompt or "", add_special_tokens=body.special_tokens)
        strings = [tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
        return json_response(TokenizeResponse(len(tokens), context.engine.ready.max_model_len, tokens, strings))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = parse_body(await read_body(request, context.max_body_bytes), DetokenizeRequest)
        context.served_name(body.model)
        for token in body.tokens:
            if token >= tokenizer.vocab_size:
                raise UserError(
                    f"token id {token} is out of range: the vocabulary has {tokenizer.vocab_size} tokens",
                    param="tokens",
                )
        return json_response(DetokenizeResponse(tokenizer.decode(body.tokens, skip_special_tokens=False)))
