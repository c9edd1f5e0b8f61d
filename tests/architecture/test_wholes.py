"""A subject is in one place: no class is cut into parts that only one heir puts together again, few modules are crumbs
that one other module imports, and what a newcomer reads first is bounded."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from tests.architecture.source import ROOT, imports, modules
from tests.architecture.test_sizes import num_lines

SMALL_MODULE_LINES = 60
MAX_CRUMBS = 20
MAX_READING_LINES = 7_000
PARTS_OF_BODIES = {"ToolFields"}
"""Fields of request bodies: the documented schema has them as one."""
READ = re.compile(r"`(quire/[\w/]+\.py)`")


def heirs() -> dict[str, set[tuple[str, str]]]:
    """Name of a class -> module and name of each class that derives from it."""
    found = defaultdict(set)
    for module in modules():
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                for base in node.bases:
                    found[ast.unparse(base).partition("[")[0].rpartition(".")[2]].add((module.name, node.name))
    return found


def uses() -> dict[str, int]:
    """Name -> how often expressions, annotations and names of targets (`"module:class"`) have it."""
    found: dict[str, int] = defaultdict(int)
    for module in modules():
        for node in module.nodes:
            if isinstance(node, ast.Name):
                found[node.id] += 1
            elif isinstance(node, ast.Attribute):
                found[node.attr] += 1
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and ":" in node.value:
                found[node.value.rpartition(":")[2]] += 1
    return found


def test_a_class_is_whole() -> None:
    """A class that one class of another module derives from, and that nothing else names, is a part of that class."""
    num_uses, heirs_of = uses(), heirs()
    parts = {
        node.name
        for module in modules()
        for node in module.nodes
        if isinstance(node, ast.ClassDef)
        and not any(ast.unparse(base).startswith("Protocol") for base in node.bases)
        and len(heirs_of[node.name]) == 1
        and module.name not in {heir for heir, _ in heirs_of[node.name]}
        and num_uses[node.name] == 1
    }
    assert parts <= PARTS_OF_BODIES


def test_few_modules_are_crumbs() -> None:
    """Small ones that a single module imports: another subject than its own, or they would be in it."""
    importers = defaultdict(set)
    for module in modules():
        for found in imports(module):
            importers[found.target].add(module.name)
    crumbs = [
        module.name
        for module in modules()
        if num_lines(module.path) < SMALL_MODULE_LINES
        and module.path.name != "__init__.py"
        and len(importers[module.name]) == 1
    ]
    assert len(crumbs) <= MAX_CRUMBS, crumbs


def test_what_a_newcomer_reads_first_is_bounded() -> None:
    files = set(READ.findall((ROOT / "docs" / "reading.md").read_text(encoding="utf-8")))
    assert len(files) > 30
    assert sum(num_lines(ROOT / name) for name in files) <= MAX_READING_LINES
