"""Configuration is frozen, and no code changes a frozen object."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.architecture.source import Module, modules

SETTERS = ("object.__setattr__", "msgspec.structs.force_setattr", "structs.force_setattr", "force_setattr")


def test_every_record_of_the_configuration_is_frozen() -> None:
    records = [
        (f"{module.where}:{node.lineno} {node.name}", node)
        for module in modules()
        if module.name.startswith("quire.config.")
        for node in module.nodes
        if isinstance(node, ast.ClassDef) and is_record(node)
    ]
    assert len(records) >= 7
    assert [where for where, node in records if not is_frozen(node)] == []


def test_frozen_objects_are_set_only_while_they_are_made() -> None:
    found = [
        f"{module.where}:{call.lineno}"
        for module in modules()
        if any(name in module.path.read_text(encoding="utf-8") for name in ("__setattr__", "force_setattr"))
        for function, call in calls(module)
        if ast.unparse(call.func) in SETTERS and function != "__post_init__"
    ]
    assert found == []


def is_record(node: ast.ClassDef) -> bool:
    """A dataclass or a msgspec.Struct."""
    return any("Struct" in ast.unparse(parent) for parent in node.bases) or any(
        "dataclass" in ast.unparse(decorator) for decorator in node.decorator_list
    )


def is_frozen(node: ast.ClassDef) -> bool:
    """`@dataclass(frozen=True)`, or `frozen=True` among the class's own keywords."""
    keywords = list(node.keywords)
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call):
            keywords += decorator.keywords
    return any(keyword.arg == "frozen" and ast.unparse(keyword.value) == "True" for keyword in keywords)


def calls(module: Module) -> Iterator[tuple[str, ast.Call]]:
    """Every call with the name of the innermost function around it ("" at module level)."""

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, ast.Call]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Call):
            yield function, node
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    return visit(module.tree, "")
