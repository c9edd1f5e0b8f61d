"""Anthropic's Messages API, answered by the chat endpoint."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.types import Scope

from quire.server.body import report_ignored
from quire.server.chat import AskedRoute
from quire.server.context import ServerContext
from quire.server.disconnect import run_until_disconnect
from quire.server.errors import MESSAGES_PATH, ApiError, error_body
from quire.server.protocol.anthropic import (
    NAMES,
    AnswerBlock,
    CountTokensRequest,
    MessageResponse,
    MessagesRequest,
    MessageUsage,
    TextBlock,
    ThinkingBlock,
    TokenCount,
    ToolUseBlock,
)
from quire.server.protocol.messages import found_messages
from quire.server.reading import read_request
from quire.server.responses import json_response
from quire.server.streaming import EventStream
from quire.server.turn import Event, Kind, Segment, Step, Turn, begin_turn, chat_body, count_prompt_tokens

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

_encoder = msgspec.json.Encoder()


def add_message_routes(app: FastAPI, context: ServerContext) -> None:
    reasons = context.formats.reasoning is not None

    @app.post(MESSAGES_PATH)
    async def create(request: Request) -> Response:
        body = await read_request(request, context, MessagesRequest)
        _report(request, context, body)
        model = context.served_name(body.model)
        chat = chat_body(body.to_chat(reasons=reasons), found_messages(body.messages), NAMES)
        asked = AskedRoute("other", is_streamed=body.stream)
        turn = begin_turn(context, request, chat, NAMES, asked=asked, ends_with_context=True)
        answer = _MessageAnswer(turn, model, body.max_tokens)
        headers = {"X-Request-Id": turn.response_id, "request-id": turn.response_id}
        if body.stream:
            return EventStream(answer.stream(), headers, error_event=_error_event)
        return json_response(await run_until_disconnect(request.receive, answer.complete()), headers)

    @app.post(f"{MESSAGES_PATH}/count_tokens")
    async def count_tokens(request: Request) -> Response:
        body = await read_request(request, context, CountTokensRequest)
        context.served_name(body.model)
        chat = chat_body(body.to_chat(reasons=reasons), found_messages(body.messages), NAMES)
        return json_response(TokenCount(await count_prompt_tokens(context, chat, NAMES)))


def _report(request: Request, context: ServerContext, body: CountTokensRequest) -> None:
    if ignored := body.ignored(reasons=context.formats.reasoning is not None):
        report_ignored(request, context, ignored)


class _MessageAnswer:
    def __init__(self, turn: Turn, model: str, max_tokens: int) -> None:
        self._turn = turn
        self._message_id = "msg_" + turn.response_id.partition("-")[2]
        self._model = model
        self._max_tokens = max_tokens

    async def complete(self) -> MessageResponse:
        await self._turn.run()
        return self._message([_block(segment) for segment in self._turn.segments])

    async def stream(self) -> AsyncGenerator[bytes, None]:
        turn = self._turn
        async with aclosing(turn.events()) as events:
            async for event in events:
                yield self._write(event)
        reason, sequence = self._end()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield _event("message_delta", delta=delta, usage=self._usage())
        yield _event("message_stop")

    def _write(self, event: Event) -> bytes:
        if event.segment is None:
            return _event("message_start", message=self._message([], is_begun=True)) + _event("ping")
        segment, index = event.segment, event.segment.index
        match event.step:
            case Step.OPEN:
                return _event("content_block_start", index=index, content_block=_block(segment.as_opened()))
            case Step.GROW:
                return _event("content_block_delta", index=index, delta=_delta(segment.kind, event.piece))
        return _event("content_block_stop", index=index)

    def _message(self, content: list[AnswerBlock], *, is_begun: bool = False) -> MessageResponse:
        reason, sequence = (None, None) if is_begun else self._end()
        return MessageResponse(
            id=self._message_id,
            model=self._model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=self._usage(),
        )

    def _end(self) -> tuple[str, str | None]:
        turn = self._turn
        if turn.finish_reason == "stop" and turn.stop_string is not None:
            return "stop_sequence", turn.stop_string
        if turn.finish_reason == "stop" and any(segment.kind is Kind.CALL for segment in turn.segments):
            return "tool_use", None  # a tool that the request forced
        if turn.finish_reason == "length" and turn.usage.completion_tokens < self._max_tokens:
            return "model_context_window_exceeded", None
        return STOP_REASONS.get(turn.finish_reason, "end_turn"), None

    def _usage(self) -> MessageUsage:
        usage = self._turn.usage
        return MessageUsage(usage.prompt_tokens - usage.num_cached, usage.completion_tokens, usage.num_cached)


def _block(segment: Segment) -> AnswerBlock:
    match segment.kind:
        case Kind.TEXT:
            return TextBlock(segment.text)
        case Kind.REASONING:
            return ThinkingBlock(segment.text)
    return ToolUseBlock(segment.call_id, segment.name, segment.arguments)


def _delta(kind: Kind, piece: str) -> dict[str, str]:
    match kind:
        case Kind.TEXT:
            return {"type": "text_delta", "text": piece}
        case Kind.REASONING:
            return {"type": "thinking_delta", "thinking": piece}
    return {"type": "input_json_delta", "partial_json": piece}


def _event(name: str, /, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encoder.encode({"type": name, **fields}))


def _error_event(error: ApiError, scope: Scope) -> bytes:
    return b"event: error\ndata: %b\n\n" % error_body(error, scope)
