"""Removal of unsatisfiable parts of schemas, such as a required property that leads back to itself."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.structured_output.json_schema import NormalSchema

SCALARS = ("null", "boolean", "number", "integer", "string")


def without_endless(schema: NormalSchema) -> None:
    """Replace parts that only endless texts satisfy by `false`. Raises ValueError if the whole is one. Linear in the
    schema's size."""
    if schema.root is False:
        raise ValueError("no text follows the schema")
    if not schema.definitions:
        return  # nothing leads back
    graph = _Graph()
    roots = {name: graph.add(node) for name, node in schema.definitions.items()}
    root = graph.add(schema.root)
    graph.link(roots)
    ended = graph.solved()
    if not ended[root]:
        raise ValueError("no text follows the schema")
    holder = {"root": schema.root}
    for owner in (holder, schema.definitions):
        for name, node in owner.items():
            owner[name] = _kept(node, graph, ended)
    schema.root = holder["root"]


class _Graph:
    """Nodes, one per schema, that hold when all, or one, of the nodes that they need hold."""

    def __init__(self) -> None:
        self._needs: list[list[int]] = []
        self._is_any: list[bool] = []
        self._links: list[tuple[int, str]] = []
        self.node_of: dict[int, int] = {}

    def _new(self, needs: list[int], *, is_any: bool = False) -> int:
        self._needs.append(needs)
        self._is_any.append(is_any)
        return len(self._needs) - 1

    def add(self, schema: Any) -> int:
        if not isinstance(schema, dict):
            return self._new([], is_any=schema is False)
        node = self._new([])
        self.node_of[id(schema)] = node
        needs = self._needs[node]
        for part in schema.get("allOf", ()):
            needs.append(self.add(part))
        for name in ("anyOf", "oneOf"):
            if name in schema:
                needs.append(self._new([self.add(part) for part in schema[name]], is_any=True))
        if "$ref" in schema:
            link = self._new([])
            self._links.append((link, schema["$ref"].removeprefix("#/$defs/")))
            needs.append(link)
        self._add_types(schema, needs)
        return node

    def _add_types(self, schema: dict[str, Any], needs: list[int]) -> None:
        parts = {name: self.add(part) for name, part in schema.get("properties", {}).items()}
        patterns = [self.add(part) for part in schema.get("patternProperties", {}).values()]
        additional = self.add(schema.get("additionalProperties", True))
        prefix = [self.add(part) for part in schema.get("prefixItems", ())]
        items = self.add(schema.get("items", True))
        types = schema.get("type", ["null"])
        types = types if isinstance(types, list) else [types]
        if any(name in SCALARS for name in types):
            return
        options = []
        if "object" in types:
            free = self._new([*patterns, additional], is_any=True)
            required = [parts.get(name, free) for name in schema.get("required", ())]
            options.append(self._new(required))
        if "array" in types:
            low = schema.get("minItems", 0)
            options.append(self._new([*prefix[:low], *([items] if low > len(prefix) else [])]))
        needs.append(self._new(options, is_any=True))

    def link(self, roots: dict[str, int]) -> None:
        for node, name in self._links:
            self._needs[node].append(roots[name])

    def solved(self) -> list[bool]:
        users: list[list[int]] = [[] for _ in self._needs]
        num_open = []
        for node, needs in enumerate(self._needs):
            for need in needs:
                users[need].append(node)
            num_open.append(1 if self._is_any[node] else len(needs))
        ready = deque(node for node, count in enumerate(num_open) if count == 0)
        holds = [False] * len(self._needs)
        while ready:
            node = ready.popleft()
            if holds[node]:
                continue
            holds[node] = True
            for user in users[node]:
                num_open[user] -= 1
                if num_open[user] == 0:
                    ready.append(user)
        return holds


def _kept(schema: Any, graph: _Graph, holds: list[bool]) -> Any:
    if not isinstance(schema, dict):
        return schema
    if not holds[graph.node_of[id(schema)]]:
        return False
    for name in ("allOf", "anyOf", "oneOf", "prefixItems"):
        if name in schema:
            schema[name] = [_kept(part, graph, holds) for part in schema[name]]
    for name in ("properties", "patternProperties"):
        if name in schema:
            schema[name] = {key: _kept(part, graph, holds) for key, part in schema[name].items()}
    for name in ("additionalProperties", "items"):
        if name in schema:
            schema[name] = _kept(schema[name], graph, holds)
    return schema
