"""GET /openapi.json: API description made from the structs that parse requests. Their docstrings are its
descriptions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI, Response
from starlette.routing import Route

from quire.dashboard.frame import Frame
from quire.server.adapters import LoadAdapter, UnloadAdapter
from quire.server.admin import (
    AbortRequest,
    Paused,
    PrefixCacheReset,
    ReplicaState,
    ServerInfo,
    Sleeping,
    Status,
    TokenizerInfo,
)
from quire.server.errors import (
    LLAMA_CPP_PATHS,
    MESSAGES_PATH,
    OLLAMA_PREFIX,
    ErrorBody,
    LlamaErrorBody,
    MessagesErrorBody,
    OllamaErrorBody,
)
from quire.server.health import Health, ServerLoad, Version
from quire.server.invocations import InvocationRequest, InvocationResponse
from quire.server.keys import KeyRing
from quire.server.live import KVHistory
from quire.server.live_admin import AbortLive, LogLines
from quire.server.numbered_adapters import LoraFile, ScalesSet
from quire.server.protocol.anthropic import CountTokensRequest, MessageResponse, MessagesRequest, TokenCount
from quire.server.protocol.chat import ChatBatchRequest, ChatChunk, ChatRequest, ChatResponse
from quire.server.protocol.cohere import CohereEmbedRequest, CohereEmbedResponse
from quire.server.protocol.common import LoraScale
from quire.server.protocol.completion import CompletionRequest, CompletionResponse
from quire.server.protocol.files import (
    BatchList,
    BatchObject,
    BatchRequest,
    FileDeleted,
    FileList,
    FileObject,
    FileUpload,
)
from quire.server.protocol.llama_chat import LlamaChatRequest, LlamaChatResponse
from quire.server.protocol.llama_cpp import (
    LlamaChosenFields,
    LlamaCompletionRequest,
    LlamaEmbedding,
    LlamaEmbeddingRequest,
    LlamaInfillRequest,
    LlamaPrompt,
    LlamaProps,
    LlamaResponse,
    LlamaSlot,
    LlamaTokens,
)
from quire.server.protocol.models import ModelCard, ModelList
from quire.server.protocol.ollama import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbeddingsResponse,
    OllamaEmbedRequest,
    OllamaEmbedResponse,
    OllamaGenerateRequest,
    OllamaModelInfo,
    OllamaModelRequest,
    OllamaModels,
    OllamaResponse,
    OllamaRunningModels,
    OllamaStatus,
    OllamaVersion,
)
from quire.server.protocol.pooling import (
    ClassificationRequest,
    ClassificationResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    PoolingRequest,
    PoolingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from quire.server.protocol.responses import (
    InputTokens,
    ItemList,
    ResponseBody,
    ResponseDeleted,
    ResponsesRequest,
)
from quire.server.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from quire.version import __version__

ERRORS = {
    400: "The request is wrong: the message and `param` say where",
    401: "The API key is missing or wrong",
    403: "The request comes from a web page of another origin, or not from an admin",
    404: "The model is not served here, or cannot do this; or no such response, file or batch is stored",
    408: "The request did not arrive in time",
    413: "The body is larger than the limit",
    415: "The body is not JSON",
    421: "The Host is none of this server's names",
    429: "Too many requests wait already: try again later; or the key has no room for more files or batches",
    431: "The request's head is too large",
    500: "The model computed no numbers, or the server failed",
    503: "The server is shutting down, asleep, or its engine is gone",
}
"""Meaning of each error status, on all routes unless said otherwise below."""

SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""Ways to send a key; one is enough."""

RENDERING = frozenset(
    {
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/tokenize",
        "/api/chat",
        "/api/generate",
        "/apply-template",
        "/chat/completions",
        "/chat/completions/input_tokens",
    }
)
"""Routes that render chat templates, in a separate process."""


_HELLO = [{"role": "user", "content": "hello"}]
_TEXTS = {"input": ["one text", "another"]}
_DOCUMENTS = {"query": "paper", "documents": ["what to write on", "a fish"]}
_PAIRS = {"text_1": "paper", "text_2": ["what to write on", "a fish"]}
EXAMPLES: dict[str, list[Any]] = {
    "/v1/completions": [{"prompt": "def add(a, b):", "max_tokens": 16}, {"prompt": "import", "stream": True}],
    "/v1/chat/completions": [{"messages": _HELLO, "max_tokens": 16}, {"messages": _HELLO, "stream": True}],
    "/v1/chat/completions/batch": [{"messages": [_HELLO, _HELLO], "max_tokens": 16}],
    "/v1/messages": [{"model": "MODEL", "messages": _HELLO, "max_tokens": 16}],
    "/v1/messages/count_tokens": [{"model": "MODEL", "messages": _HELLO}],
    "/v1/responses": [{"input": "hello", "max_output_tokens": 16}],
    "/v1/responses/input_tokens": [{"input": "hello"}],
    "/v1/embeddings": [_TEXTS],
    **{path: [_PAIRS] for path in ("/score", "/v1/score")},
    **{path: [_DOCUMENTS] for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
    "/classify": [_TEXTS],
    "/pooling": [_TEXTS],
    "/tokenize": [{"prompt": "hello"}, {"messages": _HELLO}],
    "/v2/embed": [{"texts": ["one text", "another"], "embedding_types": ["float", "base64"]}],
    "/invocations": [{"prompt": "def add(a, b):", "max_tokens": 16}, {"messages": _HELLO, "max_tokens": 16}],
    "/v1/files": [{"purpose": "batch", "file": "requests.jsonl"}],
    "/v1/batches": [{"input_file_id": "file-abc", "endpoint": "/v1/chat/completions", "completion_window": "24h"}],
    "/abort_requests": [{"request_ids": ["cmpl-1"]}],
    "/debug/abort": [{"request_id": "cmpl-1#1"}],
    "/v1/load_lora_adapter": [{"lora_name": "sql", "lora_path": "/adapters/sql"}],
    "/lora-adapters": [[{"id": 0, "scale": 0.5}]],
    "/v1/unload_lora_adapter": [{"lora_name": "sql"}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
    "/api/chat": [{"model": "MODEL", "messages": _HELLO, "stream": False, "options": {"num_predict": 16}}],
    "/api/generate": [{"model": "MODEL", "prompt": "hello", "stream": False, "options": {"num_predict": 16}}],
    "/api/embed": [{"model": "MODEL", **_TEXTS}],
    "/api/embeddings": [{"model": "MODEL", "prompt": "one text"}],
    **{path: [{"model": "MODEL"}] for path in ("/api/show", "/api/pull")},
    **{path: [{"prompt": "hello", "n_predict": 16}] for path in ("/completion", "/completions")},
    "/infill": [{"input_prefix": "def add(a, b):", "input_suffix": "\n", "n_predict": 16}],
    **{path: [{"content": "one text"}] for path in ("/embedding", "/embeddings")},
    "/chat/completions": [{"messages": _HELLO, "max_tokens": 16}],
    "/chat/completions/input_tokens": [{"messages": _HELLO}],
    "/apply-template": [{"messages": _HELLO}],
}
"""Example bodies by route. MODEL stands for the first served model."""


class Operation(NamedTuple):
    """Method of a path in /openapi.json. response, request: types of the bodies; None: no body. parameters: name ->
    description, for query and path. is_public: needs no key. is_admins: needs an admin's key. is_queued: requests run
    on the engine: 429 and 503 are possible. names_model: 404 for an unknown model or thing. is_list, takes_list: lists
    of `response` and `request`. or_response: alternative. has_quota: 429 at a key's quota."""

    summary: str
    response: type[msgspec.Struct] | None
    request: type[msgspec.Struct] | None = None
    parameters: Mapping[str, str] = MappingProxyType({})
    is_public: bool = False
    is_admins: bool = False
    is_queued: bool = False
    names_model: bool = False
    is_list: bool = False
    takes_list: bool = False
    or_response: type[msgspec.Struct] | None = None
    is_form: bool = False
    has_quota: bool = False
    answers_bytes: bool = False


def _generating(summary: str, request: type[msgspec.Struct], response: type[msgspec.Struct]) -> Operation:
    return Operation(summary, response, request, is_queued=True, names_model=True)


_FILE_ID = {"file_id": "the id of the file"}
_BATCH_ID = {"batch_id": "the id of the batch"}
_RESPONSE_ID = {"response_id": "the id of the response"}
_SCORE = _generating("Scores of pairs of texts", ScoreRequest, ScoreResponse)
_RERANK = _generating("Documents in the order of their relevance", RerankRequest, RerankResponse)
_MODELS = Operation(
    "List the models; Anthropic's words for requests with anthropic-version",
    ModelList,
    parameters={
        "limit": "most models: 1 to 1000 (default)",
        "after_id": "only models behind this one",
        "before_id": "only models before this one",
    },
)
_NO_MODELS = Operation("Refused: the server serves the model that it was started with", OllamaStatus)
_REPLICA = {"replica": "its number, from 0"}
_HEALTH = Operation("Whether requests can be served; 503 says why not", Health, is_public=True)

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("post", "/v1/completions"): _generating("Complete a prompt", CompletionRequest, CompletionResponse),
    ("post", "/v1/chat/completions"): _generating("Answer a conversation", ChatRequest, ChatResponse),
    ("post", "/v1/chat/completions/batch"): _generating(
        "Answer several conversations, a choice each", ChatBatchRequest, ChatResponse
    ),
    ("post", "/v1/messages"): _generating(
        "Answer a conversation, in Anthropic's words", MessagesRequest, MessageResponse
    ),
    ("post", "/v1/messages/count_tokens"): Operation(
        "Count the tokens of a conversation",
        TokenCount,
        CountTokensRequest,
        names_model=True,
    ),
    ("post", "/v1/responses"): _generating("Answer a conversation, as a response", ResponsesRequest, ResponseBody),
    ("get", "/v1/responses/{response_id}"): Operation(
        "A stored response",
        ResponseBody,
        parameters={
            **_RESPONSE_ID,
            "stream": "true: the events of a response made with background and stream",
            "starting_after": "the number of the last event that is known already",
            "include": "without effect: all is there",
            "include_obfuscation": "without effect",
        },
        names_model=True,
    ),
    ("get", "/v1/responses/{response_id}/input_items"): Operation(
        "The conversation that a response answers",
        ItemList,
        parameters={
            **_RESPONSE_ID,
            "after": "the id of the item that comes before the page",
            "limit": "how many items, 1 to 100; 20 by default",
            "order": "desc (default): the last item first; or asc",
            "include": "without effect: all is there",
        },
        names_model=True,
    ),
    ("delete", "/v1/responses/{response_id}"): Operation(
        "Forget a stored response", ResponseDeleted, parameters=_RESPONSE_ID, names_model=True
    ),
    ("post", "/v1/responses/{response_id}/cancel"): Operation(
        "End a response that is made in the background", ResponseBody, parameters=_RESPONSE_ID, names_model=True
    ),
    ("post", "/v1/responses/input_tokens"): Operation(
        "Count the tokens of a conversation", InputTokens, ResponsesRequest, names_model=True
    ),
    ("post", "/v1/files"): Operation("Upload a file of requests", FileObject, FileUpload, is_form=True, has_quota=True),
    ("get", "/v1/files"): Operation(
        "List the files of the key",
        FileList,
        parameters={
            "purpose": "batch or batch_output",
            "limit": "how many files, 1 to 10000 (default)",
            "order": "desc (default): the latest first; or asc",
            "after": "the id of the file that comes before the page",
        },
    ),
    ("get", "/v1/files/{file_id}"): Operation("One file", FileObject, parameters=_FILE_ID, names_model=True),
    ("delete", "/v1/files/{file_id}"): Operation("Delete a file", FileDeleted, parameters=_FILE_ID, names_model=True),
    ("get", "/v1/files/{file_id}/content"): Operation(
        "A file's content", None, parameters=_FILE_ID, names_model=True, answers_bytes=True
    ),
    ("post", "/v1/batches"): Operation(
        "Begin a batch: answer a file of requests", BatchObject, BatchRequest, names_model=True, has_quota=True
    ),
    ("get", "/v1/batches"): Operation(
        "List the batches of the key, the latest first",
        BatchList,
        parameters={
            "limit": "how many batches, 1 to 100; 20 by default",
            "after": "the id of the batch that comes before the page",
        },
    ),
    ("get", "/v1/batches/{batch_id}"): Operation("One batch", BatchObject, parameters=_BATCH_ID, names_model=True),
    ("post", "/v1/batches/{batch_id}/cancel"): Operation(
        "End a batch; its answers so far are kept", BatchObject, parameters=_BATCH_ID, names_model=True
    ),
    ("post", "/v1/embeddings"): _generating("Vectors of texts", EmbeddingRequest, EmbeddingResponse),
    **{("post", path): _SCORE for path in ("/score", "/v1/score")},
    **{("post", path): _RERANK for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
    ("post", "/classify"): _generating("Labels of texts", ClassificationRequest, ClassificationResponse),
    ("post", "/pooling"): _generating("What the model makes of texts", PoolingRequest, PoolingResponse),
    ("get", "/v1/models"): _MODELS,
    ("get", "/models"): Operation("The models, each with its aliases", ModelList),
    ("get", "/v1/models/{name}"): Operation(
        "One model", ModelCard, parameters={"name": "the model's name"}, names_model=True
    ),
    ("post", "/tokenize"): Operation(
        "Text or a conversation to token ids",
        TokenizeResponse,
        TokenizeRequest,
        names_model=True,
        or_response=LlamaTokens,
    ),
    ("post", "/detokenize"): Operation("Token ids to text", DetokenizeResponse, DetokenizeRequest, names_model=True),
    ("get", "/tokenizer_info"): Operation("The tokenizer's configuration and chat template", TokenizerInfo),
    **{("get", path): _HEALTH for path in ("/health", "/ready", "/ping")},
    ("post", "/ping"): _HEALTH,
    ("get", "/version"): Operation("The server's version", Version, is_public=True),
    ("get", "/load"): Operation("How many requests run or wait", ServerLoad),
    ("get", "/debug/kv"): Operation("Every KV block and every live request", Frame),
    ("get", "/debug/kv/history"): Operation("Samples of the last 15 minutes", KVHistory),
    ("post", "/debug/abort"): Operation("End a request early", None, AbortLive, is_admins=True),
    ("get", "/debug/log"): Operation(
        "Latest lines of the log",
        LogLines,
        parameters={"after": "number of the last known line", "process": "name of the process that numbered it"},
        is_admins=True,
    ),
    ("post", "/pause"): Operation(
        "Start no request until /resume; new ones wait",
        Status,
        parameters={
            "mode": "what happens to requests that run: abort (default), wait, keep",
            "clear_cache": "whether cached prefixes are forgotten: true (default) or false; not with keep",
        },
        is_admins=True,
    ),
    ("post", "/resume"): Operation("End a pause", Status, is_admins=True),
    ("get", "/is_paused"): Operation("Whether the engine is paused", Paused, is_admins=True),
    ("post", "/reset_prefix_cache"): Operation(
        "Forget cached prefixes",
        PrefixCacheReset,
        parameters={"reset_running_requests": "only false", "reset_external": "only false"},
        is_admins=True,
    ),
    ("post", "/v2/embed"): _generating("Vectors of texts, as Cohere has them", CohereEmbedRequest, CohereEmbedResponse),
    ("post", "/invocations"): Operation(
        "A request of another route, which its fields tell",
        InvocationResponse,
        InvocationRequest,
        is_queued=True,
        names_model=True,
    ),
    ("post", "/reset_mm_cache"): Operation("Forget the images that this process keeps", None, is_admins=True),
    ("post", "/reset_encoder_cache"): Operation(
        "Nothing: what encoders made depends on content and settings alone", None, is_admins=True
    ),
    ("post", "/abort_requests"): Operation("End answers that are being generated", None, AbortRequest, is_admins=True),
    ("post", "/stop_replica"): Operation("End a replica's engine", ReplicaState, parameters=_REPLICA, is_admins=True),
    ("post", "/start_replica"): Operation("Start a replica again", ReplicaState, parameters=_REPLICA, is_admins=True),
    ("post", "/v1/load_lora_adapter"): Operation(
        "Load an adapter", None, LoadAdapter, is_admins=True, names_model=True
    ),
    ("post", "/v1/unload_lora_adapter"): Operation(
        "Take an adapter's name away", None, UnloadAdapter, is_admins=True, names_model=True
    ),
    ("get", "/server_info"): Operation(
        "How the server is set up", ServerInfo, parameters={"config_format": "json (default) or text"}, is_admins=True
    ),
    ("post", "/sleep"): Operation(
        "Give memory back",
        Sleeping,
        parameters={
            "level": "1 (default) keeps the weights in host memory, 2 drops them, 0 only pauses",
            "mode": "what happens to requests that live: abort (default), wait, keep (400 while there are any)",
        },
        is_admins=True,
    ),
    ("post", "/wake_up"): Operation(
        "Take requests again", Sleeping, parameters={"tags": "weights, then kv_cache; none for both"}, is_admins=True
    ),
    ("get", "/is_sleeping"): Operation("Whether the engine sleeps", Sleeping, is_admins=True),
    ("post", "/api/chat"): _generating("Answer a conversation, in Ollama's words", OllamaChatRequest, OllamaResponse),
    ("post", "/api/generate"): _generating("Answer a prompt, in Ollama's words", OllamaGenerateRequest, OllamaResponse),
    ("post", "/api/embed"): _generating("Vectors of texts, in Ollama's words", OllamaEmbedRequest, OllamaEmbedResponse),
    ("post", "/api/embeddings"): _generating(
        "The vector of a text, in Ollama's words", OllamaEmbeddingsRequest, OllamaEmbeddingsResponse
    ),
    ("get", "/api/tags"): Operation("The models, in Ollama's words", OllamaModels),
    ("get", "/api/ps"): Operation("The models that are loaded: all", OllamaRunningModels),
    ("get", "/api/version"): Operation("The version of Ollama's API", OllamaVersion, is_public=True),
    ("post", "/api/show"): Operation("One model", OllamaModelInfo, OllamaModelRequest, names_model=True),
    ("post", "/api/pull"): Operation(
        "Nothing is fetched: 404 unless the model is served", OllamaStatus, OllamaModelRequest, names_model=True
    ),
    **{("post", f"/api/{name}"): _NO_MODELS for name in ("create", "copy", "push")},
    ("post", "/api/blobs/{digest}"): _NO_MODELS._replace(parameters={"digest": "of the file"}),
    ("delete", "/api/delete"): _NO_MODELS,
    **{
        ("post", path): _generating(
            "Complete a prompt, in llama.cpp's words", LlamaCompletionRequest, LlamaResponse
        )._replace(or_response=LlamaChosenFields)
        for path in ("/completion", "/completions")
    },
    ("post", "/infill"): _generating(
        "Write what stands between two texts, in llama.cpp's words", LlamaInfillRequest, LlamaResponse
    )._replace(or_response=LlamaChosenFields),
    **{
        ("post", path): Operation(
            "Vectors of texts, in llama.cpp's words: a list of these",
            LlamaEmbedding,
            LlamaEmbeddingRequest,
            is_queued=True,
            names_model=True,
            is_list=True,
        )
        for path in ("/embedding", "/embeddings")
    },
    ("post", "/chat/completions"): _generating(
        "Answer a conversation, with llama.cpp's fields", LlamaChatRequest, LlamaChatResponse
    ),
    ("post", "/chat/completions/input_tokens"): Operation(
        "Count the tokens of a conversation", InputTokens, LlamaChatRequest, names_model=True
    ),
    ("post", "/apply-template"): Operation(
        "A conversation as the chat template writes it", LlamaPrompt, LlamaChatRequest, names_model=True
    ),
    ("get", "/props"): Operation("What the server is, in llama.cpp's words", LlamaProps),
    ("get", "/slots"): Operation(
        "Places of the batch: a list of these",
        LlamaSlot,
        parameters={"fail_on_no_slot": "503 where all are taken"},
        is_list=True,
    ),
    ("get", "/lora-adapters"): Operation("Adapters by llama.cpp's ids: a list of these", LoraFile, is_list=True),
    ("post", "/lora-adapters"): Operation(
        "Set the scales of requests that name none", ScalesSet, LoraScale, is_admins=True, takes_list=True
    ),
    ("get", "/v1/health"): _HEALTH,
}
"""Described routes: all enabled ones but pages, live streams, /metrics and this document."""


def add_openapi_route(app: FastAPI) -> None:
    """Describe the routes that `app` has so far."""
    existing = {
        (method.lower(), route.path.replace(":path}", "}"))
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
    }

    context = app.state.context
    keys = KeyRing.of(context.settings)

    @app.get("/openapi.json")
    async def openapi() -> Response:
        document = api_description(existing, keys, context.model_names[0])
        if root_path := context.settings.root_path.rstrip("/"):
            document["servers"] = [{"url": root_path}]
        return Response(msgspec.json.encode(document), media_type="application/json")


def api_description(
    existing: Collection[tuple[str, str]] | None = None, keys: KeyRing | None = None, model: str = "MODEL"
) -> dict[str, Any]:
    """OpenAPI 3.1 document of these (method, path) pairs; None: all. keys: server's keys, if any. model: name in
    examples."""
    operations = {key: each for key, each in OPERATIONS.items() if existing is None or key in existing}
    structs = [
        struct
        for each in operations.values()
        for struct in (each.request, each.response, each.or_response)
        if struct is not None
    ]
    structs = list(dict.fromkeys([*structs, ChatChunk, ErrorBody, MessagesErrorBody, OllamaErrorBody, LlamaErrorBody]))
    references, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(structs, references, strict=True))
    paths: dict[str, Any] = {}
    for (method, path), each in operations.items():
        answer: dict[str, Any] = {"200": {"description": "OK"}}
        if each.response is not None:
            shape = schemas[each.response]
            if each.is_list:
                shape = {"type": "array", "items": shape}
            if each.or_response is not None:
                shape = {"anyOf": [shape, schemas[each.or_response]]}
            answer["200"]["content"] = _json(shape)
        if each.answers_bytes:
            answer["200"]["content"] = {"application/octet-stream": {}}
        if each.request is not None and "stream" in each.request.__struct_fields__:
            is_ollama = path.startswith(OLLAMA_PREFIX)
            answer["200"]["content"]["application/x-ndjson" if is_ollama else "text/event-stream"] = {}
        error = _error_of(path)
        for status in statuses(each):
            answer[str(status)] = {"description": _meaning(status, path), "content": _json(schemas[error])}
        operation: dict[str, Any] = {"summary": each.summary, "responses": answer}
        if each.request is not None:
            shape = {"type": "array", "items": schemas[each.request]} if each.takes_list else schemas[each.request]
            content = {"examples": _examples(path, model), "schema": shape}
            content = {"multipart/form-data" if each.is_form else "application/json": content}
            operation["requestBody"] = {"required": True, "content": content}
        if keys is not None and _asks_for_key(each, keys):
            operation["security"] = [{name: []} for name in SECURITY]
        if each.parameters:
            operation["parameters"] = [_parameter(name, text, path) for name, text in each.parameters.items()]
        paths.setdefault(path, {})[method] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": SECURITY},
    }


def _error_of(path: str) -> type[msgspec.Struct]:
    if path.startswith(OLLAMA_PREFIX):
        return OllamaErrorBody
    if path in LLAMA_CPP_PATHS:
        return LlamaErrorBody
    return MessagesErrorBody if path.startswith(MESSAGES_PATH) else ErrorBody


def _asks_for_key(operation: Operation, keys: KeyRing) -> bool:
    if operation.is_public:
        return False
    return keys.anyone is None or (operation.is_admins and keys.has_admin_keys)


def _examples(path: str, model: str) -> dict[str, Any]:
    bodies = [{**body, "model": model} if "model" in body else body for body in EXAMPLES[path]]
    return {str(number): {"value": body} for number, body in enumerate(bodies, start=1)}


def _parameter(name: str, text: str, path: str) -> dict[str, Any]:
    is_in_path = f"{{{name}}}" in path
    return {
        "name": name,
        "in": "path" if is_in_path else "query",
        "required": is_in_path,
        "description": text,
        "schema": {"type": "string"},
    }


def statuses(operation: Operation) -> list[int]:
    left_out = set()
    if operation.request is None:
        left_out.add(413)
    if operation.is_public:
        left_out.add(401)
    if not operation.names_model:
        left_out.add(404)
    if not (operation.is_queued or operation.has_quota):
        left_out.add(429)
    return [status for status in ERRORS if status not in left_out]


def _meaning(status: int, path: str) -> str:
    if status == 500 and path in RENDERING:
        return f"{ERRORS[status]}, or the process that renders chat templates ended (`chat_template_error`)"
    return ERRORS[status]


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
