"""OpenTelemetry traces (`--otlp-traces-endpoint`, extra `otel`): a span per engine request, with vLLM's attributes;
`traceparent` names its parent."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.engine.output_stream import StatsListener
from quire.errors import ConfigError
from quire.logging import make_handler
from quire.metrics.progress import PhaseTimes, RequestProgress
from quire.outputs import RequestOutput
from quire.request import EngineRequest
from quire.utils.extras import how_to_install
from quire.version import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

ENDPOINT = "otlp_traces_endpoint"
SPAN_NAME = "llm_request"
TRACE_HEADERS = ("traceparent", "tracestate")
NANOSECONDS = 1_000_000_000
EXPORT_SECONDS = 2
"""Timeout of the collector for one batch, in seconds, also at the exit."""

_PARENT: ContextVar[Context | None] = ContextVar("trace_parent", default=None)
"""Parent of the running HTTP request's spans."""


def make_provider(endpoint: str) -> TracerProvider:
    """Tracer provider that sends spans in batches over HTTP (OTLP), on its own thread. The service's name is `quire`
    unless `OTEL_SERVICE_NAME` is set. Raises ConfigError without the extra."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        hint = how_to_install("otel")
        raise ConfigError(f"{ENDPOINT} needs OpenTelemetry ({error}): {hint}", param=ENDPOINT) from None
    named = Resource({"service.name": "quire", "service.version": __version__})
    resource = named.merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS)))
    log = logging.getLogger("opentelemetry")
    if not log.handlers:
        log.addHandler(make_handler())
        log.propagate = False
    return provider


class TraceParents:
    """Middleware that sets the parent of a request's spans from `traceparent`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _PARENT.set(parent_of(Headers(scope=scope)))
        await self.app(scope, receive, send)


def parent_of(headers: Headers) -> Context | None:
    """Trace context of W3C headers; None if absent or invalid."""
    from opentelemetry.trace import get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {name: headers[name] for name in TRACE_HEADERS if name in headers}
    if not carrier:
        return None
    context = TraceContextTextMapPropagator().extract(carrier)
    return context if get_current_span(context).get_span_context().is_valid else None


@dataclass(slots=True)
class _Traced:
    """Running request, whose span is written at its end."""

    request: EngineRequest
    parent: Context | None
    arrival: int
    """Unix time in nanoseconds."""


class RequestTraces(StatsListener):
    """Listener of AsyncLLM for new and rejected requests; `EngineMetrics` reports the ends. details: add a span for
    each phase (queue, prefill, decode)."""

    def __init__(
        self,
        tracer: Tracer,
        model_name: str,
        *,
        details: bool = False,
        wall_time: Callable[[], int] = time.time_ns,
    ) -> None:
        self._tracer = tracer
        self._model_name = model_name
        self._details = details
        self._wall_time = wall_time
        self._requests: dict[str, _Traced] = {}

    def record_request(self, request_id: str, request: EngineRequest, text: str | None) -> None:
        if not request.register_prefix:
            self._requests[request_id] = _Traced(request, _PARENT.get(), self._wall_time())

    def record_rejected(self, request_id: str) -> None:
        traced = self._requests.pop(request_id, None)
        if traced is not None:
            span = self._begin(request_id, traced)
            _fail(span, "the engine rejected the request")
            span.end(self._wall_time())

    def _begin(self, request_id: str, traced: _Traced) -> Span:
        from opentelemetry.trace import SpanKind

        params = traced.request.params
        attributes: dict[str, Any] = {
            "gen_ai.request.id": request_id,
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.max_tokens": traced.request.max_tokens,
            "gen_ai.request.n": params.n,
            "gen_ai.usage.prompt_tokens": len(traced.request.prompt_token_ids),
        }
        return self._tracer.start_span(
            SPAN_NAME, traced.parent, SpanKind.SERVER, attributes=attributes, start_time=traced.arrival
        )

    def note_finished(self, output: RequestOutput, progress: RequestProgress, now: float) -> None:
        """Write the span of a request, for `EngineMetrics.on_finished`."""
        traced = self._requests.pop(output.request_id, None)
        if traced is None:
            return
        span, end = self._begin(output.request_id, traced), self._wall_time()
        reasons = [each.finish_reason for each in output.outputs if each.finish_reason is not None]
        span.set_attributes(
            {
                "gen_ai.usage.completion_tokens": progress.num_generated,
                "gen_ai.usage.num_sequences": traced.request.params.num_sequences,
                "gen_ai.usage.cached_tokens": output.num_cached_tokens,
                "gen_ai.response.finish_reasons": reasons,
            }
        )
        times = progress.phases(output, now)
        if times is not None:
            span.set_attributes(
                {
                    "gen_ai.latency.time_in_queue": times.queue,
                    "gen_ai.latency.time_to_first_token": times.to_first_token,
                    "gen_ai.latency.time_in_model_prefill": times.prefill,
                    "gen_ai.latency.time_in_model_decode": times.decode,
                    "gen_ai.latency.time_in_model_inference": times.inference,
                    "gen_ai.latency.e2e": times.total,
                }
            )
            if self._details:
                self._write_phases(span, times, end)
        if "error" in reasons:
            _fail(span, "the request ended with an error")
        span.end(end)

    def _write_phases(self, span: Span, times: PhaseTimes, end: int) -> None:
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(span)
        start = end - round(times.total * NANOSECONDS)
        for name, seconds in (("queue", times.queue), ("prefill", times.prefill), ("decode", times.decode)):
            phase = self._tracer.start_span(name, context, start_time=start)
            start += round(seconds * NANOSECONDS)
            phase.end(start)


def _fail(span: Span, message: str) -> None:
    from opentelemetry.trace import StatusCode

    span.set_status(StatusCode.ERROR, message)
