"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import FastAPI
from msgspec import UNSET, UnsetType

from quire.engine.input_processor import TokensPrompt
from quire.logging import get_logger
from quire.outputs import CompletionOutput, RequestOutput
from quire.server.answer import Answer, add_answer_route
from quire.server.context import SYSTEM_FINGERPRINT, ServerContext
from quire.server.generation import generate, render_chat
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
from quire.server.streaming import DONE, encode_event
from quire.server.weight import AnswerWeight

logger = get_logger(__name__)


def add_chat_routes(app: FastAPI, context: ServerContext) -> None:
    add_answer_route(app, "/v1/chat/completions", context, ChatRequest, ChatAnswer)


class ChatAnswer(Answer[ChatRequest]):
    """One conversation being answered, as a whole or as a stream."""

    ID_PREFIX = "chatcmpl"

    def __init__(self, context: ServerContext, body: ChatRequest) -> None:
        super().__init__(context, body)
        self._weight = AnswerWeight(
            logprobs=self._params.logprobs, return_token_ids=body.return_token_ids, is_streamed=body.stream
        )
        logger.debug("%s: %d messages, user %r", self.response_id, len(body.messages), body.user)

    async def complete(self) -> ChatResponse:
        choices: dict[int, ChatChoice] = {}
        first: RequestOutput | None = None
        async with aclosing(self._outputs()) as outputs:
            async for output in outputs:
                first = first or output
                for completion in output.outputs:
                    self._extend(choices, completion)
        assert first is not None
        response = ChatResponse(
            id=self.response_id,
            created=self._created,
            model=self._model,
            system_fingerprint=SYSTEM_FINGERPRINT,
            choices=[choices[index] for index in sorted(choices)],
            usage=self._counter.usage(),
        )
        self._add_prompt(response, first)
        return response

    async def stream(self) -> AsyncGenerator[bytes, None]:
        begun: set[int] = set()
        async with aclosing(self._outputs()) as outputs:
            async for output in outputs:
                for completion in output.outputs:
                    if completion.index not in begun:
                        yield self._role_event(completion.index, output, is_first=not begun)
                        begun.add(completion.index)
                    if completion.text or completion.token_ids or completion.finish_reason:
                        yield encode_event(self._chunk([self._piece(completion)]))
        if self._body.include_usage:
            chunk = self._chunk([])
            chunk.usage = self._counter.usage()
            yield encode_event(chunk)
        yield DONE

    async def _outputs(self) -> AsyncGenerator[RequestOutput, None]:
        body = self._body
        rendered = await render_chat(self._context.engine, body)
        self._weigh(len(rendered.token_ids))
        prompt: TokensPrompt = {"prompt_token_ids": rendered.token_ids, "prompt": rendered.text}
        running = generate(
            self._context,
            [prompt],
            self._params,
            self.response_id,
            cache_salt=body.cache_salt,
            priority=body.priority,
            prompt_field="messages",
        )
        async with aclosing(running) as outputs:
            async for _, output in outputs:
                self._counter.count_output(0, output)
                self._weight.generated(output.outputs)
                yield output

    def _weigh(self, num_tokens: int) -> None:
        """Refuse a request whose answer would be too large, before anything of it runs."""
        body, longest = self._body, self._context.engine.ready.max_model_len
        num_tokens = min(num_tokens, longest, body.truncate_prompt_tokens or longest)
        num_entries = 0 if body.prompt_logprobs is None else body.prompt_logprobs + 1
        self._weight.prompt(num_tokens, 1, num_texts=int(body.return_token_ids), num_entries=num_entries)
        if self._params.max_tokens is not None:
            self._weight.planned(self._params.num_sequences, min(longest, self._params.max_tokens))

    def _role_event(self, index: int, output: RequestOutput, *, is_first: bool) -> bytes:
        """A choice begins with its role; the first chunk of the stream also brings what is said of the prompt."""
        chunk = self._chunk([ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""))])
        if is_first:
            self._add_prompt(chunk, output)
        return encode_event(chunk)

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        usage: Usage | UnsetType | None = None if self._body.include_usage else UNSET
        return ChatChunk(
            id=self.response_id,
            created=self._created,
            model=self._model,
            system_fingerprint=SYSTEM_FINGERPRINT,
            choices=choices,
            usage=self._counter.usage() if self._body.continuous_usage else usage,
        )

    def _add_prompt(self, body: ChatResponse | ChatChunk, output: RequestOutput) -> None:
        if self._body.return_token_ids:
            body.prompt_token_ids = output.prompt_token_ids
        if self._body.prompt_logprobs is not None:
            body.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)

    def _piece(self, completion: CompletionOutput) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=completion.index,
            delta=Delta(content=completion.text) if completion.text else Delta(),
            logprobs=self._logprobs(completion),
            finish_reason=completion.finish_reason,
            stop_reason=UNSET if completion.stop_reason is None else completion.stop_reason,
            token_ids=completion.token_ids if self._body.return_token_ids else UNSET,
        )

    def _extend(self, choices: dict[int, ChatChoice], completion: CompletionOutput) -> None:
        choice = choices.get(completion.index)
        if choice is None:
            choice = ChatChoice(
                index=completion.index,
                message=AssistantMessage("assistant", ""),
                token_ids=[] if self._body.return_token_ids else UNSET,
                logprobs=ChatLogprobs([]) if self._body.logprobs else None,
            )
            choices[completion.index] = choice
        choice.message.content += completion.text
        choice.finish_reason = completion.finish_reason
        choice.stop_reason = completion.stop_reason
        if choice.token_ids is not UNSET:
            choice.token_ids = choice.token_ids + completion.token_ids
        logprobs = self._logprobs(completion)
        if choice.logprobs is not None and logprobs is not None:
            choice.logprobs.content.extend(logprobs.content)

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        num_top = self._body.top_logprobs or 0
        return chat_logprobs(completion.token_ids, completion.logprobs or [], num_top, self._context.tokenizer)
