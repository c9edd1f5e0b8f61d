"""`allOf`, `anyOf`, `oneOf` and `$ref` together with numbers of more than 53 bits, as generators write."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from quire.errors import UserError
from tests.long import all_but_long
from tests.structured_output.bytes_matcher import schema_matcher, takes

I64: dict[str, Any] = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
U64: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}
DOUBLE: dict[str, Any] = {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}
NULL, TEXT = {"type": "null"}, {"type": "string"}
PATTERNED = {"patternProperties": {"^[bc]$": {"minimum": 2**60}}, "additionalProperties": False}
REF = {"$ref": "#/$defs/T"}
MOST, ABOVE = str(2**64 - 1), str(2**64)
SIGNED, ABOVE_SIGNED = str(2**63 - 1), str(2**63)


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "target", "taken", "refused"),
    [
        ({"allOf": [REF], "description": "d", "default": 3}, U64, MOST, ABOVE),
        (REF | {"title": "t", "examples": [2], "deprecated": True}, U64, MOST, ABOVE),
        ({"type": "integer", "allOf": [REF]}, U64, MOST, ABOVE),
        ({"type": "integer"} | REF, DOUBLE, "1", "1.5"),
        ({"type": "object"} | REF, closed(x=U64), '{"x":1}', '{"x":-1}'),
        ({"anyOf": [REF, NULL], "default": None}, I64, SIGNED, ABOVE_SIGNED),
        ({"oneOf": [REF, NULL]}, I64, "null", ABOVE_SIGNED),
        ({"oneOf": [REF, {"type": "string"}]}, I64, '"a"', ABOVE_SIGNED),
        ({"oneOf": [REF, NULL]}, DOUBLE, "-1.5", '"a"'),
        ({"type": "integer", "oneOf": [REF, NULL]}, I64, SIGNED, "null"),
        ({"allOf": [REF, {"maximum": 2**60}]}, U64, str(2**60), str(2**60 + 1)),
        (REF | {"maximum": 10}, U64, "10", "11"),
        (REF | {"enum": [1, -1, "a", 2**62]}, U64, str(2**62), "-1"),
        ({"type": "integer", "enum": [2**60, 1]}, True, str(2**60), str(2**60 - 1)),
        ({"oneOf": [{"type": "string", "enum": ["A"]}, REF]}, closed(V=U64), '{"V":7}', '"B"'),
        ({"oneOf": [REF, closed(W=I64)]}, closed(V=U64), '{"W":-7}', '{"V":-7}'),
        (
            {"oneOf": [REF, closed(k={"const": "b"}, x=I64)]},
            closed(k={"const": "a"}, x=U64),
            '{"k":"b","x":-5}',
            '{"k":"a","x":-5}',
        ),
        (
            {"allOf": [REF, {"properties": {"b": {"type": "string"}}, "required": ["b"]}]},
            {"type": "object", "properties": {"a": U64}, "required": ["a"]},
            '{"a":1,"b":"x"}',
            '{"a":1,"b":2}',
        ),
        (
            {"type": "object", "properties": {"x": U64, "y": U64}, "anyOf": [{"required": ["x"]}, {"required": ["y"]}]},
            True,
            '{"y":1}',
            "{}",
        ),
        (REF | {"minItems": 2, "items": {"maximum": 9}}, {"type": "array", "items": U64}, "[9,1]", "[9,10]"),
        (REF | {"prefixItems": [{"type": "string"}]}, {"items": {"anyOf": [U64, TEXT]}}, '["a",1]', "[1]"),
        ({"type": "object", "patternProperties": {".*": REF}}, I64, '{"x":1,"y":-1}', f'{{"x":{ABOVE_SIGNED}}}'),
        (closed() | {"patternProperties": {"^x": REF}}, U64, '{"x":1}', '{"y":1}'),
        (
            closed(a=U64) | {"patternProperties": {"^x-": {"type": "string"}}},
            True,
            '{"a":1,"x-1":"s","x-2":"t"}',
            '{"a":1,"x-1":1}',
        ),
    ],
)  # fmt: skip
def test_what_generators_write(schema: Any, target: Any, taken: str, refused: str) -> None:
    matcher = schema_matcher(closed(a=schema) | {"$defs": {"T": target}})
    assert takes(matcher, f'{{"a":{taken}}}')
    assert not takes(matcher, f'{{"a":{refused}}}')


def test_a_recursive_schema_is_joined_once() -> None:
    tree = {"type": "object", "properties": {"n": U64, "next": REF}, "required": ["n"], "additionalProperties": False}
    smaller = {"properties": {"n": {"maximum": 5}, "next": {"$ref": "#/$defs/S"}}}
    matcher = schema_matcher(
        {"$ref": "#/$defs/T", "allOf": [{"$ref": "#/$defs/S"}], "$defs": {"T": tree, "S": smaller}}
    )
    assert takes(matcher, '{"n":1,"next":{"n":5,"next":{"n":0}}}')
    assert not takes(matcher, '{"n":1,"next":{"n":6}}')


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"oneOf": [U64, I64]}, "oneOf is not supported"),
        ({"oneOf": [U64, {"type": "number"}]}, "oneOf is not supported"),
        ({"oneOf": [closed(a=U64), {"type": "object"}]}, "oneOf is not supported"),
        (U64 | {"allOf": [{"multipleOf": 3}]}, "multipleOf is not supported"),
        ({"properties": {"a": U64}, "patternProperties": {"^b": True}}, "patternProperties beside"),
        ({"allOf": [closed(a=U64), {"patternProperties": {"^b": True}}]}, "patternProperties is not supported"),
        ({"allOf": [{"anyOf": [closed(**{f"{s}{i}": U64}) for i in range(60)]} for s in "ab"]}, "in as many ways"),
        ({"oneOf": [closed(a={"const": i}, b=U64) for i in range(800)]}, "of as many parts"),
    ],
)  # fmt: skip
def test_refused(schema: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        schema_matcher(closed(a=schema))


def test_a_branch_that_nothing_follows_is_left_out() -> None:
    matcher = schema_matcher({"type": "array", "items": U64 | {"anyOf": [{"type": "string"}, {"maximum": 3}]}})
    assert takes(matcher, "[3,0]")
    assert not takes(matcher, "[4]")


@pytest.mark.parametrize("parts", [[{"const": 2**62}, {"maximum": 2}], [I64, {"minimum": 2**62}, {"maximum": 5}]])
def test_a_property_that_no_number_follows_cannot_begin(parts: list[Any]) -> None:
    schema = {"type": "object", "properties": {"a": {"allOf": parts}, "b": U64}, "additionalProperties": False}
    matcher = schema_matcher(schema)
    assert takes(matcher, '{"b":1}')
    assert not all(matcher.consume_token(byte) for byte in b'{"a')


def random_schema(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(12 if depth else 6)
    if kind < 4:
        return rng.choice(
            [U64, I64, DOUBLE, {"type": "integer"}, {"maximum": 2}, {"minimum": 2**60}, {"enum": [1, "a"]}]
        )
    if kind < 6:
        return rng.choice(
            [NULL, {"type": "string", "maxLength": 2}, REF, {"const": 2**62}, {"type": ["integer", "null"]}]
        )
    parts = [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    if kind < 9:
        return {rng.choice(["allOf", "anyOf", "oneOf"]): parts} | (
            rng.choice([REF, {"maximum": 5}, {"type": "integer"}, {}])
        )
    if kind < 10:
        return {"items": parts[0], "prefixItems": parts[1:]} | rng.choice([{}, {"minItems": 2}, {"maxItems": 2}, REF])
    found = {"properties": dict(zip("abc", parts, strict=False)), "required": rng.sample("abc", rng.randint(0, 2))}
    return found | rng.choice(
        [{}, {"type": "object"}, {"additionalProperties": False}, {"anyOf": [REF, {"minimum": 0}]}]
    )


def random_value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(8 if depth else 6)
    if kind < 6:
        return rng.choice(
            [0, 1, 5, -1, 2**60, 2**62, 2**63, 2**63 - 1, 2**64, 2**64 - 1, 1.5, -1e300, "a", "abcd", None]
        )
    if kind == 6:
        return [random_value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return {name: random_value(rng, depth - 1) for name in "abc" if rng.random() < 0.6}


@pytest.mark.parametrize("first_seed", all_but_long([0, 500, 1000], [0]))
def test_no_text_is_taken_that_does_not_follow(first_seed: int) -> None:
    """Against another library, which joins nothing; a scalar that follows is taken, too."""
    num_followed = num_taken = 0
    for seed in range(first_seed, first_seed + 500):
        rng = random.Random(seed)
        schema = random_schema(rng, 2)
        document = {"$schema": "https://json-schema.org/draft/2020-12/schema", "allOf": [schema]}
        document |= {"$defs": {"T": random_schema(rng, 1) if rng.random() < 0.7 else U64}}
        if "#/$defs/T" in json.dumps(document["$defs"]):
            continue
        try:
            matcher = schema_matcher(document)
        except (UserError, AssertionError):
            continue
        num_followed += 1
        validator = jsonschema.Draft202012Validator(document)
        for _ in range(12):
            value = random_value(rng, 2)
            is_taken, follows = takes(matcher, json.dumps(value, separators=(",", ":"))), validator.is_valid(value)
            num_taken += is_taken
            assert follows or not is_taken, (seed, document, value)
            assert is_taken or not follows or isinstance(value, list | dict | float), (seed, document, value)
    assert num_followed > 100
    assert num_taken > 160


def random_option(rng: random.Random) -> dict[str, Any]:
    """A part of a `oneOf` as generators write it, and as they do not."""
    kind = rng.choice(["object", "object", "object", "string", "integer", None])
    found: dict[str, Any] = {} if kind is None else {"type": rng.choice([kind, kind, kind, [kind, "null"]])}
    for name in rng.sample(["k", "v", "w"], rng.randint(0, 3)):
        constant = rng.choice([{"const": rng.choice("ab")}, {"enum": [*"ac"]}, {"type": "integer"}, {}])
        found.setdefault("properties", {})[name] = constant
        if rng.random() < 0.7:
            found.setdefault("required", []).append(name)
    if rng.random() < 0.4:
        found["additionalProperties"] = False
    return found


def random_one_of(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    options = [random_option(rng) for _ in range(rng.randint(2, 4))]
    if rng.random() < 0.3:
        names = {f"t{number}": option for number, option in enumerate(options)}
        return {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in names], "$defs": names}
    return {"oneOf": options}


VALUES: list[Any] = [
    None, 1, "a", [], {}, *({"k": each} for each in (*"abc", 1)), *({"v": each} for each in (*"abc", 1)),
    *({"k": k, "v": v} for k in (*"abc", 1) for v in (*"ab", 1)), {"w": 1}, {"k": "a", "w": "a"}, {"x": 1},
    {"k": "a", "v": "a", "w": "a"}, {"k": "b", "v": 1, "w": "c"},
]  # fmt: skip


def test_no_value_is_taken_that_follows_two_parts_of_one_of() -> None:
    num_followed = num_taken = 0
    for seed in range(1000):
        schema = random_one_of(seed)
        try:
            matcher = schema_matcher(schema)
        except (UserError, AssertionError):
            continue  # refused by the project, or by the library
        num_followed += 1
        validator = jsonschema.Draft202012Validator(schema)
        for value in VALUES:
            if takes(matcher, json.dumps(value, separators=(",", ":"))):
                num_taken += 1
                assert validator.is_valid(value), (schema, value)
    assert num_followed > 150
    assert num_taken > 1000


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [NULL, {"$ref": "#"}], "minimum": 2**60},
        {"allOf": [{"anyOf": [REF, {"$ref": "#"}]}, {"minimum": 2**60}], "$defs": {"T": {"minimum": 2**61}}},
        {"anyOf": [NULL, {"$ref": "#/$defs/T"}], "$defs": {"T": {"minimum": 2**60, "anyOf": [NULL, REF]}}},
    ],
)
def test_references_that_lead_back_to_themselves_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="leads back to itself"):
        schema_matcher(schema)
