"""References of a JSON schema inside one document: base URIs (`$id`), anchors, JSON pointers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urljoin

LATEST = 2020
DRAFTS = {
    "json-schema.org/draft/2020-12/schema": 2020,
    "json-schema.org/draft/2019-09/schema": 2019,
    "json-schema.org/draft-07/schema": 7,
    "json-schema.org/draft-06/schema": 6,
    "json-schema.org/draft-04/schema": 4,
    "json-schema.org/draft-03/schema": 3,
}
ONE = (
    "additionalProperties", "items", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")


@dataclass
class Resource:
    """Schema with its own base URI (`$id`), or the document."""

    uri: str
    node: Any
    draft: int
    parent: Resource | None = None
    anchors: dict[str, Any] = field(default_factory=dict)
    inside: dict[str, Resource] = field(default_factory=dict)


class References:
    """One document's references. Its parts are distinct objects."""

    def __init__(self, root: Any) -> None:
        self._resource_of: dict[int, Resource] = {}
        self._num_dynamic: dict[str, int] = {}
        draft = _draft(root, LATEST)
        self._index(root, Resource("", root, draft))

    def draft_of(self, node: dict[str, Any]) -> int:
        return self._resource_of[id(node)].draft

    def target(self, node: dict[str, Any], keyword: str) -> Any:
        """Schema that a reference names. Raises ValueError if the document lacks the schema."""
        reference = node[keyword]
        if not isinstance(reference, str):
            raise ValueError("a reference must be a string")
        address, _, fragment = reference.partition("#")
        resource = self._resource(self._resource_of[id(node)], address)
        fragment = unquote(fragment)
        if not fragment or fragment.startswith("/"):
            found = self._at_pointer(resource, fragment)
        elif fragment in resource.anchors:
            found = resource.anchors[fragment]
        else:
            raise ValueError(f"{reference:.100} does not exist")
        name = "" if keyword == "$recursiveRef" else fragment
        if keyword != "$ref" and self._num_dynamic.get(name, 0) > 1:
            raise ValueError(f"{reference:.100} has several targets")
        return found

    def _resource(self, start: Resource, address: str) -> Resource:
        if not address:
            return start
        uri = urljoin(start.uri, address)
        resource: Resource | None = start
        while resource is not None:
            if resource.uri == uri:
                return resource
            if uri in resource.inside:
                return resource.inside[uri]
            resource = resource.parent
        raise ValueError(f"{address:.100} is not in this document")

    def _at_pointer(self, resource: Resource, pointer: str) -> Any:
        found = resource.node
        for part in pointer.split("/")[1:]:
            resource = self._resource_of.get(id(found), resource)
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdecimal() and name.isascii() and int(name[:9]) < len(found):
                found = found[int(name)]
            else:
                raise ValueError(f"#{pointer:.100} does not exist")
        if isinstance(found, dict) and id(found) not in self._resource_of:
            self._index(found, resource)
        return found

    def _index(self, start: Any, resource: Resource) -> None:
        todo = [(start, resource)]
        while todo:
            node, resource = todo.pop()
            if not isinstance(node, dict) or id(node) in self._resource_of:
                continue
            resource = self._opened(node, resource)
            self._resource_of[id(node)] = resource
            todo += [(each, resource) for each in subschemas(node)]

    def _opened(self, node: dict[str, Any], resource: Resource) -> Resource:
        draft = _draft(node, resource.draft)
        identifier = node.get("$id", node.get("id") if draft <= 4 else None)
        if isinstance(identifier, str) and not (draft < 2019 and "$ref" in node and node is not resource.node):
            address, _, fragment = identifier.partition("#")
            if address:
                uri = urljoin(resource.uri, address)
                parent = resource if resource.node is not node else None
                resource = Resource(uri, node, draft, parent)
                while parent is not None:
                    parent.inside.setdefault(uri, resource)
                    parent = parent.parent
            if fragment and draft < 2019:
                resource.anchors.setdefault(unquote(fragment), node)
        for name in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := node.get(name), str):
                resource.anchors.setdefault(anchor, node)
                if name == "$dynamicAnchor":
                    self._num_dynamic[anchor] = self._num_dynamic.get(anchor, 0) + 1
        if node.get("$recursiveAnchor") is True:
            self._num_dynamic[""] = self._num_dynamic.get("", 0) + 1
        return resource


def subschemas(node: dict[str, Any]) -> Iterator[Any]:
    for name in ONE:
        if name in node:
            yield node[name]
    for name in NAMED:
        if isinstance(named := node.get(name), dict):
            yield from named.values()
    for name in LISTED:
        if isinstance(listed := node.get(name), list):
            yield from listed


def _draft(node: Any, otherwise: int) -> int:
    schema = node.get("$schema") if isinstance(node, dict) else None
    if not isinstance(schema, str):
        return otherwise
    return DRAFTS.get(schema.rstrip("#").partition("://")[2], otherwise)
