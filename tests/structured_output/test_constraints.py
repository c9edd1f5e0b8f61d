"""What constraints allow, with the masks alone: regular expressions against `re`, choices, grammars, structural tags;
every kind of tokenizer; and what is refused."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from quire.decoding.masks import ConstraintSpec
from quire.errors import UserError
from quire.structured_output.grammar import MAX_GRAMMAR_CHARACTERS, write_grammar
from quire.structured_output.regex import without_anchors
from quire.structured_output.writer import GrammarWriter
from quire.structured_outputs_params import StructuredOutputsParams
from quire.tokenization.tokenizer import load_tokenizer
from tests.structured_output.schemas import Sampler
from tests.tokenization.build import BUILDERS, byte_level

EXPRESSIONS = [
    "[a-c]{2,5}",
    "(foo|ba[rz])+x?",
    r"\d{1,3}(\.\d{1,3}){3}",
    r"[^\n\"]{0,7}!",
    r"^(yes|no), (\w+ ){0,2}ok$",
    r"a|b|^c$",
    r"\{\"k\": [0-9]+\}",
    r"é{2}|[α-ω]{3}",
    r"\$[0-9]+\.[0-9]{2}",
    r"[\]\[^$-]{1,3}",
]


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler(load_tokenizer("bundled"), [0, 2])


def params(**fields: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**fields)


def takes(sampler: Sampler, structured: StructuredOutputsParams, text: str) -> bool:
    """Whether a whole text is in the language: all its tokens are allowed, and then an end is."""
    matcher = sampler.matcher(structured)
    for token in sampler.tokenizer.encode(text, add_special_tokens=False):
        if matcher.is_finished or token not in sampler.allowed(matcher):
            return False
        assert matcher.accept(token)
    return matcher.is_finished or sampler.eos_token_ids[0] in sampler.allowed(matcher)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_regular_expressions(sampler: Sampler, expression: str) -> None:
    for seed in range(4):
        text, is_finished = sampler.draw(params(regex=expression), seed)
        if is_finished:
            assert re.fullmatch(expression, text), text
    rng = random.Random(expression)
    for _ in range(20):
        text = "".join(rng.choices('abcfoorbz01. yesno,{}"k:$é[]^-!', k=rng.randint(0, 6)))
        if text:
            assert takes(sampler, params(regex=expression), text) == bool(re.fullmatch(expression, text)), text


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("^a$", "a"),
        (r"\Aa\Z|^b|c$", "a|b|c"),
        (r"a\$", r"a\$"),
        ("[$^]", "[$^]"),
        ("[]$]a", "[]$]a"),
        ("(a|b)$", "(a|b)"),
        ("^^a$$", "a"),
        ("", ""),
    ],
)
def test_anchors_at_the_ends_say_nothing(pattern: str, expected: str) -> None:
    assert without_anchors(pattern) == expected


@pytest.mark.parametrize("pattern", ["a^b", "a$b", "(^a)", "(a$|b)", r"a\Ab", r"\Za"])
def test_anchors_elsewhere_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="anchor"):
        without_anchors(pattern)


def test_choices(sampler: Sampler) -> None:
    choices = ["yes", "yes, please", 'quo"te', "back\\slash", "new\nline", "ü☃😀", " lead", "{"]
    found = {sampler.draw(params(choice=choices), seed)[0] for seed in range(60)}
    assert found <= set(choices)
    assert len(found) > 4
    assert all(takes(sampler, params(choice=choices), text) for text in choices)
    assert not takes(sampler, params(choice=choices), "yes,")


def test_grammars_in_both_syntaxes(sampler: Sampler) -> None:
    lark = 'start: expr\nexpr: NUM | "(" expr OP expr ")"\nOP: "+" | "*"\nNUM: /[0-9]{1,2}/'
    ebnf = 'root ::= expr\nexpr ::= num | "(" expr op expr ")"\nop ::= "+" | "*"\nnum ::= [0-9] [0-9]?'
    for grammar in (lark, ebnf):
        assert takes(sampler, params(grammar=grammar), "(1+(22*3))")
        assert not takes(sampler, params(grammar=grammar), "(1+(22*3)")
        assert not takes(sampler, params(grammar=grammar), "(1-2)")
        for seed in range(5):
            text, is_finished = sampler.draw(params(grammar=grammar), seed)
            if is_finished:
                assert re.fullmatch(r"[0-9()+*]+", text)
                assert text.count("(") == text.count(")")


def test_recursive_schemas(sampler: Sampler) -> None:
    node = {
        "type": "object",
        "properties": {"v": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["v", "next"],
        "additionalProperties": False,
    }
    structured = params(json={"$ref": "#/$defs/node", "$defs": {"node": node}})
    assert takes(sampler, structured, '{"v": true, "next": {"v":false,"next":null}}')
    assert not takes(sampler, structured, '{"v": true, "next": 1}')


def test_options_of_json(sampler: Sampler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert takes(sampler, params(json=json.dumps(schema)), '{"a":\n 1, "b": []}')
    assert takes(sampler, params(json=schema), '{"a":' + 40 * " " + "\n" + 40 * "\t" + "1}")
    assert not takes(sampler, params(json=schema), '{"a":' + 41 * " ")
    assert not takes(sampler, params(json=schema), '{"a":\n \n')
    assert not takes(sampler, params(json=schema, disable_any_whitespace=True), '{"a": 1}')
    assert takes(sampler, params(json=schema, disable_any_whitespace=True), '{"a":1}')
    assert takes(sampler, params(json=schema, whitespace_pattern=" ?"), '{"a": 1}')
    assert not takes(sampler, params(json=schema, whitespace_pattern=" ?"), '{"a":  1}')
    assert not takes(sampler, params(json=schema, disable_additional_properties=True), '{"a":1,"b":2}')
    assert takes(sampler, params(json_object=True), '{"anything": [1, {}]}')
    assert not takes(sampler, params(json_object=True), "[1]")


LEGACY = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "array", "items": {"type": "integer"}}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
ONE_TAG = {"type": "tag", "begin": "<f>", "content": {"type": "regex", "pattern": "[0-9/]{2}"}, "end": "</f>"}
MANY_TAGS = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["a" * size for size in range(1, 400)],
        "tags": [{"begin": "a" * 400, "content": {"type": "any_text"}, "end": "b"}] * 200,
    },
}
THINKING = {
    "type": "sequence",
    "elements": [
        {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
        {"type": "triggered_tags", "triggers": ["<f"], "tags": [ONE_TAG], "at_least_one": True},
    ],
}
SPECIAL = {
    "type": "tag",
    "begin": "<|im_start|>x",
    "content": {"type": "const_string", "value": "y"},
    "end": "<|im_end|>",
}


@pytest.mark.parametrize(
    ("tag", "text", "is_taken"),
    [
        (LEGACY, "any text <f=a>[1, 2]</f> and <f=b>true</f> more", True),
        (LEGACY, "no tag at all, though a < b", True),
        (LEGACY, "any text <f=a>[1, true]</f>", False),
        (LEGACY, "any text <f=c>", False),
        (LEGACY, "any text <f=b>true</g>", False),
        ({"format": THINKING}, "<think>so <f>!</think> well <f>12</f> end", True),
        ({"format": THINKING}, "<think>so</think> well", False),
        ({"format": THINKING}, "so", False),
        ({"format": SPECIAL}, "<|im_start|>xy<|im_end|>", True),
        ({"format": SPECIAL}, "<|im_start|>xx<|im_end|>", False),
        (
            {"format": {"type": "tags_with_separator", "tags": [ONE_TAG], "separator": ", ", "at_least_one": True}},
            "<f>1/</f>, <f>22</f>",
            True,
        ),
        ({"format": {"type": "or", "elements": [ONE_TAG, {"type": "json_schema", "json_schema": True}]}}, "[]", True),
        ({"format": {"type": "or", "elements": [ONE_TAG, {"type": "const_string", "value": "b"}]}}, "a", False),
    ],
)
def test_structural_tags(sampler: Sampler, tag: dict[str, Any], text: str, is_taken: bool) -> None:
    assert takes(sampler, params(structural_tag=tag), text) == is_taken
    assert takes(sampler, params(structural_tag=json.dumps(tag)), text) == is_taken


@pytest.mark.parametrize("name", sorted(set(BUILDERS) - {"suffixed", "mixed", "undecoded"}))
@pytest.mark.parametrize("num_more", [-3, 0, 40])
def test_every_kind_of_tokenizer(name: str, num_more: int) -> None:
    """Byte fallback, words with blanks in front, added tokens; a model with fewer or more tokens than its tokenizer."""
    tokenizer = BUILDERS[name]()
    vocab_size = tokenizer.vocab_size + num_more
    sampler = Sampler(tokenizer, [1, vocab_size + 5] if name.startswith(("byte", "sentence")) else [], vocab_size)
    texts = ["fox", "the fox", "é", "日.", "abcabc"]
    known = {tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) for text in texts} - {""}
    for seed in range(6):
        text, is_finished = sampler.draw(params(choice=sorted(known)), seed)
        if is_finished:
            assert text in known


def test_a_text_that_no_token_continues_is_an_error() -> None:
    sampler = Sampler(BUILDERS["undecoded"](), [])
    matcher = sampler.matcher(params(choice=[" the fo"]))
    [the] = sampler.allowed(matcher)
    assert matcher.accept(int(the))
    with pytest.raises(UserError, match="no token of this model"):
        matcher.mask()


@pytest.mark.parametrize("eos_token_ids", [[], [0]])
@pytest.mark.parametrize("vocab_size", [1023, 1024, 1025])
def test_masks_have_the_size_of_the_vocabulary(vocab_size: int, eos_token_ids: list[int]) -> None:
    """Also where the end of a text is a token behind it, which may need a word more."""
    sampler = Sampler(load_tokenizer("bundled"), eos_token_ids, vocab_size)
    matcher = sampler.matcher(params(regex="[a-z]{2}!"))
    texts = {sampler.tokenizer.token_bytes(token) for token in sampler.allowed(matcher)}
    assert texts >= {b"a", b"z"}
    assert all(re.fullmatch(rb"[a-z]{1,2}!?", text) for text in texts)


def test_tokenizers_whose_tokens_have_no_text_are_refused() -> None:
    for tokenizer in (BUILDERS["suffixed"](), None):
        with pytest.raises(UserError, match="tokenizer"):
            GrammarWriter(tokenizer, 50).write(params(regex="a"))


def test_several_end_tokens_and_ignored_ones(sampler: Sampler) -> None:
    structured = params(regex="a{1,3}")
    [token] = sampler.tokenizer.encode("a", add_special_tokens=False)
    plain, endless = sampler.matcher(structured), sampler.matcher(structured, ConstraintSpec(ignore_eos=True))
    assert plain.accept(token)
    assert endless.accept(token)
    assert {0, 2} <= set(sampler.allowed(plain).tolist())
    assert not {0, 2} & set(sampler.allowed(endless).tolist())
    assert plain.accept(2)
    assert (plain.is_finished, plain.ends_in_text) == (True, False)
    assert not plain.accept(token)


@pytest.mark.parametrize("named", [[], [0]])
def test_the_end_token_of_the_tokenizer_ends_a_constraint(named: list[int]) -> None:
    """1 is the tokenizer's; the model's configuration names another, or none."""
    sampler = Sampler(byte_level(), named)
    [token] = sampler.tokenizer.encode("a", add_special_tokens=False)
    structured = params(regex="a{1,3}")
    plain, endless = sampler.matcher(structured), sampler.matcher(structured, ConstraintSpec(ignore_eos=True))
    assert plain.accept(token)
    assert endless.accept(token)
    assert {*named, 1} <= set(sampler.allowed(plain).tolist())
    assert not {*named, 1} & set(sampler.allowed(endless).tolist())
    assert plain.accept(1)
    assert plain.is_finished


def test_nothing_in_common_with_the_allowed_tokens(sampler: Sampler) -> None:
    [token] = sampler.tokenizer.encode("a", add_special_tokens=False)
    matcher = sampler.matcher(params(regex="a(b|c)"), ConstraintSpec(allowed_token_ids=[token]))
    assert token in sampler.allowed(matcher)
    assert matcher.accept(token)
    with pytest.raises(UserError, match="allowed_token_ids"):
        matcher.mask()


def test_it_begins_behind_its_mark(sampler: Sampler) -> None:
    matcher = sampler.matcher(params(regex="a"), ConstraintSpec(start_after=[7, 7, 8]))
    for token in (7, 7, 7, 9, 7, 7):
        assert matcher.accept(token)
        assert matcher.mask() is None
    other = matcher.copy()
    assert other.accept(9)
    assert matcher.accept(8)
    assert not matcher.accept(7)
    assert other.accept(7)


def test_copies_go_their_own_ways(sampler: Sampler) -> None:
    first = sampler.matcher(params(regex="ab|cd"))
    second = first.copy()
    [a], [c], [d] = (sampler.tokenizer.encode(text, add_special_tokens=False) for text in "acd")
    assert (first.accept(a), second.accept(c)) == (True, True)
    assert (first.accept(d), second.accept(d)) == (False, True)
    assert second.is_finished


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"json": {"type": "nothing"}}, "there is no type"),
        ({"json": {"uniqueItems": True, "type": "array"}}, "uniqueItems"),
        ({"json": {"$ref": "#/nowhere"}}, "does not exist"),
        ({"json": {"enum": []}}, "no text follows"),
        ({"json": "[1]"}, "must be a JSON object"),
        ({"json": "{"}, "not JSON"),
        ({"regex": "a{2,1}"}, "invalid"),
        ({"regex": "["}, "invalid"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"grammar": "start: missing"}, "unknown name"),
        ({"grammar": "start: <|nothing|>"}, "unknown special token"),
        ({"grammar": "root ::= ("}, ""),
        ({"grammar": "x" * (MAX_GRAMMAR_CHARACTERS + 1)}, "characters"),
        ({"json": '"' * (MAX_GRAMMAR_CHARACTERS + 1)}, "characters"),
        ({"structural_tag": {}}, "structures"),
        ({"structural_tag": {"format": {"type": "qwen_xml_parameter"}}}, "formats are of type"),
        ({"structural_tag": {"format": {"type": "any_text", "excludes": ["x"]}}}, "excludes"),
        ({"structural_tag": LEGACY | {"triggers": ["<g"]}}, "triggers"),
        ({"structural_tag": MANY_TAGS}, "more than 4096 parts"),
    ],
)
def test_what_is_refused(sampler: Sampler, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError) as caught:
        sampler.compile(params(**fields))
    assert reason in caught.value.message
    assert caught.value.param == "structured_outputs"
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 500


def test_triggers_of_a_tag() -> None:
    """Each trigger stands once, before what is left of each tag that begins with it."""
    tags = [{"begin": begin, "content": {"type": "const_string", "value": "1"}, "end": ";"} for begin in ("<ab", "<c")]
    form = {"format": {"type": "triggered_tags", "tags": tags, "triggers": ["<", "<a", "<x", "<"]}}
    written = write_grammar(params(structural_tag=form))
    assert [written.count(rest) for rest in ('"ab" ', '"b" ', '"c" ')] == [1, 1, 1]


def test_deep_schemas_are_refused(sampler: Sampler) -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(5000):
        deep = {"type": "array", "items": deep}
    with pytest.raises(UserError):
        sampler.compile(params(json=deep))
