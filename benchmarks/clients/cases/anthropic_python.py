"""The `anthropic` package."""

from __future__ import annotations

from typing import Any

import anthropic
import pydantic
from harness import (
    CITY,
    CITY_SCHEMA,
    KEY,
    MODEL,
    URL,
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

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=60)
WEATHER: Any = {"name": "get_weather", "description": "The weather", "input_schema": WEATHER_SCHEMA}


class City(pydantic.BaseModel):
    city: str
    people: int


def create(*turns: str, **fields: Any) -> Any:
    return client.messages.create(**{"model": MODEL, "max_tokens": 500, "messages": user(*turns), **fields})


@case
def message() -> None:
    sampling = {"temperature": 0.5, "top_k": 5, "top_p": 0.9}
    answer = create("Hello", system="Be brief.", metadata={"user_id": "Ann"}, extra_body=sampling)
    equal([(block.type, block.text) for block in answer.content], [("text", "Hello")])
    equal((answer.role, answer.stop_reason, answer.type), ("assistant", "end_turn", "message"))
    true(answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) > 0)
    true(answer._request_id, "the request-id")


@case
async def message_async() -> None:
    async with anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0) as client:
        answer = await client.messages.create(model=MODEL, max_tokens=50, messages=user("Hello"))
        equal(answer.content[0].text, "Hello")


@case
async def message_stream_async() -> None:
    async with (
        anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0) as client,
        client.messages.stream(model=MODEL, max_tokens=50, messages=user("Hello")) as stream,
    ):
        equal("".join([text async for text in stream.text_stream]), "Hello")


@case
def message_with_a_token() -> None:
    """The key as `Authorization: Bearer`."""
    bearer = anthropic.Anthropic(base_url=URL, auth_token=KEY, max_retries=0)
    equal(bearer.messages.create(model=MODEL, max_tokens=50, messages=user("Hello")).content[0].text, "Hello")


@case
def message_blocks() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    answer = create(
        system=[{"type": "text", "text": "Be brief.", **cached}],
        messages=[{"role": "user", "content": [{"type": "text", "text": say("Hello"), **cached}]}],
    )
    equal(answer.content[0].text, "Hello")


@case
def message_events() -> None:
    events = list(create("Hello", stream=True))
    kinds = [event.type for event in events]
    equal((kinds[0], kinds[1], kinds[-1]), ("message_start", "content_block_start", "message_stop"))
    equal("".join(event.delta.text for event in events if event.type == "content_block_delta"), "Hello")


@case
def message_stream() -> None:
    with client.messages.stream(model=MODEL, max_tokens=50, messages=user("Hello")) as stream:
        equal("".join(stream.text_stream), "Hello")
        equal(stream.get_final_message().stop_reason, "end_turn")


@case
def message_raw_response() -> None:
    raw = client.messages.with_raw_response.create(model=MODEL, max_tokens=50, messages=user("Hello"))
    equal((raw.status_code, raw.parse().content[0].text), (200, "Hello"))


@case
def message_stops() -> None:
    equal(create("Hello", max_tokens=2).stop_reason, "max_tokens")
    found = create("one two three", stop_sequences=[" three"])
    equal((found.content[0].text, found.stop_reason, found.stop_sequence), ("one two", "stop_sequence", " three"))


@case
def message_parse() -> None:
    answer = client.messages.parse(model=MODEL, max_tokens=50, messages=user(CITY), output_format=City)
    equal(answer.parsed_output, City(city="Oslo", people=7))


@case
def message_output_format() -> None:
    answer = create(CITY, output_config={"format": {"type": "json_schema", "schema": CITY_SCHEMA}})
    equal(answer.content[0].text, CITY)


@case
def message_thinking() -> None:
    answer = create("<think>hm</think>Hello", thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000)
    equal([block.type for block in answer.content], ["thinking", "text"])
    equal(answer.content[0].thinking, "hm")
    messages = [*user("one", "two"), {"role": "assistant", "content": answer.content}, {"role": "user", "content": "?"}]
    equal(create(messages=messages).content[0].text, "two")


@case
def message_thinking_stream() -> None:
    with client.messages.stream(model=MODEL, max_tokens=50, messages=user("<think>hm</think>Hello")) as stream:
        kinds = {event.type for event in stream}
        equal([block.type for block in stream.get_final_message().content], ["thinking", "text"])
    true({"thinking", "text"} <= kinds, str(kinds))


@case
def tools_with_answer() -> None:
    messages = user(WEATHER_CALL, "It rains.")
    first = create(messages=messages, tools=[WEATHER])
    [call] = [block for block in first.content if block.type == "tool_use"]
    equal((call.name, call.input, first.stop_reason), ("get_weather", {"city": "Oslo"}, "tool_use"))
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}]},
    ]
    second = create(messages=messages, tools=[WEATHER])
    equal((second.content[0].text, second.stop_reason), ("It rains.", "end_turn"))


@case
def tools_stream() -> None:
    with client.messages.stream(
        model=MODEL, max_tokens=500, messages=user("Look. " + WEATHER_CALL), tools=[WEATHER]
    ) as stream:
        for _ in stream:
            pass
        text, call = stream.get_final_message().content
    equal((text.text, call.name, call.input), ("Look. ", "get_weather", {"city": "Oslo"}))


@case
def tools_choices() -> None:
    answer = create(WEATHER_CALLS, tools=[WEATHER], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    equal(answer.content[0].input, {"city": "Oslo"})
    answer = create('{"city": "Oslo"}', tools=[WEATHER], tool_choice={"type": "tool", "name": "get_weather"})
    equal((answer.content[0].input, answer.stop_reason), ({"city": "Oslo"}, "tool_use"))
    equal(create("no", tools=[WEATHER], tool_choice={"type": "none"}).content[0].text, "no")


@case
def tools_runner() -> None:
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city"""
        return f"rain in {city}"

    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=500, messages=user(WEATHER_CALL, "It rains."), tools=[get_weather]
    )
    equal(runner.until_done().content[0].text, "It rains.")


@case
def beta_message() -> None:
    answer = client.beta.messages.create(
        model=MODEL, max_tokens=50, messages=user("Hello"), betas=["prompt-caching-2024-07-31"]
    )
    equal(answer.content[0].text, "Hello")


@case
def token_count() -> None:
    count = client.messages.count_tokens(model=MODEL, messages=user("Hello"), tools=[WEATHER])
    usage = create("Hello", tools=[WEATHER]).usage
    equal(count.input_tokens, usage.input_tokens + usage.cache_read_input_tokens)


@case
def models_list() -> None:
    equal([model.id for model in client.models.list()], [MODEL])


@case
def models_retrieve() -> None:
    model = client.models.retrieve(MODEL)
    equal((model.id, model.type, bool(model.display_name)), (MODEL, "model", True))


@case
def errors() -> None:
    wrong = client.with_options(api_key="wrong")
    error = raises(
        anthropic.AuthenticationError,
        lambda: wrong.messages.create(model=MODEL, max_tokens=5, messages=user("a")),
    )
    equal(error.body["error"]["type"], "authentication_error")
    error = raises(anthropic.NotFoundError, lambda: create("a", model="other"))
    equal(error.body["error"]["type"], "not_found_error")
    error = raises(anthropic.BadRequestError, lambda: create("a", extra_body={"temperature": -1}))
    equal((error.body["type"], error.body["error"]["type"]), ("error", "invalid_request_error"))


@case
def image_is_refused() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    messages: Any = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    raises(anthropic.BadRequestError, lambda: create(messages=messages))


@case
def batches_do_not_exist() -> None:
    error = raises(anthropic.NotFoundError, lambda: client.messages.batches.list())
    equal(error.body["error"]["type"], "not_found_error")


if __name__ == "__main__":
    main()
