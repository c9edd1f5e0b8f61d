"""The values that vLLM takes, and the sentences that its clients look for, on every route that has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.server.protocol.completion import NO_PROMPT
from tests.server.conftest import Served, serving
from tests.server.model_directory import write_model
from tests.server.test_dialect import BODIES as OPENAI_BODIES
from tests.server.test_dialect import CHAT

BODIES: dict[str, dict[str, Any]] = {**OPENAI_BODIES, "/v1/messages": {**CHAT, "model": "tiny"}}


async def post(served: Served, path: str, **fields: Any) -> httpx.Response:
    return await served.client.post(path, json={**BODIES.get(path, {}), **fields})


async def refusal(served: Served, path: str, **fields: Any) -> dict[str, Any]:
    answer = await post(served, path, **fields)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize("path", [path for path in BODIES if path != "/v1/messages"])
async def test_long_users_and_stops_and_every_seed(served: Served, path: str) -> None:
    for fields in ({"user": "u" * 5000}, {"stop": ["s" * 2000, "t"]}, {"seed": -(2**63)}, {"seed": 2**63 - 1}):
        answer = await post(served, path, **fields)
        assert answer.status_code == 200, answer.text
    for seed in (-(2**63) - 1, 2**63):
        assert (await refusal(served, path, seed=seed))["param"] == "seed"


async def test_long_stop_sequences(served: Served) -> None:
    assert (await post(served, "/v1/messages", stop_sequences=["s" * 2000])).status_code == 200


@pytest.mark.parametrize("prompt", ["", None, []])
async def test_an_empty_prompt(served: Served, prompt: object) -> None:
    error = await refusal(served, "/v1/completions", prompt=prompt)
    assert (error["message"], error["param"]) == (NO_PROMPT, "prompt")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": [999_999]}, "prompt"),
        ("/v1/completions", {"prompt": [[5], [2**40]]}, "prompt[1][0]"),
        ("/v1/completions", {"logit_bias": {"999999": 1}}, "logit_bias"),
        ("/v1/chat/completions", {"logit_bias": {str(2**40): 1}}, "logit_bias"),
        ("/v1/chat/completions", {"stop_token_ids": [999_999]}, "stop_token_ids"),
        ("/v1/responses", {"allowed_token_ids": [1], "stop_token_ids": [999_999]}, "stop_token_ids"),
        ("/detokenize", {"tokens": [999_999]}, "tokens"),
        ("/detokenize", {"tokens": [5, 2**40]}, "tokens[1]"),
    ],
)
async def test_ids_out_of_vocabulary(served: Served, path: str, fields: dict[str, Any], param: str) -> None:
    error = await refusal(served, path, **fields)
    assert "out of vocabulary" in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_errors_of_a_response_name_its_input(served: Served, is_streamed: bool) -> None:
    """Those that only the tokens show, too."""
    # Less than the characters that are refused unread, and more than the 256 tokens of the model's context.
    text = "a0" * 400
    error = await refusal(served, "/v1/responses", input=text, stream=is_streamed)
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert "messages" not in error["message"]


async def test_a_response_in_the_background_is_stored(served: Served) -> None:
    error = await refusal(served, "/v1/responses", background=True, store=False)
    assert (error["message"], error["param"]) == ("background can only be used when `store` is true", "background")


async def test_a_response_that_is_not_there(served: Served) -> None:
    for answer in (
        await served.client.get("/v1/responses/resp_1"),
        await served.client.delete("/v1/responses/resp_1"),
        await served.client.post("/v1/responses/resp_1/cancel"),
        await post(served, "/v1/responses", previous_response_id="resp_1"),
    ):
        assert answer.status_code == 404
        assert answer.json()["error"]["message"].startswith("Response with id 'resp_1' not found.")


async def test_a_response_tells_what_it_was_sampled_with(served: Served) -> None:
    names = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "max_tool_calls")
    plain = (await post(served, "/v1/responses")).json()
    assert [plain[name] for name in names] == [1.0, 1.0, 0.0, 0.0, None]
    asked = dict(zip(names, (0.5, 0.25, 1.5, -1.5, 3), strict=True))
    told = (await post(served, "/v1/responses", **asked)).json()
    assert {name: told[name] for name in names} == asked
    kept = (await served.client.get(f"/v1/responses/{told['id']}")).json()
    assert {name: kept[name] for name in names} == asked


async def test_a_response_tells_the_defaults_of_the_model(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny")
    (model / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.25, "top_p": 0.5}')
    async with serving(model) as served:
        told = (await post(served, "/v1/responses")).json()
        assert (told["temperature"], told["top_p"]) == (0.25, 0.5)
