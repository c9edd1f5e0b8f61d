"""Calls that must follow schemas, in the form of each family of models: what its models write is allowed, other
arguments and other tools are not, and whatever the masks let through is read back as calls."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from quire.errors import UserError
from quire.parsers.call_forms import schema_form, thoughts
from quire.parsers.registry import TOOL_FORMATS
from quire.structured_outputs_params import Preamble, StructuredOutputsParams
from quire.tokenization.tokenizer import Tokenizer
from tests.parsers.driver import make_parser, parse
from tests.parsers.writers import ONE_CALL, WRITERS, Call, Writer, harmony
from tests.structured_output.schemas import Sampler
from tests.structured_output.test_constraints import takes
from tests.tokenization.build import byte_level_backend

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"name": {"enum": ["Rome", "Oslo"]}},
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"weather": CITY, "time": EMPTY}
ROME = ("weather", {"city": "Rome", "days": 3})
BAD_CITY = ("weather", {"city": "Rome", "days": "three"})
CASES = [
    pytest.param(name, writer, id=f"{name}-{number}", marks=pytest.mark.long if number % 2 else ())
    for number, (name, writer) in enumerate(WRITERS)
    if TOOL_FORMATS[name].held is not None
]


def with_special_tokens(texts: list[str]) -> Tokenizer:
    """A tokenizer of bytes and these special tokens."""
    backend = byte_level_backend()
    backend.add_special_tokens(["<eos>", *texts])
    return Tokenizer(backend)


@pytest.fixture(scope="module", params=["marks are text", "marks are special tokens"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    marks = sorted({mark for form in TOOL_FORMATS.values() if form.held is not None for mark in form.markers})
    is_special = request.param == "marks are special tokens"
    tokenizer = with_special_tokens(marks if is_special else [])
    end = tokenizer.token_to_id("<eos>")
    assert end is not None
    return Sampler(tokenizer, [end])


def held(form: dict[str, Any]) -> StructuredOutputsParams:
    return StructuredOutputsParams(structural_tag={"format": form})


def held_calls(name: str, *, parallel: bool = True) -> StructuredOutputsParams:
    form = TOOL_FORMATS[name].held
    assert form is not None
    return held(form(SCHEMAS, parallel))


@pytest.mark.parametrize(("name", "writer"), CASES)
def test_what_models_write(sampler: Sampler, name: str, writer: Writer) -> None:
    calls = [ROME, ("time", {})][: 1 if name in ONE_CALL or name == "openai" else 2]

    def write(*calls: Call) -> str:
        written = writer(list(calls))
        # An end token stands for the mark of a message's end.
        return written.removesuffix("<|call|>") if name == "openai" else "Look: " + written

    constraint = held_calls(name)
    assert takes(sampler, constraint, write(*calls))
    assert not takes(sampler, constraint, write(BAD_CITY))
    assert not takes(sampler, constraint, write(("other", {})))
    if len(calls) > 1:
        one = held_calls(name, parallel=False)
        assert takes(sampler, one, write(calls[0]))
        assert not takes(sampler, one, write(*calls))
    if name != "openai":
        assert takes(sampler, constraint, "no call at all")


@pytest.mark.parametrize(("name", "writer"), [each for each in CASES if each.values[0] != "openai"])
def test_calls_or_an_answer(sampler: Sampler, name: str, writer: Writer) -> None:
    """What the model writes to call tools, or an answer by its schema, and no other text."""
    answer = schema_form({"type": "array", "items": {"type": "integer"}})
    constraint = held(TOOL_FORMATS[name].calls_or(SCHEMAS, True, answer))
    assert takes(sampler, constraint, writer([ROME, ("time", {})][: 1 if name in ONE_CALL else 2]))
    assert takes(sampler, constraint, "[1, 2]")
    for text in (writer([BAD_CITY]), "no call at all", "[1, 2] no", '{"a": 1}', writer([ROME]) + "[1, 2]"):
        assert not takes(sampler, constraint, text), text


@pytest.mark.parametrize("name", sorted(name for name, form in TOOL_FORMATS.items() if form.held is not None))
def test_what_masks_allow_is_read(sampler: Sampler, name: str) -> None:
    """Random tokens under the masks, from where a call begins: the parser reads calls with arguments that fit."""
    form = TOOL_FORMATS[name]
    constraint = held_calls(name, parallel=False)
    begin = "<|channel|>commentary to=functions." if name == "openai" else form.markers[0]
    found = 0
    for seed in range(6):
        text, is_finished = sampler.draw(constraint, seed, begin)
        if not is_finished:
            continue
        for called, arguments in parse(make_parser(name), [text]).pairs:
            found += 1
            values = json.loads(arguments)
            assert called in SCHEMAS
            assert values == {} if called == "time" else values["city"] in ("Rome", "Oslo")
            assert called == "time" or type(values["days"]) is int
    assert found


def test_forced_channels(sampler: Sampler) -> None:
    """GPT-OSS: thoughts and preambles, then a call; nothing else where one is asked for."""
    form = TOOL_FORMATS["openai"]
    assert form.channels is not None
    thoughts = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    answer = "<|channel|>final<|message|>It rains."
    call = harmony([ROME]).removesuffix("<|call|>")
    forced, free = held(form.channels(SCHEMAS, None)), held_calls("openai")
    for constraint in (forced, free):
        assert takes(sampler, constraint, thoughts + thoughts + preamble + call)
        assert takes(sampler, constraint, call)
        assert not takes(sampler, constraint, thoughts)
        assert not takes(sampler, constraint, harmony([BAD_CITY]).removesuffix("<|call|>"))
    assert takes(sampler, free, thoughts + answer)
    assert not takes(sampler, forced, thoughts + answer)


def test_a_preamble_before_each_kind_of_constraint(sampler: Sampler) -> None:
    """Marks of one token, of several, and none; the text behind them is held all the same."""
    thought = Preamble(thoughts(["<a>"], ["</a>", "</b>"], ["[TOOL_CALLS]"], is_open=False))
    opened = Preamble(thoughts([], ["</a>"], is_open=True))
    for fields, right, wrong in (
        ({"regex": "^x+$"}, "xx", "xy"),
        ({"choice": ["yes", "no"]}, "no", "nope"),
        ({"json": {"const": 1}}, "1", "2"),
        ({"json_object": True}, "{}", "[]"),
        ({"grammar": 'start: "a" | "b"'}, "b", "c"),
        ({"grammar": '{"grammars": [{"lark_grammar": "start: \\"a\\""}]}'}, "a", "b"),
        ({"structural_tag": {"format": {"type": "const_string", "value": "ab"}}}, "ab", "a"),
    ):
        free = StructuredOutputsParams(**fields, preamble=thought)
        for before in ("", "<a>hm </a>", "<a></b>", "<a></b>[TOOL_CALLS]", "[TOOL_CALLS]"):
            assert takes(sampler, free, before + right), (fields, before)
            assert not takes(sampler, free, before + wrong), (fields, before)
        for text in ("hm", "<a>hm", "<a>hm</a>", f"hm</a>{right}", f"<a>hm</a>{right}</a>"):
            assert not takes(sampler, free, text), (fields, text)
        must = StructuredOutputsParams(**fields, preamble=opened)
        assert takes(sampler, must, f"hm</a>{right}")
        assert not takes(sampler, must, right)
    for grammar in ('{"a": 1}', '{"grammars": []}', '{"grammars": [1]}', "{"):
        with pytest.raises(UserError, match="grammar cannot be used as a constraint"):
            sampler.matcher(StructuredOutputsParams(grammar=grammar, preamble=thought))
    with pytest.raises(UserError, match=r"cannot be followed: .*invalid regex"):
        sampler.matcher(StructuredOutputsParams(regex="a(", preamble=thought))


def test_thoughts_before_calls(sampler: Sampler) -> None:
    """Marks of calls in the thoughts begin no call."""
    form = TOOL_FORMATS["mistral"].held
    assert form is not None
    before = Preamble(thoughts(["<|start|>"], ["<|end|>"], is_open=False))
    constraint = msgspec.structs.replace(held(form(SCHEMAS, True)), preamble=before)
    assert takes(sampler, constraint, "<|start|>hm<|end|>Yes.")
    assert takes(sampler, constraint, "<|start|>hm<|end|>[TOOL_CALLS]time[ARGS]{}")
    assert takes(sampler, constraint, "Yes.")
    assert not takes(sampler, constraint, '<|start|>hm<|end|>[TOOL_CALLS]time[ARGS]{"a": 1}')
    assert not takes(sampler, constraint, '[TOOL_CALLS]time[ARGS]{"a": 1}')
