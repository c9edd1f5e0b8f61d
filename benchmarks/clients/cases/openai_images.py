"""openai-python: pictures in chats and responses, which the bundled model that sees answers about."""

from __future__ import annotations

from typing import Any

import openai
from harness import BLUE_SQUARE, MODEL, RED_SQUARE, WHAT, case, equal, main, raises, true
from openai_common import client


def part(file: str, **more: Any) -> Any:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{file}"}, **more}


def ask(*parts: Any, **more: Any) -> Any:
    content = [*parts, {"type": "text", "text": WHAT}]
    return client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": content}], temperature=0, max_completion_tokens=20, **more
    )


@case
def chat_picture() -> None:
    answer = ask(part(RED_SQUARE), logprobs=True, top_logprobs=5)
    equal(answer.choices[0].message.content, "A red square.")
    usage = answer.usage
    equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
    true(usage.prompt_tokens > 16, "the picture's tokens count")


@case
def chat_picture_stream() -> None:
    chunks = [chunk for chunk in ask(part(BLUE_SQUARE), stream=True) if chunk.choices]
    equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks), "A blue square.")
    equal([chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason], ["stop"])


@case
def chat_picture_beams() -> None:
    answer = ask(part(RED_SQUARE), n=2, extra_body={"use_beam_search": True})
    texts = [choice.message.content for choice in answer.choices]
    equal((texts[0], len(set(texts))), ("A red square.", 2))


@case
def chat_pictures_in_turns() -> None:
    messages: list[Any] = []
    for file in (RED_SQUARE, BLUE_SQUARE):
        messages.append({"role": "user", "content": [part(file), {"type": "text", "text": WHAT}]})
        found = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_completion_tokens=20)
        true(found.choices[0].message.content, "an answer")
        messages.append(found.choices[0].message.model_dump())
    equal(messages[1]["content"], "A red square.")


@case
def chat_picture_by_its_uuid() -> None:
    ask(part(RED_SQUARE, uuid="a"))
    named: Any = {"type": "image_url", "image_url": {}, "uuid": "a"}
    equal(ask(named).choices[0].message.content, "A red square.")
    raises(openai.BadRequestError, lambda: ask({**named, "uuid": "not sent"}))


@case
def chat_picture_with_unknown_keys() -> None:
    image = part(RED_SQUARE, also_unknown="x")
    image["image_url"]["unknown"] = "x"
    equal(ask(image).choices[0].message.content, "A red square.")


@case
def chat_picture_that_is_no_object() -> None:
    image: Any = {"type": "image_url", "image_url": part(RED_SQUARE)["image_url"]["url"]}
    raises(openai.BadRequestError, lambda: ask(image))


@case
def chat_picture_that_is_damaged() -> None:
    error = raises(openai.BadRequestError, lambda: ask(part(RED_SQUARE), part("AAAA")))
    true("content[1].image_url" in error.message, error.message)


@case
def response_picture() -> None:
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{RED_SQUARE}", "detail": "auto"}
    items: Any = [{"role": "user", "content": [image, {"type": "input_text", "text": WHAT}]}]
    answer = client.responses.create(model=MODEL, input=items, temperature=0, max_output_tokens=20)
    equal(answer.output_text, "A red square.")
    again = client.responses.create(
        model=MODEL, input="Which colour is it?", previous_response_id=answer.id, temperature=0, max_output_tokens=20
    )
    true(again.usage.input_tokens > answer.usage.input_tokens, "the picture is still there")


if __name__ == "__main__":
    main()
