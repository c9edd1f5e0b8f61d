"""Open WebUI's calls, as version 0.12.4 makes them, with the HTTP library that it makes them with: the connection's
check, the list of models, a streamed chat with its fields, native tools, and the small tasks beside a chat."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
from harness import CITY, KEY, MODEL, OPENAI_URL, WEATHER_CALL, WEATHER_SCHEMA, case, equal, main, say, true, user

HEADERS = {
    "Content-Type": "application/json",
    "Authorization": f"Bearer {KEY}",
    "X-OpenWebUI-User-Name": "Ann",
    "X-OpenWebUI-User-Id": "1",
    "X-OpenWebUI-User-Email": "ann@example.com",
    "X-OpenWebUI-User-Role": "admin",
    "X-OpenWebUI-Chat-Id": "2",
}
SAMPLING = {
    "temperature": 0.7,
    "top_p": 0.9,
    "min_p": 0.0,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "seed": 3,
    "stop": ["###"],
    "max_tokens": 200,
    "logit_bias": {"5": -1},
    "top_k": 40,
}
TITLE = """### Task:
Generate a concise, 3-5 word title with an emoji summarizing the chat history.
### Output:
JSON format: { "title": "your concise title here" }
### Chat History:
<chat_history>
USER: %s
</chat_history>"""
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "", "parameters": WEATHER_SCHEMA}}


async def get(path: str, headers: dict[str, str] = HEADERS) -> tuple[int, Any]:
    async with aiohttp.ClientSession(trust_env=True) as session, session.get(OPENAI_URL + path, headers=headers) as r:
        return r.status, await r.json()


async def chat(messages: list[Any], **fields: Any) -> Any:
    body = json.dumps({"model": MODEL, "messages": messages, "stream": False, **fields})
    async with (
        aiohttp.ClientSession() as session,
        session.post(OPENAI_URL + "/chat/completions", data=body, headers=HEADERS) as response,
    ):
        if "text/event-stream" not in response.headers["Content-Type"]:
            answer = await response.json()
            equal((response.status, answer.get("error")), (200, None))
            return answer
        equal(response.status, 200)
        lines = [line.decode().strip() async for line in response.content]
    events = [line.removeprefix("data: ") for line in lines if line]
    equal(events.pop(), "[DONE]")
    return [json.loads(event) for event in events]


@case
async def connection_check() -> None:
    status, answer = await get("/models")
    equal((status, [model["id"] for model in answer["data"]]), (200, [MODEL]))
    status, answer = await get("/models", {"Authorization": "Bearer wrong"})
    equal(status, 401)
    true(answer["error"]["message"])


@case
async def streamed_chat() -> None:
    system = {"role": "system", "content": "User Context: Ann"}
    chunks = await chat([system, *user("Hello")], stream=True, stream_options={"include_usage": True}, **SAMPLING)
    texts = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    equal("".join(texts), "Hello")
    equal(chunks[-1]["usage"]["completion_tokens"], 6)


@case
async def streamed_thoughts() -> None:
    chunks = await chat(user("<think>hm</think>Hello"), stream=True)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    equal("".join(delta.get("reasoning_content") or "" for delta in deltas), "hm")
    equal("".join(delta.get("content") or "" for delta in deltas), "Hello")


@case
async def native_tools() -> None:
    messages = user(WEATHER_CALL, "It rains.")
    chunks = await chat(messages, stream=True, tools=[WEATHER])
    pieces = [p for chunk in chunks for c in chunk["choices"] for p in c["delta"].get("tool_calls") or []]
    arguments = "".join(piece["function"].get("arguments") or "" for piece in pieces)
    first = pieces[0]
    equal((first["index"], first["function"]["name"], arguments), (0, "get_weather", '{"city": "Oslo"}'))
    call = {
        "id": first["id"], "index": 0, "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }  # fmt: skip
    messages += [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": first["id"], "content": "rain"},
    ]
    chunks = await chat(messages, stream=True, tools=[WEATHER])
    equal("".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"]), "It rains.")


@case
async def title_and_tags() -> None:
    """Tasks are one message of the user, not streamed."""
    for expected in ('{"title": "Rain in Oslo"}', '{"tags": ["weather"]}', '{"queries": []}', CITY):
        answer = await chat([{"role": "user", "content": TITLE % say(expected)}], max_tokens=1000)
        equal(answer["choices"][0]["message"]["content"], expected)


@case
async def regenerated_chat_with_parts() -> None:
    """A history with parts, and what the answer brought."""
    parts = [{"type": "text", "text": say("one", "two")}]
    history = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "one", "reasoning_content": "hm"},
        {"role": "user", "content": "go on"},
    ]
    equal((await chat(history))["choices"][0]["message"]["content"], "two")


if __name__ == "__main__":
    main()
