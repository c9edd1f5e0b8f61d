"""Events and objects of /v1/responses, made from a turn of the chat endpoint."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from quire.server.errors import to_api_error
from quire.server.protocol.response_items import InputItem, Listing, StoredItems, listed
from quire.server.protocol.response_tools import namespaces_of
from quire.server.protocol.responses import (
    IncompleteDetails,
    InputTokensDetails,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputTokensDetails,
    RawMessage,
    Reasoning,
    ReasoningText,
    ResponseBody,
    ResponseError,
    ResponsesRequest,
    ResponseUsage,
    SummaryText,
    TextConfig,
    TextFormat,
)
from quire.server.response_store import StoredResponse, response_event
from quire.server.turn import Event, Kind, Segment, Step, Turn
from quire.tokenization.tokenizer import Tokenizer

_PREFIXES = {Kind.TEXT: "msg", Kind.REASONING: "rs", Kind.CALL: "fc"}
_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""HTTP status of an error -> code of the failed response."""

_encoder = msgspec.json.Encoder()


class ResponseAnswer:
    """Response of /v1/responses being made. keep: called with a whole response, not failed, before the client sees its
    end."""

    def __init__(
        self,
        turn: Turn,
        request: ResponsesRequest,
        model: str,
        *,
        stores: bool,
        tokenizer: Tokenizer,
        keep: Callable[[ResponseAnswer], Awaitable[None]] | None = None,
    ) -> None:
        self._turn, self._request, self._keep = turn, request, keep
        self._tokenizer = tokenizer
        self._namespaces = namespaces_of(request.tools)
        self._number = 0
        self._summarizes = request.reasoning is not None and request.reasoning.summary is not None
        name, params = turn.response_id.partition("-")[2], turn.params
        self.body = ResponseBody(
            id=f"resp_{name}",
            created_at=int(time.time()),
            status="queued" if request.background else "in_progress",
            background=request.background,
            instructions=request.instructions,
            frequency_penalty=params.frequency_penalty,
            max_output_tokens=request.max_output_tokens,
            max_tool_calls=request.max_tool_calls,
            metadata=request.metadata,
            model=model,
            parallel_tool_calls=request.parallel_tool_calls,
            presence_penalty=params.presence_penalty,
            previous_response_id=request.previous_response_id,
            reasoning=request.reasoning or Reasoning(),
            store=stores,
            temperature=params.temperature,
            text=TextConfig(request.text.format or TextFormat()),
            tool_choice=request.tool_choice,
            tools=request.tools,
            top_logprobs=request.top_logprobs,
            top_p=params.top_p,
            truncation=request.truncation,
            user=request.user,
        )

    async def complete(self) -> ResponseBody:
        await self._turn.run()
        return await self._end()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events. After the first one, an error becomes an event. A background response yields
        "created" and "queued" before the engine starts it."""
        begun = self._request.background
        if begun:
            yield self._event("response.created", response=self.body)
            yield self._event("response.queued", response=self.body)
        try:
            async with aclosing(self._turn.events()) as events:
                async for event in events:
                    begun = True
                    for written in self._write(event):
                        yield written
        except Exception as error:
            if not begun:
                raise
            yield self.failed(error)
            return
        body = await self._end()
        yield self._event(f"response.{body.status}", response=body)

    def _write(self, event: Event) -> list[bytes]:
        segment = event.segment
        if segment is None:
            self.body.status = "in_progress"
            created = [] if self._request.background else [self._event("response.created", response=self.body)]
            return [*created, self._event("response.in_progress", response=self.body)]
        place = {"item_id": self._item_id(segment), "output_index": segment.index}
        if segment.kind is not Kind.CALL:
            place["content_index"] = 0
        match event.step:
            case Step.OPEN:
                return self._open(segment, place)
            case Step.GROW:
                more = {"logprobs": event.logprobs} if segment.kind is Kind.TEXT else {}
                grown = self._event(f"response.{_DELTAS[segment.kind]}.delta", **place, delta=event.piece, **more)
                return [grown, *self._summary(segment, "text.delta", delta=event.piece)]
        return self._close(segment, place)

    def _open(self, segment: Segment, place: dict[str, Any]) -> list[bytes]:
        item = self._item(segment.as_opened(), "in_progress")
        written = [self._event("response.output_item.added", output_index=segment.index, item=_without_content(item))]
        if segment.kind is not Kind.CALL:
            written.append(self._event("response.content_part.added", **place, part=_content(segment.as_opened())))
        return [*written, *self._summary(segment, "part.added", part=SummaryText(""))]

    def _summary(self, segment: Segment, what: str, /, **fields: Any) -> list[bytes]:
        if segment.kind is not Kind.REASONING or not self._summarizes:
            return []
        place = {"item_id": self._item_id(segment), "output_index": segment.index, "summary_index": 0}
        return [self._event(f"response.reasoning_summary_{what}", **place, **fields)]

    def _close(self, segment: Segment, place: dict[str, Any]) -> list[bytes]:
        name, text = f"response.{_DELTAS[segment.kind]}.done", segment.text
        match segment.kind:
            case Kind.CALL:
                written = [self._event(name, **place, name=self._name(segment)[1], arguments=text)]
            case Kind.TEXT:
                written = [self._event(name, **place, text=text, logprobs=segment.logprobs)]
            case Kind.REASONING:
                written = [self._event(name, **place, text=text)]
        if segment.kind is not Kind.CALL:
            written.append(self._event("response.content_part.done", **place, part=_content(segment)))
        written += self._summary(segment, "text.done", text=text)
        written += self._summary(segment, "part.done", part=SummaryText(text))
        item = self._item(segment, self._status_of(segment))
        return [*written, self._event("response.output_item.done", output_index=segment.index, item=item)]

    def _event(self, name: str, /, **fields: Any) -> bytes:
        event = response_event(name, self._number, **fields)
        self._number += 1
        return event

    async def _end(self) -> ResponseBody:
        body = self.body
        body.completed_at = int(time.time())
        body.status = "completed"
        if self._turn.finish_reason == "length":
            body.status, body.incomplete_details = "incomplete", IncompleteDetails("max_output_tokens")
        self._add_output()
        if self._keep is not None:
            await self._keep(self)
        return body

    def failed(self, error: BaseException) -> bytes:
        """Mark the response as failed; return its last event."""
        failure = to_api_error(error)
        self.body.status = "failed"
        self.body.error = ResponseError(_ERROR_CODES.get(failure.status, "server_error"), failure.detail.message)
        self._add_output()
        return self._event("response.failed", response=self.body)

    def cancelled(self) -> bytes:
        """Mark the response as cancelled; return its last event, `response.incomplete`."""
        self.body.status = "cancelled"
        self._add_output()
        return self._event("response.incomplete", response=self.body)

    def _add_output(self) -> None:
        body, turn, usage = self.body, self._turn, self._turn.usage
        if self._request.enable_response_messages:
            skips = self._request.skip_special_tokens is not False
            body.input_messages = self._raw(turn.prompt_token_ids)
            body.output_messages = self._raw(turn.token_ids, skip_special_tokens=skips)
        body.output = [self._item(segment, self._status_of(segment)) for segment in turn.segments]
        body.usage = ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(usage.num_cached),
            usage.completion_tokens,
            OutputTokensDetails(usage.num_reasoning),
            usage.prompt_tokens + usage.completion_tokens,
        )

    def stored(self, conversation: Listing) -> StoredResponse:
        """Record of the finished response for the store, with all items that a later `previous_response_id` continues
        from. conversation: items before the answer."""
        said = self.body.output or [OutputMessage(f"msg_{self.body.id[5:]}_0", [OutputText("")], "completed")]
        can_continue = self.body.status in ("completed", "incomplete")
        try:
            read = msgspec.convert(msgspec.to_builtins(said), list[InputItem])
        except msgspec.ValidationError:  # requests are limited in what the model is not: the names of its calls
            read, can_continue = [], False
        added = [listed(item, item.id or "") for item in read]
        items = StoredItems(conversation, _encoder.encode(added))
        return StoredResponse(_encoder.encode(self.body), items, can_continue)

    def _status_of(self, segment: Segment) -> str:
        is_cut = self._turn.finish_reason in ("", "length") and segment is self._turn.segments[-1]
        return "incomplete" if is_cut else "completed"

    def _item_id(self, segment: Segment) -> str:
        return f"{_PREFIXES[segment.kind]}_{self.body.id[5:]}_{segment.index}"

    def _item(self, segment: Segment, status: str) -> OutputItem:
        item_id = self._item_id(segment)
        match segment.kind:
            case Kind.TEXT:
                return OutputMessage(item_id, [OutputText(segment.text, [], segment.logprobs)], status)
            case Kind.REASONING:
                summary = [SummaryText(segment.text)] if self._summarizes else []
                return OutputReasoning(item_id, [ReasoningText(segment.text)], status, summary)
        namespace, name = self._name(segment)
        return OutputCall(item_id, segment.call_id, name, segment.text, status, namespace)

    def _name(self, segment: Segment) -> tuple[str | UnsetType, str]:
        return self._namespaces.get(segment.name, (UNSET, segment.name))

    def _raw(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> list[RawMessage]:
        return [RawMessage(self._tokenizer.decode(token_ids, skip_special_tokens), token_ids)]


_DELTAS = {Kind.TEXT: "output_text", Kind.REASONING: "reasoning_text", Kind.CALL: "function_call_arguments"}


def _content(segment: Segment) -> OutputText | ReasoningText:
    text = segment.text
    return OutputText(text, [], segment.logprobs) if segment.kind is Kind.TEXT else ReasoningText(text)


def _without_content(item: OutputItem) -> OutputItem:
    if isinstance(item, OutputCall):
        return item
    more: dict[str, Any] = {"summary": []} if isinstance(item, OutputReasoning) else {}
    return msgspec.structs.replace(item, content=[], **more)
