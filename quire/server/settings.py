"""ServerSettings: options of the HTTP server besides the engine's."""

from __future__ import annotations

import re
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import msgspec

from quire.config.option import (
    ACCESS,
    ADAPTERS,
    ANSWERS,
    FILES,
    FIRST,
    HTTP,
    IMAGES,
    KV,
    OBSERVE,
    SCHEDULING,
)
from quire.envs import LOG_FORMATS
from quire.errors import ConfigError, nearest_name
from quire.request import MAX_PRIORITY
from quire.tokenization.conversation import ContentFormat
from quire.tokenization.jobs import RESERVED_OPTIONS
from quire.utils.heartbeat import HUNG_ENGINE_TIMEOUT, SILENCE_LIMIT
from quire.utils.sizes import parse_bytes

if TYPE_CHECKING:
    from quire.config.adapter_files import FileScale

MAX_PORT = 65535
MAX_API_SERVERS = 64
METRICS_NAMES = ("vllm", "quire", "both")
DRAFT_LEVELS = ("none", "summary", "detailed")
DIALECTS = ("openai", "vllm")
OLLAMA, LLAMA_CPP = "ollama", "llama.cpp"
NO_DOORS = "none"
OLLAMA_TAG = ":latest"
"""Default tag of a model name."""
DETAILED_TRACES = ("model", "worker", "all")
MAX_NUM_HEADERS = 4096
MAX_HEAD_BYTES = 16 * 2**20
BODY_BYTES, BODY_BYTES_WITH_IMAGES = 8 * 2**20, 64 * 2**20
"""Default limits of a request body in bytes: text models, image models."""
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@,]+")
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|[0-9A-Fa-f]*:[0-9A-Fa-f:.]*")


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one server. Invalid values raise ConfigError with `param` set.
    served_model_name: the first name is the one in responses. restart_engine: None: on if `data_parallel_size` exceeds
    1. log_format: None follows `QUIRE_LOG_FORMAT`. admin_api_key: keys may also come from the key file.
    tool_call_parser, reasoning_parser: "none" turns parsing off. root_path: requests that still have it are served too.
    files_quota, max_file_size, max_files, max_open_batches: need files_dir."""

    host: Annotated[str, FIRST("address to listen on")] = "127.0.0.1"
    port: Annotated[int, FIRST("port to listen on (0: any free one)")] = 8000
    served_model_name: Annotated[
        list[str], FIRST("name of the model in the API; may be given several times (default: the model as given)")
    ] = []
    api_key: Annotated[
        list[str], FIRST("key that clients must send as 'Authorization: Bearer KEY'; may be given several times")
    ] = []
    api_key_file: Annotated[
        str | None,
        ACCESS("TOML file of further keys: a table [NAME] for each client, with key and perhaps priority_range"),
    ] = None
    max_body_size: Annotated[
        int | str | None, HTTP("largest request body, such as 8MiB (default: 8MiB; 64MiB of models that take images)")
    ] = None
    max_num_queued: Annotated[
        int | None, SCHEDULING("most requests that may wait before new ones are refused with 429")
    ] = 4096
    max_num_queued_tokens: Annotated[
        int | None, SCHEDULING("most prompt tokens that may wait before new requests are refused with 429")
    ] = None
    priority_range: Annotated[
        str,
        SCHEDULING("priorities LOW,HIGH that clients may send, with --scheduling-policy priority; lower is earlier"),
    ] = "0,100"
    restart_engine: Annotated[
        bool | None, HTTP("when an engine dies, start another one, in which its requests go on (default: with several)")
    ] = None
    hung_engine_timeout: Annotated[
        float, HTTP("seconds without a sign of life after which --restart-engine ends the engine (0: never)")
    ] = HUNG_ENGINE_TIMEOUT
    api_server_count: Annotated[
        int, HTTP("API processes in front of the engine: more where one is at the limit of its core")
    ] = 1
    shutdown_timeout: Annotated[float, HTTP("seconds that running requests get to finish after SIGTERM")] = 30.0
    preload_prefix: Annotated[
        list[str], KV("text file that is computed and kept as a prefix before the start; may be given several times")
    ] = []
    lora_modules: Annotated[
        list[str],
        ADAPTERS("adapters to load at the start: NAME=PATH, or a JSON object with name, path and base_model_name"),
    ] = []
    lora_dir: Annotated[
        str | None,
        ADAPTERS("directory of adapters: a request whose model is the name of one of its folders gets that adapter"),
    ] = None
    lora: Annotated[
        list[str],
        ADAPTERS("GGUF file or directory of the adapter that requests of the model get, as llama.cpp's (FILE,...)"),
    ] = []
    lora_scaled: Annotated[list[str], ADAPTERS("the same with the scale of what it adds: FILE:SCALE,...")] = []
    lora_init_without_apply: Annotated[
        bool, ADAPTERS("load the adapters of --lora with scale 0: requests or POST /lora-adapters set it")
    ] = False
    cors_allowed_origins: Annotated[
        list[str],
        ACCESS(
            "origin that browsers may call from ('app://*': all of a scheme, '*': any); may be given several times",
            "--allowed-origins",
        ),
    ] = []
    allowed_hosts: Annotated[
        list[str],
        ACCESS(
            "name that clients may call the server by, besides its own ('*.example.com': all names under it, '*': "
            "any); may be given several times"
        ),
    ] = []
    keep_alive_timeout: Annotated[
        float, HTTP("seconds that a connection may stay open between requests, and before the first")
    ] = 30.0
    header_timeout: Annotated[float, HTTP("seconds that the head of a request may take to arrive")] = 10.0
    body_timeout: Annotated[float, HTTP("seconds that the body of a request may take to arrive")] = 60.0
    write_timeout: Annotated[float, HTTP("seconds without reading after which a client is cut off")] = 60.0
    max_connections: Annotated[int, HTTP("most connections at a time; more are refused with 503")] = 8192
    max_total_body_size: Annotated[
        int | str, HTTP("most bytes of request bodies that are received at a time; more are refused with 503")
    ] = "256MiB"
    ssl_keyfile: Annotated[str | None, ACCESS("private key file: serve https")] = None
    ssl_certfile: Annotated[str | None, ACCESS("certificate file: serve https")] = None
    ssl_ca_certs: Annotated[str | None, ACCESS("file of the authorities that sign clients' certificates")] = None
    ssl_cert_reqs: Annotated[
        int, ACCESS("whether clients need a certificate: 0 no, 1 checked if they have one, 2 yes")
    ] = int(ssl.CERT_NONE)
    enable_ssl_refresh: Annotated[
        bool, ACCESS("renew the certificate when the files of certificate, key or authorities change")
    ] = False
    ssl_ciphers: Annotated[str | None, ACCESS("ciphers of TLS 1.2 and below, as OpenSSL writes them")] = None
    max_head_size: Annotated[int | str, HTTP("most bytes of a request's line, headers and trailers")] = "64KiB"
    max_num_headers: Annotated[int, HTTP("most headers of a request")] = 128
    uds: Annotated[str | None, HTTP("Unix socket to listen on, in place of host and port")] = None
    root_path: Annotated[str, HTTP("path that a proxy in front of the server takes off, such as /llm")] = ""
    response_role: Annotated[str, ANSWERS("role of the answers in chats")] = "assistant"
    enable_force_include_usage: Annotated[
        bool, ANSWERS("put the usage so far in every chunk of every stream, asked for or not")
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool, ANSWERS("log-probabilities name tokens token_id:N, unless a request says otherwise")
    ] = False
    stream_interval: Annotated[
        int | None,
        SCHEDULING("tokens of each chunk of a stream after the first, unless a request says (default: what comes)"),
    ] = None
    default_chat_template_kwargs: Annotated[
        dict[str, Any], ANSWERS("JSON object of what chat templates get, where a request does not say otherwise")
    ] = {}
    enable_log_requests: Annotated[
        bool, OBSERVE("log each request's id, sizes, parameters and times (with QUIRE_LOG_LEVEL=DEBUG its prompt)")
    ] = False
    max_log_len: Annotated[int | None, OBSERVE("most characters and tokens of a prompt in the log (default: all)")] = (
        None
    )
    disable_fastapi_docs: Annotated[bool, HTTP("serve no /docs and no /openapi.json")] = False
    access_log: Annotated[bool, OBSERVE("log one line for each HTTP request")] = False
    disable_log_stats: Annotated[bool, OBSERVE("log no line of statistics every 10 s while requests run")] = False
    metrics_names: Annotated[
        str, OBSERVE("names of the metrics that vLLM has too: vllm (vllm:...), quire (quire_...) or both")
    ] = "vllm"
    protect_metrics: Annotated[bool, ACCESS("ask for a key on /metrics too")] = False
    enable_per_request_metrics: Annotated[
        bool, OBSERVE("tell the times of each request in its answer, unless its include_metrics is false")
    ] = False
    per_request_spec_decode_metrics: Annotated[
        str, OBSERVE("tell what became of a request's drafts in its answer: none, summary, detailed")
    ] = "none"
    log_format: Annotated[str | None, OBSERVE("text or json: one object a line, with request ids")] = None
    otlp_traces_endpoint: Annotated[
        str | None,
        OBSERVE("address that takes OpenTelemetry spans by OTLP over HTTP, such as http://localhost:4318/v1/traces"),
    ] = None
    collect_detailed_traces: Annotated[
        list[str], OBSERVE("model, worker or all: a span for each phase of a request; may be given several times")
    ] = []
    strict_fields: Annotated[
        bool, ANSWERS("refuse requests with unknown fields (without it they are accepted, and reported in a header)")
    ] = False
    trust_request_chat_template: Annotated[bool, ACCESS("take chat templates from requests (chat_template)")] = False
    trust_request_mm_kwargs: Annotated[bool, IMAGES("take mm_processor_kwargs and media_io_kwargs from requests")] = (
        False
    )
    enable_auto_tool_choice: Annotated[
        bool, ANSWERS("do not start unless the model's way to write tool calls is known")
    ] = False
    tool_call_parser: Annotated[
        str | None, ANSWERS("how the model writes tool calls, such as hermes (default: as its chat template shows)")
    ] = None
    reasoning_parser: Annotated[
        str | None,
        ANSWERS("how the model writes its thoughts, such as qwen3, or auto (default: they stay in the content)"),
    ] = None
    exclude_tools_when_tool_choice_none: Annotated[
        bool, ANSWERS("keep tools from the chat template where tool_choice is none")
    ] = False
    enable_request_id_headers: Annotated[
        bool, ANSWERS("return the X-Request-Id of each request, or one of the server's")
    ] = False
    chat_template_content_format: Annotated[
        ContentFormat,
        ANSWERS(
            "how chat templates get the content of messages: string, openai (a list of parts) "
            "or auto (as the template asks for it)"
        ),
    ] = "auto"
    enable_admin_routes: Annotated[
        bool,
        ACCESS(
            "serve POST /pause, /resume, /abort_requests, /reset_prefix_cache, /stop_replica and "
            "/start_replica, and GET /server_info"
        ),
    ] = False
    enable_sleep_mode: Annotated[
        bool, ACCESS("serve POST /sleep and /wake_up, by which clients give the engine's memory back")
    ] = False
    admin_api_key: Annotated[
        list[str],
        ACCESS(
            "key that control routes ask for; may be given several times (default: only clients on this "
            "machine may use them)"
        ),
    ] = []
    max_stored_responses: Annotated[
        int, ANSWERS("responses of /v1/responses that are kept for requests that go on from them; 0: none")
    ] = 1000
    response_store_size: Annotated[int | str, ANSWERS("most memory that these responses may take, such as 64MiB")] = (
        "64MiB"
    )
    files_dir: Annotated[
        str | None, FILES("directory of clients' files: serve /v1/files and /v1/batches; one server may use it")
    ] = None
    files_quota: Annotated[int | str, FILES("most bytes of the files of one key, such as 8GiB")] = "8GiB"
    max_file_size: Annotated[int | str, FILES("largest file that may be uploaded, such as 200MiB")] = "200MiB"
    max_files: Annotated[int, FILES("most files of one key")] = 1000
    max_open_batches: Annotated[int, FILES("most batches of one key that have not ended")] = 20
    enable_tokenizer_info_endpoint: Annotated[
        bool, ACCESS("serve GET /tokenizer_info: the tokenizer's configuration and chat template")
    ] = False
    dialect: Annotated[
        str, ANSWERS("openai or vllm: whose error codes and bounds the API has where the two differ")
    ] = "openai"
    api: Annotated[
        str, ANSWERS("APIs of other servers that are spoken too: ollama,llama.cpp (default), one of them, or none")
    ] = f"{OLLAMA},{LLAMA_CPP}"

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("host must not be empty", param="host")
        for name, low, high in (("port", 0, MAX_PORT), ("api_server_count", 1, MAX_API_SERVERS)):
            if not low <= getattr(self, name) <= high:
                value = getattr(self, name)
                raise ConfigError(f"{name} must be between {low} and {high}, not {value}", param=name)
        for name in ("api_key", "admin_api_key"):
            if not isinstance(getattr(self, name), list):  # each character of a string would become a key
                raise ConfigError(f"{name} must be a list of keys", param=name)
            if not all(key.strip() for key in getattr(self, name)):
                raise ConfigError(f"{name} must not be empty", param=name)
        for name in ("max_num_queued", "max_num_queued_tokens"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise ConfigError(f"{name} must be at least 1, not {limit}", param=name)
        if not 0 <= self.shutdown_timeout < float("inf"):
            raise ConfigError(
                f"shutdown_timeout must be a number of seconds >= 0, not {self.shutdown_timeout}",
                param="shutdown_timeout",
            )
        for name in ("keep_alive_timeout", "header_timeout", "body_timeout", "write_timeout"):
            seconds = getattr(self, name)
            if not 0 < seconds < float("inf"):
                raise ConfigError(f"{name} must be a number of seconds > 0, not {seconds}", param=name)
        if self.max_connections < 1:
            raise ConfigError(
                f"max_connections must be at least 1, not {self.max_connections}", param="max_connections"
            )
        for name in ("served_model_name", "preload_prefix", "lora_modules", "cors_allowed_origins", "allowed_hosts"):
            if not all(getattr(self, name)):
                raise ConfigError(f"{name} must not hold an empty string", param=name)
        _ = self.lora_files
        self._check_tls()
        if self.root_path and not (self.root_path.startswith("/") and self.root_path.strip("/")):
            raise ConfigError(f"root_path must be a path such as /llm, not {self.root_path!r}", param="root_path")
        if not self.response_role:
            raise ConfigError("response_role must not be empty", param="response_role")
        if taken := RESERVED_OPTIONS & self.default_chat_template_kwargs.keys():
            raise ConfigError(
                f"default_chat_template_kwargs must not set {', '.join(sorted(taken))}",
                param="default_chat_template_kwargs",
            )
        if self.stream_interval is not None and self.stream_interval < 1:
            raise ConfigError(
                f"stream_interval must be at least 1, not {self.stream_interval}", param="stream_interval"
            )
        if self.max_log_len is not None and self.max_log_len < 0:
            raise ConfigError(f"max_log_len must be at least 0, not {self.max_log_len}", param="max_log_len")
        if not 1 <= self.max_num_headers <= MAX_NUM_HEADERS or not 1024 <= self.max_head_bytes <= MAX_HEAD_BYTES:
            raise ConfigError(
                f"max_num_headers must be from 1 to {MAX_NUM_HEADERS}, and max_head_size from 1 KiB to 16 MiB",
                param="max_num_headers",
            )
        _check_hung_engine_timeout(self.hung_engine_timeout)
        _check_origins(self.cors_allowed_origins)
        _check_hosts(self.allowed_hosts)
        self._check_stores()
        if self.max_total_body_bytes < self.max_body_bytes:
            raise ConfigError(
                f"max_total_body_size ({self.max_total_body_size}) must be at least max_body_size "
                f"({self.max_body_size}): one body of that size is to be received",
                param="max_total_body_size",
            )
        _check_choice("metrics_names", self.metrics_names, METRICS_NAMES)
        _check_choice("per_request_spec_decode_metrics", self.per_request_spec_decode_metrics, DRAFT_LEVELS)
        _check_choice("dialect", self.dialect, DIALECTS)
        _ = self.doors
        if self.log_format is not None:
            _check_choice("log_format", self.log_format, LOG_FORMATS)
        for detail in ",".join(self.collect_detailed_traces).split(",") if self.collect_detailed_traces else ():
            _check_choice("collect_detailed_traces", detail, DETAILED_TRACES)
        if self.otlp_traces_endpoint is not None:
            _ = self.traces_url
        if self.collect_detailed_traces and self.otlp_traces_endpoint is None:
            raise ConfigError("collect_detailed_traces needs otlp_traces_endpoint", param="collect_detailed_traces")
        self.priorities()

    def _check_stores(self) -> None:
        if self.max_stored_responses < 0:
            raise ConfigError(
                f"max_stored_responses must not be negative: {self.max_stored_responses}", param="max_stored_responses"
            )
        _ = self.response_store_bytes
        defaults = {"files_quota": "8GiB", "max_file_size": "200MiB", "max_files": 1000, "max_open_batches": 20}
        for name in ("max_files", "max_open_batches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}", param=name)
        if self.max_file_bytes > self.files_quota_bytes:
            message = f"max_file_size ({self.max_file_size}) exceeds files_quota ({self.files_quota})"
            raise ConfigError(message, param="max_file_size")
        if self.files_dir is None and (given := [name for name in defaults if getattr(self, name) != defaults[name]]):
            raise ConfigError(f"{given[0]} needs files_dir", param=given[0])
        if self.files_dir == "":
            raise ConfigError("files_dir must not be empty", param="files_dir")

    @property
    def files_path(self) -> Path | None:
        return None if self.files_dir is None else Path(self.files_dir)

    @property
    def lora_files(self) -> list[FileScale]:
        if not self.lora and not self.lora_scaled:
            return []
        from quire.config.adapter_files import files_of  # slow to import

        return files_of(self.lora, self.lora_scaled, applies=not self.lora_init_without_apply)

    @property
    def files_quota_bytes(self) -> int:
        return parse_bytes(self.files_quota, param="files_quota")

    @property
    def max_file_bytes(self) -> int:
        return parse_bytes(self.max_file_size, param="max_file_size")

    def _check_tls(self) -> None:
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            missing = "ssl_keyfile" if self.ssl_keyfile is None else "ssl_certfile"
            raise ConfigError("ssl_keyfile and ssl_certfile go together: one is missing", param=missing)
        needing = ("ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers", "enable_ssl_refresh")
        if self.ssl_certfile is None and any(getattr(self, name) for name in needing):
            raise ConfigError(f"{', '.join(needing)} need ssl_certfile", param="ssl_certfile")
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ConfigError(f"ssl_cert_reqs must be 0, 1 or 2, not {self.ssl_cert_reqs}", param="ssl_cert_reqs")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError("ssl_cert_reqs needs ssl_ca_certs, which say whose certificates", param="ssl_ca_certs")

    @property
    def follows_vllm(self) -> bool:
        return self.dialect == "vllm"

    @property
    def doors(self) -> frozenset[str]:
        """Other servers' APIs named in `api`, of `ollama` and `llama.cpp`. Raises ConfigError for an unknown one."""
        names = [name.strip() for name in self.api.split(",")] if self.api != NO_DOORS else []
        for name in names:
            _check_choice("api", name, (OLLAMA, LLAMA_CPP, NO_DOORS))
        if NO_DOORS in names:
            raise ConfigError(f"api: {NO_DOORS!r} goes alone", param="api")
        return frozenset(names)

    def priorities(self) -> tuple[int, int]:
        """Return the (lowest, highest) priority that a client may send. Raises ConfigError."""
        return parse_priorities(self.priority_range, "priority_range", "priority_range")

    @property
    def traces_url(self) -> str | None:
        """URL that receives spans; without a path, OTLP's `/v1/traces` is added. Raises ConfigError unless it is an
        HTTP URL."""
        endpoint = self.otlp_traces_endpoint
        if endpoint is None:
            return None
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"otlp_traces_endpoint must be an address of OTLP over HTTP such as http://localhost:4318/v1/traces, "
                f"not {endpoint!r} (gRPC is not spoken; collectors take HTTP on port 4318)",
                param="otlp_traces_endpoint",
            )
        return endpoint if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1/traces"

    @property
    def response_store_bytes(self) -> int:
        return parse_bytes(self.response_store_size, param="response_store_size")

    @property
    def max_total_body_bytes(self) -> int:
        return parse_bytes(self.max_total_body_size, param="max_total_body_size")

    @property
    def max_head_bytes(self) -> int:
        return parse_bytes(self.max_head_size, param="max_head_size")

    @property
    def max_body_bytes(self) -> int:
        return BODY_BYTES if self.max_body_size is None else parse_bytes(self.max_body_size, param="max_body_size")

    def max_body_bytes_of(self, *, takes_images: bool) -> int:
        if self.max_body_size is None and takes_images:
            return min(BODY_BYTES_WITH_IMAGES, self.max_total_body_bytes)
        return self.max_body_bytes

    @property
    def scheme(self) -> str:
        return "http" if self.ssl_certfile is None else "https"

    @classmethod
    def from_keywords(cls, keywords: dict[str, object]) -> ServerSettings:
        """Build from keyword arguments. Raises ConfigError for unknown names and wrong types."""
        for name in keywords:
            if name not in cls.__struct_fields__:
                nearest = nearest_name(name, cls.__struct_fields__)
                raise ConfigError(f"unknown server setting {name!r}{nearest}", param=name)
        try:
            return msgspec.convert(keywords, cls)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, ConfigError):
                raise error.__cause__ from None
            raise ConfigError(f"server setting: {error}") from None


def parse_priorities(text: str, name: str, param: str) -> tuple[int, int]:
    """Parse "LOW,HIGH". Raises ConfigError. name: subject of the error message."""
    low, _, high = text.partition(",")
    try:
        found = int(low), int(high)
    except ValueError:
        found = 1, 0
    if not -MAX_PRIORITY <= found[0] <= 0 <= found[1] <= MAX_PRIORITY:
        raise ConfigError(
            f"{name} must be LOW,HIGH with {-MAX_PRIORITY} <= LOW <= 0 <= HIGH <= {MAX_PRIORITY}, not {text[:100]!r}",
            param=param,
        )
    return found


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}", param=name)


def _check_hung_engine_timeout(seconds: float) -> None:
    if not (seconds == 0 or SILENCE_LIMIT <= seconds < float("inf")):
        raise ConfigError(
            f"hung_engine_timeout must be 0 or a number of seconds >= {SILENCE_LIMIT:g}, not {seconds}",
            param="hung_engine_timeout",
        )


def _check_origins(origins: list[str]) -> None:
    for origin in origins:
        if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"cors_allowed_origins: {origin!r} is no origin such as https://app.example:8443 (or '*')",
                param="cors_allowed_origins",
            )


def _check_hosts(hosts: list[str]) -> None:
    for host in hosts:
        if host != "*" and not _HOST.fullmatch(host):
            raise ConfigError(
                f"allowed_hosts: {host!r} is no name such as app.example or *.app.example (without scheme or port; "
                "'*': any)",
                param="allowed_hosts",
            )
