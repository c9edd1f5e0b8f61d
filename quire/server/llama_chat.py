"""llama.cpp's POST /chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

import msgspec
from fastapi import FastAPI, Request, Response

from quire.parsers.output import OutputDelta
from quire.server.answer import Begin, Piece, add_answer_route
from quire.server.body import report_ignored
from quire.server.chat import ChatAnswer
from quire.server.context import ServerContext
from quire.server.json_bodies import any_type
from quire.server.protocol.chat import ChatChunkChoice, ChatRequest, Delta
from quire.server.protocol.common import AnswerTimes, Usage
from quire.server.protocol.llama_chat import (
    LlamaBegin,
    LlamaBeginDelta,
    LlamaChatChunk,
    LlamaChatRequest,
    LlamaChatResponse,
)
from quire.server.protocol.llama_cpp import LlamaTimings
from quire.server.protocol.responses import InputTokens
from quire.server.reading import read_request
from quire.server.responses import json_response
from quire.server.streaming import DONE, encode_event
from quire.server.turn import count_prompt_tokens


def add_llama_chat_routes(app: FastAPI, context: ServerContext) -> None:
    answer = partial(LlamaChatAnswer, ends_with_context=True)
    add_answer_route(app, "/chat/completions", context, _read, answer, any_type)

    @app.post("/chat/completions/input_tokens")
    @any_type
    async def count_tokens(request: Request) -> Response:
        body = await read_request(request, context, LlamaChatRequest)
        context.served_name(body.model)
        return json_response(InputTokens(await count_prompt_tokens(context, body.with_tools, body.names)))


async def _read(request: Request, context: ServerContext) -> ChatRequest:
    body = await read_request(request, context, LlamaChatRequest)
    report_ignored(request, context, body.noted)
    return body.settled(context.engine.model_config.sampling_defaults)


class LlamaChatAnswer(ChatAnswer):
    """Chat completion with `timings`. A stream's first content is null, its end has none."""

    async def complete(self) -> LlamaChatResponse:
        found = msgspec.structs.asdict(await super().complete())
        return LlamaChatResponse(**found, timings=timings_of(self.usage, self.times))

    async def stream(self) -> AsyncGenerator[bytes, None]:
        last: LlamaChatChunk | None = None
        async with aclosing(self.events()) as events:
            async for event in events:
                if last is not None:  # another choice goes on
                    yield encode_event(last)
                    last = None
                if isinstance(event, Begin):
                    yield self._role_event(event)
                    if echoed := self._body.echoed(self._role):
                        delta = Delta(content=echoed)
                        yield encode_event(self._chunk([ChatChunkChoice(index=event.choice, delta=delta)]))
                elif event.finish_reason is None:
                    yield encode_event(self._chunk([self._written(event)]))
                else:
                    if event.delta or event.token_ids or (event.logprobs and event.logprobs.content):
                        text = event._replace(finish_reason=None, stop_reason=None)
                        yield encode_event(self._chunk([self._written(text)]))
                    end = Piece(event.choice, OutputDelta(), None, None, event.finish_reason, event.stop_reason)
                    last = self._chunk([self._written(end)])
        if last is not None and self._body.include_usage:
            yield encode_event(last)
            last = self._chunk([])
            last.usage, last.metrics = self.usage, self._times()
        if last is not None:
            last.timings = timings_of(self.usage, self.times)
            yield encode_event(last)
        yield DONE

    def _role_event(self, event: Begin) -> bytes:
        begin = LlamaBegin(event.choice, LlamaBeginDelta(self._role))
        chunk = self._chunk([begin])  # type: ignore[list-item]  # encoded alone
        if event.is_first:
            self._add_prompt(chunk, event.output)
        return encode_event(chunk)

    def _chunk(self, choices: list[ChatChunkChoice]) -> LlamaChatChunk:
        return LlamaChatChunk(**msgspec.structs.asdict(super()._chunk(choices)))


def timings_of(usage: Usage, times: AnswerTimes | None, num_predicted: int | None = None) -> LlamaTimings:
    """num_predicted: tokens told, if not all."""
    num_prompt = usage.prompt_tokens - usage.num_cached
    num_predicted = usage.completion_tokens if num_predicted is None else num_predicted
    times = times or AnswerTimes()
    prompt_ms, predicted_ms = times.time_to_first_token_ms or 0.0, times.generation_time_ms or 0.0
    return LlamaTimings(
        usage.num_cached,
        num_prompt,
        prompt_ms,
        *_rates(num_prompt, prompt_ms),
        num_predicted,
        predicted_ms,
        *_rates(num_predicted, predicted_ms),
    )


def _rates(count: int, milliseconds: float) -> tuple[float, float]:
    if not count or not milliseconds:
        return 0.0, 0.0
    return milliseconds / count, 1000 * count / milliseconds
