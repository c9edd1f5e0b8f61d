"""POST /v1/chat/completions/batch, vLLM's route: several conversations with the same settings, one choice each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial

import msgspec
from fastapi import FastAPI

from quire.server.answer import Answer, add_answer_route
from quire.server.chat import ChatAnswer
from quire.server.context import ServerContext
from quire.server.limits import CHARGE, Charge
from quire.server.protocol.chat import ChatBatchRequest, ChatResponse
from quire.server.protocol.common import CompletionTokensDetails, PromptTokensDetails, Usage
from quire.server.reading import read_request
from quire.server.request_share import Turns, share_of


def add_chat_batch_route(app: FastAPI, context: ServerContext) -> None:
    add_answer_route(
        app, "/v1/chat/completions/batch", context, partial(read_request, kind=ChatBatchRequest), ChatBatch
    )


class ChatBatch(Answer[ChatBatchRequest]):
    """Conversations of one request, each run as its own. An error of one ends all. Rate limits count one request and
    all tokens."""

    ID_PREFIX = "chatcmpl"

    def __init__(self, context: ServerContext, body: ChatBatchRequest, header_id: str | None = None) -> None:
        super().__init__(context, body, header_id)
        first, *others = body.conversations
        answer = ChatAnswer(context, first)
        self._answers = [answer, *(ChatAnswer(context, other, weight=answer.weight) for other in others)]
        for each in self._answers:
            each.answer_id = self.response_id
        answer.weigh_plan(len(self._answers))

    @property
    def ineffective_fields(self) -> list[str]:
        return self._answers[0].ineffective_fields

    async def complete(self) -> ChatResponse:
        turns = Turns(share_of(self._context.engine.max_num_seqs))
        CHARGE.set(Charge(self._context.metrics))

        async def one(answer: ChatAnswer) -> ChatResponse:
            await turns.take(1)
            try:
                return await answer.complete()
            finally:
                turns.give_back(1)

        tasks = [asyncio.ensure_future(one(answer)) for answer in self._answers]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return _joined(self.response_id, found)

    def stream(self) -> AsyncGenerator[bytes, None]:
        raise AssertionError("a batch is not streamed")


def _joined(response_id: str, answers: list[ChatResponse]) -> ChatResponse:
    for index, answer in enumerate(answers):
        answer.choices[0].index = index
    used = [answer.usage for answer in answers]
    details = [each.completion_tokens_details for each in used]
    found = [each for each in details if isinstance(each, CompletionTokensDetails)]
    usage = Usage(
        prompt_tokens=sum(each.prompt_tokens for each in used),
        completion_tokens=sum(each.completion_tokens for each in used),
        total_tokens=sum(each.total_tokens for each in used),
        prompt_tokens_details=PromptTokensDetails(sum(each.prompt_tokens_details.cached_tokens for each in used)),
    )
    if found:
        sums = {}
        for name in CompletionTokensDetails.__struct_fields__:
            values = [value for each in found if isinstance(value := getattr(each, name), int)]
            sums[name] = sum(values) if values else msgspec.UNSET
        usage.completion_tokens_details = CompletionTokensDetails(**sums)
    choices = [choice for answer in answers for choice in answer.choices]
    return msgspec.structs.replace(answers[0], id=response_id, choices=choices, usage=usage, metrics=msgspec.UNSET)
