"""The environment is read in one file, and there is little of it."""

from __future__ import annotations

import ast
import re

from tests.architecture.source import modules

MAX_VARIABLES = 10
READERS = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def test_only_envs_touches_the_environment() -> None:
    found = []
    for module in modules():
        if module.name == "quire.envs":
            continue
        for node in module.nodes:
            names = []
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom) and node.module == "os":
                names = [alias.name for alias in node.names]
            found += [f"{module.where}:{node.lineno}: os.{name}" for name in names if name in READERS]
    assert found == []


def test_variables_are_few() -> None:
    text = "\n".join(module.path.read_text(encoding="utf-8") for module in modules())
    names = set(re.findall(r"\bQUIRE_[A-Z][A-Z_]*", text))
    assert 1 <= len(names) <= MAX_VARIABLES, sorted(names)


def test_every_variable_is_parsed_in_envs() -> None:
    """A name that appears elsewhere, say in a help text, must be one that envs.py really reads."""
    envs = next(module for module in modules() if module.name == "quire.envs")
    known = {node.value for node in envs.nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    named = {
        name for m in modules() for name in re.findall(r"\bQUIRE_[A-Z][A-Z_]*", m.path.read_text(encoding="utf-8"))
    }
    assert named - known == set()
