"""A module imports only from its own layer or a lower one, wherever in the file the import stands, for types too."""

from __future__ import annotations

import ast
import re
import tomllib
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.architecture.source import LAYER_OF, PACKAGE, ROOT, imports, layer_of, modules

FIRST_COMPUTE_LAYER = LAYER_OF["kernels"]
REGISTRY_TARGET = re.compile(r"(quire\.[a-z_.]+):[A-Za-z_]\w*")


def test_every_file_and_folder_belongs_to_a_layer() -> None:
    entries = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or any(path.rglob("*.py"))}
    assert entries - {"__init__"} - set(LAYER_OF) == set()


def test_imports_point_down() -> None:
    upward = [
        f"{module.where}:{found.line}: layer {layer_of(module.name)} imports {found.target} of a higher layer"
        for module in modules()
        for found in imports(module)
        if found.target.split(".")[0] == "quire"
        and not module.is_facade
        and layer_of(found.target) > layer_of(module.name)
    ]
    assert upward == []


def test_registries_name_targets_below() -> None:
    """An import by name is an import too."""
    upward = [
        f"{module.where}:{node.lineno}: {match[1]} is of a higher layer"
        for module in modules()
        for node in module.nodes
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and (match := REGISTRY_TARGET.fullmatch(node.value))
        and not module.is_facade
        and layer_of(match[1]) > layer_of(module.name)
    ]
    assert upward == []


def test_the_package_itself_imports_nothing_before_it_is_asked() -> None:
    facade = next(module for module in modules() if module.is_facade)
    eager = {found.target for found in imports(facade) if not found.typing_only and found.target.startswith("quire")}
    assert eager == {"quire.version"}


def test_control_plane_never_imports_torch() -> None:
    found = [
        f"{module.where}:{found.line}"
        for module in modules()
        if not module.is_facade and layer_of(module.name) < FIRST_COMPUTE_LAYER
        for found in imports(module)
        if found.target == "torch"
    ]
    assert found == []


def test_the_package_imports_nothing_of_the_laboratory() -> None:
    """The wheel holds the package alone: benchmarks, tests and training import it, not the other way round."""
    outside = {"benchmarks", "tests", "training"}
    found = [f"{m.where}:{each.line}" for m in modules() for each in imports(m) if each.target in outside]
    assert found == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["scikit-build"]["wheel"]["packages"] == ["quire"]


def test_no_import_cycles() -> None:
    graph = {
        module.name: {found.target for found in imports(module) if not found.typing_only} - {module.name}
        for module in modules()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def test_folders_that_import_each_other() -> None:
    """Few, and for types too: kernels take the shapes that attention and sampling lay out, and are called by both."""
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    edges = {
        (module.name.split(".")[1], found.target.split(".")[1])
        for module in modules()
        for found in imports(module)
        if found.target.count(".") > 1 and module.name.count(".") > 1
    }
    circles = {(a, b) for a, b in edges if (b, a) in edges and a < b and {a, b} <= folders}
    assert circles == {("attention", "kernels"), ("kernels", "sampling")}
    graph = {a: {b for x, b in edges if x == a and (min(a, b), max(a, b)) not in circles and a != b} for a in folders}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"folders in a circle: {' -> '.join(error.args[1])}")
