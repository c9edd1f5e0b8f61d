"""Routes of pooling models: /v1/embeddings, /pooling, /classify, /score and /rerank."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response

from quire.engine.request_part import IN_BACKGROUND
from quire.errors import UserError
from quire.outputs import RequestOutput
from quire.pooling_params import PoolingParams
from quire.server.auth import client_of
from quire.server.body import report_ignored
from quire.server.context import ServerContext, new_id
from quire.server.disconnect import run_until_disconnect
from quire.server.errors import invalid_request
from quire.server.generation import ADAPTER_NAMES, check_line, render_chat
from quire.server.limits import Charge, client_salt
from quire.server.protocol.pooling import (
    POOLING_TASKS,
    ClassificationItem,
    ClassificationRequest,
    ClassificationResponse,
    EmbeddingItem,
    EmbeddingRequest,
    EmbeddingResponse,
    InputFields,
    ListResponse,
    Mixed,
    PairFields,
    PooledFields,
    PoolingFields,
    PoolingItem,
    PoolingRequest,
    PoolingResponse,
    PoolingUsage,
    RerankDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    ScoreItem,
    ScoreRequest,
    ScoreResponse,
)
from quire.server.reading import read_request
from quire.server.request_share import PromptPart, Turns, share_of
from quire.server.responses import json_response
from quire.server.vector_format import bytes_response, encoded

Body = TypeVar("Body", bound=PooledFields)
ListT = TypeVar("ListT", bound=ListResponse)
Text = tuple[str | list[int], str | None]


def add_pooling_routes(app: FastAPI, context: ServerContext) -> None:
    """Add the routes for every model; they answer 404 if it cannot do the task."""
    add_pooling_route(app, context, ("/v1/embeddings",), "embed", EmbeddingRequest, _embeddings)
    add_pooling_route(app, context, ("/pooling",), "encode", PoolingRequest, _pooling)
    add_pooling_route(app, context, ("/classify",), "classify", ClassificationRequest, _classify)
    add_pooling_route(app, context, ("/score", "/v1/score"), "score", ScoreRequest, _score)
    add_pooling_route(app, context, ("/rerank", "/v1/rerank", "/v2/rerank"), "score", RerankRequest, _rerank)


def add_pooling_route(
    app: FastAPI,
    context: ServerContext,
    paths: Sequence[str],
    task: str,
    body_type: type[Body],
    answer: Callable[[ServerContext, Body], Awaitable[msgspec.Struct | Response]],
    mark: Callable[[Any], Any] | None = None,
) -> None:
    """Add POST on each path, for models that can do `task`. mark: decorator of the endpoint."""

    async def create(request: Request) -> Response:
        body = await read_request(request, context, body_type)
        _check_task(context, task)
        context.served_name(body.model)
        context.admit()
        context.check_priority(body.priority, client_of(request))
        if body.priority and not context.engine.takes_priorities:
            report_ignored(request, context, ["priority"])

        async def work() -> msgspec.Struct | Response:
            try:
                return await answer(context, body)
            except UserError as error:
                raise error.named(ADAPTER_NAMES) from None

        found = await run_until_disconnect(request.receive, work())
        return found if isinstance(found, Response) else json_response(found)

    for path in paths:
        app.post(path)(create if mark is None else mark(create))


def _check_task(context: ServerContext, task: str) -> None:
    try:
        context.engine.pooling.check_task(task)
    except UserError as error:
        raise invalid_request(error.message, param="model", code="model_not_suitable", status=404) from None


def _check_wanted_task(context: ServerContext, task: str) -> None:
    reason = f"the tasks of this server are {' and '.join(POOLING_TASKS)}"
    if task in POOLING_TASKS:
        try:
            return context.engine.pooling.check_task(task)
        except UserError as error:
            reason = error.message
    raise invalid_request(f"Unsupported task: {task!r} ({reason})", param="task")


async def _texts(context: ServerContext, body: InputFields) -> list[Text]:
    if body.messages is not None:
        return [((await render_chat(context, body)).token_ids, None)]
    inputs = [await one_sequence(context, each, begins=body.special_tokens) for each in body.inputs]
    if body.special_tokens:
        return [(text, None) for text in inputs]
    is_cut = body.truncate_prompt_tokens is not None
    encode = partial(context.engine.texts.encode, add_special_tokens=False, is_cut=is_cut)
    with_prompt = context.engine.pooling.with_prompt
    return [(await encode(with_prompt(text)) if isinstance(text, str) and text else text, None) for text in inputs]


async def one_sequence(context: ServerContext, mixed: Mixed, *, begins: bool = True) -> str | list[int]:
    """Text, or all token ids. begins: with the tokenizer's prefix."""
    if isinstance(mixed, str) or not any(isinstance(part, str) for part in mixed):
        return mixed  # type: ignore[return-value]
    return await context.engine.texts.encode_parts(mixed, add_special_tokens=begins)


async def _run_inputs(context: ServerContext, body: InputFields, params: PoolingParams) -> list[RequestOutput]:
    texts = await _texts(context, body)
    return await run_texts(context, body, params, texts, [body.field_name] * len(texts))


async def _embeddings(context: ServerContext, body: EmbeddingRequest) -> EmbeddingResponse | Response:
    params = body.params(dimensions=body.dimensions, normalize=body.normalizes)
    outputs = await _run_inputs(context, body, params)
    vectors = [context.engine.pooling.vector(output, params) for output in outputs]
    listed = partial(_listed, EmbeddingResponse, "embd", context, body, outputs)
    if body.wants_bytes:
        return bytes_response(body, listed([]), vectors)
    return listed([EmbeddingItem(index, encoded(vector, body)) for index, vector in enumerate(vectors)])


async def _pooling(context: ServerContext, body: PoolingRequest) -> PoolingResponse | Response:
    if body.task is not None:
        _check_wanted_task(context, body.task)
    params = body.params(dimensions=body.dimensions, normalize=body.normalize)
    outputs = await _run_inputs(context, body, params)
    vectors = [context.engine.pooling.vector(output, params) for output in outputs]
    listed = partial(_listed, PoolingResponse, "pool", context, body, outputs)
    if body.wants_bytes:
        return bytes_response(body, listed([]), vectors)
    return listed([PoolingItem(index, encoded(vector, body)) for index, vector in enumerate(vectors)])


async def _classify(context: ServerContext, body: ClassificationRequest) -> ClassificationResponse:
    params, labels = body.params(), context.engine.pooling.labels
    outputs = await _run_inputs(context, body, params)
    scores = [context.engine.pooling.vector(output, params) for output in outputs]
    data = [
        ClassificationItem(index, labels[each.index(max(each))], each, len(each)) for index, each in enumerate(scores)
    ]
    return _listed(ClassificationResponse, "classify", context, body, outputs, data)


async def _score(context: ServerContext, body: ScoreRequest) -> ScoreResponse:
    params = body.params()
    scores, outputs = await _scores(context, body, params, body.firsts, body.seconds)
    data = [ScoreItem(index, score) for index, score in enumerate(scores)]
    return _listed(ScoreResponse, "score", context, body, outputs, data)


async def _rerank(context: ServerContext, body: RerankRequest) -> RerankResponse:
    scores, outputs = await _scores(context, body, body.params(), [body.query], body.documents)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    results = [
        RerankResult(index, scores[index], RerankDocument(body.documents[index]) if body.return_documents else None)
        for index in order
    ]
    name = context.served_name(body.model)
    return RerankResponse(new_id("rerank", body.request_id), name, _usage(outputs), results)


async def _scores(
    context: ServerContext, body: PairFields, params: PoolingParams, firsts: list[str], seconds: list[str]
) -> tuple[list[float], list[RequestOutput]]:
    pooling = context.engine.pooling
    firsts = await _shortened(context, firsts, body.max_tokens_per_query)
    seconds = await _shortened(context, seconds, body.max_tokens_per_doc)
    places = [min(index, len(firsts) - 1) for index in range(len(seconds))]
    first_name, second_name = body.field_names
    if pooling.is_cross_encoder:
        pairs: list[Text] = [(firsts[place], second) for place, second in zip(places, seconds, strict=True)]
        outputs = await run_texts(context, body, params, pairs, [second_name] * len(pairs))
        return [pooling.pair_score(output, params).outputs.score for output in outputs], outputs
    names = [first_name] * len(firsts) + [second_name] * len(seconds)
    outputs = await run_texts(context, body, params, [(text, None) for text in (*firsts, *seconds)], names)
    lefts, rights = outputs[: len(firsts)], outputs[len(firsts) :]
    found = [pooling.similarity(lefts[place], right, params) for place, right in zip(places, rights, strict=True)]
    return [each.outputs.score for each in found], outputs


async def _shortened(context: ServerContext, texts: list[str], max_tokens: int) -> list[str]:
    """Texts cut to `max_tokens` tokens; 0: no limit."""
    if not max_tokens or max_tokens >= context.engine.ready.max_model_len:
        return texts
    beginnings = partial(context.tokenizer.beginnings, texts, max_tokens)
    return await context.engine.texts.off_loop(sum(map(len, texts)), beginnings)


async def run_texts(
    context: ServerContext, body: PooledFields, params: PoolingParams, texts: Sequence[Text], names: Sequence[str]
) -> list[RequestOutput]:
    """Outputs of all texts, in order; many take turns (quire/server/request_share.py). An error of one ends all. names:
    request's field for each text, for errors."""
    charge, salt = Charge(context.metrics), client_salt(body.cache_salt)
    adapter = context.adapters.chosen(context.served_name(body.model))
    share = share_of(context.engine.max_num_seqs)
    in_background = IN_BACKGROUND.get()
    lines = context.line_places if in_background else None
    turns = Turns(share) if len(texts) > share or lines is not None else None
    priority = body.priority if context.engine.takes_priorities else 0

    async def one(index: int, prompt: str | list[int], second: str | None) -> RequestOutput:
        part = None if turns is None else PromptPart(turns, 0, 1, lines)
        try:
            output = await context.engine.pool(
                prompt,
                params,
                second=second,
                priority=priority,
                part=part,
                cache_salt=salt,
                lora_request=adapter,
            )
        except UserError as error:
            raise error.named(dict.fromkeys(("prompt", "prompt_token_ids"), names[index])) from None
        check_line(output, in_background=in_background)
        charge.count(index, output)
        return output

    tasks = [asyncio.ensure_future(one(index, *text)) for index, text in enumerate(texts)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _listed(
    kind: Callable[..., ListT],
    prefix: str,
    context: ServerContext,
    body: PoolingFields,
    outputs: Sequence[RequestOutput],
    data: Sequence[msgspec.Struct],
) -> ListT:
    return kind(
        id=new_id(prefix, body.request_id),
        created=int(time.time()),
        model=context.served_name(body.model),
        data=data,
        usage=_usage(outputs),
    )


def _usage(outputs: Sequence[RequestOutput]) -> PoolingUsage:
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return PoolingUsage(num_tokens, num_tokens)
