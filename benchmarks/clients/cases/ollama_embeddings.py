"""The `ollama` package against a model that pools."""

from __future__ import annotations

import math

import ollama
from harness import KEY, MODEL, URL, case, equal, main, raises, true

SIZE = 256
client = ollama.Client(host=URL, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)


@case
def embed() -> None:
    answer = client.embed(model=MODEL, input=["Hello", "there"])
    equal([len(vector) for vector in answer.embeddings], [SIZE, SIZE])
    true(abs(math.hypot(*answer.embeddings[0]) - 1) < 1e-3, "the length of the vector")
    equal(answer.embeddings[0], client.embed(model=MODEL, input="Hello").embeddings[0])
    true(answer.prompt_eval_count, "the number of tokens")


@case
def embed_a_long_text() -> None:
    """Its end is left out, unless the request says that it must not be."""
    text = "word " * 5000
    equal(len(client.embed(model=MODEL, input=text).embeddings), 1)
    error = raises(ollama.ResponseError, lambda: client.embed(model=MODEL, input=text, truncate=False))
    equal(error.status_code, 400)


@case
def embeddings() -> None:
    vector = client.embeddings(model=MODEL, prompt="Hello").embedding
    equal(list(vector), list(client.embed(model=MODEL, input="Hello").embeddings[0]))


@case
def capabilities() -> None:
    equal(client.show(MODEL).capabilities, ["embedding"])


@case
def chat_of_a_pooling_model() -> None:
    error = raises(ollama.ResponseError, lambda: client.chat(model=MODEL, messages=[{"role": "user", "content": "x"}]))
    equal(error.status_code, 400)


main()
