"""The routes for probes, people and machines."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.server import scrape
from quire.server.errors import LLAMA_CPP_PATHS
from quire.server.openapi import RENDERING, api_description
from quire.server.settings import ServerSettings
from quire.version import __version__
from tests.server.conftest import Served, serving


async def test_health_and_version(served: Served) -> None:
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        response = await served.client.request(method, path)
        assert (response.status_code, response.json()) == (200, {"status": "ok"})
    assert (await served.client.head("/health")).status_code == 200
    assert (await served.client.get("/version")).json() == {"version": __version__}


async def test_models(served: Served, model_path: Path) -> None:
    [card] = (await served.client.get("/v1/models")).json()["data"]
    assert card == {
        "id": "tiny",
        "object": "model",
        "created": served.context.created,
        "owned_by": "quire",
        "root": str(model_path),
        "parent": None,
        "max_model_len": 256,
        "permission": card["permission"],
    }
    [permission] = card["permission"]
    assert (permission["allow_sampling"], permission["is_blocking"]) == (True, False)
    assert (await served.client.get("/v1/models/tiny")).json() == card
    assert (await served.client.get("/v1/models/not/there")).status_code == 404


async def test_models_in_anthropics_words(model_path: Path) -> None:
    async with serving(model_path, ServerSettings(served_model_name=["a", "b", "c"])) as served:

        async def page(query: str, **headers: str) -> dict[str, Any]:
            return (await served.client.get(f"/v1/models{query}", headers=headers)).json()

        version = {"anthropic-version": "2023-06-01"}
        whole = await page("", **version)
        assert [model["id"] for model in whole["data"]] == ["a", "b", "c"]
        assert (whole["has_more"], whole["first_id"], whole["last_id"]) == (False, "a", "c")
        model = whole["data"][0]
        assert (model["type"], model["display_name"], model["max_tokens"]) == ("model", "a", 256)
        assert datetime.fromisoformat(model["created_at"]).timestamp() == served.context.created
        assert await page("/a", **version) == model
        first = await page("?limit=2", **version)
        assert ([each["id"] for each in first["data"]], first["has_more"]) == (["a", "b"], True)
        last = await page("?before_id=c&limit=1", **version)
        assert ([each["id"] for each in last["data"]], last["has_more"]) == (["b"], True)
        assert [each["id"] for each in (await page("?after_id=a"))["data"]] == ["b", "c"]
        for query in ("limit=0", "limit=x", "limit=1001", "after_id=d"):
            assert (await page(f"?{query}"))["error"]["param"] == query.partition("=")[0]


async def test_the_models_own_name_is_the_default(model_path: Path) -> None:
    async with serving(model_path, ServerSettings()) as served:
        body = {"model": str(model_path), "prompt": "a", "max_tokens": 1}
        assert (await served.client.post("/v1/completions", json=body)).json()["model"] == str(model_path)


async def test_load_counts_unfinished_requests(live: Served) -> None:
    assert (await live.client.get("/load")).json() == {"server_load": 0}
    body = {"prompt": ["a", "b"], "max_tokens": 200, "stream": True}
    async with live.client.stream("POST", "/v1/completions", json=body):
        assert (await live.client.get("/load")).json() == {"server_load": 2}


async def test_openapi_describes_every_field(served: Served) -> None:
    document = (await served.client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    assert {"temperature", "top_k", "echo", "prompt"} <= set(schemas["CompletionRequest"]["properties"])
    assert schemas["ChatRequest"]["required"] == ["messages"]
    required = {"block_size", "block_sizes", "windows", "states", "host_states", "requests"}
    assert set(schemas["KVSnapshot"]["required"]) == required
    for reference in json.dumps(document).split('"#/components/schemas/')[1:]:
        assert reference.split('"')[0] in schemas
    posts = {route.path for route in served.client._transport.app.routes if "POST" in route.methods}  # type: ignore[attr-defined]
    assert posts == {path for path, operations in document["paths"].items() if "post" in operations}


async def test_metrics(served: Served) -> None:
    await served.client.post("/v1/completions", json={"prompt": "=abc", "n": 2})
    await served.client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3, "stream": True})
    await served.client.get("/no/such/path")
    text = (await served.client.get("/metrics")).text
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }

    def value(name: str, **labels: str) -> float:
        [found] = [prefix + name for prefix in ("vllm:", "quire_") if any(key[0] == prefix + name for key in samples)]
        return samples[found, tuple(sorted(labels.items()))]

    tiny = {"model_name": "tiny", "engine": "0"}
    assert value("generation_tokens_total", **tiny) == 2 * 4 + 3
    assert value("request_success_total", finished_reason="stop", **tiny) == 2
    assert value("request_success_total", finished_reason="length", **tiny) == 1
    assert value("e2e_request_latency_seconds_count", **tiny) == 2
    assert value("request_prompt_tokens_sum", **tiny) == 5 + 4
    assert value("num_requests_running", **tiny) == value("kv_cache_usage_perc", **tiny) == 0
    assert value("request_params_n_sum", **tiny) == 3
    assert value("request_params_max_tokens_count", **tiny) == 2
    cache = {"cache_dtype": served.engine.model_config.kv_cache_dtype, "enable_prefix_caching": "True"}
    sizes = {"block_size": "16", "num_gpu_blocks": "64", "kv_cache_size_tokens": "1024"}
    sizes["kv_cache_max_concurrency"] = f"{1024 / served.engine.ready.max_model_len:.2f}"
    assert value("cache_config_info", **sizes, **cache, **tiny) == 1
    assert value("http_requests_total", handler="/v1/completions", method="POST", status="200") == 2
    assert value("http_requests_total", handler="unmatched", method="other", status="404") == 1


async def test_metrics_of_an_engine_that_does_not_answer(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    await served.client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})
    monkeypatch.setattr(scrape, "SNAPSHOT_SECONDS", 0.01)
    monkeypatch.setattr(served.engine, "stats", asyncio.Event().wait)
    text = (await served.client.get("/metrics")).text
    assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"} 2.0' in text


async def test_open_metrics_on_request(served: Served) -> None:
    response = await served.client.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


async def test_cors(model_path: Path) -> None:
    headers = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    settings = ServerSettings(cors_allowed_origins=["https://app.example"], api_key=["key"])
    async with serving(model_path, settings) as served:
        response = await served.client.options("/v1/completions", headers=headers)
        assert response.headers["access-control-allow-origin"] == "https://app.example"
        other = await served.client.options("/v1/completions", headers={**headers, "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
    async with serving(model_path) as served:
        response = await served.client.options("/v1/completions", headers=headers)
        assert "access-control-allow-origin" not in response.headers


ALL_ROUTES = ServerSettings(
    enable_admin_routes=True,
    enable_sleep_mode=True,
    enable_tokenizer_info_endpoint=True,
    admin_api_key=["key"],
    served_model_name=["tiny"],
)


def all_routes(directory: Path, **changes: Any) -> ServerSettings:
    return msgspec.structs.replace(ALL_ROUTES, files_dir=str(directory / "files"), **changes)


async def test_openapi_describes_every_route(model_path: Path, tmp_path: Path) -> None:
    async with serving(model_path, all_routes(tmp_path)) as served:
        assert served.app is not None
        routes = {(m.lower(), r.path) for r in served.app.routes for m in getattr(r, "methods", ())}
        others = {"/", "/docs", "/metrics", "/openapi.json", "/debug/kv/events"}
        known = {(method, path.replace(":path}", "}")) for method, path in routes if path not in others}
        known = {(method, path) for method, path in known if method != "head"}
        paths = (await served.client.get("/openapi.json")).json()["paths"]
        assert {(method, path) for path, operations in paths.items() for method in operations} == known
        for route in served.app.routes:
            names = {each.alias for each in route.dependant.query_params}  # type: ignore[attr-defined]
            if route.path in paths:  # type: ignore[attr-defined]
                names |= getattr(route.endpoint, "query_parameters", frozenset())  # type: ignore[attr-defined]
            for method in route.methods - {"HEAD"}:  # type: ignore[attr-defined]
                listed = paths.get(route.path, {}).get(method.lower(), {}).get("parameters", [])  # type: ignore[attr-defined]
                assert {each["name"] for each in listed if each["in"] == "query"} == names, route
    async with serving(model_path) as served:
        document = (await served.client.get("/openapi.json")).json()
        assert "/pause" not in document["paths"]
        assert "servers" not in document
    async with serving(model_path, ServerSettings(root_path="/llm/")) as served:
        assert (await served.client.get("/llm/openapi.json")).json()["servers"] == [{"url": "/llm"}]


async def test_openapi_says_where_a_key_is_asked_for(model_path: Path) -> None:
    async with serving(model_path, ALL_ROUTES) as served:
        for path, operations in api_description()["paths"].items():
            assert all("security" not in each for each in operations.values()), path
        paths = (await served.client.get("/openapi.json")).json()["paths"]
        assert "security" not in paths["/v1/completions"]["post"]
        assert paths["/pause"]["post"]["security"] == [{"bearer": []}, {"header": []}]
    async with serving(model_path, msgspec.structs.replace(ALL_ROUTES, admin_api_key=[], api_key=["key"])) as served:
        headers = {"x-api-key": "key"}
        paths = (await served.client.get("/openapi.json", headers=headers)).json()["paths"]
        assert "security" in paths["/v1/completions"]["post"]
        assert "security" not in paths["/health"]["get"]


async def test_examples_of_openapi_are_answered(served: Served) -> None:
    """Those of routes that generate; the others need a model that pools, and say so."""
    for path, operations in (await served.client.get("/openapi.json")).json()["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        for example in content.get("application/json", {}).get("examples", {}).values():
            answer = await served.client.post(path, json=example["value"])
            is_unable = "needs a model that pools" in answer.text or "trained to infill" in answer.text
            assert answer.status_code == 200 or is_unable, (path, answer.text)
            kind = answer.headers["content-type"].partition(";")[0]
            assert kind in operations["post"]["responses"][str(answer.status_code)]["content"]


async def test_openapi_lists_the_error_statuses(served: Served) -> None:
    """Those of the application; others are made in front of it, and listed for every route."""
    paths = (await served.client.get("/openapi.json")).json()["paths"]
    all_routes = {400, 403, 408, 415, 421, 431, 500, 503}
    public = ("/health", "/ready", "/ping", "/version", "/api/version", "/v1/health")
    refused = ("/api/create", "/api/copy", "/api/push")
    for path, operations in paths.items():
        for method, operation in operations.items():
            listed = {int(status) for status in operation["responses"]} - {200}
            more = {401} if path not in public else set()
            more |= {404} if "{" in path and "digest" not in path else set()
            if method == "post" and path not in ("/ping", *refused) and "{" not in path:
                converting = ("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens")
                converting += ("/api/show", "/api/pull", "/apply-template", "/chat/completions/input_tokens")
                more |= {404, 413} | ({429} if path not in converting else set())
            assert listed == all_routes | more, path
            for status in listed:
                schema = operation["responses"][str(status)]["content"]["application/json"]["schema"]
                shapes = {"/v1/messages": "MessagesErrorBody", "/api/": "OllamaErrorBody"}
                kind = next((shape for start, shape in shapes.items() if path.startswith(start)), "ErrorBody")
                kind = "LlamaErrorBody" if path in LLAMA_CPP_PATHS else kind
                assert schema == {"$ref": f"#/components/schemas/{kind}"}
            renders = path in RENDERING
            assert ("chat_template_error" in operation["responses"]["500"]["description"]) == renders, path


async def test_what_the_edge_answers_is_listed_for_every_route(model_path: Path, tmp_path: Path) -> None:
    """Requests that each door of the server refuses, whether or not the route behind it reads a body."""
    settings = all_routes(tmp_path, api_key=["other"], admin_api_key=["key"])
    key = {"Authorization": "Bearer key"}
    bad: dict[int, dict[str, str]] = {
        401: {},
        403: {**key, "Origin": "https://evil.example"},
        415: {**key, "Content-Type": "text/plain"},
        421: {**key, "Host": "evil.example"},
    }
    async with serving(model_path, settings) as served:
        for path, operations in api_description()["paths"].items():
            for method, operation in operations.items():
                for status, headers in bad.items():
                    if status == 401 and "401" not in operation["responses"]:
                        continue
                    if status == 415 and (
                        path.startswith("/api/") or path in LLAMA_CPP_PATHS | {"/tokenize", "/detokenize"}
                    ):  # of pages alone
                        continue
                    content = b"{}" if status == 415 or method == "post" else None
                    headers = {"Content-Type": "application/json", **headers} if content else headers
                    answer = await served.client.request(method, path, headers=headers, content=content)
                    assert answer.status_code == status, (path, answer.text)
                    assert str(status) in operation["responses"], path
