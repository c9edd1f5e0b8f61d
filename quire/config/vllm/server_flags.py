"""vLLM's flags for the HTTP server, in vLLM's order. None is a keyword of `LLM`."""

from __future__ import annotations

from dataclasses import replace

from quire.config.vllm.record import VllmFlag, noted, refused, so, to

NO_COHERE = "Cohere's chat is not served"
SUPERVISOR = "the server itself starts replicas again"

_CHAT: tuple[VllmFlag, ...] = (
    to("lora_modules", "texts"),
    to("chat_template", "text", why="a file or the template itself; run in a sandbox"),
    to("chat_template_content_format", "text"),
    to("trust_request_chat_template", "flag"),
    to("trust_request_mm_kwargs", "flag"),
    to("default_chat_template_kwargs", "json"),
    refused("reasoning_effort_map", "json", "efforts reach the chat template as they are", {}),
    to("response_role", "text"),
    to("return_tokens_as_token_ids", "flag"),
    to("enable_auto_tool_choice", "flag"),
    to("exclude_tools_when_tool_choice_none", "flag"),
    to("tool_call_parser", "text"),
    refused(
        "tool_strict_level", "text", "tool_choice and `strict` of each tool say what is held to its schema", "auto"
    ),
    refused("tool_parser_plugin", "text", "no plugins are loaded", ""),
    refused("tool_server", "text", "the server calls no tools itself"),
    refused("log_config_file", "text", "QUIRE_LOG_LEVEL sets what the log has"),
    to("enable_log_requests", "flag"),
    to("max_log_len", "int"),
    so("enable_prompt_tokens_details", "flag", "usage always tells the cached tokens of the prompt", True, False),
    to("enable_per_request_metrics", "flag"),
    so("enable_server_load_tracking", "flag", "/load always answers", True, False),
    to("enable_force_include_usage", "flag"),
    noted(
        "sse_keep_alive_interval",
        "int",
        "a stream has tokens alone: a proxy in front must wait as long as a request may queue",
        0,
    ),
    noted(
        "anthropic_disabled_thinking_effort",
        "text",
        "a chat template that can is told not to think",
        "auto",
        "none",
    ),
    to("enable_tokenizer_info_endpoint", "flag"),
    noted("enable_log_outputs", "flag", "outputs are not logged", False),
    noted("enable_log_deltas", "flag", "outputs are not logged", True, False),
    noted("cohere_is_reasoning_model", "flag", NO_COHERE, True, False),
    noted("cohere_format", "text", NO_COHERE, "cmd4"),
    noted("log_error_stack", "flag", "QUIRE_LOG_LEVEL=DEBUG logs stacks", False),
    refused("tokens_only", "flag", "texts are always served", False),
    refused("enable_scale_out", "flag", "tokenising and computing are not served apart", False),
    noted("fingerprint_mode", "text", "system_fingerprint is the version", "full", "hash"),
    noted("fingerprint_value", "text", "system_fingerprint is the version"),
)

_HTTP: tuple[VllmFlag, ...] = (
    to(
        "host", "text", why="every address by default, as vLLM listens; requests must name the server (--allowed-hosts)"
    ),
    to("port", "int"),
    noted("data_parallel_supervisor_port", "int", SUPERVISOR),
    noted("dp_supervisor_probe_interval_s", "float", SUPERVISOR),
    noted("dp_supervisor_probe_timeout_s", "float", SUPERVISOR),
    noted("dp_supervisor_probe_failure_threshold", "int", SUPERVISOR),
    to("uds", "text"),
    noted("uvicorn_log_level", "text", "QUIRE_LOG_LEVEL sets what the log has", "info"),
    so("disable_uvicorn_access_log", "flag", "requests are logged only with --access-log", True, False),
    noted("disable_access_log_for_endpoints", "text", "requests are logged only with --access-log"),
    noted("allow_credentials", "flag", "the server reads no cookies", False),
    to(
        "allowed_origins",
        "json list",
        "cors_allowed_origins",
        "no other site's pages by default, where vLLM allows all",
    ),
    noted("allowed_methods", "json list", "every method of a route may be called", ["*"]),
    noted("allowed_headers", "json list", "every header may be sent", ["*"]),
    to("api_key", "texts", why="asked for on every route but the public ones, not under /v1 alone"),
    to("ssl_keyfile", "text"),
    to("ssl_certfile", "text"),
    to("ssl_ca_certs", "text"),
    to("enable_ssl_refresh", "flag"),
    to("ssl_cert_reqs", "int"),
    to("ssl_ciphers", "text"),
    to("root_path", "text"),
    refused("middleware", "appended", "no code of users runs in the server", []),
    to("enable_request_id_headers", "flag"),
    to("disable_fastapi_docs", "flag"),
    to("h11_max_incomplete_event_size", "int", "max_head_size", "bounds heads; --max-body-size bounds bodies"),
    to("h11_max_header_count", "int", "max_num_headers"),
    so("enable_offline_docs", "flag", "pages load nothing from other servers", True, False),
    noted("enable_flash_late_interaction", "flag", "there is no late interaction", True, False),
    to("shutdown_timeout", "float", why="30 seconds by default, where vLLM has 0"),
)

_PROCESS: tuple[VllmFlag, ...] = (
    refused("headless", "flag", "all ranks run on this machine", False),
    to("api_server_count", "int", short=("-asc",)),
    refused("grpc", "flag", "HTTP is served", False),
    refused("grpc_port", "int", "HTTP is served"),
    so("disable_log_requests", "flag", "requests are logged only with --enable-log-requests", True, False),
    noted("disable_frontend_multiprocessing", "flag", "the engine runs in a process of its own", False),
)

SERVER = tuple(replace(entry, is_keyword=False) for entry in _CHAT)
HTTP = tuple(replace(entry, is_keyword=False) for entry in (*_HTTP, *_PROCESS))
