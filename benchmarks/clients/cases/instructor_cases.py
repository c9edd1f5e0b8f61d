"""The `instructor` package: typed answers in each of its modes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import anthropic
import instructor
import openai
import pydantic
from harness import CITY, KEY, MODEL, OPENAI_URL, URL, case, equal, main, user


class City(pydantic.BaseModel):
    city: str
    people: int


OSLO = {"city": "Oslo", "people": 7}
NAMED_CALL = '<tool_call>{"name": "City", "arguments": ' + CITY + "}</tool_call>"
WRONG = '{"city": "Oslo", "people": "seven"}'


def of_openai(mode: instructor.Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=OPENAI_URL, api_key=KEY, max_retries=0), mode=mode)


def of_anthropic(mode: instructor.Mode) -> Any:
    return instructor.from_anthropic(anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0), mode=mode)


def typed(client: Any, *turns: str, **fields: Any) -> object:
    """The answer's fields: the package makes classes of its own."""
    found = client.create(
        model=MODEL, response_model=City, messages=user(*turns), **{"max_retries": 0, "max_tokens": 500, **fields}
    )
    return found.model_dump()


def add(name: str, function: Callable[[], Any]) -> None:
    function.__name__ = name
    case(function)


for _mode, _says in (
    ("TOOLS", CITY),
    ("TOOLS_STRICT", CITY),
    ("JSON", CITY),
    ("JSON_SCHEMA", CITY),
    ("MD_JSON", f"```json\n{CITY}\n```"),
):
    add(
        f"openai_{_mode.lower()}",
        lambda mode=_mode, says=_says: equal(typed(of_openai(instructor.Mode[mode]), says), OSLO),
    )
for _mode, _says in (("ANTHROPIC_TOOLS", CITY), ("ANTHROPIC_JSON", CITY)):
    add(
        _mode.lower(),
        lambda mode=_mode, says=_says: equal(typed(of_anthropic(instructor.Mode[mode]), says), OSLO),
    )


@case
def openai_parallel_tools() -> None:
    client = of_openai(instructor.Mode.PARALLEL_TOOLS)
    found = client.create(model=MODEL, messages=user(NAMED_CALL + NAMED_CALL), response_model=Iterable[City])
    equal([each.model_dump() for each in found], [OSLO, OSLO])


@case
def openai_responses_tools() -> None:
    client = of_openai(instructor.Mode.RESPONSES_TOOLS)
    equal(typed(client, CITY), OSLO)


@case
def a_wrong_answer_is_asked_for_again() -> None:
    client = of_openai(instructor.Mode.MD_JSON)
    equal(typed(client, f"```json\n{WRONG}\n```", f"```json\n{CITY}\n```", max_retries=2), OSLO)


@case
def partial_objects() -> None:
    client = of_openai(instructor.Mode.JSON_SCHEMA)
    *_, last = client.create_partial(model=MODEL, response_model=City, messages=user(CITY))
    equal((last.city, last.people), ("Oslo", 7))


@case
def iterables() -> None:
    client = of_openai(instructor.Mode.JSON)
    tasks = '{"tasks": [' + CITY + ", " + CITY + "]}"
    found = client.create_iterable(model=MODEL, response_model=City, messages=user(tasks))
    equal([each.model_dump() for each in found], [OSLO, OSLO])


@case
async def openai_async() -> None:
    client = instructor.from_openai(openai.AsyncOpenAI(base_url=OPENAI_URL, api_key=KEY, max_retries=0))
    found = await client.create(model=MODEL, response_model=City, messages=user(CITY), max_retries=0)
    equal(found.model_dump(), OSLO)


if __name__ == "__main__":
    main()
