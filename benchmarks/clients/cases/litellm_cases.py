"""The `litellm` package: its providers openai, hosted_vllm, text-completion-openai and anthropic."""

from __future__ import annotations

from typing import Any

import litellm
import pydantic
from harness import (
    CITY,
    KEY,
    MODEL,
    OPENAI_URL,
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

litellm.suppress_debug_info = True
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather", "parameters": WEATHER_SCHEMA},
}


class City(pydantic.BaseModel):
    city: str
    people: int


def ask(provider: str, *turns: str, **fields: Any) -> Any:
    base = URL if provider == "anthropic" else OPENAI_URL
    fields = {"messages": user(*turns), "max_tokens": 500, **fields}
    return litellm.completion(model=f"{provider}/{MODEL}", api_base=base, api_key=KEY, num_retries=0, **fields)


def add(provider: str) -> None:
    """The cases of every provider."""

    def text() -> None:
        answer = ask(provider, "Hello", temperature=0.5, top_p=0.9)
        equal((answer.choices[0].message.content, answer.choices[0].finish_reason), ("Hello", "stop"))
        true(answer.usage.total_tokens, "total_tokens")

    def stream() -> None:
        chunks = list(ask(provider, "Hello", stream=True, stream_options={"include_usage": True}))
        equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), "Hello")

    def tools() -> None:
        messages = user(WEATHER_CALL, "It rains.")
        first = ask(provider, messages=messages, tools=[WEATHER])
        [call] = first.choices[0].message.tool_calls
        equal((call.function.name, first.choices[0].finish_reason), ("get_weather", "tool_calls"))
        messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
        equal(ask(provider, messages=messages, tools=[WEATHER]).choices[0].message.content, "It rains.")

    def tools_required() -> None:
        answer = ask(provider, WEATHER_CALLS, tools=[WEATHER], tool_choice="required")
        equal(answer.choices[0].message.tool_calls[0].function.name, "get_weather")

    def tools_stream() -> None:
        chunks = list(ask(provider, WEATHER_CALL, tools=[WEATHER], stream=True))
        whole = litellm.stream_chunk_builder(chunks)
        equal(whole.choices[0].message.tool_calls[0].function.name, "get_weather")

    def schema() -> None:
        answer = ask(provider, CITY, response_format=City)
        equal(City.model_validate_json(answer.choices[0].message.content), City(city="Oslo", people=7))

    def thoughts() -> None:
        message = ask(provider, "<think>hm</think>Hello").choices[0].message
        equal((message.content, message.reasoning_content), ("Hello", "hm"))

    for function in (text, stream, tools, tools_required, tools_stream, schema, thoughts):
        function.__name__ = f"{provider}_{function.__name__}"
        case(function)


for _provider in ("openai", "hosted_vllm", "anthropic"):
    add(_provider)


@case
async def openai_async() -> None:
    answer = await litellm.acompletion(
        model=f"openai/{MODEL}", api_base=OPENAI_URL, api_key=KEY, messages=user("Hello")
    )
    equal(answer.choices[0].message.content, "Hello")


@case
def text_completion() -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", api_base=OPENAI_URL, api_key=KEY, prompt=say("Hello"), max_tokens=9
    )
    equal(answer.choices[0].text, "Hello")


@case
def responses() -> None:
    answer = litellm.responses(model=f"openai/{MODEL}", api_base=OPENAI_URL, api_key=KEY, input=say("Hello"))
    equal(answer.output[0].content[0].text, "Hello")


@case
def fields_of_vllm() -> None:
    answer = ask("hosted_vllm", "Hello", extra_body={"top_k": 4, "min_p": 0.01, "repetition_penalty": 1.01})
    equal(answer.choices[0].message.content, "Hello")


@case
def errors() -> None:
    raises(litellm.BadRequestError, lambda: ask("openai", "a", temperature=-1))
    raises(litellm.ContextWindowExceededError, lambda: ask("openai", "a", max_tokens=10**6))
    raises(
        litellm.AuthenticationError,
        lambda: litellm.completion(model=f"openai/{MODEL}", api_base=OPENAI_URL, api_key="no", messages=user("a")),
    )


if __name__ == "__main__":
    main()
