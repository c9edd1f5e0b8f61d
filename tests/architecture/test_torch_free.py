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


COMPUTING = "quire.bench.kernels.subjects"
"""What `quire bench kernels` times; imported when a run begins."""


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
        and not module.name.startswith(f"{COMPUTING}.")
    ]
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL],
        input=json.dumps(names),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert json.loads(run.stdout.splitlines()[-1]) == {}
