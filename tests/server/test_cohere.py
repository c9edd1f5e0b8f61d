"""Cohere's embeddings: the vectors of /v1/embeddings in other forms, behind the prompts that the model's files name."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from quire.errors import UserError
from quire.server.cohere import in_types
from tests.models.encoders import ENCODERS
from tests.models.harness import randomize
from tests.server.conftest import Served
from tests.server.test_pooling import client_of
from tests.test_llm_pooling import TEXTS, save_with_tokenizer, say_default_prompt

TWO = {"texts": TEXTS[:2]}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = save_with_tokenizer(randomize(ENCODERS["bert"]()), tmp_path_factory.mktemp("cohere"), is_matryoshka=True)
    say_default_prompt(found, None)
    return found


@pytest.fixture
async def client(path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(path) as client:
        yield client


async def embed(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post("/v2/embed", json={**TWO, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def vectors(client: httpx.AsyncClient, texts: list[str], **fields: Any) -> list[list[float]]:
    """Of /v1/embeddings."""
    found = (await client.post("/v1/embeddings", json={"input": texts, **fields})).json()
    return [each["embedding"] for each in found["data"]]


async def test_the_vectors_are_those_of_openais_route(client: httpx.AsyncClient) -> None:
    found = await embed(client, request_id="mine")
    assert found["embeddings"] == {"float": await vectors(client, TEXTS[:2])}
    assert (found["id"], found["texts"], found["response_type"]) == ("embd-mine", TEXTS[:2], "embeddings_by_type")
    billed = found["meta"]["billed_units"]
    assert found["meta"]["api_version"] == {"version": "2"}
    assert (billed["input_tokens"] > 0, billed["image_tokens"]) == (True, 0)
    short = await embed(client, output_dimension=8)
    assert short["embeddings"]["float"] == await vectors(client, TEXTS[:2], dimensions=8)


async def test_each_form_of_a_vector(client: httpx.AsyncClient) -> None:
    found = (await embed(client, embedding_types=["float", "binary", "ubinary", "base64"]))["embeddings"]
    numbers = np.array(found["float"], dtype=np.float32)
    assert [np.frombuffer(base64.b64decode(each), "<f4").tolist() for each in found["base64"]] == numbers.tolist()
    packed = np.packbits(numbers >= 0, axis=-1)
    assert found["ubinary"] == packed.tolist()
    assert found["binary"] == (packed.astype(int) - 128).tolist()
    assert (await embed(client, embedding_types=["base64"]))["embeddings"].keys() == {"base64"}


def test_bits_of_odd_vectors() -> None:
    assert in_types([[-1.0] * 7 + [0.0]], ["binary", "ubinary"]).binary == [[-127]]
    with pytest.raises(UserError, match="must be a multiple of 8") as caught:
        in_types([[1.0] * 12], ["ubinary"])
    assert caught.value.param == "embedding_types"


async def test_a_text_stands_behind_the_prompt_of_its_type(client: httpx.AsyncClient) -> None:
    for name, prompt in (("query", "w5 w6 "), ("document", "w9 ")):
        found = await embed(client, input_type=name)
        assert found["embeddings"]["float"] == await vectors(client, [prompt + text for text in TEXTS[:2]])


async def test_the_prompts_of_the_configuration_count_first(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in path.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "task_instructions": {"query": "w1 "}}))
    async with client_of(other) as client:
        found = await embed(client, input_type="query")
        assert found["embeddings"]["float"] == await vectors(client, ["w1 " + text for text in TEXTS[:2]])
        assert (await client.post("/v2/embed", json={**TWO, "input_type": "document"})).status_code == 400


async def test_long_texts_are_cut_or_refused(client: httpx.AsyncClient) -> None:
    long = ["w1 " * 300]
    cut = await embed(client, texts=long)
    assert cut["embeddings"]["float"] == await vectors(client, long, truncate_prompt_tokens=-1)
    few = await embed(client, texts=long, max_tokens=4)
    assert few["embeddings"]["float"] == await vectors(client, long, truncate_prompt_tokens=4)
    assert few["meta"]["billed_units"]["input_tokens"] == 4


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"texts": []}, "texts", "must be non-empty"),
        ({"texts": None}, "texts", "must be non-empty"),
        ({"texts": ["w1", ""]}, "texts", "the text is empty"),
        ({"images": ["data:"]}, "images", "is not supported"),
        ({"inputs": [{"content": []}]}, "inputs", "is not supported"),
        ({"input_type": "other"}, "input_type", "Supported values: document, query"),
        ({"truncate": "START"}, "truncate", "is not supported"),
        ({"truncate": "NONE", "texts": ["w1 " * 300]}, "texts", "maximum context length is 256"),
        ({"truncate": "NONE", "texts": ["w1 " * 300]}, "texts", "or let truncate=END cut it"),
        ({"truncate": "NONE", "texts": ["w1 w2 w3 w4"], "max_tokens": 3}, "max_tokens", "exceeds max_tokens=3"),
        ({"embedding_types": ["int8"]}, "embedding_types[0]", "invalid enum value"),
        ({"max_tokens": 257}, "max_tokens", "256 tokens. Please request a smaller truncation size, or truncate=END"),
        ({"output_dimension": 0}, "output_dimension", "must be positive"),
    ],
)
async def test_mistakes_are_named(client: httpx.AsyncClient, fields: dict[str, Any], param: str, message: str) -> None:
    answer = await client.post("/v2/embed", json={**TWO, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], message in error["message"]) == (param, True), error


async def test_a_model_that_generates_has_no_vectors(served: Served) -> None:
    assert (await served.client.post("/v2/embed", json=TWO)).status_code == 404
