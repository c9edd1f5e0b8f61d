"""Two engines in one process share no state: no `global`, and module-level containers are constants."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.architecture.source import Module, modules

CONTAINERS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
CONTAINER_CALLS = {"list", "dict", "set", "bytearray", "deque", "defaultdict", "OrderedDict", "Counter"}
WEAK_CALLS = {"WeakValueDictionary", "WeakKeyDictionary", "WeakSet", "local", "ContextVar"}
MUTATORS = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft",
    "remove", "reverse", "setdefault", "sort", "update",
}  # fmt: skip


def test_no_global_statement() -> None:
    found = [
        f"{module.where}:{node.lineno}" for module in modules() for node in module.nodes if isinstance(node, ast.Global)
    ]
    assert found == []


def test_module_level_containers_are_named_as_constants() -> None:
    found = [
        f"{module.where}: {name}"
        for module in modules()
        for name in containers(module)
        if name != "__all__" and not name.lstrip("_").isupper()
    ]
    assert found == []


def test_module_level_containers_are_never_changed_by_functions() -> None:
    found = [
        f"{module.where}:{line}: {name}"
        for module in modules()
        if (names := containers(module))
        for function in module.nodes
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for name, line in mutated(function)
        if name in names
    ]
    assert found == []


def containers(module: Module) -> set[str]:
    """Names bound to a mutable container by a statement of the module's top level."""
    names: set[str] = set()
    for node in module.tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and is_container(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def is_container(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).split(".")[-1] in CONTAINER_CALLS | WEAK_CALLS
    return isinstance(value, CONTAINERS)


def mutated(function: ast.AST) -> Iterator[tuple[str, int]]:
    """Names that a function changes in place: `x[...] = `, `del x[...]`, `x.append(...)` and the like."""
    for node in ast.walk(function):
        target: ast.expr | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            target = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            target = node.func.value
        if isinstance(target, ast.Name):
            yield target.id, target.lineno
