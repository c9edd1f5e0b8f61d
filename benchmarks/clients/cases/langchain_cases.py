"""LangChain: `langchain-openai` and `langchain-anthropic`, with tools, structured output and agents."""

from __future__ import annotations

import warnings
from typing import Any

import pydantic
from harness import CITY, KEY, MODEL, OPENAI_URL, URL, WEATHER_CALL, WEATHER_CALLS, case, equal, main, say, true
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

warnings.filterwarnings("ignore")


class City(pydantic.BaseModel):
    """A city"""

    city: str
    people: int


OSLO = City(city="Oslo", people=7)


@tool
def get_weather(city: str) -> str:
    """The weather of a city"""
    return f"rain in {city}"


def chat(**fields: Any) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=OPENAI_URL, api_key=KEY, max_retries=0, **fields)


def claude(**fields: Any) -> ChatAnthropic:
    return ChatAnthropic(model=MODEL, base_url=URL, api_key=KEY, max_retries=0, max_tokens=500, **fields)


@case
def openai_invoke() -> None:
    answer = chat(temperature=0.5, max_tokens=50).invoke([SystemMessage("Be brief."), HumanMessage(say("Hello"))])
    equal((answer.content, answer.response_metadata["finish_reason"]), ("Hello", "stop"))
    true(answer.usage_metadata["total_tokens"], "total_tokens")


@case
def openai_stream() -> None:
    whole: Any = None
    for chunk in chat(stream_usage=True).stream(say("Hello")):
        whole = chunk if whole is None else whole + chunk
    equal(whole.content, "Hello")
    true(whole.usage_metadata["output_tokens"], "output_tokens")


@case
async def openai_async() -> None:
    equal((await chat().ainvoke(say("Hello"))).content, "Hello")
    equal("".join([chunk.content async for chunk in chat().astream(say("Hello"))]), "Hello")


@case
def openai_batch() -> None:
    equal([answer.content for answer in chat().batch([say("one"), say("two")])], ["one", "two"])


@case
def openai_tools() -> None:
    model = chat().bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(say(WEATHER_CALL, "It rains."))]
    first = model.invoke(messages)
    [call] = first.tool_calls
    equal((call["name"], call["args"]), ("get_weather", {"city": "Oslo"}))
    messages += [first, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
    equal(model.invoke(messages).content, "It rains.")


@case
def openai_tools_stream() -> None:
    whole: Any = None
    for chunk in chat().bind_tools([get_weather]).stream(say(WEATHER_CALL)):
        whole = chunk if whole is None else whole + chunk
    equal([(call["name"], call["args"]) for call in whole.tool_calls], [("get_weather", {"city": "Oslo"})])


@case
def openai_tool_choice() -> None:
    equal(
        chat().bind_tools([get_weather], tool_choice="any").invoke(say(WEATHER_CALLS)).tool_calls[0]["args"],
        {"city": "Oslo"},
    )
    named = chat().bind_tools([get_weather], tool_choice="get_weather", strict=True)
    equal(named.invoke(say('{"city": "Oslo"}')).tool_calls[0]["args"], {"city": "Oslo"})


@case
def openai_structured_output_json_schema() -> None:
    equal(chat().with_structured_output(City, method="json_schema").invoke(say(CITY)), OSLO)


@case
def openai_structured_output_function_calling() -> None:
    equal(chat().with_structured_output(City, method="function_calling").invoke(say(CITY)), OSLO)


@case
def openai_structured_output_json_mode() -> None:
    equal(chat().with_structured_output(City, method="json_mode").invoke(say(CITY)), OSLO)


@case
def openai_structured_output_stream() -> None:
    *_, last = chat().with_structured_output(City).stream(say(CITY))
    equal(last, OSLO)


@case
def openai_structured_output_beside_tools() -> None:
    model = chat().with_structured_output(City, tools=[get_weather], include_raw=True, strict=True)
    [call] = model.invoke(say(WEATHER_CALL))["raw"].tool_calls
    equal(call["args"], {"city": "Oslo"})
    equal(model.invoke(say(CITY))["parsed"], OSLO)


@case
def openai_agent() -> None:
    agent = create_agent(chat(), tools=[get_weather])
    result = agent.invoke({"messages": [{"role": "user", "content": say(WEATHER_CALL, "It rains.")}]})
    equal(result["messages"][-1].content, "It rains.")


@case
def openai_logprobs() -> None:
    answer = chat(logprobs=True, top_logprobs=2).invoke(say("Hi"))
    equal(answer.response_metadata["logprobs"]["content"][0]["token"], "H")


@case
def openai_responses() -> None:
    answer = chat(use_responses_api=True).invoke(say("Hello"))
    equal(answer.text if isinstance(answer.text, str) else answer.text(), "Hello")
    [call] = chat(use_responses_api=True).bind_tools([get_weather]).invoke(say(WEATHER_CALL)).tool_calls
    equal(call["args"], {"city": "Oslo"})


@case
def openai_completion() -> None:
    model = OpenAI(model=MODEL, base_url=OPENAI_URL, api_key=KEY, max_retries=0)
    equal(model.invoke(say("Hello")), "Hello")
    equal("".join(model.stream(say("Hello"))), "Hello")


@case
def anthropic_invoke() -> None:
    answer = claude().invoke([SystemMessage("Be brief."), HumanMessage(say("Hello"))])
    equal(answer.content, "Hello")
    true(answer.usage_metadata["output_tokens"], "output_tokens")


@case
def anthropic_stream() -> None:
    equal(
        "".join(chunk.text if isinstance(chunk.text, str) else chunk.text() for chunk in claude().stream(say("Hello"))),
        "Hello",
    )


@case
def anthropic_tools() -> None:
    model = claude().bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(say(WEATHER_CALL, "It rains."))]
    first = model.invoke(messages)
    [call] = first.tool_calls
    equal((call["name"], call["args"]), ("get_weather", {"city": "Oslo"}))
    messages += [first, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
    equal(model.invoke(messages).content, "It rains.")


@case
def anthropic_structured_output() -> None:
    equal(claude().with_structured_output(City).invoke(say(CITY)), OSLO)
    equal(claude().with_structured_output(City, method="json_schema").invoke(say(CITY)), OSLO)


@case
def anthropic_token_count() -> None:
    true(claude().get_num_tokens_from_messages([HumanMessage("Hello")]) > 0)


if __name__ == "__main__":
    main()
