"""Base of all generating endpoints: the route, and the fields of an answer known before it begins."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from msgspec import UNSET, UnsetType

from quire.errors import UserError
from quire.outputs import RequestOutput
from quire.parsers.output import OutputDelta
from quire.sampling_params import SamplingParams
from quire.server.auth import client_of
from quire.server.body import report_ignored
from quire.server.context import ServerContext, new_id
from quire.server.disconnect import run_until_disconnect
from quire.server.generation import TokenCounter
from quire.server.protocol.chat import ChatBatchRequest, ChatLogprobs, ChatRequest
from quire.server.protocol.common import AnswerTimes, Identifier, SpeculativeDecoding, Usage
from quire.server.protocol.completion import CompletionRequest
from quire.server.protocol.sampling import StreamOptions
from quire.server.responses import json_response
from quire.server.streaming import EventStream

MAX_BIAS = 100.0
"""Bound to which vLLM clips each value of `logit_bias`."""

Body = TypeVar("Body", ChatRequest, ChatBatchRequest, CompletionRequest)


class Begin(NamedTuple):
    """Start of a choice. is_first: it precedes all other choices. output: carries the prompt's log-probabilities and
    ids."""

    choice: int
    output: RequestOutput
    is_first: bool


class Piece(NamedTuple):
    """New part of a choice: text, reasoning and calls (`delta`), log-probabilities and ids of its tokens if requested,
    and its end."""

    choice: int
    delta: OutputDelta
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Answer(ABC, Generic[Body]):
    ID_PREFIX: str

    def __init__(self, context: ServerContext, body: Body, header_id: str | None = None) -> None:
        """header_id: X-Request-Id of the request; it precedes the body's `request_id`.
        Raises UserError or UnknownModelError for an invalid request.
        """
        has_priority = bool(body.priority) and not context.engine.takes_priorities
        self._ineffective: list[str] = ["priority"] if has_priority else []
        body = with_defaults(body, context)
        self._body: Body = body
        self._context = context
        self._model = context.served_name(body.model)
        self._adapter = context.adapters.chosen(self._model, body.lora)
        self._params = body.to_sampling_params()
        if self._params.extra_args and not context.engine.engine_config.logits_processors:
            self._ineffective += [f"vllm_xargs.{name}" for name in self._params.extra_args]
            self._params.extra_args = None
        self._created = int(time.time())
        self.response_id = new_id(self.ID_PREFIX, header_id or body.request_id)
        # A proxy repeats a request under the id of the first one, which may still run.
        self.engine_id = self.response_id if header_id is None else f"{self.response_id}-{uuid.uuid4().hex[:8]}"
        self.answer_id = self.response_id
        """Id that the client knows. Conversations answered together share it."""
        self._counter = TokenCounter()

    @property
    def ineffective_fields(self) -> list[str]:
        """Names of known request fields without effect on this server."""
        is_idle = bool(self._body.include_metrics) and not self._context.settings.enable_per_request_metrics
        return self._ineffective + (["include_metrics"] if is_idle else [])

    @property
    def params(self) -> SamplingParams:
        return self._params

    @property
    def usage(self) -> Usage:
        return self._counter.usage()

    @property
    def times(self) -> AnswerTimes | None:
        """Durations in milliseconds of the phases so far; None for several prompts."""
        return self._counter.times()

    def _times(self) -> AnswerTimes | UnsetType | None:
        settings = self._context.settings
        level = settings.per_request_spec_decode_metrics
        most = 0 if level == "none" else self._context.engine.engine_config.speculation.max_drafts
        if self._body.include_metrics is False or not (settings.enable_per_request_metrics or most):
            return UNSET
        if self._params.num_sequences != 1:
            return None
        times = self._counter.times() if settings.enable_per_request_metrics else AnswerTimes()
        if times is not None and most:
            drafts = self._counter.draft_steps
            times.speculative_decoding = SpeculativeDecoding.of(drafts, most, is_detailed=level == "detailed")
        return times

    @abstractmethod
    async def complete(self) -> msgspec.Struct:
        """Whole answer's body, for requests without `stream`."""

    @abstractmethod
    def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as encoded server-sent events, for requests with `stream`."""


def header_id(request: Request) -> str | None:
    """X-Request-Id of a request, from which the answer's id is made. Raises UserError if it is not a valid
    `request_id`."""
    given = request.headers.get("x-request-id")
    if given is not None:
        try:
            msgspec.convert(given, Identifier)
        except msgspec.ValidationError:
            raise UserError(
                "X-Request-Id must have 1 to 128 printable ASCII characters without spaces", param="X-Request-Id"
            ) from None
    return given


def with_defaults(body: Body, context: ServerContext) -> Body:
    """Fill in the model's sampling defaults (ModelConfig.sampling_defaults) and the server's. Drops the priority if the
    engine takes none; clips biases if the server follows vLLM."""
    defaults = context.engine.model_config.sampling_defaults
    changes: dict[str, Any] = {
        name: value for name, value in defaults.items() if name != "max_tokens" and getattr(body, name) is None
    }
    settings = context.settings
    for name in ("return_tokens_as_token_ids", "stream_interval"):
        if getattr(body, name) is None:
            changes[name] = getattr(settings, name)
    if not context.engine.takes_priorities:
        changes["priority"] = 0
    if settings.follows_vllm and body.logit_bias is not None:
        changes["logit_bias"] = {token: min(max(bias, -MAX_BIAS), MAX_BIAS) for token, bias in body.logit_bias.items()}
    if body.stream and settings.enable_force_include_usage:
        options = body.stream_options or StreamOptions()
        changes["stream_options"] = msgspec.structs.replace(options, include_usage=True, continuous_usage_stats=True)
    return msgspec.structs.replace(body, **changes) if changes else body


def add_answer_route(
    app: FastAPI,
    path: str,
    context: ServerContext,
    read: Callable[[Request, ServerContext], Awaitable[Body]],
    answer_type: Callable[[ServerContext, Body, str | None], Answer[Body]],
    mark: Callable[[Any], Any] | None = None,
) -> None:
    """Add POST `path`. A client that hangs up ends its request. mark: decorator."""

    async def create(request: Request) -> Response:
        body = await read(request, context)
        context.admit()
        context.check_priority(body.priority, client_of(request))
        answer = answer_type(context, body, header_id(request))
        headers = {"X-Request-Id": answer.response_id}
        report_ignored(request, context, answer.ineffective_fields)
        if body.stream:
            return EventStream(answer.stream(), headers)
        return json_response(await run_until_disconnect(request.receive, answer.complete()), headers)

    app.post(path)(create if mark is None else mark(create))
