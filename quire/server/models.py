"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from fastapi import FastAPI, Response

from quire.server.context import ServerContext
from quire.server.protocol.models import ModelCard, ModelList, ModelPermission
from quire.server.responses import json_response


def add_model_routes(app: FastAPI, context: ServerContext) -> None:
    def card(name: str) -> ModelCard:
        return ModelCard(
            id=name,
            created=context.created,
            root=context.engine.model_config.name,
            max_model_len=context.engine.ready.max_model_len,
            permission=[ModelPermission(id=f"modelperm-{name}", created=context.created)],
        )

    @app.get("/v1/models")
    async def list_models() -> Response:
        return json_response(ModelList([card(name) for name in context.model_names]))

    # A name may hold slashes: hub ids do.
    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        return json_response(card(context.served_name(name)))
