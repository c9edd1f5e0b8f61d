"""Nothing in the tree knows the machine that it was written on, or where packages come from."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from quire.utils.extras import how_to_install
from tests.architecture.source import ROOT, modules

FOLDERS = (".ci", "quire", "tests", "docs", "training", "benchmarks", "csrc", "deploy")
SUFFIXES = {
    "", ".py", ".md", ".toml", ".txt", ".json", ".jinja", ".html", ".css", ".js", ".cpp", ".h", ".sh", ".yml",
    ".yaml", ".service", ".dockerignore",
}  # fmt: skip
SKIPPED_FOLDERS = {"__pycache__", "runs"}
SKIPPED_FILES = {"tokenizer.json", ".git"}
"""A vocabulary holds whatever words its corpus had; in a linked worktree .git is a file that names the repository."""
# Written with brackets so that these patterns do not match their own source.
MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(?:home|Users|root|opt|mnt|srv|work|workspace)[/](?=\w)")
PACKAGE_SOURCE = re.compile(r"pypi[.]org|pythonhosted[.]org|download[.]pytorch|index[-_]url|find[-_]links")
STRANGERS_PROJECT = re.compile(
    r"""quire\[(?:bench|transformers|otel|test)\b|pip\ install\b(?:\ -\S+)*\ ['"`]?quire(?![\w-])""", re.VERBOSE
)
"""An instruction to install `quire` from a package index."""


def text_files() -> Iterator[Path]:
    top = [path for path in ROOT.iterdir() if path.is_file()]
    below = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    for path in sorted(top + below):
        if path.suffix in SUFFIXES and path.name not in SKIPPED_FILES and not SKIPPED_FOLDERS & set(path.parts):
            yield path


def matches(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]


def test_no_paths_of_a_machine() -> None:
    assert matches(MACHINE_PATH) == []


def test_no_package_index_is_named() -> None:
    assert matches(PACKAGE_SOURCE) == []


def test_no_command_installs_the_project_of_another_on_the_package_index() -> None:
    assert matches(STRANGERS_PROJECT) == []
    name = "quire"
    for wrong in (f"pip install {name}", f"pip install -U '{name}[otel]'", f'"{name}[otel]",'):
        assert STRANGERS_PROJECT.search(wrong)
    for right in ("quire-llm[otel]", "pip install quire-llm", how_to_install("otel")):
        assert not STRANGERS_PROJECT.search(right)


def test_the_distribution_names_itself_and_its_extras() -> None:
    """Extras that pyproject.toml takes from the project itself, and those that errors name, exist."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert project["name"] == "quire-llm"
    own = [line for each in extras.values() for line in each if line.startswith("quire")]
    assert own == ["quire-llm[images,videos,otel]"]
    calls = (node for module in modules() for node in module.nodes if isinstance(node, ast.Call))
    hints = [ast.literal_eval(node.args[0]) for node in calls if ast.unparse(node.func) == "how_to_install"]
    assert sorted(set(hints)) == ["bench", "images", "otel", "ray", "transformers", "videos"]
    assert set(hints) <= set(extras)


def test_the_package_says_that_it_has_types() -> None:
    assert (ROOT / "quire" / "py.typed").is_file()


def test_the_tree_is_really_read() -> None:
    names = {str(path.relative_to(ROOT)) for path in text_files()}
    assert {"pyproject.toml", "Makefile", "LICENSE", "quire/errors.py", ".ci/run"} <= names
