"""A class is known by its name: few names stand for two classes."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.architecture.source import modules

MAX_PAIRS = 5


def test_few_class_names_are_taken_twice() -> None:
    taken = defaultdict(list)
    for module in modules():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                taken[node.name].append(module.name)
    pairs = {name: places for name, places in taken.items() if len(places) > 1}
    for name, places in sorted(pairs.items()):
        print(f"{name}: {', '.join(places)}")
    assert len(pairs) <= MAX_PAIRS, pairs
