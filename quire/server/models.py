"""GET /v1/models and /v1/models/{id}, in OpenAI's form or, for its clients, Anthropic's."""

from __future__ import annotations

import datetime

from fastapi import FastAPI, Request, Response

from quire.server.context import ServerContext
from quire.server.errors import invalid_request
from quire.server.protocol.models import ModelCard, ModelInfo, ModelList, ModelPage, ModelPermission
from quire.server.query import whole_number
from quire.server.responses import json_response
from quire.server.settings import LLAMA_CPP

ANTHROPIC_VERSION = "anthropic-version"
"""Header that every request of Anthropic's API has."""


def add_model_routes(app: FastAPI, context: ServerContext) -> None:
    created_at = datetime.datetime.fromtimestamp(context.created, datetime.UTC).isoformat()

    def card(name: str) -> ModelCard:
        adapter = context.adapters.find(name)
        return ModelCard(
            id=name,
            created=context.created,
            root=context.engine.model_config.name if adapter is None else adapter.path,
            parent=None if adapter is None else adapter.base_model_name or context.model_names[0],
            max_model_len=context.engine.ready.max_model_len,
            permission=[ModelPermission(id=f"modelperm-{name}", created=context.created)],
        )

    def info(name: str) -> ModelInfo:
        longest = context.engine.ready.max_model_len
        return ModelInfo(
            id=name, display_name=name, created_at=created_at, max_input_tokens=longest, max_tokens=longest
        )

    @app.get("/v1/models")
    async def list_models(
        request: Request, limit: str = "1000", after_id: str | None = None, before_id: str | None = None
    ) -> Response:
        """List at most `limit` models after `after_id`, or the last ones before `before_id`."""
        most = whole_number("limit", limit, 1, 1000)
        names = context.usable(context.names)
        if after_id is not None:
            names = names[_place(names, after_id, "after_id") + 1 :]
        if before_id is not None:
            names = names[: _place(names, before_id, "before_id")]
        page = names[-most:] if before_id is not None and after_id is None else names[:most]
        if ANTHROPIC_VERSION not in request.headers:
            return json_response(ModelList([card(name) for name in page]))
        first, last = (page[0], page[-1]) if page else (None, None)
        return json_response(ModelPage([info(name) for name in page], len(page) < len(names), first, last))

    if LLAMA_CPP in context.settings.doors:

        @app.get("/models")
        async def list_with_aliases(request: Request) -> Response:
            usable = context.usable(context.names)
            aliases = [name for name in usable if name in context.model_names]
            found = [card(name) for name in [*aliases[:1], *usable[len(aliases) :]]]
            for each in found:
                each.aliases, each.tags = aliases if each.id in aliases else [each.id], []
            return json_response(ModelList(found))

    # Names may hold slashes, as hub ids do.
    @app.get("/v1/models/{name:path}")
    async def get_model(request: Request, name: str) -> Response:
        await context.meet(name)
        name = context.served_name(name)
        return json_response(info(name) if ANTHROPIC_VERSION in request.headers else card(name))


def _place(names: list[str], name: str, param: str) -> int:
    if name not in names:
        raise invalid_request(f"no model {name!r} is served", param=param)
    return names.index(name)
