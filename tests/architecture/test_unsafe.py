"""No pickle, no code from a checkpoint or a socket, no template outside the sandbox."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.architecture.source import ROOT, all_nodes, python_files, tree_of

MODULES = {"cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
CALLS = {
    "eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load",
    "torch.jit.load", "jinja2.Template", "Template", "jinja2.Environment", "Environment",
}  # fmt: skip
METHODS = {"recv_pyobj", "send_pyobj"}
SAFE_VALUES = {"weights_only": "True", "trust_remote_code": "False", "shell": "False", "allow_pickle": "False"}
LAST_NAMES = {name.rpartition(".")[2] for name in CALLS | METHODS | {"torch.load"}}
PICKLE_ERROR = "UnpicklingError"
"""What torch's weights_only loader raises: the one name of pickle that may be used."""


def shipped_files() -> list[Path]:
    """All but the tests, which make dangerous files to see them refused."""
    return [path for path in python_files() if not path.is_relative_to(ROOT / "tests")]


def test_nothing_unsafe_is_called_or_imported() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}" for path in shipped_files() for line, what in unsafe(tree_of(path))
    ]
    assert found == []


def unsafe(tree: ast.Module) -> Iterator[tuple[int, str]]:
    nodes = all_nodes(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, what) for what in unsafe_call(node))
    yield from pickle_uses(nodes)


def pickle_uses(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Every way to reach pickle: imported under another name, from it, or used for more than its errors."""
    harmless = {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr == PICKLE_ERROR}
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, "pickle as") for name in node.names if name.name == "pickle" and name.asname)
        elif isinstance(node, ast.ImportFrom) and node.module == "pickle":
            yield node.lineno, "from pickle"
        elif isinstance(node, ast.Name) and node.id == "pickle" and id(node) not in harmless:
            yield node.lineno, "pickle"


def unsafe_call(node: ast.Call) -> Iterator[str]:
    last = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if last not in LAST_NAMES and not any(keyword.arg in SAFE_VALUES for keyword in node.keywords):
        return  # most calls: their text need not be made
    name = ast.unparse(node.func)
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg in SAFE_VALUES}
    if name in CALLS or name.split(".")[-1] in METHODS:
        yield name
    if name == "torch.load" and keywords.get("weights_only") != "True":
        yield "torch.load without weights_only=True"
    yield from (f"{keyword}={value}" for keyword, value in keywords.items() if value != SAFE_VALUES[str(keyword)])


def test_the_check_sees_each_kind() -> None:
    source = """
value = pickle.loads(data)
load = getattr(pickle, "load")
import pickle as innocent
from pickle import loads
from dill import loads
torch.load(path)
torch.load(path, weights_only=False)
AutoModel.from_pretrained(name, trust_remote_code=True)
socket.recv_pyobj()
subprocess.run(line, shell=True)
eval(text)
jinja2.Environment()
"""
    assert sorted({line for line, _ in unsafe(ast.parse(source))}) == list(range(2, 14))


def test_naming_the_error_of_a_refused_checkpoint_is_safe() -> None:
    source = "import pickle\ntry:\n    torch.load(path, weights_only=True)\nexcept pickle.UnpicklingError:\n    pass"
    assert list(unsafe(ast.parse(source))) == []
