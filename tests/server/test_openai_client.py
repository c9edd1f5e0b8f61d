"""The official client, synchronous and asynchronous, against a live server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from quire.server.settings import ServerSettings
from tests.server.conftest import Served, serving

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def fast(model_path: Path) -> AsyncIterator[Served]:
    settings = ServerSettings(port=0, api_key=["key"], served_model_name=["tiny", "alias"])
    async with serving(model_path, settings, live=True) as served:
        yield served


@pytest.fixture
async def client(fast: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{fast.url}/v1", api_key="key", max_retries=0) as client:
        yield client


async def test_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="tiny",
        prompt=["=one", "=two"],
        n=2,
        logprobs=1,
        echo=True,
        stop=["x"],
        temperature=0.5,
        seed=1,
        user="Ann",
        extra_body={"top_k": 5, "min_p": 0.1, "return_token_ids": True},
    )
    assert [choice.text for choice in answer.choices] == ["=oneone", "=oneone", "=twotwo", "=twotwo"]
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert answer.choices[0].logprobs.tokens[-1] == "<|end|>"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer._request_id == answer.id


async def test_streamed_completions(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model="tiny", prompt="=streamed", stream=True, stream_options={"include_usage": True}, max_tokens=50
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "streamed"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 9


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="alias",
        messages=[{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "=hi"}]}],
        max_completion_tokens=9,
        logprobs=True,
        top_logprobs=2,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={"5": -1},
        response_format={"type": "text"},
    )
    assert answer.model == "alias"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "hi"
    assert [len(entry.top_logprobs) for entry in answer.choices[0].logprobs.content] == [2, 2, 2]


async def test_streamed_chat(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True, n=2, max_tokens=4, seed=1)
    contents = {0: "", 1: ""}
    reasons = {}
    async for chunk in stream:
        [choice] = chunk.choices
        contents[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert [len(content) for content in contents.values()] == [4, 4]
    assert reasons == {0: "length", 1: "length"}


async def test_stream_helper(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="tiny", messages=[{"role": "user", "content": "=abc"}]) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "abc"


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in await client.models.list()] == ["tiny", "alias"]
    model = await client.models.retrieve("alias")
    assert (model.id, model.object, model.owned_by) == ("alias", "model", "quire")
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("no/such")


async def test_errors(client: openai.AsyncOpenAI, fast: Served) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="other", prompt="a")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "BadRequestError")
    with pytest.raises(openai.BadRequestError) as tools:
        await client.chat.completions.create(
            model="tiny", messages=HI, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    assert tools.value.param == "tool_choice"
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()


async def test_an_error_in_the_middle_of_a_stream(model_path: Path) -> None:
    settings = ServerSettings(port=0, served_model_name=["tiny"])
    async with serving(model_path, settings, executor="failing", live=True) as served:
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        stream = await client.completions.create(model="tiny", prompt="a", stream=True, max_tokens=99)
        for _ in range(10):
            await anext(stream)
        with pytest.raises(openai.APIError) as caught:
            await anext(stream)
        assert "the engine core failed (error " in caught.value.message
        await client.close()


async def test_leaving_a_stream_frees_its_blocks(live: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none") as client:
        stream = await client.completions.create(model="tiny", prompt="abc", stream=True, max_tokens=250)
        async for _ in stream:
            break
        await stream.close()
        await live.until_idle()


async def test_the_synchronous_client(fast: Served) -> None:
    def talk() -> tuple[str, str, list[str]]:
        with openai.OpenAI(base_url=f"{fast.url}/v1", api_key="key") as client:
            answer = client.completions.create(model="tiny", prompt="=abc")
            chunks = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "=xyz"}], stream=True
            )
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            return answer.choices[0].text, text, [model.id for model in client.models.list()]

    assert await asyncio.to_thread(talk) == ("abc", "xyz", ["tiny", "alias"])


async def test_many_at_once(client: openai.AsyncOpenAI, fast: Served) -> None:
    words = [f"word{number}" for number in range(40)]
    answers = await asyncio.gather(
        *[client.completions.create(model="tiny", prompt=f"={word}", max_tokens=50) for word in words]
    )
    assert [answer.choices[0].text for answer in answers] == words
    await fast.until_idle()
