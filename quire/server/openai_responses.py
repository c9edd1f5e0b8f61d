"""/v1/responses: OpenAI's Responses API, answered by the chat endpoint, with a bounded store of what was answered."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import FastAPI, Query, Request, Response

from quire.server.auth import owner_of
from quire.server.body import read_request
from quire.server.context import ServerContext
from quire.server.disconnect import run_until_disconnect
from quire.server.errors import ApiError, invalid_request, to_api_error
from quire.server.protocol.responses import (
    NAMES,
    IncompleteDetails,
    InputTokensDetails,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputTokensDetails,
    Reasoning,
    ReasoningText,
    ResponseBody,
    ResponseDeleted,
    ResponseError,
    ResponsesRequest,
    ResponseUsage,
    TextConfig,
    TextFormat,
)
from quire.server.response_store import Responses
from quire.server.responses import json_response
from quire.server.streaming import EventStream
from quire.server.turn import Event, Kind, Segment, Step, Turn, begin_turn, chat_body

_PATH = "/v1/responses"
_PREFIXES = {Kind.TEXT: "msg", Kind.REASONING: "rs", Kind.CALL: "fc"}

_encoder = msgspec.json.Encoder()


def add_response_routes(app: FastAPI, context: ServerContext) -> None:
    """A client that hangs up ends its request, be it streaming or not; then nothing is stored."""
    settings, store = context.settings, context.responses

    @app.post(_PATH)
    async def create(request: Request) -> Response:
        body = await read_request(request, context, ResponsesRequest)
        model, owner = context.served_name(body.model), owner_of(request)
        history: list[dict[str, Any]] = []
        if body.previous_response_id is not None:
            previous = await store.find(owner, body.previous_response_id)
            if previous is None:
                raise _not_found(body.previous_response_id, "previous_response_id", "previous_response_not_found")
            history = previous.messages
        turn = begin_turn(context, request, chat_body(body.to_chat(history), NAMES), NAMES)
        answer = _ResponseAnswer(turn, body, model, history, store if settings.max_stored_responses else None, owner)
        headers = {"X-Request-Id": answer.body.id}
        if body.stream:
            return EventStream(answer.stream(), headers)
        return json_response(await run_until_disconnect(request.receive, answer.complete()), headers)

    @app.get(_PATH + "/{response_id}")
    async def retrieve(
        request: Request,
        response_id: str,
        stream: str = "false",
        include: list[str] = Query([]),  # noqa: B008 - FastAPI's way to read a list
    ) -> Response:
        """include: what is there is in the response anyway."""
        if stream.lower() not in ("false", "0"):
            raise invalid_request("a stored response is not streamed again (only stream=false)", param="stream")
        found = await store.find(owner_of(request), response_id)
        if found is None:
            raise _not_found(response_id, "response_id", None)
        return Response(found.body, media_type="application/json")

    @app.delete(_PATH + "/{response_id}")
    async def delete(request: Request, response_id: str) -> Response:
        if not await store.remove(owner_of(request), response_id):
            raise _not_found(response_id, "response_id", None)
        return json_response(ResponseDeleted(response_id))

    @app.post(_PATH + "/{response_id}/cancel")
    async def cancel(request: Request, response_id: str) -> Response:
        """Only what runs in the background can be cancelled, and nothing does: hanging up ends the others."""
        if await store.find(owner_of(request), response_id) is None:
            raise _not_found(response_id, "response_id", None)
        raise invalid_request("the response is complete, and was not made in the background", param="response_id")


def _not_found(response_id: str, param: str, code: str | None) -> ApiError:
    message = f"no response {response_id!r} is stored: it never was, was deleted, or had to leave for later ones"
    return invalid_request(message, param=param, code=code, status=404)


class _ResponseAnswer:
    def __init__(
        self,
        turn: Turn,
        request: ResponsesRequest,
        model: str,
        history: list[dict[str, Any]],
        store: Responses | None,
        owner: str,
    ) -> None:
        self._turn, self._request, self._history, self._owner = turn, request, history, owner
        self._store = store if request.store else None
        self._number = 0
        name = turn.response_id.partition("-")[2]
        self.body = ResponseBody(
            id=f"resp_{name}",
            created_at=int(time.time()),
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata,
            model=model,
            parallel_tool_calls=request.parallel_tool_calls,
            previous_response_id=request.previous_response_id,
            reasoning=request.reasoning or Reasoning(),
            store=self._store is not None,
            temperature=request.temperature,
            text=TextConfig(request.text.format or TextFormat()),
            tool_choice=request.tool_choice,
            tools=request.tools,
            top_logprobs=request.top_logprobs,
            top_p=request.top_p,
            truncation=request.truncation,
            user=request.user,
        )

    async def complete(self) -> ResponseBody:
        await self._turn.run()
        return await self._end()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Once the response has begun, an error is its status."""
        begun = False
        try:
            async with aclosing(self._turn.events()) as events:
                async for event in events:
                    begun = True
                    for written in self._write(event):
                        yield written
        except Exception as error:
            if not begun:
                raise
            failure = to_api_error(error)
            self.body.status = "failed"
            self.body.error = ResponseError("server_error", failure.detail.message)
            yield self._event("response.failed", response=self.body)
            return
        body = await self._end()
        yield self._event(f"response.{body.status}", response=body)

    def _write(self, event: Event) -> list[bytes]:
        segment = event.segment
        if segment is None:
            return [
                self._event("response.created", response=self.body),
                self._event("response.in_progress", response=self.body),
            ]
        place = {"item_id": self._item_id(segment), "output_index": segment.index}
        if segment.kind is not Kind.CALL:
            place["content_index"] = 0
        match event.step:
            case Step.OPEN:
                return self._open(segment, place)
            case Step.GROW:
                more = {"logprobs": event.logprobs} if segment.kind is Kind.TEXT else {}
                return [self._event(f"response.{_DELTAS[segment.kind]}.delta", **place, delta=event.piece, **more)]
        return self._close(segment, place)

    def _open(self, segment: Segment, place: dict[str, Any]) -> list[bytes]:
        item = self._item(segment.as_opened(), "in_progress")
        written = [self._event("response.output_item.added", output_index=segment.index, item=_without_content(item))]
        if segment.kind is not Kind.CALL:
            written.append(self._event("response.content_part.added", **place, part=_content(segment.as_opened())))
        return written

    def _close(self, segment: Segment, place: dict[str, Any]) -> list[bytes]:
        name, text = f"response.{_DELTAS[segment.kind]}.done", segment.text
        match segment.kind:
            case Kind.CALL:
                written = [self._event(name, **place, name=segment.name, arguments=text)]
            case Kind.TEXT:
                written = [self._event(name, **place, text=text, logprobs=segment.logprobs)]
            case Kind.REASONING:
                written = [self._event(name, **place, text=text)]
        if segment.kind is not Kind.CALL:
            written.append(self._event("response.content_part.done", **place, part=_content(segment)))
        item = self._item(segment, self._status_of(segment))
        return [*written, self._event("response.output_item.done", output_index=segment.index, item=item)]

    def _event(self, name: str, /, **fields: Any) -> bytes:
        data = _encoder.encode({"type": name, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), data)

    async def _end(self) -> ResponseBody:
        """The finished response; it is stored now, if it is to be."""
        turn, body, usage = self._turn, self.body, self._turn.usage
        body.completed_at = int(time.time())
        body.status = "completed"
        if turn.finish_reason == "length":
            body.status, body.incomplete_details = "incomplete", IncompleteDetails("max_output_tokens")
        body.output = [self._item(segment, self._status_of(segment)) for segment in turn.segments]
        body.usage = ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(usage.num_cached),
            usage.completion_tokens,
            OutputTokensDetails(usage.num_reasoning),
            usage.prompt_tokens + usage.completion_tokens,
        )
        if self._store is not None:
            messages = [*self._history, *self._request.messages(), *_said(turn)]
            await self._store.put(self._owner, body.id, _encoder.encode(body), messages)
        return body

    def _status_of(self, segment: Segment) -> str:
        """A part is incomplete when the turn ended within it."""
        is_cut = self._turn.finish_reason == "length" and segment is self._turn.segments[-1]
        return "incomplete" if is_cut else "completed"

    def _item_id(self, segment: Segment) -> str:
        return f"{_PREFIXES[segment.kind]}_{self.body.id[5:]}_{segment.index}"

    def _item(self, segment: Segment, status: str) -> OutputItem:
        item_id = self._item_id(segment)
        match segment.kind:
            case Kind.TEXT:
                return OutputMessage(item_id, [OutputText(segment.text, [], segment.logprobs)], status)
            case Kind.REASONING:
                return OutputReasoning(item_id, [ReasoningText(segment.text)], status)
        return OutputCall(item_id, segment.call_id, segment.name, segment.text, status)


_DELTAS = {Kind.TEXT: "output_text", Kind.REASONING: "reasoning_text", Kind.CALL: "function_call_arguments"}


def _content(segment: Segment) -> OutputText | ReasoningText:
    text = segment.text
    return OutputText(text, [], segment.logprobs) if segment.kind is Kind.TEXT else ReasoningText(text)


def _without_content(item: OutputItem) -> OutputItem:
    """The item before its only part."""
    return item if isinstance(item, OutputCall) else msgspec.structs.replace(item, content=[])


def _said(turn: Turn) -> list[dict[str, Any]]:
    """The turn as a message of the assistant, for the next one."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for segment in turn.segments:
        match segment.kind:
            case Kind.TEXT:
                message["content"] = (message["content"] or "") + segment.text
            case Kind.REASONING:
                message["reasoning"] = message.get("reasoning", "") + segment.text
            case Kind.CALL:
                function = {"name": segment.name, "arguments": segment.text}
                call = {"id": segment.call_id, "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
    if message["content"] is None and not message.get("tool_calls"):
        message["content"] = ""
    return [message]
