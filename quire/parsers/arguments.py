"""Arguments that models write as plain text or as Python literals, made JSON by the tool's schema."""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Mapping
from typing import Any

MAX_LITERAL = 65_536
"""Characters of an argument that is read as a Python literal; a longer one is a string."""
MAX_DEPTH = 32
"""Brackets inside brackets of such an argument."""
MAX_SCHEMA_DEPTH = 16
_STRING = re.compile(r"""(\\.|'{3}.*?'{3}|"{3}.*?"{3})|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
"""A string of Python; group 1: an escape outside strings, or a string in triple quotes."""
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
"""Types of Python and C that schemas name in place of JSON's."""


def json_string(text: str) -> str:
    """`text` as JSON, as vLLM writes it: not escaped beyond need, except for what UTF-8 cannot carry."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(text)
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """A piece of a string, without its quotes."""
    return json_string(text)[1:-1]


def parameter_schema(schema: Any, name: str) -> Any:
    """What a tool's parameters say of the one called `name`; None: nothing."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(name) if isinstance(properties, Mapping) else None


def parameter_names(schema: Any) -> list[str]:
    """The parameters of a tool, in their order."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return [str(name) for name in properties] if isinstance(properties, Mapping) else []


def types_of(schema: Any, depth: int = 0) -> set[str]:
    """JSON types that a schema allows; the empty set where it does not say."""
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
    """Whether a value is certain to be a string, so that it can be passed on as it comes. default: where the schema
    does not say."""
    types = types_of(schema)
    return types == {"string"} if types else default


def coerced(text: str, schema: Any) -> str:
    """The JSON of an argument written as plain text: of a type that the schema allows, else a string."""
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
    """The members of the object that a JSON text holds, each as JSON; None for any other text."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
        return {name: dumped(member) for name, member in value.items()} if isinstance(value, dict) else None
    except (ValueError, RecursionError):
        return None


def python_literal(text: str) -> Any:
    """The value of a Python literal: numbers, strings, lists, tuples, sets and dicts of them, and JSON's names. Nothing
    is evaluated. Raises ValueError for anything else, and for what is too long or too deep."""
    if len(text) > MAX_LITERAL or too_deep(text):
        raise ValueError("the literal is too large")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            tree = ast.parse(_one_line_strings(text.strip()), mode="eval")
        return _value(tree.body)
    except (SyntaxError, MemoryError, RecursionError, OverflowError) as error:
        raise ValueError(f"not a literal: {type(error).__name__}") from None


def _one_line_strings(text: str) -> str:
    """`text` with control characters inside its strings escaped, which Python does not take there as they are."""
    if not _CONTROL.search(text):
        return text
    return _STRING.sub(
        lambda string: _IN_STRING.sub(_escaped_control, string[0]) if string[1] is None else string[0], text
    )


def _escaped_control(found: re.Match[str]) -> str:
    return found[0] if len(found[0]) == 2 else f"\\x{ord(found[0]):02x}"


def too_deep(text: str) -> bool:
    """Whether brackets, or signs before a number, could nest too deeply; what stands in strings counts too."""
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
    """JSON of a value that `python_literal` gave. Raises ValueError for what JSON does not have (infinity)."""
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
