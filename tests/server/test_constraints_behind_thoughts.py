"""Where constraints on an answer begin: at once, or behind thoughts, whichever way the model begins. Limits of
thoughts, with constraints and without."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from quire.parsers.registry import reasoning_format
from quire.server.settings import ServerSettings
from tests.server.conftest import Served, serving
from tests.server.model_directory import write_model
from tests.server.test_tools import TEMPLATE, TIME, WEATHER, ask, error, rename_tokens, streamed


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tools", TEMPLATE, 512)


@pytest.fixture
async def served(tool_model: Path) -> AsyncIterator[Served]:
    async with serving(tool_model, ServerSettings(served_model_name=["tiny"], reasoning_parser="auto")) as served:
        yield served


async def test_constraints_begin_behind_the_reasoning(served: Served) -> None:
    """Where the prompt opens the reasoning; where it closes it, at once."""
    says = 'first {"a" </think>[{"name": "get_time", "parameters": {}}]'
    answer = await ask(served, says, tool_choice="required", chat_template_kwargs={"thinking": True})
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == 'first {"a" '
    assert message["tool_calls"][0]["function"] == {"name": "get_time", "arguments": "{}"}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    answer = await ask(
        served, "so</think>7", response_format=schema, chat_template_kwargs={"thinking": True}, tools=None
    )
    assert answer["choices"][0]["message"]["content"] == "7"
    says = '[{"name": "get_time", "parameters": {}}]'
    answer = await ask(served, says, tool_choice="required", chat_template_kwargs={"thinking": False})
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_time"


CITY = '{"city": "Rom"}'
NAMED = {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
CITY_SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rom"]}}, "required": ["city"]}
HELD: list[tuple[str, dict[str, Any]]] = [
    (CITY, NAMED),
    ('[{"name": "get_weather", "parameters": {"city": "Rom"}}]', {"tool_choice": "required"}),
    (CITY, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY_SCHEMA}}}),
    (CITY, {"response_format": {"type": "json_object"}}),
    ("no, no", {"structured_outputs": {"regex": "^(no, )*no$"}}),
    ("yes", {"structured_outputs": {"choice": ["no", "yes"]}}),
    ("xy", {"structured_outputs": {"grammar": 'root ::= "x" rest\nrest ::= "y"'}}),
    ("<a>1</a>", {"structured_outputs": {"structural_tag": {"format": {
        "type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "[0-9]"}, "end": "</a>"
    }}}}),
]  # fmt: skip


def write_thinker(name: str, parser: str, directory: Path) -> Path:
    """A model directory; `name` begins with its reasoning parser."""
    start, end = reasoning_format(parser).starts[0], reasoning_format(parser).ends[0]
    template = TEMPLATE.replace("</think>", end).replace("'<think>", f"'{start.removesuffix(chr(10))}")
    path = write_model(directory, template, 512)
    if name != parser:
        rename_tokens(path, 2, [start.removesuffix("thought\n"), end], are_special=name.endswith("special"))
    return path


ALL_THINKERS = ["qwen3", "deepseek_r1", "qwen3 special", "qwen3 one token", "granite", "gemma4 special"]
OFTEN = [("qwen3", HELD), ("deepseek_r1", HELD[:2]), ("gemma4 special", HELD[:2])]
"""All constraints behind the thoughts of one model, and calls behind those of others."""
REST = [
    pytest.param(
        name,
        ([] if (name, HELD[:2]) in OFTEN else HELD[:2]) + [HELD[2 + place % 6], HELD[2 + (place + 3) % 6]],
        marks=pytest.mark.long,
    )
    for place, name in enumerate(ALL_THINKERS[1:])
]
"""Calls behind the thoughts of each other model, and two more constraints, so that each meets another model."""


@pytest.mark.parametrize(
    ("thinker", "constraints"),
    OFTEN + REST,
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} constraints",
)
async def test_thoughts_then_the_constraint_or_the_constraint_at_once(
    thinker: str, constraints: list[tuple[str, dict[str, Any]]], tmp_path: Path
) -> None:
    """Whichever way the model begins, streamed or not: other text becomes neither a call nor content."""
    name = thinker.partition(" ")[0]
    start, end = reasoning_format(name).starts[0], reasoning_format(name).ends[0]

    async def said(served: Served, says: str, thinking: bool | None = None) -> tuple[str, str, str]:
        """(thoughts, constrained text, finish reason) of both of two choices."""
        kwargs = {} if thinking is None else {"thinking": thinking}
        fields = {**more, "tools": tools, "max_tokens": 110, "chat_template_kwargs": kwargs}
        _, found = await streamed(served, says, **fields, n=2)
        whole = (await ask(served, says, **fields))["choices"]
        for index, choice in enumerate(whole):
            message, [*calls] = choice["message"], found[index]["calls"]
            assert found[index]["reasoning"] == (message["reasoning"] or "")
            assert found[index]["content"] == (message["content"] or "")
            assert [call["function"]["arguments"] for call in message.get("tool_calls", ())] == [
                each[1] for each in calls
            ]
        [text] = [each[1] for each in found[0]["calls"]] or [found[0]["content"]]
        assert found[0] == found[1]
        return found[0]["reasoning"], text, found[0]["finish_reason"]

    path = write_thinker(thinker, name, tmp_path / "thinker")
    async with serving(path, ServerSettings(reasoning_parser=name)) as served:
        for right, more in constraints:
            tools = [WEATHER, TIME] if "tool_choice" in more else None
            held = CITY if tools else right
            assert (await said(served, right))[:2] == ("", held), more
            assert (await said(served, f"{start}hm{end}{right}"))[:2] == ("hm", held), more
            assert (await said(served, right, thinking=False))[1] == held, more
            assert (await said(served, f"hm{end}{right}", thinking=True))[:2] == ("hm", held), more
            assert (await said(served, f"{start}hm{end}nothing"))[0] == "hm", more
            for says in ("I would rather say something else.", f"{start}I end here."):
                thoughts, text, reason = await said(served, says)
                assert not says.startswith(start) or thoughts.startswith("I end here."), more
                assert text or reason == "length", "the model can end neither its thoughts nor its text early"
                assert not text or text[0] in "{<nxy", "the first token is the constraint's"


async def test_constraints_begin_with_the_reasoning_where_the_engine_says_so(tool_model: Path) -> None:
    settings, config = ServerSettings(reasoning_parser="auto"), {"enable_in_reasoning": True}
    async with serving(tool_model, settings, structured_outputs_config=config) as served:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["ab"]}}}
        thinking = {"chat_template_kwargs": {"thinking": True}, "tools": None}
        message = (await ask(served, "so</think>7", response_format=form, **thinking))["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ('"ab"', None), "the template has opened the reasoning"


async def test_a_budget_for_thoughts_that_a_constraint_does_not_begin_with(model_path: Path) -> None:
    """Without a constraint a model of this format begins in thoughts."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string"}}}
    async with serving(model_path, ServerSettings(reasoning_parser="deepseek_r1")) as served:
        fields = {"thinking_token_budget": 2, "tools": None}
        [choice] = (await ask(served, '"abcdef"', response_format=schema, **fields))["choices"]
        assert (choice["message"]["reasoning"], choice["message"]["content"]) == (None, '"abcdef"')
        [choice] = (await ask(served, "abcdef", **fields))["choices"]
        assert choice["message"]["reasoning"] == "ab"


async def test_a_budget_for_thoughts(served: Served) -> None:
    """Behind that many tokens the end of the thoughts is forced; what the model would have said there is replaced."""
    thinking = {"thinking": True}

    async def parts(says: str, **more: Any) -> tuple[Any, Any, int]:
        answer = await ask(served, says, **more)
        message, details = answer["choices"][0]["message"], answer["usage"]["completion_tokens_details"]
        return message["reasoning"], message["content"], details["reasoning_tokens"]

    says = "<think>abcdefghij</think>x"
    assert await parts(says, thinking_token_budget=3) == ("abc", "/think>x", 3)
    assert await parts(says, thinking_token_budget=100) == ("abcdefghij", "x", 10)
    assert await parts(says, thinking_token_budget=-1) == ("abcdefghij", "x", 10)
    assert await parts("abcdefgh tail", thinking_token_budget=0, chat_template_kwargs=thinking) == (None, " tail", 0)
    assert await parts("no thoughts", thinking_token_budget=0) == (None, "no thoughts", 0)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    both = {"response_format": schema, "chat_template_kwargs": thinking, "tools": None}
    assert await parts("ab--------7", thinking_token_budget=2, **both) == ("ab", "7", 2)
    for budget in range(1, 5):  # a character has 4 tokens, and the mark does not stand inside it
        assert await parts("😀--------7", thinking_token_budget=budget, **both) == ("😀", "7", 4)
    answer = await ask(served, says, thinking_token_budget=3, n=3, max_tokens=40)
    assert [choice["message"]["reasoning"] for choice in answer["choices"]] == 3 * ["abc"]
    begun = [{"role": "user", "content": "=abc--------gh"}, {"role": "assistant", "content": "<think>" + 80 * "x"}]
    continued = {"messages": begun, "add_generation_prompt": False, "continue_final_message": True}
    assert await parts("", thinking_token_budget=3, **continued) == ("abc", "gh", 3)
    begun[-1]["content"] += "</think>y"
    assert await parts("", thinking_token_budget=3, **continued) == (None, "abc--------gh", 0)
    end = list(range(60))
    assert "among allowed_token_ids" in await error(served, thinking_token_budget=3, allowed_token_ids=end)


async def test_a_budget_within_a_constraint_that_covers_the_thoughts(tool_model: Path) -> None:
    """The mark comes where the constraint has it, also if the model has begun it."""
    settings, config = ServerSettings(reasoning_parser="auto"), {"enable_in_reasoning": True}
    more: dict[str, Any] = {"structured_outputs": {"regex": "<think>(ab)+</think>[a-z]{3}"}, "tools": None}
    async with serving(tool_model, settings, structured_outputs_config=config) as served:
        for budget, thought in ((1, "ab"), (2, "ab"), (3, "abab"), (4, "abab"), (5, "abab"), (8, "abab"), (30, "abab")):
            answer = await ask(served, "<think>abab</think>xyz", thinking_token_budget=budget, max_tokens=40, **more)
            message = answer["choices"][0]["message"]
            assert message["reasoning"] == thought
            assert len(message["content"]) == 3
