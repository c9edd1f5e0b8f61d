"""Object keywords of a JSON schema."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from quire.structured_output import patterns
from quire.structured_output.schema_place import SchemaPlace

if TYPE_CHECKING:
    from quire.structured_output.json_schema import Normaliser

PROBES = ("a", "Z", "_", "0", "-", " ", "é", "~", "name", "x-9", "A_b", "zzzzzzzzzzzzzzzz", "$ref", "a.b", "/a/b")
"""Sample names that show whether patterns leave any free."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class ObjectKeywords:
    """Keywords of objects in a schema. `walk` normalises their parts."""

    def __init__(self, walk: Normaliser, given: dict[str, Any], place: SchemaPlace, *, closed: bool) -> None:
        self._walk = walk
        self._given = given
        self._place = place
        self._properties = self._named("properties")
        self._patterns: dict[str, Any] = {}
        self._nodes: dict[str, patterns.Node | None] = {}
        for pattern, schema in self._named("patternProperties").items():
            text = walk.pattern(pattern, place.at("patternProperties"))
            self._patterns[text] = all_of(self._patterns.get(text, True), schema)
            self._nodes[text] = _parsed(pattern)
        self._required = dict.fromkeys(self._names("required", given.get("required", [])))
        self._additional = self._additional_schema(closed)
        self._is_for_all = False
        """True if named properties also follow the schema of additional ones."""

    def normal(self) -> dict[str, Any]:
        self._apply_dependencies()
        self._merge_patterns()
        self._free_names()
        self._apply_property_names()
        self._free_names()
        found: dict[str, Any] = {}
        if self._properties:
            found["properties"] = self._properties
        counts = self._counts()
        if counts is None:
            return {"$unsatisfiable": True}
        self._drop_empty_patterns()
        if self._patterns:
            self._walk.note_patterns()
            found["patternProperties"] = self._patterns
        if self._additional is not True and self._additional != {}:
            found["additionalProperties"] = self._additional
        if self._required:
            found["required"] = [*self._required]
        names = (*self._properties, *self._required)
        if self._additional is not False and any(map(_CONTROL.search, names)):
            self._walk.note_patterns()
        return found | counts

    def _named(self, keyword: str) -> dict[str, Any]:
        named = self._given.get(keyword, {})
        place = self._place.at(keyword)
        if not isinstance(named, dict):
            raise place.error("must be an object of schemas")
        return {name: self._walk.schema(True if each is None else each, place.at(name)) for name, each in named.items()}

    def _names(self, keyword: str, value: Any) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self._place.at(keyword).error("must be a list of strings")
        return list(dict.fromkeys(value))

    def _additional_schema(self, closed: bool) -> Any:
        given, place = self._given, self._place
        if "additionalProperties" in given:
            return self._walk.schema(given["additionalProperties"], place.at("additionalProperties"))
        if "unevaluatedProperties" in given:
            found = self._walk.schema(given["unevaluatedProperties"], place.at("unevaluatedProperties"))
            others = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef", "dependentSchemas", "if")
            if found is not True and found != {} and any(name in given for name in others):
                raise place.at("unevaluatedProperties").error("is not supported beside other schemas")
            return found
        return not (closed and "properties" in given)

    def _apply_dependencies(self) -> None:
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            value = self._given.get(keyword, {})
            place = self._place.at(keyword)
            if not isinstance(value, dict):
                raise place.error("must be an object")
            for name, needed in value.items():
                if keyword == "dependentRequired" or (keyword == "dependencies" and isinstance(needed, list)):
                    names = self._names(keyword, needed)
                    if name in self._required:
                        self._required |= dict.fromkeys(names)
                    elif any(each not in self._required and each != name for each in names):
                        raise place.error("is supported for required properties only")
                elif self._walk.schema(needed, place.at(name)) not in (True, {}):
                    raise place.error("schemas are not supported")

    def _apply_property_names(self) -> None:
        if "propertyNames" not in self._given:
            return
        place = self._place.at("propertyNames")
        names = self._walk.schema(self._given["propertyNames"], place)
        if names is True or names == {} or names == {"type": "string"}:
            return
        if names is False:
            self._properties = dict.fromkeys(self._properties, False)
            self._patterns, self._additional = {}, False
            return
        keywords = set(names) - {"type"}
        if names.get("type", "string") != "string" or self._patterns or len(keywords) != 1:
            raise place.error("is supported for one pattern, or a list of names, without patternProperties")
        [keyword] = keywords
        if keyword == "enum":
            named = dict.fromkeys(name for name in names["enum"] if isinstance(name, str))
            self._additional = self._walk.shared(self._additional)
            self._properties = {name: part for name, part in self._properties.items() if name in named} | {
                name: self._additional for name in named if name not in self._properties
            }
        elif keyword == "pattern":
            self._nodes = {names["pattern"]: _parsed(names["pattern"])}
            if self._additional is not False:
                self._patterns = {names["pattern"]: self._additional}
            for name in self._properties:
                if not self._matches(names["pattern"], name):
                    self._properties[name] = False
                elif not self._is_for_all and self._additional not in (True, False, {}):
                    raise place.error("is not supported beside properties and a schema for all others")
        else:
            raise place.error("is supported for one pattern, or a list of names")
        self._additional = False

    def _matches(self, pattern: str, name: str) -> bool:
        node = self._nodes[pattern]
        place = self._place.at("patternProperties")
        if node is None:
            raise place.error(f"{pattern:.60} cannot be compared with the names of properties")
        try:
            return self._walk.matcher(pattern, node).is_found(name)
        except ValueError as error:
            raise place.error(str(error)) from None

    def _merge_patterns(self) -> None:
        for pattern, schema in self._patterns.items():
            names = [name for name in self._properties if self._matches(pattern, name)]
            shared = self._walk.shared(schema) if len(names) > 1 else schema
            for name in names:
                self._properties[name] = all_of(self._properties[name], shared)

    def _free_names(self) -> None:
        """Use the schema of a pattern that matches all names for all names without properties."""
        if len(self._patterns) == 1:
            [(pattern, schema)] = self._patterns.items()
            if patterns.takes_all(self._nodes[pattern]):
                self._patterns, self._additional, self._is_for_all = {}, schema, True

    def _drop_empty_patterns(self) -> None:
        taken = {*self._properties, *self._required}
        size = max(map(len, taken), default=0)
        for pattern in list(self._patterns) if taken else ():
            node = self._nodes[pattern]
            texts = None if node is None else self._walk.languages(len(taken), size).of(node)
            if texts is not None and texts <= taken and self._additional is False:
                del self._patterns[pattern]
        is_open = any(schema is not False for schema in self._patterns.values())
        if self._patterns and not is_open and self._additional is not False:
            free = (name for name in PROBES if name not in taken)
            if not any(not any(self._matches(pattern, name) for pattern in self._patterns) for name in free):
                raise self._place.at("patternProperties").error("leaves no names that can be told from the forbidden")

    def _counts(self) -> dict[str, int] | None:
        """minProperties and maxProperties, where effective; None: no object satisfies them."""
        walk, place = self._walk, self._place
        low = walk.count(self._given, "minProperties", place) or 0
        high = walk.count(self._given, "maxProperties", place)
        is_closed = self._additional is False and not self._patterns
        if is_closed:
            possible = {name: None for name, schema in self._properties.items() if schema is not False}
            if low > len(possible) or any(name not in possible for name in self._required):
                return None
            high = None if high is not None and high >= len(possible) else high
            if low == len(possible):
                self._required |= possible
        if low - len(self._required) > 1 and not is_closed:
            raise place.at("minProperties").error("cannot be followed where names are free, because they may repeat")
        found = {"minProperties": low} if low > len(self._required) else {}
        return found if high is None else found | {"maxProperties": high}


def all_of(first: Any, second: Any) -> Any:
    if first is False or second is False:
        return False
    if first is True or first == {}:
        return second
    if second is True or second == {}:
        return first
    parts = [*(first["allOf"] if set(first) == {"allOf"} else [first])]
    return {"allOf": [*parts, *(second["allOf"] if set(second) == {"allOf"} else [second])]}


def _parsed(pattern: str) -> patterns.Node | None:
    try:
        return patterns.parse(pattern)
    except ValueError:
        return None
