"""The `ollama` package: chats, prompts, thoughts, tools, formats, and what is asked of a model."""

from __future__ import annotations

import json

import ollama
from harness import (
    CITY,
    CITY_SCHEMA,
    KEY,
    MODEL,
    URL,
    WEATHER_CALL,
    WEATHER_SCHEMA,
    case,
    equal,
    main,
    raises,
    say,
    true,
    user,
)

HEADERS = {"Authorization": f"Bearer {KEY}"}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "", "parameters": WEATHER_SCHEMA}}
client = ollama.Client(host=URL, headers=HEADERS, timeout=60)


@case
def chat() -> None:
    answer = client.chat(model=MODEL, messages=user("Hello there"))
    equal((answer.message.role, answer.message.content), ("assistant", "Hello there"))
    equal((answer.done, answer.done_reason, answer.model), (True, "stop", MODEL))
    true(answer.eval_count and answer.eval_duration and answer.prompt_eval_count, "the counts")


@case
def chat_of_a_tag() -> None:
    equal(client.chat(model=f"{MODEL}:latest", messages=user("ok")).message.content, "ok")


@case
def chat_stream() -> None:
    parts = list(client.chat(model=MODEL, messages=user("Hello there"), stream=True, options={"num_ctx": 8192}))
    equal("".join(part.message.content or "" for part in parts), "Hello there")
    equal([part.done for part in parts[-2:]], [False, True])
    true(parts[-1].total_duration, "the duration")


@case
async def chat_async() -> None:
    async with ollama.AsyncClient(host=URL, headers=HEADERS) as client:
        equal((await client.chat(model=MODEL, messages=user("one"))).message.content, "one")
        parts = [part async for part in await client.chat(model=MODEL, messages=user("two"), stream=True)]
    equal("".join(part.message.content or "" for part in parts), "two")


@case
def thoughts() -> None:
    answer = client.chat(model=MODEL, messages=user("<think>hm</think>yes"), think=True)
    equal((answer.message.thinking, answer.message.content), ("hm", "yes"))
    parts = list(client.chat(model=MODEL, messages=user("<think>hm</think>yes"), think="high", stream=True))
    equal("".join(part.message.thinking or "" for part in parts), "hm")
    equal("".join(part.message.content or "" for part in parts), "yes")


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
      a: one of them
      b: the other one
    """
    return a + b


@case
def tools_of_functions() -> None:
    """The package makes a tool of a Python function; its result goes back under the tool's name."""
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    messages = user(call, "It is 5")
    answer = client.chat(model=MODEL, messages=messages, tools=[add])
    [found] = answer.message.tool_calls or []
    equal((found.function.name, dict(found.function.arguments)), ("add", {"a": 2, "b": 3}))
    result = {"role": "tool", "tool_name": "add", "content": str(add(**found.function.arguments))}
    equal(client.chat(model=MODEL, messages=[*messages, answer.message, result]).message.content, "It is 5")


@case
def tools_stream() -> None:
    parts = list(client.chat(model=MODEL, messages=user(WEATHER_CALL), tools=[WEATHER], stream=True))
    calls = [call.function for part in parts for call in part.message.tool_calls or []]
    equal([(call.name, dict(call.arguments)) for call in calls], [("get_weather", {"city": "Oslo"})])


@case
def formats() -> None:
    answer = client.chat(model=MODEL, messages=user(CITY), format=CITY_SCHEMA)
    equal(json.loads(answer.message.content or ""), json.loads(CITY))
    equal(json.loads(client.generate(model=MODEL, prompt=say(CITY), format="json").response), json.loads(CITY))


@case
def log_probabilities() -> None:
    answer = client.chat(model=MODEL, messages=user("ab"), logprobs=True, top_logprobs=2)
    entries = answer.logprobs or []
    equal([entry.token for entry in entries[:2]], ["a", "b"])
    equal(len(entries[0].top_logprobs or []), 2)


@case
def generate() -> None:
    answer = client.generate(model=MODEL, prompt=say("Hello"), system="Be brief")
    equal((answer.response, answer.done_reason), ("Hello", "stop"))
    parts = list(client.generate(model=MODEL, prompt=say("Hello"), stream=True))
    equal("".join(part.response for part in parts), "Hello")


@case
def generate_raw() -> None:
    answer = client.generate(model=MODEL, prompt=say("Hello"), raw=True, options={"num_predict": 3})
    equal((answer.response, answer.done_reason), ("Hel", "length"))


@case
def loading() -> None:
    equal(client.generate(model=MODEL, keep_alive="5m").done_reason, "load")
    equal(client.chat(model=MODEL, keep_alive=-1).done_reason, "load")


@case
def images_are_refused() -> None:
    message = {"role": "user", "content": "what?", "images": ["iVBORw0KGgo="]}
    error = raises(ollama.ResponseError, lambda: client.chat(model=MODEL, messages=[message]))
    equal(error.status_code, 400)
    true("image_url" in error.error, "the reason")


@case
def models() -> None:
    [model] = client.list().models
    equal(model.model, f"{MODEL}:latest")
    true(model.details and model.modified_at and model.digest, "the details")
    [running] = client.ps().models
    equal((running.model, running.digest), (model.model, model.digest))
    info = client.show(MODEL)
    equal(info.capabilities, ["completion", "tools", "thinking"])
    true((info.modelinfo or {}).get("llama.context_length"), "the context")


@case
def pull() -> None:
    equal(client.pull(MODEL).status, "success")
    equal([part.status for part in client.pull(MODEL, stream=True)][-1], "success")
    equal(raises(ollama.ResponseError, lambda: client.pull("other")).status_code, 404)


@case
def models_are_not_changed() -> None:
    for call in (
        lambda: client.delete(MODEL),
        lambda: client.copy(MODEL, "other"),
        lambda: client.push(MODEL),
        lambda: client.create("other", from_=MODEL),
    ):
        equal(raises(ollama.ResponseError, call).status_code, 403)


@case
def errors() -> None:
    missing = raises(ollama.ResponseError, lambda: client.chat(model="other", messages=user("x")))
    equal(missing.status_code, 404)
    true("does not exist" in missing.error, "the reason")
    stream = client.chat(model="other", messages=user("x"), stream=True)
    equal(raises(ollama.ResponseError, lambda: next(iter(stream))).status_code, 404)
    locked = ollama.Client(host=URL, headers={"Authorization": "Bearer wrong"})
    equal(raises(ollama.ResponseError, locked.list).status_code, 401)


@case
def leaving_a_stream() -> None:
    for _ in client.chat(model=MODEL, messages=user("a" * 1000), stream=True):
        break
    equal(client.chat(model=MODEL, messages=user("ok")).message.content, "ok")


main()
