"""Every failure is an OpenAI error body, and the server lives on."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from quire.errors import EngineDeadError, InternalError, QuireError, UserError
from quire.server.errors import api_error, error_type, to_api_error
from quire.server.settings import ServerSettings
from tests.server.conftest import Served, serving
from tests.server.sse import events

GOOD = {"prompt": "abc", "max_tokens": 2}
JSON = {"Content-Type": "application/json"}


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response, after checking its shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    return body["error"]


async def assert_lives(served: Served) -> None:
    response = await served.client.post("/v1/completions", json=GOOD)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    ("content", "code"),
    [(b"{not json", "invalid_json"), (b"", "invalid_json"), (b'{"prompt": "\xff"}', "invalid_utf8")],
)
async def test_bodies_that_are_not_json(served: Served, path: str, content: bytes, code: str) -> None:
    found = error(await served.client.post(path, content=content, headers=JSON), 400)
    assert (found["type"], found["code"]) == ("BadRequestError", code)
    await assert_lives(served)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 257}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logit_bias": {"3": 101}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [[64], [300]]}, "prompt"),
        ({"prompt": "", "add_special_tokens": False}, "prompt"),
        ({"prompt": "a" * 256}, "prompt"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_values_name_their_field(served: Served, fields: dict[str, Any], param: str, stream: bool) -> None:
    response = await served.client.post("/v1/completions", json={**GOOD, **fields, "stream": stream})
    assert error(response, 400)["param"] == param
    await assert_lives(served)
    await served.until_idle()


async def test_prompt_too_long(served: Served) -> None:
    found = error(await served.client.post("/v1/completions", json={"prompt": "a" * 256}), 400)
    assert found["code"] == "context_length_exceeded"
    assert "256" in found["message"]
    messages = [{"role": "user", "content": "a" * 256}]
    found = error(await served.client.post("/v1/chat/completions", json={"messages": messages}), 400)
    assert (found["code"], found["param"]) == ("context_length_exceeded", "messages")


async def test_unknown_model(served: Served) -> None:
    for path, body in (
        ("/v1/completions", GOOD),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        found = error(await served.client.post(path, json={**body, "model": "tinny"}), 404)
        assert (found["param"], found["code"]) == ("model", "model_not_found")
        assert "did you mean 'tiny'?" in found["message"]


async def test_unknown_paths_and_methods(served: Served) -> None:
    assert error(await served.client.get("/v1/nothing"), 404)["code"] == "unknown_url"
    assert "GET //v1/models" in error(await served.client.get("http://quire//v1/models"), 404)["message"]
    response = await served.client.get("/v1/completions")
    assert error(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    for path, methods in (("/v1/responses/resp_1", "DELETE, GET"), ("/v1/responses/input_tokens", "POST")):
        assert (await served.client.put(path)).headers["allow"] == methods


async def test_two_live_requests_of_one_id(live: Served) -> None:
    body = {"prompt": "abc", "max_tokens": 200, "request_id": "twin"}
    first = asyncio.ensure_future(live.client.post("/v1/completions", json=body))
    await live.until_running(1)
    assert error(await live.client.post("/v1/completions", json=body), 400)["param"] == "request_id"
    live.hurry()
    assert (await first).status_code == 200


class TestBodySize:
    async def test_ten_megabytes(self, live: Served) -> None:
        """Refused while it is being sent, with others served meanwhile, and the connection stays good."""
        other = asyncio.ensure_future(live.client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 200}))
        await live.until_running(1)
        body = json.dumps({"prompt": "a" * 10_000_000}).encode()
        found = error(await live.client.post("/v1/completions", content=body, headers=JSON), 413)
        assert found["code"] == "request_too_large"
        assert str(live.context.max_body_bytes) in found["message"]
        assert not other.done()
        live.hurry()
        assert (await other).status_code == 200
        await assert_lives(live)

    async def test_a_large_body_without_a_length(self, live: Served) -> None:
        async def parts() -> Any:
            for _ in range(10):
                yield b"x" * 1_000_000

        error(await live.client.post("/v1/completions", content=parts(), headers=JSON), 413)
        await assert_lives(live)

    async def test_the_limit_itself(self, model_path: Path) -> None:
        body = json.dumps(GOOD).encode()
        settings = ServerSettings(max_body_size=len(body))
        async with serving(model_path, settings) as served:
            assert (await served.client.post("/v1/completions", content=body, headers=JSON)).status_code == 200
            error(await served.client.post("/v1/completions", content=body + b" ", headers=JSON), 413)

    async def test_a_long_text_is_refused_before_it_is_tokenised(self, served: Served) -> None:
        found = error(await served.client.post("/v1/completions", json={"prompt": "a" * 5_000_000}), 400)
        assert found["code"] == "context_length_exceeded"
        assert "characters" in found["message"]

    async def test_endless_headers(self, live: Served) -> None:
        host, port = live.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /health HTTP/1.1\r\nx: " + b"x" * 70_000)
        answer = (await reader.read()).decode()
        writer.close()
        assert answer.startswith("HTTP/1.1 431 ")
        assert json.loads(answer.split("\r\n\r\n")[1])["error"]["type"] == "BadRequestError"
        await assert_lives(live)


class TestInternalErrors:
    async def test_500_tells_nothing(self, served: Served, caplog: pytest.LogCaptureFixture) -> None:
        async def broken(*args: Any, **options: Any) -> Any:
            raise RuntimeError("secret path /etc/passwd")
            yield

        served.engine.generate = broken  # type: ignore[method-assign]
        for stream in (False, True):
            response = await served.client.post("/v1/completions", json={**GOOD, "stream": stream})
            found = error(response, 500)
            assert found["type"] == "InternalServerError"
            assert "secret" not in response.text
            assert "secret path" in caplog.text
            caplog.clear()

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    async def test_an_error_in_a_stream_is_its_last_event(self, model_path: Path, path: str) -> None:
        async with serving(model_path, executor="failing") as served:
            body = {"max_tokens": 100, "stream": True}
            body |= {"prompt": "abc"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
            response = await served.client.post(path, json=body)
            assert response.status_code == 200
            *chunks, last = events(response.text)
            assert chunks
            assert last["error"]["type"] == "ServiceUnavailableError"
            assert "the engine core failed (error " in last["error"]["message"]


def test_types_are_the_exceptions_of_clients() -> None:
    """vLLM's names, which are those of what OpenAI's client raises for a status."""
    for status in (400, 401, 403, 404, 409, 422, 429, 500):
        answer = httpx.Response(status, request=httpx.Request("POST", "http://x"))
        raised = openai.OpenAI(api_key="x")._make_status_error("", body=None, response=answer)
        assert api_error(status, "no").detail.type == error_type(status) == type(raised).__name__
    assert [error_type(status) for status in (413, 415, 503)] == ["BadRequestError"] * 2 + ["ServiceUnavailableError"]


async def test_a_dead_engine(model_path: Path) -> None:
    """Waiting calls fail at once with the cause, /health turns 503, new requests are refused."""
    async with serving(model_path, executor="failing", max_num_seqs=1) as served:
        bodies = [{"prompt": "abc", "max_tokens": 100}] * 3
        waiting = [served.client.post("/v1/completions", json=body) for body in bodies]
        messages = set()
        for response in await asyncio.gather(*waiting):
            messages.add(error(response, 503)["message"])
        for path in ("/health", "/ping"):
            messages.add(error(await served.client.get(path), 503)["message"])
        messages.add(error(await served.client.post("/v1/completions", json=GOOD), 503)["message"])
        [message] = messages
        error_id = served.engine.dead_error.error_id
        assert message == f"the engine is dead: the engine core failed (error {error_id}; the server's log says more)"
        assert "injected failure at step 10" in str(served.engine.dead_error)
        assert (await served.client.get("/metrics")).status_code == 200
        assert (await served.client.get("/version")).status_code == 200


def test_mapping_of_errors() -> None:
    assert to_api_error(UserError("no", param="n")).detail.param == "n"
    assert to_api_error(EngineDeadError("gone")).status == 503
    assert to_api_error(QuireError("draining")).status == 503
    assert to_api_error(KeyError("x")).status == 500


def test_what_a_client_reads_of_a_failure_is_a_sentence_and_the_id_of_a_log_record(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    secret = 'OSError: /data/models/secret: in File "/data/quire/x.py", line 3'
    for failure in (KeyError(secret), InternalError(secret, summary="no output")):
        caplog.clear()
        failed = to_api_error(failure)
        found = re.fullmatch(r"[\w ]+ \(error ([0-9a-f]{12}); the server's log says more\)", failed.detail.message)
        assert (failed.status, found is not None) == (500, True), failed.detail
        assert found is not None
        [record] = dict.fromkeys(caplog.records)  # several handlers may have caught it
        assert found[1] in record.getMessage()
        assert record.exc_info is not None
        assert "secret" in str(record.exc_info[1])
    dead = EngineDeadError(secret, summary="killed by signal 11")
    assert to_api_error(dead).detail.message == (
        f"the engine is dead: killed by signal 11 (error {dead.error_id}; the server's log says more)"
    )
    assert (dead.again().error_id, str(dead.again())) == (dead.error_id, secret)


async def test_a_request_that_the_model_computes_no_numbers_for(model_path: Path) -> None:
    message = "the model computed NaN or infinite logits for this request; the engine's log says more"
    expected = {"message": message, "type": "InternalServerError", "param": None, "code": "model_error"}
    async with serving(model_path, ServerSettings(), executor="nonfinite") as served:
        bodies = [{"prompt": "abc!"}, {"prompt": ["abc", "abc!"]}, {"prompt": "abc!", "n": 2, "temperature": 1}]
        for body in bodies:
            assert error(await served.client.post("/v1/completions", json={**body, "max_tokens": 4}), 500) == expected
            await assert_lives(served)
        chat = {"messages": [{"role": "user", "content": "abc!"}], "max_tokens": 4}
        assert error(await served.client.post("/v1/chat/completions", json=chat), 500) == expected
        stream = {"prompt": "abc?", "max_tokens": 9, "stream": True}
        response = await served.client.post("/v1/completions", json=stream)
        assert response.status_code == 200
        *pieces, last = events(response.text)
        assert len("".join(piece["choices"][0]["text"] for piece in pieces)) == 3
        assert last == {"error": expected}
        assert (await served.client.get("/health")).status_code == 200
        metrics = (await served.client.get("/metrics")).text
        assert re.search(r'request_success_total{.*finished_reason="error".*} 6\.0', metrics)


LONG_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a", "x" * 1_000_000: 1, "n": "x"}),
    ("/v1/completions", {"prompt": "a", "stream": True, "stream_options": {"include_usage": "x" * 1_000_000}}),
    ("/v1/completions", {"prompt": "a", "early_stopping": "x" * 1_000_000, "use_beam_search": True}),
    ("/v1/completions", {"prompt": "a", "stop_token_ids": [10**9] * 4000}),
    ("/v1/completions", {"prompt": "a", "model": "x" * 1_000_000}),
    ("/v1/chat/completions", {"messages": [{"role": "\x00" * 1_000_000, "content": "a"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "x" * 1_000_000}]}]}),
    ("/tokenize", {"prompt": "a", "model": "x" * 1_000_000}),
    ("/detokenize", {"tokens": "x", "x" * 1_000_000: 1}),
]


async def test_an_error_does_not_echo_what_was_sent(served: Served) -> None:
    for number, (path, body) in enumerate(LONG_MISTAKES):
        response = await served.client.post(path, json=body)
        assert response.status_code in (400, 404), number
        error(response, response.status_code)
        assert len(response.content) < 10_000, number


@pytest.mark.parametrize("version", ["a.b.c", "1.x.0", "", ".", "0.0.1", "9" * 5000])
async def test_metrics_take_any_accept_header(served: Served, version: str) -> None:
    for kind in ("application/openmetrics-text", "text/plain", "*/*"):
        response = await served.client.get("/metrics", headers={"Accept": f"{kind};version={version}"})
        assert response.status_code == 200, response.text
        assert "quire" in response.text
