"""llama.cpp's API (docs/doors.md): completions and infilling, and the routes that its clients ask first."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from msgspec import UNSET

from quire.errors import UserError
from quire.pooling_params import PoolingParams
from quire.sampling_params import MAX_LOGIT_BIAS
from quire.server.auth import public
from quire.server.body import parse_fields, report_ignored
from quire.server.context import SYSTEM_FINGERPRINT, ServerContext
from quire.server.disconnect import run_until_disconnect
from quire.server.errors import ApiError, unavailable
from quire.server.generation import merged, render_chat
from quire.server.health import Health
from quire.server.json_bodies import any_type
from quire.server.llama_chat import add_llama_chat_routes, timings_of
from quire.server.logprobs import ID_MARK
from quire.server.numbered_adapters import add_numbered_adapter_routes
from quire.server.pooling import add_pooling_route, one_sequence, run_texts
from quire.server.protocol.chat import ChatLogprob, TopLogprob
from quire.server.protocol.completion import CompletionRequest
from quire.server.protocol.llama_chat import LlamaChatRequest
from quire.server.protocol.llama_cpp import (
    NAMES,
    RANDOM_SEED,
    SAMPLING,
    LlamaCompletionRequest,
    LlamaEmbedding,
    LlamaEmbeddingRequest,
    LlamaFields,
    LlamaGenerationSettings,
    LlamaInfillRequest,
    LlamaProbability,
    LlamaPrompt,
    LlamaProps,
    LlamaResponse,
    LlamaSlot,
)
from quire.server.query import truth
from quire.server.reading import read_request
from quire.server.responses import json_response
from quire.server.streaming import EventStream
from quire.server.turn import Event, Step, Turn, begin_completion
from quire.tokenization.infill import infill

SNIPPET = "\n\n--- snippet ---\n\n"
"""Mark before each text of `input_extra`, for tokenizers without a file token."""
PROCESSED = "processed_logprobs"
"""Mode that `post_sampling_probs` needs."""
FILE_MARK = "<|file_sep|>"
SIDE_BY_SIDE = 8
"""Limit of a request's prompts that run at once."""

_encoder = msgspec.json.Encoder()


def add_llama_cpp_routes(app: FastAPI, context: ServerContext) -> None:

    @app.post("/completion")
    @app.post("/completions")
    @any_type
    async def completion(request: Request) -> Response:
        body = await read_request(request, context, LlamaCompletionRequest)
        prompts = [await one_sequence(context, prompt) for prompt in body.prompts]
        if len(prompts) == 1:
            return await _answer(request, context, body, prompts[0])
        return await _answer_all(request, context, body, prompts)

    @app.post("/infill")
    @any_type
    async def infilling(request: Request) -> Response:
        body = await read_request(request, context, LlamaInfillRequest)
        return await _answer(request, context, body, await _infill_prompt(context, body))

    add_pooling_route(app, context, ("/embedding", "/embeddings"), "embed", LlamaEmbeddingRequest, _embed, any_type)

    @app.post("/apply-template")
    @any_type
    async def apply_template(request: Request) -> Response:
        body = await read_request(request, context, LlamaChatRequest)
        context.served_name(body.model)
        tools = context.formats.answer(body.with_tools).template_tools
        rendered = await render_chat(context, body, tools, body.template_inputs)
        return json_response(LlamaPrompt(rendered.text or ""))

    add_llama_chat_routes(app, context)
    add_numbered_adapter_routes(app, context)
    _add_state_routes(app, context)


def _add_state_routes(app: FastAPI, context: ServerContext) -> None:
    engine = context.engine

    @app.get("/v1/health")
    @public
    async def health() -> Response:
        context.check_alive()
        return json_response(Health("ok"))

    @app.get("/props")
    async def props() -> Response:
        defaults = {**SAMPLING, "seed": RANDOM_SEED, "n_predict": -1, **engine.model_config.sampling_defaults}
        special = context.tokenizer.special_tokens
        shows_template = context.settings.enable_tokenizer_info_endpoint
        return json_response(
            LlamaProps(
                default_generation_settings=LlamaGenerationSettings(engine.ready.max_model_len, defaults),
                total_slots=engine.max_num_seqs,
                model_alias=context.model_names[0],
                chat_template=(context.tokenizer.chat_template or "") if shows_template else "",
                modalities={"vision": engine.takes_images, "audio": False},
                bos_token=special.get("bos_token", ""),
                eos_token=special.get("eos_token", ""),
                build_info=SYSTEM_FINGERPRINT,
                is_sleeping=await engine.is_sleeping(),
            )
        )

    @app.get("/slots")
    async def slots(fail_on_no_slot: str = "false") -> Response:
        num_running = (await engine.stats()).num_running
        if truth("fail_on_no_slot", fail_on_no_slot) and num_running >= engine.max_num_seqs:
            raise unavailable("no slot available")
        length = engine.ready.max_model_len
        found = [LlamaSlot(index, length, index < num_running) for index in range(engine.max_num_seqs)]
        return Response(_encoder.encode(found), media_type="application/json")


async def _infill_prompt(context: ServerContext, body: LlamaInfillRequest) -> list[int]:
    tokenizer, inputs = context.tokenizer, context.engine.input_processor
    has_mark = tokenizer.token_to_id(FILE_MARK) is not None
    extra = "".join(
        f"{FILE_MARK}{each.filename}\n{each.text}" if has_mark else SNIPPET + each.text for each in body.input_extra
    )
    texts = {
        "input_extra": extra,
        "input_prefix": body.input_prefix,
        "input_suffix": body.input_suffix,
        "prompt": body.prompt,
    }
    for name, text in texts.items():
        inputs.check_text_length(text, name)

    def work() -> list[int]:
        for name, text in texts.items():
            inputs.check_num_tokens(text, name)
        try:
            found = infill(tokenizer, body.input_prefix, body.input_suffix, add_special_tokens=not extra)
        except UserError as error:
            raise error.named(NAMES) from None
        before = tokenizer.encode(extra, add_special_tokens=True) if extra else []
        behind = tokenizer.encode(body.prompt, add_special_tokens=False) if body.prompt else []
        return before + found + behind

    return await context.engine.texts.off_loop(sum(map(len, texts.values())), work)


async def _answer(request: Request, context: ServerContext, body: LlamaFields, prompt: str | list[int]) -> Response:
    answer = await _begin(request, context, body, prompt)
    headers = {"X-Request-Id": answer.response_id}
    if body.stream:
        return EventStream(answer.stream(), headers)
    await run_until_disconnect(request.receive, answer.run())
    return Response(answer.whole(), headers=headers, media_type="application/json")


async def _answer_all(
    request: Request, context: ServerContext, body: LlamaFields, prompts: Sequence[str | list[int]]
) -> Response:
    answers = [await _begin(request, context, body, prompt, index) for index, prompt in enumerate(prompts)]
    headers = {"X-Request-Id": answers[0].response_id}
    if body.stream:
        return EventStream(_stream_all(answers), headers)
    free = asyncio.Semaphore(SIDE_BY_SIDE)

    async def run(answer: _LlamaAnswer) -> None:
        async with free:
            await answer.run()

    async def run_all() -> None:
        tasks = [asyncio.ensure_future(run(answer)) for answer in answers]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    await run_until_disconnect(request.receive, run_all())
    return Response(b"[%b]" % b",".join(a.whole() for a in answers), headers=headers, media_type="application/json")


async def _stream_all(answers: Sequence[_LlamaAnswer]) -> AsyncGenerator[bytes, None]:
    free = asyncio.Semaphore(SIDE_BY_SIDE)

    async def one(answer: _LlamaAnswer) -> AsyncGenerator[bytes, None]:
        async with free, aclosing(answer.stream()) as events:
            async for event in events:
                yield event

    async with aclosing(merged([one(answer) for answer in answers])) as events:
        async for _, event in events:
            yield event


async def _begin(
    request: Request, context: ServerContext, body: LlamaFields, prompt: str | list[int], index: int = 0
) -> _LlamaAnswer:
    name = context.served_name(body.model)
    if body.post_sampling_probs and body.n_probs and context.engine.engine_config.logprobs_mode != PROCESSED:
        needed = f"the server needs --logprobs-mode {PROCESSED}"
        raise UserError(f"post_sampling_probs is not told: {needed}", param="post_sampling_probs")
    report_ignored(request, context, body.noted)
    defaults, longest = context.engine.model_config.sampling_defaults, context.engine.ready.max_model_len
    fields = body.to_completion(prompt, defaults, longest)
    if body.logit_bias:
        fields["logit_bias"] = await _biases(context, body)
    try:
        completion = parse_fields(fields, CompletionRequest)[0]
    except (ApiError, UserError) as error:
        raise error.named(body.names) from None
    turn = begin_completion(context, request, completion, body.names, ends_with_context=True)
    return _LlamaAnswer(context, body, turn, name, prompt, index)


async def _biases(context: ServerContext, body: LlamaFields) -> dict[int, float]:
    found: dict[int, float] = {}
    if len(body.biases) > MAX_LOGIT_BIAS:
        raise UserError(f"logit_bias must have at most {MAX_LOGIT_BIAS} entries", param="logit_bias")
    for key, bias in body.biases:
        tokens = [key] if isinstance(key, int) else await context.engine.texts.encode(key, add_special_tokens=False)
        found |= dict.fromkeys(tokens, bias)
        if len(found) > MAX_LOGIT_BIAS:
            break  # SamplingParams refuses them
    return found


class _LlamaAnswer:
    """Answer that ends at its first line break after `t_max_predict_ms`."""

    def __init__(
        self, context: ServerContext, body: LlamaFields, turn: Turn, model: str, prompt: str | list[int], index: int
    ) -> None:
        self._context, self._tokenizer = context, context.tokenizer
        self._body, self._turn, self._model = body, turn, model
        self._prompt, self._index = prompt, index
        self.response_id = turn.response_id
        self._is_silent = body.n_predict == 0
        self._text: list[str] = []
        self._num_told = 0
        self._first = 0.0
        self._is_late = False

    async def run(self) -> None:
        async with aclosing(self._events()) as events:
            async for _ in events:
                pass

    async def stream(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._events()) as events:
            async for event in events:
                if event.step is Step.GROW and not self._is_silent:
                    piece = self._piece(event.piece)
                    if self._body.n_probs:
                        piece.completion_probabilities = [self._probability(entry) for entry in event.logprobs]
                    yield b"data: %b\n\n" % self._told(piece)
        yield b"data: %b\n\n" % self._told(self._last(""))

    def whole(self) -> bytes:
        last = self._last("".join(self._text))
        if self._body.n_probs and not self._is_silent:
            entries = (entry for segment in self._turn.segments for entry in segment.logprobs)
            last.completion_probabilities = [self._probability(entry) for entry in entries]
        return self._told(last)

    async def _events(self) -> AsyncGenerator[Event, None]:
        limit = self._body.t_max_predict_ms
        async with aclosing(self._turn.events()) as events:
            async for event in events:
                if event.step is Step.GROW:
                    self._first = self._first or time.monotonic()
                    self._text.append("" if self._is_silent else event.piece)
                yield event
                if limit and self._first and "\n" in "".join(self._text[-1:]):
                    self._is_late = 1000 * (time.monotonic() - self._first) > limit
                    if self._is_late:
                        return

    def _piece(self, text: str) -> LlamaResponse:
        usage = self._turn.usage
        return LlamaResponse(
            index=self._index,
            content=text,
            tokens=self._new_tokens(),
            stop=False,
            tokens_predicted=usage.completion_tokens,
            tokens_evaluated=usage.prompt_tokens,
        )

    def _last(self, text: str) -> LlamaResponse:
        turn, usage = self._turn, self._turn.usage
        num_predicted = 0 if self._is_silent else usage.completion_tokens
        stop_type = {"stop": "eos", "length": "limit"}.get(turn.finish_reason, "limit" if self._is_late else "none")
        return LlamaResponse(
            index=self._index,
            content=text,
            tokens=self._new_tokens(),
            stop=True,
            model=self._model,
            tokens_predicted=num_predicted,
            tokens_evaluated=usage.prompt_tokens,
            has_new_line="\n" in "".join(self._text),
            truncated=usage.prompt_tokens + num_predicted >= self._context.engine.ready.max_model_len,
            stop_type="word" if turn.stop_string is not None else stop_type,
            stopping_word=turn.stop_string or "",
            tokens_cached=usage.num_cached,
            generation_settings=self._settings(),
            prompt=self._prompt_text() if self._tells("prompt") else UNSET,
            timings=timings_of(usage, turn.times, num_predicted),
        )

    def _settings(self) -> dict[str, Any]:
        params, body = self._turn.params, self._body
        names = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "ignore_eos")
        biases: dict[int, float | None] = dict(params.logit_bias or {})
        if params.ignore_eos:  # None: minus infinity
            biases |= dict.fromkeys(self._tokenizer.ends(self._context.engine.model_config.eos_token_ids))
        return {name: getattr(params, name) for name in names} | {
            "repeat_penalty": params.repetition_penalty,
            "seed": RANDOM_SEED if params.seed is None else params.seed,
            "stop": params.stop or [],
            "n_predict": -1 if body.n_predict is None else body.n_predict,
            "n_probs": body.n_probs,
            "logit_bias": [{"token": token, "bias": bias} for token, bias in biases.items()],
            "adaptive_target": -1.0,  # off
            "adaptive_decay": 0.9,
            "stream": body.stream,
        }

    def _prompt_text(self) -> str:
        given = self._prompt
        return given if isinstance(given, str) else self._tokenizer.decode(given, skip_special_tokens=False)

    def _probability(self, entry: ChatLogprob | TopLogprob) -> LlamaProbability:
        token = int(entry.token.removeprefix(ID_MARK))
        found = LlamaProbability(id=token, token=self._tokenizer.token_text(token), bytes=entry.bytes or [])
        others = None if isinstance(entry, TopLogprob) else [self._probability(each) for each in entry.top_logprobs]
        if self._body.post_sampling_probs:
            found.prob = math.exp(entry.logprob)
            found.top_probs = UNSET if others is None else [each for each in others if each.prob]
        else:
            found.logprob, found.top_logprobs = entry.logprob, UNSET if others is None else others
        return found

    def _new_tokens(self) -> list[int]:
        tells = (self._body.return_tokens or self._body.stream) and not self._is_silent
        found = self._turn.token_ids[self._num_told :] if tells else []
        self._num_told += len(found)
        return found

    def _tells(self, name: str) -> bool:
        return not self._body.response_fields or name in self._body.response_fields

    def _told(self, answer: LlamaResponse) -> bytes:
        wanted = self._body.response_fields
        if not wanted or not answer.stop:
            return _encoder.encode(answer)
        fields = msgspec.to_builtins(answer)
        found = {path: value for path in wanted if (value := _at(fields, path)) is not None}
        return _encoder.encode(found)


def _at(fields: dict[str, Any], path: str) -> Any:
    value: Any = fields
    for name in path.split("/"):
        value = value.get(name) if isinstance(value, dict) else None
    return value


async def _embed(context: ServerContext, body: LlamaEmbeddingRequest) -> Response:
    params = PoolingParams(normalize=False if body.embd_normalize == -1 else None)
    texts = [(await one_sequence(context, text), None) for text in body.texts]
    outputs = await run_texts(context, body, params, texts, [body.field_name] * len(texts))
    found = [
        LlamaEmbedding(index, [context.engine.pooling.vector(output, params)]) for index, output in enumerate(outputs)
    ]
    return Response(_encoder.encode(found), media_type="application/json")
