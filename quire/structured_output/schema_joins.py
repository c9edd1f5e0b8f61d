"""Intersections of schemas, which Lark's syntax lacks. `Joiner` makes `allOf`, `anyOf`, `oneOf` or `$ref` beside other
keywords, around `$digits` or references, one schema."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from quire.structured_output.json_schema import OF_TYPE, TYPES, NormalSchema
from quire.structured_output.productive import without_endless
from quire.structured_output.schema_numbers import DIGITS, SchemaNumbers
from quire.structured_output.schema_objects import all_of

IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref", "enum")
MAX_JOINS = 2000
MAX_STEPS = 300_000
"""Limit of properties, items and views in a document's joins."""
MAX_COMPARISONS = 2**20
"""Limit of names, constants and views compared in a document to separate the parts of a `oneOf`."""
MAX_DEPTH = 60
"""Deepest nesting of joins, which follow references."""
MAX_VIEWS = 32
BESIDE = "is not supported beside numbers of more than 53 bits"


def parts_of(node: dict[str, Any]) -> list[Any]:
    found = [node[name] for name in ("additionalProperties", "items") if name in node]
    for name in ("allOf", "anyOf", "oneOf", "prefixItems"):
        found += node.get(name, ())
    for name in ("properties", "patternProperties"):
        found += node.get(name, {}).values()
    return found


@dataclass
class JoinBudget:
    """Work spent on the joins of a document, or of all documents in one text."""

    num_steps: int = 0
    num_compared: int = 0

    def spend(self, count: int) -> None:
        """Count joins. Raises ValueError beyond the limit."""
        self.num_steps += count
        if self.num_steps > MAX_STEPS:
            raise ValueError(f"allOf or oneOf of as many parts {BESIDE}")

    def compare(self, count: int) -> None:
        """Count comparisons. Raises ValueError beyond the limit."""
        self.num_compared += count
        if self.num_compared > MAX_COMPARISONS:
            raise ValueError(f"oneOf of as many parts {BESIDE}")


def tell_apart(schema: NormalSchema, budget: JoinBudget) -> None:
    """Change each `oneOf` with provably disjoint parts into `anyOf`, which llguidance takes."""
    joiner = Joiner(schema, budget)
    todo = [schema.root, *schema.definitions.values()]
    while todo:
        node = todo.pop()
        if not isinstance(node, dict):
            continue
        todo += parts_of(node)
        if "oneOf" in node and "anyOf" not in node:
            try:
                joiner.check_apart(node["oneOf"])
            except ValueError:
                continue
            renamed = {"anyOf" if name == "oneOf" else name: value for name, value in node.items()}
            node.clear()
            node.update(renamed)


class Joiner:
    def __init__(self, schema: NormalSchema, budget: JoinBudget) -> None:
        self._schema = schema
        self.budget = budget
        self._definitions = schema.definitions
        self._is_written: dict[int, tuple[Any, bool]] = {}
        self._flat: dict[int, tuple[Any, Any]] = {}
        """id of a schema -> (the schema, so its id stays unique; its form without joins)."""
        self._names: dict[tuple[str, str], str] = {}
        self._kinds: dict[int, tuple[Any, set[str]]] = {}
        self._depth = 0
        self._constants: dict[int, tuple[Any, set[str] | None]] = {}

    def join_all(self) -> None:
        """Join all schemas. Raises ValueError for what cannot be joined."""
        for name in list(self._definitions):
            self._definitions[name] = self._flattened(self._definitions[name])
        self._schema.root = self._flattened(self._schema.root)
        without_endless(self._schema)

    def is_written(self, node: Any) -> bool:
        """True if llguidance cannot compile a schema alone, because of `$digits` or a reference."""
        if not isinstance(node, dict):
            return False
        known = self._is_written.get(id(node))
        if known is None:
            found = DIGITS in node or "$ref" in node or any(map(self.is_written, parts_of(node)))
            known = self._is_written[id(node)] = (node, found)
        return known[1]

    def _flattened(self, node: Any) -> Any:
        if not isinstance(node, dict) or DIGITS in node or not self.is_written(node):
            return node
        known = self._flat.get(id(node))
        if known is None:
            first, *others = self._conjuncts(node)
            found = self._inside(first)
            for other in others:
                found = self._both(found, other)
            known = self._flat[id(node)] = (node, found)
            self._flat[id(found)] = (found, found)
        return known[1]

    def _conjuncts(self, node: dict[str, Any]) -> list[Any]:
        simple = {name: value for name, value in node.items() if name not in IN_PLACE}
        place = "properties" if "properties" in simple else next(iter(simple), None)
        found: list[Any] = []
        for name, value in node.items():
            if name == place:
                found.append(simple)
            elif name == "allOf":
                found += value
            elif name == "oneOf":
                self.check_apart(value)
                found.append({"anyOf": value})
            elif name in IN_PLACE:
                found.append({name: value})
        return found

    def _inside(self, node: Any) -> Any:
        if not isinstance(node, dict) or set(node) in ({"$ref"}, {"enum"}, {DIGITS}):
            return node
        if set(node) != {"anyOf"} and any(name in node for name in IN_PLACE):
            return self._flattened(node)
        if "anyOf" in node:
            return _any(self._flattened(part) for part in node["anyOf"])
        found = dict(node)
        for name in ("additionalProperties", "items"):
            if name in node:
                found[name] = self._flattened(node[name])
        for name in ("properties", "patternProperties"):
            if name in node:
                found[name] = {key: self._flattened(part) for key, part in node[name].items()}
        if "prefixItems" in node:
            found["prefixItems"] = [self._flattened(part) for part in node["prefixItems"]]
        return found

    def _both(self, first: Any, second: Any) -> Any:
        first, second = self._flattened(first), self._flattened(second)
        if not first or not second or first is True or second is True or first == second:
            return first if first == second else all_of(first, second)
        if not self.is_written(first) and not self.is_written(second):
            return all_of(first, second) if self.kinds(first) & self.kinds(second) else False
        key = (self._identity(first), self._identity(second))
        if key in self._names:
            return {"$ref": f"#/$defs/{self._names[key]}"}
        if len(self._names) >= MAX_JOINS or self._depth >= MAX_DEPTH:
            raise ValueError(f"allOf {BESIDE} in as many ways")
        name = self._names[key] = f"j{len(self._names)}"
        self._depth += 1
        found = self._definitions[name] = self._joined(first, second)
        self._depth -= 1
        return found if found is False or (isinstance(found, dict) and DIGITS in found) else {"$ref": f"#/$defs/{name}"}

    def _identity(self, node: dict[str, Any]) -> str:
        if set(node) == {"$ref"}:
            return str(node["$ref"])
        self._flat.setdefault(id(node), (node, node))
        return str(id(node))

    def _target(self, node: dict[str, Any]) -> Any:
        name = node["$ref"].removeprefix("#/$defs/")
        if name not in self._definitions:  # it is being joined
            raise ValueError(f"a reference that leads back to itself {BESIDE}")
        return self._definitions[name]

    def _joined(self, first: dict[str, Any], second: dict[str, Any]) -> Any:
        if "$ref" in first:
            return self._both(self._target(first), second)
        if "$ref" in second:
            return self._both(first, self._target(second))
        for node, other, is_first in ((first, second, True), (second, first, False)):
            parts = [] if DIGITS in node else self._conjuncts(node)
            if parts not in ([], [node]):
                found: Any = other
                for part in reversed(parts) if is_first else parts:
                    found = self._both(part, found) if is_first else self._both(found, part)
                return found
            if parts and "anyOf" in parts[0]:
                options = parts[0]["anyOf"]
                return _any(self._both(each, other) if is_first else self._both(other, each) for each in options)
        if "enum" in first or "enum" in second:
            node, other = (first, second) if "enum" in first else (second, first)
            return _enum(node["enum"], other)
        return self._of_types(first, second)

    def _of_types(self, first: dict[str, Any], second: dict[str, Any]) -> Any:
        options: list[Any] = []
        for kind in _shared(_types(first), _types(second)):
            if kind in ("number", "integer"):
                numbers, others = (_numbers(each, is_integer=kind == "integer") for each in (first, second))
                options.append(numbers.joined(others).schema())
            elif kind == "object":
                options.append(self._objects(first, second))
            elif kind == "array":
                options.append(self._arrays(first, second))
            else:
                options.append(self._both(_of_kind(first, kind), _of_kind(second, kind)))
        return _any(options)

    def _objects(self, first: dict[str, Any], second: dict[str, Any]) -> Any:
        if "patternProperties" in first or "patternProperties" in second:
            raise ValueError(f"patternProperties {BESIDE}")
        named, others = first.get("properties", {}), second.get("properties", {})
        self.budget.spend(len(named) + len(others))
        free, other_free = first.get("additionalProperties", True), second.get("additionalProperties", True)
        required = [*dict.fromkeys([*first.get("required", ()), *second.get("required", ())])]
        found: dict[str, Any] = {"type": "object", "properties": {}}
        for name in dict.fromkeys([*named, *others]):
            part = self._both(named.get(name, free), others.get(name, other_free))
            if part is False and name in required:
                return False
            found["properties"][name] = part
        found["additionalProperties"] = self._both(free, other_free)
        if found["additionalProperties"] is False and any(name not in found["properties"] for name in required):
            return False
        found |= {"required": required} if required else {}
        return found | _counts(first, second, "Properties")

    def _arrays(self, first: dict[str, Any], second: dict[str, Any]) -> Any:
        prefix, others = first.get("prefixItems", []), second.get("prefixItems", [])
        self.budget.spend(len(prefix) + len(others))
        rest, other_rest = first.get("items", True), second.get("items", True)
        found: dict[str, Any] = {"type": "array", "items": self._both(rest, other_rest)}
        found |= _counts(first, second, "Items")
        if size := max(len(prefix), len(others)):
            found["prefixItems"] = [
                self._both(
                    prefix[index] if index < len(prefix) else rest, others[index] if index < len(others) else other_rest
                )
                for index in range(size)
            ]
        items = [*found.get("prefixItems", ()), found["items"]]
        most = items.index(False) if False in items else None
        return False if found.get("minItems", 0) > min(_or_endless(most), found.get("maxItems", _ENDLESS)) else found

    def check_apart(self, options: list[Any]) -> None:
        """Raises ValueError if a value could satisfy two of the schemas."""
        self.budget.spend(len(options) * len(options))
        views = [self._views(each) for each in options]
        if self._have_no_type_in_common(options) and self._tells_all_apart(views):
            return
        for number, first in enumerate(views):
            for second in views[number + 1 :]:
                if not any(_are_apart(one, other, self) for one in first for other in second):
                    raise ValueError(
                        f"oneOf {BESIDE} unless their types or constants of a property keep its parts apart"
                    )

    def _have_no_type_in_common(self, options: list[Any]) -> bool:
        seen: set[str] = set()
        for each in options:
            found = self.kinds(each) - {"object"}
            if found & seen:
                return False
            seen |= found
        return True

    def _tells_all_apart(self, views: list[list[dict[str, Any]]]) -> bool:
        """True if some property is required in all schemas, with different constants. views: views of each schema."""
        for name in dict.fromkeys(name for view in views[0] for name in view.get("required", ())):
            taken: set[str] = set()
            for each in views:
                self.budget.compare(len(each))
                required = (view["properties"][name] for view in each if self.requires(view, name))
                values = next((found for part in required if (found := self.constants(part))), None)
                if values is None or not taken.isdisjoint(values):
                    break
                taken |= values
            else:
                return True
        return False

    def _views(self, node: Any) -> list[dict[str, Any]]:
        todo: list[Any] = [node]
        found: list[dict[str, Any]] = []
        while todo and len(found) < MAX_VIEWS:
            part = todo.pop()
            if isinstance(part, dict):
                found.append(part)
                todo += part.get("allOf", ())
                todo += [self._target(part)] if "$ref" in part else []
        return found

    def kinds(self, node: Any, depth: int = 0) -> set[str]:
        """Types that values of a schema may have."""
        known = self._kinds.get(id(node))
        if known is not None:
            return known[1]
        found = set(TYPES)
        self.budget.spend(1)
        for view in self._views(node) if depth < MAX_VIEWS else ():
            found &= {"number" if kind == "integer" else kind for kind in _types(view)}
            if "enum" in view:
                found &= {_kind(value) for value in view["enum"]}
            for name in ("anyOf", "oneOf"):
                if name in view:
                    found &= set().union(*(self.kinds(part, depth + 1) for part in view[name]))
        found = set() if node is False else found
        if depth == 0:
            self._kinds[id(node)] = (node, found)
        return found

    def constants(self, node: Any) -> set[str] | None:
        """Values, as texts, of a schema (`enum`, `const`) with a few simple ones; else None."""
        known = self._constants.get(id(node))
        if known is None:
            found = None
            for view in self._views(node):
                if "enum" in view and not any(isinstance(value, dict | list) for value in view["enum"]):
                    found = {_constant_text(value) for value in view["enum"]}
                    break
            known = self._constants[id(node)] = (node, found)
        return known[1]

    def requires(self, node: dict[str, Any], name: str) -> bool:
        if name not in node.get("properties", ()):
            return False
        self.budget.compare(len(node.get("required", ())))
        return name in node.get("required", ())

    def are_disjoint(self, first: set[str], second: set[str]) -> bool:
        self.budget.compare(min(len(first), len(second)))
        return first.isdisjoint(second)


def _are_apart(first: dict[str, Any], second: dict[str, Any], joiner: Joiner) -> bool:
    joiner.budget.compare(1)
    shared = joiner.kinds(first) & joiner.kinds(second)
    if not shared:
        return True
    if "enum" in first and "enum" in second:
        values, others = joiner.constants(first), joiner.constants(second)
        return values is not None and others is not None and joiner.are_disjoint(values, others)
    if shared != {"object"}:
        return False
    for node, other in ((first, second), (second, first)):
        for name in node.get("required", ()):
            joiner.budget.compare(1)
            part = other.get("properties", {}).get(name, None if "patternProperties" in other else _free(other))
            if part is False:
                return True
            values, others = joiner.constants(node.get("properties", {}).get(name)), joiner.constants(part)
            if values and others and joiner.requires(other, name) and joiner.are_disjoint(values, others):
                return True
    return False


def _free(node: dict[str, Any]) -> Any:
    return node.get("additionalProperties", True)


_ENDLESS = 2**62


def _or_endless(value: int | None) -> int:
    return _ENDLESS if value is None else value


def _any(options: Iterable[Any]) -> Any:
    found = [each for each in options if each is not False]
    return False if not found else found[0] if len(found) == 1 else {"anyOf": found}


def _types(node: dict[str, Any]) -> list[str]:
    if DIGITS in node:
        return ["number"]
    found = node.get("type", TYPES)
    return [found] if isinstance(found, str) else list(found)


def _shared(first: list[str], second: list[str]) -> list[str]:
    found = []
    for kind in first:
        if kind in second:
            found.append(kind)
        elif (kind == "integer" and "number" in second) or (kind == "number" and "integer" in second):
            found.append("integer")
    return found


def _of_kind(node: dict[str, Any], kind: str) -> dict[str, Any]:
    return {"type": kind} | {name: node[name] for name in OF_TYPE.get(kind, ()) if name in node}


def _numbers(node: dict[str, Any], *, is_integer: bool) -> SchemaNumbers:
    found = node.get(DIGITS)
    return found if isinstance(found, SchemaNumbers) else SchemaNumbers.of(node, is_integer=is_integer)


def _enum(values: list[Any], other: dict[str, Any]) -> Any:
    if DIGITS in other:
        found = [each for each in values if _kind(each) == "number" and other[DIGITS].holds(each)]
        return {"enum": found} if found else False
    if "enum" in other:
        return all_of({"enum": values}, other)
    kinds = _types(other)
    kept = [each for each in values if _kind(each) in kinds or (_is_integer(each) and "integer" in kinds)]
    if any(isinstance(each, dict | list) for each in kept):
        raise ValueError(f"enum of objects and arrays {BESIDE}")
    numbers = SchemaNumbers.of(other, is_integer=False)
    kept = [each for each in kept if _kind(each) != "number" or numbers.holds(each)]
    if not kept:
        return False
    texts = {name: other[name] for name in OF_TYPE["string"] if name in other}
    return {"allOf": [{"enum": kept}, texts]} if texts else {"enum": kept}


def _is_integer(value: Any) -> bool:
    return _kind(value) == "number" and value == value // 1


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return (
        "string"
        if isinstance(value, str)
        else "array"
        if isinstance(value, list)
        else "object"
        if isinstance(value, dict)
        else "number"
    )


def _constant_text(value: Any) -> str:
    return json.dumps(int(value) if _is_integer(value) else value)


def _counts(first: dict[str, Any], second: dict[str, Any], what: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, chosen in ((f"min{what}", max), (f"max{what}", min)):
        values = [node[name] for node in (first, second) if name in node]
        found |= {name: chosen(values)} if values else {}
    return found
