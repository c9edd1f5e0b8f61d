"""Reasoning before an answer, by every format, however the text is cut; and which formats a template speaks of."""

from __future__ import annotations

import json
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.parsers.parser import OutputParser, call_list, named_call
from quire.parsers.reasoning import Thought
from quire.parsers.registry import (
    HARMONY_REASONING,
    REASONING_FORMATS,
    TOOL_FORMATS,
    detect_reasoning_parser,
    detect_tool_parser,
    reasoning_format,
    tool_format,
)
from tests.parsers.driver import Joined, counting_ids, cut, make_parser, parse
from tests.parsers.writers import WRITERS, Writer

TEXTS = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="<[H"), max_size=30)
THINKERS = sorted(name for name, form in REASONING_FORMATS.items() if form is not HARMONY_REASONING and not form.stays)


@settings(max_examples=12, deadline=None)
@given(TEXTS, TEXTS, st.booleans(), st.lists(st.integers(0, 120), max_size=12))
def test_reasoning_and_answer(thought: str, answer: str, opened: bool, places: list[int]) -> None:
    for name in THINKERS:
        form = REASONING_FORMATS[name]
        text = ("" if opened else form.starts[0]) + thought + form.ends[0] + answer
        state = Thought.OPEN if opened else Thought.FREE
        whole = parse(make_parser(None, name, state), [text])
        assert (whole.reasoning, whole.content) == (thought, answer), name
        assert parse(make_parser(None, name, state), cut(text, places)) == whole, name
        assert parse(make_parser(None, name, state), text) == whole, name


def test_thoughts_that_stay_in_the_content() -> None:
    """MiniMax-M2's second parser: behind the mark that the prompt has."""
    text = "I call.</think>\n\n" + dict(WRITERS)["minimax_m2"]([("f", {})])
    found = read("minimax_m2", "minimax_m2_append_think", text, Thought.OPEN)
    assert (found.reasoning, found.content, found.pairs) == ("", "<think>I call.</think>\n\n", [("f", "{}")])
    assert parse(make_parser(None, "minimax_m2_append_think", Thought.FREE), "[1]").content == "[1]", "a constraint's"


@pytest.mark.parametrize(
    ("tools", "reasoning", "text"),
    [
        (
            "cohere_command3",
            "cohere_command3",
            "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        ),
        (None, "cohere_command3", "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>"),
        ("hermes", "cohere_command4", "<|START_THINKING|>hm<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>"),
        (None, "hunyuan_a13b", "<think>\nhm\n</think>\n<answer>\nYes.\n</answer>"),
        ("ernie45", "ernie45", "hm</think>\n\n<response>Yes.</response>\n"),
        ("gigachat3", "qwen3", "<think>hm</think>Yes.<|message_sep|>\n\n"),
        ("gemma4", "gemma4", "<|channel>thought\nhm<channel|>Yes."),
        ("gemma4", "gemma4", "<|channel>hm<channel|>Yes."),
    ],
)
def test_marks_around_answers(tools: str | None, reasoning: str, text: str) -> None:
    thought = Thought.OPEN if text.startswith("hm") else Thought.FREE
    if tools is None:
        whole = parse(make_parser(None, reasoning, thought), [text])
        assert parse(make_parser(None, reasoning, thought), text) == whole
    else:
        whole = read(tools, reasoning, text, thought)
    assert (whole.reasoning, whole.content.strip()) == ("hm", "Yes.")


def test_no_reasoning() -> None:
    assert parse(make_parser(None, "qwen3"), "plain").content == "plain"
    assert parse(make_parser(None, "qwen3", Thought.CLOSED), "plain <think> x").content == "plain <think> x"
    assert parse(make_parser(None, "qwen3", Thought.OPEN), "never ends").reasoning == "never ends"
    assert parse(make_parser(None, "qwen3", Thought.OPEN), "<think>a</think>b").reasoning == "a"


MENTION = "<tool_call> or <｜DSML｜tool_calls> or [TOOL] or <|tool_calls_section_begin|> begins one, <tool_call>\n"
CALLERS = [(name, writer) for name, writer in WRITERS if TOOL_FORMATS[name].channels is None]
CALLING = [
    pytest.param(name, writer, id=f"{name}-{number}", marks=pytest.mark.long if number % 3 else ())
    for number, (name, writer) in enumerate(CALLERS)
]
CUT = [
    *(pytest.param(name, writer, 3, id=f"{name}-{number}") for number, (name, writer) in enumerate(CALLERS[::3])),
    *(
        pytest.param(name, writer, 1, id=f"{name}-{number}-all", marks=pytest.mark.long)
        for number, (name, writer) in enumerate(CALLERS)
    ),
]
"""The last value is the step from border to border. Of each format every place is one; in `make test` of some formats
every third, and six texts of each begin alike, so that every place is one in one of them."""
SCHEMAS: dict[str, Any] = {"f": {"properties": {"a": {"type": "string"}}}, "g": {}}


def read(name: str, reasoning: str, text: str, thought: Thought = Thought.FREE, *, step: int = 1) -> Joined:
    """The text whole, which must be the same with a border at each place, and character by character.

    step: of the places; the first one differs from text to text.
    """
    whole = parse(make_parser(name, reasoning, thought, SCHEMAS), [text])
    for place in range(1 + crc32(text.encode()) % step, len(text), step):
        assert parse(make_parser(name, reasoning, thought, SCHEMAS), cut(text, [place])) == whole, text[:place]
    assert parse(make_parser(name, reasoning, thought, SCHEMAS), text) == whole
    return whole


@pytest.mark.parametrize(("name", "writer", "step"), CUT)
def test_calls_inside_thoughts(name: str, writer: Writer, step: int) -> None:
    """They are found, and what else stands before the end mark is reasoning, if that comes."""
    start, end = "<think>", "</think>"
    call, other = writer([("f", {"a": f"x{end}y"})]), writer([("g", {})])
    made, second = ("f", json.dumps({"a": f"x{end}y"})), ("g", "{}")
    for text, thoughts, content, calls in (
        (f"{start}plan {call}", "plan ", "", [made]),
        (f"{start}\nplan\n{call}\n{end}", "plan", "", [made]),
        (f"{start}plan {call}{end}\n\nDone.", "plan ", "\n\nDone.", [made]),
        (f"{start}plan {call} so {call}\n{call} it is{end}Done.", "plan  so  it is", "Done.", 3 * [made]),
        (f"{start}plan {call}\n{end}{other}", "plan ", "", [made, second]),
        (f"{start}plan{end}{call}", "plan", "", [made]),
    ):
        found = read(name, "qwen3", text, step=step)
        assert (found.reasoning.split(), found.content, found.pairs) == (thoughts.split(), content, calls), text


@pytest.mark.parametrize("reasoning", THINKERS)
def test_calls_inside_thoughts_of_each_format(reasoning: str) -> None:
    [start, *_], [end, *_] = REASONING_FORMATS[reasoning].starts, REASONING_FORMATS[reasoning].ends
    for name, writer in (("hermes", WRITERS[0][1]), ("pythonic", dict(WRITERS)["pythonic"])):
        text = f"plan {writer([('f', {'a': 'x'})])}{end}{writer([('g', {})])}"
        found = read(name, reasoning, text, Thought.OPEN)
        assert (found.reasoning, found.content) == ("plan ", "")
        assert found.pairs == [("f", '{"a": "x"}'), ("g", "{}")]
        assert read(name, reasoning, start + text) == found


@pytest.mark.parametrize(("name", "writer", "step"), CUT)
def test_mentions_of_marks_inside_thoughts(name: str, writer: Writer, step: int) -> None:
    call, form = writer([("f", {"a": "x"})]), TOOL_FORMATS[name]
    mention = MENTION + " ".join(f"{mark}, " for mark in form.markers) + '{"name": "h"} [h(1)] '
    for text in (f"<think>{mention}I call.{call}", f"<think>{mention}I call.</think>{call}"):
        found = read(name, "qwen3", text, step=step)
        assert (found.reasoning, found.content, found.pairs) == (f"{mention}I call.", "", [("f", '{"a": "x"}')])


@pytest.mark.parametrize(("name", "writer"), CALLING)
def test_the_end_mark_ends_a_call_that_lacks_its_own(name: str, writer: Writer) -> None:
    """Wherever the call is cut off, but in a string or an expression, which may hold the mark."""
    call = writer([("f", {})])
    for end in range(len(call)):
        if call[:end].count('"') % 2 or call[:end].count("(") > call[:end].count(")"):
            continue
        text = f"<think>plan {call[:end]}</think>Done."
        found = parse(make_parser(name, "qwen3", schemas=SCHEMAS), [text])
        assert parse(make_parser(name, "qwen3", schemas=SCHEMAS), text) == found
        assert (found.content, [name for name, _ in found.pairs]) in (("Done.", []), ("Done.", ["f"])), call[:end]


@pytest.mark.parametrize(
    ("name", "prompt", "continues", "thought"),
    [
        ("qwen3", "<|im_start|>assistant\n", False, Thought.FREE),
        ("qwen3", "<|im_start|>assistant\n<think>\n", False, Thought.OPEN),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False, Thought.CLOSED),
        ("qwen3", "<think>a</think>b<|im_end|><|im_start|>assistant\n", False, Thought.FREE),
        ("qwen3", "what does <think> mean?<|im_end|><|im_start|>assistant\n", False, Thought.FREE),
        ("qwen3", "<|im_start|>assistant\n<think>I was about", True, Thought.OPEN),
        ("qwen3", "<|im_start|>assistant\n<think>a</think>It is", True, Thought.CLOSED),
        ("deepseek_r1", "<｜Assistant｜>", False, Thought.OPEN),
        ("deepseek_v3", "<｜Assistant｜></think>", False, Thought.CLOSED),
        ("mistral", "[/INST]", False, Thought.FREE),
    ],
)
def test_where_the_prompt_leaves_the_model(name: str, prompt: str, continues: bool, thought: Thought) -> None:
    assert reasoning_format(name).thought_after(prompt, continues=continues) is thought


def test_forced_calls() -> None:
    text = ' [{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
    found = parse(OutputParser(call_list, new_id=counting_ids()), text)
    assert (found.content, found.pairs) == ("", [("f", '{"a": 1}'), ("g", "{}")])
    think = REASONING_FORMATS["qwen3"]
    found = parse(OutputParser(named_call("f"), think, new_id=counting_ids()), '<think>x</think>\n{"a": [1]}\n')
    assert (found.reasoning, found.content, found.pairs) == ("x", "", [("f", '{"a": [1]}')])
    assert parse(OutputParser(named_call("f")), "").calls == []


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ message.content }}", None, None),
        ('<tool_call>\n{"name": <function-name>', "hermes", None),
        ("<tool_call>\n{...} {% if enable_thinking is false %}<think>\n\n</think>", "hermes", "qwen3"),
        ("<tool_call>\n<function=example>\n<parameter=x>", "qwen3_coder", None),
        ("<tool_call>{name}\n<arg_key>{key}</arg_key> <think></think>", "glm45", "glm45"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ n }}<｜tool▁sep｜> </think>", "deepseek_v31", "qwen3"),
        ('<｜DSML｜function_calls><｜DSML｜invoke name="', "deepseek_v32", None),
        ("{% set dsml_token = '｜DSML｜' %}<' + dsml_token + 'tool_calls>\\n", "deepseek_v4", None),
        ("]<]minimax[>[' ~ '<tool_call>'", None, None),
        ("List of tools: <|tool_list_start|>[", "lfm2", None),
        ("<|tool_calls_section_begin|> <think></think>", "kimi_k2", "kimi_k2"),
        ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral", None),
        ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
        ('Respond in the format {"name": function name, "parameters": ... <|python_tag|>', "llama3_json", None),
        ("<|python_start|>[func_name1(params)]<|python_end|>", "llama4_pythonic", None),
        ("[func_name1(params_name1=params_value1)]", "pythonic", None),
        ("<|start|>assistant<|channel|>final<|message|> <|call|>", "openai", "openai_gptoss"),
        ("<|start_of_role|> <|tool_call|> Here is my thought process: ", "granite", "granite"),
        ("<minimax:tool_call> <think>", "minimax_m2", "minimax_m2"),
        ("<|tool_call>call: <|channel>thought", "gemma4", "gemma4"),
        ("<start_function_call>call:", "functiongemma", None),
        ("<|START_THINKING|> <|START_ACTION|> <|START_RESPONSE|>", "cohere_command3", "cohere_command3"),
        ("<|START_THINKING|> <|START_ACTION|> <|START_TEXT|>", "cohere_command4", "cohere_command4"),
        ("<|function_call|>", "gigachat3", None),
        ('<function name="', "minicpm5", None),
    ],
)
def test_parsers_by_the_template(template: str, tools: str | None, reasoning: str | None) -> None:
    assert detect_tool_parser([template]) == tools
    assert detect_reasoning_parser([template]) == reasoning


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match=r"unknown parser 'hermez'.*hermes.*known: .*qwen3_coder"):
        tool_format("hermez")
    with pytest.raises(ConfigError, match=r"unknown parser 'qwen'.*qwen3"):
        reasoning_format("qwen")
    assert tool_format("llama4_json") is TOOL_FORMATS["llama3_json"]
