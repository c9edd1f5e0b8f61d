"""Normal JSON schema for llguidance: a schema, or Lark rules around numbers that llguidance would change."""

from __future__ import annotations

import json
import re
from typing import Any

from quire.structured_output import patterns
from quire.structured_output.ebnf import quoted
from quire.structured_output.json_schema import OF_TYPE, TYPES, NormalSchema
from quire.structured_output.schema_joins import JoinBudget, Joiner, parts_of
from quire.structured_output.schema_numbers import DIGITS

ESCAPES = 'nrbtf\\"'
"""Escapes allowed where patterns match names: without `u`, each name has one spelling."""
_CHARACTER = r'[^"\\\x00-\x1f\x7f]|\\["\\bfnrt]|\\u00(?:0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])'


def json_document(schema: NormalSchema, options: dict[str, Any]) -> dict[str, Any]:
    """Schema with its options (`x-guidance`). schema: has no `$digits`, and is changed."""
    if schema.has_patterns or any(map(_needs_plain_names, (schema.root, *schema.definitions.values()))):
        options = options | {"json_allowed_escapes": ESCAPES}
    else:
        for node in (schema.root, *schema.definitions.values()):
            _close(node)
    document = schema.document()
    return document | {"x-guidance": options} if options else document


def _needs_plain_names(start: Any) -> bool:
    """True if free names have a schema, or are counted, in some object with named properties."""
    todo = [start]
    while todo:
        node = todo.pop()
        if not isinstance(node, dict):
            continue
        if "minProperties" in node or "maxProperties" in node:
            return True
        if ("properties" in node or "required" in node) and isinstance(node.get("additionalProperties"), dict):
            return True
        todo += parts_of(node)
    return False


def _close(start: Any) -> None:
    """Describe free names by a pattern that matches all, in objects with named properties."""
    todo = [start]
    while todo:
        node = todo.pop()
        if not isinstance(node, dict):
            continue
        todo += parts_of(node)
        if ("properties" in node or "required" in node) and "additionalProperties" not in node:
            node["patternProperties"] = {"": True}
            node["additionalProperties"] = False


class LarkWriter:
    """Writer of rules for a schema with `$digits`, which is changed. Raises ValueError for what the rules cannot
    express."""

    def __init__(
        self, schema: NormalSchema, options: dict[str, Any], budget: patterns.Budget, joins: JoinBudget
    ) -> None:
        self._schema = schema
        self._options = options
        self._rules: list[str] = []
        self._joiner = Joiner(schema, joins)
        self._joiner.join_all()
        self._names: dict[str, str] = {}
        self._forms: dict[int, str] = {}
        self._budget = budget

    def grammar(self) -> str:
        definitions = {name: f"ref_{name}" for name in self._schema.definitions}
        start = self._form(self._schema.root)
        for name, node in self._schema.definitions.items():
            self._rules.append(f"{definitions[name]}: {self._form(node)}")
        lines = [f"start: {start}", *self._rules]
        if (blanks := self._blanks()) is not None:
            lines += ['%llguidance {"ignore_once": true}', f"%ignore /{slashed(blanks)}/"]
        return "\n".join(lines)

    def _blanks(self) -> str | None:
        if "whitespace_pattern" in self._options:
            return str(self._options["whitespace_pattern"])
        return r"[\x20\x0A\x0D\x09]+" if self._options.get("whitespace_flexible", True) else None

    def _rule(self, body: str, *, is_terminal: bool = False) -> str:
        if body not in self._names:
            name = f"{'T' if is_terminal else 'r'}_{len(self._names)}"
            self._names[body] = name
            self._rules.append(f"{name}: {body}")
        return self._names[body]

    def _form(self, node: Any) -> str:
        if not isinstance(node, dict):
            return self._json(node)
        if id(node) not in self._forms:
            self._forms[id(node)] = self._new_form(node)
        return self._forms[id(node)]

    def _new_form(self, node: dict[str, Any]) -> str:
        if not self._joiner.is_written(node):
            return self._json(node)
        if DIGITS in node:
            numbers = node[DIGITS]
            whole = f"/{numbers.expression()}/"
            if not numbers.is_integer and numbers.num_decimals is not None:
                decimals = f"(?:\\.[0-9]{{1,{numbers.num_decimals}}})?" if numbers.num_decimals else ""
                whole += f" & /-?[0-9]+{decimals}/"
            return self._rule(whole, is_terminal=True)
        keywords = set(node)
        if keywords == {"$ref"}:
            return f"ref_{node['$ref'].removeprefix('#/$defs/')}"
        if keywords == {"anyOf"}:
            return self._rule(" | ".join(self._form(part) for part in node["anyOf"] if part is not False))
        types = node.get("type", TYPES)
        forms = [self._of_type(node, kind) for kind in ([types] if isinstance(types, str) else types)]
        return forms[0] if len(forms) == 1 else self._rule(" | ".join(forms))

    def _json(self, node: Any) -> str:
        document = json_document(NormalSchema(node, has_patterns=_has_patterns(node)), self._options)
        return self._rule(f"%json {json.dumps({'not': {}} if node is False else document)}")

    def _of_type(self, node: dict[str, Any], kind: str) -> str:
        if kind == "object":
            return self._object(node)
        if kind == "array":
            return self._array(node)
        names = OF_TYPE.get("number" if kind == "integer" else kind, ())
        return self._json({"type": kind} | {name: node[name] for name in names if name in node})

    def _object(self, node: dict[str, Any]) -> str:
        additional, required = node.get("additionalProperties", True), dict.fromkeys(node.get("required", ()))
        named = node.get("properties", {})
        named = named | {name: additional for name in required if name not in named}
        items = [
            (self._rule(f'{quoted(key_text(name))} ":" {self._form(part)}'), name in required)
            for name, part in named.items()
            if part is not False
        ]
        if any(part is False and name in required for name, part in named.items()):
            raise ValueError("a required property is one that nothing follows")
        low, high = node.get("minProperties", 0), node.get("maxProperties")
        if (low or high is not None) and not all(is_required for _, is_required in items):
            raise ValueError("minProperties and maxProperties are not supported beside optional properties here")
        low, high = max(low - len(items), 0), None if high is None else high - len(items)
        extra = None
        if "patternProperties" in node and high != 0:
            extra = self._patterned(node["patternProperties"], [*named], additional)
        elif additional is not False and high != 0:
            extra = self._rule(f'{self._free_name([*named])} ":" {self._form(additional)}')
        elif low or (high is not None and high < 0):
            raise ValueError("no object has as many properties")
        return self._rule(f'"{{" {self._members(items, extra, low, high)} "}}"')

    def _patterned(self, found: dict[str, Any], named: list[str], additional: Any) -> str:
        """Member whose name matches a pattern. Raises ValueError if the name could be one of `named`."""
        [pattern, part], *others = found.items()
        if others or additional is not False or _holds_any(pattern, named, self._budget):
            raise ValueError(
                "patternProperties beside numbers of more than 53 bits must be one pattern, which no property has, and "
                "have no additionalProperties beside them"
            )
        name = NormalSchema({"type": "string", "pattern": pattern}, has_patterns=True)
        key = self._rule(f"%json {json.dumps(json_document(name, self._options))}")
        return self._rule(f'{key} ":" {self._form(part)}')

    def _members(self, items: list[tuple[str, bool]], extra: str | None, low: int, high: int | None) -> str:
        behind = alone = '""'
        if extra is not None:
            behind, alone = self._several(extra, low, high)
        for item, is_required in reversed(items):
            if is_required:
                alone = self._rule(f"{item} {behind}")
                behind = self._rule(f'"," {item} {behind}')
            else:
                alone = self._rule(f"{item} {behind} | {alone}")
                behind = self._rule(f'("," {item})? {behind}')
        return alone

    def _several(self, item: str, low: int, high: int | None) -> tuple[str, str]:
        behind = self._rule(f'("," {item}){{{low},{"" if high is None else high}}}')
        rest = "" if high == 1 else f' ("," {item}){{{max(low - 1, 0)},{"" if high is None else high - 1}}}'
        return behind, self._rule(f"{item}{rest}" + ("" if low else ' | ""'))

    def _free_name(self, taken: list[str]) -> str:
        body = f'/"(?:{_CHARACTER})*"/'
        if taken:
            body += f" & ~({' | '.join(quoted(key_text(name)) for name in taken)})"
        return self._rule(body, is_terminal=True)

    def _array(self, node: dict[str, Any]) -> str:
        prefix = list(node.get("prefixItems", ()))
        rest = node.get("items", True)
        low, high = node.get("minItems", 0), node.get("maxItems")
        if False in prefix:
            high = min(prefix.index(False), len(prefix) if high is None else high)
        prefix = prefix[:high]
        if rest is False or high == len(prefix):
            high = len(prefix)
        if high is not None and low > high:
            raise ValueError("no array has as many items")
        behind = alone = '""'
        if high is None or high > len(prefix):
            most = None if high is None else high - len(prefix)
            behind, alone = self._several(self._form(rest), max(low - len(prefix), 0), most)
        for index in reversed(range(len(prefix))):
            item = self._form(prefix[index])
            ending = "" if index < low else ' | ""'
            alone = self._rule(f"{item} {behind}{ending}")
            behind = self._rule(f'"," {item} {behind}{ending}')
        return self._rule(f'"[" {alone} "]"')


def _holds_any(pattern: str, names: list[str], budget: patterns.Budget) -> bool:
    """True if a name matches the pattern, or may. Raises ValueError if the pattern is too large."""
    try:
        matcher = patterns.PatternMatcher(patterns.parse(pattern), budget)
    except patterns.UnknownSyntaxError:
        return bool(names)
    return any(map(matcher.is_found, names))


def _has_patterns(node: Any) -> bool:
    todo = [node]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            if "patternProperties" in part:
                return True
            todo += parts_of(part)
    return False


def key_text(name: str) -> str:
    return json.dumps(name, ensure_ascii=False).replace("\x7f", "\\u007f")


def slashed(pattern: str) -> str:
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", r"\n")
