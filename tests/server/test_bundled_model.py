"""The whole of it: `serve` with the bundled model, asked by the official client."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from quire.config.options import EngineOptions
from quire.server.run import serve
from quire.server.settings import ServerSettings
sys.exit(serve(EngineOptions(num_threads=1, kv_cache_memory="32MiB"), ServerSettings(port=0)))
"""
PROMPT = "def fibonacci(n):\n    "


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    yield process.stdout.readline().split(" on ")[1].split()[0]
    process.terminate()
    process.stdout.read()
    assert process.wait() == 0


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_streamed_and_whole_answers_are_the_same(client: openai.OpenAI) -> None:
    asked = {"model": "bundled", "prompt": PROMPT, "max_tokens": 48, "temperature": 0, "logprobs": 3}
    whole = client.completions.create(**asked).choices[0]
    pieces = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.logprobs.tokens] == whole.logprobs.tokens
    assert [value for piece in pieces for value in piece.logprobs.token_logprobs] == whole.logprobs.token_logprobs
    assert all(value <= 0 for value in whole.logprobs.token_logprobs)


def test_logprobs_of_tokens_that_the_request_names(client: openai.OpenAI) -> None:
    """They and the token that the model chose, in place of the likeliest; that one comes first, as without them."""
    asked = {"model": "bundled", "max_tokens": 1, "temperature": 0, "logprobs": 2}
    ids = {"logprob_token_ids": [300, 301], "return_tokens_as_token_ids": True}
    logprobs = client.completions.create(prompt=PROMPT, **asked, extra_body=ids).choices[0].logprobs
    chosen, *_ = logprobs.tokens
    assert next(iter(logprobs.top_logprobs[0])) == chosen
    assert logprobs.top_logprobs[0].keys() == {chosen, "token_id:300", "token_id:301"}
    unlikely = {**ids, "allowed_token_ids": [300], "logprob_token_ids": [int(chosen.removeprefix("token_id:"))]}
    forced = client.completions.create(prompt=PROMPT, **asked, extra_body=unlikely).choices[0].logprobs
    assert [*forced.top_logprobs[0]] == ["token_id:300", chosen]
    messages = [{"role": "user", "content": PROMPT}]
    chat = {**asked, "logprobs": True, "messages": messages, "top_logprobs": 2}
    entry = client.chat.completions.create(**chat, extra_body=ids).choices[0].logprobs.content[0]
    assert {each.token for each in entry.top_logprobs} == {entry.token, "token_id:300", "token_id:301"}
    assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
    with pytest.raises(openai.BadRequestError, match="together with logprobs"):
        client.chat.completions.create(**{**chat, "logprobs": False, "top_logprobs": 0}, extra_body=ids)


def test_a_repeated_prompt_hits_the_prefix_cache(client: openai.OpenAI) -> None:
    prompt = "import os\n" * 40
    first, second = [client.completions.create(model="bundled", prompt=prompt, max_tokens=1) for _ in range(2)]
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens >= 64


def test_echo_scores_the_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="bundled", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    [choice] = answer.choices
    assert choice.text == PROMPT
    scored = choice.logprobs.token_logprobs
    assert len(scored) == answer.usage.prompt_tokens
    assert all(value < 0 for value in scored[1:])


def test_the_conversation_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="bundled", messages=[{"role": "user", "content": "Sort a list."}], max_tokens=16, seed=1
    )
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].message.content


def test_seeded_answers_do_not_depend_on_the_company(url: str) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        answer = await client.completions.create(model="bundled", prompt=PROMPT, max_tokens=24, seed=seed)
        return answer.choices[0].text

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            alone = [await ask(client, seed) for seed in range(4)]
            together = await asyncio.gather(*[ask(client, seed) for seed in range(4)])
        assert alone == list(together)
        assert len(set(alone)) > 1

    asyncio.run(run())


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["file", "folder"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "size"],
    "additionalProperties": False,
}


def test_answers_follow_their_schema_whole_and_streamed(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "entry", "schema": SCHEMA, "strict": True}}
    asked = {"model": "bundled", "prompt": PROMPT, "max_tokens": 400, "temperature": 0.7, "seed": 4}
    extra = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}
    whole = client.completions.create(**asked, extra_body=extra).choices[0]
    assert whole.finish_reason == "stop"
    assert set(json.loads(whole.text)) == {"kind", "size"}
    pieces = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True, extra_body=extra)]
    assert "".join(piece.text for piece in pieces) == whole.text
    loose = client.completions.create(**asked, extra_body={"response_format": form}).choices[0]
    assert loose.finish_reason == "length" or set(json.loads(loose.text)) == {"kind", "size"}
    chosen = client.completions.create(**asked, extra_body={"guided_choice": ["yes", "no"]}).choices[0]
    assert chosen.text in ("yes", "no")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "text", "schema": {}}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {}}, "schema": {}}),
        ("response_format", {"type": "json_object", "schema": {"uniqueItems": True}}),
        ("response_format", {"type": "structural_tag", "format": {"type": "nothing"}}),
        ("structured_outputs", {"regex": "("}),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}),
        ("guided_grammar", "start: missing"),
        ("guided_regex", "a^b"),
    ],
)
def test_bad_constraints_are_errors_that_name_the_field(client: openai.OpenAI, field: str, value: object) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="bundled", prompt=PROMPT, extra_body={field: value})
    assert caught.value.param == field
    assert "\n" not in caught.value.message
    assert client.completions.create(model="bundled", prompt=PROMPT, max_tokens=1).choices[0].text


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_schema_beside_the_type_is_followed(client: openai.OpenAI, kind: str) -> None:
    form = {"type": kind, "schema": {"const": {"whole": 2**60 + 1}}}
    asked = {"model": "bundled", "prompt": PROMPT, "max_tokens": 300, "temperature": 0}
    [choice] = client.completions.create(**asked, extra_body={"response_format": form}).choices
    assert choice.finish_reason == "length" or json.loads(choice.text) == {"whole": 2**60 + 1}


def test_beams_under_a_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 20, 300]}}, "required": ["a"]}
    asked = {"model": "bundled", "max_tokens": 40, "n": 3}
    structured = {"json": schema | {"additionalProperties": False}, "disable_any_whitespace": True}
    beams = {"use_beam_search": True, "structured_outputs": structured}
    found = client.completions.create(prompt=PROMPT, **asked, extra_body=beams).choices
    messages = [{"role": "user", "content": PROMPT}]
    found += client.chat.completions.create(messages=messages, **asked, extra_body=beams).choices
    texts = [getattr(choice, "text", None) or choice.message.content for choice in found]
    assert [choice.finish_reason for choice in found] == ["stop"] * 6
    for half in (texts[:3], texts[3:]):
        assert {json.loads(text)["a"] for text in half} <= {1, 20, 300}
        assert len(set(half)) == 3
