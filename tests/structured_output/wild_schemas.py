"""Random JSON schemas with every keyword, in any order, as clients rarely write them; and values to try on them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import jsonschema

NAMES = ("a", "b", "ab", "a\t", "ü")
PATTERNS = ("^a$", "^a", "b", "^[ab]{1,2}$", "^b$|^ab$", ".", "^.$")
NUMBERS = (0, 1, -1, 2, 5, 0.5, -0.5, 1.5, 3.25, 10, 2**53, 2**53 + 1, -(2**63), 2**63 - 1, 1e308, 0.001, 0.1, -0.25, 7)
VALUES: tuple[Any, ...] = (
    "a", "b", "ab", "", 0, 1, 2, -1, 0.5, 1.5, True, None, [1], [], {"a": 1}, {}, 2**53 + 1, -(2**63), 1.0, [2**60],
    {"b": 2**61, "a": 1}, "a\x7f", "\u2028", "\r", "2024-02-29", "1.2.3.4",
)  # fmt: skip
STEPS = (1, 2, 3, 0.5, 0.1, 0.01, 0.07, 0.25, 10, 1.5)
EXPRESSIONS = (*PATTERNS, "^[^a]$", r"^\d?$", "^a|b$", "^[!a]*$")
KINDS = ("object", "array", "number", "string", "enum", "combined", "mixed", "reference")
TYPES = ("object", "array", "integer", "string", ["string", "null"], ["integer", "object"])


def wild_document(seed: int) -> dict[str, Any]:
    """A schema with the definitions x and y."""
    rng = random.Random(seed)
    root = _Wild(rng).schema(0)
    root = root if isinstance(root, dict) else {"allOf": [root]}
    return root | {"$defs": {"x": _Wild(rng).schema(2), "y": _Wild(rng).schema(2)}}


def wild_value(rng: random.Random, depth: int = 0) -> Any:
    if depth < 2 and rng.random() < 0.45:
        if rng.random() < 0.6:
            return {name: wild_value(rng, depth + 1) for name in NAMES if rng.random() < 0.4}
        return [wild_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return rng.choice([*VALUES, *NUMBERS])


class _Wild:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.found: dict[str, Any] = {}

    def put(self, share: float, keyword: str, value: Callable[[], Any]) -> None:
        if self.rng.random() < share:
            self.found[keyword] = value()

    def schema(self, depth: int) -> Any:
        rng = self.rng
        if depth > 3 or rng.random() < 0.05:
            return rng.choice([True, False, {}, {"type": "integer"}, {"type": "string"}, {"const": rng.choice(VALUES)}])
        kind = rng.choice(KINDS)
        if rng.random() < 0.7:
            self.found["type"] = kind if kind in ("object", "array", "number", "string") else rng.choice(TYPES)
        for name, put in (("object", self._object), ("array", self._array), ("string", self._string)):
            if kind in (name, "mixed"):
                put(depth)
        if kind in ("number", "mixed"):
            for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
                self.put(0.3, keyword, lambda: rng.choice(NUMBERS))
            self.put(0.2, "multipleOf", lambda: rng.choice(STEPS))
        if kind == "enum":
            self.found["enum"] = rng.sample(VALUES, rng.randint(1, 4))
        if kind in ("combined", "mixed"):
            self._combined(depth)
        if kind == "reference":
            self.found["$ref"] = rng.choice(["#/$defs/x", "#/$defs/y", "#"])
        items = list(self.found.items())
        rng.shuffle(items)
        return dict(items)

    def _part(self, depth: int) -> Any:
        return _Wild(self.rng).schema(depth + 1)

    def _object(self, depth: int) -> None:
        rng = self.rng
        self.put(0.7, "properties", lambda: {name: self._part(depth) for name in rng.sample(NAMES, rng.randint(0, 3))})
        self.put(0.3, "patternProperties", lambda: {name: self._part(depth) for name in rng.sample(PATTERNS, 2)})
        self.put(0.5, "additionalProperties", lambda: rng.choice([False, True, self._part(depth)]))
        self.put(0.4, "required", lambda: rng.sample(NAMES, rng.randint(0, 2)))
        for keyword in ("minProperties", "maxProperties"):
            self.put(0.12, keyword, lambda: rng.randint(0, 3))
        self.put(0.1, "propertyNames", lambda: rng.choice([{"pattern": rng.choice(PATTERNS)}, {"enum": ["a", "b"]}]))
        self.put(0.08, "dependentRequired", lambda: {rng.choice(NAMES): rng.sample(NAMES, 1)})
        self.put(0.08, "unevaluatedProperties", lambda: rng.choice([False, self._part(depth)]))

    def _array(self, depth: int) -> None:
        rng = self.rng
        self.put(0.5, "items", lambda: self._part(depth))
        self.put(0.3, "prefixItems", lambda: [self._part(depth) for _ in range(rng.randint(1, 2))])
        self.put(0.4, "minItems", lambda: rng.randint(0, 2))
        self.put(0.5, "maxItems", lambda: rng.randint(0, 3))
        self.put(0.1, "uniqueItems", lambda: rng.choice([True, False]))
        self.put(0.1, "contains", lambda: self._part(depth))
        self.put(0.1, "minContains", lambda: rng.randint(0, 1))
        self.put(0.08, "unevaluatedItems", lambda: rng.choice([False, self._part(depth)]))

    def _string(self, depth: int) -> None:
        rng = self.rng
        self.put(0.3, "minLength", lambda: rng.randint(0, 2))
        self.put(0.4, "maxLength", lambda: rng.choice([0, 1, 2, 3, 2.0, 2**40]))
        self.put(0.4, "pattern", lambda: rng.choice(EXPRESSIONS))
        self.put(0.2, "format", lambda: rng.choice(["date", "ipv4", "foo", "uuid"]))

    def _combined(self, depth: int) -> None:
        rng = self.rng
        keyword = rng.choice(["allOf", "anyOf", "oneOf", "not", "if"])
        if keyword == "not":
            types = {"type": rng.choice(["null", "string", "integer", "object"])}
            self.found["not"] = rng.choice([types, self._part(depth)])
        elif keyword == "if":
            self.found["if"] = self._part(depth)
            self.put(0.7, "then", lambda: self._part(depth))
            self.put(0.7, "else", lambda: self._part(depth))
        else:
            self.found[keyword] = [self._part(depth) for _ in range(rng.randint(1, 2))]


def validator(schema: Any) -> jsonschema.protocols.Validator:
    """Another library's reading of a schema, with multiples by their digits and not by doubles."""
    return jsonschema.validators.extend(jsonschema.Draft202012Validator, {"multipleOf": _check_multiple})(schema)


def _check_multiple(_: Any, step: Any, value: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    if isinstance(value, int | float) and not isinstance(value, bool) and Fraction(repr(value)) % Fraction(repr(step)):
        yield jsonschema.ValidationError(f"{value} is no multiple of {step}")
