"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

import msgspec
from fastapi import FastAPI
from msgspec import UNSET, UnsetType

from quire.engine.input_processor import Prompt, num_prompt_tokens
from quire.logging import get_logger
from quire.outputs import CompletionOutput, Logprob, RequestOutput
from quire.parsers.output import OutputDelta
from quire.server.answer import Answer, Begin, Piece, add_answer_route
from quire.server.answer_size import AnswerSize, num_alternatives
from quire.server.context import SYSTEM_FINGERPRINT, ServerContext
from quire.server.generation import Terms, generate, spaced
from quire.server.logprobs import CompletionColumns, chat_logprobs, limited, prompt_logprobs
from quire.server.protocol.common import Usage
from quire.server.protocol.completion import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from quire.server.reading import read_request
from quire.server.streaming import DONE, TEXT_MARK, EventTemplate, encode_event
from quire.tokenization.infill import infill

logger = get_logger(__name__)


def add_completion_routes(app: FastAPI, context: ServerContext) -> None:
    read = partial(read_request, kind=CompletionRequest)
    add_answer_route(app, "/v1/completions", context, read, CompletionAnswer)


class CompletionAnswer(Answer[CompletionRequest]):
    ID_PREFIX = "cmpl"

    def __init__(
        self,
        context: ServerContext,
        body: CompletionRequest,
        header_id: str | None = None,
        *,
        ends_with_context: bool = False,
    ) -> None:
        """ends_with_context: see ChatAnswer; needs a single prompt."""
        super().__init__(context, body, header_id)
        self._ends_with_context = ends_with_context
        self._vocab_size = context.engine.model_config.vocab_size
        self._weight = AnswerSize(
            logprobs=None if body.logprobs is None else num_alternatives(body.logprobs, self._vocab_size),
            return_token_ids=body.return_token_ids,
            is_streamed=body.stream,
            num_listed=len(body.logprob_token_ids or ()),
        )
        self._streams_texts = (
            body.logprobs is None and body.max_tokens > 0 and not body.return_token_ids and not body.continuous_usage
        )
        """True if later chunks of the stream hold only text."""
        self._tokenizer = context.tokenizer
        self._begun: set[int] = set()
        self._columns: dict[int, CompletionColumns] = {}
        self._prompt_logprobs: dict[int, list[dict[int, Logprob] | None] | None] = {}
        """Log-probabilities by prompt. They come with the first output, for all choices of the prompt."""
        logger.debug("%s: %d prompts, user %.100r", self.response_id, len(body.prompts), body.user)

    async def complete(self) -> CompletionResponse:
        choices: dict[int, CompletionChoice] = {}
        async with aclosing(await self._outputs()) as outputs:
            async for prompt_index, output in outputs:
                for piece in self._pieces(prompt_index, output):
                    known = choices.get(piece.index)
                    choices[piece.index] = piece if known is None else _extend(known, piece)
        ordered = [choices[index] for index in sorted(choices)]
        response = self._response(ordered, self._counter.usage())
        response.metrics = self._times()
        for part in (response, *ordered):
            for name in part.__struct_fields__:
                if getattr(part, name) is UNSET:
                    setattr(part, name, None)
        return response

    async def stream(self) -> AsyncGenerator[bytes, None]:
        absent = None if self._body.include_usage else UNSET
        templates: dict[int, EventTemplate] = {}
        async with aclosing(await self._outputs()) as outputs:
            async for prompt_index, output in outputs:
                if (index := self._index_of_text(prompt_index, output)) in templates:
                    self._counter.count_output(prompt_index, output)
                    yield templates[index].event(output.outputs[0].text)
                    continue
                for piece in self._pieces(prompt_index, output):
                    usage = self._counter.usage() if self._body.continuous_usage else absent
                    yield encode_event(self._response([piece], usage))
                if index >= 0:
                    marked = CompletionChoice(index=index, text=TEXT_MARK, finish_reason=None)
                    templates[index] = EventTemplate(self._response([marked], absent))
        if self._body.include_usage:
            last = self._response([], self._counter.usage())
            last.metrics = self._times()
            yield encode_event(last)
        yield DONE

    async def events(self) -> AsyncGenerator[Begin | Piece, None]:
        """Events of a chat, with all text as content."""
        async with aclosing(await self._outputs()) as outputs:
            async for prompt_index, output in outputs:
                for completion in output.outputs:
                    index = prompt_index * self._params.n + completion.index
                    if index not in self._begun:
                        self._counter.count_output(prompt_index, output, count_completion=False)
                        yield Begin(index, output, is_first=not self._begun)
                        self._begun.add(index)
                self._counter.count_output(prompt_index, output)
                for completion in output.outputs:
                    yield self._piece(prompt_index * self._params.n + completion.index, completion)

    def _piece(self, index: int, completion: CompletionOutput) -> Piece:
        body = self._body
        return Piece(
            index,
            OutputDelta(content=completion.text),
            None
            if body.logprobs is None
            else chat_logprobs(
                completion.token_ids,
                completion.logprobs or [],
                body.logprobs,
                self._tokenizer,
                as_ids=bool(body.return_tokens_as_token_ids),
            ),
            completion.token_ids if body.return_token_ids else None,
            completion.finish_reason,
            completion.stop_reason,
        )

    def _index_of_text(self, prompt_index: int, output: RequestOutput) -> int:
        if len(output.outputs) != 1 or not self._streams_texts:
            return -1
        completion = output.outputs[0]
        return prompt_index * self._params.n + completion.index if completion.finish_reason is None else -1

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        body = self._body
        prompts: list[Prompt] = list(body.prompts)
        if body.tokenises_prompts or self._ends_with_context:
            prompts = [await self._tokenised(prompt) for prompt in body.prompts]
        limit, longest = self._params.max_tokens, self._context.engine.ready.max_model_len
        if self._ends_with_context and limit is not None and limit > longest - num_prompt_tokens(prompts[0]):
            self._params = msgspec.structs.replace(self._params, max_tokens=None)
        self._weigh(prompts)
        outputs = generate(
            self._context,
            prompts,
            self._params,
            self.engine_id,
            answer_id=self.answer_id,
            terms=Terms(body.cache_salt, body.priority, self._adapter),
            names={"prompt_token_ids": "prompt", "structured_outputs": body.constraint_field},
        )
        return spaced(outputs, body.stream_interval if body.stream else None)

    async def _tokenised(self, prompt: str | list[int]) -> Prompt:
        if not isinstance(prompt, str) or not prompt:
            return prompt
        body, engine = self._body, self._context.engine
        if body.suffix:
            texts, inputs = {"prompt": prompt, "suffix": body.suffix}, engine.input_processor
            for name, text in texts.items():
                inputs.check_text_length(text, name)

            def work() -> list[int]:
                for name, text in texts.items():
                    inputs.check_num_tokens(text, name)
                return infill(self._tokenizer, *texts.values(), add_special_tokens=body.add_special_tokens)

            return {
                "prompt_token_ids": await engine.texts.off_loop(sum(map(len, texts.values())), work),
                "prompt": prompt,
            }
        token_ids = await engine.texts.encode(
            prompt, add_special_tokens=body.add_special_tokens, is_cut=body.truncate_prompt_tokens is not None
        )
        return {"prompt_token_ids": token_ids, "prompt": prompt}

    def _weigh(self, prompts: list[Prompt]) -> None:
        body, n = self._body, self._params.n
        longest = self._context.engine.ready.max_model_len
        if body.repeats_prompts:
            keep = min(longest, body.max_kept_tokens or longest)
            num_tokens = sum(min(keep, num_prompt_tokens(prompt)) for prompt in prompts)
            scored = [
                num_alternatives(k, self._vocab_size) + 1
                for k in (body.prompt_logprobs, body.logprobs if body.echo else None)
                if k is not None
            ]
            num_texts = body.echo + body.return_token_ids
            self._weight.prompt(num_tokens, n, num_texts=num_texts, num_entries=sum(scored))
        self._weight.planned(len(prompts) * self._params.num_sequences, min(longest, body.max_tokens))

    def _response(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> CompletionResponse:
        return CompletionResponse(
            id=self.response_id,
            created=self._created,
            model=self._model,
            system_fingerprint=SYSTEM_FINGERPRINT,
            choices=choices,
            usage=usage,
        )

    def _pieces(self, prompt_index: int, output: RequestOutput) -> list[CompletionChoice]:
        generates = self._body.max_tokens > 0
        self._counter.count_output(prompt_index, output, count_completion=generates)
        self._prompt_logprobs.setdefault(prompt_index, output.prompt_logprobs)
        pieces = []
        for completion in output.outputs:
            index = prompt_index * self._params.n + completion.index
            piece = CompletionChoice(index=index, text="", finish_reason=completion.finish_reason)
            if index not in self._begun:
                self._begun.add(index)
                self._add_prompt(piece, output, self._prompt_logprobs[prompt_index])
            if generates:
                self._add_completion(piece, completion)
            elif completion.finish_reason in ("stop", "length"):
                piece.finish_reason = "length"
            pieces.append(piece)
        return pieces

    def _add_prompt(
        self, piece: CompletionChoice, output: RequestOutput, entries: list[dict[int, Logprob] | None] | None
    ) -> None:
        body, token_ids = self._body, output.prompt_token_ids
        if body.return_token_ids:
            piece.prompt_token_ids = token_ids
            piece.token_ids = []
        if body.prompt_logprobs is not None:
            piece.prompt_logprobs = prompt_logprobs(limited(entries, body.prompt_logprobs))
        if body.echo:
            # A prompt sent as token ids has no text: all its tokens are shown, special ones too.
            skips = body.skips_special and output.prompt is not None
            text = output.prompt if body.truncate_prompt_tokens is None else None
            piece.text = self._tokenizer.decode(token_ids, skips) if text is None else text
        if body.logprobs is not None:
            columns = self._columns[piece.index] = CompletionColumns(
                self._tokenizer, as_ids=bool(body.return_tokens_as_token_ids)
            )
            if body.echo:
                # A request that ended within its prompt lacks entries for the rest.
                known = list(entries or []) + [None] * (len(token_ids) - len(entries or []))
                columns.begin_text(skips, [])
                piece.logprobs = columns.append_tokens(token_ids, limited(known, body.logprobs))
            columns.begin_text(body.skips_special, token_ids)

    def _add_completion(self, piece: CompletionChoice, completion: CompletionOutput) -> None:
        piece.text += completion.text
        piece.stop_reason = completion.stop_reason
        if self._body.return_token_ids:
            piece.token_ids = completion.token_ids
        if self._body.logprobs is not None:
            new = self._columns[piece.index].append_tokens(completion.token_ids, completion.logprobs or [])
            piece.logprobs = new if piece.logprobs is None else _join(piece.logprobs, new)


def _extend(choice: CompletionChoice, piece: CompletionChoice) -> CompletionChoice:
    choice.text += piece.text
    choice.finish_reason = piece.finish_reason
    choice.stop_reason = piece.stop_reason
    if isinstance(choice.token_ids, list) and isinstance(piece.token_ids, list):
        choice.token_ids = choice.token_ids + piece.token_ids
    if piece.logprobs is not None:
        choice.logprobs = piece.logprobs if choice.logprobs is None else _join(choice.logprobs, piece.logprobs)
    return choice


def _join(left: CompletionLogprobs, right: CompletionLogprobs) -> CompletionLogprobs:
    for name in left.__struct_fields__:
        getattr(left, name).extend(getattr(right, name))
    return left
