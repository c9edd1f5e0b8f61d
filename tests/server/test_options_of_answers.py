"""Settings and files of the model that change every answer: defaults of sampling, roles, usage, templates."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from quire.errors import ConfigError
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from quire.server.settings import ServerSettings
from tests.server.conftest import Served, serving
from tests.server.model_directory import write_model

CHAT = {"messages": [{"role": "user", "content": "=abcdefgh"}]}
SETTINGS = ServerSettings(
    served_model_name=["tiny"],
    port=0,
    response_role="bard",
    enable_force_include_usage=True,
    default_chat_template_kwargs={"shout": True},
    root_path="/llm",
    disable_fastapi_docs=True,
)
GENERATION = {"temperature": 0.25, "top_k": 7, "repetition_penalty": 1.5, "max_new_tokens": 3, "do_sample": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_model(tmp_path_factory.mktemp("defaults") / "tiny")
    (path / "generation_config.json").write_text(json.dumps(GENERATION))
    return path


@pytest.fixture
async def answering(path: Path) -> AsyncIterator[Served]:
    async with serving(path, SETTINGS) as served:
        yield served


@pytest.fixture
def asked(answering: Served, monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    """The parameters that the engine gets, with the number of tokens that the request may have."""
    found: list[SamplingParams] = []
    process = answering.engine.input_processor.process

    def watched(*arguments: Any, **keywords: Any) -> EngineRequest:
        request = process(*arguments, **keywords)
        found.append(msgspec.structs.replace(request.params, max_tokens=request.max_tokens))
        return request

    monkeypatch.setattr(answering.engine.input_processor, "process", watched)
    return found


async def post(served: Served, path: str, **body: Any) -> httpx.Response:
    answer = await served.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer


async def test_the_models_defaults_of_sampling(answering: Served, asked: list[SamplingParams]) -> None:
    answer = await post(answering, "/v1/chat/completions", **CHAT)
    assert answer.json()["usage"]["completion_tokens"] == 3
    await post(answering, "/v1/completions", prompt="=abcdefgh", temperature=0, top_k=0, max_tokens=2)
    await post(answering, "/v1/completions", prompt="=abcdefgh", repetition_penalty=1.0, max_tokens=9)
    await post(answering, "/v1/chat/completions", **CHAT, max_completion_tokens=2, max_tokens=2)
    seen = [(each.temperature, each.top_k, each.repetition_penalty, each.max_tokens) for each in asked]
    assert seen == [(0.25, 7, 1.5, 3), (0.0, 0, 1.5, 2), (0.25, 7, 1.0, 3), (0.25, 7, 1.5, 2)]


async def test_role_and_template_of_a_chat(answering: Served) -> None:
    answer = (await post(answering, "/v1/chat/completions", **CHAT, return_token_ids=True)).json()
    assert answer["choices"][0]["message"]["role"] == "bard"
    prompt = answering.context.tokenizer.decode(answer["prompt_token_ids"])
    assert prompt.startswith("SHOUT ")
    quiet = await post(
        answering, "/v1/chat/completions", **CHAT, return_token_ids=True, chat_template_kwargs={"shout": False}
    )
    assert not answering.context.tokenizer.decode(quiet.json()["prompt_token_ids"]).startswith("SHOUT ")
    continued = [*CHAT["messages"], {"role": "assistant", "content": "so"}]
    answer = await post(
        answering,
        "/v1/chat/completions",
        messages=continued,
        continue_final_message=True,
        add_generation_prompt=False,
        stream=True,
    )
    first = json.loads(answer.text.split("\n")[0].removeprefix("data: "))
    assert first["choices"][0]["delta"]["role"] == "assistant"


@pytest.mark.parametrize("asked_for", [None, {"include_usage": False}])
async def test_every_chunk_has_the_usage(answering: Served, asked_for: dict[str, bool] | None) -> None:
    more = {} if asked_for is None else {"stream_options": asked_for}
    answer = await post(answering, "/v1/completions", prompt="=ab", stream=True, max_tokens=2, **more)
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in answer.text.strip().split("\n\n")[:-1]]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 2)


async def test_paths_behind_a_proxy_and_no_reference(answering: Served) -> None:
    for path in ("/v1/models", "/llm/v1/models"):
        assert (await answering.client.get(path)).status_code == 200, path
    for path in ("/docs", "/openapi.json", "/redoc"):
        assert (await answering.client.get(path)).status_code == 404, path


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"default_chat_template_kwargs": {"messages": []}}, "default_chat_template_kwargs"),
        ({"root_path": "llm"}, "root_path"),
        ({"response_role": ""}, "response_role"),
        ({"max_log_len": -1}, "max_log_len"),
        ({"ssl_cert_reqs": 3}, "ssl_certfile"),
        ({"ssl_certfile": "c", "ssl_keyfile": "k", "ssl_cert_reqs": 2}, "ssl_ca_certs"),
        ({"max_num_headers": 0}, "max_num_headers"),
        ({"max_head_size": "1GiB"}, "max_num_headers"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerSettings.from_keywords(settings)
    assert caught.value.param == param


async def test_a_template_of_a_file_on_a_unix_socket(path: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}")
    settings = ServerSettings(uds=str(tmp_path / "socket"), enable_admin_routes=True)
    async with serving(path, settings, live=True, chat_template=str(template)) as served:
        assert Path(str(settings.uds)).stat().st_mode & 0o777 == 0o660
        response = await served.client.post("/v1/chat/completions", json={**CHAT, "return_prompt_text": True})
        assert response.json()["prompt_text"] == "<user>=abcdefgh"
        assert (await served.client.get("/is_paused")).json() == {"is_paused": False}, "its clients are on this machine"
        assert (await served.client.get("/version", headers={"Host": "any.sock"})).status_code == 200
    settings = ServerSettings(uds=str(tmp_path / "socket"), allowed_hosts=["api.example"])
    async with serving(path, settings, live=True) as served:
        answers = [await served.client.get("/version", headers={"Host": name}) for name in ("api.example", "any.sock")]
        assert [answer.status_code for answer in answers] == [200, 421]
