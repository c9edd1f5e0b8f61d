"""The source tree as the architecture tests see it: every file parsed once."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "quire"
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "envs", "clock", "registry", "logging", "utils", "version", "bundled"),
    (
        "config",
        "sampling_params",
        "structured_outputs_params",
        "beam_search_params",
        "pooling_params",
        "pooling_outputs",
        "logits_processors",
        "lora_request",
        "adapter_orders",
        "prompt_image",
        "image_orders",
        "request",
        "step",
        "outputs",
    ),
    ("kv_cache", "multimodal", "tokenization", "parsers"),
    ("scheduler", "decoding", "structured_output"),
    ("kernels", "parallel", "attention", "quantization", "layers", "models", "sampling"),
    ("worker",),
    ("executors",),
    ("engine",),
    (
        "offline_engine",
        "llm",
        "llm_engine",
        "server",
        "cli",
        "bench",
        "simulator",
        "metrics",
        "dashboard",
        "__main__",
        "vllm",
    ),
)
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}


@dataclass(frozen=True)
class Module:
    name: str
    path: Path

    @property
    def tree(self) -> ast.Module:
        return tree_of(self.path)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree."""
        return all_nodes(self.tree)

    @property
    def where(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def is_facade(self) -> bool:
        """`quire/__init__.py`, which offers names of every layer and imports them on first use."""
        return self.name == "quire"


def all_nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Every node of a tree, as `ast.walk` has them, in a third of its time."""
    found = [tree]
    for node in found:
        for value in vars(node).values():
            if isinstance(value, ast.AST):
                found.append(value)
            elif type(value) is list:
                found += [each for each in value if isinstance(each, ast.AST)]
    return tuple(found)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def modules() -> tuple[Module, ...]:
    """Every module of the package, by name."""
    return tuple(_read(path) for path in sorted(PACKAGE.rglob("*.py")))


@cache
def module_names() -> frozenset[str]:
    return frozenset(module.name for module in modules())


def python_files() -> list[Path]:
    """Every Python file that we wrote: package, tests, training, benchmarks."""
    folders = ("quire", "tests", "training", "benchmarks")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py") if "runs" not in path.parts)


def layer_of(name: str) -> int:
    """Layer number of a module `quire.x...`. Raises KeyError for a file or folder that no layer lists."""
    parts = name.split(".")
    return len(LAYERS) - 1 if len(parts) == 1 else LAYER_OF[parts[1]]


@dataclass(frozen=True)
class Import:
    target: str
    """Module of the package, or the top name of another distribution."""
    line: int
    typing_only: bool


@cache
def imports(module: Module) -> tuple[Import, ...]:
    """Every import of a module, at the top, in functions and under TYPE_CHECKING."""
    typing_lines = {
        line
        for node in module.nodes
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
    }
    return tuple(
        Import(target, node.lineno, node.lineno in typing_lines)
        for node in module.nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for target in sorted(_targets(node))
    )


def _targets(node: ast.Import | ast.ImportFrom) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name if alias.name.startswith("quire.") else alias.name.split(".")[0] for alias in node.names}
    assert node.level == 0, f"line {node.lineno}: relative import; write the full module name"
    source = node.module or ""
    if source.split(".")[0] != "quire":
        return {source.split(".")[0]}
    submodules = {f"{source}.{alias.name}" for alias in node.names}
    return {name if name in module_names() else source for name in submodules}


def _read(path: Path) -> Module:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return Module(name, path)
