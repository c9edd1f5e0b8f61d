"""Logits processors over HTTP: a server that loads one by its flag, and the official client."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "quire", "serve", "--port", "0", "--num-threads", "1", "--kv-cache-memory", "32MiB")


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    processors = ("--logits-processors", "tests.logits_processors.samples:Target")
    process = subprocess.Popen((*COMMAND, *processors), stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    url = process.stdout.readline().split(" on ")[1].split()[0]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client
    process.terminate()
    process.stdout.read()
    assert process.wait() == 0


@pytest.mark.parametrize("target", [128, 67])
def test_arguments_of_a_request(client: openai.OpenAI, target: int) -> None:
    asked = {"model": "bundled", "prompt": "def f(x):", "max_tokens": 6, "temperature": 0, "logprobs": 0}
    body = {"return_tokens_as_token_ids": True}
    marked = client.completions.create(**asked, extra_body={**body, "vllm_xargs": {"target_token": target}})
    assert marked.choices[0].logprobs.tokens == [f"token_id:{target}"] * 6
    plain = client.completions.create(**asked, extra_body=body)
    assert len(set(plain.choices[0].logprobs.tokens)) > 1


def test_arguments_that_a_processor_refuses(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="target_token value invalid is not int"):
        client.chat.completions.create(
            model="bundled",
            messages=[{"role": "user", "content": "x"}],
            extra_body={"vllm_xargs": {"target_token": "invalid"}},
        )


def test_a_processor_that_fails(client: openai.OpenAI) -> None:
    """Its request alone: the server answers the next one."""
    asked = {"model": "bundled", "prompt": "x", "max_tokens": 4}
    with pytest.raises(openai.InternalServerError, match="the logits processor Target has failed"):
        client.completions.create(**asked, extra_body={"vllm_xargs": {"target_token": "broken"}})
    assert client.completions.create(**asked).choices[0].finish_reason in ("length", "stop")
