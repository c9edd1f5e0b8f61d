"""Admins' routes that control the engine or report its configuration. A setting enables each group."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Query, Request, Response
from msgspec import Meta

from quire.config.engine import EngineConfig
from quire.engine.front_end import check_mode
from quire.errors import UserError
from quire.server.adapters import add_adapter_routes
from quire.server.auth import admin
from quire.server.context import ServerContext
from quire.server.disconnect import run_until_disconnect
from quire.server.live_admin import add_live_admin_routes
from quire.server.protocol.common import RequestStruct
from quire.server.query import truth, whole_number
from quire.server.reading import read_request
from quire.server.responses import json_response
from quire.version import __version__

SECRETS = ("api_key", "admin_api_key")
MAX_ABORTED = 4096
"""Maximum ids in one request."""


class Status(msgspec.Struct):
    status: str


class Sleeping(msgspec.Struct):
    is_sleeping: bool


class Paused(msgspec.Struct):
    is_paused: bool


class ReplicaState(msgspec.Struct):
    replica: int
    is_up: bool


class PrefixCacheReset(msgspec.Struct):
    """Answer of POST /reset_prefix_cache. num_blocks: blocks that held a prefix."""

    status: str
    num_blocks: int


class AbortRequest(RequestStruct, kw_only=True, frozen=True):
    """Body of an abort. request_ids: ids of answers (`cmpl-...`, `chatcmpl-...`, `resp_...`, `msg_...`)."""

    request_ids: str | Annotated[list[str], Meta(max_length=MAX_ABORTED)] | None = None

    def __post_init__(self) -> None:
        if self.request_ids is None:
            raise UserError("Missing 'request_ids' in request body", param="request_ids")

    @property
    def ids(self) -> list[str]:
        given = self.request_ids or []
        return [given] if isinstance(given, str) else given


class ServerInfo(msgspec.Struct):
    """Answer of GET /server_info. config: engine's configuration; text on request. start_seconds: duration of each
    phase of the start."""

    version: str
    config: dict[str, Any] | str
    server: dict[str, Any]
    engine: dict[str, Any]
    start_seconds: dict[str, float]


class TokenizerInfo(msgspec.Struct):
    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    special_tokens: dict[str, str]
    added_tokens: dict[int, str]
    chat_template: str | None


def add_admin_routes(app: FastAPI, context: ServerContext, *, has_admin_keys: bool) -> None:
    """Add the routes that settings and keys allow. `app.state.unserved` gets the others, as (route, flag) for the error
    message."""
    settings = context.settings
    unserved = app.state.unserved = []
    for is_on, flag, adders in (
        (
            settings.enable_admin_routes,
            "--enable-admin-routes",
            (
                _add_pause_routes,
                _add_cache_routes,
                _add_abort_route,
                _add_replica_routes,
                _add_info_routes,
                add_adapter_routes,
            ),
        ),
        (settings.enable_sleep_mode, "--enable-sleep-mode", (_add_sleep_routes,)),
        (has_admin_keys, "--admin-api-key", (partial(add_live_admin_routes, keeps_log=has_admin_keys),)),
        (settings.enable_tokenizer_info_endpoint, "--enable-tokenizer-info-endpoint", (_add_tokenizer_route,)),
    ):
        routes = app if is_on else FastAPI(openapi_url=None)
        routes.router.route_class = app.router.route_class
        for add in adders:
            add(routes, context)
        if not is_on:
            unserved += [(route, flag) for route in routes.routes]


def _add_pause_routes(app: FastAPI, context: ServerContext) -> None:
    engine = context.engine

    @app.post("/pause")
    @admin
    async def pause(request: Request, mode: str = "abort", clear_cache: str = "true") -> Response:
        """Pause the engine; see AsyncLLM.pause."""
        context.check_alive()
        check_mode(mode)
        await run_until_disconnect(request.receive, engine.pause(mode, clear_cache=truth("clear_cache", clear_cache)))
        return json_response(Status("paused"))

    @app.post("/resume")
    @admin
    async def resume() -> Response:
        context.check_alive()
        await engine.resume()
        return json_response(Status("resumed"))

    @app.get("/is_paused")
    @admin
    async def is_paused() -> Response:
        context.check_alive()
        return json_response(Paused(await engine.is_paused()))


def _add_cache_routes(app: FastAPI, context: ServerContext) -> None:
    engine = context.engine

    @app.post("/reset_mm_cache")
    @admin
    async def reset_mm_cache() -> Response:
        """Clear this process's cache of prepared images, and all processes' names of images."""
        context.check_alive()
        engine.texts.pictures.kept.clear()
        await engine.texts.pictures.names.clear()
        return Response()

    @app.post("/reset_encoder_cache")
    @admin
    async def reset_nothing() -> Response:
        """Do nothing: the route is vLLM's."""
        context.check_alive()
        return Response()

    @app.post("/reset_prefix_cache")
    @admin
    async def reset_prefix_cache(reset_running_requests: str = "false", reset_external: str = "false") -> Response:
        """Clear the prefix cache, except blocks of running requests and on disk."""
        context.check_alive()
        for name, value in (("reset_running_requests", reset_running_requests), ("reset_external", reset_external)):
            if truth(name, value):
                raise UserError(f"{name} is not supported by this server (only false is)", param=name)
        return json_response(PrefixCacheReset("reset", await engine.reset_prefix_cache()))


def _add_abort_route(app: FastAPI, context: ServerContext) -> None:
    @app.post("/abort_requests")
    @admin
    async def abort_requests(request: Request) -> Response:
        """End the answers with these ids early. Unknown ids are ignored."""
        context.check_alive()
        body = await read_request(request, context, AbortRequest)
        await context.engine.abort(context.running.end_turns(body.ids))
        return Response()


def _add_replica_routes(app: FastAPI, context: ServerContext) -> None:
    engine = context.engine

    @app.post("/stop_replica")
    @admin
    async def stop_replica(replica: str = "") -> Response:
        context.check_alive()
        await engine.stop_replica(whole_number("replica", replica, 0))
        return json_response(ReplicaState(int(replica), False))

    @app.post("/start_replica")
    @admin
    async def start_replica(replica: str = "") -> Response:
        context.check_alive()
        return json_response(
            ReplicaState(whole_number("replica", replica, 0), await engine.start_replica(int(replica)))
        )


def _add_info_routes(app: FastAPI, context: ServerContext) -> None:
    @app.get("/server_info")
    @admin
    async def server_info(config_format: str = "json") -> Response:
        if config_format not in ("json", "text"):
            raise UserError(f"config_format must be json or text, not {config_format!r}", param="config_format")
        config = described(context.engine.engine_config)
        settings = {name: value for name, value in msgspec.to_builtins(context.settings).items() if name not in SECRETS}
        text = "\n".join(f"{name}: {value}" for name, value in config.items())
        engine = msgspec.structs.asdict(context.engine.ready)
        shown = text if config_format == "text" else config
        return json_response(ServerInfo(__version__, shown, settings, engine, dict(context.start_seconds)))


def _add_sleep_routes(app: FastAPI, context: ServerContext) -> None:
    """Add the routes of sleep mode. While the engine sleeps, generating requests get 503, and /health stays 200."""
    engine = context.engine

    @app.post("/sleep")
    @admin
    async def sleep(request: Request, level: str = "1", mode: str = "abort") -> Response:
        """Free the engine's memory. level: 1 keeps the weights in host memory, 2 drops them, 0 only pauses. mode: see
        AsyncLLM.sleep; "keep" is 400 while requests live."""
        context.check_alive()
        check_mode(mode)
        work = engine.pause(mode) if level == "0" else engine.sleep(level, mode)
        await run_until_disconnect(request.receive, work)
        return json_response(Sleeping(level != "0"))

    @app.post("/wake_up")
    @admin
    async def wake_up(tags: list[str] = Query([])) -> Response:  # noqa: B008 - FastAPI's way to read a list
        """Restore weights, KV cache or, without tags, both, which also ends a pause."""
        context.check_alive()
        await engine.wake_up(tags)
        if not (is_sleeping := await engine.is_sleeping()):
            await engine.resume()
        return json_response(Sleeping(is_sleeping))

    @app.get("/is_sleeping")
    @admin
    async def is_sleeping() -> Response:
        context.check_alive()
        return json_response(Sleeping(await engine.is_sleeping()))


def _add_tokenizer_route(app: FastAPI, context: ServerContext) -> None:
    tokenizer = context.tokenizer

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        added = tokenizer.backend.get_added_tokens_decoder()
        return json_response(
            TokenizerInfo(
                type(tokenizer.backend.model).__name__,
                tokenizer.vocab_size,
                context.engine.ready.max_model_len,
                tokenizer.special_tokens,
                {token_id: token.content for token_id, token in added.items()},
                tokenizer.chat_template,
            )
        )


def described(config: EngineConfig) -> dict[str, Any]:
    """Configuration in JSON's types for /server_info; other types become text."""
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(config, enc_hook=_plain))
    return found


def _plain(value: Any) -> Any:
    return dict(value) if hasattr(value, "keys") else str(value)
