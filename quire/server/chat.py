"""POST /v1/chat/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from typing import NamedTuple

import msgspec
from fastapi import FastAPI
from msgspec import UNSET, UnsetType

from quire.errors import UserError
from quire.logging import get_logger
from quire.metrics.families import ToolReading
from quire.outputs import CompletionOutput, RequestOutput
from quire.parsers.output import OutputDelta
from quire.server.answer import Answer, Begin, Piece, add_answer_route
from quire.server.answer_format import ChoiceText, to_delta
from quire.server.answer_size import AnswerSize, num_alternatives
from quire.server.context import SYSTEM_FINGERPRINT, ServerContext
from quire.server.generation import Terms, generate, render_chat, spaced
from quire.server.logprobs import chat_logprobs, prompt_logprobs
from quire.server.protocol.chat import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatRequest,
    ChatResponse,
    Delta,
)
from quire.server.protocol.common import Usage
from quire.server.protocol.messages import found_messages
from quire.server.reading import read_request
from quire.server.streaming import DONE, encode_event

logger = get_logger(__name__)


def add_chat_routes(app: FastAPI, context: ServerContext) -> None:
    add_answer_route(app, "/v1/chat/completions", context, partial(read_request, kind=ChatRequest), ChatAnswer)


class AskedRoute(NamedTuple):
    """Route that asked for an answer, for its metrics, and whether it streams. keeps_all: the answer is kept all the
    same."""

    request_type: str
    is_streamed: bool
    keeps_all: bool = False


class ChatAnswer(Answer[ChatRequest]):
    """Answer to one conversation. `complete` and `stream` have OpenAI's form; the other APIs (turn.py) make theirs from
    `events`."""

    ID_PREFIX = "chatcmpl"

    def __init__(
        self,
        context: ServerContext,
        body: ChatRequest,
        header_id: str | None = None,
        *,
        ends_with_context: bool = False,
        weight: AnswerSize | None = None,
        asked: AskedRoute | None = None,
    ) -> None:
        """ends_with_context: cut max_tokens that exceed the context instead of refusing them. weight: AnswerSize that
        this and other answers share. asked: derived from the body if None."""
        super().__init__(context, body, header_id)
        self._asked = asked or AskedRoute("chat_completions", is_streamed=body.stream)
        self._ends_with_context = ends_with_context
        self.weight = weight or AnswerSize(
            logprobs=self._num_alternatives(self._params.logprobs),
            return_token_ids=body.return_token_ids,
            is_streamed=self._asked.is_streamed and not self._asked.keeps_all,
            num_listed=len(body.logprob_token_ids or ()),
        )
        self._has_functions = bool(body.functions)
        self._names = body.names
        try:
            self._body = body = self._body.with_tools
            self._format = context.formats.answer(body)
        except UserError as error:
            raise error.named(self._names) from None
        self._prompt_text = ""
        self._prediction: list[int] | None = None
        """Tokens of the text that the client expects; None if no drafter uses them."""
        self._begun: set[int] = set()
        logger.debug("%s: %d messages, user %.100r", self.response_id, found_messages(body.messages).number, body.user)

    @property
    def ineffective_fields(self) -> list[str]:
        is_idle = self._body.prediction is not None and not self._takes_prediction
        own = ["prediction"] if is_idle else []
        return [*super().ineffective_fields, *own, *self._format.ineffective_fields]

    @property
    def _takes_prediction(self) -> bool:
        return self._body.prediction is not None and self._context.engine.engine_config.takes_predictions

    @property
    def _role(self) -> str:
        body = self._body
        return self._context.settings.response_role if body.generation_prompt else body.messages[-1].role

    async def complete(self) -> ChatResponse:
        choices: dict[int, ChatChoice] = {}
        texts: defaultdict[int, ChoiceText] = defaultdict(ChoiceText)
        first: RequestOutput | None = None
        async with aclosing(await self._outputs()) as outputs:
            async for _, output in outputs:
                first = first or output
                for event in self._events_of(output):
                    if isinstance(event, Begin):
                        choices[event.choice] = self._new_choice(event.choice)
                    else:
                        texts[event.choice].add(event.delta)
                        self._extend(choices[event.choice], event)
        assert first is not None
        for index, choice in choices.items():
            message = choice.message = texts[index].message(has_functions=self._has_functions)
            message.role = self._role
            if echoed := self._body.echoed(self._role):
                message.content = echoed + (message.content or "")
        response = ChatResponse(
            id=self.response_id,
            created=self._created,
            model=self._model,
            system_fingerprint=SYSTEM_FINGERPRINT,
            choices=[choices[index] for index in sorted(choices)],
            usage=self.usage,
            metrics=self._times(),
        )
        self._add_prompt(response, first)
        return response

    async def stream(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(await self._outputs()) as outputs:
            async for _, output in outputs:
                for event in self._events_of(output):
                    if isinstance(event, Begin):
                        yield self._role_event(event)
                        if echoed := self._body.echoed(self._role):
                            delta = Delta(content=echoed)
                            yield encode_event(self._chunk([ChatChunkChoice(index=event.choice, delta=delta)]))
                    else:
                        yield encode_event(self._chunk([self._written(event)]))
        if self._body.include_usage:
            chunk = self._chunk([])
            chunk.usage = self.usage
            chunk.metrics = self._times()
            yield encode_event(chunk)
        yield DONE

    async def events(self) -> AsyncGenerator[Begin | Piece, None]:
        """Yield the answer's events as they come; `usage` is up to date at each."""
        async with aclosing(await self._outputs()) as outputs:
            async for _, output in outputs:
                for event in self._events_of(output):
                    yield event

    @property
    def usage(self) -> Usage:
        num_predicted = None if self._prediction is None else len(self._prediction)
        return self._counter.usage(self._format.num_reasoning_tokens, num_predicted)

    def _events_of(self, output: RequestOutput) -> Iterator[Begin | Piece]:
        self._weigh_answer(output)
        for completion in output.outputs:
            if completion.index not in self._begun:
                self._counter.count_output(0, output, count_completion=False)  # the chunk with the role has no token
                yield Begin(completion.index, output, is_first=not self._begun)
                self._begun.add(completion.index)
        self._counter.count_output(0, output)
        for completion in output.outputs:
            if (piece := self._piece(completion)) is not None:
                yield piece

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        body = self._body
        rendered = await render_chat(self._context, body, self._format.template_tools, body.template_inputs)
        self._prompt_text = rendered.text
        self._params = self._format.settle(self._params, rendered.text)
        limit = self._params.max_tokens
        room = self._context.engine.ready.max_model_len - len(rendered.token_ids)
        if self._ends_with_context and limit is not None and limit > room:
            self._params = msgspec.structs.replace(self._params, max_tokens=None)
        self._weigh(len(rendered.token_ids))
        prompt = rendered.prompt()
        if body.prediction is not None and self._takes_prediction:
            try:
                self._prediction = await self._context.engine.texts.encode(
                    body.prediction.text, add_special_tokens=False
                )
            except UserError as error:
                raise error.named({"prompt": "prediction"}) from None
            prompt["prediction"] = self._prediction
        outputs = generate(
            self._context,
            [prompt],
            self._params,
            self.engine_id,
            answer_id=self.answer_id,
            terms=Terms(body.cache_salt, body.priority, self._adapter),
            names={
                **dict.fromkeys(("prompt", "prompt_token_ids"), "messages"),
                "structured_outputs": self._names.get(self._format.constraint_field, self._format.constraint_field),
                **self._names,
            },
        )
        return spaced(outputs, body.stream_interval if body.stream else None)

    def _num_alternatives(self, wanted: int | None) -> int | None:
        return None if wanted is None else num_alternatives(wanted, self._context.engine.model_config.vocab_size)

    def _weigh(self, num_tokens: int) -> None:
        body, longest = self._body, self._context.engine.ready.max_model_len
        num_tokens = min(num_tokens, longest, body.max_kept_tokens or longest)
        wanted = self._num_alternatives(body.prompt_logprobs)
        num_entries = 0 if wanted is None else wanted + 1
        self.weight.prompt(num_tokens, 1, num_texts=int(body.return_token_ids), num_entries=num_entries)
        self.weigh_plan()

    def weigh_plan(self, num_answers: int = 1) -> None:
        """Raise UserError if `num_answers` like this one, with max_tokens, may be too large together."""
        limit, longest = self._params.max_tokens, self._context.engine.ready.max_model_len
        if limit is not None:
            self.weight.planned(num_answers * self._params.num_sequences, min(longest, limit))

    def _weigh_answer(self, output: RequestOutput) -> None:
        try:
            self.weight.generated(output.outputs)
        except UserError as error:
            raise error.named(self._names) from None

    def _role_event(self, event: Begin) -> bytes:
        chunk = self._chunk([ChatChunkChoice(index=event.choice, delta=Delta(role=self._role, content=""))])
        if event.is_first:
            self._add_prompt(chunk, event.output)
        return encode_event(chunk)

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        usage: Usage | UnsetType | None = None if self._body.include_usage else UNSET
        return ChatChunk(
            id=self.response_id,
            created=self._created,
            model=self._model,
            system_fingerprint=SYSTEM_FINGERPRINT,
            choices=choices,
            usage=self.usage if self._body.continuous_usage else usage,
        )

    def _add_prompt(self, body: ChatResponse | ChatChunk, output: RequestOutput) -> None:
        if self._body.return_token_ids:
            body.prompt_token_ids = output.prompt_token_ids
        if self._body.return_prompt_text:
            body.prompt_text = self._prompt_text
        if self._body.prompt_logprobs is not None:
            body.prompt_logprobs = prompt_logprobs(output.prompt_logprobs) or []

    def _piece(self, completion: CompletionOutput) -> Piece | None:
        """Next part of a completion for a stream; None if nothing is to be sent yet."""
        delta = self._read(completion)
        is_news = bool(delta) or completion.finish_reason is not None
        if not is_news and not (completion.token_ids and self._tells_tokens):
            return None
        return Piece(
            completion.index,
            delta,
            self._logprobs(completion),
            completion.token_ids if self._body.return_token_ids else None,
            self._finish_reason(completion),
            completion.stop_reason,
        )

    def _written(self, piece: Piece) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=piece.choice,
            delta=to_delta(piece.delta, has_functions=self._has_functions),
            logprobs=piece.logprobs,
            finish_reason=piece.finish_reason,
            stop_reason=UNSET if piece.stop_reason is None else piece.stop_reason,
            token_ids=UNSET if piece.token_ids is None else piece.token_ids,
        )

    def _read(self, completion: CompletionOutput) -> OutputDelta:
        delta = self._format.read(completion)
        is_streamed = self._asked.is_streamed
        if self._format.reads_calls and (is_streamed or completion.finish_reason is not None):
            has_calls = bool(delta.tool_calls) if is_streamed else self._format.num_calls(completion) > 0
            mode = "streaming" if is_streamed else "non_streaming"
            outcome = "tool_call" if has_calls else "no_tool_call"
            self._context.metrics.record_tool_reading(ToolReading(mode, outcome, self._asked.request_type))
        return delta

    def _finish_reason(self, completion: CompletionOutput) -> str | None:
        reason = self._format.finish_reason(completion)
        return "function_call" if reason == "tool_calls" and self._has_functions else reason

    @property
    def _tells_tokens(self) -> bool:
        body = self._body
        return not self._format.parses or body.logprobs or body.return_token_ids or body.continuous_usage

    def _new_choice(self, index: int) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=AssistantMessage(self._role, ""),
            token_ids=[] if self._body.return_token_ids else None,
            logprobs=ChatLogprobs([]) if self._body.logprobs else None,
        )

    def _extend(self, choice: ChatChoice, piece: Piece) -> None:
        choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason
        if choice.token_ids is not None and piece.token_ids is not None:
            choice.token_ids = choice.token_ids + piece.token_ids
        if choice.logprobs is not None and piece.logprobs is not None:
            choice.logprobs.content.extend(piece.logprobs.content)

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        num_top = None if self._body.top_logprobs == -1 else self._body.top_logprobs or 0
        return chat_logprobs(
            completion.token_ids,
            completion.logprobs or [],
            num_top,
            self._context.tokenizer,
            listed=self._body.logprob_token_ids or (),
            as_ids=bool(self._body.return_tokens_as_token_ids),
        )
