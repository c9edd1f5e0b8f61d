"""Size is a reviewed number: a file fits in the head, a function on a screen, parameters on a line or two."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.architecture.source import PACKAGE, ROOT, python_files, tree_of

MAX_FILE_LINES = 600
MAX_KERNEL_FILE_LINES = 800
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 8
NATIVE_SUFFIXES = (".cpp", ".h", ".hpp", ".cu", ".cuh")


def source_files() -> list[Path]:
    native = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in NATIVE_SUFFIXES]
    return python_files() + native


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


class FunctionSize(NamedTuple):
    where: str
    lines: int
    parameters: int


@cache
def functions() -> list[FunctionSize]:
    """Of every Python file."""
    return [
        FunctionSize(
            f"{path.relative_to(ROOT)}:{node.lineno} {node.name}",
            (node.end_lineno or node.lineno) - node.lineno + 1,
            num_parameters(node),
        )
        for path in python_files()
        for node in statements(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements below `node`. Expressions, which are most of a tree, hold none."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        below = getattr(node, field, None)
        for child in below if isinstance(below, list) else ():
            yield child
            yield from statements(child)


def num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """`self`, `cls`, `*args` and `**kwargs` do not count, nor do functions that Triton or Gluon compiles: a kernel is
    handed addresses, strides and sizes one by one."""
    if any(ast.unparse(decorator).startswith(("triton.", "gluon.")) for decorator in node.decorator_list):
        return 0
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len([argument for argument in arguments if argument.arg not in ("self", "cls")])


def largest_files(count: int) -> list[tuple[int, str]]:
    return sorted(((num_lines(path), str(path.relative_to(ROOT))) for path in source_files()), reverse=True)[:count]


def room_sizes() -> Counter[str]:
    """Lines of each folder of the package, of its modules outside of folders, and of the native sources."""
    sizes: Counter[str] = Counter()
    for path in source_files():
        if path.is_relative_to(PACKAGE):
            parts = path.relative_to(PACKAGE).parts
            sizes[parts[0] if len(parts) > 1 else "quire/*.py"] += num_lines(path)
        elif path.is_relative_to(ROOT / "csrc"):
            sizes["csrc"] += num_lines(path)
    return sizes


def test_file_sizes() -> None:
    def limit(path: Path) -> int:
        is_kernel = path.is_relative_to(ROOT / "quire" / "kernels") or path.is_relative_to(ROOT / "csrc")
        return MAX_KERNEL_FILE_LINES if is_kernel else MAX_FILE_LINES

    too_long = {str(path): num_lines(path) for path in source_files() if num_lines(path) > limit(path)}
    assert too_long == {}


def test_function_sizes() -> None:
    assert [size for size in functions() if size.lines > MAX_FUNCTION_LINES] == []


def test_parameter_counts() -> None:
    assert [size for size in functions() if size.parameters > MAX_PARAMETERS] == []
