"""The `pydantic-ai` package: agents, their tools, and typed outputs by each of its ways."""

from __future__ import annotations

from typing import Any

import pydantic
from harness import CITY, KEY, MODEL, OPENAI_URL, URL, WEATHER_CALL, case, equal, main, say, true
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles.openai import OpenAIModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class City(pydantic.BaseModel):
    city: str
    people: int


OSLO = City(city="Oslo", people=7)
FINAL_CALLS = '[{"name": "final_result", "parameters": ' + CITY + "}]"
FINAL_CALL = '<tool_call>{"name": "final_result", "arguments": ' + CITY + "}</tool_call>"
PROFILE = OpenAIModelProfile(supports_json_schema_output=True, supports_json_object_output=True)


def chat_model() -> OpenAIChatModel:
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=OPENAI_URL, api_key=KEY), profile=PROFILE)


def responses_model() -> OpenAIResponsesModel:
    return OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=OPENAI_URL, api_key=KEY), profile=PROFILE)


def anthropic_model() -> AnthropicModel:
    return AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY))


def get_weather(city: str) -> str:
    """The weather of a city"""
    return f"rain in {city}"


async def run(agent: Agent[Any, Any], *turns: str) -> Any:
    return (await agent.run(say(*turns))).output


@case
async def chat_text() -> None:
    result = await Agent(chat_model()).run(say("Hello"))
    equal(result.output, "Hello")
    true(result.usage.input_tokens if hasattr(result.usage, "input_tokens") else result.usage().input_tokens)


@case
async def chat_instructions_and_history() -> None:
    agent = Agent(chat_model(), instructions="Be brief.")
    first = await agent.run(say("one", "two"))
    second = await agent.run("go on", message_history=first.all_messages())
    equal((first.output, second.output), ("one", "two"))


@case
async def chat_stream() -> None:
    async with Agent(chat_model()).run_stream(say("Hello")) as result:
        equal([text async for text in result.stream_text()][-1], "Hello")


@case
async def chat_tools() -> None:
    equal(await run(Agent(chat_model(), tools=[get_weather]), WEATHER_CALL, "It rains."), "It rains.")


@case
async def chat_tool_output() -> None:
    equal(await run(Agent(chat_model(), output_type=ToolOutput(City)), FINAL_CALLS), OSLO)


@case
async def chat_tool_output_beside_tools() -> None:
    agent = Agent(chat_model(), output_type=City, tools=[get_weather])
    weather = '[{"name": "get_weather", "parameters": {"city": "Oslo"}}]'
    equal(await run(agent, weather, FINAL_CALLS), OSLO)


@case
async def chat_tool_output_or_text() -> None:
    agent = Agent(chat_model(), output_type=[City, str])
    equal(await run(agent, FINAL_CALL), OSLO)
    equal(await run(agent, "Hello"), "Hello")


@case
async def chat_native_output() -> None:
    equal(await run(Agent(chat_model(), output_type=NativeOutput(City)), CITY), OSLO)


@case
async def chat_native_output_beside_tools() -> None:
    agent = Agent(chat_model(), output_type=NativeOutput(City), tools=[get_weather])
    equal(await run(agent, WEATHER_CALL, CITY), OSLO)


@case
async def chat_prompted_output() -> None:
    equal(await run(Agent(chat_model(), output_type=PromptedOutput(City)), CITY), OSLO)


@case
async def chat_output_is_asked_for_again() -> None:
    """The model answers in text at first."""
    agent = Agent(chat_model(), output_type=[ToolOutput(City), ToolOutput(int)], retries=2)
    wrong = '[{"name": "final_result_City", "parameters": {"city": "", "people": 7}}]'
    right = wrong.replace('"city": ""', '"city": "Oslo"')

    @agent.output_validator
    def check(output: Any) -> Any:
        from pydantic_ai import ModelRetry

        if isinstance(output, City) and not output.city:
            raise ModelRetry("no city")
        return output

    equal(await run(agent, wrong, right), OSLO)


@case
async def chat_stream_of_a_tool_output() -> None:
    async with Agent(chat_model(), output_type=City).run_stream(say(FINAL_CALLS)) as result:
        equal(await result.get_output(), OSLO)


@case
async def chat_thinking() -> None:
    result = await Agent(chat_model()).run(say("<think>hm</think>Hello"))
    equal(result.output, "Hello")
    parts = [part for message in result.all_messages() for part in message.parts if part.part_kind == "thinking"]
    equal([part.content for part in parts], ["hm"])


@case
async def responses_text() -> None:
    equal(await run(Agent(responses_model()), "Hello"), "Hello")


@case
async def responses_tools() -> None:
    equal(await run(Agent(responses_model(), tools=[get_weather]), WEATHER_CALL, "It rains."), "It rains.")


@case
async def responses_native_output() -> None:
    equal(await run(Agent(responses_model(), output_type=NativeOutput(City)), CITY), OSLO)


@case
async def responses_stream() -> None:
    async with Agent(responses_model()).run_stream(say("Hello")) as result:
        equal([text async for text in result.stream_text()][-1], "Hello")


@case
async def anthropic_text() -> None:
    equal(await run(Agent(anthropic_model()), "Hello"), "Hello")


@case
async def anthropic_tools() -> None:
    equal(await run(Agent(anthropic_model(), tools=[get_weather]), WEATHER_CALL, "It rains."), "It rains.")


@case
async def anthropic_tool_output() -> None:
    equal(await run(Agent(anthropic_model(), output_type=ToolOutput(City)), FINAL_CALLS), OSLO)


@case
async def anthropic_stream() -> None:
    async with Agent(anthropic_model()).run_stream(say("Hello")) as result:
        equal([text async for text in result.stream_text()][-1], "Hello")


if __name__ == "__main__":
    main()
