"""LlamaIndex: `OpenAILike` with chat, completion, tools, structured output and an agent."""

from __future__ import annotations

from typing import Any

import pydantic
from harness import CITY, KEY, MODEL, OPENAI_URL, WEATHER_CALL, WEATHER_CALLS, case, equal, main, say
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


class City(pydantic.BaseModel):
    """A city"""

    city: str
    people: int


OSLO = City(city="Oslo", people=7)


def get_weather(city: str) -> str:
    """The weather of a city"""
    return f"rain in {city}"


def model(**fields: Any) -> OpenAILike:
    fields = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 16384, **fields}
    return OpenAILike(model=MODEL, api_base=OPENAI_URL, api_key=KEY, max_retries=0, **fields)


@case
def chat() -> None:
    messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=say("Hello"))]
    equal(model().chat(messages).message.content, "Hello")


@case
def chat_stream() -> None:
    messages = [ChatMessage(role="user", content=say("Hello"))]
    equal("".join(piece.delta or "" for piece in model().stream_chat(messages)), "Hello")


@case
async def chat_async() -> None:
    equal((await model().achat([ChatMessage(role="user", content=say("Hello"))])).message.content, "Hello")


@case
def complete() -> None:
    equal(model(is_chat_model=False).complete(say("Hello")).text, "Hello")
    equal("".join(piece.delta for piece in model(is_chat_model=False).stream_complete(say("Hello"))), "Hello")


@case
def tools() -> None:
    tool = FunctionTool.from_defaults(fn=get_weather)
    answer = model().chat_with_tools([tool], user_msg=say(WEATHER_CALL))
    [call] = model().get_tool_calls_from_response(answer)
    equal((call.tool_name, call.tool_kwargs), ("get_weather", {"city": "Oslo"}))
    answer = model().chat_with_tools([tool], user_msg=say(WEATHER_CALLS), tool_required=True)
    equal(model().get_tool_calls_from_response(answer)[0].tool_kwargs, {"city": "Oslo"})


@case
def predict_and_call() -> None:
    tool = FunctionTool.from_defaults(fn=get_weather)
    equal(str(model().predict_and_call([tool], user_msg=say(WEATHER_CALL))), "rain in Oslo")


@case
async def agent() -> None:
    agent = FunctionAgent(tools=[get_weather], llm=model(), streaming=True)
    equal(str(await agent.run(user_msg=say(WEATHER_CALL, "It rains."))), "It rains.")


@case
def structured_output_by_call() -> None:
    structured = model().as_structured_llm(City)
    calls = '[{"name": "City", "parameters": ' + CITY + "}]"
    equal(structured.chat([ChatMessage(role="user", content=say(calls))]).raw, OSLO)


@case
def structured_output_by_schema() -> None:
    structured = model(should_use_structured_outputs=True).as_structured_llm(City)
    equal(structured.chat([ChatMessage(role="user", content=say(CITY))]).raw, OSLO)


if __name__ == "__main__":
    main()
