"""POST /tokenize and /detokenize. Input is limited by the model's context; long work leaves the event loop."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Request, Response

from quire.errors import UserError
from quire.server.auth import Endpoint
from quire.server.context import ServerContext
from quire.server.generation import render_chat
from quire.server.json_bodies import any_type
from quire.server.protocol.llama_cpp import LlamaPiece, LlamaTokens
from quire.server.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from quire.server.reading import read_request
from quire.server.responses import json_response
from quire.server.settings import LLAMA_CPP


def _as_it_is(endpoint: Endpoint) -> Endpoint:
    return endpoint


def add_tokenize_routes(app: FastAPI, context: ServerContext) -> None:
    engine, tokenizer = context.engine, context.tokenizer
    longest = engine.ready.max_model_len
    # llama.cpp's clients send JSON under any name.
    takes_bodies: Callable[[Endpoint], Endpoint] = any_type if LLAMA_CPP in context.settings.doors else _as_it_is

    @app.post("/tokenize")
    @takes_bodies
    async def tokenize(request: Request) -> Response:
        body = await read_request(request, context, TokenizeRequest)
        context.served_name(body.model)
        if body.content is not None:
            return json_response(await _in_llama_cpps_words(context, body, body.content))
        if body.messages is not None:
            tools = [tool.to_dict() for tool in body.tools] or None
            tokens = (await render_chat(context, body, tools, body.template_inputs)).token_ids
        else:
            tokens = await engine.texts.encode(body.prompt or "", add_special_tokens=body.special_tokens)
        strings = None
        if body.return_token_strs:
            entry = tokenizer.backend.id_to_token
            strings = await engine.texts.off_loop(len(tokens), lambda: [entry(token) or "" for token in tokens])
        return json_response(TokenizeResponse(len(tokens), longest, tokens, strings))

    @app.post("/detokenize")
    @takes_bodies
    async def detokenize(request: Request) -> Response:
        body = await read_request(request, context, DetokenizeRequest)
        context.served_name(body.model)
        # A token may stand for a hundred characters, so that the answer would be many times what was sent.
        if len(body.tokens) > longest:
            raise UserError(
                f"at most {longest} tokens are allowed, the model's context, not {len(body.tokens)}", param="tokens"
            )
        largest = max(body.tokens, default=0)
        if largest >= tokenizer.vocab_size:
            raise UserError(
                f"token id {largest} is out of vocabulary (0 to {tokenizer.vocab_size - 1})", param="tokens"
            )
        text = await engine.texts.off_loop(
            len(body.tokens), lambda: tokenizer.decode(body.tokens, skip_special_tokens=False)
        )
        return json_response(DetokenizeResponse(text, text))


async def _in_llama_cpps_words(context: ServerContext, body: TokenizeRequest, text: str) -> LlamaTokens:
    tokens = await context.engine.texts.encode(text, add_special_tokens=body.add_special)
    if not body.with_pieces:
        return LlamaTokens(tokens)
    bytes_of = context.tokenizer.token_bytes

    def piece(token: int) -> LlamaPiece:
        found = bytes_of(token)
        try:
            return LlamaPiece(token, found.decode())
        except UnicodeDecodeError:
            return LlamaPiece(token, list(found))

    def work() -> list[LlamaPiece]:
        return [piece(token) for token in tokens]

    return LlamaTokens(await context.engine.texts.off_loop(len(tokens), work))
