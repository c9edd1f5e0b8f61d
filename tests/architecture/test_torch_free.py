"""The control plane, the front ends and the command line start without torch: in moments, on any machine."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.architecture.source import LAYER_OF, ROOT, layer_of, modules

IMPORT_ALL = """
import importlib, json, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
failures = {}
for name in json.load(sys.stdin):
    try:
        importlib.import_module(name)
    except Exception as error:
        failures[name] = f"{type(error).__name__}: {error}"
print(json.dumps(failures))
"""


LABORATORY = ("paper", "baselines", "kernels")
COMPUTING = "benchmarks/kernels/subjects"
"""What `python -m benchmarks.kernels` times; imported when a run begins."""


def test_modules_that_need_no_torch_import_without_it() -> None:
    """Layers 0-3, the executor's seam, the engine and all above it. `__main__` would run the program."""
    names = [
        module.name
        for module in modules()
        if (
            layer_of(module.name) < LAYER_OF["kernels"]
            or layer_of(module.name) >= LAYER_OF["engine"]
            or module.name == "quire.executors.interface"
        )
        and not module.name.endswith("__main__")
    ]
    assert import_failures(names) == {}


def test_the_laboratory_imports_without_torch() -> None:
    """The simulated evaluation needs none; the kernels' benchmark imports it when a run begins."""
    paths = [path.relative_to(ROOT) for room in LABORATORY for path in (ROOT / "benchmarks" / room).rglob("*.py")]
    names = [".".join(path.with_suffix("").parts) for path in paths if not path.is_relative_to(COMPUTING)]
    assert "benchmarks.paper.command" in names
    assert import_failures([name for name in sorted(names) if not name.endswith("__main__")]) == {}


def import_failures(names: list[str]) -> dict[str, str]:
    """Name of a module -> error, where an interpreter without torch cannot import it."""
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL],
        input=json.dumps(names),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    found: dict[str, str] = json.loads(run.stdout.splitlines()[-1])
    return found
