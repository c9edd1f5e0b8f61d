"""anthropic-python: pictures in messages and in the results of tools."""

from __future__ import annotations

from typing import Any

import anthropic
from harness import KEY, MODEL, RED_SQUARE, URL, WHAT, case, equal, main, raises, true

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=60)
TEXT = {"type": "text", "text": WHAT}


def image(data: str) -> Any:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def ask(*blocks: Any) -> Any:
    messages: Any = [{"role": "user", "content": list(blocks)}]
    return client.messages.create(model=MODEL, messages=messages, max_tokens=20, extra_body={"temperature": 0})


def num_input(usage: Any) -> int:
    """Input tokens, of which those that the cache had are counted apart."""
    return usage.input_tokens + (usage.cache_read_input_tokens or 0)


@case
def message_picture() -> None:
    answer = ask(image(RED_SQUARE), TEXT)
    equal((answer.content[0].text, answer.stop_reason), ("A red square.", "end_turn"))
    true(num_input(answer.usage) > 16, "the picture's tokens count")


@case
def message_picture_stream() -> None:
    messages: Any = [{"role": "user", "content": [image(RED_SQUARE), TEXT]}]
    with client.messages.stream(model=MODEL, messages=messages, max_tokens=20, extra_body={"temperature": 0}) as stream:
        equal("".join(stream.text_stream), "A red square.")


@case
def token_count_of_a_picture() -> None:
    messages: Any = [{"role": "user", "content": [image(RED_SQUARE), TEXT]}]
    counted = client.messages.count_tokens(model=MODEL, messages=messages)
    equal(counted.input_tokens, num_input(ask(image(RED_SQUARE), TEXT).usage))


@case
def picture_that_is_damaged() -> None:
    error = raises(anthropic.BadRequestError, lambda: ask(TEXT, image("AAAA")))
    true("messages[0].content[1]" in str(error), str(error))


if __name__ == "__main__":
    main()
