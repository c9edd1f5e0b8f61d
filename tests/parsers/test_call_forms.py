"""Schemas of tools in one schema of calls: each keeps its own references."""

from __future__ import annotations

from typing import Any

import pytest

from quire.parsers.call_forms import CallKeys, calls_schema
from tests.structured_output.bytes_matcher import schema_matcher, takes


def tool(value: str, **more: Any) -> dict[str, Any]:
    """x is `value` by a reference; a constant and a default look like references, and are data."""
    properties = {"x": {"$ref": "#/definitions/e"}, "y": {"const": {"$ref": "#/nowhere"}, "default": {"$ref": 5}}}
    return {
        "type": "object",
        "properties": properties,
        "required": ["x"],
        "additionalProperties": False,
        "definitions": {"e": {"const": value}},
        **more,
    }


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"$id": "https://example.org/a"},
        {"$id": "#root"},
        {"$id": 5},
        {"$schema": "http://json-schema.org/draft-07/schema#", "$id": "item.json"},
        {"$schema": "http://json-schema.org/draft-04/schema#", "id": "https://example.org/a"},
    ],
)
def test_references_lead_into_their_own_tool(more: dict[str, Any]) -> None:
    found = schema_matcher(calls_schema({"f": tool("u", **more), "g": tool("v", **more)}, CallKeys(), parallel=True))
    for name, value, is_taken in (("f", "u", True), ("g", "v", True), ("f", "v", False), ("g", "u", False)):
        assert takes(found, f'[{{"name":"{name}","arguments":{{"x":"{value}"}}}}]') == is_taken
    assert takes(found, '[{"name":"f","arguments":{"x":"u","y":{"$ref":"#/nowhere"}}}]')


def test_parts_with_the_same_base_uri_in_two_tools() -> None:
    def part(value: str) -> dict[str, Any]:
        inner = {"$id": "part.json", "const": value}
        return {
            "$id": "https://example.org/tool",
            "type": "object",
            "properties": {"x": {"$ref": "part.json"}},
            "required": ["x"],
            "$defs": {"p": inner},
        }

    found = schema_matcher(calls_schema({"f": part("u"), "g": part("v")}, CallKeys(), parallel=False))
    assert takes(found, '[{"name":"g","arguments":{"x":"v"}}]')
    assert not takes(found, '[{"name":"g","arguments":{"x":"u"}}]')


def test_integers_of_64_bits_in_arguments() -> None:
    schema = {"type": "object", "properties": {"id": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}}}
    found = schema_matcher(calls_schema({"f": schema}, CallKeys(), parallel=False))
    assert takes(found, f'[{{"name":"f","arguments":{{"id":{-(2**63)}}}}}]')
    assert not takes(found, f'[{{"name":"f","arguments":{{"id":{2**63}}}}}]')
