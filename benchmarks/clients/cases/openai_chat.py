"""The `openai` package: chat completions."""

from __future__ import annotations

from typing import Any

import openai
from harness import (
    CITY,
    CITY_SCHEMA,
    MODEL,
    WEATHER_CALL,
    WEATHER_CALLS,
    WEATHER_SCHEMA,
    case,
    equal,
    main,
    raises,
    say,
    true,
    user,
)
from openai_common import City, GetWeather, asynchronous, client

WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather", "parameters": WEATHER_SCHEMA},
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY_SCHEMA, "strict": True}}


@case
def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=user("Hello"), max_completion_tokens=20)
    [choice] = answer.choices
    equal((choice.message.role, choice.message.content, choice.finish_reason), ("assistant", "Hello", "stop"))
    equal(answer.object, "chat.completion")
    equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)
    true(answer._request_id, "the x-request-id")


@case
async def chat_async() -> None:
    async with asynchronous() as client:
        answer = await client.chat.completions.create(model=MODEL, messages=user("Hello"))
        equal(answer.choices[0].message.content, "Hello")


@case
def chat_stream() -> None:
    with client.chat.completions.create(
        model=MODEL, messages=user("Hello"), stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    equal("".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices), "Hello")
    equal(chunks[0].choices[0].delta.role, "assistant")
    equal([chunk.usage is not None for chunk in chunks], [False] * (len(chunks) - 1) + [True])
    equal(len({chunk.id for chunk in chunks}), 1)


@case
async def chat_stream_async() -> None:
    async with asynchronous() as client:
        stream = await client.chat.completions.create(model=MODEL, messages=user("Hello"), stream=True)
        equal("".join([chunk.choices[0].delta.content or "" async for chunk in stream]), "Hello")


@case
def chat_stream_helper() -> None:
    with client.chat.completions.stream(model=MODEL, messages=user("Hello"), logprobs=True) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    equal(final.choices[0].message.content, "Hello")
    true({"chunk", "content.delta", "content.done"} <= kinds, str(kinds))
    equal(len(final.choices[0].logprobs.content), 6)


@case
def chat_stream_helper_parses() -> None:
    with client.chat.completions.stream(model=MODEL, messages=user(CITY), response_format=City) as stream:
        for _ in stream:
            pass
        equal(stream.get_final_completion().choices[0].message.parsed, City(city="Oslo", people=7))


@case
def chat_stream_helper_tools() -> None:
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    with client.chat.completions.stream(model=MODEL, messages=user(WEATHER_CALL), tools=[tool]) as stream:
        kinds = {event.type for event in stream}
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    true("tool_calls.function.arguments.done" in kinds, str(kinds))
    equal(call.function.parsed_arguments, GetWeather(city="Oslo"))


@case
def chat_raw_response() -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=user("Hello"))
    equal((raw.status_code, raw.headers["content-type"]), (200, "application/json"))
    equal(raw.parse().choices[0].message.content, "Hello")


@case
def chat_streaming_response() -> None:
    with client.chat.completions.with_streaming_response.create(model=MODEL, messages=user("Hello")) as response:
        true(any("Hello" in line for line in response.iter_lines()))


@case
def chat_raw_stream() -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=user("Hello"), stream=True)
    true(raw.headers["content-type"].startswith("text/event-stream"))
    equal("".join(chunk.choices[0].delta.content or "" for chunk in raw.parse()), "Hello")


@case
def chat_parse() -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=user(CITY), response_format=City)
    equal(answer.choices[0].message.parsed, City(city="Oslo", people=7))


@case
async def chat_parse_async() -> None:
    async with asynchronous() as client:
        answer = await client.chat.completions.parse(model=MODEL, messages=user(CITY), response_format=City)
        equal(answer.choices[0].message.parsed, City(city="Oslo", people=7))


@case
def chat_parse_tools() -> None:
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    answer = client.chat.completions.parse(model=MODEL, messages=user(WEATHER_CALL), tools=[tool])
    [call] = answer.choices[0].message.tool_calls
    equal(call.function.parsed_arguments, GetWeather(city="Oslo"))
    equal(answer.choices[0].finish_reason, "tool_calls")


@case
def chat_parse_a_cut_answer() -> None:
    def ask() -> object:
        return client.chat.completions.parse(model=MODEL, messages=user(CITY), response_format=City, max_tokens=5)

    raises(openai.LengthFinishReasonError, ask)


@case
def chat_json_schema() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=user(CITY), response_format=FORMAT)
    equal(answer.choices[0].message.content, CITY)


@case
def chat_json_object() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=user(CITY), response_format={"type": "json_object"})
    equal(answer.choices[0].message.content, CITY)


@case
def chat_tools_auto_with_answer() -> None:
    messages = user(WEATHER_CALL, "It rains.")
    first = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
    message = first.choices[0].message
    [call] = message.tool_calls
    equal((call.type, call.function.name, call.function.arguments), ("function", "get_weather", '{"city": "Oslo"}'))
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
    equal((second.choices[0].message.content, second.choices[0].finish_reason), ("It rains.", "stop"))


@case
def chat_tools_stream() -> None:
    stream = client.chat.completions.create(model=MODEL, messages=user(WEATHER_CALL), tools=[WEATHER], stream=True)
    chunks = [chunk.choices[0] for chunk in stream]
    pieces = [piece for choice in chunks for piece in choice.delta.tool_calls or []]
    equal((pieces[0].index, pieces[0].function.name, pieces[0].type), (0, "get_weather", "function"))
    equal("".join(piece.function.arguments or "" for piece in pieces), '{"city": "Oslo"}')
    equal(chunks[-1].finish_reason, "tool_calls")


@case
def chat_tools_required() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=user(WEATHER_CALLS), tools=[WEATHER], tool_choice="required"
    )
    equal(answer.choices[0].message.tool_calls[0].function.arguments, '{"city": "Oslo"}')


@case
def chat_tools_named() -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=user('{"city": "Oslo"}'),
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        parallel_tool_calls=False,
    )
    equal(answer.choices[0].message.tool_calls[0].function.arguments, '{"city": "Oslo"}')


@case
def chat_tools_none() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=user("no"), tools=[WEATHER], tool_choice="none")
    equal((answer.choices[0].message.content, answer.choices[0].message.tool_calls or None), ("no", None))


@case
def chat_legacy_functions() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=user(WEATHER_CALL), functions=[WEATHER["function"]], function_call="auto"
    )
    call = answer.choices[0].message.function_call
    equal(
        (call.name, call.arguments, answer.choices[0].finish_reason),
        ("get_weather", '{"city": "Oslo"}', "function_call"),
    )


@case
def chat_n() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=user("Hello"), n=3, temperature=1, seed=5)
    equal([(choice.index, choice.message.content) for choice in answer.choices], [(i, "Hello") for i in range(3)])


@case
def chat_logprobs() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=user("Hi"), logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    equal([entry.token for entry in entries][:2], ["H", "i"])
    equal([len(entry.top_logprobs) for entry in entries], [3] * len(entries))
    equal(bytes(entries[0].bytes), b"H")


@case
def chat_sampling_fields() -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": say("Hello")}], "name": "Ann"},
        ],
        temperature=0.3,
        top_p=0.9,
        seed=3,
        stop=["!", "?"],
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={"5": -1},
        max_tokens=99,
        user="ann",
        store=True,
        metadata={"a": "b"},
        service_tier="auto",
        safety_identifier="x",
        prompt_cache_key="y",
        reasoning_effort="low",
        extra_body={"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.01},
        extra_headers={"X-Request-Id": "my-request"},
    )
    equal(answer.choices[0].message.content, "Hello")
    true("my-request" in answer.id, answer.id)


@case
def chat_stop() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=user("one two three"), stop=" three")
    equal((answer.choices[0].message.content, answer.choices[0].finish_reason), ("one two", "stop"))


@case
def chat_length() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=user("Hello"), max_completion_tokens=2)
    equal((answer.choices[0].message.content, answer.choices[0].finish_reason), ("He", "length"))


@case
def chat_reasoning() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=user("<think>hm</think>Hello"))
    message = answer.choices[0].message
    equal((message.content, message.reasoning_content), ("Hello", "hm"))
    true(answer.usage.completion_tokens_details.reasoning_tokens, "reasoning_tokens")
    again = [*user("Hello", "Again"), message, {"role": "user", "content": "again"}]
    equal(client.chat.completions.create(model=MODEL, messages=again).choices[0].message.content, "Again")


@case
def chat_history_of_dumps() -> None:
    """Messages as `model_dump()` gives them, nulls and all."""
    first = client.chat.completions.create(model=MODEL, messages=user("one", "two"))
    messages = [*user("one", "two"), first.choices[0].message.model_dump(), {"role": "user", "content": "go on"}]
    equal(client.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content, "two")


@case
def chat_image_is_refused() -> None:
    image: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    error = raises(
        openai.BadRequestError,
        lambda: client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [image]}]),
    )
    true("image_url" in error.message, error.message)


if __name__ == "__main__":
    main()
