"""Every format of tool calls: what its models write is read back, however the text is cut."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.parsers.registry import TOOL_FORMATS
from tests.parsers.driver import cut, make_parser, parse
from tests.parsers.writers import NO_LEADING_TEXT, ONE_CALL, WRITERS, Call, Writer, dsml, glm, harmony, qwen_coder

NAMES = st.from_regex(r"[a-z][a-z_]{0,12}", fullmatch=True)
TEXTS = st.text(st.characters(blacklist_categories=["Cs", "Cc"], blacklist_characters="<>[]`"), max_size=20).map(
    str.strip
)
VALUES = st.recursive(
    st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e6, 1e6).map(lambda x: round(x, 3)) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=4)), min_size=1, max_size=3)
PLACES = st.lists(st.integers(0, 400), max_size=30)
CASES = [pytest.param(name, writer, id=f"{name}-{number}") for number, (name, writer) in enumerate(WRITERS)]


def schema_of(value: Any) -> dict[str, Any]:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return {"type": kinds[type(value)]}


def schemas_of(calls: list[Call]) -> dict[str, Any]:
    """What each tool's parameters are; of two calls of the same name the first decides."""
    return {
        name: {"type": "object", "properties": {key: schema_of(value) for key, value in arguments.items()}}
        for name, arguments in reversed(calls)
    }


def distinct(calls: list[Call]) -> list[Call]:
    return [(f"{name}_{index}", arguments) for index, (name, arguments) in enumerate(calls)]


@settings(max_examples=8, deadline=None)
@given(CALLS, TEXTS, PLACES)
def test_what_is_written_is_read(calls: list[Call], text: str, places: list[int]) -> None:
    """By each of the formats, whole, cut anywhere, and character by character."""
    calls = distinct(calls)
    schemas = schemas_of(calls)
    for name, writer in WRITERS:
        asked = calls[:1] if name in ONE_CALL else calls
        before = "" if name in NO_LEADING_TEXT else text
        written = before + writer(asked)
        whole = parse(make_parser(name, schemas=schemas), [written])
        assert [(called, json.loads(arguments)) for called, arguments in whole.pairs] == asked, name
        assert whole.content == before, name
        assert parse(make_parser(name, schemas=schemas), cut(written, places)) == whole, name
        assert parse(make_parser(name, schemas=schemas), written) == whole, name


@pytest.mark.parametrize(("name", "writer"), CASES)
def test_arguments_come_before_their_end(name: str, writer: Writer) -> None:
    """A client sees the name, and long arguments, before the model has written all of them."""
    calls: list[Call] = [("write_file", {"path": "a.txt", "content": "word " * 40})]
    parser = make_parser(name, schemas=schemas_of(calls))
    written = writer(calls)
    early = parse_prefix(parser, written[: len(written) - 60])
    assert early[0] == "write_file"
    assert '"a.txt"' in early[1]
    if "pythonic" not in name and name not in ("lfm2", "olmo3"):  # they come argument by argument
        assert "word word" in early[1]


def parse_prefix(parser: Any, text: str) -> tuple[str, str]:
    name, arguments = "", ""
    for character in text:
        for piece in parser.feed(character).tool_calls:
            name = piece.name or name
            arguments += piece.arguments
    return name, arguments


@pytest.mark.parametrize(("name", "writer"), CASES)
def test_a_call_that_is_cut_off(name: str, writer: Writer) -> None:
    """Wherever the output ends: no error, the same in pieces, and the arguments so far begin the whole ones."""
    calls: list[Call] = [("look_up", {"key": "some text", "count": 3})]
    schemas = schemas_of(calls)
    written = writer(calls)
    [(_, complete)] = parse(make_parser(name, schemas=schemas), [written]).pairs
    for end in range(0, len(written), 3):
        found = parse(make_parser(name, schemas=schemas), [written[:end]])
        assert parse(make_parser(name, schemas=schemas), written[:end]) == found
        for _, arguments in found.pairs:
            assert complete.startswith(arguments)


FRAGMENTS = [
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    "name",
    '"name": "f"',
    '"arguments": ',
    ":",
    ",",
    "(",
    ")",
    "=",
    "f(a=",
    ">",
]
FRAGMENTS += ["<", "\n", " ", "```json", "functions.f:0", "to=functions.f ", "1e999", "'", "é", "<think>", "</think>"]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), max_size=25), PLACES)
def test_any_text_is_taken(parts: list[tuple[int, int]], places: list[int]) -> None:
    """Pieces of each format in any order, and anything between them: no error, and no difference by the cuts."""
    for name, form in TOOL_FORMATS.items():
        fragments = [*form.markers, *FRAGMENTS, *form.markers]
        text = "".join(fragments[number % len(fragments)][:length] for number, length in parts)
        whole = parse(make_parser(name, "qwen3"), [text])
        assert parse(make_parser(name, "qwen3"), cut(text, places)) == whole, (name, text)
        assert parse(make_parser(name, "qwen3"), text) == whole, (name, text)


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_work_is_in_proportion_to_the_text(name: str) -> None:
    """What waits to be read stays short, so that no character is looked at again and again."""
    for unit in ("<", "word ", '{"a": ', "((", '"', "--"):
        parser = make_parser(name)
        for marker in ["", *TOOL_FORMATS[name].markers]:
            for character in marker + unit * 40:
                parser.feed(character)
                assert len(parser._reader._text) <= 64


def test_a_call_without_its_end_or_name_is_content() -> None:
    assert parse(make_parser("hermes"), ['<tool_call>{"nam": "f"}</tool_call>']).pairs == []
    found = parse(make_parser("hermes"), ["<tool_call>no call</tool_call> text"])
    assert (found.content, found.calls) == ("<tool_call>no call</tool_call> text", [])
    found = parse(make_parser("hermes"), ['<tool_call>{"name": "f", "arguments": {"a": 1}} text'])
    assert (found.content, found.pairs) == ("text", [("f", '{"a": 1}')])


def test_white_space_around_calls_is_dropped_and_text_kept() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    found = parse(make_parser("hermes"), [f"\n\n{call}\n{call}\n"])
    assert (found.content, found.pairs) == ("", [("f", "{}"), ("f", "{}")])
    assert parse(make_parser("hermes"), [f"I look.\n{call}\n Then."]).content == "I look.\n\n Then."
    assert parse(make_parser("hermes"), [" \n"]).content == " \n"


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"name": "f"}', "{}"),
        ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "arguments": {"a": "x\ny"}}', '{"a": "x\\ny"}'),
        ('{"name": "f", "parameters": {"a": "}\\"{"}, "more": [1]}', '{"a": "}\\"{"}'),
        ('{"name": "f", "arguments": {"a": [}</tool_call>', '{"a": [}'),
    ],
)
def test_objects_of_a_call(written: str, arguments: str) -> None:
    found = parse(make_parser("hermes"), [f"<tool_call>{written}</tool_call>"])
    assert found.pairs == [("f", arguments)]
    assert parse(make_parser("hermes"), f"<tool_call>{written}</tool_call>") == found


def test_ids_that_the_model_writes() -> None:
    call = 'functions.f:7<|tool_call_argument_begin|>{"a":1}<|tool_call_end|>'
    text = f"<|tool_calls_section_begin|><|tool_call_begin|>{call}"
    assert parse(make_parser("kimi_k2"), [text]).calls == [("functions.f:7", "f", '{"a":1}')]
    text = '[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"a": 1}'
    assert parse(make_parser("mistral"), [text]).calls == [("abc123def", "f", '{"a": 1}')]
    assert re.fullmatch(r"[A-Za-z0-9]{9}", TOOL_FORMATS["mistral"].new_id())
    assert re.fullmatch(r"chatcmpl-tool-[0-9a-f]{32}", TOOL_FORMATS["hermes"].new_id())


def test_only_the_first_calls() -> None:
    text = glm([("f", {"a": "x"}), ("g", {"b": "y"})])
    parser = make_parser("glm45", max_calls=1)
    assert parse(parser, text).pairs == [("f", '{"a": "x"}')]
    assert parser.num_calls == 2


CALL_ENDS = {"qwen3_coder": "</function>", "minimax_m2": "</invoke>", "deepseek_v32": "</｜DSML｜invoke>"}
LFM2_NONE = "<|tool_call_start|>[ ]<|tool_call_end|>"
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "items": {"type": "array"},
        "thing": {"type": "object"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "either": {"type": ["string", "null"]},
        "kind": {"enum": ["1", "2"]},
        "float": {"type": "float"},
    },
}


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("text", "5", "5"),
        ("text", "null", "null"),
        ("text", "two\nlines", "two\nlines"),
        ("text", "\n  indented\n", "\n  indented\n"),
        ("count", "5", 5),
        ("count", "5.0", 5),
        ("count", "five", "five"),
        ("ratio", "5", 5),
        ("ratio", "1e999", "1e999"),
        ("ratio", "NaN", "NaN"),
        ("flag", "true", True),
        ("flag", "True", True),
        ("flag", "0", False),
        ("items", "[1, 2]", [1, 2]),
        ("items", "['a', (1, None)]", ["a", [1, None]]),
        ("items", "[" * 5000, "[" * 5000),
        ("thing", '{"a": {}}', {"a": {}}),
        ("thing", "{'a': True}", {"a": True}),
        ("thing", "f(1)", "f(1)"),
        ("maybe", "null", None),
        ("maybe", "7", 7),
        ("either", "null", None),
        ("either", "7", "7"),
        ("kind", "1", "1"),
        ("float", "0.5", 0.5),
        ("unknown", "7", "7"),
    ],
)
def test_values_get_the_types_of_the_schema(key: str, written: str, value: Any) -> None:
    text = qwen_coder([("f", {key: written})])
    [(_, arguments)] = parse(make_parser("qwen3_coder", schemas={"f": SCHEMA}), text).pairs
    assert json.loads(arguments) == {key: value}


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("f(a=1, b=-2.5, c=None, d=True)", {"a": 1, "b": -2.5, "c": None, "d": True}),
        ("f(a='it\\'s', b=\"x, y)\", c=[1, {'k': (2,)}])", {"a": "it's", "b": "x, y)", "c": [1, {"k": [2]}]}),
        ('f(a="""x"y""", b="")', {"a": 'x"y', "b": ""}),
        ("f(a=true, b=null, c=word)", {"a": True, "b": None, "c": "word"}),
        ("f('first', 2)", {"a": "first", "b": 2}),
        ("f(a=g(1))", {"a": "g(1)"}),
        ("f(a=__import__('os').system('true'))", {"a": "__import__('os').system('true')"}),
        ("f(a='\\ud800')", {"a": "\ud800"}),
        ("f(a='two\nlines', b=['x\ty', \"\x00\\\"\"])", {"a": "two\nlines", "b": ["x\ty", '\x00"']}),
        ("f(a=07, b=-005, c=00.5)", {"a": 7, "b": -5, "c": 0.5}),
        ("f(a=1e999)", {"a": "1e999"}),
        ("f()", {}),
        (f"f(a={'(' * 200}{')' * 200})", {"a": "(" * 200 + ")" * 200}),
        (f"f(a={'-' * 60_000}1)", {"a": "-" * 60_000 + "1"}),
        (f"f(a={'not ' * 10_000}1)", {"a": "not " * 10_000 + "1"}),
    ],
)
def test_python_literals(written: str, arguments: dict[str, Any]) -> None:
    schemas: dict[str, Any] = {"f": {"properties": {"a": {}, "b": {}, "c": {}}}}
    [(_, found)] = parse(make_parser("pythonic", schemas=schemas), [f"[{written}]"]).pairs
    assert json.loads(found) == arguments
    found.encode()


def test_bare_formats_need_a_known_tool() -> None:
    schemas: dict[str, Any] = {"f": {}}
    for text in ("[see(1) for more]", "[1, 2]", "[", "[f", "plain"):
        found = parse(make_parser("pythonic", schemas=schemas), text)
        assert (found.content, found.calls) == (text, [])
    for text in ('{"name": "Ann", "age": 3}', '{"age": 3}', "{", '{"name": "f'):
        found = parse(make_parser("llama3_json", schemas=schemas), text)
        assert (found.content, found.calls) == (text, [])


def test_llama_calls_in_the_midst_of_text() -> None:
    call = '{"name": "f", "parameters": {"a": 1}}'
    schemas: dict[str, Any] = {"f": {}}
    for text, content, calls in (
        (f"I look {{it}} up: {call}; {call}\nThen", "I look {it} up: Then", 2),
        (f'{{"call": {call}}} [] {{', f'{{"call": {call}}} [] {{', 0),
        (f"[{call}] []", " []", 1),
        ("[ ]", "[ ]", 0),
    ):
        found = parse(make_parser("llama3_json", schemas=schemas), [text])
        assert (found.content, found.pairs) == (content, [("f", '{"a": 1}')] * calls)
        assert parse(make_parser("llama3_json", schemas=schemas), text) == found


@pytest.mark.parametrize(("name", "empty"), [("phi4_mini_json", "functools[ ]"), ("lfm2", LFM2_NONE)])
def test_an_empty_list_between_marks_is_nothing(name: str, empty: str) -> None:
    assert parse(make_parser(name), [f"No call. {empty}"]).content == "No call. "


@pytest.mark.parametrize(
    ("name", "written", "arguments"),
    [
        ("qwen3_coder", "<parameter=text>\na<b\n<parameter=count>\n5\n</parameter>", {"text": "a<b", "count": 5}),
        ("minimax_m2", '<parameter name="text">\n a\n</parameter>', {"text": "\n a\n"}),
        ("deepseek_v32", '<｜DSML｜parameter name="count" string="true">5</｜DSML｜parameter>', {"count": 5}),
        ("deepseek_v32", '<｜DSML｜parameter name="either" string="true">null</｜DSML｜parameter>', {"either": "null"}),
        ("deepseek_v32", '<｜DSML｜parameter name="input" string="true">{"text": "a", "n": 1}', {"text": "a", "n": 1}),
        ("deepseek_v32", '<｜DSML｜parameter name="arguments" string="false">[1]', {"arguments": [1]}),
        ("deepseek_v32", '<｜DSML｜parameter name="input" string="true">{"a": NaN}', {"input": '{"a": NaN}'}),
    ],
)
def test_parameters_as_models_leave_them(name: str, written: str, arguments: dict[str, Any]) -> None:
    """With no end, with line feeds of their own, of another type than they say, all of them in one."""
    before, end, after = dict(WRITERS)[name]([("f", {})]).partition(CALL_ENDS[name])
    text = before + written + end + after
    found = parse(make_parser(name, schemas={"f": SCHEMA}), [text])
    assert [(called, json.loads(each)) for called, each in found.pairs] == [("f", arguments)]
    assert parse(make_parser(name, schemas={"f": SCHEMA}), text) == found


GEMMA = '<|tool_call>call:f{text:<|"|>x<|"|>,count:1}<tool_call|>'


@pytest.mark.parametrize(
    ("name", "written", "arguments"),
    [
        (
            "functiongemma",
            "count:<escape>5<escape>,flag:true, text:<escape>7<escape>",
            '{"count": 5, "flag": true, "text": "7"}',
        ),
        ("functiongemma", "items:[1,[true, <escape>a]<escape>],]", '{"items": [1, [true, "a]"]]}'),
        (
            "functiongemma",
            "thing:{a:{},b:[]}\n,maybe:null,other:word",
            '{"thing": {"a": {}, "b": []}, "maybe": null, "other": "word"}',
        ),
        ("gemma4", 'text:<|"|>a "b"\n{<|"|>', '{"text": "a \\"b\\"\\n{"}'),
        ("gemma4", '<|"|>text<|"|>: <|"|><|"|>', '{"text": ""}'),
        ("gemma4", "", "{}"),
        ("gemma4", "count:1,items:[1", '{"count": 1, "items": [1]}'),
        ("gemma4", "thing:{a:2", '{"thing": {"a": 2}}'),
        ("gemma4", "count", "{}"),
        ("gemma4", f"items:{'[' * 40}1{']' * 40}", None),
    ],
)
def test_arguments_between_braces(name: str, written: str, arguments: str | None) -> None:
    """Of the types of the schema; what the model leaves open ends with the call."""
    start, end = TOOL_FORMATS[name].markers[:2]
    for closing in ("}" + end, end) if arguments is not None else ("}" + end,):
        text = f"{start}call:f{{{written}{closing}{GEMMA if name == 'gemma4' else ''}Then."
        whole = parse(make_parser(name, schemas={"f": SCHEMA}), [text])
        assert whole.content == "Then.", text
        assert json.loads(whole.pairs[0][1]) is not None
        assert arguments is None or whole.pairs[0][1] == arguments
        assert name != "gemma4" or whole.pairs[1:] == [("f", '{"text": "x", "count": 1}')]
        for place in range(1, len(text)):
            assert parse(make_parser(name, schemas={"f": SCHEMA}), cut(text, [place])) == whole


def test_code_blocks_that_are_no_calls() -> None:
    """xLAM writes calls into code blocks, and other things as well."""
    for text in ("```python\nx = [1]\n```", '```json\n{"name": "Ann", "age": 3}\n```', "[1, 2] ```", "``` ```json ["):
        found = parse(make_parser("xlam", schemas={"f": {}}), text)
        assert (found.content, found.calls) == (text, [])


def test_a_call_outside_its_section() -> None:
    text = dsml([("f", {"text": "x"})]).partition("\n")[2]
    found = parse(make_parser("deepseek_v32"), [f"I look.\n{text}"])
    assert (found.content, found.pairs) == ("I look.\n", [("f", '{"text": "x"}')])


def test_a_section_that_begins_inside_a_call_ends_it() -> None:
    text = "<tool_call>\n<function=f>\nWait. <tool_call>\n" + qwen_coder([("g", {"a": "x"})]).partition("\n")[2]
    assert parse(make_parser("qwen3_coder"), [text]).pairs == [("f", "{}"), ("g", '{"a": "x"}')]


def test_harmony_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>More.<|end|><|start|>assistant" + harmony([("f", {"a": 1})])
    )
    found = parse(make_parser("openai"), text)
    assert (found.reasoning, found.content, found.pairs) == ("Think.\nMore.", "I look.", [("f", '{"a": 1}')])
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    found = parse(make_parser("openai"), text)
    assert (found.reasoning, found.content) == ("Hm.", "Yes.")
    assert parse(make_parser("openai"), '{"a": 1}').content == '{"a": 1}'
    text = " to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
    assert parse(make_parser("openai"), text).pairs == [("f", "{}")]
