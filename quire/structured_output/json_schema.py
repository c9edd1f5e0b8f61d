"""Normal form of JSON schemas, which llguidance follows exactly. `normalise` resolves references, drops keywords
without effect, rewrites what llguidance gets wrong, and refuses the rest with keyword and place. The form has few
keywords, $ref to `#/$defs/...`, and `$digits` (schema_numbers.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from quire.structured_output import patterns
from quire.structured_output.productive import without_endless
from quire.structured_output.schema_numbers import (
    DIGITS,
    KEYWORDS,
    SchemaNumbers,
    Written,
    check_merges,
    constant,
    is_number,
)
from quire.structured_output.schema_objects import ObjectKeywords, all_of
from quire.structured_output.schema_place import SchemaPlace
from quire.structured_output.schema_references import References

MAX_DEPTH = 120
"""Deepest nesting of a schema. llguidance reads 128 levels; the form may have a few more."""
MAX_WORDS_TIMES_LENGTH = 200_000
"""Limit of words times maxLength for a pattern such as `(\\S+\\s+){0,99}`, whose masks take long."""
MAX_LITERAL = 2**16
MAX_COUNT = 2**31
"""Bound of counts that no text reaches."""
TYPES = ("null", "boolean", "number", "string", "array", "object")
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Formats followed. Others are annotations, as the specification says of unknown ones."""
_DAY = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|"
    "1[0-9]|2[0-8]))|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
DATES = {"date": f"^{_DAY}$", "date-time": f"^{_DAY}[tT]"}
"""Format -> pattern for valid days."""
OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": KEYWORDS,
    "array": (
        "items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains",
        "maxContains", "unevaluatedItems",
    ),
    "object": (
        "properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties",
        "propertyNames", "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties",
    ),
}  # fmt: skip
IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef", "const", "enum")
LATER = {
    "if": 7, "then": 7, "else": 7, "dependentRequired": 2019, "dependentSchemas": 2019, "unevaluatedItems": 2019,
    "unevaluatedProperties": 2019,
    "minContains": 2019, "maxContains": 2019, "prefixItems": 2020, "$dynamicRef": 2020, "$recursiveRef": 2019,
}  # fmt: skip
"""Keyword -> first draft that has it. Schemas that name an older draft do not know it."""


@dataclass
class NormalSchema:
    """JSON schema in normal form, to write as a grammar. definitions: schemas by name under `#/$defs/`. has_digits:
    some part is `$digits`."""

    root: Any
    definitions: dict[str, Any] = field(default_factory=dict)
    has_digits: bool = False
    has_patterns: bool = False
    """Patterns and `additionalProperties` match names of properties side by side."""

    def document(self) -> dict[str, Any]:
        root = self.root if isinstance(self.root, dict) else {"not": {}} if self.root is False else {}
        return {**root, "$defs": self.definitions} if self.definitions else root


def parse_schema(text: str) -> Any:
    """Value of a JSON text, with its numbers' spelling. Raises ValueError for invalid JSON."""
    found = json.loads(text, parse_float=Written.of, parse_constant=_refuse_constant)
    level = [found]
    for _ in range(MAX_DEPTH):
        level = [part for each in level for part in _inside(each) if isinstance(part, dict | list)]
        if not level:
            return found
    raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def normalise(schema: Any, budget: patterns.Budget, *, closed: bool = False) -> NormalSchema:
    """Normal form of a schema from `parse_schema`. budget: for all schemas of one text. closed: objects with named
    properties have no others by default. Raises ValueError with one line."""
    return Normaliser(schema, budget, closed).normalize()


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


class Normaliser:
    def __init__(self, root: Any, budget: patterns.Budget, closed: bool) -> None:
        self._root = root
        self._closed = closed
        self._references = References(root)
        self._names: dict[int, str] = {}
        self._todo: list[tuple[str, Any, SchemaPlace]] = []
        self._found = NormalSchema(root)
        self._numbers: list[SchemaNumbers] = []
        self._merges = False
        """Several schemas apply to one value somewhere."""
        self._budget = budget
        self._matchers: dict[str, patterns.PatternMatcher] = {}

    def normalize(self) -> NormalSchema:
        found = self._found
        found.root = self.schema(self._root, SchemaPlace(None, "#"))
        while self._todo:
            name, target, place = self._todo.pop()
            found.definitions[name] = self.schema(target, place)
        if self._merges or found.has_patterns:
            check_merges(self._numbers)
        without_endless(found)
        return found

    def schema(self, schema: Any, place: SchemaPlace) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise place.error("a schema must be an object, true or false")
        draft = self._references.draft_of(schema)
        given = {
            name: value
            for name, value in schema.items()
            if (value is not None or name == "const") and LATER.get(name, 0) <= draft
        }
        if draft <= 7 and "$ref" in given:
            given = {"$ref": given["$ref"]}  # the drafts say that its siblings are ignored
        return self._normal(schema, given, place)

    def _normal(self, schema: dict[str, Any], given: dict[str, Any], place: SchemaPlace) -> Any:
        types = self._without(given, _types(given, place), place)
        if types is not None and not types:
            return False
        wanted = set(TYPES if types is None else types)
        if "integer" in wanted:
            wanted.add("number")
        for kind, names in OF_TYPE.items():
            if kind not in wanted:
                given = {name: value for name, value in given.items() if name not in names}
        before, after = self._in_place(schema, given, types, place)
        if before is None:
            return False
        simple: dict[str, Any] = {}
        if "string" in wanted:
            simple |= self._string(given, place)
        if "array" in wanted:
            simple |= self._array(given, place)
        if "object" in wanted:
            simple |= ObjectKeywords(self, given, place, closed=self._closed).normal()
        if simple.pop("$unsatisfiable", None) is not None:
            types = [kind for kind in types or TYPES if kind != "object"]
        return self._joined(before, simple, after, types, given, place)

    def _joined(
        self,
        before: list[tuple[str, Any]],
        simple: dict[str, Any],
        after: list[tuple[str, Any]],
        types: list[str] | None,
        given: dict[str, Any],
        place: SchemaPlace,
    ) -> Any:
        if types is not None and not types:
            return False
        has_values = "const" in given or "enum" in given  # which were chosen by the keywords of numbers
        numbers: Any = True
        if not has_values and any(name in given for name in KEYWORDS):
            kinds = ["number"] if types is None else [kind for kind in types if kind in ("number", "integer")]
            if kinds:
                try:
                    said = SchemaNumbers.of(given, is_integer=kinds[0] == "integer")
                    numbers = said.schema()
                except ValueError as error:
                    raise place.error(str(error)) from None
                self._numbers.append(said)
                others = [kind for kind in types or TYPES if kind not in ("number", "integer")]
                if not isinstance(numbers, dict) or DIGITS in numbers:
                    self._found.has_digits |= isinstance(numbers, dict)
                    options = [] if numbers is False else [numbers]
                    options += [{"type": others, **simple}] if others else []
                    return _all([*_each(before), _any(options), *_each(after)])
                simple |= {name: value for name, value in numbers.items() if name != "type"}
                if types is None and numbers["type"] == "integer":
                    types = ["integer", *others]
        if types is not None:
            simple["type"] = types[0] if len(types) == 1 else types
        self._merges |= len(before) + len(after) + bool(simple) > 1
        if simple and len({*dict(before), *dict(after)}) == len(before) + len(after):
            return {**dict(before), **simple, **dict(after)}
        return _all([*_each(before), simple or True, *_each(after)])

    def _in_place(
        self, schema: dict[str, Any], given: dict[str, Any], types: list[str] | None, place: SchemaPlace
    ) -> tuple[list[tuple[str, Any]] | None, list[tuple[str, Any]]]:
        """Keywords for whole schemas, (before, after). None: nothing satisfies them."""
        found: tuple[list[tuple[str, Any]], list[tuple[str, Any]]] = ([], [])
        side = 0
        for name, value in given.items():
            side = side or int(name in ("properties", "additionalProperties"))
            if name not in IN_PLACE:
                continue
            here = place.at(name)
            if name in ("const", "enum"):
                normal = self._values(value if name == "enum" else [value], given, types, here)
                pair = normal if isinstance(normal, bool) else next(iter(normal.items()))
            elif name in ("allOf", "anyOf", "oneOf"):
                pair = self._several(name, value, here)
            else:
                pair = self._reference(schema, name, here)
            if pair is False:
                return None, []
            if pair is not True:
                found[side].append(pair)
        return found

    def _reference(self, schema: dict[str, Any], name: str, place: SchemaPlace) -> tuple[str, Any] | bool:
        try:
            target = self._references.target(schema, name)
        except ValueError as error:
            raise place.error(str(error)) from None
        if isinstance(target, bool):
            return target
        if not isinstance(target, dict):
            raise place.error("what it refers to is no schema")
        if id(target) not in self._names:
            self._names[id(target)] = f"d{len(self._names)}"
            self._todo.append((self._names[id(target)], target, place.target()))
        return "$ref", f"#/$defs/{self._names[id(target)]}"

    def _several(self, name: str, value: Any, place: SchemaPlace) -> tuple[str, Any] | bool:
        if not isinstance(value, list) or not value:
            raise place.error("must be a list of schemas")
        parts = [self.schema(each, place.at(index)) for index, each in enumerate(value)]
        if name == "allOf":
            if any(part is False for part in parts):
                return False
            parts = [part for part in parts if part is not True and part != {}]
            self._merges |= len(parts) > 1
            return (name, parts) if parts else True
        if name == "anyOf" and any(part is True or part == {} for part in parts):
            return True
        parts = [part for part in parts if part is not False]
        if not parts:
            return False
        if len(parts) == 1:
            return True if parts[0] is True or parts[0] == {} else ("allOf", parts)
        return name, parts

    def _without(self, given: dict[str, Any], types: list[str] | None, place: SchemaPlace) -> list[str] | None:
        if "if" in given and ("then" in given or "else" in given):
            condition = self.schema(given["if"], place.at("if"))
            if condition not in (True, False, {}):
                branches = [self.schema(given.get(name, True), place.at(name)) for name in ("then", "else")]
                if not all(branch is True or branch == {} for branch in branches):
                    raise place.at("if").error("conditions are not supported")
            else:
                branch = given.get("else" if condition is False else "then", True)
                others = given.get("allOf", [])
                given["allOf"] = [*others, branch] if isinstance(others, list) else others
        if "not" not in given:
            return types
        excluded = self.schema(given["not"], place.at("not"))
        if excluded is False:
            return types
        if excluded is True or excluded == {}:
            return []
        if set(excluded) != {"type"}:
            raise place.at("not").error("is supported for types only")
        kinds = excluded["type"] if isinstance(excluded["type"], list) else [excluded["type"]]
        if "integer" in kinds:
            if types is None or "number" in types:
                raise place.at("not").error("cannot leave out the integers among the numbers")
        elif "number" in kinds:
            kinds = [*kinds, "integer"]
        return [kind for kind in types or TYPES if kind not in kinds]

    def _values(self, values: Any, given: dict[str, Any], types: list[str] | None, place: SchemaPlace) -> Any:
        if not isinstance(values, list):
            raise place.error("must be a list")
        plain, written = [], []
        for value in values:
            if types is not None and not _is_of(value, types):
                continue
            try:
                if is_number(value):
                    kind = SchemaNumbers.of(given, is_integer=types is not None and "number" not in types)
                    if not kind.holds(value):
                        continue
                normal = self._constant(value)
            except ValueError as error:
                raise place.error(str(error)) from None
            if isinstance(normal, _Schema):
                written.append(normal.value)
            else:
                plain.append(normal)
        if written:
            self._found.has_digits = True
            return {"anyOf": [*written, *([{"enum": plain}] if plain else [])]}
        return {"enum": plain} if plain else False

    def _constant(self, value: Any) -> Any:
        """Value, or a `_Schema` if llguidance would change numbers in it. Raises ValueError."""
        if isinstance(value, str):
            if len(value) > MAX_LITERAL:
                raise ValueError(f"has a text of {len(value)} characters, more than {MAX_LITERAL}")
            return value
        if is_number(value):
            found = constant(value)
            return _Schema(found) if isinstance(found, dict) else found
        if isinstance(value, list):
            items = [self._constant(each) for each in value]
            if not any(isinstance(each, _Schema) for each in items):
                return items
            count = len(items)
            return _Schema(
                {"type": "array", "prefixItems": [*map(_as_schema, items)], "items": False}
                | {"minItems": count, "maxItems": count}
            )
        if isinstance(value, dict):
            named = {name: self._constant(each) for name, each in value.items()}
            if not any(isinstance(each, _Schema) for each in named.values()):
                return named
            properties = {name: _as_schema(each) for name, each in named.items()}
            return _Schema(
                {"type": "object", "properties": properties, "required": [*named], "additionalProperties": False}
            )
        return value

    def _string(self, given: dict[str, Any], place: SchemaPlace) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if low := self.count(given, "minLength", place):
            found["minLength"] = low
        if (high := self.count(given, "maxLength", place)) is not None:
            found["maxLength"] = high
        if given.get("format") in FORMATS:
            found["format"] = given["format"]
        if "pattern" in given:
            found["pattern"] = self.pattern(given["pattern"], place.at("pattern"), high)
        elif found.get("format") in DATES:
            found["pattern"] = DATES[found["format"]]
        return found

    def pattern(self, pattern: Any, place: SchemaPlace, max_length: int | None = None) -> str:
        if not isinstance(pattern, str):
            raise place.error("must be a string")
        try:
            node = patterns.parse(pattern)
        except patterns.UnknownSyntaxError:
            return pattern
        except ValueError as error:
            raise place.error(str(error)) from None
        if max_length is not None and patterns.num_words(node) * max_length > MAX_WORDS_TIMES_LENGTH:
            raise place.error(f"counts too many words for a maxLength of {max_length}: each takes long to check")
        return patterns.written(node)

    def _array(self, given: dict[str, Any], place: SchemaPlace) -> dict[str, Any]:
        found: dict[str, Any] = {}
        low, high = self.count(given, "minItems", place) or 0, self.count(given, "maxItems", place)
        prefix, rest = given.get("prefixItems"), "items"
        if isinstance(given.get("items"), list):
            prefix, rest = given["items"], "additionalItems"
        if prefix is not None and not isinstance(prefix, list):
            raise place.at("prefixItems").error("must be a list of schemas")
        if prefix:
            found["prefixItems"] = [self.schema(each, place.at("items").at(i)) for i, each in enumerate(prefix)]
        if rest not in given and "unevaluatedItems" in given:
            rest = "unevaluatedItems"
        if rest in given and (items := self.schema(given[rest], place.at(rest))) not in (True, {}):
            if rest == "unevaluatedItems" and any(name in given for name in (*IN_PLACE, "contains")):
                raise place.at(rest).error("is not supported beside other schemas")
            found["items"] = items
        if "contains" in given:
            least = self.count(given, "minContains", place)
            most = self.count(given, "maxContains", place)
            contained = self.schema(given["contains"], place.at("contains"))
            if contained is True or contained == {}:
                low = max(low, 1 if least is None else least)
                high = high if most is None else most if high is None else min(high, most)
            elif least != 0 or most is not None:
                raise place.at("contains").error("is not supported")
        if found.get("items") is False:
            high = min(len(prefix or ()), MAX_COUNT if high is None else high)
        if given.get("uniqueItems") is True and (high is None or high > 1):
            raise place.at("uniqueItems").error("is not supported")
        found |= {"minItems": low} if low else {}
        return found if high is None else found | {"maxItems": high}

    def count(self, given: dict[str, Any], name: str, place: SchemaPlace) -> int | None:
        """A number of characters, items or properties; None: no bound, or one that no text reaches."""
        value = given.get(name)
        if value is None:
            return None
        if not is_number(value) or value != value or value < 0 or value != value // 1:
            raise place.at(name).error("must be an integer that is not negative")
        if value >= MAX_COUNT:
            if name.startswith("min"):
                raise place.at(name).error("is more than any text has")
            return None
        return int(value)

    def shared(self, schema: Any) -> Any:
        """Normalised schema for several places: a $ref to it if it has nested parts."""
        if not isinstance(schema, dict) or not any(isinstance(part, dict | list) for part in schema.values()):
            return schema
        name = f"s{len(self._found.definitions)}_{len(self._names)}"
        self._found.definitions[name] = schema
        return {"$ref": f"#/$defs/{name}"}

    def note_patterns(self) -> None:
        self._found.has_patterns = True

    def matcher(self, pattern: str, node: patterns.Node) -> patterns.PatternMatcher:
        """Matcher of a pattern, made once. Raises ValueError if the pattern is too large."""
        if pattern not in self._matchers:
            self._matchers[pattern] = patterns.PatternMatcher(node, self._budget)
        return self._matchers[pattern]

    def languages(self, limit: int, max_length: int) -> patterns.Languages:
        return patterns.Languages(limit, max_length, self._budget)


@dataclass
class _Schema:
    value: Any


def _as_schema(value: Any) -> Any:
    return value.value if isinstance(value, _Schema) else {"const": value}


def _each(pairs: Iterable[tuple[str, Any]]) -> list[Any]:
    return [{name: value} for name, value in pairs]


def _any(options: list[Any]) -> Any:
    return False if not options else options[0] if len(options) == 1 else {"anyOf": options}


def _all(parts: list[Any]) -> Any:
    found: Any = True
    for part in parts:
        found = all_of(found, part)
    return found


def _types(given: dict[str, Any], place: SchemaPlace) -> list[str] | None:
    """Types of a schema; None: all. Upper case, which some generators write, is accepted."""
    value = given.get("type")
    if value is None:
        return None
    found: list[str] = []
    for each in value if isinstance(value, list) else [value]:
        name = each.lower() if isinstance(each, str) else "null" if each is None else each
        if name not in (*TYPES, "integer"):
            raise place.at("type").error(f"there is no type {each!r:.100}")
        if name not in found:
            found.append(name)
    if "number" in found:
        found = [name for name in found if name != "integer"]
    if not found:
        raise place.at("type").error("must name a type")
    return found


def _is_of(value: Any, types: list[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    if is_number(value):
        return "number" in types or ("integer" in types and (isinstance(value, int) or value.is_integer()))
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return names[type(value)] in types
