"""Conversion of tool arguments from plain text or Python literals to JSON, by the tool's schema."""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Mapping
from typing import Any

MAX_LITERAL = 65_536
"""Maximum characters in a Python literal; longer arguments are strings."""
MAX_DEPTH = 32
"""Maximum depth of brackets in a Python literal."""
MAX_SCHEMA_DEPTH = 16
_STRING = re.compile(r"""(\\.|'{3}.*?'{3}|"{3}.*?"{3})|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
"""Python string. Group 1: an escape outside strings, or a string in triple quotes."""
_CONTROL = re.compile(r"[\x00-\x1f]")
_IN_STRING = re.compile(r"\\.|[\x00-\x1f]", re.DOTALL)
_NAMES = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_ALIASES = {
    "str": "string",
    "bool": "boolean",
    "int": "integer",
    "float": "number",
    "double": "number",
    "list": "array",
    "tuple": "array",
    "dict": "object",
}
"""Python and C types that schemas use -> JSON's types."""


def json_string(text: str) -> str:
    """Encode `text` as vLLM does: escapes only where needed or where UTF-8 fails."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(text)
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Escape a piece of a string, without quotes."""
    return json_string(text)[1:-1]


def parameter_schema(schema: Any, name: str) -> Any:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(name) if isinstance(properties, Mapping) else None


def parameter_names(schema: Any) -> list[str]:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return [str(name) for name in properties] if isinstance(properties, Mapping) else []


def types_of(schema: Any, depth: int = 0) -> set[str]:
    """Names of JSON types that a parameter's schema allows; empty if unspecified."""
    if not isinstance(schema, Mapping) or depth > MAX_SCHEMA_DEPTH:
        return set()
    found: set[str] = set()
    kind = schema.get("type")
    kinds = [str(each) for each in (kind if isinstance(kind, list) else [kind]) if each is not None]
    found.update(_ALIASES.get(each, each) for each in kinds)
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else ():
            found |= types_of(option, depth + 1)
    values = schema.get("enum") if not found else None
    if isinstance(values, list):
        found.update(map(_type_of, values))
    if not found and isinstance(schema.get("properties"), Mapping):
        found.add("object")
    return found


def is_text(schema: Any, *, default: bool) -> bool:
    """True if a value must be a string, so can be streamed. default: result for an unspecified type."""
    types = types_of(schema)
    return types == {"string"} if types else default


def coerced(text: str, schema: Any) -> str:
    """Convert an argument's text to JSON of a type that the schema allows, or else a string."""
    types = types_of(schema)
    trimmed = text.strip()
    value: Any
    try:
        value = json.loads(trimmed, parse_constant=_no_constant)
        found = trimmed
    except (ValueError, RecursionError):
        try:
            value = python_literal(trimmed)
            found = dumped(value)
        except ValueError:
            return json_string(text)
    kind = _type_of(value)
    if isinstance(value, str) or (kind == "number" and not math.isfinite(value)):
        return found if isinstance(value, str) and "string" not in types else json_string(text)
    if not types or kind in types or (kind == "integer" and "number" in types):
        return found
    if kind == "number" and "integer" in types and float(value).is_integer():
        return str(int(value))
    if "boolean" in types and trimmed in ("0", "1"):
        return "true" if trimmed == "1" else "false"
    return json_string(text)


def object_members(text: str) -> dict[str, str] | None:
    """Members of a JSON object, each as JSON; None for other text."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
        return {name: dumped(member) for name, member in value.items()} if isinstance(value, dict) else None
    except (ValueError, RecursionError):
        return None


def python_literal(text: str) -> Any:
    """Value of a Python literal: numbers, strings, lists, tuples, sets, dicts and JSON's names. Raises ValueError for
    other text, or if too long or deep."""
    if len(text) > MAX_LITERAL or too_deep(text):
        raise ValueError("the literal is too large")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes that Python does not know
            tree = ast.parse(_one_line_strings(text.strip()), mode="eval")
        return _value(tree.body)
    except (SyntaxError, MemoryError, RecursionError, OverflowError) as error:
        raise ValueError(f"not a literal: {type(error).__name__}") from None


def _one_line_strings(text: str) -> str:
    """Escape control characters inside strings, where Python forbids them."""
    if not _CONTROL.search(text):
        return text
    return _STRING.sub(
        lambda string: _IN_STRING.sub(_escaped_control, string[0]) if string[1] is None else string[0], text
    )


def _escaped_control(found: re.Match[str]) -> str:
    return found[0] if len(found[0]) == 2 else f"\\x{ord(found[0]):02x}"


def too_deep(text: str) -> bool:
    """True if brackets or signs may nest too deeply."""
    depth = deepest = signs = 0
    for char in text:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth -= 1
        signs = signs + 1 if char in "+-~ " else 0
        if signs > MAX_LITERAL // 16 or deepest > MAX_DEPTH:
            return True
    return False


def dumped(value: Any) -> str:
    """JSON of a value from `python_literal`. Raises ValueError for infinity."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None):
            return node.value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as number)):
            return -number if isinstance(sign, ast.USub) else number
    raise ValueError("not a literal")


def _key(node: ast.expr | None) -> str:
    value = None if node is None else _value(node)
    if node is None or isinstance(value, list | dict):
        raise ValueError("not a key of an object")
    return value if isinstance(value, str) else dumped(value)


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
