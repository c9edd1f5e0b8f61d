"""OpenAI's Responses API (/v1/responses), answered by the chat endpoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from fastapi import FastAPI, Query, Request, Response

from quire.engine.request_part import IN_BACKGROUND
from quire.errors import UserError
from quire.server.auth import owner_of
from quire.server.background import AnyResponse, BackgroundResponses, not_found, not_streamed
from quire.server.background_elsewhere import ResponseElsewhere, answer_question, find_anywhere
from quire.server.chat import AskedRoute
from quire.server.context import ServerContext
from quire.server.disconnect import run_until_disconnect
from quire.server.errors import invalid_request
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.response_items import Continuation, Listing, ReadInput, StoredItems, UnresolvedItems
from quire.server.protocol.responses import NAMES, InputTokens, ItemList, ResponseDeleted, ResponsesRequest
from quire.server.query import truth, whole_number
from quire.server.reading import read_continuation, read_request
from quire.server.response_answer import ResponseAnswer
from quire.server.response_store import Responses
from quire.server.responses import json_response
from quire.server.streaming import EventStream
from quire.server.turn import begin_turn, chat_body, count_prompt_tokens

_PATH = "/v1/responses"
MAX_LISTED_ITEMS = 100


class _Kept(NamedTuple):
    """Earlier responses: stored, or being made in the background."""

    store: Responses
    background: BackgroundResponses

    async def find_response(self, request: Request, response_id: str) -> AnyResponse:
        found = await find_anywhere(self.store, self.background, owner_of(request), response_id)
        if found is None:
            raise not_found(response_id)
        return found

    async def conversation(self, owner: str, response_id: str | None) -> StoredItems:
        """Conversation up to the end of the previous response."""
        if response_id is None:
            return StoredItems()
        if (made := await find_anywhere(self.store, self.background, owner, response_id)) is not None:
            await made.settle()
        found = await self.store.find_response(owner, response_id)
        if found is None:
            raise not_found(response_id, "previous_response_id", "previous_response_not_found")
        if not found.can_continue:
            message = (
                f"the response {response_id!r} cannot be continued: it has no end, or a call that no request may have"
            )
            raise invalid_request(message, param="previous_response_id")
        return found.items

    async def referenced(self, owner: str, response_id: str) -> StoredItems:
        """Conversation that item_references point into; empty while its response is being made."""
        found = await self.store.find_response(owner, response_id)
        return StoredItems() if found is None or found.maker is not None else found.items

    async def chat(
        self, request: Request, context: ServerContext, body: ResponsesRequest
    ) -> tuple[ChatRequest, Callable[[str], Listing]]:
        """Request as a chat completion, and a function from the response's id to its listing."""
        assert isinstance(body.input, ReadInput)
        messages, items = body.input.messages, body.input.items
        if isinstance(items, UnresolvedItems):
            owner = owner_of(request)
            before = await self.conversation(owner, body.previous_response_id)
            known = [await self.referenced(owner, each) for each in items.response_ids]
            going_on = Continuation.of(body.instructions, items, before, known)
            messages, items = await read_continuation(request, context, *going_on)
        assert messages is not None
        return chat_body(body.to_chat(), messages, NAMES), items.listing


def add_response_routes(app: FastAPI, context: ServerContext) -> None:
    kept = _Kept(context.responses, BackgroundResponses(context.responses))
    context.on_close.append(kept.background.close)
    _add_create_route(app, context, kept)
    _add_read_routes(app, kept)
    _add_end_routes(app, kept)


def _add_create_route(app: FastAPI, context: ServerContext, kept: _Kept) -> None:
    """Add POST /v1/responses. A client that hangs up ends its request, unless it runs in the background."""
    num_stored = context.settings.max_stored_responses

    @app.post(_PATH)
    async def create(request: Request) -> Response:
        body = await read_request(request, context, ResponsesRequest)
        model, owner = context.served_name(body.model), owner_of(request)
        if body.background and not num_stored:
            raise invalid_request("this server stores no responses (--max-stored-responses 0)", param="background")
        chat, conversation = await kept.chat(request, context, body)
        turn = begin_turn(context, request, chat, NAMES, asked=AskedRoute("responses", body.stream, keeps_all=True))
        stores = num_stored > 0 and (not IN_BACKGROUND.get() if body.store is None else body.store)

        async def keep(answer: ResponseAnswer) -> None:
            await kept.store.put(owner, answer.body.id, answer.stored(conversation(answer.body.id)))

        keep_at_end = keep if stores and not body.background else None
        answer = ResponseAnswer(turn, body, model, stores=stores, tokenizer=context.tokenizer, keep=keep_at_end)
        headers = {"X-Request-Id": answer.body.id}
        if body.background:
            kept.store.answer_with(partial(answer_question, kept.background))
            items = conversation(answer.body.id)
            running = await kept.background.start(owner, answer, items, keeps_events=body.stream)
            return EventStream(running.follow(0), headers) if body.stream else json_response(answer.body, headers)
        if body.stream:
            return EventStream(answer.stream(), headers)
        return json_response(await run_until_disconnect(request.receive, answer.complete()), headers)

    @app.post(_PATH + "/input_tokens")
    async def count_tokens(request: Request) -> Response:
        body = await read_request(request, context, ResponsesRequest)
        context.served_name(body.model)
        chat, _ = await kept.chat(request, context, body)
        return json_response(InputTokens(await count_prompt_tokens(context, chat, NAMES)))


def _add_read_routes(app: FastAPI, kept: _Kept) -> None:
    @app.get(_PATH + "/{response_id}")
    async def retrieve(
        request: Request,
        response_id: str,
        stream: str = "false",
        starting_after: str | None = None,
        include: list[str] = Query([]),  # noqa: B008 - FastAPI's way to read a list
        include_obfuscation: str = "false",
    ) -> Response:
        """Response, or with `stream` its events after number `starting_after`. include, include_obfuscation: no effect;
        the response is complete anyway."""
        is_streamed = truth("stream", stream)
        if starting_after is not None and not is_streamed:
            raise invalid_request("starting_after is only allowed together with stream=true", param="starting_after")
        first = 0 if starting_after is None else whole_number("starting_after", starting_after, 0) + 1
        found = await kept.find_response(request, response_id)
        if not is_streamed:
            return Response(await found.body(), media_type="application/json")
        if not found.is_streamed:
            raise not_streamed(response_id)
        return EventStream(found.follow(first))

    @app.get(_PATH + "/{response_id}/input_items")
    async def input_items(
        request: Request,
        response_id: str,
        after: str | None = None,
        limit: str = "20",
        order: str = "desc",
        include: list[str] = Query([]),  # noqa: B008 - FastAPI's way to read a list
    ) -> Response:
        """List a page of the conversation that the response answers. include: no effect."""
        if order not in ("asc", "desc"):
            raise UserError(f"order must be asc or desc, not {order!r}", param="order")
        count = whole_number("limit", limit, 1, MAX_LISTED_ITEMS)
        stored = await kept.store.find_response(owner_of(request), response_id)
        if stored is None:
            raise not_found(response_id)
        items = stored.items.before.decoded()
        if order == "desc":
            items.reverse()
        if after is not None:
            places = [index for index, item in enumerate(items) if item["id"] == after]
            if not places:
                raise invalid_request(f"the response has no input item {after!r}", param="after")
            items = items[places[0] + 1 :]
        page = items[:count]
        ids = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        return json_response(ItemList(page, len(items) > count, first_id=ids[0], last_id=ids[1]))


def _add_end_routes(app: FastAPI, kept: _Kept) -> None:
    @app.delete(_PATH + "/{response_id}")
    async def delete(request: Request, response_id: str) -> Response:
        """Delete a response; end it if it is being made."""
        owner = owner_of(request)
        found = await kept.find_response(request, response_id)
        await kept.store.remove(owner, response_id)
        kept.background.delete(owner, response_id)
        if isinstance(found, ResponseElsewhere):
            await found.delete()
        return json_response(ResponseDeleted(response_id))

    @app.post(_PATH + "/{response_id}/cancel")
    async def cancel(request: Request, response_id: str) -> Response:
        """End a response being made in the background; return a finished one unchanged."""
        found = await kept.find_response(request, response_id)
        return Response(await found.cancel(), media_type="application/json")
