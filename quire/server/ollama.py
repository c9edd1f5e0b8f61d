"""Ollama's API (docs/doors.md): chats and prompts as turns of the chat endpoint or completions, and facts about
models."""

from __future__ import annotations

import datetime
import hashlib
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.types import Scope

from quire.config.model import ModelConfig
from quire.errors import UserError
from quire.pooling_params import PoolingParams
from quire.server.auth import public
from quire.server.body import parse_fields, report_ignored
from quire.server.chat import AskedRoute
from quire.server.context import ServerContext
from quire.server.disconnect import run_until_disconnect
from quire.server.errors import ApiError, api_error, error_body, invalid_request
from quire.server.json_bodies import any_type
from quire.server.pooling import add_pooling_route, run_texts
from quire.server.protocol.completion import CompletionRequest
from quire.server.protocol.messages import found_messages
from quire.server.protocol.ollama import (
    NAMES,
    VERSION,
    OllamaAnswerMessage,
    OllamaCalledFunction,
    OllamaChatRequest,
    OllamaDetails,
    OllamaEmbeddingsRequest,
    OllamaEmbeddingsResponse,
    OllamaEmbedRequest,
    OllamaEmbedResponse,
    OllamaFields,
    OllamaGenerateRequest,
    OllamaModel,
    OllamaModelInfo,
    OllamaModelRequest,
    OllamaModels,
    OllamaResponse,
    OllamaRunningModel,
    OllamaRunningModels,
    OllamaStatus,
    OllamaToolCall,
    OllamaVersion,
)
from quire.server.reading import read_request
from quire.server.responses import json_response
from quire.server.settings import OLLAMA_TAG
from quire.server.streaming import EventStream
from quire.server.turn import Event, Kind, Segment, Step, Turn, begin_completion, begin_turn, chat_body
from quire.tokenization.conversation import Messages, messages_of
from quire.tokenization.infill import SUFFIX, TEXT, family_of

NEVER = "2318-01-01T00:00:00Z"
"""Unload time of a loaded model."""
NANOSECONDS_PER_MS = 1_000_000
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
REFUSED = (
    "models are not made, copied, uploaded or deleted through this server: it serves the one that it was started with"
)

_encoder = msgspec.json.Encoder()


class NdjsonStream(EventStream):
    """Stream of JSON objects, one per line."""

    media_type = "application/x-ndjson"


def add_ollama_routes(app: FastAPI, context: ServerContext) -> None:
    _add_chat_route(app, context)
    _add_generate_route(app, context)
    add_pooling_route(app, context, ("/api/embed",), "embed", OllamaEmbedRequest, _embed, any_type)
    add_pooling_route(app, context, ("/api/embeddings",), "embed", OllamaEmbeddingsRequest, _embeddings, any_type)
    _add_model_routes(app, context)
    _add_refusals(app)

    @app.get("/api/version")
    @app.head("/api/version")
    @public
    async def version() -> Response:
        return json_response(OllamaVersion(VERSION))


def tagged(name: str) -> str:
    """Model name in Ollama's lists: with ":latest" unless it has a tag."""
    return name if ":" in name.rpartition("/")[2] else name + OLLAMA_TAG


def _add_chat_route(app: FastAPI, context: ServerContext) -> None:
    @app.post("/api/chat")
    @any_type
    async def chat(request: Request) -> Response:
        body = await read_request(request, context, OllamaChatRequest)
        name = context.served_name(body.model)
        report_ignored(request, context, body.options.noted)
        if not body.messages:
            return _loaded(context, body, message=OllamaAnswerMessage())
        _check_thinking(context, body)
        turn = _turn(context, request, body, name, found_messages(body.messages))
        return await _answer(request, body, turn, _ChatForm(body.model))


def _add_generate_route(app: FastAPI, context: ServerContext) -> None:
    @app.post("/api/generate")
    @any_type
    async def generate(request: Request) -> Response:
        body = await read_request(request, context, OllamaGenerateRequest)
        name = context.served_name(body.model)
        report_ignored(request, context, body.options.noted)
        if not body.prompt and not body.suffix and not body.images:
            return _loaded(context, body, response="")
        if body.raw or body.suffix or context.tokenizer.chat_template is None:
            turn = _completion(context, request, body, name)
        else:
            _check_thinking(context, body)
            messages = await context.engine.texts.off_loop(body.size, lambda: messages_of(body.chat_messages))
            turn = _turn(context, request, body, name, messages)
        return await _answer(request, body, turn, _PromptForm(body.model))


def _turn(context: ServerContext, request: Request, body: OllamaFields, name: str, messages: Messages) -> Turn:
    fields = body.to_chat(name, context.engine.model_config.sampling_defaults, context.engine.ready.max_model_len)
    chat = chat_body(fields, messages, NAMES)
    asked = AskedRoute("other", is_streamed=body.stream)
    return begin_turn(context, request, chat, NAMES, asked=asked, ends_with_context=True)


def _completion(context: ServerContext, request: Request, body: OllamaGenerateRequest, name: str) -> Turn:
    if body.system or body.think or body.images:
        raise UserError("system, think and images need a chat template, which this model does not have", param="system")
    defaults, longest = context.engine.model_config.sampling_defaults, context.engine.ready.max_model_len
    try:
        completion = parse_fields(body.to_completion(name, defaults, longest), CompletionRequest)[0]
    except (ApiError, UserError) as error:
        raise error.named(NAMES) from None
    return begin_completion(context, request, completion, NAMES, ends_with_context=True)


def _check_thinking(context: ServerContext, body: OllamaFields) -> None:
    if body.think and context.formats.reasoning is None:
        message = (
            f"{body.model!r:.200} does not support thinking (on this server: --reasoning-parser names how it thinks)"
        )
        raise invalid_request(message, param="think")


def _loaded(
    context: ServerContext,
    body: OllamaFields,
    *,
    message: OllamaAnswerMessage | msgspec.UnsetType = msgspec.UNSET,
    response: str | msgspec.UnsetType = msgspec.UNSET,
) -> Response:
    context.admit()
    answer = OllamaResponse(
        model=body.model, created_at=_now(), message=message, response=response, done=True, done_reason="load"
    )
    return json_response(answer)


async def _answer(request: Request, body: OllamaFields, turn: Turn, form: _ChatForm | _PromptForm) -> Response:
    headers = {"X-Request-Id": turn.response_id}
    if body.stream:
        return NdjsonStream(_lines(turn, form), headers, error_event=_error_line)
    await run_until_disconnect(request.receive, turn.run())
    whole = form.whole(turn.segments)
    if body.logprobs:
        whole.logprobs = [entry for segment in turn.segments for entry in segment.logprobs]
    return json_response(_ended(whole, turn), headers)


async def _lines(turn: Turn, form: _ChatForm | _PromptForm) -> AsyncGenerator[bytes, None]:
    async with aclosing(turn.events()) as events:
        async for event in events:
            if (line := form.piece(event)) is not None:
                if event.logprobs:
                    line.logprobs = list(event.logprobs)
                yield _line(line)
    yield _line(_ended(form.whole([]), turn))


def _ended(answer: OllamaResponse, turn: Turn) -> OllamaResponse:
    usage, times = turn.usage, turn.times
    prompt, tokens = times.time_to_first_token_ms or 0.0, times.generation_time_ms or 0.0
    answer.done = True
    answer.done_reason = "length" if turn.finish_reason == "length" else "stop"
    answer.total_duration = round(((times.queue_time_ms or 0.0) + prompt + tokens) * NANOSECONDS_PER_MS)
    answer.load_duration = 0
    answer.prompt_eval_count, answer.eval_count = usage.prompt_tokens, usage.completion_tokens
    # Clients divide by the durations: never 0.
    answer.prompt_eval_duration, answer.eval_duration = (
        max(1, round(ms * NANOSECONDS_PER_MS)) for ms in (prompt, tokens)
    )
    return answer


class _ChatForm:
    def __init__(self, model: str) -> None:
        self._model = model
        self._num_calls = 0

    def piece(self, event: Event) -> OllamaResponse | None:
        """Line for the event; None if there is nothing to send."""
        segment = event.segment
        if segment is None:
            return None
        if event.step is Step.GROW and segment.kind is not Kind.CALL:
            is_text = segment.kind is Kind.TEXT
            message = OllamaAnswerMessage(content=event.piece) if is_text else OllamaAnswerMessage(thinking=event.piece)
        elif event.step is Step.CLOSE and segment.kind is Kind.CALL:
            message = OllamaAnswerMessage(tool_calls=[self._call(segment)])
        else:
            return None
        return self._response(message)

    def whole(self, segments: list[Segment]) -> OllamaResponse:
        message = OllamaAnswerMessage(content=_joined(segments, Kind.TEXT))
        if thinking := _joined(segments, Kind.REASONING):
            message.thinking = thinking
        if calls := [self._call(segment) for segment in segments if segment.kind is Kind.CALL]:
            message.tool_calls = calls
        return self._response(message)

    def _call(self, segment: Segment) -> OllamaToolCall:
        self._num_calls += 1
        function = OllamaCalledFunction(segment.name, segment.arguments, self._num_calls - 1)
        return OllamaToolCall(segment.call_id, function)

    def _response(self, message: OllamaAnswerMessage) -> OllamaResponse:
        return OllamaResponse(model=self._model, created_at=_now(), message=message)


class _PromptForm:
    def __init__(self, model: str) -> None:
        self._model = model

    def piece(self, event: Event) -> OllamaResponse | None:
        if event.segment is None or event.step is not Step.GROW:
            return None
        is_text = event.segment.kind is Kind.TEXT
        return self._response(event.piece, "") if is_text else self._response("", event.piece)

    def whole(self, segments: list[Segment]) -> OllamaResponse:
        return self._response(_joined(segments, Kind.TEXT), _joined(segments, Kind.REASONING))

    def _response(self, text: str, thinking: str) -> OllamaResponse:
        given = thinking or msgspec.UNSET
        return OllamaResponse(model=self._model, created_at=_now(), response=text, thinking=given)


def _joined(segments: list[Segment], kind: Kind) -> str:
    return "".join(segment.text for segment in segments if segment.kind is kind)


def _line(answer: msgspec.Struct) -> bytes:
    return _encoder.encode(answer) + b"\n"


def _error_line(error: ApiError, scope: Scope) -> bytes:
    return error_body(error, scope) + b"\n"


def _now() -> str:
    return _rfc3339(time.time())


def _rfc3339(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")


async def _embed(context: ServerContext, body: OllamaEmbedRequest) -> OllamaEmbedResponse:
    started = time.monotonic()
    params, texts = body.params(), body.texts
    names = ["input"] * len(texts)
    outputs = await run_texts(context, body, params, [(text, None) for text in texts], names) if texts else []
    return OllamaEmbedResponse(
        model=body.model or "",
        embeddings=[context.engine.pooling.vector(output, params) for output in outputs],
        total_duration=round((time.monotonic() - started) * 1e9),
        prompt_eval_count=sum(len(output.prompt_token_ids) for output in outputs),
    )


async def _embeddings(context: ServerContext, body: OllamaEmbeddingsRequest) -> OllamaEmbeddingsResponse:
    params = PoolingParams(truncate_prompt_tokens=-1)
    if not body.prompt:
        return OllamaEmbeddingsResponse([])
    [output] = await run_texts(context, body, params, [(body.prompt, None)], ["prompt"])
    return OllamaEmbeddingsResponse(context.engine.pooling.vector(output, params))


def _add_model_routes(app: FastAPI, context: ServerContext) -> None:
    model, longest = context.engine.model_config, context.engine.ready.max_model_len
    size, digest = _fingerprint(model.path)
    details = _details(model)

    @app.get("/api/tags")
    async def tags() -> Response:
        return json_response(
            OllamaModels(
                [
                    OllamaModel(
                        name=tagged(name),
                        model=tagged(name),
                        modified_at=_rfc3339(context.created),
                        size=size,
                        digest=digest,
                        details=details,
                    )
                    for name in context.usable(context.model_names)
                ]
            )
        )

    @app.get("/api/ps")
    async def running() -> Response:
        context.check_alive()
        on_gpu = 0 if context.engine.engine_config.device.device == "cpu" else size
        return json_response(
            OllamaRunningModels(
                [
                    OllamaRunningModel(
                        name=tagged(name),
                        model=tagged(name),
                        size=size,
                        digest=digest,
                        details=details,
                        expires_at=NEVER,
                        size_vram=on_gpu,
                        context_length=longest,
                    )
                    for name in context.usable(context.model_names)
                ]
            )
        )

    @app.post("/api/show")
    @any_type
    async def show(request: Request) -> Response:
        body = await read_request(request, context, OllamaModelRequest)
        context.served_name(body.wanted)
        return json_response(_info(context, details))

    @app.post("/api/pull")
    @any_type
    async def pull(request: Request) -> Response:
        body = await read_request(request, context, OllamaModelRequest)
        context.served_name(body.wanted)
        done = OllamaStatus("success")
        if not body.stream:
            return json_response(done)
        lines = _line(OllamaStatus("pulling manifest")) + _line(done)
        return Response(lines, media_type=NdjsonStream.media_type)


def _add_refusals(app: FastAPI) -> None:
    async def refuse() -> Response:
        raise api_error(403, REFUSED, "not_supported")

    for method, path in (
        ("POST", "/api/create"),
        ("POST", "/api/copy"),
        ("POST", "/api/push"),
        ("DELETE", "/api/delete"),
        ("POST", "/api/blobs/{digest}"),
    ):
        app.add_api_route(path, any_type(refuse), methods=[method])


def _fingerprint(path: Path) -> tuple[int, str]:
    files = [path] if path.is_file() else sorted(each for each in path.glob("*") if each.suffix in WEIGHTS)
    found = [(each.name, status.st_size, status.st_mtime_ns) for each in files for status in (each.stat(),)]
    return sum(size for _, size, _ in found), hashlib.sha256(repr((str(path), found)).encode()).hexdigest()


def _details(model: ModelConfig) -> OllamaDetails:
    return OllamaDetails(
        format="gguf" if model.is_gguf else "safetensors",
        family=model.shape.family,
        families=[model.shape.family],
        parameter_size=_short(model.shape.parameters()),
        quantization_level=model.weight_format.upper(),
    )


def _short(number: int) -> str:
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.2f}M"


def capabilities(context: ServerContext) -> list[str]:
    """Capabilities of the model, by Ollama's names."""
    pooling = context.engine.model_config.pooling
    if pooling is not None:
        return ["embedding"] if pooling.task == "embed" else []
    formats, has_template = context.formats, context.tokenizer.chat_template is not None
    found = {
        "completion": True,
        "tools": has_template and formats.tools is not None,
        "thinking": has_template and formats.reasoning is not None,
        "insert": family_of(context.tokenizer) is not None,
    }
    return [name for name, is_able in found.items() if is_able]


def _info(context: ServerContext, details: OllamaDetails) -> OllamaModelInfo:
    model, shape = context.engine.model_config, context.engine.model_config.shape
    family = details.family
    info = {
        "general.architecture": family,
        "general.basename": context.model_names[0],
        "general.parameter_count": shape.parameters(),
        f"{family}.context_length": context.engine.ready.max_model_len,
        f"{family}.embedding_length": shape.hidden,
        f"{family}.block_count": shape.num_layers,
        f"{family}.vocab_size": shape.vocab,
    }
    defaults = {**model.sampling_defaults}
    return OllamaModelInfo(
        modelfile=f"FROM {context.model_names[0]}\n",
        parameters="\n".join(f"{name:<30} {value}" for name, value in sorted(defaults.items())),
        template=_template(context),
        details=details,
        model_info=info,
        capabilities=capabilities(context),
        modified_at=_rfc3339(context.created),
    )


def _template(context: ServerContext) -> str:
    able = capabilities(context)
    if "completion" not in able:
        return ""
    tools = "{{ if .Tools }}{{ .Tools }}{{ end }}" if "tools" in able else ""
    has_system = context.tokenizer.chat_template is not None
    plain = f"{tools}{'{{ .System }}' if has_system else ''}{{{{ .Prompt }}}}"
    family = family_of(context.tokenizer)
    if family is None:
        return plain
    places = {TEXT: "{{ .Prompt }}", SUFFIX: "{{ .Suffix }}"}
    infilled = "".join(places.get(part, part) for part in family)
    return f"{{{{- if .Suffix }}}}{infilled}{{{{- else }}}}{plain}{{{{- end }}}}"
