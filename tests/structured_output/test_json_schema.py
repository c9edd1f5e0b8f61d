"""JSON schemas are followed to the letter, or refused with the keyword and its place."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import pytest

from quire.errors import UserError
from quire.structured_output.grammar import MAX_GRAMMAR_CHARACTERS, write_grammar
from quire.structured_output.json_schema import normalise, parse_schema
from quire.structured_output.patterns import Budget
from quire.structured_outputs_params import StructuredOutputsParams
from quire.tokenization.tokenizer import load_tokenizer
from tests.structured_output.bytes_matcher import matcher, schema_matcher, takes
from tests.structured_output.schemas import Sampler

INTEGER = {"type": "integer"}
TEXT = {"type": "string"}
ANYTHING = ['"x"', "1", "null", "[]", "{}", "true"]


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler(load_tokenizer("bundled"), [0])


def follows(schema: Any, taken: list[str], not_taken: list[str]) -> None:
    found = schema_matcher(schema)
    assert [text for text in taken if not takes(found, text)] == []
    assert [text for text in not_taken if takes(found, text)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {
            "title": "t",
            "description": "d",
            "default": {"$ref": "#/nowhere"},
            "examples": [{"$ref": 5}],
            "$comment": "c",
        },
        {"readOnly": True, "writeOnly": True, "deprecated": True, "contentMediaType": "x", "contentEncoding": "y"},
        {"$schema": "http://json-schema.org/draft-07/schema#", "$id": "https://example.org/a", "x-order": 3},
        {"if": {"type": "string"}},
        {"then": False, "else": False},
        {"additionalProperties": True, "minItems": 0, "uniqueItems": False, "minProperties": 0, "minLength": 0},
        {"format": "foo", "contentSchema": {"type": "integer"}, "minContains": 3, "nullable": False},
        {"type": None, "enum": None, "properties": None, "required": None, "format": None, "$ref": None, "not": None},
        {"unevaluatedProperties": True, "unevaluatedItems": True, "propertyNames": True, "not": False},
        {"dependentRequired": {}, "dependencies": {"a": []}, "dependentSchemas": {"a": True}, "required": []},
        {"maxLength": 2**40, "maxItems": 1e30, "maxProperties": 2**31, "contains": True, "minContains": 0},
        {"anyOf": [True, {"type": "string"}]},
        {"allOf": [{}, True]},
        {"x-guidance": {"lenient": 1}},
        {"discriminator": {"propertyName": "k"}, "xml": {}, "externalDocs": {}},
        {"$defs": {"unused": {"uniqueItems": True, "type": "array"}}, "definitions": {"a": {"$ref": "http://x"}}},
    ],
)
def test_what_asks_for_nothing_is_left_out(schema: dict[str, Any]) -> None:
    follows(schema, ANYTHING, ["x", ""])


@pytest.mark.parametrize("name", ["path", "password", "binary", "uuid4", "uri-reference", "regex", "int64", "ipv4 "])
def test_other_formats_are_annotations(name: str) -> None:
    follows({"type": "string", "format": name, "maxLength": 4}, ['"ab c"'], ['"abcde"'])


def test_upper_case_types_and_nulls_among_them() -> None:
    follows({"type": "STRING"}, ['"a"'], ["1"])
    follows({"type": ["Integer", None]}, ["1", "null"], ['"a"'])
    schema = {"type": "OBJECT", "properties": {"a": {"type": "ARRAY", "items": {"type": "NUMBER"}}}, "required": ["a"]}
    follows(schema, ['{"a":[1.5]}'], ['{"a":["x"]}', "{}"])


@pytest.mark.parametrize(
    ("schema", "taken", "not_taken"),
    [
        ({"const": {"$ref": "#/x", "$id": 5, "anyOf": 1}}, ['{"$ref":"#/x","$id":5,"anyOf":1}'], ["{}"]),
        ({"properties": {"$ref": {"const": 1}, "enum": TEXT}}, ['{"$ref":1,"enum":"a"}'], ['{"$ref":2}']),
        ({"not": {"type": "string"}}, ["1", "null", "{}"], ['"a"']),
        ({"type": "string", "uniqueItems": True, "contains": {}, "minimum": "x"}, ['"a"'], ["1"]),
        ({"if": True, "then": INTEGER, "else": TEXT}, ["1"], ['"a"']),
        ({"if": False, "then": INTEGER, "else": TEXT}, ['"a"'], ["1"]),
        ({"type": "array", "items": INTEGER, "minItems": 1.0, "maxItems": 2.0}, ["[1]", "[1,2]"], ["[]", "[1,2,3]"]),
        (
            {"type": "array", "items": [INTEGER, TEXT], "additionalItems": False},
            ["[1]", '[1,"a"]'],
            ['["a"]', '[1,"a",2]'],
        ),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, ["[]", "[1]"], ["[1,1]"]),
        ({"type": "array", "contains": True, "maxContains": 2}, ["[1]"], ["[]", "[1,2,3]"]),
        ({"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": False}, ["[1]"], ["[1,2]"]),
        ({"propertyNames": {"pattern": "^a"}, "type": "object"}, ['{"ab":1}'], ['{"b":1}']),
        (
            {"propertyNames": {"enum": ["a", "b"]}, "properties": {"b": INTEGER}, "type": "object"},
            ['{"b":1,"a":"x"}'],
            ['{"c":1}', '{"b":"x"}'],
        ),
        ({"propertyNames": False, "type": "object"}, ["{}"], ['{"a":1}']),
        (
            {"propertyNames": {"pattern": "^[ab]$"}, "patternProperties": {".*": INTEGER}, "properties": {"b": {}}},
            ['{"b":1,"a":2}'],
            ['{"c":1}', '{"a":"x"}', '{"b":"x"}'],
        ),
        (
            {"propertyNames": {"pattern": "^a"}, "additionalProperties": INTEGER, "properties": {"b": TEXT}},
            ['{"ab":1}'],
            ['{"ab":"x"}', '{"b":"x"}'],
        ),
        (
            {"propertyNames": {"pattern": "^a"}, "properties": {"a": TEXT, "b": {}}, "additionalProperties": False},
            ['{"a":"x"}', "{}"],
            ['{"a":1}', '{"b":1}', '{"ab":1}'],
        ),
        (
            {"oneOf": [{"type": t, "properties": {"k": {"const": t}}, "required": ["k"]} for t in ("object", "null")]},
            ["null", '{"k":"object"}'],
            ['{"k":"null"}', "{}"],
        ),
        (
            {"propertyNames": {"pattern": "^a"}, "properties": {"a": TEXT}},
            ['{"a":"x","ab":1}'],
            ['{"a":1}', '{"b":1}'],
        ),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "if": {}, "then": INTEGER}, ["1", '"a"'], []),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "if": {}, "then": INTEGER}, ["1"], ['"a"']),
        (
            {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 99999999999999.98},
            ["0", "0.1", "0.01", "12", "99999999999999.98"],
            ["0.001", "0.015", "99999999999999.99", "-0.01", "1e2"],
        ),
        ({"type": "number", "multipleOf": 1, "minimum": 2**60 + 1}, [str(2**60 + 1)], [str(2**60), f"{2**60 + 1}.5"]),
        ({"type": "object", "required": ["a"], "dependentRequired": {"a": ["b"]}}, ['{"a":1,"b":2}'], ['{"a":1}']),
        ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, ['{"a":1}'], ['{"b":1}']),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2, "additionalProperties": False},
            ['{"a":1,"b":2}'],
            ['{"a":1}'],
        ),
        ({"oneOf": [INTEGER, False]}, ["1"], ['"a"']),
        ({"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": INTEGER}}, ["1", "null"], ['"a"']),
        (
            {
                "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
                "$defs": {
                    "a": {"type": "object", "properties": {"k": {"const": "a"}, "v": INTEGER}, "required": ["k"]},
                    "b": {"type": "object", "properties": {"k": {"const": "b"}, "v": TEXT}, "required": ["k"]},
                },
            },
            ['{"k":"a","v":1}', '{"k":"b","v":"x"}'],
            ['{"k":"b","v":1}', '{"v":1}'],
        ),
        (
            {
                "oneOf": [
                    {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False},
                    {"type": "object", "properties": {"b": {}}, "required": ["b"], "additionalProperties": False},
                ],
                "properties": {"a": INTEGER, "b": TEXT},
            },
            ['{"a":1}', '{"b":"x"}'],
            ['{"a":1,"b":"x"}', "{}", '{"a":"x"}'],
        ),
        (
            {
                "additionalProperties": False,
                "anyOf": [{"properties": {"a": {"const": 1}, "c": {}}}, {"properties": {"a": {"const": 2}}}],
                "properties": {"a": INTEGER, "b": {}, "c": {}},
            },
            ['{"a":1,"b":1,"c":1}', '{"a":2,"b":1,"c":1}'],
            ['{"a":3}'],
        ),
        ({"enum": [1, "a", 2.5], "type": "string"}, ['"a"'], ["1"]),
        ({"enum": [5, 50, "a"], "minimum": 2**60}, ['"a"'], ["5", "50"]),
        (
            {"anyOf": [{"const": 2**60}, {"type": "object", "properties": {"a": TEXT}}]},
            [str(2**60), '{"a":"x","b":1}'],
            ['{"a":1}', str(2**60 + 1)],
        ),
        (
            {"type": "string", "format": "date"},
            ['"2024-02-29"', '"2000-02-29"'],
            ['"2023-02-29"', '"1900-02-29"', '"2024-04-31"'],
        ),
        ({"type": "string", "format": "date-time"}, ['"2024-02-29T10:00:00Z"'], ['"2023-02-29T10:00:00Z"']),
    ],
)
def test_keywords(schema: dict[str, Any], taken: list[str], not_taken: list[str]) -> None:
    follows(schema, taken, not_taken)


NODE = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "taken", "not_taken"),
    [
        (NODE, ["{}", '{"next":{"next":{}}}'], ['{"next":1}']),
        ({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": INTEGER}}, ["1"], ['"a"']),
        ({"$ref": "#/components/x/0", "components": {"x": [TEXT]}}, ['"a"'], ["1"]),
        ({"$ref": "#here", "$defs": {"x": {"$anchor": "here", "type": "null"}}}, ["null"], ["1"]),
        ({"$id": "https://a.b/c", "$ref": "#/definitions/e", "definitions": {"e": INTEGER}}, ["1"], ['"a"']),
        ({"$id": "https://a.b/c", "$ref": "https://a.b/c#/$defs/e", "$defs": {"e": INTEGER}}, ["1"], ['"a"']),
        (
            {
                "$id": "http://a/b/",
                "$ref": "x.json",
                "$defs": {"e": {"$id": "x.json", "$ref": "#/$defs/i", "$defs": {"i": INTEGER}}},
            },
            ["1"],
            ['"a"'],
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "$ref": "#i",
                "definitions": {"i": {"$id": "#i", "type": "integer"}},
            },
            ["1"],
            ['"a"'],
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "properties": {"a": {"$ref": "#/definitions/i", "maximum": 3}},
                "definitions": {"i": INTEGER},
            },
            ['{"a":9}'],
            ['{"a":"x"}'],
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-04/schema#",
                "id": "http://a/b",
                "$ref": "http://a/b#/definitions/i",
                "definitions": {"i": INTEGER},
            },
            ["1"],
            ['"a"'],
        ),
        ({"$dynamicRef": "#n", "$defs": {"x": {"$dynamicAnchor": "n", "type": "null"}}}, ["null"], ["1"]),
        ({"properties": {"a": {"$ref": "#/properties/b"}, "b": {"const": 2**60}}}, [f'{{"a":{2**60}}}'], ['{"a":1}']),
        (
            {
                "items": {"$ref": "#/$defs/n"},
                "type": "array",
                "$defs": {"n": {"anyOf": [{"const": 2**60}, {"type": "array", "items": {"$ref": "#/$defs/n"}}]}},
            },
            [f"[[{2**60}],[]]"],
            ["[1]"],
        ),
    ],
)
def test_references(schema: dict[str, Any], taken: list[str], not_taken: list[str]) -> None:
    follows(schema, taken, not_taken)


@pytest.mark.parametrize("additional", [None, True, TEXT, {"const": 2**60}])
def test_a_free_name_is_no_property_in_another_spelling(additional: Any) -> None:
    schema = {"type": "object", "properties": {"a": INTEGER, "b\n": INTEGER}, "required": ["c"]}
    if additional is not None:
        schema["additionalProperties"] = additional
    value = str(2**60) if isinstance(additional, dict) and "const" in additional else '"x"'
    follows(
        schema,
        [f'{{"a":1,"c":{value},"d":{value}}}', f'{{"c":{value}}}'],
        [f'{{"c":{value},"{name}":{value}}}' for name in ("\\u0061", "\\u0062\\n", "b\\u000a", "a", "\\u0063")],
    )


def test_control_characters_stay_where_no_schema_needs_plain_names() -> None:
    follows({"type": "object", "properties": {"a": INTEGER}}, ['{"b":"\\u001b[0m"}'], [])
    follows({"type": "object", "properties": {"a": TEXT}, "additionalProperties": False}, ['{"a":"\\u0000"}'], [])


P = {"^score$": INTEGER}


@pytest.mark.parametrize(
    ("schema", "taken", "not_taken"),
    [
        (
            {
                "properties": {"score": INTEGER},
                "patternProperties": {"^score$": {"maximum": 3}},
                "additionalProperties": False,
            },
            ['{"score":3}', "{}"],
            ['{"score":4}', '{"score":3,'],
        ),
        (
            {
                "properties": {"score": INTEGER, "a": {}},
                "patternProperties": P,
                "required": ["a"],
                "additionalProperties": False,
            },
            ['{"score":1,"a":2}'],
            ['{"score":"x","a":2}'],
        ),
        (
            {"properties": {"ab": {}}, "patternProperties": {"^a.$": INTEGER}, "additionalProperties": False},
            ['{"ab":1,"ac":2}'],
            ['{"ab":"x"}', '{"ac":"x"}', '{"b":1}'],
        ),
        (
            {
                "properties": {"ab": {}, "ac": {}},
                "patternProperties": {"^a": {"type": "array", "items": {"items": INTEGER}}},
            },
            ['{"ab":[[1]],"ac":[]}'],
            ['{"ab":[["x"]]}', '{"ac":1}'],
        ),
        (
            {"patternProperties": {"^x": False}, "properties": {"xa": {}, "b": {}}},
            ['{"b":1,"c":2}'],
            ['{"xa":1}', '{"x":1}'],
        ),
        (
            {"patternProperties": {"[0-9]": INTEGER, "^[^0-9]*$": TEXT}, "type": "object"},
            ['{"a1":1,"a":"x"}'],
            ['{"a1":"x"}', '{"a":1}'],
        ),
    ],
)
def test_patterns_over_properties(schema: dict[str, Any], taken: list[str], not_taken: list[str]) -> None:
    follows(schema | {"type": "object"}, taken, not_taken)


def test_no_comma_is_allowed_where_no_name_could_follow() -> None:
    schema = {"type": "object", "properties": {"score": INTEGER}, "patternProperties": P, "additionalProperties": False}
    state = schema_matcher(schema).deep_copy()
    assert all(map(state.consume_token, b'{"score":1'))
    assert not state.consume_token(ord(","))


def test_what_no_finite_text_follows() -> None:
    endless = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}
    with pytest.raises(UserError, match="no text follows"):
        schema_matcher({"$ref": "#/$defs/n", "$defs": {"n": endless}})
    schema = {"anyOf": [TEXT, {"$ref": "#/$defs/n"}], "$defs": {"n": endless}}
    follows(schema, ['"a"'], ["{"])
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    with pytest.raises(UserError, match="no text follows"):
        schema_matcher(loop)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"properties": {"a": {"uniqueItems": True, "type": "array"}}}, "#/properties/a/uniqueItems"),
        ({"items": {"if": INTEGER, "then": False}}, "#/items/if"),
        ({"not": {"required": ["a"]}}, "#/not"),
        ({"contains": INTEGER}, "#/contains"),
        ({"dependentRequired": {"a": ["b"]}}, "#/dependentRequired"),
        ({"dependentRequired": {"a": {"type": "string"}}}, "#/dependentRequired"),
        ({"dependencies": {"a": {"required": ["b"]}}}, "#/dependencies"),
        ({"propertyNames": {"minLength": 3}}, "#/propertyNames"),
        (
            {"propertyNames": {"pattern": "^a"}, "additionalProperties": INTEGER, "properties": {"a": {}}},
            "#/propertyNames: is not supported beside properties",
        ),
        ({"unevaluatedProperties": False, "allOf": [{"properties": {"a": {}}}]}, "#/unevaluatedProperties"),
        ({"minProperties": 2}, "#/minProperties"),
        ({"pattern": "(?=a)"}, "#/pattern: look-around"),
        ({"pattern": r"^(\S+\s+){0,99}\S+$", "maxLength": 5000}, "#/pattern: counts too many words"),
        ({"patternProperties": {"(?i)a": {}}, "properties": {"a": {}}}, "#/patternProperties"),
        ({"$ref": "https://example.org/other"}, "not in this document"),
        ({"$ref": "#/nowhere"}, "does not exist"),
        ({"$ref": "#nowhere"}, "does not exist"),
        ({"$ref": 5}, "#/$ref"),
        ({"type": "float"}, "no type 'float'"),
        ({"type": []}, "#/type"),
        ({"allOf": []}, "#/allOf"),
        ({"anyOf": {"a": 1}}, "#/anyOf"),
        ({"properties": {"a": 5}}, "#/properties/a"),
        ({"properties": [1]}, "#/properties"),
        ({"required": "a"}, "#/required"),
        ({"minLength": -1}, "#/minLength"),
        ({"maxLength": "3"}, "#/maxLength"),
        ({"const": "x" * 70000}, "#/const: has a text of 70000 characters"),
        ({"enum": 5}, "#/enum"),
        ({"const": "\ud800"}, ""),
        ({"oneOf": [{"type": "number"}, {"minimum": 3}]}, "oneOf is supported"),
        (
            {"oneOf": [{"properties": {"k": {"const": name}}, "required": ["k"]} for name in "ab"]},  # null is both
            "oneOf is supported",
        ),
        (
            {
                "oneOf": [
                    {"type": ["null", "object"], "properties": {"k": {"const": k}}, "required": ["k"]} for k in "ab"
                ]
            },
            "oneOf is supported",
        ),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "no text follows"),
    ],
)
def test_refusals_name_the_keyword_and_its_place(sampler: Sampler, schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError) as caught:
        sampler.compile(StructuredOutputsParams(json=schema))
    assert reason in caught.value.message
    assert "coerce" not in caught.value.message
    assert "\n" not in caught.value.message


def test_blanks_stand_where_they_do_without_digits() -> None:
    plain = {"type": "object", "properties": {"a": {"const": 1}, "b": {"type": "array", "items": TEXT}}}
    digits = {"type": "object", "properties": {"a": {"const": 2**60}, "b": {"type": "array", "items": TEXT}}}
    for fields in ({}, {"whitespace_pattern": " ?/?"}, {"disable_any_whitespace": True}):
        found, other = (
            matcher(write_grammar(StructuredOutputsParams(json=schema, **fields))) for schema in (plain, digits)
        )
        text = '{"a": 1,"b" :[ "x" , "y"/\n]}'
        for blank in ("", " ", "\n", "/", "  "):
            for written in (text.replace(" ", blank), text.replace("/\n", blank), text.replace("/\n", "") + blank):
                longer = written.replace("1", str(2**60))
                assert takes(found, written) == takes(other, longer), (fields, written)


def test_closed_objects() -> None:
    grammar = write_grammar(
        StructuredOutputsParams(
            json={"type": "object", "properties": {"a": {"properties": {"b": {}}, "type": "object"}}},
            disable_additional_properties=True,
            disable_any_whitespace=True,
        )
    )
    assert takes(matcher(grammar), '{"a":{"b":1}}')
    assert not takes(matcher(grammar), '{"a":{"c":1}}')


@pytest.mark.parametrize(
    "keyword", ["items", "not", "unevaluatedItems", "contains", "additionalProperties", "if", "then"]
)
def test_nested_schemas_are_walked_once(keyword: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.structured_output.json_schema import Normaliser

    num_walked, walk = 0, Normaliser.schema

    def counted(self: Normaliser, schema: Any, place: Any) -> Any:
        nonlocal num_walked
        num_walked += 1
        return walk(self, schema, place)

    monkeypatch.setattr(Normaliser, "schema", counted)
    schema: dict[str, Any] = {}
    for _ in range(50):
        schema = {keyword: schema, "if": True} if keyword == "then" else {keyword: schema}
    with contextlib.suppress(ValueError):
        normalise(parse_schema(json.dumps(schema)), Budget())
    assert num_walked <= 110


def test_a_pattern_s_schema_stands_once_for_many_names() -> None:
    large = {"type": "object", "properties": {f"p{number}": TEXT for number in range(300)}}
    schema = {"properties": {f"x{number}": {} for number in range(300)}, "patternProperties": {"^x": large}}
    normal = normalise(parse_schema(json.dumps(schema)), Budget())
    assert len(json.dumps(normal.document())) < 50_000


@pytest.mark.parametrize("keyword", ["items", "anyOf", "const"])
def test_depth_is_bounded(keyword: str) -> None:
    schema: Any = {}
    for _ in range(5000):
        schema = {keyword: [schema] if keyword == "anyOf" else schema}
    for value in (schema, json.dumps({"a": 1})[:-1] + ',"b":' + "[" * 5000 + "]" * 5000 + "}"):
        with pytest.raises(UserError):
            write_grammar(StructuredOutputsParams(json=value))


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "^" * (2**16 + 1)},
        {"grammar": "root ::= " + " " * 2**16},
        {"whitespace_pattern": "a" * (2**16 + 1), "json": {}},
        {"choice": ["a", "b" * (2**16 + 1)]},
        {"json": " " * (MAX_GRAMMAR_CHARACTERS + 1)},
        {"json": {"description": "x" * MAX_GRAMMAR_CHARACTERS}},
        {"structural_tag": " " * (MAX_GRAMMAR_CHARACTERS + 1)},
    ],
)
def test_lengths_are_checked_before_anything_reads(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.structured_output import grammar

    for name in ("without_anchors", "to_lark", "parse_schema", "normalise"):
        monkeypatch.setattr(grammar, name, lambda *_, **__: pytest.fail("read"))
    with pytest.raises(UserError, match="characters, more than"):
        write_grammar(StructuredOutputsParams(**fields))


@pytest.mark.parametrize(
    "form",
    [
        {"type": "const_string", "value": "x" * 70000},
        {"type": "regex", "pattern": "x" * 70000},
        {"type": "tag", "begin": "x" * 70000, "content": {"type": "any_text"}, "end": "y"},
        {"type": "tag", "begin": "x", "content": {"type": "any_text"}, "end": ["y", "z" * 70000]},
    ],
)
def test_literals_of_tags_are_bounded(form: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="70000 characters"):
        write_grammar(StructuredOutputsParams(structural_tag={"format": form}))


def test_random_words_in_any_order_of_keywords() -> None:
    """The keys of a text stand in the order of `properties`, wherever other keywords stand."""
    for seed in range(20):
        keywords = [
            ("properties", {"b": INTEGER, "a": TEXT}),
            ("required", ["a", "b"]),
            ("additionalProperties", False),
            ("type", "object"),
            ("maxProperties", 2),
        ]
        random.Random(seed).shuffle(keywords)
        follows(dict(keywords), ['{"b":1,"a":"x"}'], ['{"a":"x","b":1}', '{"b":1}', '{"b":1,"a":"x","c":2}'])
