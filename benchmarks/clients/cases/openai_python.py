"""The `openai` package: completions, responses, models, and what is not there."""

from __future__ import annotations

import time
from typing import Any

import openai
from harness import (
    CITY,
    MODEL,
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
from openai_common import City, GetWeather, asynchronous, client

FLAT_WEATHER: Any = {"type": "function", "name": "get_weather", "parameters": WEATHER_SCHEMA, "strict": True}


# Completions


@case
def completion() -> None:
    answer = client.completions.create(model=MODEL, prompt=say("Hello"), max_tokens=20)
    equal(
        (answer.choices[0].text, answer.choices[0].finish_reason, answer.object), ("Hello", "stop", "text_completion")
    )


@case
def completion_stream() -> None:
    stream = client.completions.create(model=MODEL, prompt=say("Hello"), stream=True)
    equal("".join(chunk.choices[0].text for chunk in stream), "Hello")


@case
def completion_prompts() -> None:
    answer = client.completions.create(model=MODEL, prompt=[say("one"), say("two")], n=2)
    equal([choice.text for choice in answer.choices], ["one", "one", "two", "two"])


@case
def completion_echo_logprobs() -> None:
    prompt = say("Hello")
    answer = client.completions.create(model=MODEL, prompt=prompt, echo=True, logprobs=2)
    [choice] = answer.choices
    equal(choice.text, prompt + "Hello")
    logprobs = choice.logprobs
    equal(len(logprobs.tokens), len(logprobs.token_logprobs))
    equal(len(logprobs.tokens), len(logprobs.text_offset))
    equal(logprobs.token_logprobs[0], None)


@case
def completion_echo_alone() -> None:
    """Scores of a prompt, as evaluation tools ask for them."""
    prompt = say("Hello")
    answer = client.completions.create(model=MODEL, prompt=prompt, echo=True, logprobs=1, max_tokens=0)
    equal(answer.choices[0].text, prompt)


@case
def completion_best_of() -> None:
    answer = client.completions.create(model=MODEL, prompt=say("Hello"), best_of=3, n=2, temperature=1)
    equal([choice.text for choice in answer.choices], ["Hello", "Hello"])


@case
def completion_token_ids() -> None:
    answer = client.completions.create(model=MODEL, prompt=[[1, 2, 3], [4, 5]], max_tokens=9)
    equal([choice.text for choice in answer.choices], ["ok", "ok"])


@case
def completion_suffix_is_refused() -> None:
    """The scripted model has no tokens for it."""
    error = raises(openai.BadRequestError, lambda: client.completions.create(model=MODEL, prompt="a", suffix="b"))
    equal(error.param, "suffix")


# Responses


@case
def response() -> None:
    answer = client.responses.create(model=MODEL, input=say("Hello"), instructions="Be brief.", max_output_tokens=50)
    equal((answer.output_text, answer.status, answer.object), ("Hello", "completed", "response"))
    equal(answer.usage.total_tokens, answer.usage.input_tokens + answer.usage.output_tokens)


@case
async def response_async() -> None:
    async with asynchronous() as client:
        equal((await client.responses.create(model=MODEL, input=user("Hello"))).output_text, "Hello")


@case
def response_events() -> None:
    events = list(client.responses.create(model=MODEL, input=say("Hello"), stream=True))
    equal("".join(event.delta for event in events if event.type == "response.output_text.delta"), "Hello")
    equal((events[0].type, events[-1].type), ("response.created", "response.completed"))
    equal([event.sequence_number for event in events], list(range(len(events))))


@case
def response_stream_helper() -> None:
    with client.responses.stream(model=MODEL, input=say("Hello")) as stream:
        for _ in stream:
            pass
        equal(stream.get_final_response().output_text, "Hello")


@case
def response_stream_helper_parses() -> None:
    with client.responses.stream(model=MODEL, input=say(CITY), text_format=City) as stream:
        for _ in stream:
            pass
        equal(stream.get_final_response().output_parsed, City(city="Oslo", people=7))


@case
def response_parse() -> None:
    answer = client.responses.parse(model=MODEL, input=say(CITY), text_format=City)
    equal(answer.output_parsed, City(city="Oslo", people=7))


@case
def response_parse_tools() -> None:
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    answer = client.responses.parse(model=MODEL, input=say(WEATHER_CALL), tools=[tool])
    [call] = [item for item in answer.output if item.type == "function_call"]
    equal(call.parsed_arguments, GetWeather(city="Oslo"))


@case
def response_tools_with_answer() -> None:
    messages = user(WEATHER_CALL, "It rains.")
    first = client.responses.create(model=MODEL, input=messages, tools=[FLAT_WEATHER])
    [call] = [item for item in first.output if item.type == "function_call"]
    equal((call.name, call.arguments), ("get_weather", '{"city": "Oslo"}'))
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = client.responses.create(model=MODEL, input=[*messages, *first.output, result], tools=[FLAT_WEATHER])
    equal(second.output_text, "It rains.")
    third = client.responses.create(model=MODEL, previous_response_id=first.id, input=[result], tools=[FLAT_WEATHER])
    equal(third.output_text, "It rains.")


@case
def response_reasoning() -> None:
    answer = client.responses.create(
        model=MODEL, input=say("<think>hm</think>Hello"), reasoning={"effort": "low", "summary": "auto"}
    )
    equal([item.type for item in answer.output], ["reasoning", "message"])
    equal(answer.output_text, "Hello")
    true(answer.usage.output_tokens_details.reasoning_tokens, "reasoning_tokens")


@case
def response_logprobs() -> None:
    answer = client.responses.create(
        model=MODEL, input=say("Hi"), include=["message.output_text.logprobs"], top_logprobs=2
    )
    [first, *_] = answer.output[0].content[0].logprobs
    equal((first.token, len(first.top_logprobs)), ("H", 2))


@case
def response_incomplete() -> None:
    answer = client.responses.create(model=MODEL, input=say("Hello"), max_output_tokens=2)
    equal((answer.status, answer.incomplete_details.reason), ("incomplete", "max_output_tokens"))


@case
def response_retrieve() -> None:
    made = client.responses.create(model=MODEL, input=say("Hello"), metadata={"a": "b"})
    found = client.responses.retrieve(made.id)
    equal((found.id, found.output_text, found.metadata), (made.id, "Hello", {"a": "b"}))


@case
def response_delete() -> None:
    made = client.responses.create(model=MODEL, input=say("Hello"))
    equal(client.responses.delete(made.id), None)
    raises(openai.NotFoundError, lambda: client.responses.retrieve(made.id))


@case
def response_input_items() -> None:
    made = client.responses.create(model=MODEL, input=say("Hello"))
    [item] = client.responses.input_items.list(made.id).data
    equal((item.type, item.role), ("message", "user"))
    equal(item.content[0].text, say("Hello"))


@case
def response_input_tokens() -> None:
    count = client.responses.input_tokens.count(model=MODEL, input=say("Hello"))
    made = client.responses.create(model=MODEL, input=say("Hello"))
    equal(count.input_tokens, made.usage.input_tokens)


@case
def response_background() -> None:
    made = client.responses.create(model=MODEL, input=say("Hello"), background=True)
    true(made.status in ("queued", "in_progress", "completed"), made.status)
    for _ in range(1200):
        found = client.responses.retrieve(made.id)
        if found.status not in ("queued", "in_progress"):
            break
        time.sleep(0.05)
    equal((found.status, found.output_text), ("completed", "Hello"))


@case
def response_cancel() -> None:
    made = client.responses.create(model=MODEL, input=say("Hello" * 500), background=True)
    client.responses.cancel(made.id)
    true(client.responses.retrieve(made.id).status in ("cancelled", "completed"))


# Embeddings, models


@case
def models_list() -> None:
    equal([model.id for model in client.models.list()], [MODEL])


@case
def models_retrieve() -> None:
    equal(client.models.retrieve(MODEL).id, MODEL)
    raises(openai.NotFoundError, lambda: client.models.retrieve("other"))


@case
def embeddings_of_a_generating_model() -> None:
    raises(openai.NotFoundError, lambda: client.embeddings.create(model=MODEL, input="a"))


# What is not there, and errors


@case
def routes_that_do_not_exist() -> None:
    for call in (
        lambda: client.files.list(),
        lambda: client.batches.list(),
        lambda: client.moderations.create(input="a"),
        lambda: client.images.generate(prompt="a"),
        lambda: client.audio.speech.create(input="a", model=MODEL, voice="alloy"),
        lambda: client.vector_stores.list(),
        lambda: client.fine_tuning.jobs.list(),
        lambda: client.conversations.create(),
    ):
        error = raises(openai.NotFoundError, call)
        true("unknown request URL" in error.message, error.message)


@case
def errors() -> None:
    wrong = client.with_options(api_key="wrong")
    equal(raises(openai.AuthenticationError, lambda: wrong.models.list()).status_code, 401)
    error = raises(openai.NotFoundError, lambda: client.completions.create(model="other", prompt="a"))
    equal((error.code, error.param), ("model_not_found", "model"))
    error = raises(openai.BadRequestError, lambda: client.completions.create(model=MODEL, prompt="a", temperature=-1))
    equal((error.param, error.type), ("temperature", "BadRequestError"))
    error = raises(openai.BadRequestError, lambda: client.completions.create(model=MODEL, prompt="a", max_tokens=10**6))
    equal(error.code, "context_length_exceeded")


@case
def timeout() -> None:
    """A client that gives up after a hundredth of a second is told so, and the server serves the next."""
    hasty = client.with_options(timeout=0.01)
    raises(
        openai.APITimeoutError,
        lambda: hasty.completions.create(model=MODEL, prompt=say("Hello " * 500), max_tokens=3000),
    )
    equal(client.completions.create(model=MODEL, prompt=say("Hello")).choices[0].text, "Hello")


@case
def leaving_a_stream() -> None:
    with client.completions.create(model=MODEL, prompt=say("Hello " * 50), stream=True, max_tokens=300) as stream:
        next(iter(stream))
    equal(client.completions.create(model=MODEL, prompt=say("Hello")).choices[0].text, "Hello")


if __name__ == "__main__":
    main()
