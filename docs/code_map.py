"""Map of the code for docs/code-map.md: every class and public function, from its docstring. Imports nothing of the
package. `python -m docs.code_map WORD ...` prints the lines that have all the words, methods too."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "quire"
_SENTENCE = re.compile(r".+?(?:\.(?= [A-Z])|$)")
_MARKUP = re.compile(r"([*<\[\]|_~{}$^])")
_CODE = re.compile(r"(`[^`]+`)")


class Entry(NamedTuple):
    """Named thing of a module. name: with its class for a method, empty for the module. text: docstring in one line."""

    path: Path
    name: str
    text: str
    is_method: bool = False

    @property
    def sentence(self) -> str:
        found = _SENTENCE.match(self.text)
        return found[0] if found else ""


def entries(package: Path = PACKAGE) -> Iterator[Entry]:
    """Everything with a docstring or a public name, module by module in the order of the files."""
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        yield Entry(path, "", _text(tree))
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = _text(node)
                if text or not node.name.startswith("_"):
                    yield Entry(path, node.name, text)
            if isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and (text := _text(method)):
                        yield Entry(path, f"{node.name}.{method.name}", text, is_method=True)


def _text(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return " ".join((ast.get_docstring(node) or "").split())


def code_map(package: Path = PACKAGE) -> str:
    """Tables of the page: a heading for each folder, a row for each module, with its classes and functions."""
    rooms: dict[str, list[str]] = {}
    for path, found in _by_module(package).items():
        module, *named = found
        things = [f"**`{each.name}`** {_escaped(each.sentence)}".strip() for each in named if not each.is_method]
        if not (things or module.text):
            continue
        cell = "<br>".join([*([_escaped(module.sentence)] if module.text else []), *things])
        rooms.setdefault(path.parent.relative_to(package.parent).as_posix(), []).append(f"| `{path.name}` | {cell} |")
    head = ["", "| file | holds |", "|---|---|"]
    return "\n\n".join("\n".join([f"## {room}", *head, *rows]) for room, rows in sorted(rooms.items()))


def _by_module(package: Path) -> dict[Path, list[Entry]]:
    modules: dict[Path, list[Entry]] = {}
    for entry in entries(package):
        modules.setdefault(entry.path, []).append(entry)
    return modules


def _escaped(text: str) -> str:
    """Text whose signs are no Markdown, but for code in backquotes."""
    parts = _CODE.split(text)
    return "".join(
        part.replace("|", "\\|") if _CODE.fullmatch(part) else _MARKUP.sub(r"\\\1", part.replace("`", "\\`"))
        for part in parts
    )


def search(words: Sequence[str], package: Path = PACKAGE) -> list[str]:
    """Lines `file: name: docstring` with all the words, in any case."""
    lines = [
        ": ".join(part for part in (each.path.relative_to(package.parent).as_posix(), each.name, each.text) if part)
        for each in entries(package)
    ]
    return [line for line in lines if all(word.lower() in line.lower() for word in words)]


if __name__ == "__main__":
    print("\n".join(search(sys.argv[1:])))
