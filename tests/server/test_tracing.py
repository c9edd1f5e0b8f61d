"""Spans of requests: attributes, parents, phases, and an OTLP endpoint that gets them."""

from __future__ import annotations

import http.server
import threading
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from quire.clock import VirtualClock
from quire.errors import ConfigError
from quire.metrics.progress import RequestProgress
from quire.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from quire.server.settings import ServerSettings
from quire.server.tracing import RequestTraces, TraceParents
from tests.server.conftest import Served, serving

TRACE_ID, PARENT_ID = 0xABC123, 0x42
PARENT = f"00-{TRACE_ID:032x}-{PARENT_ID:016x}-01"
SECOND = 10**9


class Collector:
    """Finished spans, by a real provider."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("test")

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest.fixture
def collector() -> Collector:
    return Collector()


def request(**changes: object) -> EngineRequest:
    params = SamplingParams(n=2, temperature=0.5, top_p=0.9)
    values = {
        "request_id": "r",
        "prompt_token_ids": [1, 2, 3],
        "params": params,
        "max_tokens": 40,
        "seed": 0,
        **changes,
    }
    return EngineRequest(**values)  # type: ignore[arg-type]


def output(*tokens: int, reason: str | None = None, first: float = 1.0) -> RequestOutput:
    completion = CompletionOutput(0, "", list(tokens), finish_reason=reason)
    times = RequestMetrics(queue_time=0.25, time_to_first_token=first, latency=first)
    return RequestOutput("r", None, [1, 2, 3], [completion], reason is not None, num_cached_tokens=2, metrics=times)


def run(collector: Collector, *, reason: str = "stop", details: bool = False) -> None:
    """One request that comes at second 1000 and takes 0.25 + 0.75 + 2 seconds."""
    clock = VirtualClock(start=5)
    start = 1000 * SECOND
    traces = RequestTraces(
        collector.tracer,
        "tiny",
        details=details,
        wall_time=lambda: start + round((clock.now() - 5) * SECOND),
    )
    traces.record_request("r", request(), None)
    clock.advance(1)
    outputs = [output(7), output(8, 9, reason=reason)]
    progress = RequestProgress(clock.now())
    clock.advance(2)
    for each in outputs:
        progress.observe_tokens(each.outputs[0], clock.now())
    traces.note_finished(outputs[-1], progress, clock.now())
    assert traces._requests == {}


def test_attributes(collector: Collector) -> None:
    run(collector)
    [span] = collector.exporter.get_finished_spans()
    assert (span.name, span.kind, span.parent) == ("llm_request", SpanKind.SERVER, None)
    assert (span.start_time, span.end_time) == (1000 * SECOND, 1003 * SECOND)
    assert dict(span.attributes or {}) == {
        "gen_ai.request.id": "r",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 40,
        "gen_ai.request.n": 2,
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 3,
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.usage.cached_tokens": 2,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.latency.time_in_queue": 0.25,
        "gen_ai.latency.time_to_first_token": 1.0,
        "gen_ai.latency.time_in_model_prefill": 0.75,
        "gen_ai.latency.time_in_model_decode": 2.0,
        "gen_ai.latency.time_in_model_inference": 2.75,
        "gen_ai.latency.e2e": 3.0,
    }
    assert span.status.status_code is StatusCode.UNSET


def test_phases(collector: Collector) -> None:
    run(collector, details=True)
    spans = collector.spans
    whole = spans["llm_request"]
    times = [(spans[name].start_time, spans[name].end_time) for name in ("queue", "prefill", "decode")]
    ends = [1000 * SECOND, 1000 * SECOND + SECOND // 4, 1001 * SECOND, 1003 * SECOND]
    assert times == list(pairwise(ends))
    for name in ("queue", "prefill", "decode"):
        parent = spans[name].parent
        assert parent is not None
        assert parent.span_id == whole.get_span_context().span_id


def test_an_error_marks_its_span(collector: Collector) -> None:
    run(collector, reason="error")
    assert collector.spans["llm_request"].status.status_code is StatusCode.ERROR


def test_a_request_without_a_token_has_no_latencies(collector: Collector) -> None:
    traces = RequestTraces(collector.tracer, "tiny", details=True)
    traces.record_request("r", request(), None)
    traces.note_finished(output(reason="abort", first=0.0), RequestProgress(0.0), 0.0)
    [span] = collector.exporter.get_finished_spans()
    assert not any(name.startswith("gen_ai.latency") for name in span.attributes or {})


def test_a_rejected_request_and_a_registered_prefix(collector: Collector) -> None:
    traces = RequestTraces(collector.tracer, "tiny")
    traces.record_request("r", request(), None)
    traces.record_rejected("r")
    assert collector.spans["llm_request"].status.status_code is StatusCode.ERROR
    traces.record_request("p", request(register_prefix=True), None)
    traces.note_finished(output(1, reason="length"), RequestProgress(0.0), 0.0)
    traces.record_rejected("p")
    assert len(collector.exporter.get_finished_spans()) == 1
    assert traces._requests == {}


@pytest.fixture
async def traced(model_path: Path, collector: Collector) -> AsyncIterator[Served]:
    async with serving(model_path) as served:
        assert served.app is not None
        served.app.add_middleware(TraceParents)
        traces = RequestTraces(collector.tracer, "tiny")
        served.engine.add_listener(traces)
        served.context.metrics.on_finished.append(traces.note_finished)
        yield served


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("headers", "has_parent"),
    [
        ({"traceparent": PARENT}, True),
        ({"traceparent": PARENT, "tracestate": "vendor=1"}, True),
        ({}, False),
        ({"traceparent": "00-nonsense"}, False),
        ({"traceparent": f"00-{0:032x}-{0:016x}-01"}, False),
    ],
)
async def test_the_parent_comes_from_the_request(
    traced: Served, collector: Collector, headers: dict[str, str], has_parent: bool, stream: bool
) -> None:
    body = {"prompt": ["=ab", "=cde"], "n": 2, "stream": stream}
    response = await traced.client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200
    await traced.client.post("/v1/completions", json={"prompt": "=a"})
    *spans, other = collector.exporter.get_finished_spans()
    assert len(spans) == 2
    assert other.parent is None, "the parent of one request is not that of the next"
    for span in spans:
        assert (span.parent is not None) == has_parent
        if span.parent is not None:
            assert (span.parent.trace_id, span.parent.span_id) == (TRACE_ID, PARENT_ID)


class Receiver(http.server.BaseHTTPRequestHandler):
    received: list[tuple[str, ExportTraceServiceRequest]]

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.append((self.path, ExportTraceServiceRequest.FromString(content)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[tuple[str, ExportTraceServiceRequest]]]]:
    """An OTLP endpoint: its address, and what it got."""
    kind = type("Kind", (Receiver,), {"received": []})
    with http.server.HTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", kind.received  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()


async def test_spans_reach_an_otlp_endpoint(
    model_path: Path, receiver: tuple[str, list[tuple[str, ExportTraceServiceRequest]]]
) -> None:
    url, received = receiver
    settings = ServerSettings(otlp_traces_endpoint=url, collect_detailed_traces=["all"], served_model_name=["tiny"])
    async with serving(model_path, settings) as served:
        answer = await served.client.post("/v1/completions", json={"prompt": "=ab"}, headers={"traceparent": PARENT})
        served.context.exit()
    [(path, message)] = received
    assert path == "/v1/traces"
    [resource] = message.resource_spans
    attributes = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert attributes["service.name"] == "quire"
    spans = {span.name: span for scope in resource.scope_spans for span in scope.spans}
    assert set(spans) == {"llm_request", "queue", "prefill", "decode"}
    whole = spans["llm_request"]
    assert whole.trace_id == TRACE_ID.to_bytes(16, "big")
    assert whole.parent_span_id == PARENT_ID.to_bytes(8, "big")
    named = {each.key: each.value for each in whole.attributes}
    assert named["gen_ai.request.id"].string_value == answer.json()["id"]
    assert named["gen_ai.usage.completion_tokens"].int_value == 3


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("http://collector:4318/otlp/traces", "http://collector:4318/otlp/traces"),
    ],
)
def test_addresses(given: str, url: str) -> None:
    assert ServerSettings(otlp_traces_endpoint=given).traces_url == url


@pytest.mark.parametrize("given", ["", "grpc://localhost:4317", "localhost:4317", "http://"])
def test_wrong_addresses(given: str) -> None:
    with pytest.raises(ConfigError, match="OTLP over HTTP"):
        ServerSettings(otlp_traces_endpoint=given)


def test_details_need_an_endpoint() -> None:
    with pytest.raises(ConfigError, match="needs otlp_traces_endpoint"):
        ServerSettings(collect_detailed_traces=["all"])
    with pytest.raises(ConfigError, match="must be one of"):
        ServerSettings(otlp_traces_endpoint="http://localhost", collect_detailed_traces=["everything"])


async def test_without_the_setting_nothing_listens(served: Served) -> None:
    assert served.app is not None
    assert TraceParents not in [each.cls for each in served.app.user_middleware]
    assert not any(isinstance(each, RequestTraces) for each in served.engine._session.listeners)
