"""The `openai` package against a model that pools."""

from __future__ import annotations

import math

import openai
from harness import KEY, MODEL, OPENAI_URL, case, equal, main, raises, true

client = openai.OpenAI(base_url=OPENAI_URL, api_key=KEY, max_retries=0, timeout=60)
SIZE = 256


@case
def embedding() -> None:
    """The package asks for base64 by itself, and decodes it."""
    answer = client.embeddings.create(model=MODEL, input="Hello")
    equal((answer.object, answer.model, answer.data[0].index), ("list", MODEL, 0))
    equal(len(answer.data[0].embedding), SIZE)
    true(abs(math.hypot(*answer.data[0].embedding) - 1) < 1e-3, "the length of the vector")
    equal(answer.usage.prompt_tokens, answer.usage.total_tokens)


@case
async def embedding_async() -> None:
    async with openai.AsyncOpenAI(base_url=OPENAI_URL, api_key=KEY, max_retries=0) as client:
        equal(len((await client.embeddings.create(model=MODEL, input="Hello")).data[0].embedding), SIZE)


@case
def embedding_formats() -> None:
    floats = client.embeddings.create(model=MODEL, input="Hello", encoding_format="float").data[0].embedding
    decoded = client.embeddings.create(model=MODEL, input="Hello").data[0].embedding
    raw = client.embeddings.create(model=MODEL, input="Hello", encoding_format="base64").data[0].embedding
    equal(type(raw), str)
    true(max(abs(a - b) for a, b in zip(floats, decoded, strict=True)) < 1e-6)


@case
def embedding_lists() -> None:
    texts = client.embeddings.create(model=MODEL, input=["one", "two", "three"])
    equal([entry.index for entry in texts.data], [0, 1, 2])
    equal(len(client.embeddings.create(model=MODEL, input=[[5, 6, 7], [8]]).data), 2)
    equal(len(client.embeddings.create(model=MODEL, input=[5, 6, 7]).data), 1)


@case
def embedding_dimensions_of_a_model_without() -> None:
    """A model that was not trained for shorter vectors refuses them."""
    error = raises(openai.BadRequestError, lambda: client.embeddings.create(model=MODEL, input="Hello", dimensions=8))
    equal(error.param, "dimensions")


@case
def chat_of_a_pooling_model() -> None:
    raises(
        openai.BadRequestError,
        lambda: client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a"}]),
    )


if __name__ == "__main__":
    main()
