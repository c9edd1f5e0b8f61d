"""HTTP application: routes, middleware and error handlers around one engine."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import Depends, FastAPI, Request, Response, params
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute, request_response
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from quire.errors import ModelLoadError
from quire.metrics.families import MetricNames
from quire.metrics.prometheus import EngineMetrics, ProcessMetrics
from quire.server.adapters import ServedAdapters
from quire.server.admin import add_admin_routes
from quire.server.answer_format import AnswerFormats
from quire.server.anthropic import add_message_routes
from quire.server.auth import key_check
from quire.server.chat import add_chat_routes
from quire.server.chat_batch import add_chat_batch_route
from quire.server.cohere import add_cohere_routes
from quire.server.completions import add_completion_routes
from quire.server.context import ServerContext
from quire.server.errors import install_error_handlers
from quire.server.files import add_file_routes
from quire.server.headers import ReportHeaders
from quire.server.health import PictureCounters, RestartCounter, SilenceGauge, add_health_routes
from quire.server.home import add_home_routes
from quire.server.invocations import add_invocation_route
from quire.server.json_bodies import JsonBodies
from quire.server.keys import KeyRing
from quire.server.live import add_live_routes
from quire.server.llama_cpp import add_llama_cpp_routes
from quire.server.load_report import LoadReports
from quire.server.models import add_model_routes
from quire.server.ollama import add_ollama_routes
from quire.server.openai_responses import add_response_routes
from quire.server.openapi import add_openapi_route
from quire.server.pooling import add_pooling_routes
from quire.server.query import check_query
from quire.server.request_log import RequestLog
from quire.server.response_store import OwnResponses, Responses, ResponseStore
from quire.server.scrape import CountingMiddleware, HttpCounter, add_metrics_route
from quire.server.settings import LLAMA_CPP, OLLAMA, ServerSettings
from quire.server.shared_adapters import SharedAdapters
from quire.server.site import ANY, HostRules, OriginRules, RootPath, SiteGuard
from quire.server.tokenize import add_tokenize_routes
from quire.server.tracing import RequestTraces, TraceParents, make_provider
from quire.utils.shared_numbers import Numbers
from quire.version import __version__

if TYPE_CHECKING:
    from quire.engine.async_engine import AsyncLLM
    from quire.multimodal.named import Names


@dataclass(frozen=True, slots=True)
class Common:
    """State that the API processes of a server share: counters, stored responses, process ids, names of adapters and of
    pictures. keys: makes the key ring; called once."""

    numbers: Numbers
    keys: Callable[[], KeyRing]
    responses: Responses
    pids: Callable[[], Sequence[int]]
    adapters: SharedAdapters
    pictures: Names


def create_app(engine: AsyncLLM, settings: ServerSettings, common: Common | None = None) -> FastAPI:
    """Make the application; `app.state.context` is its ServerContext. Waits until the engine is ready. common: None for
    a server's only process. Raises ModelLoadError for a model without tokenizer, ConfigError as AnswerFormats.of
    does."""
    if engine.tokenizer is None:
        raise ModelLoadError(f"the model {engine.model_config.name!r} has no tokenizer: serving needs one")
    names = tuple(settings.served_model_name) or (engine.model_config.name,)
    cache = engine.engine_config.cache
    metrics = EngineMetrics(
        names[0],
        engine.ready,
        names=MetricNames(settings.metrics_names),
        cache_config={
            "cache_dtype": engine.model_config.kv_cache_dtype,
            "enable_prefix_caching": str(cache.enable_prefix_caching),
        },
        sleep_level=lambda: engine.sleep_level,
        numbers=None if common is None else common.numbers,
    )
    common = common or alone(engine, settings)
    engine.texts.pictures.names = common.pictures
    engine.input_processor.clips_max_tokens = False
    engine.pooling.model_name = names[0]  # clients must not see a path
    engine.input_processor.max_new_tokens = engine.model_config.sampling_defaults.get("max_tokens")
    engine.add_listener(metrics)
    metrics.registry.register(ProcessMetrics(common.pids))
    if engine.takes_images:
        metrics.registry.register(PictureCounters(engine.texts.pictures.kept))
    metrics.registry.register(SilenceGauge(lambda: engine.silence))
    metrics.registry.register(RestartCounter(lambda: engine.num_restarts))
    formats = AnswerFormats.of(
        engine.tokenizer, settings, in_reasoning=engine.engine_config.structured_outputs.enable_in_reasoning
    )
    if settings.reasoning_parser is not None:  # otherwise a thinking budget uses the chat template's marks
        engine.input_processor.reasoning = formats.reasoning
    size = settings.max_body_bytes_of(takes_images=engine.takes_images)
    served = ServedAdapters(engine, settings.lora_dir, names, common.adapters)
    context = ServerContext(engine, engine.tokenizer, settings, metrics, names, size, formats, common.responses, served)

    keys = common.keys()
    app = FastAPI(
        title="Quire",
        version=__version__,
        openapi_url=None,
        redirect_slashes=False,  # a redirect's address would come from the client's Host
        dependencies=[
            Depends(key_check(keys, on_unix_socket=settings.uds is not None)),
            Depends(check_query),
        ],
    )
    app.state.context = context
    app.state.follows_vllm = settings.follows_vllm
    app.router.route_class = DirectRoute
    add_completion_routes(app, context)
    add_chat_routes(app, context)
    add_chat_batch_route(app, context)
    add_message_routes(app, context)
    add_response_routes(app, context)
    add_pooling_routes(app, context)
    add_cohere_routes(app, context)
    add_invocation_route(app, context)
    add_model_routes(app, context)
    add_tokenize_routes(app, context)
    add_health_routes(app, context)
    add_metrics_route(app, context)
    add_live_routes(app, context)
    add_admin_routes(app, context, has_admin_keys=keys.has_admin_keys)
    add_file_routes(app, context, keys)
    add_doors(app, context)
    add_home_routes(app, has_docs=not settings.disable_fastapi_docs, is_ollama=OLLAMA in settings.doors)
    if not settings.disable_fastapi_docs:
        add_openapi_route(app)
    install_error_handlers(app)
    counter = HttpCounter([route.path for route in app.routes if isinstance(route, Route)], common.numbers)
    metrics.registry.register(counter)
    context.num_errors = counter.count_of
    add_middleware(app, settings, metrics, counter)
    add_observers(app, context)
    return app


def alone(engine: AsyncLLM, settings: ServerSettings) -> Common:
    """State that API processes share (keys, names, stores), for a server with one process."""
    responses = OwnResponses(ResponseStore(settings.max_stored_responses, settings.response_store_bytes))
    adapters, pictures = SharedAdapters(), engine.texts.pictures.names
    return Common(Numbers.alone(), lambda: KeyRing.of(settings), responses, lambda: [os.getpid()], adapters, pictures)


def add_doors(app: FastAPI, context: ServerContext) -> None:
    if OLLAMA in context.settings.doors:
        add_ollama_routes(app, context)
    if LLAMA_CPP in context.settings.doors:
        add_llama_cpp_routes(app, context)


class DirectRoute(APIRoute):
    """Route without FastAPI's parameter analysis, for endpoints that take only the request and path parts and return a
    Response. It awaits the application's dependencies first, in order."""

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        *,
        dependencies: Sequence[params.Depends] | None = None,
        methods: Collection[str] | None = None,
        **options: Any,
    ) -> None:
        taken = inspect.signature(endpoint, eval_str=True)
        is_direct = inspect.iscoroutinefunction(endpoint) and issubclass(taken.return_annotation, Response)
        keywords = [name for name, each in taken.parameters.items() if each.annotation is Request]
        parts = [each for each in taken.parameters if f"{{{each}}}" in path or f"{{{each}:path}}" in path]
        if not is_direct or len(keywords) + len(parts) < len(taken.parameters):
            super().__init__(path, endpoint, dependencies=dependencies, methods=list(methods or ()), **options)
            return
        checks = [each.dependency for each in dependencies or () if each.dependency is not None]

        async def handle(request: Request) -> Response:
            for check in checks:
                await check(request)
            named = {name: request.path_params[name] for name in parts}
            response: Response = await endpoint(**dict.fromkeys(keywords, request), **named)
            return response

        Route.__init__(self, path, handle, name=endpoint.__name__, include_in_schema=False)
        self.endpoint, self.app = endpoint, request_response(handle)
        self.methods = set(methods or ())
        self.dependant = Dependant(path=path)


def add_observers(app: FastAPI, context: ServerContext) -> None:
    engine, settings = context.engine, context.settings
    if settings.enable_log_requests:
        log = RequestLog(settings.max_log_len)
        engine.add_listener(log)
        context.metrics.on_finished.append(log.note_finished)
    if settings.traces_url is not None:
        provider = make_provider(settings.traces_url)
        context.on_exit.append(provider.shutdown)
        details = bool(settings.collect_detailed_traces)
        tracer = provider.get_tracer("quire", __version__)
        traces = RequestTraces(tracer, context.model_names[0], details=details)
        engine.add_listener(traces)
        context.metrics.on_finished.append(traces.note_finished)
        app.add_middleware(TraceParents)


def add_middleware(app: FastAPI, settings: ServerSettings, metrics: EngineMetrics, counter: HttpCounter) -> None:
    """Add the middleware. The one added last sees a request first."""
    app.add_middleware(ReportHeaders, request_ids=settings.enable_request_id_headers)
    app.add_middleware(LoadReports, metrics=metrics)
    app.add_middleware(JsonBodies, max_total_bytes=settings.max_total_body_bytes)
    if settings.cors_allowed_origins:
        rules = OriginRules(settings.cors_allowed_origins)
        app.add_middleware(
            CORSMiddleware,
            allow_origins=sorted(rules.origins),
            allow_origin_regex=rules.pattern,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    # No web page reaches a Unix socket, and its clients send any Host.
    names = settings.allowed_hosts or ([ANY] if settings.uds is not None else [])
    hosts = HostRules(settings.host, names)
    app.add_middleware(SiteGuard, hosts=hosts, origins=settings.cors_allowed_origins)
    app.add_middleware(CountingMiddleware, counter=counter)
    if settings.root_path:
        app.add_middleware(RootPath, prefix=settings.root_path.rstrip("/"))
